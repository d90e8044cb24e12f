//! Which memory is enrolled, and which of it may be folded.

use super::*;

#[test]
fn only_private_anonymous_memory_is_enrolled() {
    member();
    let pool = pool();
    let at = fresh(6);
    // SAFETY: within the test's own pages.
    unsafe {
        memory::mmap(
            (at + PAGE_BYTES) as *mut c_void,
            PAGE_BYTES,
            3,
            libc::MAP_FIXED | libc::MAP_PRIVATE,
            pool.as_raw_fd(),
            0,
        )
    };
    let shared = libc::MAP_FIXED | libc::MAP_SHARED | libc::MAP_ANONYMOUS;
    // SAFETY: as above.
    unsafe { memory::mmap((at + 2 * PAGE_BYTES) as *mut c_void, PAGE_BYTES, 3, shared, -1, 0) };
    protect(at + 3 * PAGE_BYTES, 1, libc::PROT_READ).unwrap();
    // SAFETY: as above.
    unsafe { memory::munmap((at + 5 * PAGE_BYTES) as *mut c_void, PAGE_BYTES) };
    assert_eq!(advise(at, 6, libc::MADV_MERGEABLE), Err(libc::ENOMEM));
    let table = table::lock();
    let foldable: Vec<bool> = (0..6).map(|page| table.is_foldable(pages(at + page * PAGE_BYTES, 1))).collect();
    assert_eq!(foldable, [true, false, false, false, true, false]);
    assert!(table.touches(pages(at + 3 * PAGE_BYTES, 1)) && !table.touches(pages(at + PAGE_BYTES, 2)));
    drop(table);
    protect(at + 3 * PAGE_BYTES, 1, READ_WRITE.into()).unwrap();
    assert!(table::lock().is_foldable(pages(at + 3 * PAGE_BYTES, 1)));
    unmap_all(at, 5);
}

#[test]
fn only_memory_that_can_be_read_and_written_is_foldable() {
    let at = enrolled(8);
    protect(at + 2 * PAGE_BYTES, 2, libc::PROT_READ).unwrap();
    assert!(!table::lock().is_foldable(pages(at, 3)));
    assert!(table::lock().is_foldable(pages(at, 2)));
    protect(at, 8, READ_WRITE.into()).unwrap();
    assert!(table::lock().is_foldable(pages(at, 8)));
    // A change that fails at a hole has been made up to the hole.
    // SAFETY: the test's own page.
    unsafe { memory::munmap((at + 6 * PAGE_BYTES) as *mut c_void, PAGE_BYTES) };
    assert_eq!(protect(at, 8, libc::PROT_READ), Err(libc::ENOMEM));
    let known = table::lock().known(pages(at, 8));
    assert_eq!(known.iter().map(|(part, traits)| (part.pages, traits.access)).collect::<Vec<_>>(), [(6, 1), (1, 3)]);
    unmap_all(at, 8);
}

#[test]
fn locked_memory_is_not_foldable() {
    let at = enrolled(4);
    // SAFETY: locking changes no contents.
    let locked = unsafe { memory::mlock((at + 100) as *const c_void, PAGE_BYTES) };
    assert_eq!(locked, 0);
    assert!(
        !table::lock().is_foldable(pages(at + PAGE_BYTES, 1))
            && table::lock().is_foldable(pages(at + 2 * PAGE_BYTES, 2))
    );
    // SAFETY: as above.
    assert_eq!(unsafe { memory::munlock(at as *const c_void, 2 * PAGE_BYTES) }, 0);
    assert!(table::lock().is_foldable(pages(at, 4)));
    // SAFETY: as above.
    unsafe { memory::mlock(at as *const c_void, PAGE_BYTES) };
    protect(at, 1, libc::PROT_READ).unwrap();
    protect(at, 1, READ_WRITE.into()).unwrap();
    assert!(!table::lock().is_foldable(pages(at, 1)), "still locked");
    unmap_all(at, 4);
}

#[test]
fn memory_wiped_in_children_is_not_foldable() {
    let at = enrolled(2);
    advise(at, 2, libc::MADV_WIPEONFORK).unwrap();
    assert!(!table::lock().is_foldable(pages(at, 1)));
    advise(at, 2, libc::MADV_KEEPONFORK).unwrap();
    assert!(table::lock().is_foldable(pages(at, 2)));
    unmap_all(at, 2);
}

/// The kernel refuses this advice at the first mapping of the pool. It has followed it for the memory before.
#[test]
fn advice_to_wipe_is_followed_for_all_of_a_range_or_none() {
    if !crate::testing::alone("hooks::tests::enrolment::advice_to_wipe_is_followed_for_all_of_a_range_or_none") {
        return;
    }
    let pool = pool();
    let at = enrolled(4);
    write(at, 0, 5);
    fold(&pool, at + 2 * PAGE_BYTES, 150, 1);
    assert_eq!(advise(at, 4, libc::MADV_WIPEONFORK), Err(libc::EINVAL));
    let mut status = 0;
    // SAFETY: the child makes a system call, and nothing else.
    let child = unsafe { raw::call(libc::SYS_fork, [0; 6]) };
    if child == 0 {
        // SAFETY: ends the child.
        unsafe { libc::_exit(byte(at, 0).into()) };
    }
    // SAFETY: writes one number.
    assert_eq!(unsafe { libc::waitpid(child as i32, &raw mut status, 0) }, child as i32);
    assert_eq!(libc::WEXITSTATUS(status), 5);
    unmap_all(at, 4);
}

/// Gives pages a NUMA policy, as `libnuma` does it or by a system call of the program's own.
fn bind(at: usize, count: usize, policy: usize, seen: bool) {
    let nodes = 1_u64;
    let nodes = if policy == DEFAULT { [0, 0] } else { [&raw const nodes as usize, 64] };
    let (bytes, number) = (count * PAGE_BYTES, libc::SYS_mbind);
    let answer = if seen {
        // SAFETY: the test's own pages; a policy does not change their contents.
        unsafe { libc::syscall(number, at, bytes, policy, nodes[0], nodes[1], 0) as isize }
    } else {
        // SAFETY: as above.
        unsafe { raw::call(number, [at, bytes, policy, nodes[0], nodes[1], 0]) }
    };
    assert_eq!(answer, 0, "mbind: {}", std::io::Error::last_os_error());
}

/// `MPOL_DEFAULT`, `MPOL_PREFERRED` and `MPOL_BIND`.
const DEFAULT: usize = 0;
const PREFERRED: usize = 1;
const BIND: usize = 2;

#[test]
fn memory_with_a_policy_is_not_folded() {
    let pool = pool();
    let at = enrolled(8);
    fold(&pool, at + PAGE_BYTES, 40, 4);
    bind(at + 2 * PAGE_BYTES, 4, BIND, true);
    let (bound, rest) = (pages(at + 2 * PAGE_BYTES, 4), pages(at + 6 * PAGE_BYTES, 2));
    assert!(table::lock().known(bound).iter().all(|(_, traits)| traits.has_policy()));
    // Those that were folded are the program's own again, and placed by its policy.
    assert_eq!(released(pages(at, 8)), [41, 42, 43]);
    assert_eq!([1, 2, 4].map(|page| byte(at, page)), [40, 41, 43]);
    assert!(policy::has_policy(bound.start) && table::lock().is_foldable(rest));
    bind(at + 2 * PAGE_BYTES, 4, DEFAULT, true);
    assert!(table::lock().known(bound).iter().all(|(_, traits)| !traits.has_policy()));
    assert!(table::lock().is_foldable(pages(at + 5 * PAGE_BYTES, 1)));
    unmap_all(at, 8);
}

#[test]
fn memory_that_has_a_policy_already_is_not_enrolled() {
    member();
    let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as usize;
    // SAFETY: a new mapping that no hook sees.
    let at = unsafe { raw::call(libc::SYS_mmap, [0, 8 * PAGE_BYTES, 3, flags, usize::MAX, 0]) } as usize;
    bind(at + 4 * PAGE_BYTES, 4, PREFERRED, false);
    assert_eq!(advise(at, 8, libc::MADV_MERGEABLE), Ok(()));
    let foldable = [0, 4].map(|first| table::lock().is_foldable(pages(at + first * PAGE_BYTES, 4)));
    assert_eq!(foldable, [true, false]);
    unmap_all(at, 8);
}

#[test]
fn stacks_and_hugetlb_memory_are_not_enrolled() {
    member();
    // No huge page need be there: nothing is reserved, and nothing touched.
    for flag in [0, libc::MAP_STACK, libc::MAP_GROWSDOWN, libc::MAP_LOCKED, libc::MAP_HUGETLB | libc::MAP_NORESERVE] {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | flag;
        // SAFETY: a new mapping where the kernel chooses.
        let at = unsafe { memory::mmap(std::ptr::null_mut(), 512 * PAGE_BYTES, 3, flags, -1, 0) };
        if at == libc::MAP_FAILED {
            eprintln!("skipped: no mapping with flags {flag:#x} here");
            continue;
        }
        let range = pages(at as usize, 512);
        let known = !table::lock().known(range).is_empty();
        assert_eq!(known, flag == 0, "{flag:#x}");
        if flag & libc::MAP_HUGETLB != 0 {
            let _ = advise(at as usize, 512, libc::MADV_MERGEABLE);
            assert!(!table::lock().is_foldable(range));
        }
        // SAFETY: mapped above.
        unsafe { memory::munmap(at, 512 * PAGE_BYTES) };
    }
}
