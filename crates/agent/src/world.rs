//! Keeping the program from changing its mappings while the agent replaces some.
//!
//! In a program that the agent was loaded with, the hooks do that: they wait for the table's lock. An agent that was
//! put into a running process has no hooks. There, the program that put it in (`pagefold-attach`) stops all other
//! threads for a moment. That program also does what an agent in such a process may not do ([`Host`]).
//!
//! A stopped thread is in no system call, so no change of mappings is under way. The table may be out of date all the
//! same, so it is compared with the kernel's list right before each replacement (`follow`). Nothing is replaced unless
//! the threads are known to be stopped ([`is_held`]).

use host::Seqpacket;
use std::io;
use std::path::Path;
use std::sync::OnceLock;
use wire::attach::{Question, Server};

/// The program that put an agent without hooks into the process. Any thread of the agent may call it.
pub trait Host: Sync {
    /// Has the program's threads stopped, so that mappings may be replaced for some time (a turn), or goes on with the
    /// present turn. Returns whether a turn has just begun; `None` if the threads could not be stopped.
    fn hold(&self) -> Option<bool>;

    /// Counts the time of the turn from now on: time for surveys that had to come first does not count.
    fn begin(&self);

    /// Ends the turn: the program's threads go on.
    fn rest(&self);

    /// Whether the program's threads are known to be stopped, so that mappings may be replaced.
    fn is_held(&self) -> bool;

    /// Connects to a process of the service.
    ///
    /// # Errors
    /// The program that put the agent in is gone.
    fn connect(&self, server: Server) -> io::Result<Seqpacket>;

    /// Asks a question about the process; `None` if there is no answer. For the agent's first thread.
    fn ask(&self, question: Question) -> Option<Vec<u64>>;

    /// Notes that the calling thread is one of the agent's, which must not be stopped.
    fn join(&self);

    /// Says that the program has forked: the child may become a member.
    fn tell_birth(&self);
}

static HOST: OnceLock<&'static dyn Host> = OnceLock::new();

/// Makes this an agent without hooks. To be called before anything else of the agent.
pub fn enter(host: &'static dyn Host) {
    let _ = HOST.set(host);
}

/// Whether hooks see what the program does. If not, the agent was put into a running process.
pub fn is_hooked() -> bool {
    HOST.get().is_none()
}

/// The means to stop the program's threads for a time in which mappings may be replaced (a turn). With hooks, mappings
/// may be replaced at any time.
#[derive(Debug)]
pub struct Turns;

impl Turns {
    /// See [`Host::hold`].
    pub fn hold(&mut self) -> Option<bool> {
        HOST.get().map_or(Some(false), |host| host.hold())
    }

    /// See [`Host::begin`].
    pub fn begin(&mut self) {
        HOST.get().inspect(|host| host.begin());
    }

    /// See [`Host::rest`].
    pub fn rest(&mut self) {
        HOST.get().inspect(|host| host.rest());
    }
}

impl Drop for Turns {
    fn drop(&mut self) {
        self.rest();
    }
}

/// Connects to a process of the service, which listens at `path`.
///
/// # Errors
/// Nobody listens there.
pub fn connect(server: Server, path: &Path) -> io::Result<Seqpacket> {
    match HOST.get() {
        Some(host) => host.connect(server),
        None => Seqpacket::connect_to_service(path).map_err(io::Error::other),
    }
}

/// In a process without hooks, asks a question about it; `None` if there is no answer.
pub fn ask(question: Question) -> Option<Vec<u64>> {
    HOST.get()?.ask(question)
}

/// Whether mappings may be replaced at this moment.
pub fn is_held() -> bool {
    HOST.get().is_none_or(|host| host.is_held())
}

/// Notes that the calling thread is one of the agent's.
pub fn join() {
    HOST.get().inspect(|host| host.join());
}

/// Says that a child was forked. With hooks, forked children start agents by themselves.
pub fn tell_birth() {
    HOST.get().inspect(|host| host.tell_birth());
}
