//! The parts of the agent's thread that differ by the way in which the agent came into its program. It was loaded with it, or put into it
//! while it ran.

use crate::fold::Folder;
use crate::pool::Pool;
use crate::section::Section;
use host::Pagemap;
use std::time::Duration;
use wire::{MemberState, MemberStats};

/// The agent's threads, as the program that they are in lets them work. For the agent's first thread.
pub trait Program: Sync {
    /// Looks for memory that is to be enrolled, if it is time for that. `before_fold`: a fold comes next, and gives slots the
    /// advice that was found. With hooks, there is nothing to look for.
    fn discover(&self, _section: &Section, _before_fold: bool) {}

    /// The state of a member that enrols all its memory and has none, and a message for people: why it is.
    fn why_nothing_is_mapped(&self) -> (MemberState, String);

    /// Notes that a worker has told the agent to leave.
    fn be_told_to_leave(&self) {}

    /// Whether the agent is to leave. It is asked often.
    fn is_leaving(&self) -> bool;

    /// Sleeps, unless the agent is to leave.
    fn sleep(&self, time: Duration);

    /// Makes all memory that maps the pool anonymous, so that the agent may leave. If `false`, the agent goes on with its work. There is
    /// no connection to a worker.
    fn leave(&self, all: &mut Result<Folder, String>, given: (&Pagemap, &Pool), stats: &mut MemberStats) -> bool;
}
