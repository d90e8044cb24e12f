//! NUMA policies of memory: `mbind` and `set_mempolicy_home_node`, which programs (and `libnuma`) call by number. A
//! mapping of the pool cannot have a policy of its own: the kernel would give the policy to the pool's file. So memory
//! with a policy is not folded.

use super::{Answer, break_slots, enter, range};
use agent::maps;
use agent::raw;
use agent::table::{Shut, Table};
use page::{HostVirt, PageRange};

/// `set_mempolicy_home_node`, for which libc has no name.
pub const SYS_SET_HOME_NODE: libc::c_long = 450;
/// `MPOL_F_ADDR`: asks for the policy of the mapping at an address.
const OF_ADDRESS: usize = 2;
/// `MPOL_DEFAULT`: no policy of its own.
const NONE: i32 = 0;

/// Makes a system call that gives a policy to memory. Its first two arguments are the memory's address and length.
///
/// # Safety
/// As the system call.
pub unsafe fn bind(number: libc::c_long, arguments: [usize; 6]) -> Answer {
    // SAFETY: the caller's arguments are passed on unchanged, with the caller's promises.
    let pass = || unsafe { raw::call(number, arguments) };
    let Some(range) = range(arguments[0], arguments[1]) else { return pass() };
    let Some(mut table) = enter().filter(|table| table.touches(range)) else { return pass() };
    let answer = pass();
    // Even a call that failed may have changed some of the mappings.
    look_at(&mut table, range);
    answer
}

/// Excludes the parts of a range that have a policy from folding, and no longer the others.
fn look_at(table: &mut Table, range: PageRange) {
    table.shut(range, Shut::Policy);
    for mapping in maps::mappings(range, false).unwrap_or_default() {
        if has_policy(mapping.range.start) {
            // Private copies are placed as the policy says. If memory is short, the pages still map the pool.
            let _ = break_slots(table, mapping.range);
        } else {
            table.open(mapping.range, Shut::Policy);
        }
    }
}

/// Whether the mapping that contains a page has a policy of its own. A kernel that does not answer this lets no policy
/// be set either.
pub fn has_policy(page: HostVirt) -> bool {
    let mut policy = NONE;
    let arguments = [&raw mut policy as usize, 0, 0, page.0 as usize, OF_ADDRESS, 0];
    // SAFETY: the kernel writes the policy's number to the variable, and is given no place for its nodes.
    let answer = unsafe { raw::call(libc::SYS_get_mempolicy, arguments) };
    answer == 0 && policy != NONE
}
