//! Stays beside an attached process: stops its threads when the agent asks for that, and takes the agent out again.
//!
//! ```text
//!   the agent asks about the process -----------------> what the kernel says (`look`)
//!   the agent says that the process has forked -------> children that live for some time get an agent, too (`children`)
//!   the agent has a gate -----------------------------> the C library's `mremap` is led there (`gate`)
//!   the agent asks: Halt --> threads stopped --> Go, or after a second at the latest --> they go on
//!   SIGTERM, SIGINT ------> the service has memory for it --> Leave to the agent --> Left
//!                              --> the agent's other threads have ended
//!                              --> `mremap` is led back --> its last thread unmaps the agent, and ends
//!                              --> no restarted system call has to be ended from outside any more --> end
//!   the process ends, or executes another program --> end
//! ```
//!
//! If this program is killed, the kernel lets all threads go on. The agent then replaces nothing any more.

use crate::changes;
use crate::children::Children;
use crate::ending::{Order, unmapping};
use crate::gate;
use crate::halt::{Halts, SOON};
use crate::inject::Injected;
use crate::look;
use crate::remote::Remote;
use crate::rescue::Ours;
use crate::threads;
use act::trace::{Registers, Stop, Tracee};
use anyhow::Context;
use api::client::Service;
use api::hand::hand_on;
use api::place::Place;
use host::{Caught, ForeignFile, Peer, ProcessId, Received, Seqpacket, Signals};
use page::{HostVirt, PageRange, pages_to_bytes};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, OwnedFd};
use rustix::process::{Pid, getpriority_process, setpriority_process};
use std::fs::File;
use std::ops::Range;
use std::time::{Duration, Instant};
use wire::attach::{ATTACH_BYTES, FromAttached, ToAttached};

/// Longest time for which the program's threads stay stopped, even if the agent does not send `Go`: 1 s.
const LONGEST: Duration = Duration::from_secs(1);
/// Time between two checks of an attached process: whether it is alive, and whether it has given up rights. 1 s in the
/// first minute after it was attached, in which programs give up rights. Later an eighth of the time since it was
/// attached, at least 8 s and at most 32 s: there may be hundreds of attached processes.
const LOOKS: [Duration; 3] = [Duration::from_secs(1), Duration::from_secs(8), Duration::from_secs(32)];
/// Part of the time since the process was attached that passes between two of these checks: 1/8.
const LOOKS_PART: u32 = 8;
/// Time since a process was attached up to which it is checked most often: 1 minute.
const YOUNG: Duration = Duration::from_secs(60);
/// Longest wait for a process to end after its agent has closed the channel: 1 s.
const END_OF_PROCESS: Duration = Duration::from_secs(1);
/// Pause before the service is asked again whether there is memory for the pages that become private when the agent
/// leaves: 5 s.
const ASK_AGAIN: Duration = Duration::from_secs(5);
/// Longest wait for the agent's threads to end once the agent has left: 10 s.
const END_TIME: Duration = Duration::from_secs(10);
/// Niceness of this program, and of the thread of an agent that leaves: -15.
pub const NICENESS: i32 = -15;
/// Longest time for which a leaving agent's thread has [`NICENESS`]: 10 s. The program could run its own code on that
/// thread.
const HURRY: Duration = Duration::from_secs(10);
/// Time between two looks whether a process was thawed: 50 ms.
const THAW_LOOK: Duration = Duration::from_millis(50);

/// Number of attempts in a row to have `mremap` lead to the gate, and the pause between two: 10, 2 ms. The agent waits
/// meanwhile.
const GATE_TRIES: (u32, Duration) = (10, Duration::from_millis(2));
/// Pause before these attempts begin again, after all [`GATE_TRIES`] have failed: 1 s.
const GATE_AGAIN: Duration = Duration::from_secs(1);

/// Shortest time between two lists of the process's threads, while the last list lacked some of the agent's: 1 s.
const LIST_AGAIN: Duration = Duration::from_secs(1);

/// Size of the kernel's `struct robust_list_head`, in bytes.
const ROBUST_LIST_BYTES: u64 = 24;

/// Time between two checks of a process, by the time since it was attached ([`LOOKS`]).
fn every(attached: Duration) -> Duration {
    let [young, least, most] = LOOKS;
    if attached < YOUNG { young } else { (attached / LOOKS_PART).clamp(least, most) }
}

/// Why this program no longer serves a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The process has ended, or it executes another program.
    Gone,
    /// The agent has left, and its memory is unmapped.
    Left,
}

/// One attached process.
pub struct Serving {
    process: ProcessId,
    /// The agent's first thread, and the addresses of the agent's object with that thread's stack.
    thread: Pid,
    injected: Range<u64>,
    channel: Seqpacket,
    halts: Halts,
    /// When the program's threads were stopped; `None` while they run.
    halted: Option<Instant>,
    /// Thread ids of the agent's threads, as far as they are known: in this program's PID namespace, and in the
    /// process's.
    own: Vec<u64>,
    theirs: Vec<u64>,
    /// When the process's threads were last listed to find the agent's among them.
    listed: Instant,
    place: Place,
    /// The agent's gate, as long as `mremap` does not lead there yet. No halt is granted until then, so nothing is
    /// folded.
    gate: Option<Gate>,
    /// When the service is asked next whether the agent may leave; `None` if the agent is not to leave, or was told to.
    leave: Option<Instant>,
    /// When the agent's thread was given the niceness of this program, because it leaves; and its niceness before.
    hurried: Option<(Instant, i32)>,
    /// Whether the agent's thread has its former niceness again.
    has_hurried: bool,
    began: Instant,
    children: Children,
    /// When the process was last looked at.
    looked: Instant,
}

/// The agent's gate, to which the C library's `mremap` is to be led: see [`gate`].
#[derive(Clone, Copy, Debug)]
struct Gate {
    place: HostVirt,
    /// When the next attempt is due.
    due: Instant,
}

impl Gate {
    fn new(place: HostVirt) -> Self {
        Self { place, due: Instant::now() }
    }
}

impl Serving {
    /// Begins to serve.
    pub fn new(process: ProcessId, place: Place, injected: Injected, children: Children) -> Self {
        let Injected { channel, thread, range, halts, gate, .. } = injected;
        let channel = Seqpacket::from_stranger(channel);
        let own = vec![thread.as_raw_nonzero().get().cast_unsigned().into()];
        Self {
            process,
            thread,
            injected: range,
            channel,
            halts,
            halted: None,
            own,
            theirs: Vec::new(),
            listed: Instant::now(),
            place,
            gate: gate.map(Gate::new),
            leave: None,
            hurried: None,
            has_hurried: false,
            began: Instant::now(),
            children,
            looked: Instant::now(),
        }
    }

    /// Serves until the process ends, or the agent has left it. The agent is told to leave after SIGTERM or SIGINT,
    /// once `may_leave` says that there is memory for the pages that become private.
    ///
    /// # Errors
    /// The agent has left, and its mappings could not be unmapped.
    pub fn run(&mut self, signals: &Signals, may_leave: impl Fn() -> bool) -> anyhow::Result<End> {
        loop {
            self.wait(signals);
            while let Some(caught) = signals.next() {
                if caught == Caught::End {
                    self.leave = Some(Instant::now());
                }
            }
            self.tell_to_leave(&may_leave);
            let (mut buffer, mut files) = ([0; ATTACH_BYTES], Vec::new());
            loop {
                match self.channel.receive(&mut buffer, &mut files) {
                    Ok(Received::Nothing) => break,
                    Ok(Received::Frame(bytes)) => {
                        let message = FromAttached::decode(&buffer[..bytes]);
                        if let Some(FromAttached::Left(ranges)) = self.hear(message, std::mem::take(&mut files)) {
                            self.halts.go();
                            self.halted = None;
                            return self.clear(&ranges).map(|()| End::Left);
                        }
                    }
                    Ok(Received::Closed) | Err(_) => {
                        self.halts.go();
                        return self.end_of_agent();
                    }
                }
            }
            if self.halted.is_none() {
                self.halts.tend();
            } else if self.halted.is_some_and(|since| since.elapsed() >= LONGEST) {
                self.go();
            }
            self.lead_to_gate();
            self.look_at_children();
            if self.looked.elapsed() >= every(self.began.elapsed()) {
                if !self.process.is_alive() {
                    return Ok(End::Gone);
                }
                self.look();
            }
        }
    }

    /// Tells the agent to leave, if that is due and `may_leave` says that there is memory for it. Gives the agent's
    /// thread its former niceness back when [`HURRY`] is over.
    fn tell_to_leave(&mut self, may_leave: &impl Fn() -> bool) {
        if self.leave.is_some_and(|due| due <= Instant::now()) && self.halted.is_none() {
            let message = ToAttached::Leave.encode();
            let is_told = may_leave() && self.channel.send(&message, &[]).is_ok_and(|sent| sent);
            // The time is taken anew, because the supervisor's answer may have taken a while.
            self.leave = (!is_told).then(|| Instant::now() + ASK_AGAIN);
            if is_told {
                // The agent needs halts to unfold. While a gate waits to be led to, all halts are refused, so the gate
                // is given up.
                self.gate = None;
                self.hurry();
            }
        }
        if let Some((_, before)) = self.hurried.filter(|_| self.hurry_ends().is_some_and(|end| end <= Instant::now())) {
            self.set_niceness(before);
            self.has_hurried = true;
        }
    }

    /// Gives the agent's thread the niceness of this program, once: an agent that cannot leave is told to leave again
    /// and again.
    fn hurry(&mut self) {
        if self.hurried.is_none() {
            let before = getpriority_process(Some(self.thread)).unwrap_or(0);
            self.hurried = Some((Instant::now(), before));
            self.set_niceness(NICENESS);
        }
    }

    /// When the agent's thread gets its niceness back, if it has this program's.
    fn hurry_ends(&self) -> Option<Instant> {
        self.hurried.filter(|_| !self.has_hurried).map(|(since, _)| since + HURRY)
    }

    /// Sets the niceness of the agent's thread, which unfolds. Without the right to do that, unfolding takes longer on
    /// a busy host.
    fn set_niceness(&self, niceness: i32) {
        let _ = setpriority_process(Some(self.thread), niceness);
    }

    /// Leads the program's calls of `mremap` to the gate, if an attempt is due and no halt is under way.
    fn lead_to_gate(&mut self) {
        let Some(gate) = self.gate.filter(|gate| gate.due <= Instant::now() && self.halted.is_none()) else {
            return;
        };
        let found = gate::leadable(self.process.pid);
        for _ in 0..GATE_TRIES.0 {
            self.forget_ended();
            let is_halted = self.halts.halt(&self.own);
            let led = is_halted.then(|| gate::lead(self.process.pid, &self.own, gate.place, &found));
            if is_halted {
                self.halts.go();
            }
            match led {
                // After an error there is no further attempt: a host that forbids changed code goes on doing so.
                Some(Ok(true) | Err(_)) => {
                    self.gate = None;
                    return;
                }
                Some(Ok(false)) | None => std::thread::sleep(GATE_TRIES.1),
            }
        }
        self.gate = Some(Gate { due: Instant::now() + GATE_AGAIN, ..gate });
    }

    fn look_at_children(&mut self) {
        let now = Instant::now();
        // A look takes a while, so none is made while threads are stopped.
        if self.children.due().is_some_and(|due| due <= now) && self.halted.is_none() {
            self.children.look(now);
            let (place, process) = (self.place.clone(), self.process);
            self.children.tell(now, |not_attached| {
                Service::connect(place).is_ok_and(|service| service.children(process, not_attached).is_ok())
            });
        }
    }

    /// Looks after the program's threads once: see [`Halts::tend`].
    pub fn tend(&mut self) {
        self.halts.tend();
    }

    /// Looks after the program's threads until none needs that. A thread whose call with a time limit was begun again
    /// needs it until that has ended. Returns how they were stopped.
    pub fn finish(mut self, signals: &Signals) -> Halts {
        self.halts.finish(signals);
        self.halts
    }

    /// Checks whether the agent may stay in the process. If not, the agent is told to leave, or that becomes due.
    fn look(&mut self) {
        self.looked = Instant::now();
        self.forget_ended();
        if changes::is_abandoned(self.process.pid, &self.own) {
            // No memory needs to be promised: memory that becomes private ends with the process in a moment.
            let _ = self.channel.send(&ToAttached::Leave.encode(), &[]);
        } else if self.leave.is_none() && changes::has_other_rights(self.process.pid, self.thread, &self.own) {
            self.leave = Some(self.looked);
        }
        self.children.look_now();
    }

    /// Handles a message; returns it if it is the last one.
    fn hear(&mut self, message: Option<FromAttached>, files: Vec<OwnedFd>) -> Option<FromAttached> {
        // The program may have sent any file, and closing a file may wait for its server.
        let mut files = files.into_iter().map(ForeignFile::from);
        match message? {
            FromAttached::Halt { number, threads } => {
                self.know_own(threads);
                self.halt(number);
                None
            }
            FromAttached::Threads(threads) => {
                self.know_own(threads);
                None
            }
            FromAttached::Go => {
                self.go();
                None
            }
            FromAttached::Gate(place) => {
                self.gate = Some(Gate::new(place));
                self.lead_to_gate();
                None
            }
            FromAttached::Born => {
                self.children.born(Instant::now());
                None
            }
            FromAttached::Connect(server) => {
                // If handing on fails, the agent sees that its connection is closed, and tries again. A connection
                // counts for the process that made it, by `SO_PEERCRED`, which must be this process.
                let is_its_own = |file: &ForeignFile| Peer::of(file).is_ok_and(|peer| peer.pid == self.process.pid);
                let _ = files.next().filter(is_its_own).map(|file| hand_on(&self.place, server, file.as_fd()));
                None
            }
            FromAttached::Ask { number, question } => {
                let answers = look::answer(self.process.pid, self.thread, &question);
                let _ = self.channel.send(&ToAttached::Told { number, answers }.encode(), &[]);
                None
            }
            // This message was evaluated when this program took the place of another one.
            FromAttached::Here { .. } => None,
            left @ FromAttached::Left(_) => Some(left),
        }
    }

    /// Stops the program's threads for the agent's request `number`, and answers `Halted`; or `NotNow` if they cannot
    /// be stopped.
    fn halt(&mut self, number: u64) {
        self.go();
        // Before pages are folded, `mremap` must be led to the gate, because the kernel refuses `mremap` of folded
        // memory.
        self.lead_to_gate();
        let answer = if self.gate.is_none() && self.halts.halt(&self.own) {
            self.halted = Some(Instant::now());
            ToAttached::Halted(number)
        } else {
            ToAttached::NotNow(number)
        };
        if !self.channel.send(&answer.encode(), &[]).is_ok_and(|sent| sent) {
            self.go();
        }
    }

    /// Records which threads are the agent's. The agent tells their numbers in its own PID namespace.
    fn know_own(&mut self, theirs: Vec<u64>) {
        // A list of threads may lack one while others end. The agent's own list may have some that have ended.
        let is_incomplete = self.own.len() < theirs.len() && self.listed.elapsed() >= LIST_AGAIN;
        if theirs != self.theirs || is_incomplete {
            self.listed = Instant::now();
            let all = threads::list(self.process.pid).unwrap_or_default();
            let is_own = |thread: &Pid| threads::inner(self.process.pid, *thread).is_some_and(|n| theirs.contains(&n));
            let number = |thread: Pid| thread.as_raw_nonzero().get().cast_unsigned().into();
            self.own = all.into_iter().filter(is_own).map(number).collect();
            self.theirs = theirs;
        }
        self.forget_ended();
    }

    /// Drops numbers of threads that are not the agent's any more. Some of the agent's threads end while the program
    /// goes on, and the kernel may give their numbers to threads of the program. These have other names.
    fn forget_ended(&mut self) {
        let (pid, first) = (self.process.pid, self.thread);
        let is_agents = |number: &u64| {
            let thread = i32::try_from(*number).ok().and_then(Pid::from_raw);
            thread.is_some_and(|thread| thread == first || threads::is_named_as_agents(pid, thread))
        };
        self.own.retain(is_agents);
    }

    fn go(&mut self) {
        if self.halted.take().is_some() {
            self.halts.go();
        }
    }

    fn wait(&self, signals: &Signals) {
        // A stop of a thread's comes with a signal to this process.
        let due = self
            .halts
            .due()
            .into_iter()
            .chain(self.leave)
            .chain(self.hurry_ends())
            .chain(self.gate.map(|gate| gate.due))
            .chain(self.children.due())
            .min()
            .filter(|_| self.halted.is_none());
        let next = every(self.began.elapsed()).saturating_sub(self.looked.elapsed());
        // The end of a halt is watched, too.
        let next = self.halted.map_or(next, |since| next.min(LONGEST.saturating_sub(since.elapsed())));
        let time = due.map_or(next, |due| due.saturating_duration_since(Instant::now()).min(next));
        let time = if self.halts.is_pending() { time.min(SOON) } else { time };
        let mut files = [PollFd::new(&self.channel, PollFlags::IN), PollFd::new(signals, PollFlags::IN)];
        let _ = poll(&mut files, Timespec::try_from(time).ok().as_ref());
    }

    /// The agent is gone without a word: its process has ended or executes another program, or the agent has a bug.
    fn end_of_agent(&self) -> anyhow::Result<End> {
        let until = Instant::now() + END_OF_PROCESS;
        while self.process.is_alive() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(End::Gone)
    }

    /// Has the one thread that is left of the agent unmap the agent's memory by system calls, and then end that thread.
    fn clear(&mut self, ranges: &[PageRange]) -> anyhow::Result<()> {
        let pid = self.process.pid;
        // Frozen threads neither end nor stop. The agent has left already, and nobody waits for this program.
        while self.process.is_alive() && host::frozen_group(pid, pid).is_some() {
            self.halts.tend();
            std::thread::sleep(THAW_LOOK);
        }
        let until = Instant::now() + END_TIME;
        let is_other = |thread: &Pid| {
            *thread != self.thread && self.own.contains(&thread.as_raw_nonzero().get().cast_unsigned().into())
        };
        while threads::list(pid).is_ok_and(|all| all.iter().any(is_other)) {
            anyhow::ensure!(Instant::now() < until, "the agent's threads do not end");
            self.halts.tend();
            std::thread::sleep(Duration::from_millis(1));
        }
        let remote = Remote::open(pid)?;
        // The agent's last thread waits until its last calls are noted. A successor of this process repeats this.
        let gate = gate::among(remote.memory(), ranges);
        let led_back = gate.map_or_else(|| Some(Vec::new()), |gate| self.lead_back(remote.memory(), gate, until));
        let is_led_back = led_back.is_some();
        let others = ranges.iter().filter(|range| is_led_back || Some(**range) != gate);
        let orders = self.last_orders(led_back.into_iter().flatten(), others.copied());
        let tracee = Tracee::seize(self.thread, false).context("the agent's last thread has ended")?;
        tracee.interrupt()?;
        while tracee.wait(until)?.context("the agent's last thread does not stop")? != Stop::Asked {
            tracee.resume(act::trace::Resume::Freely, 0)?;
        }
        let rescue = self.halts.rescue().context("cannot have a second process")?;
        let ours = Ours::new(self.thread, remote.instruction(), &orders, rescue)?;
        for (n, (number, arguments)) in orders.iter().enumerate() {
            ours.is_to_make(&orders[n..])?;
            remote.call_patiently(&tracee, *number, *arguments)?;
        }
        ours.is_to_make(&[])?;
        let end: Registers = remote.prepared(&tracee, libc::SYS_exit, [0; 6])?;
        tracee.set_registers(&end)?;
        tracee.detach(0);
        drop(ours);
        while threads::list(pid).is_ok_and(|all| all.contains(&self.thread)) {
            anyhow::ensure!(Instant::now() < until, "the agent's last thread does not end");
            self.halts.tend();
            std::thread::sleep(Duration::from_millis(1));
        }
        anyhow::ensure!(
            is_led_back,
            "a thread does not come out of mremap: two pages of the agent's stay, through which that goes"
        );
        Ok(())
    }

    /// The last system calls of the agent's last thread: first those in `first`, then calls that unmap `ranges` and the
    /// object.
    fn last_orders(&self, first: impl Iterator<Item = Order>, ranges: impl Iterator<Item = PageRange>) -> Vec<Order> {
        // These calls keep the kernel from writing to the agent's memory, which is unmapped by then, when the thread
        // ends.
        let no_words =
            [(libc::SYS_set_tid_address, [0; 6]), (libc::SYS_set_robust_list, [0, ROBUST_LIST_BYTES, 0, 0, 0, 0])];
        let own = unmapping(self.injected.start, self.injected.end - self.injected.start);
        let others = ranges.map(|range| unmapping(range.start.0, pages_to_bytes(range.pages)));
        first.chain(no_words).chain(others).chain([own]).collect()
    }

    /// Leads the program's calls of `mremap` to the C library again. Tries until time `until`. Returns what
    /// [`gate::lead_back`] does: system calls that remain to be made in the process; `None` if the calls still lead to
    /// the gate.
    fn lead_back(&mut self, memory: &File, place: PageRange, until: Instant) -> Option<Vec<Order>> {
        while Instant::now() < until {
            self.forget_ended();
            if self.halts.halt(&self.own) {
                let led_back = gate::lead_back(self.process.pid, &self.own, memory, place);
                self.halts.go();
                match led_back {
                    Ok(None) => {}
                    Ok(orders) => return orders,
                    Err(_) => return None,
                }
            }
            self.halts.tend();
            std::thread::sleep(Duration::from_millis(1));
        }
        None
    }
}

#[cfg(test)]
#[path = "serve_tests.rs"]
mod tests;
