//! A forked child with an agent of its own: all state of which a process has one is made anew.

use crate::table::{self, Traits};
use crate::{arena, follow, give_way, references};
use page::PageRange;

/// Upper bound of the memory that the table takes for a range, in bytes.
const EXTENT_BYTES: usize = 256;

/// Gives the child an arena, locks and a table of its own. The table knows these ranges of memory, and nothing about
/// their pages. Returns `false` if memory is short: then the child gets no agent.
///
/// # Safety
/// The caller is the thread that forked, right after the fork: the only thread of the child, with all signals blocked.
/// It is in no function of the agent but those that call this one. `known` may lie in the parent's arena, which stays
/// as it is.
pub unsafe fn begin_anew(known: &[(PageRange, Traits)]) -> bool {
    // SAFETY: by the caller. The parent's arena is only read.
    unsafe { arena::begin_anew() };
    if !arena::ensure(EXTENT_BYTES * (known.len() + 1)) {
        return false;
    }
    // SAFETY: by the caller; the lock is not held.
    unsafe { table::begin_anew(known) };
    // SAFETY: as above.
    unsafe { references::begin_anew() };
    follow::begin_anew();
    give_way::begin_anew();
    true
}
