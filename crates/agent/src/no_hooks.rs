//! What hooks would do, for an agent that was put into a running process and has none.

use crate::map::Traits;
use crate::raw;
use page::{PageRange, pages_to_bytes};
use wire::MemberState;

/// The state of a member whose table is empty, and the reason, as a message for people.
pub fn why_nothing_is_enrolled(all_anonymous: bool) -> (MemberState, String) {
    if all_anonymous {
        return (MemberState::NothingMapped, "the program has no private anonymous memory that can be followed".into());
    }
    (MemberState::NothingEnrolled, "the program has advised no memory to be mergeable (madvise MADV_MERGEABLE)".into())
}

/// Maps fresh anonymous memory where folded memory was discarded. Returns whether that succeeded.
pub fn map_discarded(range: PageRange, traits: Traits) -> bool {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
    let bytes = pages_to_bytes(range.pages) as usize;
    let arguments = [range.start.0 as usize, bytes, usize::from(traits.access), flags as usize, usize::MAX, 0];
    // SAFETY: callers replace memory whose contents the program has just given up.
    let mapped = unsafe { raw::map_over(arguments) };
    // If it fails, the pages lack advice, not content.
    raw::error(mapped).is_none() && traits.inherited().apply(range).map_or(true, |()| true)
}
