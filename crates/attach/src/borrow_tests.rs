//! Tests of threads that must not make calls for us, and of calls that were changed by the program.

use super::Remote;
use crate::inject::borrow_thread;
use crate::testing::Subject;
use act::trace::Tracee;
use host::Signals;
use std::os::unix::fs::FileExt;

/// Memory for machine code below 4 GiB, and a way to run it.
const CODE: &str = "
libc.mmap.restype = ctypes.c_void_p
page = libc.mmap(None, ctypes.c_size_t(4096), 7, 0x62, -1, ctypes.c_long(0))
def run(code, at=0):
    ctypes.memmove(page, code, len(code))
    say(page)
    ctypes.CFUNCTYPE(None)(page + at)()
";
/// Code that switches to 32-bit mode and goes to a jump to itself.
const MODE_32: &str =
    "run(b'\\xeb\\xfe'.ljust(16, b'\\x90') + b'\\x6a\\x23\\x68' + struct.pack('<I', page) + b'\\x48\\xcb', 16)";
/// A restartable sequence (rseq) that is a jump to itself. When the kernel aborts it, it begins anew.
const SEQUENCE: &str = "
libc.pthread_self.restype = ctypes.c_ulong
area = libc.pthread_self() + ctypes.c_long.in_dll(libc, '__rseq_offset').value
code = b'\\x48\\xb8' + struct.pack('<Q', area) + b'\\x48\\xb9' + struct.pack('<Q', page + 256) + b'\\x48\\x89\\x48\\x08'
begin = page + len(code)
code = (code + b'\\xeb\\xfe').ljust(124, b'\\x90') + struct.pack('<I', 0x53053053) + b'\\xe9' + struct.pack('<i', -133)
run(code.ljust(256, b'\\x90') + struct.pack('<IIQQQ', 0, 0, begin, 2, page + 128))
";
/// Bytes of code before the sequence of [`SEQUENCE`].
const BEFORE: u64 = 24;
/// A seccomp filter by which `prctl` returns an error.
const NO_PRCTL: &str = "
code = ctypes.create_string_buffer(struct.pack('HBBI' * 4, 0x20, 0, 0, 0, 0x15, 0, 1, 157, 6, 0, 0, 0x50001, 6, 0, 0, 0x7fff0000))
program = struct.pack('HxxxxxxQ', 4, ctypes.addressof(code))
assert raw(157, 38, 1, 0, 0, 0) == 0 and raw(317, 1, 0, program) == 0
say('ready')
wait_for_end()
";

fn page_of(subject: &Subject) -> u64 {
    subject.line().parse().expect("an address")
}

#[test]
fn thread_in_32_bit_mode_is_not_borrowed() {
    let subject = Subject::start(&format!("{CODE}{MODE_32}"));
    page_of(&subject);
    let (mut halts, remote) = (subject.halts(), Remote::open(subject.pid()).unwrap());
    // It may be on its way there at first.
    let why = loop {
        let in_32_bits = |tracee: &Tracee| Ok(tracee.registers()?.cs == 0x23);
        match borrow_thread(&mut halts, in_32_bits) {
            Ok((in_32_bits, _)) => assert!(!in_32_bits, "it was borrowed"),
            Err(e) => break e.to_string(),
        }
    };
    assert!(why.contains("32-bit"), "{why}");
    assert!(borrow_thread(&mut halts, |tracee| remote.call(tracee, libc::SYS_getpid, [0; 6])).is_err());
    assert_eq!(subject.line_within(std::time::Duration::from_millis(100)), None, "it runs");
}

#[test]
fn thread_in_restartable_sequence_is_not_borrowed() {
    let subject = Subject::start(&format!("{CODE}{SEQUENCE}"));
    let section = page_of(&subject) + BEFORE;
    let mut halts = subject.halts();
    for _ in 0..20 {
        match borrow_thread(&mut halts, |tracee| Ok(tracee.registers()?.rip)) {
            Ok((at, _)) => assert!(!(section..section + 2).contains(&at), "it was borrowed"),
            Err(e) => return assert!(e.to_string().contains("restartable"), "{e}"),
        }
    }
}

#[test]
fn call_that_is_not_ours_is_not_made() {
    let mut subject = Subject::start("say('ready')\nwait_for_end()");
    assert_eq!(subject.line(), "ready");
    subject.wait_for_calls(&[libc::SYS_read]);
    let (mut halts, remote) = (subject.halts(), Remote::open(subject.pid()).unwrap());
    let mut before = [0; 7];
    remote.memory.read_exact_at(&mut before, remote.instruction).unwrap();
    // mov eax, SYS_getpid; syscall
    remote.memory.write_all_at(&[0xb8, 39, 0, 0, 0, 0x0f, 0x05], remote.instruction).unwrap();
    let made = borrow_thread(&mut halts, |tracee| remote.call(tracee, libc::SYS_getppid, [0; 6]));
    remote.memory.write_all_at(&before, remote.instruction).unwrap();
    assert!(made.unwrap_err().to_string().contains("another system call"), "it was made");
    subject.tell_to_end();
    assert_eq!(subject.line_with(&mut halts), "end");
}

#[test]
fn filter_counts_for_the_call_that_has_ksmd_merge() {
    if !rustix::process::geteuid().is_root() {
        return eprintln!("skipped: filters are shown to root only");
    }
    let mut subject = Subject::start(NO_PRCTL);
    assert_eq!(subject.line(), "ready");
    subject.wait_for_calls(&[libc::SYS_read]);
    let signals = Signals::catch().unwrap();
    let why = format!("{:#}", crate::ksm::set(subject.pid(), true, &signals, |_| {}).unwrap_err());
    assert!(why.contains("does not let it call prctl"), "{why}");
    assert_eq!(crate::ksm::is_merged(subject.pid()), Some(false));
    subject.tell_to_end();
    assert_eq!(subject.line(), "end");
}
