use super::{JUMP, Leadable, Way, are_the_files, is_entered, lead, lead_back, leadable, places, wait_for_library};
use crate::halt::Halts;
use crate::remote::Remote;
use crate::testing::{PATIENCE, Subject, halt, wait_for};
use crate::threads::{self, Doing};
use act::trace::{Stop, Tracee};
use page::{HostVirt, PageRange};
use rustix::process::Pid;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use std::{slice, thread};
use wire::attach::{GATE_MARK, GATE_MARK_AT, GATE_PAGES};

/// A number that no thread has on its stack.
const NOWHERE: u64 = 0x1234_5678_9abc;

/// A program with a gate that nobody serves, and with a thread that counts as the agent's. `mremap` is never called.
/// For each number that it reads, a thread sleeps in a call with that number on its stack, until the program reads
/// `out`.
const PROGRAM: &str = "
thread = threading.Thread(target=time.sleep, args=(1000,), daemon=True)
thread.start()
gate = mmap.mmap(-1, 8192, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
ours, theirs = socket.socketpair()
byte = ctypes.create_string_buffer(1)
say(thread.native_id, ctypes.addressof(ctypes.c_char.from_buffer(gate)))
for line in sys.stdin:
    if line.strip() == 'out':
        ours.send(b'x')
    else:
        apart('inside', 45, theirs.fileno(), ctypes.addressof(byte), 1, 0, 0, 0, int(line))
wait_for_end()
";

/// A running [`PROGRAM`], and what is needed to lead its calls of `mremap` to the gate.
struct Led {
    subject: Subject,
    halts: Halts,
    remote: Remote,
    own: u64,
    gate: PageRange,
    found: Leadable,
}

impl Led {
    fn start() -> Self {
        let subject = Subject::start(PROGRAM);
        let said = subject.line();
        let mut numbers = said.split(' ').map(|word| word.parse().expect("a number"));
        let (own, gate) = (numbers.next().unwrap(), numbers.next().unwrap());
        let (halts, remote) = (subject.halts(), Remote::open(subject.pid()).unwrap());
        remote.memory().write_all_at(&GATE_MARK, gate + GATE_MARK_AT as u64).unwrap();
        let [found] = leadable(subject.pid())[..] else { panic!("it has one C library") };
        let gate = PageRange { start: HostVirt(gate), pages: GATE_PAGES };
        Self { subject, halts, remote, own, gate, found }
    }

    fn pid(&self) -> u32 {
        self.subject.pid()
    }

    fn lead(&mut self) -> bool {
        halt(&mut self.halts, &[self.own]);
        let is_all = lead(self.pid(), &[self.own], self.gate.start, &[self.found]);
        self.halts.go();
        is_all.unwrap()
    }

    fn lead_back(&mut self) -> bool {
        let own = Pid::from_raw(i32::try_from(self.own).unwrap()).unwrap();
        let tracee = Tracee::seize(own, false).expect("trace it");
        tracee.interrupt().unwrap();
        while tracee.wait(Instant::now() + PATIENCE).unwrap().expect("it stops") != Stop::Asked {
            tracee.resume(act::trace::Resume::Freely, 0).unwrap();
        }
        let before = tracee.registers().unwrap();
        halt(&mut self.halts, &[self.own]);
        let orders = lead_back(self.pid(), &[self.own], self.remote.memory(), self.gate).unwrap();
        self.halts.go();
        for (number, arguments) in orders.iter().flatten() {
            self.remote.call(&tracee, *number, *arguments).unwrap();
        }
        tracee.set_registers(&before).unwrap();
        tracee.detach(0);
        orders.is_some()
    }

    fn read(&self, at: u64) -> [u8; 16] {
        let mut bytes = [0; 16];
        self.remote.memory().read_exact_at(&mut bytes, at).unwrap();
        bytes
    }

    /// The first bytes of `mremap`.
    fn begin(&self) -> [u8; 16] {
        self.read(self.function())
    }

    fn function(&self) -> u64 {
        self.found.function.start
    }

    fn write(&self, at: u64, bytes: &[u8]) {
        self.remote.memory().write_all_at(bytes, at).unwrap();
    }

    fn ways(&self) -> Vec<Way> {
        places(self.gate.start.0).filter_map(|at| Way::read(self.remote.memory(), at)).collect()
    }

    /// Calls `act` while a thread has `number` on its stack.
    fn while_on_stack<T>(&mut self, number: u64, act: impl FnOnce(&mut Self) -> T) -> T {
        self.subject.tell(&number.to_string());
        self.subject.wait_for_calls(&[libc::SYS_recvfrom]);
        let answer = act(self);
        self.subject.tell("out");
        assert!(self.subject.line_with(&mut self.halts).starts_with("inside 1 "));
        answer
    }
}

#[test]
fn function_is_led_to_gate_once_and_is_the_files_again_afterwards() {
    let mut led = Led::start();
    let before = led.begin();
    for _ in 0..2 {
        assert!(led.lead());
        led.found = leadable(led.pid())[0];
        let [way] = &led.ways()[..] else { panic!("{:?}", led.ways()) };
        assert_eq!((&led.begin()[..14], &way.replaced[..]), (&way.jump()[..], &before[..14]));
    }
    let pages = led.ways()[0].pages();
    assert!(!are_the_files(led.pid(), pages));
    assert!(led.lead_back());
    assert_eq!(led.begin(), before);
    assert!(are_the_files(led.pid(), pages));
}

#[test]
fn code_that_somebody_else_has_changed_is_left_alone() {
    let mut led = Led::start();
    let (before, found) = (led.begin(), led.found);
    // Changed since it was looked at.
    led.found.begin[0] ^= 1;
    assert!(led.lead());
    // Too short for a jump.
    led.found = Leadable { function: super::Function { bytes: 13, ..found.function }, ..found };
    assert!(led.lead());
    assert_eq!((led.begin(), led.ways()), (before, Vec::new()));
    // A page that is not the file's any more, with the same bytes in it.
    led.found = found;
    led.write(led.function(), &before[..1]);
    assert!(led.lead());
    assert_eq!((led.begin(), led.ways()), (before, Vec::new()));
}

#[test]
fn changes_that_others_have_made_since_stay_when_function_is_led_back() {
    let mut led = Led::start();
    let (before, behind) = (led.begin(), led.function() + 14);
    assert!(led.lead());
    led.write(behind, &[before[14] ^ 1]);
    assert!(led.lead_back());
    let after = led.begin();
    assert_eq!((&after[..14], after[14]), (&before[..14], before[14] ^ 1));
    let mut other = Led::start();
    assert!(other.lead());
    let changed = [&JUMP[..], &7_u64.to_ne_bytes()].concat();
    other.write(other.function(), &changed);
    assert!(other.lead_back());
    assert_eq!(other.begin()[..14], changed);
}

/// A thread that returned there would execute half a jump, or memory that is gone.
#[test]
fn nothing_changes_while_thread_returns_to_function_or_gate() {
    let mut led = Led::start();
    let (before, function, gate) = (led.begin(), led.function(), led.gate);
    for inside in [function + 1, function + 13] {
        assert!(!led.while_on_stack(inside, Led::lead));
        assert_eq!((led.begin(), led.ways()), (before, Vec::new()));
    }
    // It has yet to begin.
    assert!(led.while_on_stack(function, Led::lead));
    let jump = led.begin();
    assert_ne!(jump, before);
    for inside in [function + 1, function + 13, gate.start.0, gate.end().0 - 1] {
        assert!(!led.while_on_stack(inside, Led::lead_back));
        assert_eq!(led.begin(), jump);
    }
    assert!(led.while_on_stack(gate.end().0, Led::lead_back));
    assert_eq!(led.begin(), before);
}

#[test]
fn thread_is_found_at_its_instruction_unless_it_is_the_agents() {
    let led = Led::start();
    let leader = led.subject.leader();
    led.subject.wait_for_calls(&[libc::SYS_read]);
    let Doing::Call(call) = threads::doing(led.pid(), leader) else { panic!("it reads") };
    let [_, instruction] = call.place;
    let there = |own: &[u64], at: u64| is_entered(led.pid(), own, led.remote.memory(), slice::from_ref(&(at..at + 1)));
    assert!(there(&[led.own], instruction));
    assert!(!there(&[led.own], NOWHERE));
    assert!(!there(&[led.own, led.pid().into()], instruction));
}

/// The kernel does not tell at which instruction a running thread is.
#[test]
fn thread_that_runs_may_be_anywhere() {
    let subject = Subject::start("while True: pass");
    let remote = Remote::open(subject.pid()).unwrap();
    wait_for("it runs", || threads::doing(subject.pid(), subject.leader()) == Doing::Running);
    assert!(is_entered(subject.pid(), &[], remote.memory(), slice::from_ref(&(NOWHERE..NOWHERE + 1))));
}

/// A stack may consist of several mappings, if pages of it were folded.
#[test]
fn thread_is_found_by_stack_that_is_several_mappings() {
    let led = Led::start();
    led.subject.wait_for_calls(&[libc::SYS_read]);
    let Doing::Call(call) = threads::doing(led.pid(), led.subject.leader()) else { panic!("it reads") };
    let [stack, _] = call.place;
    let next = (stack / 4096 + 1) * 4096;
    let (mut bytes, mut words) = ([0; 8], Vec::new());
    for at in (stack / 8 * 8..).step_by(8) {
        if led.remote.memory().read_exact_at(&mut bytes, at).is_err() {
            break;
        }
        words.push((at, u64::from_ne_bytes(bytes)));
    }
    // The next page holds another thing each time: pointers of frames further up, the environment, or nothing but
    // zeros.
    let is_new = |(at, word): (u64, u64)| word > 1 << 32 && words.iter().all(|(a, other)| *a >= at || *other != word);
    let (at, word) = words.iter().copied().find(|found| found.0 >= next && is_new(*found)).expect("a word further up");
    let next = at / 4096 * 4096;
    let is_found = || is_entered(led.pid(), &[led.own], led.remote.memory(), slice::from_ref(&(word..word + 1)));
    assert!(is_found());
    let own = Pid::from_raw(i32::try_from(led.own).unwrap()).unwrap();
    let tracee = Tracee::seize(own, false).expect("trace it");
    tracee.interrupt().unwrap();
    while tracee.wait(Instant::now() + PATIENCE).unwrap().expect("it stops") != Stop::Asked {}
    let advice = [next, 4096, libc::MADV_DONTDUMP as u64, 0, 0, 0];
    assert_eq!(led.remote.call(&tracee, libc::SYS_madvise, advice).unwrap(), 0);
    assert!(is_found(), "the stack is several mappings now");
}

/// The program's dynamic loader is kept waiting by a file that it has to load before the C library.
#[test]
fn program_that_is_being_loaded_has_its_library_soon() {
    let dir = tempfile::tempdir().unwrap();
    let fifo = dir.path().join("first.so");
    rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, rustix::fs::Mode::RUSR).unwrap();
    let mut sleep = Command::new("sleep").arg("1000").env("LD_PRELOAD", &fifo).stderr(Stdio::null()).spawn().unwrap();
    let pid = sleep.id();
    assert!(leadable(pid).is_empty());
    thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(Duration::from_millis(200));
            File::options().write(true).open(&fifo).expect("its loader reads there");
        });
        wait_for_library(pid);
    });
    // A list of mappings that is read while the loader changes them may lack some.
    wait_for("one function to lead", || leadable(pid).len() == 1);
    sleep.kill().unwrap();
    sleep.wait().unwrap();
}
