//! Processes that the kernel hides from their own user: which of them may be attached, and how the prover looks at them.
//!
//! ```text
//!   pagefold-attach --Attach--> supervisor     hidden since it gave up root's rights? else refused
//!   agent's connection to the prover --------> supervisor --connection + pagemap--> prover
//! ```
//!
//! The prover takes no process's word for what it may look at. It opens the pagemap of a process by itself if the kernel shows
//! that to the process's user ([`host::PeerPages`]). The pagemap of a hidden member is opened here, by the kernel's facts:
//!
//! | fact | so |
//! |---|---|
//! | the process that made the connection is a member that root has attached | others learn nothing of it |
//! | its user is the one that made the connection | its end was not left behind by another program of that process |
//! | it is hidden because it gave up root's rights ([`Visibility`]) | it is no privileged program, nor one that asks to be hidden |
//!
//! An open pagemap stays with the address space that it was opened on. It shows nothing of a program that is executed later.

use super::state::State;
use host::{Pagemap, PeerProcess, ProcessId, Seqpacket, Visibility};

/// Checks whether a process may be attached by this user.
///
/// # Errors
/// It may not, for this reason.
pub fn check(process: ProcessId, asker: u32) -> Result<(), String> {
    let pid = process.pid;
    match Visibility::of(pid).map_err(|e| e.to_string())? {
        Visibility::User => Ok(()),
        Visibility::RootSinceGivenUp if asker == 0 => Ok(()),
        Visibility::RootSinceGivenUp => Err(format!(
            "process {pid} has given up root's rights, and the kernel hides its memory from its user: root may attach it"
        )),
        Visibility::Root => Err(format!(
            "the kernel hides the memory of process {pid} from its user, and not because it gave up root's rights: it has \
             asked for that (prctl PR_SET_DUMPABLE), or its program is privileged (setuid, capabilities)"
        )),
    }
}

/// The pagemap of the process that made this connection, if that is a hidden member.
pub fn pagemap(socket: &Seqpacket, state: &State) -> Option<Pagemap> {
    let peer = PeerProcess::of(socket).ok()?;
    state.find(peer.id).filter(|member| member.attached_by.is_some())?;
    let pagemap = Pagemap::open_given_up(peer.id.pid).ok()??;
    let is_same = host::effective_uid(peer.id.pid).is_ok_and(|uid| uid == peer.uid) && peer.id.is_alive();
    is_same.then_some(pagemap)
}
