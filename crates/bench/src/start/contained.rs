//! Containers of a warmed-up program: forked by a zygote, restored from a checkpoint, and started by LXC.
//!
//! ```text
//!   zygote     a program warms up, and forks: each child has a container of its own, and shares what nobody writes
//!   restored   each page of these processes is written anew with what it holds: copies, as CRIU's restore leaves them
//!              -> pagefold attach -> the part of the sharing that is there again
//!   lxc        lxc-start of the same program, which warms up in each container
//!              -> pagefold attach
//! ```
//!
//! The pages are written from outside, while the processes sleep. Nothing else in them changes.

mod apps;

use crate::guardian::Guardian;
use crate::ksm::folding::{self, Folding as Service, GROUP};
use crate::ksm::merger::Merger;
use crate::serving;
use anyhow::Context;
use apps::{Lxc, Zygote};
use audit::contents::Places;
use cli::say;
use host::{Mapping, Pagemap};
use page::PAGE_BYTES;
use serde::Serialize;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Times since `pagefold attach` began at which frames are counted, in seconds.
const COUNTS: [u64; 4] = [5, 10, 20, 30];

/// When this share of the memory is shared again, or frames are no fewer than this share of the last count, counting
/// ends: 99%.
const ALL: f64 = 0.99;

/// Containers that were started in one way.
#[derive(Serialize)]
pub struct Contained {
    /// `zygote`, `restored` or `lxc`.
    pub arm: &'static str,
    /// Number of containers.
    pub n: u32,
    /// From the beginning of the first start until all were ready; absent of copies, which were made of containers that ran.
    pub all_answered_s: Option<f64>,
    /// Frames of all, with the zygote's, for each container.
    pub bytes_each: f64,
    /// From the beginning of `pagefold attach` to its end; absent where nothing is attached.
    pub attach_s: Option<f64>,
    /// Frames since then, over time.
    pub attached: Vec<Attached>,
}

/// Containers some time after `pagefold attach` began.
#[derive(Serialize)]
pub struct Attached {
    /// Time since attaching began.
    pub seconds: u64,
    /// Frames of all and of the pool, for each container.
    pub bytes_each: f64,
    /// Part of the sharing that the zygote's containers had before they had copies; absent of containers that never shared.
    pub shared_again: Option<f64>,
}

/// Starts `n` containers in each way. A way for which the host lacks something is left out.
///
/// # Errors
/// A container does not come up, or a process cannot be attached.
pub fn run(n: u32, dir: &Path, guardian: &mut Guardian) -> anyhow::Result<Vec<Contained>> {
    let python = apps::interpreter()?;
    let zygote = Zygote::start(&python, n)?;
    let arm = |arm, frames: u64| Contained {
        arm,
        n,
        all_answered_s: None,
        bytes_each: page::pages_to_bytes(frames) as f64 / f64::from(n),
        attach_s: None,
        attached: Vec::new(),
    };
    let shared = frames(&zygote.pids, &[])?;
    let mut all = vec![Contained { all_answered_s: Some(zygote.all_answered_s), ..arm("zygote", shared) }];
    zygote.pids.iter().try_for_each(|pid| copy_pages(*pid))?;
    let copied = frames(&zygote.pids, &[])?;
    let (attach_s, attached) = attach(&zygote.pids, n, Some((shared, copied)), (dir, &mut *guardian))?;
    drop(zygote);
    all.push(Contained { attach_s: Some(attach_s), attached, ..arm("restored", copied) });
    let lxc = match Lxc::start(&python, n, dir, guardian) {
        Err(why) if why.is::<cli::exit::Stop>() => {
            say!("pagefold: containers of LXC are left out: {why}");
            return Ok(all);
        }
        started => started?,
    };
    let begun = frames(&lxc.pids, &[])?;
    let (attach_s, attached) = attach(&lxc.pids, n, None, (dir, guardian))?;
    let all_answered_s = Some(lxc.all_answered_s);
    all.push(Contained { all_answered_s, attach_s: Some(attach_s), attached, ..arm("lxc", begun) });
    Ok(all)
}

/// Whether counting can end: nearly all memory is shared again, or, for containers that never shared, page frames have
/// not become fewer.
fn is_settled(attached: &[Attached]) -> bool {
    match attached {
        [.., Attached { shared_again: Some(part), .. }] => *part > ALL,
        [.., before, last] => last.bytes_each > before.bytes_each * ALL,
        _ => false,
    }
}

/// Page frames that these processes take, and the pools of the services `owners`.
fn frames(pids: &[u32], owners: &[u32]) -> anyhow::Result<u64> {
    Ok(Places::of(pids, owners)?.taken().frames)
}

/// Writes each private page of a process with its own content, from outside, so that the page is no longer shared. The
/// process has to sleep meanwhile.
fn copy_pages(pid: u32) -> anyhow::Result<()> {
    let path = format!("/proc/{pid}/mem");
    let memory = File::options().read(true).write(true).open(&path).with_context(|| format!("cannot open {path}"))?;
    let (pagemap, mut bytes) = (Pagemap::open(pid)?, [0; PAGE_BYTES]);
    for mapping in Mapping::list(pid)?.iter().filter(|mapping| mapping.write && !mapping.shared) {
        for range in pagemap.private_ranges(mapping.start, mapping.end)? {
            for at in (0..range.pages).map(|page| range.start.add_pages(page)) {
                let copied = memory.read_exact_at(&mut bytes, at.0).and_then(|()| memory.write_all_at(&bytes, at.0));
                copied.with_context(|| format!("cannot write a page of process {pid} anew"))?;
            }
        }
    }
    Ok(())
}

/// Attaches to processes, and counts page frames at the times `COUNTS`. `sharing` are the frames while all was
/// shared, and when nothing was. Returns the seconds that attaching took, and the counts.
fn attach(
    pids: &[u32],
    n: u32,
    sharing: Option<(u64, u64)>,
    (dir, guardian): (&Path, &mut Guardian),
) -> anyhow::Result<(f64, Vec<Attached>)> {
    let mut service = Service::start(dir, true, guardian)?;
    service.set(folding::folds())?;
    let begin = Instant::now();
    let numbers: Vec<String> = pids.iter().map(u32::to_string).collect();
    let words = ["attach", "--group", GROUP, "--all-anonymous"].into_iter().chain(numbers.iter().map(String::as_str));
    serving::pagefold(&words.collect::<Vec<_>>(), service.dir())?;
    let attach_s = begin.elapsed().as_secs_f64();
    let mut attached = Vec::new();
    for seconds in COUNTS {
        sleep((begin + Duration::from_secs(seconds)).saturating_duration_since(Instant::now()));
        let now = frames(pids, &service.own_pids()?)?;
        let shared_again =
            sharing.map(|(shared, copied)| (copied as f64 - now as f64) / (copied as f64 - shared as f64));
        let bytes_each = page::pages_to_bytes(now) as f64 / f64::from(n);
        attached.push(Attached { seconds, bytes_each, shared_again });
        if is_settled(&attached) {
            break;
        }
    }
    // Members are detached before their service ends.
    let words = ["detach"].into_iter().chain(numbers.iter().map(String::as_str));
    serving::pagefold(&words.collect::<Vec<_>>(), service.dir())?;
    service.off()?;
    Ok((attach_s, attached))
}
