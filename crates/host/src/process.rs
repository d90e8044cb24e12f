//! `/proc/PID`: the processes of this host and their properties.
//!
//! Processes come and go while `/proc` is read, so callers must tell two errors apart. For a process that is gone,
//! [`Error::is_gone`] holds, and callers skip it. For a process that the caller may not look at, [`Error::is_denied`]
//! holds, and callers count it.

use crate::cgroup::Cgroups;
use crate::memory_files::proc_file;
use crate::{Error, ProcessStat, Result, filesystem_of_mount, filesystem_of_mount_of, text};
use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
use std::fs::{self, File};
use std::path::{Path, PathBuf};

/// Most bytes read of a command line: a process can make its own as long as its address space (`PR_SET_MM`).
const MOST_CMDLINE_BYTES: u64 = 1 << 20;

/// The properties of a process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Process {
    /// Its pid.
    pub pid: u32,
    /// Its short name, up to 15 bytes.
    pub comm: String,
    /// Its state, parent and start time.
    pub stat: ProcessStat,
    /// Arguments, the program's name first, the first MiB of them; bytes that are not UTF-8 are replaced.
    pub cmdline: Vec<String>,
    /// The file of its program; `None` where the caller may not know it.
    pub exe: Option<PathBuf>,
    /// The user who owns the program's file, and so may write it; `None` where the caller may not know.
    pub exe_owner: Option<u32>,
    /// Effective user, whose rights it has.
    pub uid: u32,
    /// Its control groups.
    pub cgroups: Cgroups,
}

/// The pids that `/proc` shows, in ascending order. Some processes may be gone when the caller looks at them.
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
    /// Reads the properties of process `pid`.
    ///
    /// # Errors
    /// [`Error::is_gone`] if there is no such process (any more); [`Error::is_denied`] if `/proc` is mounted so that it
    /// hides this process from the caller.
    pub fn read(pid: u32) -> Result<Self> {
        let process = Self::read_without_arguments(pid)?;
        let cmdline = text::read_start(proc_file(pid, "cmdline"), MOST_CMDLINE_BYTES)?;
        Ok(Self { cmdline: parse_cmdline(&cmdline), ..process })
    }

    /// Like [`Self::read`], but leaves the arguments empty. The arguments lie in the memory of the process, and a
    /// process that keeps the lock of its memory makes a reader wait. Everything else comes from the kernel.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn read_without_arguments(pid: u32) -> Result<Self> {
        let file = |name: &str| PathBuf::from(format!("/proc/{pid}/{name}"));
        let stat = ProcessStat::read(pid)?;
        let comm = text::read(file("comm"))?.trim_end_matches('\n').to_owned();
        let uid = parse_uid(&text::read(file("status"))?).unwrap_or(u32::MAX);
        let cmdline = Vec::new();
        // A process whose program the caller may not know is listed all the same.
        let exe = fs::read_link(proc_file(pid, "exe")).ok();
        let exe_owner = owner_of_program(pid);
        let cgroups = match text::read(file("cgroup")) {
            Ok(text) => Cgroups::parse(&text),
            Err(e) if e.is_gone() && Path::new("/proc/self/cgroup").exists() => return Err(e),
            Err(_) => Cgroups::default(),
        };
        Ok(Self { pid, comm, stat, cmdline, exe, exe_owner, uid, cgroups })
    }

    /// The file name of its program, from `exe` where that is visible, otherwise from its first argument.
    pub fn program(&self) -> &str {
        let exe = self.exe.as_deref().and_then(Path::file_name).and_then(|n| n.to_str());
        let name = exe.or_else(|| self.cmdline.first().map(|arg| arg.rsplit('/').next().unwrap_or(arg)));
        name.map_or("", |n| n.strip_suffix(" (deleted)").unwrap_or(n))
    }

    /// The name by which its program was called. If the program was called by a symbolic link, this is the link's name,
    /// cut off as in `comm`; otherwise the file's name.
    pub fn called(&self) -> &str {
        let program = self.program();
        if self.comm.is_empty() || program.starts_with(&self.comm) { program } else { &self.comm }
    }
}

/// Right of others to write a file.
const OTHERS_WRITE: u16 = 0o002;
/// Stands for the owner of a program's file that others than its owner may have written, or whose owner the server of a
/// file system names: no user.
const NOBODYS: u32 = u32::MAX;
/// `f_type` of FUSE, whose server can name any owner of a file.
const FUSE: u32 = 0x6573_5546;
/// `STATX_MNT_ID_UNIQUE`, from Linux 6.8 on.
const UNIQUE_MOUNT: StatxFlags = StatxFlags::from_bits_retain(1 << 14);

/// The owner of the program's file, as the kernel knows it without asking the file system: a user's own (FUSE) need not
/// answer.
fn owner_of_program(pid: u32) -> Option<u32> {
    let wanted = StatxFlags::UID | StatxFlags::MODE | UNIQUE_MOUNT;
    let found = statx(CWD, proc_file(pid, "exe"), AtFlags::STATX_DONT_SYNC, wanted).ok()?;
    let mount = (found.stx_mask & UNIQUE_MOUNT.bits() != 0).then_some(found.stx_mnt_id);
    let filesystem = mount.and_then(|n| filesystem_of_mount(n).or_else(|| filesystem_of_mount_of(pid, n)));
    let is_anybodys = filesystem == Some(FUSE) || found.stx_mode & OTHERS_WRITE != 0;
    Some(if is_anybodys { NOBODYS } else { found.stx_uid })
}

/// The effective user of process `pid`. Unlike [`Process::read`] it never waits for the process, whose memory it does
/// not touch.
///
/// # Errors
/// [`Error::is_gone`] and [`Error::is_denied`].
pub fn effective_uid(pid: u32) -> Result<u32> {
    Ok(parse_uid(&text::read(format!("/proc/{pid}/status"))?).unwrap_or(u32::MAX))
}

/// The children of process `pid`: those that it has forked, and those that became its children when their parents
/// ended. Empty if the process is gone.
pub fn children(pid: u32) -> Vec<u32> {
    let Ok(threads) = fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    let listed = |thread: fs::DirEntry| fs::read_to_string(thread.path().join("children")).ok();
    let lists: Vec<String> = threads.filter_map(|thread| listed(thread.ok()?)).collect();
    lists.iter().flat_map(|list| list.split_ascii_whitespace()).filter_map(|pid| pid.parse().ok()).collect()
}

/// Whether process `pid` runs a program with this file name. `Some(false)` also if the process has ended; `None` if the
/// caller may not know.
pub fn runs_program(pid: u32, name: &str) -> Option<bool> {
    match fs::read_link(proc_file(pid, "exe")) {
        Ok(exe) => Some(Process { exe: Some(exe), ..Process::default() }.program() == name),
        Err(e) => (e.kind() == std::io::ErrorKind::NotFound).then_some(false),
    }
}

/// Bytes of private memory that process `pid` has in page frames.
///
/// # Errors
/// [`Error::is_gone`] and [`Error::is_denied`].
pub fn anonymous_bytes(pid: u32) -> Result<u64> {
    let status = text::read(proc_file(pid, "status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    let kib = line.and_then(|line| line.split_ascii_whitespace().next()?.parse::<u64>().ok());
    Ok(kib.unwrap_or(0).saturating_mul(1024))
}

/// Counters of a process's memory that the kernel keeps at hand: reading them walks no page tables.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryCounters {
    /// Pages in page frames.
    pub resident_pages: u64,
    /// Resident pages that are of files or shared memory.
    pub file_pages: u64,
    /// Pages that KSM has merged; 0 if the kernel does not tell.
    pub ksm_pages: u64,
}

impl MemoryCounters {
    /// The counters of process `pid`.
    ///
    /// # Errors
    /// [`Error::is_gone`] and [`Error::is_denied`].
    pub fn of(pid: u32) -> Result<Self> {
        let statm = text::read(proc_file(pid, "statm"))?;
        let field = |n: usize| statm.split_ascii_whitespace().nth(n).and_then(|field| field.parse().ok()).unwrap_or(0);
        let ksm = text::read(proc_file(pid, "ksm_merging_pages")).ok();
        let ksm_pages = ksm.and_then(|text| text.trim().parse().ok()).unwrap_or(0);
        Ok(Self { resident_pages: field(1), file_pages: field(2), ksm_pages })
    }

    /// The largest change of a counter since these earlier ones, in pages.
    pub fn change_since(&self, before: &Self) -> u64 {
        let changes = [
            self.resident_pages.abs_diff(before.resident_pages),
            self.file_pages.abs_diff(before.file_pages),
            self.ksm_pages.abs_diff(before.ksm_pages),
        ];
        changes.into_iter().max().unwrap_or(0)
    }
}

/// Whether the caller may read the memory accounts of process `pid`.
///
/// # Errors
/// [`Error::is_gone`] if the process has ended or is a kernel thread; [`Error::is_denied`] if the caller may not.
pub fn check_readable(pid: u32) -> Result<()> {
    let path = proc_file(pid, "smaps");
    File::open(&path).map(drop).map_err(|e| Error::file("open", path, e))
}

/// The files that process `pid` has open, as the kernel names them. Files closed meanwhile are left out.
///
/// # Errors
/// [`Error::is_gone`] and [`Error::is_denied`].
pub fn open_files(pid: u32) -> Result<Vec<PathBuf>> {
    let path = proc_file(pid, "fd");
    let listing = fs::read_dir(&path).map_err(|e| Error::file("list", &path, e))?;
    Ok(listing.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok()).collect())
}

/// The effective user of the line `Uid: real effective saved filesystem`.
fn parse_uid(status: &str) -> Option<u32> {
    status.lines().find_map(|l| l.strip_prefix("Uid:"))?.split_ascii_whitespace().nth(1)?.parse().ok()
}

/// Each argument ends in a NUL. A process that has written its title over the arguments may leave out the last NUL.
fn parse_cmdline(text: &str) -> Vec<String> {
    let text = text.strip_suffix('\0').unwrap_or(text);
    if text.is_empty() { Vec::new() } else { text.split('\0').map(str::to_owned).collect() }
}

/// Whether any process of this host has a userfaultfd open, as far as the caller may see. A process's faults may be
/// served by another process, so every process is looked at.
pub fn is_userfaultfd_open() -> Result<bool> {
    let opens_one = |pid| open_files(pid).is_ok_and(|files| files.iter().any(|f| f == "anon_inode:[userfaultfd]"));
    Ok(pids()?.into_iter().any(opens_one))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn arguments_may_be_empty_or_unterminated() {
        assert_eq!(parse_cmdline("a\0\0b c\0"), ["a", "", "b c"]);
        assert_eq!(parse_cmdline("nginx: worker process"), ["nginx: worker process"]);
        assert!(parse_cmdline("").is_empty());
    }

    #[test]
    fn uid_is_that_of_effective_user() {
        assert_eq!(parse_uid("Name:\tx\nUid:\t0\t107\t0\t107\nGid:\t1\n"), Some(107));
        assert_eq!(parse_uid("Name:\tx\n"), None);
    }

    #[test]
    fn program_deleted_on_disk_keeps_its_name() {
        let mut p = Process { exe: Some("/usr/bin/qemu-system-x86_64 (deleted)".into()), ..Process::default() };
        assert_eq!(p.program(), "qemu-system-x86_64");
        p.exe = None;
        assert_eq!(p.program(), "");
        p.cmdline = vec!["/usr/libexec/qemu-kvm".into()];
        assert_eq!(p.program(), "qemu-kvm");
    }

    #[test]
    fn program_of_process_is_told_until_it_ends() {
        let own = std::env::current_exe().unwrap();
        let own = own.file_name().unwrap().to_str().unwrap();
        assert_eq!(runs_program(std::process::id(), own), Some(true));
        assert_eq!(runs_program(std::process::id(), "pagefold-attach"), Some(false));
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        assert!(children(std::process::id()).contains(&child.id()));
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(runs_program(child.id(), "sleep"), Some(false));
    }

    #[test]
    fn living_process_is_told_from_one_that_is_gone() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let pid = child.id();
        // Until its exec is complete, the child is a copy of this test.
        let p = loop {
            let p = Process::read(pid).unwrap();
            if p.program() == "sleep" && !p.cmdline.is_empty() {
                break p;
            }
        };
        assert_eq!(p.cmdline, ["sleep", "60"]);
        assert_eq!((p.pid, p.stat.parent, p.comm.as_str()), (pid, std::process::id(), "sleep"));
        assert!(p.stat.start_ticks > 0 && !p.stat.kernel_thread);
        assert!(pids().unwrap().contains(&pid));
        check_readable(pid).unwrap();
        assert!((4096..64 << 20).contains(&anonymous_bytes(pid).unwrap()));
        assert!(!open_files(pid).unwrap().is_empty());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(Process::read(pid).unwrap_err().is_gone());
        assert!(check_readable(pid).unwrap_err().is_gone());
        assert!(open_files(pid).unwrap_err().is_gone());
    }
}
