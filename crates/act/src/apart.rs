//! Addresses for mappings that the agent makes for itself in the address space of a program.
//!
//! A program with one thread may unmap memory and rely on nothing being mapped there afterwards: it may map something
//! over that place later (`MAP_FIXED`), or see whether it is free (`mincore`). The kernel would give just this place to
//! the next mapping. So the agent's own mappings lie far below all others, one behind the other:
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

/// Distance of the agent's mappings from the program's first mappings, in bytes: 8 TiB. Programs map less, and the
/// address space has more.
const DISTANCE: usize = 8 << 40;
/// Length of the range for the agent's mappings, in bytes: 1 TiB. Once it is used up, addresses are given out from its
/// start again.
const LENGTH: usize = 1 << 40;
/// Gap left free behind each of our mappings, in bytes, so that the kernel does not join two of them.
const GAP: usize = 4096;
/// Number of addresses that are tried before the kernel chooses one.
const ATTEMPTS: u32 = 8;

/// Bytes of the range that were given out so far, in all; modulo [`LENGTH`] this is the next address.
static USED: AtomicUsize = AtomicUsize::new(0);

/// The next address for a mapping of `bytes` bytes. Something may be mapped there already.
fn next(bytes: usize) -> *mut c_void {
    // The address of this code is taken for the address of the program's first mappings.
    let start = (next as *const () as usize).saturating_sub(DISTANCE) & !(LENGTH - 1);
    let used = USED.fetch_add(bytes.next_multiple_of(GAP) + GAP, Ordering::Relaxed) % LENGTH;
    (start + used) as *mut c_void
}

/// Makes a mapping far from the program's mappings, or where the kernel chooses if all addresses that were tried are
/// taken. `map` makes the mapping at the address, with the flags, that it gets, and returns the mapping's address.
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
