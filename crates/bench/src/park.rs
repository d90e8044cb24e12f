//! `pagefold bench park`: guests of a lab that a service folds are parked, and woken one after the other.

use crate::balance::{Rig, group};
use crate::guardian::Guardian;
use crate::median::median;
use crate::serving::Serving;
use anyhow::Context;
use cli::exit::Outcome;
use cli::{output, say};
use guest::Survey;
use lend::{Ledger, NOTES_WITHIN, Parking, Shrunk};
use serde::Serialize;
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// RAM of each guest: 128 MiB.
const RAM: u64 = 128 << 20;
/// Longest time for folding what is equal: 2 min.
const FOLDED_WITHIN: Duration = Duration::from_secs(120);
/// Longest time for a woken guest to answer: 1 min.
const ANSWERED_WITHIN: Duration = Duration::from_secs(60);
/// Bytes of a mebibyte.
const MIB: f64 = 1048576.0;

/// Arguments of `pagefold bench park`.
#[derive(clap::Args)]
pub struct Args {
    /// Guests
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=200))]
    guests: u16,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Guests of one image.
#[derive(Serialize)]
struct Figures {
    image: &'static str,
    n: usize,
    /// Private memory of each in frames, the VMM's own included: before, and parked.
    private_before_mib_each: f64,
    mib_each: f64,
    swapped_mib_each: f64,
    /// Time from the beginning of the wake to an answer from inside.
    wake_p50_ms: f64,
    wake_p99_ms: f64,
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<Outcome> {
    let mut guardian = Guardian::start()?;
    let dir = std::env::temp_dir().join(format!("pagefold-bench-{}", std::process::id()));
    DirBuilder::new().mode(0o711).create(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    guardian.keep_dir(&dir)?;
    let found = measure(&dir, args.guests.into(), &mut guardian);
    let put_back = guardian.finish();
    let found = found?;
    put_back?;
    if args.json {
        output::line(serde_json::to_string_pretty(&serde_json::json!({"guests": [found]}))?)?;
    } else {
        output::line(format_args!(
            "{} {} guests: {:.1} MiB each, {:.1} parked, {:.1} in swap; woken to an answer in {:.0} ms p50, {:.0} p99",
            found.n,
            found.image,
            found.private_before_mib_each,
            found.mib_each,
            found.swapped_mib_each,
            found.wake_p50_ms,
            found.wake_p99_ms
        ))?;
    }
    Ok(Outcome::Done)
}

fn measure(dir: &Path, n: usize, guardian: &mut Guardian) -> anyhow::Result<Figures> {
    let serving = Serving::start(dir, &format!("[[group]]\nname = '{}'\n", group()), guardian)?;
    let rig = Rig::folded(dir, &serving, (RAM, RAM), guardian)?;
    say!("pagefold: park: {n} guests boot");
    let guests = rig.up(n, &[])?;
    let pids: Vec<u32> = guests.iter().flat_map(lab::Guest::pids).collect();
    let mut vms = Survey::take().context("cannot look for guests")?.guests(&pids, &[]);
    vms.retain(|vm| vm.kind.is_vm() && vm.pids.iter().any(|pid| pids.contains(pid)));
    let before: Vec<u64> = vms.iter().map(|vm| lend::private_and_swapped(vm).0).collect();
    let mut ledger = Ledger::open(serving.dir())?;
    let mut parked = Vec::new();
    for vm in &vms {
        let turn = ledger.take_turn()?;
        parked.push(Parking::lock(serving.dir(), NOTES_WITHIN)?.park(vm, &turn)?);
    }
    say!("pagefold: park: what is equal is folded");
    lend::until_folded(&vms, FOLDED_WITHIN);
    let shrunk: Vec<Shrunk> = vms.iter().zip(&before).map(|(vm, before)| lend::shrink(vm, *before)).collect();
    for one in &parked {
        Parking::lock(serving.dir(), NOTES_WITHIN)?.keep(one)?;
    }
    let mut woken_ms = Vec::new();
    for one in &parked {
        let guest = guests.iter().find(|guest| one.name == guest.name).context("a guest has another name")?;
        let began = Instant::now();
        Parking::lock(serving.dir(), NOTES_WITHIN)?.wake(one)?;
        guest.exec(&["true"], ANSWERED_WITHIN)?;
        woken_ms.push(began.elapsed().as_secs_f64() * 1000.0);
    }
    woken_ms.sort_by(f64::total_cmp);
    let each = |sum: u64| sum as f64 / n as f64 / MIB;
    Ok(Figures {
        image: "tiny",
        n,
        private_before_mib_each: each(before.iter().sum()),
        mib_each: each(shrunk.iter().map(|one| one.private_bytes).sum()),
        swapped_mib_each: each(shrunk.iter().map(|one| one.swapped_bytes).sum()),
        wake_p50_ms: median(&woken_ms),
        wake_p99_ms: woken_ms.get(woken_ms.len() * 99 / 100).copied().unwrap_or(f64::NAN),
    })
}
