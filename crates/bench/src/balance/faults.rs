//! Drivers that stop, lie or take memory back, QEMU that hangs, a guest that dies in the middle.
//!
//! | fault | made by | state of the driver |
//! |---|---|---|
//! | `no_driver` | the guest's kernel unloads the driver before anything is asked of it | `stuck` |
//! | `stopped` | `SIGSTOP` to QEMU | `silent` |
//! | `monitor_taken` | another client keeps QEMU's monitor | `silent` |
//! | `keeps_frames` | QEMU locks all memory: the balloon takes pages, and no frame comes back | `lies` |
//! | `dies` | `SIGKILL` to QEMU while its balloon is on its way | it is told no more |
//! | `takes_back` | the guest's kernel unloads the driver, which empties the balloon | `deflated` |
//!
//! Beside them is a guest without a fault, whose loan must come back as if there were no others.

use super::applying::Applying;
use super::rig::{KEPT, PATIENCE, Rig, id, pid, shell};
use crate::guardian::Guardian;
use anyhow::bail;
use lab::Guest;
use rustix::process::{Signal, kill_process};
use serde::Serialize;
use std::fmt::Write as _;
use std::time::{Duration, Instant};

/// Time within which a fault must be flagged: 20 s.
const FLAGGED_WITHIN_S: f64 = 20.0;
/// Memory that each guest uses and frees before anything is asked of it, in MiB. It lies in frames of the host.
const USED_MIB: u64 = 60;
/// Time between two queries of guests' sizes: 1 s. QEMU serves one client at a time, and the balancer queries it, too.
const LOOK: Duration = Duration::from_secs(1);
/// Tolerated distance of a size from the one that was asked for: 4 MiB.
const NEAR: u64 = 4 << 20;

/// A fault that was made, and how the balancer dealt with it.
#[derive(Debug, Serialize)]
pub struct Figures {
    /// The fault: `no_driver`, `stopped`, `monitor_taken`, `keeps_frames`, `dies` or `takes_back`.
    what: &'static str,
    /// The state by which it was flagged.
    state: &'static str,
    /// Seconds until it was flagged.
    flagged_s: f64,
    /// Whether no guest has less than its guarantee, and the one without a fault gave its loan back.
    held: bool,
}

impl Figures {
    /// Whether the fault did no harm, and was flagged in time.
    pub fn is_good(&self) -> bool {
        self.held && self.flagged_s <= FLAGGED_WITHIN_S
    }
}

/// The result as text.
pub fn text(faults: &[Figures]) -> String {
    let mut text = String::new();
    for Figures { what, state, flagged_s, held } in faults {
        let held = if *held { "all others as they should be" } else { "OTHERS WERE HURT" };
        let _ = writeln!(text, "{what:<14} {state:<9} flagged after {flagged_s:>5.1} s, {held}");
    }
    text
}

/// Makes all faults. The balancer's rules take one second for `hurry` seconds, so that its time limits pass sooner.
///
/// # Errors
/// Guests do not start, or a fault is not flagged at all.
pub fn run(dir: &std::path::Path, hurry: u32, guardian: &mut Guardian) -> anyhow::Result<Vec<Figures>> {
    let rig = Rig::saved(dir, guardian)?;
    let guests = rig.up(6, &[])?;
    let [well, no_driver, stopped, taken, dies, takes_back] = &guests[..] else { bail!("6 guests were wanted") };
    let locked = &rig.up(1, &["-overcommit", "mem-lock=on"])?[0];
    for guest in guests.iter().chain([locked]) {
        shell(guest, &format!("dd if=/dev/zero of=/tmp/x bs=1M count={USED_MIB} 2>/dev/null && rm /tmp/x"))?;
    }
    shell(no_driver, "rmmod virtio_balloon")?;
    kill_process(pid(stopped)?, Signal::STOP)?;
    let monitor = taken.qmp(PATIENCE)?;
    let began = Instant::now();
    let mut applying = rig.withdraw_all(hurry, guardian)?;
    let died = kill_on_its_way(&rig, dies)?;
    let mut flags = Vec::new();
    for (what, guest, state, since) in [
        ("no_driver", no_driver, "stuck", began),
        ("stopped", stopped, "silent", began),
        ("monitor_taken", taken, "silent", began),
        ("keeps_frames", locked, "lies", began),
        ("dies", dies, "gone", died),
    ] {
        flags.push((what, state, applying.wait_for(&id(guest), state, PATIENCE)? - since));
    }
    let files = applying.held()?;
    wait_until_kept(&rig, &[well, takes_back])?;
    let since = Instant::now();
    shell(takes_back, "rmmod virtio_balloon")?;
    flags.push(("takes_back", "deflated", applying.wait_for(&id(takes_back), "deflated", PATIENCE)? - since));
    let held = guarantees_hold(&rig)?;

    // Undoes the faults that can be undone. Their guests must work again, and no file or thread of the balancer be
    // left.
    kill_process(pid(stopped)?, Signal::CONT)?;
    drop(monitor);
    for guest in [stopped, taken] {
        applying.wait_for(&id(guest), "works", PATIENCE)?;
    }
    wait_until_kept(&rig, &[well, stopped, taken])?;
    check_leaks(&applying, files)?;
    let figures =
        |(what, state, after): (_, _, Duration)| Figures { what, state, flagged_s: after.as_secs_f64(), held };
    Ok(flags.into_iter().map(figures).collect())
}

/// Kills a guest's QEMU once the balancer's journal has the intent to tell the guest a size. Returns the moment.
fn kill_on_its_way(rig: &Rig, guest: &Guest) -> anyhow::Result<Instant> {
    let end = Instant::now() + PATIENCE;
    while !rig.journal()?.iter().any(|line| line["entry"] == "intent" && line["guest"] == id(guest)) {
        if Instant::now() > end {
            bail!("{} was told nothing", guest.name);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    kill_process(pid(guest)?, Signal::KILL)?;
    Ok(Instant::now())
}

/// Waits until each of these guests has its guaranteed size again: all that was lent to it is withdrawn.
fn wait_until_kept(rig: &Rig, guests: &[&Guest]) -> anyhow::Result<()> {
    let end = Instant::now() + PATIENCE;
    loop {
        let facts = rig.facts()?;
        let is_kept = |guest: &&Guest| {
            let found = facts.iter().find(|facts| facts.id == id(guest));
            found.is_some_and(|facts| facts.actual_bytes.abs_diff(KEPT) <= NEAR)
        };
        if guests.iter().all(is_kept) {
            return Ok(());
        }
        if Instant::now() > end {
            bail!("loans are not back: {facts:?}");
        }
        std::thread::sleep(LOOK);
    }
}

/// Whether every guest that still runs has at least its guaranteed size.
fn guarantees_hold(rig: &Rig) -> anyhow::Result<bool> {
    Ok(rig.facts()?.iter().all(|facts| facts.actual_bytes >= KEPT))
}

/// Checks that the process has no more open files and threads than `before`, when it waited for guests that were
/// silent.
fn check_leaks(applying: &Applying, before: (usize, usize)) -> anyhow::Result<()> {
    let end = Instant::now() + PATIENCE;
    // A round that is under way has some files and threads open for a moment.
    loop {
        let (files, threads) = applying.held()?;
        if files <= before.0 && threads <= before.1 {
            return Ok(());
        }
        if Instant::now() > end {
            bail!("files and threads were {before:?}, and are {:?}", (files, threads));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}
