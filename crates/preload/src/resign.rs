//! The end of the agent before the program sets a filter of system calls (seccomp) that forbids calls of the agent.
//!
//! Such a filter may apply to all threads, also to those of the agent. Or it applies to one thread, on which the hooks
//! make calls. The agent would be killed, or would fail at something for which threads wait. So the thread of the
//! program that wants to set the filter (`hooks/filter.rs`) waits until the agent has gone:
//!
//! ```text
//!   thread of the program                 agent's thread                               follower
//!      | ASKED ----------------------------> | hangs up on the worker
//!      |                                     | makes everything anonymous again
//!      |                                     | GONE: nothing has to be followed any more --> | ends
//!      | <------------ no thread is left --- | ends
//!      | the hooks rest
//!      v
//!   the filter
//! ```
//!
//! If not all memory can be made anonymous, the agent goes on (WORKING), and the filter is refused.
//!
//! A worker may ask for the end, too, in place of a thread of the program ([`be_told_to_leave`]). Then the hooks go on.
//!
//! The agent also ends before the program keeps its capabilities while it changes its user (`PR_SET_KEEPCAPS`), as
//! `setpriv` does. The calling thread has rights then that the agent's threads lack. The C library changes users and
//! groups in all threads, and ends a program in which only some of them may do that.

use crate::hooks;
use agent::fold::Folder;
use agent::follow;
use agent::pool::Pool;
use agent::{give_way, raw, spawn, table};
use host::Pagemap;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};
use wire::MemberStats;

const WORKING: u32 = 0;
const ASKED: u32 = 1;
const GONE: u32 = 2;

/// Longest time without progress in making memory anonymous, after which the agent gives up its end: 10 s.
const PATIENCE: Duration = Duration::from_secs(10);
/// Longest time that a thread of the program waits for the agent's end: 60 s. The agent's thread may be stopped.
const WAIT_LONGEST: Duration = Duration::from_secs(60);
/// Pause before memory is tried again, and between two checks of the thread that waits: 20 ms, 1 ms.
const AGAIN: Duration = Duration::from_millis(20);
const LOOK_EVERY: Duration = Duration::from_millis(1);

static STATE: AtomicU32 = AtomicU32::new(WORKING);
/// Whether a worker has told the agent to leave.
static TOLD: AtomicBool = AtomicBool::new(false);

/// Whether the agent is to end, or has ended.
pub fn is_asked() -> bool {
    STATE.load(Ordering::SeqCst) != WORKING
}

/// Returns whether the agent ends because a worker has told it to. If so, the next program of this process (`execve`)
/// gets no agent, and no userfaultfd yields to the program's any more. The hooks go on: memory that was folded lies in
/// several mappings, which the kernel alone would not move at once (`mremap`). For the agent's thread, at its end.
pub fn end_as_told() -> bool {
    let is_so = STATE.load(Ordering::SeqCst) == GONE && TOLD.load(Ordering::SeqCst);
    if is_so {
        hooks::carry_no_more();
        give_way::withdraw();
    }
    is_so
}

/// Sleeps, unless the agent is to end. For the agent's thread.
pub fn sleep(time: Duration) {
    let until = Instant::now() + time;
    while !is_asked()
        && let Some(left) = until.checked_duration_since(Instant::now())
    {
        raw::futex_wait(&STATE, WORKING, Some(left));
    }
}

/// Asks the agent to end, and waits for that. Returns whether it has ended. With `for_good`, the next program of this
/// process gets no agent, either. A thread of the program calls it.
pub fn ask(for_good: bool) -> bool {
    // Another thread may have asked already.
    let _ = change(WORKING, ASKED);
    raw::futex(&STATE, libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG, i32::MAX.cast_unsigned());
    let (until, mut seen) = (Instant::now() + WAIT_LONGEST, spawn::Slots::default());
    loop {
        let running = spawn::running();
        seen.add(running);
        if running.is_empty() && seen.are_gone() {
            STATE.store(GONE, Ordering::SeqCst);
            if for_good {
                hooks::rest_for_good()
            } else {
                hooks::rest()
            }
            return true;
        }
        if STATE.load(Ordering::SeqCst) == WORKING || Instant::now() > until && change(ASKED, WORKING) {
            return false;
        }
        give_way::wake_agent();
        std::thread::sleep(LOOK_EVERY);
    }
}

/// Makes the agent end because a worker has told it to. No thread of the program waits for the end. For the agent's
/// thread.
pub fn be_told_to_leave() {
    TOLD.store(true, Ordering::SeqCst);
    let _ = change(WORKING, ASKED);
}

/// Makes all memory in mappings of the pool anonymous, so that the agent may end. Returns whether the agent may end.
/// For the agent's thread, while it has no connection to a worker.
pub fn give_up_all(folder: &mut Folder, (pagemap, pool): (&Pagemap, &Pool), stats: &mut MemberStats) -> bool {
    let (mut until, mut before) = (Instant::now() + PATIENCE, u64::MAX);
    give_way::want(table::everything(), true);
    let may_end = loop {
        // If this fails, some discarded memory is left in mappings of the pool.
        let _ = folder.settle_discards(pagemap);
        folder.make_anonymous((pagemap, pool), table::everything(), stats);
        let left: u64 = table::lock().pooled_pages(table::everything()).iter().map(|part| part.pages).sum();
        let following = folder.section().following();
        following.catch_up();
        // Slots that the program has moved may lie anywhere.
        let is_known = following.lost_track().is_none() && !following.has_moved();
        if left == 0 && is_known && follow::wait_for_keeper() && change(ASKED, GONE) {
            following.retire();
            break true;
        }
        if left < before {
            (before, until) = (left, Instant::now() + PATIENCE);
        }
        if !is_known || STATE.load(Ordering::SeqCst) != ASKED || Instant::now() > until {
            let _ = change(ASKED, WORKING);
            break false;
        }
        std::thread::sleep(AGAIN);
    };
    give_way::want(table::everything(), false);
    may_end
}

fn change(from: u32, to: u32) -> bool {
    STATE.compare_exchange(from, to, Ordering::SeqCst, Ordering::SeqCst).is_ok()
}
