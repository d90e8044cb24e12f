//! `/proc/PID`: which processes there are and what each of them is.
//!
//! Processes come and go while one looks. A process that has gone is an error for which
//! [`Error::is_gone`] holds, one that may not be looked at an error for which [`Error::is_denied`] holds,
//! so that callers can pass over the first and count the second.

use crate::cgroup::Cgroups;
use crate::{Error, Result};
use std::fs::{self, File};
use std::path::{Path, PathBuf};

/// `PF_KTHREAD` of the kernel's `task_struct::flags`.
const PF_KTHREAD: u64 = 0x0020_0000;

/// What a process is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Process {
    /// Its number.
    pub pid: u32,
    /// Its short name, up to 15 bytes.
    pub comm: String,
    /// `R` running, `S` sleeping, `D` waiting, `T` stopped, `Z` ended but not waited for, ...
    pub state: char,
    /// Its parent.
    pub parent: u32,
    /// A thread of the kernel: it has no memory of its own.
    pub kernel_thread: bool,
    /// When it started, in clock ticks since boot; together with the pid it names a process for good.
    pub start_ticks: u64,
    /// Arguments, the program's name first; bytes that are not UTF-8 are replaced.
    pub cmdline: Vec<String>,
    /// Its program; `None` where the caller may not know.
    pub exe: Option<PathBuf>,
    /// Effective user, whose rights it has.
    pub uid: u32,
    /// Where it stands in the trees of control groups.
    pub cgroups: Cgroups,
}

/// Every process that `/proc` shows, in ascending order. They may be gone by the time one looks.
pub fn pids() -> Result<Vec<u32>> {
    let listing = fs::read_dir("/proc").map_err(|e| Error::file("list", "/proc", e))?;
    let mut pids = Vec::new();
    for entry in listing {
        let entry = entry.map_err(|e| Error::file("list", "/proc", e))?;
        pids.extend(entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()));
    }
    pids.sort_unstable();
    Ok(pids)
}

impl Process {
    /// Looks at process `pid`.
    ///
    /// # Errors
    /// [`Error::is_gone`] when there is no such process (any more), [`Error::is_denied`] when `/proc` is
    /// mounted so that this process is hidden from the caller.
    pub fn read(pid: u32) -> Result<Self> {
        let file = |name: &str| PathBuf::from(format!("/proc/{pid}/{name}"));
        let path = file("stat");
        let stat = read_text(&path)?;
        let problem = "not the fields that the kernel documents".to_owned();
        let mut process = parse_stat(&stat).ok_or(Error::Malformed { path, line: 1, problem })?;
        process.pid = pid;
        process.uid = parse_uid(&read_text(&file("status"))?).unwrap_or(u32::MAX);
        process.cmdline = parse_cmdline(&read_text(&file("cmdline"))?);
        process.exe = fs::read_link(file("exe")).ok();
        process.cgroups = match read_text(&file("cgroup")) {
            Ok(text) => Cgroups::parse(&text),
            Err(e) if e.is_gone() && Path::new("/proc/self/cgroup").exists() => return Err(e),
            Err(_) => Cgroups::default(),
        };
        Ok(process)
    }

    /// The file name of its program: of `exe` where that is visible, otherwise of its first argument.
    pub fn program(&self) -> &str {
        let exe = self.exe.as_deref().and_then(Path::file_name).and_then(|n| n.to_str());
        let name = exe.or_else(|| self.cmdline.first().map(|arg| arg.rsplit('/').next().unwrap_or(arg)));
        name.map_or("", |n| n.strip_suffix(" (deleted)").unwrap_or(n))
    }
}

/// Whether the caller may read the memory accounts of process `pid`.
///
/// # Errors
/// [`Error::is_gone`] when it has ended or is a kernel thread, [`Error::is_denied`] when not.
pub fn check_readable(pid: u32) -> Result<()> {
    let path = format!("/proc/{pid}/smaps");
    File::open(&path).map(drop).map_err(|e| Error::file("open", path, e))
}

/// What the open file descriptors of process `pid` refer to; those closed meanwhile are left out.
///
/// # Errors
/// [`Error::is_gone`] and [`Error::is_denied`].
pub fn open_files(pid: u32) -> Result<Vec<PathBuf>> {
    let path = PathBuf::from(format!("/proc/{pid}/fd"));
    let listing = fs::read_dir(&path).map_err(|e| Error::file("list", &path, e))?;
    Ok(listing.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok()).collect())
}

/// A small file of `/proc`, with bytes that are not UTF-8 replaced.
fn read_text(path: &Path) -> Result<String> {
    let bytes = fs::read(path).map_err(|e| Error::file("read", path, e))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// `4711 (name) S 1 ...`; the name may hold blanks and parentheses.
fn parse_stat(text: &str) -> Option<Process> {
    let (front, rest) = text.rsplit_once(')')?;
    let (_, comm) = front.split_once('(')?;
    let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
    // Numbered as in proc(5), where the state is field 3.
    let field = |n: usize| fields.get(n - 3).copied();
    Some(Process {
        comm: comm.to_owned(),
        state: field(3)?.chars().next()?,
        parent: field(4)?.parse().ok()?,
        kernel_thread: field(9)?.parse::<u64>().ok()? & PF_KTHREAD != 0,
        start_ticks: field(22)?.parse().ok()?,
        ..Process::default()
    })
}

/// The effective one of `Uid: real effective saved filesystem`.
fn parse_uid(status: &str) -> Option<u32> {
    status.lines().find_map(|l| l.strip_prefix("Uid:"))?.split_ascii_whitespace().nth(1)?.parse().ok()
}

/// Arguments end in a NUL each. A process that has written its title over them may leave out the last.
fn parse_cmdline(text: &str) -> Vec<String> {
    let text = text.strip_suffix('\0').unwrap_or(text);
    if text.is_empty() { Vec::new() } else { text.split('\0').map(str::to_owned).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn a_name_with_parentheses_and_blanks() {
        let stat = "4711 (a) S (b) c) T 12 1 1 0 -1 4194304 104 0 0 0 0 0 0 0 20 0 1 0 987654 1 1 0\n";
        let p = parse_stat(stat).unwrap();
        assert_eq!((p.comm.as_str(), p.state, p.parent), ("a) S (b) c", 'T', 12));
        assert_eq!((p.start_ticks, p.kernel_thread), (987_654, false));
        assert_eq!(parse_stat("4711 (short) S 1"), None);
        assert_eq!(parse_stat(""), None);
    }

    #[test]
    fn arguments_may_be_empty_or_unterminated() {
        assert_eq!(parse_cmdline("a\0\0b c\0"), ["a", "", "b c"]);
        assert_eq!(parse_cmdline("nginx: worker process"), ["nginx: worker process"]);
        assert!(parse_cmdline("").is_empty());
    }

    #[test]
    fn the_effective_user_counts() {
        assert_eq!(parse_uid("Name:\tx\nUid:\t0\t107\t0\t107\nGid:\t1\n"), Some(107));
        assert_eq!(parse_uid("Name:\tx\n"), None);
    }

    #[test]
    fn a_program_replaced_on_disk_keeps_its_name() {
        let mut p = Process { exe: Some("/usr/bin/qemu-system-x86_64 (deleted)".into()), ..Process::default() };
        assert_eq!(p.program(), "qemu-system-x86_64");
        p.exe = None;
        assert_eq!(p.program(), "");
        p.cmdline = vec!["/usr/libexec/qemu-kvm".into()];
        assert_eq!(p.program(), "qemu-kvm");
    }

    #[test]
    fn a_living_process_is_told_from_one_that_is_gone() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let pid = child.id();
        // Between fork and exec the child is still a copy of this test.
        let p = loop {
            let p = Process::read(pid).unwrap();
            if p.program() == "sleep" {
                break p;
            }
        };
        assert_eq!(p.cmdline, ["sleep", "60"]);
        assert_eq!((p.pid, p.parent, p.comm.as_str()), (pid, std::process::id(), "sleep"));
        assert!(p.start_ticks > 0 && !p.kernel_thread);
        assert!(pids().unwrap().contains(&pid));
        check_readable(pid).unwrap();
        assert!(!open_files(pid).unwrap().is_empty());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(Process::read(pid).unwrap_err().is_gone());
        assert!(check_readable(pid).unwrap_err().is_gone());
        assert!(open_files(pid).unwrap_err().is_gone());
    }

    #[test]
    fn the_first_process_is_older_than_we() {
        assert!(Process::read(1).unwrap().start_ticks < Process::read(std::process::id()).unwrap().start_ticks);
    }
}
