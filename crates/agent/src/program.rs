//! The parts of the agent's thread that depend on how the agent got into its program: it was loaded with the program
//! (`preload`), or put into the running program (`attached`).

use crate::fold::Folder;
use crate::pool::Pool;
use crate::section::Section;
use host::Pagemap;
use std::time::Duration;
use wire::{MemberState, MemberStats};

/// What the agent's first thread asks the program that it was made part of: `preload` or `attached`.
pub trait Program: Sync {
    /// Looks for memory that is to be enrolled, if it is time for that. `before_fold`: pages are going to be folded
    /// next, so the advice (`madvise`) of memory is read, too, which its slots have to get. With hooks, there is
    /// nothing to look for.
    fn discover(&self, _section: &Section, _before_fold: bool) {}

    /// The state of a member that enrols all its memory and has none enrolled, and the reason, as a message for people.
    fn why_nothing_is_mapped(&self) -> (MemberState, String);

    /// Notes that a worker has told the agent to leave.
    fn be_told_to_leave(&self) {}

    /// Whether the agent is to leave. It is asked often.
    fn is_leaving(&self) -> bool;

    /// Sleeps, unless the agent is to leave.
    fn sleep(&self, time: Duration);

    /// Makes all memory in mappings of the pool anonymous, so that the agent can leave. There is no connection to a
    /// worker meanwhile. If it returns `false`, the agent goes on with its work.
    fn leave(&self, all: &mut Result<Folder, String>, given: (&Pagemap, &Pool), stats: &mut MemberStats) -> bool;
}
