//! Tests with files that are opened for real. Each has a process of its own, because findings are never forgotten.

use super::*;
use crate::hooks;
use crate::testing::alone;
use agent::references::judge::{Facts, filesystem_name};
use agent::references::{self, files, generation, said_by_hook, survey};
use rustix::event::{EventfdFlags, eventfd};
use std::ffi::CString;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

/// A file in the temporary directory, on the filesystem of that.
fn file() -> PathBuf {
    let path = std::env::temp_dir().join(format!("pagefold-references-{}", std::process::id()));
    std::fs::write(&path, [1; 8192]).unwrap();
    path
}

fn open(path: &std::path::Path, flags: i32) -> OwnedFd {
    let name = CString::new(path.as_os_str().as_bytes()).unwrap();
    // SAFETY: opens a file.
    let file = unsafe { libc::open(name.as_ptr(), flags) };
    assert!(file >= 0, "{} cannot be opened with {flags:#o}", path.display());
    // SAFETY: just opened.
    unsafe { OwnedFd::from_raw_fd(file) }
}

/// Opens a temporary file, and removes its name.
fn open_file(flags: i32) -> OwnedFd {
    let path = file();
    let opened = open(&path, flags);
    std::fs::remove_file(&path).unwrap();
    opened
}

/// Distrusts the filesystem that temporary files lie on. Returns `false`, and prints a reason, if that cannot be.
fn distrust(name: &str) -> bool {
    let path = file();
    let filesystem = look::named(path.to_str().unwrap()).unwrap().filesystem.unwrap();
    std::fs::remove_file(&path).unwrap();
    let can = references::distrust(&filesystem_name(filesystem));
    if !can {
        eprintln!("{name}: skipped: {} pins by nature", filesystem_name(filesystem));
    }
    can
}

fn why() -> String {
    survey().err().map(|reason| reason.to_string()).unwrap_or_default()
}

#[test]
fn ordinary_program_may_be_folded() {
    if !alone("files::tests::ordinary_program_may_be_folded") {
        return;
    }
    hooks::init(false);
    // The first file on a mount has the survey find out about it.
    let known = || drop((open_file(libc::O_RDWR), open("/proc/self/status".as_ref(), libc::O_RDONLY)));
    known();
    assert!(generation() > 0 && why().is_empty());
    let before = generation();
    known();
    let _file = open_file(libc::O_RDWR);
    let _null = open("/dev/null".as_ref(), libc::O_RDWR);
    let _status = open("/proc/self/status".as_ref(), libc::O_RDONLY);
    let _socket = std::os::unix::net::UnixStream::pair().unwrap();
    let _listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    // SAFETY: makes a descriptor.
    let event = unsafe { libc::eventfd(0, 0) };
    // SAFETY: just made.
    let _event = unsafe { OwnedFd::from_raw_fd(event) };
    assert_eq!(why(), "");
    assert_eq!(generation(), before, "what is known must not stop a fold");
}

#[test]
fn direct_reads_that_do_not_pin_are_noticed() {
    let name = "files::tests::direct_reads_that_do_not_pin_are_noticed";
    if !alone(name) || !distrust(name) {
        return;
    }
    hooks::init(false);
    let plain = open_file(libc::O_RDWR);
    let before = generation();
    assert_eq!(why(), "");
    drop(open_file(libc::O_RDWR | libc::O_DIRECT));
    assert!(generation() > before);
    assert!(why().contains("O_DIRECT"), "not for ever: {}", why());
    drop(plain);
}

/// A survey may be past the number that a file gets, and not yet at the one that it had.
#[test]
fn file_that_gets_another_number_is_noticed() {
    let name = "files::tests::file_that_gets_another_number_is_noticed";
    if !alone(name) || !distrust(name) {
        return;
    }
    hooks::init(false);
    let path = file();
    let direct = open_past_hooks(&path);
    std::fs::remove_file(&path).unwrap();
    // SAFETY: makes a descriptor.
    let dup = |number| unsafe { libc::dup(number) };
    // SAFETY: as above; the number is not in use.
    let dup2 = |number| unsafe { libc::dup2(number, 900) };
    // SAFETY: as above.
    let dup3 = |number| unsafe { libc::dup3(number, 901, libc::O_CLOEXEC) };
    // SAFETY: as above.
    let fcntl = |number| unsafe { libc::fcntl(number, libc::F_DUPFD_CLOEXEC, 902) };
    let ways: [&dyn Fn(c_int) -> c_int; 4] = [&dup, &dup2, &dup3, &fcntl];
    for (number, way) in ways.iter().enumerate() {
        let before = generation();
        assert!(way(direct) >= 0);
        assert!(generation() > before, "way {number}");
    }
}

/// The survey finds out about these mounts too late, or not at all.
#[test]
fn direct_reads_on_mounts_that_cannot_be_told_are_noticed() {
    if !alone("files::tests::direct_reads_on_mounts_that_cannot_be_told_are_noticed") {
        return;
    }
    hooks::init(false);
    let file = |flags| Facts { mode: libc::S_IFREG, device: (0, 0), filesystem: None, flags };
    let stirs = |flags| {
        let before = generation();
        in_hook(file(flags), u64::MAX);
        generation() == before + 1
    };
    assert!(stirs(libc::O_RDWR) && why().is_empty());
    assert!(stirs(libc::O_RDWR | libc::O_DIRECT));
    assert!(why().contains("cannot be told"), "{}", why());
}

/// More than can be remembered.
#[test]
fn direct_reads_on_many_mounts_are_noticed() {
    if !alone("files::tests::direct_reads_on_many_mounts_are_noticed") {
        return;
    }
    hooks::init(false);
    let direct = Facts { mode: libc::S_IFREG, device: (0, 0), filesystem: None, flags: libc::O_DIRECT };
    assert!((1..=17).all(|mount| said_by_hook().is_none() && {
        in_hook(direct, mount << 40);
        true
    }));
    assert!(said_by_hook().is_some());
}

#[test]
fn o_direct_added_later_is_noticed() {
    let name = "files::tests::o_direct_added_later_is_noticed";
    if !alone(name) || !distrust(name) {
        return;
    }
    hooks::init(false);
    let plain = open_file(libc::O_RDWR);
    let before = generation();
    // SAFETY: changes flags of a file.
    assert_eq!(unsafe { libc::fcntl(plain.as_raw_fd(), libc::F_SETFL, libc::O_DIRECT) }, 0);
    assert!(generation() > before && why().contains("O_DIRECT"));
}

#[test]
fn survey_finds_files_that_no_hook_saw() {
    let name = "files::tests::survey_finds_files_that_no_hook_saw";
    if !alone(name) || !distrust(name) {
        return;
    }
    let _early = open_file(libc::O_RDWR | libc::O_DIRECT);
    hooks::init(false);
    assert_eq!(generation(), 0);
    assert!(why().contains("O_DIRECT"), "{}", why());
    drop(_early);
    assert!(why().contains("O_DIRECT"), "not for ever");
}

#[test]
fn a_file_that_is_received_is_noticed() {
    let name = "files::tests::a_file_that_is_received_is_noticed";
    if !alone(name) || !distrust(name) {
        return;
    }
    let direct = open_file(libc::O_RDWR | libc::O_DIRECT);
    hooks::init(false);
    let (one, other) = std::os::unix::net::UnixStream::pair().unwrap();
    send(&one, &direct);
    drop(direct);
    let before = generation();
    receive(&other);
    assert!(generation() > before && why().contains("O_DIRECT"), "{}", why());
}

fn send(socket: &impl AsRawFd, file: &OwnedFd) {
    let mut control = [0_u64; 8];
    with_message(&mut control, |message| {
        // SAFETY: gives the place of the first part.
        let first = unsafe { libc::CMSG_FIRSTHDR(message) };
        // SAFETY: there is room for one.
        let header = unsafe { &mut *first };
        (header.cmsg_level, header.cmsg_type) = (libc::SOL_SOCKET, libc::SCM_RIGHTS);
        // SAFETY: computes a length.
        header.cmsg_len = unsafe { libc::CMSG_LEN(4) } as usize;
        // SAFETY: gives the place behind the header.
        let place = unsafe { libc::CMSG_DATA(header) }.cast::<i32>();
        // SAFETY: there is room for one descriptor.
        unsafe { *place = file.as_raw_fd() };
        // SAFETY: computes a length.
        message.msg_controllen = unsafe { libc::CMSG_SPACE(4) } as usize;
        // SAFETY: sends what has just been put together.
        assert_eq!(unsafe { libc::sendmsg(socket.as_raw_fd(), message, 0) }, 1);
    });
}

fn receive(socket: &impl AsRawFd) {
    let mut control = [0_u64; 8];
    with_message(&mut control, |message| {
        // SAFETY: receives into memory of that size.
        assert_eq!(unsafe { libc::recvmsg(socket.as_raw_fd(), message, 0) }, 1);
        assert!(message.msg_controllen > 0);
    });
}

fn with_message(control: &mut [u64; 8], act: impl FnOnce(&mut libc::msghdr)) {
    let mut byte = 7_u8;
    let mut part = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
    // SAFETY: all zeros is an empty message.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
    (message.msg_control, message.msg_controllen) = (control.as_mut_ptr().cast(), size_of_val(control));
    act(&mut message);
}

#[test]
fn vmsplice_is_noticed() {
    if !alone("files::tests::vmsplice_is_noticed") {
        return;
    }
    hooks::init(false);
    let mut ends = [0; 2];
    // SAFETY: makes a pipe.
    assert_eq!(unsafe { libc::pipe(ends.as_mut_ptr()) }, 0);
    let text = b"text";
    let part = libc::iovec { iov_base: text.as_ptr().cast_mut().cast(), iov_len: 4 };
    // SAFETY: the pipe reads from memory that outlives it.
    assert_eq!(unsafe { libc::vmsplice(ends[1], &raw const part, 1, 0) }, 4);
    assert!(generation() > 0 && why().contains("vmsplice"));
}

#[test]
fn sockets_that_are_not_known_are_noticed() {
    let name = "files::tests::sockets_that_are_not_known_are_noticed";
    if !alone(name) {
        return;
    }
    hooks::init(false);
    // SAFETY: makes a socket.
    let socket = unsafe { libc::socket(libc::AF_ALG, libc::SOCK_SEQPACKET, 0) };
    if socket < 0 {
        return eprintln!("{name}: skipped: this kernel has no AF_ALG");
    }
    assert!(generation() > 0 && why().contains("family 38"), "{}", why());
}

#[test]
fn devices_that_are_not_known_are_noticed() {
    let name = "files::tests::devices_that_are_not_known_are_noticed";
    if !alone(name) {
        return;
    }
    hooks::init(false);
    let Some(path) = ["/dev/fuse", "/dev/vfio/vfio", "/dev/loop-control"]
        .iter()
        .map(PathBuf::from)
        .find(|path| std::fs::File::open(path).is_ok())
    else {
        return eprintln!("{name}: skipped: no device here that is not known");
    };
    let before = generation();
    let _device = open(&path, libc::O_RDWR);
    assert!(generation() > before && why().contains("device /dev/"), "{}", why());
    // Such a device may take pages by pins that do not wait: no section is under way when the program has it.
    let again = || drop(open(&path, libc::O_RDWR));
    assert!(hooks::tests::waits_for_the_table(again), "a page may have been out of reach");
}

#[test]
fn files_registered_with_io_uring_are_noticed() {
    let name = "files::tests::files_registered_with_io_uring_are_noticed";
    if !alone(name) || !distrust(name) {
        return;
    }
    hooks::init(false);
    let mut parameters = [0_u8; 120];
    // SAFETY: 120 bytes are what the kernel takes and fills.
    let ring = unsafe { libc::syscall(libc::SYS_io_uring_setup, 4, parameters.as_mut_ptr()) };
    if ring < 0 {
        return eprintln!("{name}: skipped: no io_uring here");
    }
    let path = file();
    let plain = open(&path, libc::O_RDWR);
    let number = plain.as_raw_fd();
    assert_eq!(why(), "");
    // SAFETY: registers one descriptor (IORING_REGISTER_FILES).
    assert_eq!(unsafe { libc::syscall(libc::SYS_io_uring_register, ring, 2, &raw const number, 1) }, 0);
    drop(plain);
    assert!(why().contains("io_uring"), "{:?}", std::fs::read_to_string(format!("/proc/self/fdinfo/{ring}")));
    std::fs::remove_file(&path).unwrap();
}

/// Opens a file for direct reads by a system call that no hook sees.
fn open_past_hooks(path: &std::path::Path) -> c_int {
    let name = CString::new(path.as_os_str().as_bytes()).unwrap();
    let arguments =
        [libc::AT_FDCWD as usize, name.as_ptr() as usize, (libc::O_RDWR | libc::O_DIRECT) as usize, 0, 0, 0];
    // SAFETY: opens a file, which stays open.
    let opened = unsafe { call(libc::SYS_openat, arguments) };
    assert!(opened >= 0);
    opened as c_int
}

/// A survey that takes a name for that of another file would leave the program alone for ever.
#[test]
fn files_that_are_closed_and_opened_all_the_time_are_no_reason() {
    if !alone("files::tests::files_that_are_closed_and_opened_all_the_time_are_no_reason") {
        return;
    }
    let is_over = Arc::new(AtomicBool::new(false));
    let opener = std::thread::spawn({
        let is_over = Arc::clone(&is_over);
        let (event, file) = (eventfd(0, EventfdFlags::empty()).unwrap(), open_file(libc::O_RDWR));
        let socket = std::os::unix::net::UnixStream::pair().unwrap();
        move || {
            let files = [event.as_raw_fd(), socket.0.as_raw_fd(), file.as_raw_fd()];
            while !is_over.load(Ordering::Relaxed) {
                for (file, number) in files.iter().flat_map(|file| (900..920).map(move |number| (*file, number))) {
                    // SAFETY: the number is nobody else's. Past the hooks, as they take most of the time.
                    unsafe { call(libc::SYS_dup2, [file as usize, number, 0, 0, 0, 0]) };
                }
            }
        }
    });
    // SAFETY: as the agent's thread, this one has a table of its own, and takes no numbers from the other's.
    assert_eq!(unsafe { libc::unshare(libc::CLONE_FILES) }, 0);
    let end = Instant::now() + Duration::from_secs(1);
    let mut surveys = 0;
    while Instant::now() < end {
        assert_eq!(why(), "", "after {surveys} surveys");
        surveys += 1;
    }
    is_over.store(true, Ordering::Relaxed);
    opener.join().unwrap();
    assert!(surveys > 10, "{surveys}");
}

#[test]
fn files_of_a_thread_of_its_own_are_noticed() {
    let name = "files::tests::files_of_a_thread_of_its_own_are_noticed";
    if !alone(name) || !distrust(name) {
        return;
    }
    hooks::init(false);
    let path = file();
    assert_eq!(why(), "");
    let (opened, seen) = (std::sync::Barrier::new(2), std::sync::Barrier::new(2));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // SAFETY: from here on this thread has a table of its own, with copies of all descriptors.
            assert_eq!(unsafe { libc::unshare(libc::CLONE_FILES) }, 0);
            open_past_hooks(&path);
            opened.wait();
            seen.wait();
        });
        opened.wait();
        let found = why();
        seen.wait();
        assert!(found.contains("O_DIRECT"), "{found}");
    });
    std::fs::remove_file(&path).unwrap();
}

/// A table whose listed thread ended before the survey came to it was passed over, although the next thread had the
/// table, too.
#[test]
fn files_of_threads_that_end_all_the_time_are_noticed() {
    let name = "files::tests::files_of_threads_that_end_all_the_time_are_noticed";
    if !alone(name) || !distrust(name) {
        return;
    }
    hooks::init(false);
    let (path, is_over) = (file(), Arc::new(AtomicBool::new(false)));
    let opened = Arc::new(std::sync::Barrier::new(2));
    let first = {
        let (path, is_over, opened) = (path.clone(), Arc::clone(&is_over), Arc::clone(&opened));
        move || {
            // SAFETY: from here on this thread, and those that it starts, have a table of their own.
            assert_eq!(unsafe { libc::unshare(libc::CLONE_FILES) }, 0);
            open_past_hooks(&path);
            opened.wait();
            relay(is_over);
        }
    };
    std::thread::spawn(first);
    opened.wait();
    let end = Instant::now() + Duration::from_secs(2);
    let missed = (0..100_000).take_while(|_| Instant::now() < end).filter(|_| files::worst().is_none()).count();
    is_over.store(true, Ordering::SeqCst);
    std::fs::remove_file(&path).unwrap();
    assert_eq!(missed, 0, "surveys that did not see the file");
}

/// Starts the next thread, which has the same table, and ends soon after that.
fn relay(is_over: Arc<AtomicBool>) {
    if !is_over.load(Ordering::SeqCst) {
        std::thread::spawn(|| relay(is_over));
        std::thread::sleep(Duration::from_micros(100));
    }
}

/// `/proc/self/fd` is empty then.
#[test]
fn files_are_noticed_when_the_first_thread_has_ended() {
    let name = "files::tests::files_are_noticed_when_the_first_thread_has_ended";
    if !alone(name) || !distrust(name) {
        return;
    }
    hooks::init(false);
    // SAFETY: the child's only thread starts another one and ends; the other one looks and ends the child.
    let child = unsafe { libc::fork() };
    if child == 0 {
        std::thread::spawn(|| {
            while std::fs::read_dir("/proc/self/fd").is_ok_and(|files| files.count() > 0) {
                std::thread::yield_now();
            }
            let before = files::worst();
            let path = file();
            open_past_hooks(&path);
            std::fs::remove_file(&path).unwrap();
            let found = files::worst().is_some_and(|(reason, _)| reason.to_string().contains("O_DIRECT"));
            // SAFETY: ends the child.
            unsafe { libc::_exit(if before.is_none() && found { 0 } else { 1 }) };
        });
        // SAFETY: ends the calling thread alone.
        unsafe { libc::syscall(libc::SYS_exit, 0) };
    }
    let mut status = 0;
    // SAFETY: waits for the child just made.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(status, 0, "what it has open is not seen");
}

/// The kernel says nothing about a ring while another thread has the ring's lock. A direct descriptor is in no table.
#[test]
fn ring_in_use_does_not_hide_its_files() {
    let name = "files::tests::ring_in_use_does_not_hide_its_files";
    if !alone(name) || !distrust(name) {
        return;
    }
    hooks::init(false);
    let Ok(mut ring) = io_uring::IoUring::new(4096) else {
        return eprintln!("{name}: skipped: no io_uring here");
    };
    let path = file();
    let text = CString::new(path.as_os_str().as_bytes()).unwrap();
    ring.submitter().register_files_sparse(2).unwrap();
    let slot = io_uring::types::DestinationSlot::try_from_slot_target(1).unwrap();
    let open = io_uring::opcode::OpenAt::new(io_uring::types::Fd(libc::AT_FDCWD), text.as_ptr());
    let open = open.flags(libc::O_RDWR | libc::O_DIRECT).file_index(Some(slot)).build();
    // SAFETY: the name outlives the request.
    unsafe { ring.submission().push(&open) }.unwrap();
    ring.submit_and_wait(1).unwrap();
    assert_eq!(ring.completion().next().map(|done| done.result()), Some(0));
    let stop = std::sync::atomic::AtomicBool::new(false);
    let hidden = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                for _ in 0..4096 {
                    // SAFETY: does nothing.
                    unsafe { ring.submission().push(&io_uring::opcode::Nop::new().build()) }.unwrap();
                }
                ring.submit().unwrap();
                ring.completion().for_each(drop);
            }
        });
        let hidden = (0..200).filter(|_| files::worst().is_none()).count();
        stop.store(true, Ordering::Relaxed);
        hidden
    });
    assert_eq!(hidden, 0, "of 200 looks");
    std::fs::remove_file(&path).unwrap();
}
