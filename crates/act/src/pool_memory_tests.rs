use super::*;
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::{pwrite, write};

const SLOTS: u32 = 64;

fn window_of(bytes: &[u8]) -> DonationWindow {
    let window = DonationWindow::create(4).unwrap();
    for (page, byte) in bytes.iter().enumerate() {
        assert_eq!(pwrite(&window, &[*byte; PAGE_BYTES], (page * PAGE_BYTES) as u64), Ok(PAGE_BYTES));
    }
    window
}

fn blocks(file: impl AsFd) -> i64 {
    fstat(file).unwrap().st_blocks
}

#[test]
fn filled_slots_can_be_read_also_by_successor() {
    let mut segment = PoolSegment::create("test", SLOTS).unwrap();
    let window = window_of(&[1, 2, 3]);
    segment.fill(10..12, &window, 1).unwrap();
    assert_eq!(segment.slot(10), [2; PAGE_BYTES]);
    assert_eq!(segment.slot(11), [3; PAGE_BYTES]);
    let copy = segment.read_only().unwrap();
    assert_eq!(blocks(&copy), 16);
    let inherited = InheritedSegment::take(copy, SLOTS).unwrap();
    assert_eq!(inherited.filled(0).unwrap(), Some(10..12));
    assert_eq!(inherited.filled(12).unwrap(), None);
    let mut read = [0; 2 * PAGE_BYTES];
    inherited.read(10, &mut read).unwrap();
    assert_eq!((read[0], read[PAGE_BYTES]), (2, 3));
    inherited.read(20, &mut read).unwrap();
    assert_eq!(blocks(inherited.read_only().unwrap()), 16, "reading an empty slot took memory");
    segment.fill(10..11, &window, 0).unwrap();
    assert_eq!(segment.slot(10), [1; PAGE_BYTES]);
}

/// Tries with the file handed out, with the same file opened anew for writing, and with `mmap`. Holds for root, too.
#[test]
fn segment_can_be_written_only_by_its_maker() {
    let mut segment = PoolSegment::create("test", SLOTS).unwrap();
    segment.fill(0..1, &window_of(&[7]), 0).unwrap();
    let copy = segment.read_only().unwrap();
    assert_eq!(pwrite(&copy, b"x", 0), Err(Errno::BADF), "the file is open for reading only");
    let path = format!("/proc/self/fd/{}", copy.as_raw_fd());
    // Root, and processes with the worker's uid, may open it anew for writing, but cannot write it either.
    if let Ok(anew) = open(&path, OFlags::RDWR, Mode::empty()) {
        assert_eq!(write(&anew, b"x"), Err(Errno::PERM));
        assert_eq!(ftruncate(&anew, 0), Err(Errno::PERM));
        assert_eq!(ftruncate(&anew, offset(SLOTS + 1)), Err(Errno::PERM));
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        assert_eq!(fallocate(&anew, punch, 0, PAGE_BYTES as u64), Err(Errno::PERM));
        assert_eq!(fcntl_add_seals(&anew, SealFlags::WRITE), Err(Errno::PERM));
        // SAFETY: a new mapping at an address of the kernel's choice; none is made, as the test expects.
        let map = unsafe { mmap(null_mut(), PAGE_BYTES, ProtFlags::WRITE, MapFlags::SHARED, &anew, 0) };
        assert_eq!(map, Err(Errno::PERM));
    } else {
        println!("skipped: not root, so the file cannot be opened for writing to begin with");
    }
    // SAFETY: as above.
    let map = unsafe { mmap(null_mut(), PAGE_BYTES, ProtFlags::WRITE, MapFlags::SHARED, &copy, 0) };
    assert!(map.is_err());
    // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
    let map = unsafe { mmap(null_mut(), PAGE_BYTES, ProtFlags::READ, MapFlags::SHARED, &copy, 0) }.unwrap();
    // SAFETY: the range is the mapping just made, and nobody refers to it.
    let writable = unsafe { rustix::mm::mprotect(map, PAGE_BYTES, rustix::mm::MprotectFlags::WRITE) };
    assert_eq!(writable, Err(Errno::ACCESS));
    // SAFETY: as above.
    unsafe { munmap(map, PAGE_BYTES) }.unwrap();
    assert_eq!(segment.slot(0), [7; PAGE_BYTES]);
}

#[test]
fn only_sealed_files_of_the_right_size_are_inherited() {
    let segment = PoolSegment::create("test", SLOTS).unwrap();
    assert!(InheritedSegment::take(segment.read_only().unwrap(), SLOTS + 1).is_err());
    let unsealed = new_memfd("test", offset(SLOTS)).unwrap();
    assert!(InheritedSegment::take(unsealed, SLOTS).is_err());
}

#[test]
fn punched_window_gives_zeros_and_keeps_its_size() {
    let mut segment = PoolSegment::create("test", SLOTS).unwrap();
    let window = window_of(&[1, 2]);
    fallocate(&window, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 0, PAGE_BYTES as u64).unwrap();
    assert_eq!(ftruncate(&window, 0), Err(Errno::PERM));
    segment.fill(0..2, &window, 0).unwrap();
    assert_eq!((segment.slot(0)[0], segment.slot(1)[0]), (0, 2));
    assert!(segment.fill(0..5, &window, 0).is_err(), "the window has no fifth page");
}

#[test]
fn emptied_window_takes_no_memory_and_is_used_again() {
    let mut segment = PoolSegment::create("test", SLOTS).unwrap();
    let window = window_of(&[1, 2]);
    crate::empty_file(&window).unwrap();
    assert_eq!(rustix::fs::fstat(&window).unwrap().st_blocks, 0);
    rustix::io::pwrite(&window, &[3; PAGE_BYTES], 0).unwrap();
    segment.fill(0..2, &window, 0).unwrap();
    assert_eq!((segment.slot(0)[0], segment.slot(1)[0]), (3, 0));
}

#[test]
fn lease_is_held_while_it_is_mapped() {
    let _turn = crate::turn_to_fork();
    let lease = Lease::create().unwrap();
    assert_eq!(ftruncate(&lease, 4096), Err(Errno::PERM));
    let held = HeldLease::hold(&lease).unwrap();
    assert_eq!(lease.state().unwrap(), LeaseState::Held);
    let again = HeldLease::hold(&lease).unwrap();
    drop(held);
    assert_eq!(lease.state().unwrap(), LeaseState::Held);
    drop(again);
    assert_eq!(lease.state().unwrap(), LeaseState::Over);
    // Newer kernels still let the lease be mapped, but it stays over.
    let _late = HeldLease::hold(&lease);
    assert_eq!(lease.state().unwrap(), LeaseState::Over);
}

#[test]
fn forked_child_holds_lease_of_its_parent() {
    let _turn = crate::turn_to_fork();
    let lease = Lease::create().unwrap();
    let held = HeldLease::hold(&lease).unwrap();
    let (wait, go) = std::io::pipe().unwrap();
    // SAFETY: the child calls nothing but async-signal-safe functions (`read`, `_exit`) before it ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let mut byte = 0_u8;
        // SAFETY: `go` is this copy's own; closing it lets the read below end when the parent closes its copy.
        unsafe { libc::close(go.as_raw_fd()) };
        // SAFETY: the call reads one byte into a variable that outlives the call.
        unsafe { libc::read(wait.as_raw_fd(), (&raw mut byte).cast(), 1) };
        // SAFETY: the call ends the child without running any handlers of the parent.
        unsafe { libc::_exit(0) };
    }
    assert!(child > 0);
    drop(held);
    let while_it_lives = lease.state();
    drop(go);
    // SAFETY: it is our own child, and no status is asked for.
    assert_eq!(unsafe { libc::waitpid(child, null_mut(), 0) }, child);
    assert_eq!(while_it_lives.unwrap(), LeaseState::Held);
    assert_eq!(lease.state().unwrap(), LeaseState::Over);
}

#[test]
fn sealed_lease_is_spoilt() {
    let _turn = crate::turn_to_fork();
    let lease = Lease::create().unwrap();
    let _held = HeldLease::hold(&lease).unwrap();
    fcntl_add_seals(&lease, SealFlags::SEAL).unwrap();
    assert_eq!(lease.state().unwrap(), LeaseState::Spoilt);
}

#[test]
fn waiting_for_file_lock_leaves_no_mapping() {
    let segment = PoolSegment::create("waited-for", SLOTS).unwrap();
    let view = crate::PoolView::new(segment.read_only().unwrap(), SLOTS).unwrap();
    let mappings = || std::fs::read_to_string("/proc/self/maps").unwrap().matches("waited-for").count();
    let before = mappings();
    view.wait_for_lock();
    assert_eq!((before > 0, mappings()), (true, before));
}
