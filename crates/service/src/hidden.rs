//! Processes that the kernel hides from their own user: which of them may be attached, and how the prover looks at them.
//!
//! ```text
//!   pagefold-attach --Attach--> supervisor     hidden since it gave up root's rights? else refused
//!   agent's connection to the prover --------> supervisor --connection + pagemap--> prover
//! ```
//!
//! The prover opens the pagemap of a process only if the kernel shows that to the process's own user
//! ([`host::PeerPages`]). The pagemap of a hidden member is opened here, by the kernel's facts:
//!
//! | fact | so |
//! |---|---|
//! | the process that made the connection is an attached member | no other process has a pagemap opened here |
//! | the process's user is the user that made the connection | that end of the connection was not left behind by a program that the process ran before, as another user |
//! | it is hidden because it gave up root's rights ([`Visibility`]) | it is no privileged program, nor one that asks to be hidden |
//!
//! The kernel hides no process from root. So for a process of root's, [`act::is_dumpable`] finds out whether it has
//! asked to be hidden. Where that function cannot tell, `pagefold-attach` makes a call in the process itself, before
//! anything of the process is changed.
//!
//! An open pagemap stays with the address space that it was opened on. It shows nothing of a program that is executed later.

use super::state::State;
use api::enrol::HIDES;
use host::{Pagemap, PeerProcess, ProcessId, Seqpacket, Visibility};

/// Checks whether user `asker` may attach a process, as far as that depends on what the kernel hides.
///
/// # Errors
/// The process may not be attached, for this reason.
pub fn check(process: ProcessId, asker: u32) -> Result<(), String> {
    let pid = process.pid;
    match Visibility::of(pid).map_err(|e| e.to_string())? {
        Visibility::User if asker == 0 && act::is_dumpable(pid).is_ok_and(|shown| shown == Some(false)) => {
            Err(HIDES.to_owned())
        }
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

/// The pagemap of the process that made this connection; `None` if the process is no attached member, is not hidden
/// because it gave up root's rights, or is of another user by now.
pub fn pagemap(socket: &Seqpacket, state: &State) -> Option<Pagemap> {
    let peer = PeerProcess::of(socket).ok()?;
    state.find(peer.id).filter(|member| member.attached_by.is_some())?;
    let pagemap = Pagemap::open_given_up(peer.id.pid).ok()??;
    let is_same = host::effective_uid(peer.id.pid).is_ok_and(|uid| uid == peer.uid) && peer.id.is_alive();
    is_same.then_some(pagemap)
}

#[cfg(test)]
mod tests {
    use super::*;
    use api::ask::MemberLine;
    use api::control::Identity;
    use api::enrol::Via;
    use host::{Files, SeqpacketListener};
    use std::io::{BufRead, BufReader};
    use std::os::unix::fs::PermissionsExt;
    use std::process::{Child, Command, Stdio};
    use tempfile::TempDir;

    /// A user without rights.
    const USER: u32 = 65534;
    const GIVE_UP: &str = "os.setgroups([]); os.setgid(65534); os.setuid(65534)";
    const CONNECT: &str = "made.connect(sys.argv[1])";

    /// A Python process that has connected to this one, after or before it gave up root's rights.
    struct Connected {
        child: Child,
        connection: Seqpacket,
        _dir: TempDir,
    }

    impl Connected {
        fn start(before: &[&str], work: [&str; 2]) -> Self {
            let dir = tempfile::Builder::new().permissions(PermissionsExt::from_mode(0o755)).tempdir().unwrap();
            let path = dir.path().join("socket");
            let listener = SeqpacketListener::bind(&path, Files::Refused).unwrap();
            std::fs::set_permissions(&path, PermissionsExt::from_mode(0o666)).unwrap();
            let [first, second] = work;
            let script = format!(
                "import ctypes, os, socket, sys, time\nmade = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n\
                 {first}\n{second}\nprint(flush=True)\ntime.sleep(600)"
            );
            let words: Vec<&str> = before.iter().copied().chain(["/usr/bin/python3", "-c", &script]).collect();
            let mut command = Command::new(words[0]);
            let mut child = command.args(&words[1..]).arg(&path).stdout(Stdio::piped()).spawn().unwrap();
            let mut line = String::new();
            BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
            assert_eq!(line, "\n", "{words:?}");
            let connection = listener.accept().unwrap().expect("it has connected");
            Self { child, connection, _dir: dir }
        }

        fn process(&self) -> ProcessId {
            ProcessId::of(self.child.id()).unwrap()
        }

        /// Whether the process's pagemap is opened for its connection if it is a member that `attached_by` has attached
        /// (`None`: it was not attached).
        fn is_opened(&self, attached_by: Option<u32>) -> bool {
            let ProcessId { pid, start_ticks } = self.process();
            let mut state = State::default();
            let member = MemberLine {
                group: "acme".into(),
                identity: Identity { name: "worker".into(), pid, started: start_ticks },
                uid: USER,
                connected: true,
                family: None,
                attached_by,
                via: Via::Agent,
                domain: None,
            };
            state.add(member).unwrap();
            pagemap(&self.connection, &state).is_some_and(|pagemap| pagemap.is_alive())
        }
    }

    impl Drop for Connected {
        fn drop(&mut self) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }

    fn not_root() -> bool {
        let no = !rustix::process::geteuid().is_root();
        if no {
            eprintln!("skipped: hidden processes are shown to root only");
        }
        no
    }

    #[test]
    fn page_table_of_hidden_process_is_opened_for_attached_members_alone() {
        if not_root() {
            return;
        }
        let worker = Connected::start(&[], [GIVE_UP, CONNECT]);
        assert!(worker.is_opened(Some(1)));
        assert!(!worker.is_opened(None), "a member that was not attached");
        assert!(pagemap(&worker.connection, &State::default()).is_none(), "no member");
    }

    /// The hidden process may have inherited an end of a connection that a process of root's has made.
    #[test]
    fn page_table_of_hidden_process_is_not_opened_for_connection_of_another_user() {
        if not_root() {
            return;
        }
        assert!(!Connected::start(&[], [CONNECT, GIVE_UP]).is_opened(Some(1)));
    }

    #[test]
    fn hidden_process_is_attached_by_root_alone_and_only_if_it_gave_up_roots_rights() {
        if not_root() {
            return;
        }
        let worker = Connected::start(&[], [GIVE_UP, CONNECT]);
        assert_eq!(check(worker.process(), 0), Ok(()));
        assert!(check(worker.process(), USER).unwrap_err().contains("root may attach it"));
        let as_user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--"];
        let hide = "assert ctypes.CDLL(None).prctl(4, 0, 0, 0, 0) == 0";
        let asks = Connected::start(&as_user, [hide, CONNECT]);
        assert!(!asks.is_opened(Some(1)));
        for asker in [0, USER] {
            assert!(check(asks.process(), asker).unwrap_err().contains("it has asked for that"));
        }
        let shown = Connected::start(&as_user, [CONNECT, ""]);
        assert_eq!(check(shown.process(), USER), Ok(()));
    }
}
