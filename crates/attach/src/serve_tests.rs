use super::{End, Gate, LIST_AGAIN, Serving, every};
use crate::children::Children;
use crate::inject::Injected;
use crate::testing::{PATIENCE, Subject, wait_for};
use crate::threads;
use api::place::Place;
use host::{Files, ProcessId, Received, Seqpacket, SeqpacketListener, Signals};
use page::HostVirt;
use rustix::process::{Pid, getpriority_process};
use std::path::Path;
use std::time::{Duration, Instant};
use wire::attach::{ATTACH_BYTES, FromAttached, Server, ToAttached};

#[test]
fn process_is_looked_at_ever_more_rarely() {
    let seconds = [0, 59, 60, 100, 160, 3600].map(|attached| every(Duration::from_secs(attached)).as_secs());
    assert_eq!(seconds, [1, 1, 8, 12, 20, 32]);
}

/// A program without an agent. One of its threads counts as the agent's.
const PROGRAM: &str = "
threads = [threading.Thread(target=time.sleep, args=(1000,), daemon=True) for n in range(2)]
for thread in threads: thread.start()
say(*[thread.native_id for thread in threads])
wait_for_end()
";

/// The program with threads that have the name of one of an agent's.
fn named(program: &str, threads: &str) -> String {
    let names = format!("for n in [{threads}]: open(f'/proc/self/task/{{n}}/comm', 'w').write('pagefold-follow')");
    program.replace("say(*[", &format!("{names}\nsay(*["))
}

/// A [`Serving`] for the program, the agent's end of the channel, and two threads: the one that counts as the agent's,
/// and another.
fn serving(subject: &Subject) -> (Serving, Seqpacket, [Pid; 2]) {
    let numbers = subject.line();
    let mut numbers = numbers.split(' ').map(|word| Pid::from_raw(word.parse().expect("a number")).expect("a thread"));
    let both = [numbers.next().unwrap(), numbers.next().unwrap()];
    let (serving, agents) = serving_with(subject, both[0]);
    (serving, agents, both)
}

/// A [`Serving`] for a program in which `thread` counts as the agent's, and the agent's end of the channel.
fn serving_with(subject: &Subject, thread: Pid) -> (Serving, Seqpacket) {
    let (agents, ours) = Seqpacket::pair().unwrap();
    let injected = Injected {
        channel: ours.into(),
        thread,
        range: 0..0,
        stopped: Duration::ZERO,
        halts: subject.halts(),
        gate: None,
    };
    let process = ProcessId::of(subject.pid()).unwrap();
    let children = Children::new(process, Vec::new());
    (Serving::new(process, Place::at(Path::new("/nowhere")), injected, children), agents)
}

/// The next message to the agent, if there is one.
fn heard(agent: &Seqpacket) -> Option<ToAttached> {
    let mut frame = [0; ATTACH_BYTES];
    match agent.receive_bare(&mut frame).expect("a channel") {
        Received::Frame(bytes) => ToAttached::decode(&frame[..bytes]),
        _ => None,
    }
}

fn send(agent: &Seqpacket, message: &FromAttached) {
    assert!(agent.send(&message.encode(), &[]).expect("a channel"));
}

/// Whether a thread is stopped by its tracer.
fn stands(pid: u32, thread: Pid) -> bool {
    threads::status(pid, thread, "State").is_some_and(|state| state.starts_with('t'))
}

fn number(thread: Pid) -> u64 {
    thread.as_raw_nonzero().get().cast_unsigned().into()
}

/// Has the threads stopped, as an agent does. A busy machine may take several tries. Returns when the last one began.
fn halt(agent: &Seqpacket, own: &[Pid]) -> Instant {
    let until = Instant::now() + PATIENCE;
    let threads: Vec<u64> = own.iter().copied().map(number).collect();
    for asked in 1.. {
        let began = Instant::now();
        send(agent, &FromAttached::Halt { number: asked, threads: threads.clone() });
        let mut answer = None;
        wait_for("there is an answer", || {
            answer = heard(agent);
            answer.is_some()
        });
        if answer == Some(ToAttached::Halted(asked)) {
            return began;
        }
        assert_eq!(answer, Some(ToAttached::NotNow(asked)));
        assert!(Instant::now() < until, "they are never stopped");
    }
    unreachable!("numbers do not end")
}

/// An agent's thread that has ended leaves its number to one of the program's, which must not run while mappings are
/// replaced.
#[test]
fn thread_that_got_the_number_of_an_agents_is_stopped_with_the_others() {
    let subject = Subject::start(&named(&PROGRAM.replace("range(2)", "range(3)"), "threads[0].native_id"));
    let numbers: Vec<Pid> = subject
        .line()
        .split(' ')
        .map(|word| Pid::from_raw(word.parse().expect("a number")).expect("a thread"))
        .collect();
    let [follower, first, other] = numbers[..] else { panic!("{numbers:?}") };
    let pid = subject.pid();
    let (mut serving, agent) = serving_with(&subject, first);
    let leader = subject.leader();
    let signals = Signals::catch().unwrap();
    std::thread::scope(|scope| {
        let agent = scope.spawn(move || {
            halt(&agent, &[first, follower, other]);
            let stood = [leader, other, first, follower].map(|thread| stands(pid, thread));
            send(&agent, &FromAttached::Go);
            drop(agent);
            rustix::process::kill_process(leader, rustix::process::Signal::KILL).unwrap();
            stood
        });
        assert_eq!(serving.run(&signals, || false).unwrap(), End::Gone);
        assert_eq!(agent.join().unwrap(), [true, true, false, false]);
    });
}

#[test]
fn threads_go_on_when_agent_says_so_and_after_a_second_whatever_happens() {
    let subject = Subject::start(PROGRAM);
    let pid = subject.pid();
    let (mut serving, agent, [own, other]) = serving(&subject);
    let leader = subject.leader();
    let signals = Signals::catch().unwrap();
    std::thread::scope(|scope| {
        let agent = scope.spawn(move || {
            let all = [other, leader];
            halt(&agent, &[own]);
            let stood = (all.map(|thread| stands(pid, thread)), stands(pid, own));
            send(&agent, &FromAttached::Go);
            wait_for("they go on", || !all.iter().any(|thread| stands(pid, *thread)));
            let began = halt(&agent, &[own]);
            wait_for("they go on, though nobody says so", || !all.iter().any(|thread| stands(pid, *thread)));
            let took = began.elapsed();
            drop(agent);
            // The agent is gone without a word: so is the process, soon.
            rustix::process::kill_process(leader, rustix::process::Signal::KILL).unwrap();
            (stood, took)
        });
        assert_eq!(serving.run(&signals, || false).unwrap(), End::Gone);
        let (stood, took) = agent.join().unwrap();
        assert_eq!(stood, ([true; 2], false));
        assert!((Duration::from_secs(1)..PATIENCE).contains(&took), "{took:?}");
    });
}

#[test]
fn agent_is_told_to_leave_when_there_is_memory_and_threads_run() {
    let mut subject = Subject::start(&named(PROGRAM, "threads[1].native_id"));
    let (mut serving, agent, [own, other]) = serving(&subject);
    serving.tell_to_leave(&|| true);
    assert_eq!(heard(&agent), None, "nobody wants that");
    let due = Instant::now();
    serving.leave = Some(due);
    let answer = Duration::from_millis(20);
    serving.tell_to_leave(&|| {
        std::thread::sleep(answer);
        false
    });
    let again = due + answer + super::ASK_AGAIN;
    assert_eq!(heard(&agent), None, "there is no memory");
    assert!(
        serving.leave.is_some_and(|due| (again..again + PATIENCE).contains(&due)),
        "a slow answer is waited for once"
    );
    serving.tell_to_leave(&|| panic!("it is asked too early"));
    (serving.leave, serving.halted) = (Some(due), Some(due));
    serving.tell_to_leave(&|| panic!("threads stand still"));
    serving.halted = None;
    serving.tell_to_leave(&|| true);
    assert_eq!((heard(&agent), serving.leave), (Some(ToAttached::Leave), None));
    // Threads are known by their numbers in the process's own namespace, which is this one.
    assert_eq!(serving.own, [number(own)]);
    serving.know_own(vec![number(own), number(other), 1]);
    assert_eq!(serving.own, [number(own), number(other)]);
    subject.tell_to_end();
}

/// The program could run its own code on the agent's thread, so that has a high priority for a limited time only.
#[test]
fn agent_that_leaves_has_a_high_priority_for_a_while() {
    let mut subject = Subject::start(&named(PROGRAM, "threads[1].native_id"));
    let (mut serving, _agent, [own, other]) = serving(&subject);
    let niceness = || [own, other].map(|thread| getpriority_process(Some(thread)).unwrap());
    let before = niceness();
    serving.leave = Some(Instant::now());
    serving.tell_to_leave(&|| false);
    assert_eq!(niceness(), before, "it is not told yet");
    serving.leave = Some(Instant::now());
    serving.tell_to_leave(&|| true);
    // Without the right to set it, it is as before.
    let hurried = if rustix::process::geteuid().is_root() { super::NICENESS } else { before[0] };
    assert_eq!(niceness(), [hurried, before[1]]);
    // It is told again, because it has not left.
    serving.leave = Some(Instant::now());
    serving.tell_to_leave(&|| true);
    serving.hurried = serving.hurried.and_then(|(since, before)| Some((since.checked_sub(super::HURRY)?, before)));
    serving.tell_to_leave(&|| true);
    assert_eq!((niceness(), serving.hurry_ends()), (before, None));
    serving.leave = Some(Instant::now());
    serving.tell_to_leave(&|| true);
    assert_eq!(niceness(), before, "once is enough");
    subject.tell_to_end();
}

#[test]
fn agent_leaves_program_that_gives_up_rights_or_has_ended() {
    let mut subject = Subject::start(&named(PROGRAM, "threads[1].native_id, os.getpid()"));
    let (mut serving, agent, [own, other]) = serving(&subject);
    serving.look();
    assert_eq!((heard(&agent), serving.leave), (None, None));
    serving.own = [own, other, subject.leader()].map(number).to_vec();
    serving.look();
    assert_eq!(heard(&agent), Some(ToAttached::Leave), "all threads are the agent's");
    subject.tell_to_end();
}

/// Calls of `mremap` that do not lead to the gate yet would fail for folded memory.
#[test]
fn nothing_is_replaced_before_calls_are_led_to_the_gate() {
    let subject = Subject::start(PROGRAM);
    let (mut serving, agent, [own, _]) = serving(&subject);
    let later = Instant::now() + Duration::from_secs(3600);
    serving.gate = Some(Gate { place: HostVirt(0), due: later });
    for (number_of_halt, answer) in [(1, ToAttached::NotNow(1)), (2, ToAttached::NotNow(2))] {
        let asked = FromAttached::Halt { number: number_of_halt, threads: vec![number(own)] };
        assert!(serving.hear(Some(asked), Vec::new()).is_none());
        assert_eq!(heard(&agent), Some(answer));
    }
    // There is no gate at all there, which is found out when that is tried.
    serving.gate = Some(Gate::new(HostVirt(0)));
    let mut halted = |number_of_halt| {
        let asked = FromAttached::Halt { number: number_of_halt, threads: vec![number(own)] };
        assert!(serving.hear(Some(asked), Vec::new()).is_none());
        heard(&agent) == Some(ToAttached::Halted(number_of_halt))
    };
    let mut numbers = 3..;
    wait_for("it is halted", || numbers.next().is_some_and(&mut halted));
}

/// A list of a process's threads may lack one while others end. If that was the agent's, it would be stopped with the
/// program's.
#[test]
fn thread_of_the_agents_that_a_list_lacked_is_found_later() {
    let subject = Subject::start(&named(PROGRAM, "threads[1].native_id"));
    let (mut serving, _agent, both) = serving(&subject);
    let [first, other] = both.map(number);
    serving.theirs = vec![first, other];
    serving.know_own(vec![first, other]);
    assert_eq!(serving.own, [first]);
    serving.listed = Instant::now() - LIST_AGAIN;
    serving.know_own(vec![first, other]);
    assert!(serving.own.len() == 2 && serving.own.contains(&other), "{:?}", serving.own);
}

/// A program can have another process's end of a connection, for example by connecting to it. Handed on, it would have
/// spoken for that process.
#[test]
fn connection_is_handed_on_for_the_process_alone_that_made_it() {
    let pair = "pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)\nsay(pair[0].fileno())";
    let mut subject = Subject::start(&format!("{pair}\n{PROGRAM}"));
    let number: i32 = subject.line().parse().expect("a number");
    let (mut serving, _agent, _) = serving(&subject);
    let dir = tempfile::tempdir().unwrap();
    serving.place = Place::at(dir.path());
    let service = SeqpacketListener::bind(&serving.place.hand_socket(), Files::Taken).unwrap();
    let mut is_handed_on = |file| {
        assert!(serving.hear(Some(FromAttached::Connect(Server::Worker)), vec![file]).is_none());
        service.accept().unwrap().is_some()
    };
    assert!(!is_handed_on(Seqpacket::pair().unwrap().0.into()));
    assert!(is_handed_on(act::file_of_thread(subject.leader(), number).unwrap()));
    subject.tell_to_end();
}
