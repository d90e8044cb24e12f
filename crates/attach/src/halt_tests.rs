use super::Halts;
use crate::testing::{PATIENCE, Subject, halt, wait_for};
use crate::threads;
use host::Signals;
use std::collections::BTreeMap;
use std::fs;
use std::time::{Duration, Instant};

/// A program whose system calls each wait for something that never comes, with a time limit of 0.6 s.
const TIMED: &str = "
raw(272, 0x08000000)
limit_s = 0.6
ms = int(limit_s * 1000)
ts = struct.pack('qq', 0, ms * 1000000)
tv = struct.pack('qq', 0, ms * 1000)
kept = []
def pair():
    both = socket.socketpair()
    kept.extend(both)
    both[0].setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, tv)
    return both[0].fileno()
def listener(family, place):
    made = socket.socket(family)
    made.bind(place)
    made.listen(0)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, tv)
    kept.append(made)
    return made
def crowded(family, place):
    for n in range(3):
        other = socket.socket(family)
        other.setblocking(False)
        other.connect_ex(place)
        kept.append(other)
    made = socket.socket(family)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, tv)
    kept.append(made)
    return made.fileno()
buffer = ctypes.create_string_buffer(4096)
at = ctypes.addressof(buffer)
piece = struct.pack('QQ', at, 100)
epoll = select.epoll()
no_signal = struct.pack('Q', 1 << 11)
semaphores = raw(64, 0, 1, 0o600)
take_one = struct.pack('Hhh', 0, -1, 0)
ring = ctypes.c_long(0)
assert raw(206, 8, ctypes.addressof(ring)) == 0
word = ctypes.c_int(1)
unix = listener(socket.AF_UNIX, '')
inet = listener(socket.AF_INET, ('127.0.0.1', 0))
address = struct.pack('=H', 1) + unix.getsockname()
inet_address = struct.pack('=H', 2) + struct.pack('!H', inet.getsockname()[1]) + socket.inet_aton('127.0.0.1') + bytes(8)
pieces = ctypes.create_string_buffer(piece)
header = ctypes.create_string_buffer(struct.pack('QIIQQQQi4x', 0, 0, 0, ctypes.addressof(pieces), 1, 0, 0, 0))
quiet = [listener(socket.AF_UNIX, '').fileno() for n in range(2)]
calls = [
    ('epoll_wait', 232, epoll.fileno(), at, 1, ms),
    ('epoll_pwait', 281, epoll.fileno(), at, 1, ms, 0, 8),
    ('epoll_pwait2', 441, epoll.fileno(), at, 1, ts, 0, 8),
    ('semtimedop', 220, semaphores, take_one, 1, ts),
    ('rt_sigtimedwait', 128, no_signal, 0, ts, 8),
    ('io_getevents', 208, ring.value, 1, 1, at, ts),
    ('io_pgetevents', 333, ring.value, 1, 1, at, ts, 0),
    ('recvfrom', 45, pair(), at, 1, 0, 0, 0),
    ('recvmsg', 47, pair(), header, 0),
    ('read', 0, pair(), at, 1),
    ('readv', 19, pair(), piece, 1),
    ('accept', 43, quiet[0], 0, 0),
    ('accept4', 288, quiet[1], 0, 0, 0),
    ('connect', 42, crowded(socket.AF_UNIX, unix.getsockname()), address, len(address)),
    ('connect_inet', 42, crowded(socket.AF_INET, inet.getsockname()), inet_address, 16),
    ('futex', 202, ctypes.addressof(word), 0, 1, ts),
    ('nanosleep', 35, ts, 0),
    ('clock_nanosleep', 230, 1, 0, ts, 0),
    ('poll', 7, 0, 0, ms),
    ('ppoll', 271, 0, 0, ctypes.create_string_buffer(ts), 0, 0),
    ('select', 23, 0, 0, 0, 0, ctypes.create_string_buffer(tv)),
    ('pselect6', 270, 0, 0, 0, 0, ctypes.create_string_buffer(ts), 0),
]
for one in calls: apart(*one)
say(len(calls))
sys.stdin.read()
raw(66, semaphores, 0, 0)
os._exit(0)
";

/// What the calls of [`TIMED`] return, where that is not 0.
const ANSWERS: [(&str, &str); 11] = [
    ("semtimedop", "EAGAIN"),
    ("rt_sigtimedwait", "EAGAIN"),
    ("recvfrom", "EAGAIN"),
    ("recvmsg", "EAGAIN"),
    ("read", "EAGAIN"),
    ("readv", "EAGAIN"),
    ("accept", "EAGAIN"),
    ("accept4", "EAGAIN"),
    ("connect", "EAGAIN"),
    ("connect_inet", "EINPROGRESS"),
    ("futex", "ETIMEDOUT"),
];

/// Once, `recv` on a socket with a time limit returned 0 when the limit was over, as if the other end had hung up.
#[test]
fn calls_with_time_limit_answer_as_without_stops_and_not_early() {
    let mut subject = Subject::start(TIMED);
    let mut halts = subject.halts();
    let count: usize = subject.line().parse().expect("a number");
    let (mut told, until) = (BTreeMap::new(), Instant::now() + PATIENCE);
    // Each stop would begin them again for the whole time.
    while told.len() < count {
        assert!(Instant::now() < until, "of {count}: {told:?}");
        halts.halt(&[]);
        halts.go();
        let pause = Instant::now() + Duration::from_millis(50);
        while Instant::now() < pause {
            halts.tend();
            let Some(line) = subject.line_within(Duration::from_millis(1)) else { continue };
            let words: Vec<&str> = line.split(' ').collect();
            told.insert(words[0].to_owned(), (words[1].to_owned(), words[2].parse::<u64>().expect("a time")));
        }
    }
    for (name, (answer, took_ms)) in &told {
        let expected = ANSWERS.iter().find(|(known, _)| known == name).map_or("0", |(_, answer)| answer);
        assert_eq!(answer, expected, "{name}");
        // The kernel measures some limits in ticks, of which it may leave out a part.
        assert!(*took_ms >= 580, "{name}: {took_ms} ms");
    }
    subject.tell_to_end();
}

/// A restarted `connect` has its whole time limit again. If nobody ended it before that, it returned `EALREADY`.
#[test]
fn call_that_connects_and_is_looked_after_late_answers_as_without_stops() {
    let alone = TIMED
        .replace("for one in calls:", "for one in [call for call in calls if call[0] == 'connect_inet']:")
        .replace("say(len(calls))", "");
    let mut subject = Subject::start(&alone);
    subject.wait_for_calls(&[libc::SYS_connect]);
    let mut halts = subject.halts();
    halts.halt(&[]);
    halts.go();
    // It stops where the call begins again, and sleeps then.
    for _ in 0..100 {
        halts.tend();
        std::thread::sleep(Duration::from_millis(1));
    }
    // Longer than the time limit.
    std::thread::sleep(Duration::from_millis(1200));
    let line = subject.line_with(&mut halts);
    assert!(line.starts_with("connect_inet EINPROGRESS "), "{line}");
    subject.tell_to_end();
}

/// A program whose system calls each wait for something that never comes, without a time limit.
const ENDLESS: &str = "
raw(272, 0x08000000)
word = ctypes.c_int(1)
epoll = select.epoll()
buffer = ctypes.create_string_buffer(8192)
at = ctypes.addressof(buffer)
child = os.fork()
if child == 0:
    raw(157, 1, 9, 0, 0, 0)
    time.sleep(1000)
    os._exit(0)
queue = raw(68, 0, 0o600)
full = raw(68, 0, 0o600)
while raw(69, full, struct.pack('q', 1) + bytes(4096), 4096, 0o4000) == 0: pass
place = tempfile.mkdtemp()
os.mkfifo(place + '/fifo')
locked = open(place + '/locked', 'w')
fcntl.flock(locked, fcntl.LOCK_EX)
again = open(place + '/locked', 'w')
ranged = open(place + '/ranged', 'w')
other = open(place + '/ranged', 'w')
lock = struct.pack('hhqqi4x', fcntl.F_WRLCK, 0, 0, 0, 0)
fcntl.fcntl(ranged, 37, lock)
semaphores = raw(64, 0, 1, 0o600)
take_one = struct.pack('Hhh', 0, -1, 0)
sockets = socket.socketpair()
ends = os.pipe()
calls = [
    ('futex', 202, ctypes.addressof(word), 0, 1, 0),
    ('epoll_wait', 232, epoll.fileno(), at, 1, -1),
    ('poll', 7, 0, 0, -1),
    ('ppoll', 271, 0, 0, 0, 0, 0),
    ('select', 23, 0, 0, 0, 0, 0),
    ('pselect6', 270, 0, 0, 0, 0, 0, 0),
    ('pause', 34),
    ('rt_sigsuspend', 130, bytes(8), 8),
    ('wait4', 61, child, 0, 0, 0),
    ('waitid', 247, 1, child, at, 4, 0),
    ('flock', 73, again.fileno(), 2),
    ('fcntl', 72, other.fileno(), 38, lock),
    ('msgrcv', 70, queue, at, 4096, 0, 0),
    ('msgsnd', 69, full, struct.pack('q', 1) + bytes(4096), 4096, 0),
    ('open', 2, (place + '/fifo').encode(), 0, 0),
    ('openat', 257, -100, (place + '/fifo').encode(), 0, 0),
    ('semop', 65, semaphores, take_one, 1),
    ('recvfrom', 45, sockets[0].fileno(), at, 1, 0, 0, 0),
    ('read', 0, ends[0], at, 1),
]
for one in calls: apart(*one)
say(*[one[1] for one in calls])
sys.stdin.readline()
os.kill(child, 9)
os.unlink(place + '/fifo')
os.unlink(place + '/locked')
os.unlink(place + '/ranged')
os.rmdir(place)
raw(71, queue, 0, 0)
raw(71, full, 0, 0)
raw(66, semaphores, 0, 0)
say('end')
os._exit(0)
";

#[test]
fn calls_without_time_limit_do_not_end_by_stops() {
    let mut subject = Subject::start(ENDLESS);
    let mut halts = subject.halts();
    let numbers: Vec<i64> = subject.line().split(' ').map(|word| word.parse().expect("a number")).collect();
    subject.wait_for_calls(&numbers);
    // The kernel goes on with `poll` by another call.
    let goes_on = |number: &i64| if *number == libc::SYS_poll { libc::SYS_restart_syscall } else { *number };
    let again: Vec<i64> = numbers.iter().map(goes_on).collect();
    for _ in 0..3 {
        halt(&mut halts, &[]);
        halts.go();
        wait_for("all go on", || {
            halts.tend();
            !halts.is_pending()
        });
        assert_eq!(halts.due(), None, "nothing is to be ended from outside");
        assert_eq!(subject.line_within(Duration::from_millis(10)), None);
        subject.wait_for_calls(&again);
    }
    subject.tell_to_end();
    let mut said = subject.line();
    // They end, when what they wait for does.
    while said != "end" {
        assert!(!said.contains("EINTR"), "{said}");
        said = subject.line();
    }
}

/// The states of a process's threads, by the kernel's letters, but for those that have ended.
fn states(pid: u32) -> Vec<(i32, u8)> {
    let state = |thread: rustix::process::Pid| {
        let stat = fs::read_to_string(threads::of(pid, thread, "stat")).ok()?;
        let state = stat.rsplit_once(')')?.1.trim_start().bytes().next()?;
        Some((thread.as_raw_nonzero().get(), state)).filter(|_| threads::runs_program(pid, thread))
    };
    threads::list(pid).expect("it runs").into_iter().filter_map(state).collect()
}

/// A program whose threads make further threads all the time.
const MAKER: &str = "
def one(depth):
    end = time.monotonic() + 0.002
    while time.monotonic() < end: pass
    if depth: make(depth - 1)
def make(depth):
    threading.Thread(target=one, args=(depth,)).start()
def forever():
    while True:
        made = [threading.Thread(target=one, args=(1,)) for n in range(3)]
        for thread in made: thread.start()
        for thread in made: thread.join()
for n in range(2): threading.Thread(target=forever, daemon=True).start()
rests = threading.Thread(target=time.sleep, args=(1000,), daemon=True)
rests.start()
say(rests.native_id)
wait_for_end()
";

#[test]
fn all_threads_stand_still_while_threads_are_made_but_those_that_are_left_out() {
    let mut subject = Subject::start(MAKER);
    let mut halts = subject.halts();
    let own: u64 = subject.line().parse().expect("a number");
    for _ in 0..20 {
        halt(&mut halts, &[]);
        let looks = [states(subject.pid()), states(subject.pid())];
        let all_stand = looks.iter().all(|look| look.iter().all(|(_, state)| *state == b't'));
        halts.go();
        assert!(all_stand && !looks[0].is_empty(), "{looks:?}");
        assert!(!halts.is_pending());
    }
    halt(&mut halts, &[own]);
    let all = states(subject.pid());
    halts.go();
    for (number, state) in all {
        assert_eq!(state != b't', u64::from(number.cast_unsigned()) == own, "{number}");
    }
    subject.tell_to_end();
    assert_eq!(subject.line(), "end");
}

/// A program with a write to a full pipe, and a `recv` with `MSG_WAITALL`: if interrupted, they would return that a
/// part was done.
const PARTIAL: &str = "
threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
ends = os.pipe()
sockets = socket.socketpair()
sockets[1].send(b'abc')
buffer = ctypes.create_string_buffer(100)
def write():
    say('wrote', raw(1, ends[1], bytes(300000), 300000))
def receive():
    say('received', raw(45, sockets[0].fileno(), ctypes.addressof(buffer), 6, socket.MSG_WAITALL, 0, 0))
threading.Thread(target=WORK, daemon=True).start()
say('tries')
sys.stdin.read()
sockets[1].send(b'def')
left = 300000
while WORK == write and left: left -= len(os.read(ends[0], left))
wait_for_end()
";

#[test]
fn call_that_would_answer_with_part_is_not_stopped() {
    for (work, number, answer) in
        [("write", libc::SYS_write, "wrote 300000"), ("receive", libc::SYS_recvfrom, "received 6")]
    {
        let mut subject = Subject::start(&PARTIAL.replace("WORK", work));
        let mut halts = subject.halts();
        assert_eq!(subject.line(), "tries");
        subject.wait_for_calls(&[number, libc::SYS_clock_nanosleep, libc::SYS_read]);
        halts.note_stops();
        for _ in 0..3 {
            assert!(!halts.halt(&[]), "{work}");
            assert!(!halts.is_pending() && halts.stops().is_empty(), "nobody was stopped");
        }
        subject.tell_to_end();
        assert_eq!(subject.line_with(&mut halts), answer);
    }
}

/// A program that says how often its signal handler has run.
const SIGNALLED: &str = "
caught = []
def handle(*unused):
    caught.append(1)
    say('caught', len(caught))
signal.signal(signal.SIGUSR1, handle)
epoll = select.epoll()
say('ready')
while len(caught) < 10: epoll.poll(1)
wait_for_end()
";

/// A signal that comes while its thread is stopped, or makes it stop, is taken afterwards, once.
#[test]
fn signals_that_come_during_stops_are_taken_once() {
    let mut subject = Subject::start(SIGNALLED);
    let mut halts = subject.halts();
    assert_eq!(subject.line(), "ready");
    for n in 1..=10 {
        if n % 2 == 0 {
            halt(&mut halts, &[]);
            kill(&subject, rustix::process::Signal::USR1);
        } else {
            kill(&subject, rustix::process::Signal::USR1);
            halts.halt(&[]);
        }
        halts.go();
        assert_eq!(subject.line_with(&mut halts), format!("caught {n}"));
    }
    subject.tell_to_end();
    assert_eq!(subject.line_with(&mut halts), "end");
}

fn kill(subject: &Subject, signal: rustix::process::Signal) {
    rustix::process::kill_process(subject.leader(), signal).expect("it runs");
}

/// A process that somebody has suspended stays so, until somebody else lets it go on.
#[test]
fn suspended_process_stays_suspended() {
    let mut subject = Subject::start("say('ready')\nselect.epoll().poll(60)\nwait_for_end()");
    let mut halts = subject.halts();
    assert_eq!(subject.line(), "ready");
    subject.wait_for_calls(&[libc::SYS_epoll_wait]);
    kill(&subject, rustix::process::Signal::STOP);
    let is_suspended = |subject: &Subject| states(subject.pid()).iter().all(|(_, state)| b"Tt".contains(state));
    wait_for("it is suspended", || is_suspended(&subject));
    for _ in 0..3 {
        halt(&mut halts, &[]);
        halts.go();
        wait_for("it is let go", || {
            halts.tend();
            !halts.is_pending()
        });
        std::thread::sleep(Duration::from_millis(5));
        halts.tend();
        assert!(is_suspended(&subject), "{:?}", states(subject.pid()));
    }
    kill(&subject, rustix::process::Signal::CONT);
    wait_for("it goes on", || {
        halts.tend();
        subject.calls().contains(&libc::SYS_epoll_wait)
    });
    subject.tell_to_end();
}

#[test]
fn time_to_stop_grows_only_when_it_was_too_short() {
    let subject = Subject::start("say('ready')\nwait_for_end()");
    let mut halts: Halts = subject.halts();
    subject.line();
    halts.note_stops();
    halt(&mut halts, &[]);
    halts.go();
    // Each attempt counts, of which a busy machine needs several.
    let stops = halts.stops().len();
    assert!(stops >= 1);
    halts.go();
    assert_eq!(halts.stops().len(), stops, "nothing was stopped");
}

/// Whether all threads of a program stand still for their tracer.
fn all_stand(subject: &Subject) -> bool {
    states(subject.pid()).iter().all(|(_, state)| *state == b't')
}

/// A program whose threads wait with a time limit, and without one.
const WAITERS: &str = "
epoll, other = select.epoll(), select.epoll()
events = ctypes.create_string_buffer(128)
apart('timed', 232, epoll.fileno(), ctypes.addressof(events), 1, 1500)
apart('endless', 281, other.fileno(), ctypes.addressof(events) + 64, 1, -1, 0, 8)
say('ready')
wait_for_end()
";

#[test]
fn thread_whose_call_is_looked_after_is_stopped_again_and_finished_with() {
    let mut subject = Subject::start(WAITERS);
    assert_eq!(subject.line(), "ready");
    subject.wait_for_calls(&[libc::SYS_epoll_wait, libc::SYS_epoll_pwait, libc::SYS_read]);
    let mut halts = subject.halts();
    for _ in 0..3 {
        halt(&mut halts, &[]);
        let stand = all_stand(&subject);
        halts.go();
        assert!(stand);
        wait_for("all go on", || {
            halts.tend();
            !halts.is_pending()
        });
        assert_eq!(halts.watched.len(), 1, "one has a time limit");
        assert!(halts.due().is_some_and(|due| due <= Instant::now() + Duration::from_millis(1500)));
    }
    halts.finish(&Signals::catch().unwrap());
    assert!(halts.watched.is_empty() && !halts.is_pending());
    assert!(subject.line().starts_with("timed 0 "));
    let tracers = threads::list(subject.pid()).unwrap();
    let mut tracers = tracers.into_iter().filter_map(|thread| threads::status(subject.pid(), thread, "TracerPid"));
    assert!(tracers.all(|tracer| tracer == "0"));
    subject.tell_to_end();
    assert_eq!(subject.line(), "end");
}

/// A program whose first thread waits for its child by `vfork`, which no signal ends. The child ends when it reads a
/// byte. `vfork` is called with Python's lock held, so that the child has it, and can go on in Python.
const HELD: &str = "
threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
say('ready')
locked = ctypes.PyDLL(None).syscall
if locked(56, 0x4000 | 17, 0, 0, 0, 0) == 0:
    os.read(0, 1)
    os._exit(0)
say('ended')
wait_for_end()
";

#[test]
fn nobody_stays_stopped_while_one_thread_cannot_be() {
    let mut subject = Subject::start(HELD);
    assert_eq!(subject.line(), "ready");
    subject.wait_for_calls(&[libc::SYS_clone, libc::SYS_clock_nanosleep]);
    let mut halts = subject.halts();
    halts.note_stops();
    let try_and_go_on = |halts: &mut Halts| {
        assert!(!halts.halt(&[]));
        wait_for("the others go on", || {
            halts.tend();
            !states(subject.pid()).iter().any(|(_, state)| *state == b't')
        });
    };
    let leader = subject.leader();
    // It is the last to be asked. On a busy machine another one may be late before.
    wait_for("it was asked to stop", || {
        try_and_go_on(&mut halts);
        halts.late.iter().any(|late| late.tracee().thread() == leader)
    });
    let before = halts.stops().len();
    for _ in 0..3 {
        try_and_go_on(&mut halts);
        assert!(halts.is_pending(), "it will stop, once it can");
    }
    assert_eq!(halts.stops().len(), before, "nobody is stopped while one is late");
    subject.tell("go on");
    assert_eq!(subject.line_with(&mut halts), "ended");
    halt(&mut halts, &[]);
    let stand = all_stand(&subject);
    halts.go();
    assert!(stand);
    subject.tell_to_end();
    assert_eq!(subject.line_with(&mut halts), "end");
}
