//! Addresses for mappings that this process makes for itself while a program runs in it.
//!
//! A program may unmap memory and count on nobody else mapping anything there, as long as it has one thread. It may map
//! something over that place later (`MAP_FIXED`), or see whether it is free (`mincore`). The kernel would give just
//! this place to the next mapping. So our own mappings lie far below all others, one behind the other:
//!
//! ```text
//!   ours -->                                        <-- the kernel's choice for the program
//!   |==|=|===|                  ...                          |====|  |===|=====| stack
//!   ^                    DISTANCE                             ^ a mapping that was there first
//! ```

use rustix::io::Errno;
use rustix::mm::MapFlags;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Distance from the program's first mappings, in bytes: 8 TiB. More than programs map, and less than there is.
const DISTANCE: usize = 8 << 40;
/// Length of the range in which our own mappings lie, in bytes: 1 TiB. At its end they begin again.
const LENGTH: usize = 1 << 40;
/// Gap left free behind each of our mappings, in bytes, so that the kernel does not join two of them.
const GAP: usize = 4096;
/// Attempts to find a place that is free.
const ATTEMPTS: u32 = 8;

/// Bytes of the range that were given to mappings so far; the range is used again from its beginning.
static USED: AtomicUsize = AtomicUsize::new(0);

/// The next place for a mapping of `bytes` bytes.
fn next(bytes: usize) -> *mut c_void {
    // The address of this code stands for the place of the program's first mappings.
    let start = (next as *const () as usize).saturating_sub(DISTANCE) & !(LENGTH - 1);
    let used = USED.fetch_add(bytes.next_multiple_of(GAP) + GAP, Ordering::Relaxed) % LENGTH;
    (start + used) as *mut c_void
}

/// Makes a mapping apart from those of the program, or where the kernel chooses if there is no place. `map` gets an address
/// and flags that say what the address means, and answers with the mapping's.
///
/// # Errors
/// Those of `map`.
pub fn map_apart(
    bytes: usize,
    map: impl Fn(*mut c_void, MapFlags) -> Result<*mut c_void, Errno>,
) -> Result<*mut c_void, Errno> {
    let apart = || map(next(bytes), MapFlags::FIXED_NOREPLACE).ok();
    (0..ATTEMPTS).find_map(|_| apart()).map_or_else(|| map(null_mut(), MapFlags::empty()), Ok)
}

#[cfg(test)]
mod tests {
    use crate::MemberMemory;

    #[test]
    fn places_that_a_program_has_left_are_not_taken() {
        let left: Vec<u64> = (1..64).map(|pages| MemberMemory::where_kernel_chooses(pages).range().start.0).collect();
        let ours: Vec<_> = (1..64).map(|pages| MemberMemory::new(pages).unwrap()).collect();
        for place in left {
            assert!(ours.iter().all(|memory| memory.range().start.0.abs_diff(place) > 1 << 40), "{place:x} {ours:x?}");
        }
        let mut starts: Vec<u64> = ours.iter().map(|memory| memory.range().start.0).collect();
        starts.dedup();
        assert_eq!(starts.len(), ours.len());
    }
}
