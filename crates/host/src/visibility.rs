//! Whether the kernel shows a process's memory to the process's own user, and if not, why.
//!
//! The files of a process in `/proc` that show its memory belong to its user. They belong to root when the process is
//! not *dumpable* (`proc(5)`, `PR_SET_DUMPABLE` in `prctl(2)`). The kernel keeps this flag, but not the reason for it.
//! The reason is found by the auxiliary vector, which says which user executed the program, and with whose rights. A
//! fork inherits both.
//!
//! | the program was executed by | with the rights of | its user is | why it is hidden |
//! |---|---|---|---|
//! | root | root | another one | it has given up root's rights: workers of Apache, PHP-FPM, nginx |
//! | a user | another one, or another group's | any | it is privileged (setuid, setgid) |
//! | a user | that user | the same | it has asked for that (`ssh-agent`), or has capabilities of its file |
//!
//! Root means the root of the user namespace in which the program was executed. In the first row, the kernel has hidden
//! the process, even if the process has also asked for it.
//!
//! A process can change its auxiliary vector (`PR_SET_MM_MAP`). This affects only what this module says about that
//! process.

use crate::memory_files::proc_file;
use crate::process::effective_uid;
use crate::{AuxiliaryVector, Error, Pagemap, Result, text};
use linux_raw_sys::auxvec::{AT_EUID, AT_UID};
use std::fs;
use std::os::unix::fs::MetadataExt;

/// Whether the kernel shows a process's memory to the process's own user; if not, the reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Visibility {
    /// The kernel shows the process's memory to every process of its user.
    User,
    /// The kernel shows the memory to root alone, because the process has given up root's rights and executed no
    /// program since.
    RootSinceGivenUp,
    /// The kernel shows the memory to root alone, for another reason.
    Root,
}

impl Visibility {
    /// The visibility of a process.
    ///
    /// # Errors
    /// [`Error::is_gone`] and [`Error::is_denied`].
    pub fn of(pid: u32) -> Result<Self> {
        if is_shown_to_user(pid)? {
            return Ok(Self::User);
        }
        let given_up = has_given_up_root(&AuxiliaryVector::of(pid)?, user_inside(pid)?);
        Ok(if given_up { Self::RootSinceGivenUp } else { Self::Root })
    }
}

impl Pagemap {
    /// Opens the pagemap of a process that has given up root's rights. `None` if it is no such process. The pagemap is
    /// certain to be of the program that was checked.
    ///
    /// # Errors
    /// The process is gone, or has executed another program meanwhile.
    pub fn open_given_up(pid: u32) -> Result<Option<Self>> {
        Self::open_before(pid, || ())
    }

    /// See [`Self::open_given_up`]. Tests pass a function `meanwhile`, which runs after the pagemap was opened and
    /// before the process is checked.
    fn open_before(pid: u32, meanwhile: impl FnOnce()) -> Result<Option<Self>> {
        let before = AuxiliaryVector::of(pid)?;
        let pagemap = Self::open(pid)?;
        meanwhile();
        let is_given_up = Visibility::of(pid)? == Visibility::RootSinceGivenUp;
        Ok((is_given_up && AuxiliaryVector::of(pid)? == before).then_some(pagemap))
    }
}

/// Whether the kernel shows a process to its user. It shows everything to root.
fn is_shown_to_user(pid: u32) -> Result<bool> {
    let path = proc_file(pid, "pagemap");
    let owner = fs::symlink_metadata(&path).map_err(|e| Error::file("look at", &path, e))?.uid();
    let user = effective_uid(pid)?;
    Ok(owner == user || user == 0)
}

/// The number that a process's effective user has in the process's own user namespace, if it has one there.
fn user_inside(pid: u32) -> Result<Option<u32>> {
    Ok(inside(&text::read(format!("/proc/{pid}/uid_map"))?, effective_uid(pid)?))
}

/// Translates a user's number by the lines of `uid_map`: the first number inside, the first one outside, how many.
fn inside(map: &str, uid: u32) -> Option<u32> {
    map.lines().find_map(|line| {
        let mut numbers = line.split_ascii_whitespace().map(str::parse::<u32>);
        let (inside, outside, count) = (numbers.next()?.ok()?, numbers.next()?.ok()?, numbers.next()?.ok()?);
        let nth = uid.checked_sub(outside).filter(|nth| *nth < count)?;
        inside.checked_add(nth)
    })
}

/// Whether a program with this auxiliary vector was executed by root with root's rights, and has another user since.
fn has_given_up_root(vector: &AuxiliaryVector, user: Option<u32>) -> bool {
    vector.value(AT_UID) == Some(0) && vector.value(AT_EUID) == Some(0) && user != Some(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::fs::PermissionsExt;
    use std::process::{Child, ChildStdout, Command, Stdio};

    fn vector(user: u64, rights: u64) -> Vec<u8> {
        let pairs = [(3, 7), (AT_UID, user), (AT_EUID, rights), (0, 0)];
        pairs.iter().flat_map(|(key, value)| [u64::from(*key), *value]).flat_map(u64::to_ne_bytes).collect()
    }

    #[test]
    fn program_of_root_with_another_user_has_given_up_roots_rights() {
        let given_up = |by, rights, user| has_given_up_root(&AuxiliaryVector::from_bytes(&vector(by, rights)), user);
        assert!(given_up(0, 0, Some(33)) && given_up(0, 0, None));
        // The process is still root in its namespace; a user has executed the program; the program is setuid.
        let others = [(0, 0, Some(0)), (33, 33, Some(33)), (33, 33, Some(34)), (33, 0, Some(33)), (0, 33, Some(33))];
        assert!(others.iter().all(|(by, rights, user)| !given_up(*by, *rights, *user)));
        let whole = vector(0, 0);
        let part = |bytes: usize| AuxiliaryVector::from_bytes(&whole[..bytes]);
        assert!((0..48).all(|bytes| !has_given_up_root(&part(bytes), Some(33))), "a part of it says nothing");
    }

    #[test]
    fn users_are_translated_by_the_namespaces_map() {
        let map = "         0     100000      65536\n     65536       1000          1\n";
        assert_eq!([100_000, 100_033, 1000].map(|uid| inside(map, uid)), [Some(0), Some(33), Some(65536)]);
        assert_eq!([0, 99_999, 165_536, 1001].map(|uid| inside(map, uid)), [None; 4]);
        assert_eq!(inside("0 0 4294967295\n", 33), Some(33));
        assert_eq!((inside("", 0), inside("x", 0), inside("4294967295 5 9", 6)), (None, None, None));
    }

    /// Python that has done some work. It does more of its script for each line that it is told.
    struct Waits {
        child: Child,
        output: BufReader<ChildStdout>,
    }

    impl Waits {
        fn start(before: &[&str], python: &str, work: &str) -> Self {
            let script = format!("import ctypes, os, sys, time\n{work}\nprint(flush=True)\ntime.sleep(600)");
            let words: Vec<&str> = before.iter().copied().chain([python, "-c", &script]).collect();
            let mut command = Command::new(words[0]);
            command.args(&words[1..]).stdin(Stdio::piped()).stdout(Stdio::piped());
            let mut child = command.spawn().expect("start python3");
            let output = BufReader::new(child.stdout.take().expect("a pipe"));
            let mut waits = Self { child, output };
            waits.wait();
            waits
        }

        fn wait(&mut self) {
            let mut line = String::new();
            self.output.read_line(&mut line).unwrap();
            assert_eq!(line, "\n");
        }

        /// Has the program do its work, and waits until the work is done.
        fn go_on(&mut self) {
            self.child.stdin.as_mut().expect("a pipe").write_all(b"\n").expect("tell python3");
            self.wait();
        }

        fn id(&self) -> u32 {
            self.child.id()
        }

        fn visibility(&self) -> Visibility {
            Visibility::of(self.id()).unwrap()
        }
    }

    impl Drop for Waits {
        fn drop(&mut self) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }

    const PYTHON: &str = "/usr/bin/python3";
    const AS_USER: [&str; 5] = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--"];
    const GIVE_UP: &str = "os.setgroups([]); os.setgid(65534); os.setuid(65534)";

    #[test]
    fn reason_for_which_the_kernel_hides_a_process_is_told() {
        if !rustix::process::geteuid().is_root() {
            return eprintln!("skipped: hidden processes are shown to root only");
        }
        let hide = "assert ctypes.CDLL(None).prctl(4, 0, 0, 0, 0) == 0";
        assert_eq!(Waits::start(&[], PYTHON, "").visibility(), Visibility::User);
        assert_eq!(Waits::start(&AS_USER, PYTHON, "").visibility(), Visibility::User);
        let worker = Waits::start(&[], PYTHON, GIVE_UP);
        assert_eq!(worker.visibility(), Visibility::RootSinceGivenUp);
        let forked = Waits::start(&[], PYTHON, &format!("if os.fork(): os.wait(); os._exit(0)\n{GIVE_UP}"));
        let child = crate::children(forked.id())[0];
        assert_eq!(Visibility::of(child).unwrap(), Visibility::RootSinceGivenUp);
        let pagemap = Pagemap::open_given_up(worker.id()).unwrap().expect("it is hidden for that");
        assert!(pagemap.is_alive());
        crate::ProcessId::of(child).unwrap().kill();
        // As ssh-agent and gpg-agent do.
        let asks = Waits::start(&AS_USER, PYTHON, hide);
        assert_eq!(asks.visibility(), Visibility::Root);
        assert!(Pagemap::open_given_up(asks.id()).unwrap().is_none());
        assert!(Pagemap::open_given_up(std::process::id()).unwrap().is_none());
    }

    /// Its next program is one that may be looked at. The page table is that of the program before.
    #[test]
    fn page_table_of_program_is_not_taken_for_that_of_the_next_one() {
        if !rustix::process::geteuid().is_root() {
            return eprintln!("skipped: hidden processes are shown to root only");
        }
        let next = format!("import os, time; {GIVE_UP}; print(flush=True); time.sleep(600)");
        let execute =
            format!("print(flush=True); sys.stdin.readline(); os.execv('{PYTHON}', ['python3', '-c', '{next}'])");
        let mut executes = Waits::start(&[], PYTHON, &execute);
        let pid = executes.id();
        let opened = Pagemap::open_before(pid, || executes.go_on()).unwrap();
        assert_eq!(executes.visibility(), Visibility::RootSinceGivenUp);
        assert!(opened.is_none());
        assert!(Pagemap::open_given_up(pid).unwrap().expect("it is hidden for that").is_alive());
    }

    #[test]
    fn privileged_program_that_becomes_its_user_again_has_not_given_up_root() {
        if !rustix::process::geteuid().is_root() {
            return eprintln!("skipped: a setuid program takes root to make");
        }
        let dir = tempfile::tempdir().unwrap();
        let open = |path: &std::path::Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        open(dir.path(), 0o755);
        let program = dir.path().join("python3");
        fs::copy(fs::canonicalize(PYTHON).unwrap(), &program).unwrap();
        for mode in [0o4755, 0o2755] {
            open(&program, mode);
            let drop = "os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)";
            let privileged = Waits::start(&AS_USER, program.to_str().unwrap(), drop);
            assert_eq!(privileged.visibility(), Visibility::Root, "{mode:o}");
        }
    }
}
