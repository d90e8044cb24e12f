use super::Stopped;
use crate::mend::Call;
use crate::program::Program;
use crate::testing::{PATIENCE, Subject, wait_for};
use crate::threads::{self, Doing};
use crate::watched::Watched;
use act::trace::Tracee;
use rustix::process::Pid;
use std::time::{Duration, Instant};

/// The thread that sleeps in system call `number`. It may just be about to restart the call, so that one look may miss
/// it.
fn sleeper(subject: &Subject, number: i64) -> Pid {
    let is_in =
        |thread: &Pid| matches!(threads::doing(subject.pid(), *thread), Doing::Call(call) if call.number == number);
    let mut found = None;
    wait_for("a thread is in the call", || {
        found = threads::list(subject.pid()).expect("it runs").into_iter().find(is_in);
        found.is_some()
    });
    found.expect("it is in the call")
}

/// Asks a thread to stop, without the checks of [`ask`]. It may have begun its call after it was looked at.
fn interrupt(thread: Pid) -> Stopped {
    let tracee = Tracee::seize(thread, false).expect("trace it");
    tracee.interrupt().expect("it runs");
    let mut stopped = Stopped { tracee, stop: None, asked: Instant::now(), slept: None, own: None, made: None };
    assert!(stopped.wait(Instant::now() + PATIENCE));
    stopped
}

/// Has a watched thread stand still, and go on.
fn interrupt_again(watched: Option<Watched>, program: &Program) -> Option<Watched> {
    let mut watched = watched.expect("it is watched");
    watched.ask().expect("it runs");
    wait_for("it stands still", || watched.stands() != Some(false));
    watched.tend(program)
}

/// The next `N` lines that the program prints. Its watched thread is looked after meanwhile.
fn lines<const N: usize>(subject: &Subject, program: &Program, mut watched: Option<Watched>) -> [String; N] {
    lines_of(subject, program, &mut watched)
}

/// As [`lines`], for a thread that stays watched afterwards.
fn lines_of<const N: usize>(subject: &Subject, program: &Program, watched: &mut Option<Watched>) -> [String; N] {
    let until = Instant::now() + PATIENCE;
    std::array::from_fn(|_| {
        loop {
            *watched = watched.take().and_then(|watched| watched.tend(program));
            if let Some(line) = subject.line_within(Duration::from_millis(1)) {
                break line;
            }
            assert!(Instant::now() < until, "it says nothing");
        }
    })
}

/// A program in which a thread sends to a socket that is full and has a time limit. The first thread reads all of it
/// when it is told to.
const FULL: &str = "
ours, theirs = socket.socketpair()
ours.setblocking(False)
sent = 0
try:
    while True: sent += ours.send(b'x' * 4096)
except BlockingIOError: pass
ours.setblocking(True)
ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack('qq', LIMIT, 0))
message = bytes(n % 251 for n in range(400000))
apart('sent', 44, ours.fileno(), message, len(message), 0, 0, 0)
sys.stdin.readline()
got = b''
while len(got) < sent + len(message) and not STALLS: got += theirs.recv(1 << 20)
say(got[sent:] == message)
wait_for_end()
";

/// Once, such a call returned `EINTR`, though no signal handler had run.
#[test]
fn send_that_has_sent_nothing_is_begun_again() {
    let mut subject = Subject::start(&FULL.replace("LIMIT", "1000").replace("STALLS", "False"));
    let program = subject.program();
    let thread = sleeper(&subject, libc::SYS_sendto);
    let mut watched = interrupt(thread).go(&program);
    for _ in 0..3 {
        sleeper(&subject, libc::SYS_sendto);
        watched = interrupt_again(watched, &program);
    }
    subject.tell_to_end();
    let said: [String; 2] = lines(&subject, &program, watched);
    assert!(said.iter().any(|said| said == "True"), "{said:?}");
    assert!(said.iter().any(|said| said.starts_with("sent 400000 ")), "{said:?}");
}

#[test]
fn send_that_sends_nothing_in_its_time_answers_so() {
    let subject = Subject::start(&FULL.replace("LIMIT", "1").replace("STALLS", "True"));
    let program = subject.program();
    let thread = sleeper(&subject, libc::SYS_sendto);
    let mut watched = interrupt(thread).go(&program);
    assert!(watched.as_ref().is_some_and(|watched| watched.due().is_some()));
    for _ in 0..3 {
        watched = interrupt_again(watched, &program);
    }
    let [said] = lines(&subject, &program, watched);
    assert!(said.starts_with("sent EAGAIN "), "{said}");
}

/// A program in which a thread writes more than a pipe takes. For each line that the first thread reads, it takes a
/// part out of the pipe.
const PIPED: &str = "
taken, given = os.pipe()
message = bytes(n % 251 for n in range(400000))
apart('wrote', 1, given, message, len(message))
time.sleep(0.01)
got = os.read(taken, 5000)
say('took', len(got))
sys.stdin.readline()
while len(got) < len(message): got += os.read(taken, 60000)
say(got == message)
wait_for_end()
";

#[test]
fn write_that_was_cut_short_is_completed() {
    let mut subject = Subject::start(PIPED);
    let program = subject.program();
    assert_eq!(subject.line(), "took 5000");
    let thread = sleeper(&subject, libc::SYS_write);
    let mut watched = interrupt(thread).go(&program);
    for _ in 0..3 {
        watched = interrupt_again(watched, &program);
    }
    subject.tell_to_end();
    let said: [String; 2] = lines(&subject, &program, watched);
    assert!(said.iter().any(|said| said == "True"), "{said:?}");
    assert!(said.iter().any(|said| said.starts_with("wrote 400000 ")), "{said:?}");
}

/// A write to a file that is no pipe or socket must not be repeated for the rest: what it has returned stays.
#[test]
fn only_pipes_and_sockets_take_the_rest() {
    let subject = Subject::start(
        "place = tempfile.TemporaryFile()\nends = os.pipe()\ns = socket.socketpair()\nsay(place.fileno(), ends[1], s[0].fileno())\nwait_for_end()",
    );
    let program = subject.program();
    let numbers: Vec<u64> = subject.line().split(' ').map(|word| word.parse().expect("a number")).collect();
    assert_eq!(numbers.iter().map(|number| program.is_stream(*number)).collect::<Vec<_>>(), [false, true, true]);
    assert!(!program.is_stream(1000));
}

/// Signals that a program has handlers for are read from its status.
#[test]
fn handlers_of_signals_are_known() {
    let subject = Subject::start(
        "signal.signal(signal.SIGUSR1, lambda *x: 0)\nsignal.signal(64, lambda *x: 0)\nsignal.signal(signal.SIGUSR2, signal.SIG_IGN)\nsignal.signal(signal.SIGHUP, signal.SIG_DFL)\nsay('ready')\nwait_for_end()",
    );
    let program = subject.program();
    subject.line();
    let caught = [libc::SIGHUP, libc::SIGUSR1, libc::SIGUSR2, 64].map(|signal| program.catches(signal));
    assert_eq!(caught, [false, true, false, true]);
}

/// A thread that has slept for long in a call does not begin its time anew.
#[test]
fn time_that_was_slept_before_counts() {
    let subject = Subject::start(
        "epoll = select.epoll()\nsay('ready')\ncall('waited', 232, epoll.fileno(), ctypes.addressof(ctypes.create_string_buffer(64)), 1, 3000)\nwait_for_end()",
    );
    subject.line();
    let thread = sleeper(&subject, libc::SYS_epoll_wait);
    std::thread::sleep(Duration::from_millis(500));
    let program = subject.program();
    let mut clocks = crate::waited::Clocks::default();
    clocks.refresh();
    let super::Asked::Stops(mut stopped) = super::ask(subject.pid(), thread, &clocks, false).unwrap() else {
        panic!("it must not be stopped");
    };
    let asked = stopped.asked;
    assert!(stopped.wait(Instant::now() + PATIENCE) && stopped.is_plain());
    let call = Call::of(&stopped.tracee.registers().unwrap()).expect("it is in a call");
    let slept = stopped.slept(&program, &call);
    // It has rested ever since, unless a busy machine keeps the kernel from telling.
    assert_eq!(slept, stopped.slept.map_or(Duration::ZERO, |(.., slept)| slept));
    let other = Call { arguments: [0; 6], ..call };
    assert_eq!(stopped.slept(&program, &other), Duration::ZERO, "not the call that it slept in");
    let watched = stopped.go(&program);
    let due = watched.as_ref().and_then(Watched::due).expect("its time is limited");
    assert_eq!(due, asked + Duration::from_secs(3) - slept);
    drop(watched);
    eprintln!("slept {slept:?} of 500 ms");
}

/// A thread whose call would return that a part was done is not even asked to stop, and stays untraced.
#[test]
fn thread_that_must_not_be_stopped_is_not_asked() {
    let subject = Subject::start(PIPED);
    assert_eq!(subject.line(), "took 5000");
    let thread = sleeper(&subject, libc::SYS_write);
    let asked = super::ask(subject.pid(), thread, &crate::waited::Clocks::default(), false);
    assert!(matches!(asked, Ok(super::Asked::MustNot)), "{asked:?}");
    assert_eq!(threads::status(subject.pid(), thread, "TracerPid").as_deref(), Some("0"));
}

/// A stop may be one for a signal, which the thread then takes.
#[test]
fn signal_that_stopped_thread_is_taken() {
    let script = "signal.signal(signal.SIGUSR1, lambda *x: say('caught'))\nsay('ready')\nwait_for_end()";
    let mut subject = Subject::start(script);
    assert_eq!(subject.line(), "ready");
    let program = subject.program();
    subject.wait_for_calls(&[libc::SYS_read]);
    let tracee = Tracee::seize(subject.leader(), false).expect("trace it");
    let mut stopped = Stopped { tracee, stop: None, asked: Instant::now(), slept: None, own: None, made: None };
    rustix::process::kill_process(subject.leader(), rustix::process::Signal::USR1).expect("it runs");
    assert!(stopped.wait(Instant::now() + PATIENCE) && !stopped.is_plain());
    assert!(stopped.go(&program).is_none());
    assert_eq!(subject.line(), "caught");
    subject.tell_to_end();
    assert_eq!(subject.line(), "end");
}

/// Looks after a thread until it goes on untraced.
fn tend_to_end(mut watched: Option<Watched>, program: &Program) {
    wait_for("nobody traces it", || {
        watched = watched.take().and_then(|watched| watched.tend(program));
        watched.is_none()
    });
}

/// A program like [`PIPED`]. The thread that writes takes a signal when the leader is told so.
const PIPED_AND_SIGNALLED: &str = "
taken, given = os.pipe()
signal.signal(signal.SIGUSR1, lambda *x: 0)
message = bytes(400000)
writer = threading.Thread(target=call, args=('wrote', 1, given, message, len(message)), daemon=True)
writer.start()
say('writes')
sys.stdin.readline()
signal.pthread_kill(writer.ident, signal.SIGUSR1)
wait_for_end()
";

/// After a signal handler has run, a write returns all that was written, also the part before the stop.
#[test]
fn write_that_a_handler_interrupts_answers_with_all_that_was_written() {
    for is_watched in [true, false] {
        let mut subject = Subject::start(PIPED_AND_SIGNALLED);
        assert_eq!(subject.line(), "writes");
        let program = subject.program();
        let thread = sleeper(&subject, libc::SYS_write);
        if is_watched {
            let watched = interrupt(thread).go(&program);
            sleeper(&subject, libc::SYS_write);
            subject.tell("signal");
            tend_to_end(watched, &program);
        } else {
            // The signal itself is what stops it.
            let tracee = Tracee::seize(thread, false).expect("trace it");
            let mut stopped = Stopped { tracee, stop: None, asked: Instant::now(), slept: None, own: None, made: None };
            subject.tell("signal");
            assert!(stopped.wait(Instant::now() + PATIENCE));
            assert!(stopped.go(&program).is_none());
        }
        let said = subject.line();
        assert!(said.starts_with("wrote 65536 "), "{said}");
    }
}

/// When a signal handler runs in a watched call, the thread is no longer traced.
#[test]
fn thread_whose_call_a_handler_interrupts_is_not_traced_any_more() {
    let script = "signal.signal(signal.SIGUSR1, lambda *x: say('caught'))
epoll = select.epoll()
call('waited', 232, epoll.fileno(), ctypes.addressof(ctypes.create_string_buffer(64)), 1, 100000)
wait_for_end()";
    let mut subject = Subject::start(script);
    let program = subject.program();
    let watched = interrupt(sleeper(&subject, libc::SYS_epoll_wait)).go(&program);
    rustix::process::kill_process(subject.leader(), rustix::process::Signal::USR1).expect("it runs");
    tend_to_end(watched, &program);
    let said = [subject.line(), subject.line()];
    assert!(said.iter().any(|said| said.starts_with("waited EINTR ")), "{said:?}");
    subject.tell_to_end();
}

/// A program like [`FULL`] with this time limit. Has a thread that sends, and that a stop has cut in two, watched for
/// the rest.
fn cut_in_two(limit: &str) -> (Subject, Program, Option<Watched>) {
    let script = FULL.replace("LIMIT", limit).replace("STALLS", "False");
    let script = script.replace(
        "sys.stdin.readline()",
        "sys.stdin.readline()\ngot = theirs.recv(50000)\nsay('took')\nsys.stdin.readline()",
    );
    let mut subject = Subject::start(&script.replace("got = b''", ""));
    let program = subject.program();
    let thread = sleeper(&subject, libc::SYS_sendto);
    let mut watched = interrupt(thread).go(&program);
    let first = watched.as_ref().and_then(Watched::due).expect("its time is limited");
    subject.tell("take a part");
    let [said] = lines_of(&subject, &program, &mut watched);
    assert_eq!(said, "took");
    sleeper(&subject, libc::SYS_sendto);
    watched = interrupt_again(watched, &program);
    wait_for("the part is known", || {
        watched = watched.take().and_then(|watched| watched.tend(&program));
        watched.as_ref().expect("it goes on").due().is_some_and(|due| due > first)
    });
    (subject, program, watched)
}

/// The part that was sent before the stop is counted in what the call returns.
#[test]
fn send_that_has_sent_a_part_sends_the_rest() {
    let (mut subject, program, watched) = cut_in_two("1000");
    subject.tell_to_end();
    let said: [String; 2] = lines(&subject, &program, watched);
    assert!(said.iter().any(|said| said == "True"), "{said:?}");
    assert!(said.iter().any(|said| said.starts_with("sent 400000 ")), "{said:?}");
}

/// Once, the time limit did not count for the rest of a call.
#[test]
fn send_whose_rest_is_late_answers_with_the_part() {
    let (subject, program, watched) = cut_in_two("3");
    let [said] = lines(&subject, &program, watched);
    let sent: u64 = said.split(' ').nth(1).and_then(|sent| sent.parse().ok()).expect("it has sent some");
    assert!((1..400_000).contains(&sent), "{said}");
}
