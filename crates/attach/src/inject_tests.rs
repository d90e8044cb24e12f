use super::{Thread, borrow_thread, make_thread};
use crate::object::Object;
use crate::remote::Remote;
use crate::testing::{Subject, wait_for};
use crate::threads;
use act::trace::Tracee;
use host::Mapping;
use rustix::process::{Signal, kill_process};
use std::cell::Cell;
use std::fs::File;

/// A program whose only thread blocks a signal, and waits for some milliseconds in a call that the kernel would not
/// restart.
const WAITS: &str = "
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
epoll = select.epoll()
event = ctypes.create_string_buffer(64)
say('ready')
call('waited', 232, epoll.fileno(), ctypes.addressof(event), 1, LIMIT)
wait_for_end()
";

/// A program whose one system call (`epoll_wait`) waits for this time.
fn waits(milliseconds: u32) -> Subject {
    Subject::start(&WAITS.replace("LIMIT", &milliseconds.to_string()))
}

#[test]
fn borrowed_thread_goes_on_as_it_was() {
    let mut subject = waits(1000);
    assert_eq!(subject.line(), "ready");
    subject.wait_for_calls(&[libc::SYS_epoll_wait]);
    let (mut halts, remote) = (subject.halts(), Remote::open(subject.pid()).unwrap());
    let status =
        || ["SigBlk", "SigPnd", "TracerPid"].map(|field| threads::status(subject.pid(), subject.leader(), field));
    let before = status();
    let ask = |tracee: &act::trace::Tracee| {
        assert_eq!(tracee.blocked_signals()?, !(1 << 8 | 1 << 18), "all but two that nothing blocks");
        remote.call(tracee, libc::SYS_getpid, [0; 6])
    };
    let (answer, _) = borrow_thread(&mut halts, ask).unwrap();
    assert_eq!(answer, i64::from(subject.pid()));
    let said = subject.line_with(&mut halts);
    let words: Vec<&str> = said.split(' ').collect();
    assert_eq!(words[..2], ["waited", "0"], "{said}");
    assert!(words[2].parse::<u64>().is_ok_and(|ms| ms >= 1000), "{said}");
    wait_for("nobody traces it", || {
        halts.tend();
        status() == before
    });
    subject.tell_to_end();
    assert_eq!(subject.line(), "end");
}

#[test]
fn work_that_fails_leaves_thread_as_it_was() {
    let mut subject = waits(1000);
    assert_eq!(subject.line(), "ready");
    subject.wait_for_calls(&[libc::SYS_epoll_wait]);
    let mut halts = subject.halts();
    let fail = |_: &act::trace::Tracee| -> anyhow::Result<()> { anyhow::bail!("it fails") };
    assert_eq!(borrow_thread(&mut halts, fail).unwrap_err().to_string(), "it fails");
    assert!(subject.line_with(&mut halts).starts_with("waited 0 "));
    assert_eq!(threads::status(subject.pid(), subject.leader(), "SigBlk").unwrap(), "0000000000000800");
    subject.tell_to_end();
    assert_eq!(subject.line(), "end");
}

/// Once, the signal that suspends the program was lost, and the program went on.
#[test]
fn program_that_is_suspended_meanwhile_stays_so() {
    // Its call must not have ended before the thread is borrowed, and this thread may be late.
    let mut subject = waits(5000);
    assert_eq!(subject.line(), "ready");
    subject.wait_for_calls(&[libc::SYS_epoll_wait]);
    let (mut halts, remote, leader) = (subject.halts(), Remote::open(subject.pid()).unwrap(), subject.leader());
    let suspend = |tracee: &act::trace::Tracee| {
        kill_process(leader, Signal::STOP)?;
        remote.call(tracee, libc::SYS_getpid, [0; 6])
    };
    let (answer, _) = borrow_thread(&mut halts, suspend).unwrap();
    assert_eq!(answer, i64::from(subject.pid()));
    wait_for("it is let go", || {
        halts.tend();
        !halts.is_pending()
    });
    // Looked after all the time: a thread that only waits for its tracer goes on by that, and sleeps in its call.
    for _ in 0..100 {
        halts.tend();
        assert_eq!(subject.line_within(std::time::Duration::from_millis(1)), None);
    }
    let state = threads::status(subject.pid(), leader, "State").expect("it is there");
    assert!(state.starts_with(['T', 't']), "{state}");
    kill_process(leader, Signal::CONT).unwrap();
    assert!(subject.line_with(&mut halts).starts_with("waited 0 "));
    subject.tell_to_end();
    assert_eq!(subject.line_with(&mut halts), "end");
}

/// A program of which one thread, when told to, gives all threads a seccomp filter. For one call, the filter returns
/// `ACTION`.
const FILTERS: &str = "
code = ctypes.create_string_buffer(struct.pack('HBBI' * 4, 0x20, 0, 0, 0, 0x15, 0, 1, NUMBER, 6, 0, 0, ACTION, 6, 0, 0, 0x7fff0000))
program = struct.pack('HxxxxxxQ', 4, ctypes.addressof(code))
threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
say('ready')
sys.stdin.readline()
assert raw(317, 1, 1, program) == 0
say('filtered')
wait_for_end()
";

/// Once, the program and the agent's thread were killed by the first call that such a filter forbids.
#[test]
fn filter_that_all_threads_are_given_during_injection_is_judged() {
    if !rustix::process::geteuid().is_root() || host::open_userfaultfd_device().is_err() {
        return eprintln!("skipped: filters are shown to root only, and /dev/userfaultfd is needed");
    }
    for (number, action, name) in
        [(libc::SYS_mremap, "0x50001", "mremap"), (libc::SYS_socketpair, "0x80000000", "socketpair")]
    {
        let script = FILTERS.replace("NUMBER", &number.to_string()).replace("ACTION", action);
        let mut subject = Subject::start(&script);
        assert_eq!(subject.line(), "ready");
        let pid = subject.pid();
        subject.wait_for_calls(&[libc::SYS_clock_nanosleep, libc::SYS_read]);
        let (mut halts, remote) = (subject.halts(), Remote::open(pid).unwrap());
        let made = Cell::default();
        borrow_thread(&mut halts, |tracee| make_thread(pid, &remote, tracee, &made)).unwrap();
        let tracee = Tracee::of_clone(made.take().expect("a thread"));
        subject.tell("filter");
        assert_eq!(subject.line_with(&mut halts), "filtered");
        subject.wait_for_calls(&[libc::SYS_read]);
        let before = Mapping::list(pid).unwrap();
        let file = File::open("/dev/null").unwrap().into();
        let object = Object { file, bytes: 1 << 16, segments: Vec::new(), entry: 0, headers: (0, 0) };
        let thread = Thread { pid, tracee: &tracee, remote: &remote, ours: None, left: Cell::default() };
        let why = format!("{:#}", thread.furnish(&object, &[]).map(drop).unwrap_err());
        assert!(why.ends_with(&format!("does not let the agent call {name}")), "{why}");
        let after = Mapping::list(pid).expect("it runs");
        assert_eq!(format!("{after:?}"), format!("{before:?}"));
        let _ = remote.call(&tracee, libc::SYS_exit, [0; 6]);
        wait_for("the new thread has ended", || threads::list(pid).is_ok_and(|all| all.len() == 2));
        subject.tell_to_end();
        assert_eq!(subject.line(), "end");
    }
}
