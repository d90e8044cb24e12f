//! A break storm: every guest writes all its folded pages at once, on a host that is nearly full.
//!
//! ```text
//!   guests start -> the same 48 MiB in each -> folded -> all else that they have is used and freed
//!     -> the host is cut to what is in use and a little more -> pagefold balance runs -> every guest overwrites its 48 MiB
//! ```
//!
//! The host is a control group with a memory limit, so that other programs of the machine are not touched. A process in
//! it that finds no memory is killed, as on a full host. The service, its pool and all guests lie in it.

use super::applying::Applying;
use super::rig::{self, PATIENCE, Rig, shell};
use super::small_host::SmallHost;
use crate::guardian::Guardian;
use crate::serving::Serving;
use anyhow::bail;
use cli::say;
use lab::Guest;
use serde::Serialize;
use serde_json::Value;
use std::fmt::Write as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// RAM of each guest: 256 MiB.
const RAM: u64 = 256 << 20;
/// Guaranteed size of each guest: 160 MiB. Its kernel takes a third of that.
const KEPT: u64 = 160 << 20;
/// Number of guests.
const GUESTS: usize = 4;
/// Memory of each guest that is the same in all, in MiB.
const SAME_MIB: u64 = 48;
/// Part of it that must be folded before the storm: 3/4.
const FOLDED: (u64, u64) = (3, 4);
/// Memory of the host that is never lent: 96 MiB.
const FLOOR: u64 = 96 << 20;
/// Memory of the host above its floor when the storm begins: 32 MiB.
const ABOVE: u64 = 32 << 20;
/// Time for loans to be made and used: 15 s.
const SETTLE: Duration = Duration::from_secs(15);
/// Least time for which the host is watched from the begin of the storm on: 20 s.
const WATCHED: Duration = Duration::from_secs(20);
/// Time within which loans must be back: 10 s.
const BACK_WITHIN_S: f64 = 10.0;

/// The storm's figures.
#[derive(Debug, Serialize)]
pub struct Figures {
    /// Whether no guest went below its guarantee, none was killed, and all answer.
    guaranteed_held: bool,
    /// Growth of the host's swap in use.
    host_swap_bytes: u64,
    /// Seconds from the begin of the storm to the last moment at which less was available than is never lent; 0 if there was none.
    back_s: f64,
    /// Time for which guests were paused. `pagefold balance` pauses none.
    paused_ms: u64,
    /// Processes of the host that were killed for want of memory.
    kills: u64,
    /// Memory that was folded when the storm began.
    folded_bytes: u64,
    /// Least memory that was available during the storm.
    least_available_bytes: u64,
}

impl Figures {
    /// Whether the storm did no harm.
    pub fn is_good(&self) -> bool {
        self.guaranteed_held && self.host_swap_bytes == 0 && self.kills == 0 && self.back_s <= BACK_WITHIN_S
    }

    /// The result as text.
    pub fn text(&self) -> String {
        let mut text = String::new();
        let held = if self.guaranteed_held { "held" } else { "BROKEN" };
        let _ = writeln!(
            text,
            "storm: {} MiB were folded; guarantees {held}; loans back after {:.1} s; {} MiB available at least; \
             {} MiB swapped, {} killed, paused for {} ms",
            self.folded_bytes >> 20,
            self.back_s,
            self.least_available_bytes >> 20,
            self.host_swap_bytes >> 20,
            self.kills,
            self.paused_ms
        );
        text
    }
}

/// Makes the storm.
///
/// # Errors
/// Guests or the service do not start, or nothing is folded.
pub fn run(dir: &Path, guardian: &mut Guardian) -> anyhow::Result<Figures> {
    let host = SmallHost::make(guardian)?;
    let config = format!("[[group]]\nname = '{}'\n", rig::group());
    let (mut serving, rig, guests) = host.inside(|| {
        let serving = Serving::start(dir, &config, guardian)?;
        let rig = Rig::folded(dir, &serving, (RAM, KEPT), guardian)?;
        let guests = rig.up(GUESTS, &[])?;
        Ok((serving, rig, guests))
    })?;
    say!("pagefold: storm: {GUESTS} guests are folded");
    on_all(&guests, &format!("seq 10000000 20000000 | head -c {} > /tmp/same", SAME_MIB << 20))?;
    let folded_bytes = wait_until_folded(&rig)?;
    let mut applying = cut_and_lend(&host, &rig, &guests, guardian)?;
    let figures = storm(&host, &rig, &guests, folded_bytes)?;
    applying.check()?;
    drop(applying);
    rig.down()?;
    serving.end()?;
    Ok(figures)
}

/// Cuts the host to the guarantees, its floor and a little more. Then loans are made, and used.
fn cut_and_lend(host: &SmallHost, rig: &Rig, guests: &[Guest], guardian: &mut Guardian) -> anyhow::Result<Applying> {
    let resident: u64 = numbers(&rig.facts()?, "resident_bytes").iter().sum();
    let folded_once: u64 = SAME_MIB << 20;
    let overhead = host.used_bytes()?.saturating_sub(resident.saturating_sub((GUESTS as u64 - 1) * folded_once));
    host.limit(overhead + GUESTS as u64 * KEPT + FLOOR + ABOVE)?;
    let applying = rig.lend_within(host.group(), FLOOR, guardian)?;
    // Loans that are too large come back first.
    std::thread::sleep(SETTLE);
    let free = "f=$(awk '/MemFree/ {print int($2 / 1024)}' /proc/meminfo); [ $f -gt 40 ] || exit 0; ";
    on_all(guests, &format!("{free} dd if=/dev/urandom of=/tmp/x bs=1M count=$((f - 32)) 2>/dev/null; rm /tmp/x"))?;
    std::thread::sleep(SETTLE);
    Ok(applying)
}

fn storm(host: &SmallHost, rig: &Rig, guests: &[Guest], folded_bytes: u64) -> anyhow::Result<Figures> {
    let swap = || host::total_swap_bytes().saturating_sub(host::free_swap_bytes());
    let swap_before = swap();
    let write = format!("dd if=/dev/urandom of=/tmp/same bs=1M count={SAME_MIB} conv=notrunc 2>/dev/null");
    let began = Instant::now();
    let done = AtomicBool::new(false);
    let (mut least, mut last_below) = (u64::MAX, None);
    let written = std::thread::scope(|scope| {
        let writing = scope.spawn(|| {
            let written = on_all(guests, &write);
            done.store(true, Ordering::Relaxed);
            written
        });
        while !done.load(Ordering::Relaxed) || began.elapsed() < WATCHED {
            let available = host.available_bytes().unwrap_or(0);
            least = least.min(available);
            if available < FLOOR {
                last_below = Some(began.elapsed());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        writing.join().map_err(|_| anyhow::anyhow!("a thread of the bench has failed"))
    })?;
    let facts = rig.facts()?;
    let kept = facts.len() == guests.len() && numbers(&facts, "actual_bytes").iter().all(|size| *size >= KEPT);
    let answer = on_all(guests, "true").is_ok();
    Ok(Figures {
        guaranteed_held: kept && answer && written.is_ok(),
        host_swap_bytes: swap().saturating_sub(swap_before),
        back_s: last_below.map_or(0.0, |after| after.as_secs_f64()),
        paused_ms: 0,
        kills: host.kills(),
        folded_bytes,
        least_available_bytes: least,
    })
}

fn numbers(facts: &[Value], field: &str) -> Vec<u64> {
    facts.iter().map(|guest| guest[field].as_u64().unwrap_or(0)).collect()
}

/// Waits until enough is folded. Returns how much is.
fn wait_until_folded(rig: &Rig) -> anyhow::Result<u64> {
    let wanted = GUESTS as u64 * (SAME_MIB << 20) / FOLDED.1 * FOLDED.0;
    let end = Instant::now() + PATIENCE * 2;
    loop {
        let folded: u64 = numbers(&rig.facts()?, "folded_bytes").iter().sum();
        if folded >= wanted {
            return Ok(folded);
        }
        if Instant::now() > end {
            bail!("only {} MiB are folded, and {} were to be", folded >> 20, wanted >> 20);
        }
    }
}

/// Runs a script in all guests at once.
fn on_all(guests: &[Guest], script: &str) -> anyhow::Result<()> {
    std::thread::scope(|scope| {
        let running: Vec<_> = guests.iter().map(|guest| scope.spawn(move || shell(guest, script))).collect();
        running.into_iter().try_for_each(|one| one.join().map_err(|_| anyhow::anyhow!("a thread has failed"))?)
    })
}
