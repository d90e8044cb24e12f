//! A guest that writes at once after it was given memory back: how long its first writes take.
//!
//! ```text
//!   the guest writes 160 MiB, and frees them
//!     none:      it writes them again                       their frames are the guest's still
//!     reporting: its host has taken them back: it writes     each 2 MiB are the host's to give
//!     balloon:   its balloon has taken them; the balloon is told to give them back, and at once the guest writes
//! ```
//!
//! A Debian guest of 512 MiB, whose MariaDB and Apache rest. A write is one of 64 KiB into fresh memory of a process.

use super::rig::{BALLOON, PATIENCE, Rig};
use crate::guardian::Guardian;
use anyhow::{Context, bail};
use cli::say;
use lab::{Guest, Image};
use serde::Serialize;
use serde_json::json;
use std::fmt::Write as _;
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// RAM of the guest: 512 MiB.
const RAM: u64 = 512 << 20;
/// Memory that the guest writes, frees, and writes again: 160 MiB.
const WRITTEN: u64 = 160 << 20;
/// Part of the freed memory that the balloon device has taken before the guest writes again: 3/4.
const TAKEN: (u64, u64) = (3, 4);
/// Balloon device of a guest that reports free pages.
const REPORTING: &str = "virtio-balloon-pci,deflate-on-oom=on,free-page-reporting=on";
/// Rounds of each arm.
const ROUNDS: usize = 3;
/// Longest time for a device to take memory: 1 min.
const TAKEN_WITHIN: Duration = Duration::from_secs(60);
/// Program for the guest. It writes pieces of 64 KiB and prints the times of the writes in microseconds: the median,
/// the 99th percentile, the longest, and the sum.
const WRITES: &str = "perl -MTime::HiRes=clock_gettime,CLOCK_MONOTONIC -e '($n, $c) = (shift, 65536); for (1..$n) { \
     $b = clock_gettime(CLOCK_MONOTONIC); push @m, \"\\1\" x $c; push @t, clock_gettime(CLOCK_MONOTONIC) - $b } \
     $s += $_ for @t; @t = sort { $a <=> $b } @t; \
     printf \"%d %d %d %d\\n\", map { $_ * 1e6 } $t[$n / 2], $t[$n * 0.99], $t[-1], $s'";

/// First writes of one arm: medians of the rounds.
#[derive(Debug, Serialize)]
pub struct Figures {
    /// `none`, `reporting` or `balloon`.
    name: &'static str,
    /// Time of a write of 64 KiB.
    p50_us: u64,
    /// 99th percentile of these times.
    p99_us: u64,
    /// The longest of these times.
    longest_us: u64,
    /// Time of all of them.
    all_ms: u64,
    /// RAM that the host had back before the guest wrote again.
    taken_bytes: u64,
    /// Each round's times: p50, p99, longest, and all, in microseconds.
    rounds: Vec<[u64; 4]>,
}

/// The result as text.
pub fn text(all: &[Figures]) -> String {
    all.iter().fold(String::new(), |mut text, figures| {
        let Figures { name, p50_us, p99_us, longest_us, all_ms, taken_bytes, .. } = figures;
        let _ = writeln!(
            text,
            "{name:<10} first writes of 64 KiB: {p50_us} us (p50), {p99_us} (p99), {longest_us} (longest), {all_ms} ms for all; \
             {} MiB were the host's",
            taken_bytes >> 20
        );
        text
    })
}

/// Measures each arm. The arms without free page reporting use one guest, and the one with it another.
///
/// # Errors
/// A guest does not come up, or its memory is not taken.
pub fn run(dir: &Path, guardian: &mut Guardian) -> anyhow::Result<Vec<Figures>> {
    let mut all = Vec::new();
    for (name, device, arms) in [("b", BALLOON, &["none", "balloon"][..]), ("r", REPORTING, &["reporting"])] {
        let dir = dir.join(name);
        DirBuilder::new().mode(0o711).create(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
        let mut rig = Rig::new(&dir, guardian)?;
        rig.set_ram(RAM);
        rig.set_image(Image::Debian);
        let guest = rig.up_with(1, device, &[])?.pop().context("no guest")?;
        for arm in arms {
            say!("pagefold: stall: {arm}");
            all.push(measure(arm, &guest)?);
        }
        rig.down()?;
    }
    Ok(all)
}

fn measure(name: &'static str, guest: &Guest) -> anyhow::Result<Figures> {
    let (mut rounds, mut taken_bytes) = (Vec::new(), u64::MAX);
    for _ in 0..ROUNDS {
        writes(guest)?;
        let before = resident(guest)?;
        match name {
            "balloon" => {
                balloon(guest, RAM - WRITTEN)?;
                wait(guest, "the balloon takes its memory", || {
                    Ok(balloon_size(guest)? <= RAM - WRITTEN / TAKEN.1 * TAKEN.0)
                })?;
            }
            "reporting" => {
                wait(guest, "free pages are reported", || Ok(resident(guest)? + WRITTEN / TAKEN.1 * TAKEN.0 <= before))?
            }
            _ => {}
        }
        taken_bytes = taken_bytes.min(before.saturating_sub(resident(guest)?));
        if name == "balloon" {
            balloon(guest, RAM)?;
        }
        rounds.push(writes(guest)?);
        if name == "balloon" {
            wait(guest, "the balloon gives its memory back", || Ok(balloon_size(guest)? >= RAM))?;
        }
    }
    let median = |n: usize| {
        let mut values: Vec<u64> = rounds.iter().map(|round| round[n]).collect();
        values.sort_unstable();
        values[values.len() / 2]
    };
    let [p50_us, p99_us, longest_us, all_us] = [0, 1, 2, 3].map(median);
    Ok(Figures { name, p50_us, p99_us, longest_us, all_ms: all_us / 1000, taken_bytes, rounds })
}

/// Has a process in the guest write fresh memory and end. Returns its four times.
fn writes(guest: &Guest) -> anyhow::Result<[u64; 4]> {
    let script = format!("{WRITES} {}", WRITTEN >> 16);
    let output = guest.exec(&["sh", "-c", &script], PATIENCE)?;
    let text = String::from_utf8_lossy(&output.stdout);
    let times: Vec<u64> = text.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    let told = || format!("{}{}", cli::printable(&text), cli::printable(&String::from_utf8_lossy(&output.stderr)));
    times.try_into().map_err(|_| anyhow::anyhow!("the guest's writes have no times: {}", told()))
}

/// Tells the guest's balloon the size that the guest is to have.
fn balloon(guest: &Guest, bytes: u64) -> anyhow::Result<()> {
    guest.qmp(PATIENCE)?.execute("balloon", json!({"value": bytes})).map(drop).context("cannot set a balloon")
}

fn balloon_size(guest: &Guest) -> anyhow::Result<u64> {
    let answer = guest.qmp(PATIENCE)?.execute("query-balloon", json!({}))?;
    answer["actual"].as_u64().context("QEMU told no size of the balloon")
}

/// Memory of the guest's QEMU in page frames, in bytes.
fn resident(guest: &Guest) -> anyhow::Result<u64> {
    let pid = guest.pid.context("a guest without a process")?;
    Ok(page::pages_to_bytes(host::MemoryCounters::of(pid)?.resident_pages))
}

fn wait(guest: &Guest, what: &str, mut is_so: impl FnMut() -> anyhow::Result<bool>) -> anyhow::Result<()> {
    let begin = Instant::now();
    while !is_so()? {
        if begin.elapsed() > TAKEN_WITHIN {
            bail!("{} in {}: not within {} s", what, guest.name, TAKEN_WITHIN.as_secs());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}
