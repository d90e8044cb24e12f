//! Forked children that enrol by themselves: servers that fork worker processes hold most of their memory in these.
//!
//! ```text
//!   parent: fork hook        child: the thread that forked                agent's thread of the child
//!      | known memory,
//!      | under the lock
//!      v
//!    fork ------------------> an agent of its own: arena, table, locks
//!      |                      a thread is started ----------------------> opens its files: only root may, some
//!      |                      <-----------------------------------------  sleeps a few seconds
//!      v                      goes on; hooks keep the table               | asks the kernel what became of known memory
//!   goes on                                                               v connects, as any member does
//!                             executes a program, or ends: the thread is gone with it
//! ```
//!
//! **Why at the fork.** Only a thread of the child can start the agent without a signal that the program would notice.
//! After the fork, only a call of the program could start it, and a process that waits for work makes no call.
//!
//! **Nothing of the parent's agent is taken over** but the list of known memory, which the forking thread has copied
//! before the fork. All other data may be inconsistent: a fork copies page by page while other threads of the parent go
//! on. No lock can be held around the fork: a thread that holds malloc's lock may wait for our lock, and `fork` waits
//! for malloc's. So locks, arena and table begin anew while the child has one thread.
//!
//! **Mappings of the pool** that the child inherits stay as they are. The keeper follows them, and the lease that the
//! child inherits keeps their slots. The child's table forgets them, and they are not folded again. All other memory of
//! the child can be folded, as in any member.
//!
//! **Cost.** The agent's thread makes the fork and the end of a child slower. So children get one only at a bounded
//! rate ([`STEP`]), and it connects only if the child has enough memory of its own. Other children stay inert, as all
//! children do that are made without the C library's `fork`.

use crate::{hooks, resign, start};
use agent::table::{self, Advice, Shut, Traits};
use agent::{follow, process, spawn};
use page::PageRange;
use rustix::process::{Resource, getrlimit};
use rustix::time::{ClockId, clock_gettime};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Shortest average time between two children that get an agent, in milliseconds. Measured: such a child costs less
/// than 0.1 ms of processor time, so all of them together take less than 1/1000 of it.
const STEP: u64 = 100;
/// Number of children that get an agent one right after the other.
const BURST: u64 = 64;
/// Least private memory for which a child enrols, in KiB: twice what its agent takes.
const LEAST_KIB: u64 = 2048;
/// Longest time between two checks of how much memory the child has written: 1 min.
const LOOKS_AT_MOST: Duration = Duration::from_secs(60);

/// Until when the time for children's agents is used up, at one [`STEP`] each, in milliseconds of the monotonic clock.
/// A child inherits this value, so a chain of forks is bounded, too.
static SPENT: AtomicU64 = AtomicU64::new(0);

/// The memory that a child's table is going to know, copied before the fork.
pub struct Known(Vec<(PageRange, Traits)>);

/// Copies the list of known memory for a child that is about to be forked; `None` if the child is to stay inert.
pub fn prepare() -> Option<Known> {
    if start::children_after().is_none() || follow::has_lost_track() || !may_spend() {
        return None;
    }
    // An arena for the child would take up address space, which is limited in this program.
    if getrlimit(Resource::As).current.is_some() {
        return None;
    }
    let table = table::lock();
    let known = table.known(table::everything()).into_iter().filter(|(_, traits)| !traits.advice.dont_fork);
    Some(Known(known.map(|(range, traits)| (range, inherited(traits))).collect()))
}

/// Traits that a child's copy of memory has.
const fn inherited(traits: Traits) -> Traits {
    Traits { shut: traits.shut & !(Shut::Locked as u8), advice: Advice { dont_fork: false, ..traits.advice }, ..traits }
}

fn may_spend() -> bool {
    let now = clock_gettime(ClockId::MonotonicCoarse);
    let now = now.tv_sec.cast_unsigned() * 1000 + now.tv_nsec.cast_unsigned() / 1_000_000;
    spend(&SPENT, now)
}

fn spend(spent: &AtomicU64, now: u64) -> bool {
    let step = |until: u64| (until <= now + BURST * STEP).then(|| until.max(now) + STEP);
    spent.fetch_update(Ordering::Relaxed, Ordering::Relaxed, step).is_ok()
}

/// Frees the list in the parent, after the fork or its failure.
pub fn forked(known: Known) {
    // A thread of the program frees memory of the arena only with the table's lock held, which blocks signals.
    let _table = table::lock();
    drop(known);
}

/// Begins an agent in a forked child.
///
/// # Safety
/// The caller is the thread that forked, right after the fork: the only thread of the child, with all signals blocked.
pub unsafe fn begin(known: Known) {
    spawn::begin_anew();
    // The parent's agent is ending or has ended, so the child gets none.
    if resign::is_asked() {
        return std::mem::forget(known);
    }
    // SAFETY: by the caller, which is a hook.
    let has_begun = unsafe { process::begin_anew(&known.0) };
    // The list lies in the parent's arena.
    std::mem::forget(known);
    if !has_begun {
        return;
    }
    hooks::begin_anew();
    if start::in_child().is_err() {
        hooks::rest();
    }
}

/// Waits until this child has lived for some time, and has so much memory of its own that an agent is worth while.
pub fn wait_until_worth_it(after: Duration) {
    let mut pause = after;
    loop {
        resign::sleep(pause);
        if resign::is_asked() || own_kib().is_none_or(|own| own >= LEAST_KIB) {
            return;
        }
        pause = (pause * 2).clamp(Duration::from_secs(1), LOOKS_AT_MOST);
    }
}

/// Memory that only this process has and that it has written, in KiB; `None` if the kernel does not tell.
fn own_kib() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/thread-self/smaps_rollup").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("Private_Dirty:"))?;
    line.split_ascii_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn children_get_agents_at_a_bounded_rate() {
        let spent = AtomicU64::new(0);
        let at_once = (0..1000).filter(|_| spend(&spent, 50_000)).count() as u64;
        assert_eq!(at_once, BURST + 1);
        let later = (0..10_000).filter(|n| spend(&spent, 50_000 + n)).count() as u64;
        assert_eq!(later, 10_000 / STEP - 1);
        assert!(
            (0..1000).filter(|_| spend(&spent, 1_000_000)).count() as u64 == BURST + 1,
            "time without forks gives a burst again"
        );
    }
}
