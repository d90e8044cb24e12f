//! Keeping the program from changing its mappings while the agent replaces some.
//!
//! In a program that the agent was loaded into, the hooks do that: they wait for the table's lock. An agent that was put
//! into a running process has no hooks. There, the program that put it in stops all other threads for a moment. That program
//! also does what an agent in that process may not do ([`Host`]).
//!
//! A stopped thread is within no system call, so no change is under way. The table may be out of date all
//! the same, and is compared with the kernel's list right before each replacement (`follow`). Nothing is replaced
//! while the threads are not known to be stopped ([`is_held`]).

use host::Seqpacket;
use std::io;
use std::path::Path;
use std::sync::OnceLock;
use wire::attach::{Question, Server};

/// The program that put an agent without hooks into the process. Any thread of the agent's may ask it.
pub trait Host: Sync {
    /// Begins a turn, in which mappings may be replaced, or goes on with it. Says whether it has just begun; `None` if it cannot.
    fn hold(&self) -> Option<bool>;

    /// Begins the turn's time only now: looks that had to come first do not count.
    fn begin(&self);

    /// Ends the turn.
    fn rest(&self);

    /// Whether mappings may be replaced.
    fn is_held(&self) -> bool;

    /// Connects to a process of the service.
    ///
    /// # Errors
    /// The program that put the agent in is gone.
    fn connect(&self, server: Server) -> io::Result<Seqpacket>;

    /// Has the process looked at; `None` without an answer. For the agent's first thread.
    fn ask(&self, question: Question) -> Option<Vec<u64>>;

    /// Notes that the calling thread is the agent's.
    fn join(&self);

    /// Tells that the program has forked: the child may become a member.
    fn tell_birth(&self);
}

static HOST: OnceLock<&'static dyn Host> = OnceLock::new();

/// Makes this an agent without hooks. To be called before anything else of the agent's.
pub fn enter(host: &'static dyn Host) {
    let _ = HOST.set(host);
}

/// Whether hooks see what the program does. If not, the agent was put into a running process.
pub fn is_hooked() -> bool {
    HOST.get().is_none()
}

/// Turns in which mappings may be replaced: with hooks, at any time.
#[derive(Debug)]
pub struct Turns;

impl Turns {
    /// Begins a turn, or goes on with it. Says whether it has just begun; `None` if it cannot.
    pub fn hold(&mut self) -> Option<bool> {
        HOST.get().map_or(Some(false), |host| host.hold())
    }

    /// Begins the turn's time.
    pub fn begin(&mut self) {
        HOST.get().inspect(|host| host.begin());
    }

    /// Ends the turn.
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

/// Has a process without hooks looked at; `None` without an answer.
pub fn ask(question: Question) -> Option<Vec<u64>> {
    HOST.get()?.ask(question)
}

/// Whether mappings may be replaced.
pub fn is_held() -> bool {
    HOST.get().is_none_or(|host| host.is_held())
}

/// Notes that the calling thread is the agent's.
pub fn join() {
    HOST.get().inspect(|host| host.join());
}

/// Tells of a forked child. With hooks, forked children start agents by themselves.
pub fn tell_birth() {
    HOST.get().inspect(|host| host.tell_birth());
}
