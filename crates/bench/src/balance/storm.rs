//! A break storm: every guest writes all its folded pages at once, on a host that is nearly full.
//!
//! ```text
//!   guests start -> the same 96 MiB in each -> folded -> the host is cut to the guarantees and a little more
//!     -> pagefold balance lends what is left -> guests use it, and free it -> every guest overwrites its 96 MiB
//! ```
//!
//! The host is a control group with a memory limit, so that other programs of the machine are not touched. A process in
//! it that finds no memory is killed, as on a full host. The service, its pool and all guests lie in it.
//!
//! The floor is the usual one for so much folded memory: it grows with the number of guests.
//!
//! A storm that leaves the floor untouched shows nothing, and fails the bench.

use super::applying::Applying;
use super::rig::{self, PATIENCE, Rig, on_all};
use super::small_host::SmallHost;
use crate::guardian::Guardian;
use crate::serving::Serving;
use anyhow::bail;
use cli::say;
use lab::Guest;
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// RAM of each guest: 384 MiB.
const RAM: u64 = 384 << 20;
/// Guaranteed size of each guest: 208 MiB. A quarter of it is taken by the guest's own kernel.
const KEPT: u64 = 208 << 20;
/// Memory of each guest whose contents are the same in all guests: 96 MiB.
const SAME: u64 = 96 << 20;
/// Part of that memory which must be folded before the storm: 3/4.
const FOLDED: (u64, u64) = (3, 4);
/// Memory of the host that is left beside the guaranteed sizes, the floor, and the pool's copy of what is folded: 32
/// MiB.
const ABOVE: u64 = 32 << 20;
/// Before the storm, guests use what they are lent until no more than this is available above the floor: 64 MiB.
const USED_TO: u64 = 64 << 20;
/// Time limit for guests' sizes to stop changing once memory is lent: 60 s.
const SETTLE: Duration = Duration::from_secs(60);
/// Least time for which the host is watched from the begin of the storm on: 15 s.
const WATCHED: Duration = Duration::from_secs(15);
/// Time between two readings of guests' sizes, in which the balancer makes at least one round: 2.5 s.
const ROUND: Duration = Duration::from_millis(2500);
/// Time between two readings of how much is folded: 200 ms.
const LOOK: Duration = Duration::from_millis(200);
/// Longest time without a break that the host may be below its floor: 10 s. By then, withdrawn memory must be back.
const BACK_WITHIN_S: f64 = 10.0;
/// Shorter times above the floor do not count as a break: 1 s.
const ABOVE_FOR: Duration = Duration::from_secs(1);

/// The storm's figures.
#[derive(Debug, Serialize)]
pub struct Figures {
    /// Whether no guest went below its guarantee, none was killed, and all answer.
    pub guaranteed_held: bool,
    /// Growth of the host's swap in use.
    pub host_swap_bytes: u64,
    /// Seconds from the begin of the storm to the last moment at which less was available than is never lent; 0 if there was none.
    pub back_s: f64,
    /// Longest time in one go with less available than is never lent, in seconds. Gaps of less than a second count as none.
    pub below_s: f64,
    /// Seconds from the begin of the storm until every guest had written all of it.
    pub written_s: f64,
    /// Longest time for which one guest was paused, over all its pauses.
    pub paused_ms: u64,
    /// Pauses of guests.
    pub pauses: usize,
    /// Processes of the host that were killed for want of memory.
    pub kills: u64,
    /// Memory that was folded when the storm began.
    pub folded_bytes: u64,
    /// Memory that is never lent.
    pub floor_bytes: u64,
    /// Least memory that was available during the storm.
    pub least_available_bytes: u64,
}

impl Figures {
    /// Whether the host went below its floor in the storm, and no harm was done.
    pub fn is_good(&self) -> bool {
        let did_no_harm = self.guaranteed_held && self.host_swap_bytes == 0 && self.kills == 0;
        did_no_harm && self.is_undershot() && self.below_s <= BACK_WITHIN_S
    }

    /// Whether the host ever went below its floor, the memory that is never lent.
    fn is_undershot(&self) -> bool {
        self.least_available_bytes < self.floor_bytes
    }

    /// The result as text.
    pub fn text(&self) -> String {
        let mut text = String::new();
        let held = if self.guaranteed_held { "held" } else { "BROKEN" };
        let _ = writeln!(
            text,
            "storm: {} MiB were folded, and written in {:.1} s; guarantees {held}; below the floor for {:.1} s in one go, and for the last time after {:.1} s; {} MiB available at least, of a floor of {} MiB; \
             {} MiB swapped, {} killed; {} pauses, one guest for {} ms at most",
            self.folded_bytes >> 20,
            self.written_s,
            self.below_s,
            self.back_s,
            self.least_available_bytes >> 20,
            self.floor_bytes >> 20,
            self.host_swap_bytes >> 20,
            self.kills,
            self.pauses,
            self.paused_ms
        );
        if !self.is_undershot() {
            let _ = writeln!(text, "storm: the floor was not undershot, so this shows nothing");
        }
        text
    }
}

/// The times at which the host was below its floor, counted from the beginning of the storm.
#[derive(Debug, Default)]
struct Below {
    /// Beginning of the last unbroken time below the floor.
    since: Duration,
    last: Option<Duration>,
    longest: Duration,
}

impl Below {
    /// Notes that the host is below its floor at this moment, which is later than all moments before.
    fn note(&mut self, now: Duration) {
        if self.last.is_none_or(|last| now - last >= ABOVE_FOR) {
            self.since = now;
        }
        self.last = Some(now);
        self.longest = self.longest.max(now - self.since);
    }
}

/// Makes the storm, with this number of guests.
///
/// # Errors
/// Guests or the service do not start, or nothing is folded.
pub fn run(dir: &Path, guests: usize, guardian: &mut Guardian) -> anyhow::Result<Figures> {
    let host = SmallHost::make("storm", guardian)?;
    let config = format!("[[group]]\nname = '{}'\n", rig::group());
    let (mut serving, rig, guests) = host.inside(|| {
        let serving = Serving::start(dir, &config, guardian)?;
        let rig = Rig::folded(dir, &serving, (RAM, KEPT), guardian)?;
        let guests = rig.up(guests, &[])?;
        Ok((serving, rig, guests))
    })?;
    say!("pagefold: storm: {} guests are folded", guests.len());
    on_all(&guests, |_| fill())?;
    let folded_bytes = wait_until_folded(&rig, guests.len() as u64)?;
    let (mut applying, floor_bytes) = cut_and_lend(&host, &rig, &guests, guardian)?;
    let figures = storm(&host, &rig, &guests, (floor_bytes, folded_bytes))?;
    applying.check()?;
    drop(applying);
    rig.down()?;
    serving.end()?;
    Ok(figures)
}

/// Limits the host's memory to what it uses besides guests, the guaranteed sizes, the pool's copy, the floor and a
/// little more. Then has memory lent, and guests use it. Returns the balancer and the floor.
fn cut_and_lend(
    host: &SmallHost,
    rig: &Rig,
    guests: &[Guest],
    guardian: &mut Guardian,
) -> anyhow::Result<(Applying, u64)> {
    let count = guests.len() as u64;
    let facts = rig.facts()?;
    let resident: u64 = facts.iter().map(|guest| guest.resident_bytes).sum();
    let overhead = host.used_bytes()?.saturating_sub(resident.saturating_sub((count - 1) * SAME));
    let other = overhead + count * KEPT + SAME + ABOVE;
    let floor = lend::usual_floor_bytes(other, &facts);
    host.limit(other + floor)?;
    let applying = rig.lend_within(host.group(), floor, guardian)?;
    wait_until_steady(rig)?;
    use_loans(host, guests, floor)?;
    Ok((applying, floor))
}

/// Has guests use what they are lent, one after another, until little more than the floor is available.
///
/// What a guest has written and freed stays in page frames of the host until the balloon takes it, so the balancer has
/// something to withdraw. The bytes are random, so that they are not folded meanwhile.
fn use_loans(host: &SmallHost, guests: &[Guest], floor: u64) -> anyhow::Result<()> {
    let left = || host.available_bytes().map(|available| available.saturating_sub(floor + USED_TO) >> 20);
    for guest in guests {
        let most = left()?;
        if most == 0 {
            return Ok(());
        }
        let script = format!(
            "f=$(awk '/MemAvailable/ {{print int($2 / 1024) - 16}}' /proc/meminfo); [ $f -lt {most} ] || f={most}; \
             [ $f -lt 1 ] || dd if=/dev/urandom of=/tmp/x bs=1M count=$f 2>/dev/null; rm -f /tmp/x"
        );
        rig::shell(guest, &script)?;
    }
    if left()? > 0 {
        let available = host.available_bytes()? >> 20;
        say!("pagefold: storm: guests do not use all that they are lent: {available} MiB are available still");
    }
    Ok(())
}

/// Waits until two readings of the guests' sizes are the same: no more memory is lent.
fn wait_until_steady(rig: &Rig) -> anyhow::Result<()> {
    let (end, mut before) = (Instant::now() + SETTLE, Vec::new());
    while Instant::now() < end {
        let sizes = sizes(rig)?;
        if sizes == before {
            break;
        }
        before = sizes;
        std::thread::sleep(ROUND);
    }
    Ok(())
}

/// Script that fills a file with pages that differ from one another and are the same in all guests: pieces of 4 MiB of
/// one sequence, each from another byte on.
fn fill() -> String {
    let (base, copies) = (4 << 20, SAME / (4 << 20));
    format!(
        "mount -o remount,size=95% /tmp; seq 10000000 99999999 | head -c {} > /tmp/base; for i in $(seq {copies}); do \
         dd if=/tmp/base bs=64k iflag=skip_bytes skip=$((i * 128)) count={} 2>/dev/null; done > /tmp/same; rm /tmp/base",
        base + 4096,
        base >> 16
    )
}

/// Script that moves the file's content by a few bytes, by others in each guest. So every page is written, and equals
/// no other.
fn sweep(n: usize) -> String {
    format!("tail -c +{} /tmp/same | dd of=/tmp/same bs=64k conv=notrunc 2>/dev/null", n * 4 + 1)
}

fn storm(
    host: &SmallHost,
    rig: &Rig,
    guests: &[Guest],
    (floor_bytes, folded_bytes): (u64, u64),
) -> anyhow::Result<Figures> {
    let swap = || host::total_swap_bytes().saturating_sub(host::free_swap_bytes());
    let swap_before = swap();
    let pauses_before = pauses(rig)?.len();
    let began = Instant::now();
    let done = AtomicBool::new(false);
    let (mut least, mut below) = (u64::MAX, Below::default());
    let written = std::thread::scope(|scope| {
        let writing = scope.spawn(|| {
            let written = on_all(guests, |n| sweep(n + 1));
            done.store(true, Ordering::Relaxed);
            written.map(|()| began.elapsed())
        });
        while !done.load(Ordering::Relaxed) || began.elapsed() < WATCHED {
            let available = host.available_bytes().unwrap_or(0);
            least = least.min(available);
            if available < floor_bytes {
                below.note(began.elapsed());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        writing.join().map_err(|_| anyhow::anyhow!("a thread of the bench has failed"))
    })?;
    let sizes = sizes(rig)?;
    let kept = sizes.len() == guests.len() && sizes.iter().all(|size| *size >= KEPT);
    let answer = on_all(guests, |_| "true".into()).is_ok();
    let paused = pauses(rig)?.split_off(pauses_before);
    Ok(Figures {
        guaranteed_held: kept && answer && written.is_ok(),
        written_s: written.unwrap_or_default().as_secs_f64(),
        host_swap_bytes: swap().saturating_sub(swap_before),
        back_s: below.last.map_or(0.0, |last| last.as_secs_f64()),
        below_s: below.longest.as_secs_f64(),
        paused_ms: longest(&paused),
        pauses: paused.len(),
        kills: host.kills(),
        folded_bytes,
        floor_bytes,
        least_available_bytes: least,
    })
}

/// Ends of pauses in the balancer's journal: the guest, and how long it was paused, in milliseconds.
fn pauses(rig: &Rig) -> anyhow::Result<Vec<(String, u64)>> {
    let end = |line: &Value| {
        let guest = line["guest"].as_str().filter(|_| line["entry"] == "resume")?;
        Some((guest.to_owned(), line["paused_ms"].as_u64()?))
    };
    Ok(rig.journal()?.iter().filter_map(end).collect())
}

/// Longest time for which one guest was paused, over all its pauses, in milliseconds.
fn longest(pauses: &[(String, u64)]) -> u64 {
    let mut by_guest: BTreeMap<&str, u64> = BTreeMap::new();
    for (guest, ms) in pauses {
        *by_guest.entry(guest).or_default() += ms;
    }
    by_guest.into_values().max().unwrap_or(0)
}

/// Sizes of all guests.
fn sizes(rig: &Rig) -> anyhow::Result<Vec<u64>> {
    Ok(rig.facts()?.iter().map(|guest| guest.actual_bytes).collect())
}

/// Waits until enough of the guests' memory is folded. Returns how much is folded, in bytes.
fn wait_until_folded(rig: &Rig, guests: u64) -> anyhow::Result<u64> {
    let wanted = guests * SAME / FOLDED.1 * FOLDED.0;
    let end = Instant::now() + PATIENCE * 2;
    loop {
        let folded: u64 = rig.facts()?.iter().map(|guest| guest.folded_bytes).sum();
        if folded >= wanted {
            return Ok(folded);
        }
        if Instant::now() > end {
            bail!("only {} MiB are folded, and {} were to be", folded >> 20, wanted >> 20);
        }
        std::thread::sleep(LOOK);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn longest_time_below_the_floor_takes_short_gaps_for_none() {
        let mut below = Below::default();
        for ms in [1000, 1050, 1900, 2850, 4000, 4500] {
            below.note(Duration::from_millis(ms));
        }
        assert_eq!((below.longest.as_millis(), below.last.unwrap().as_millis()), (1850, 4500));
    }
}
