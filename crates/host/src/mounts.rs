//! File systems of mounts: which of them keep files in memory only, whether `/proc` hides processes, and of which type
//! a mount is.

use crate::memory_files::proc_file;
use crate::text;
use linux_raw_sys::general::{
    __NR_statmount, MNT_ID_REQ_SIZE_VER0, MNT_ID_REQ_SIZE_VER1, STATMOUNT_SB_BASIC, mnt_id_req, statmount,
};
use rustix::fs::{MemfdFlags, fstat, memfd_create};
use std::collections::HashSet;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::LazyLock;

/// A line of `/proc/PID/mountinfo`.
pub(crate) struct Mount<'a> {
    pub root: &'a str,
    pub at: &'a str,
    pub kind: &'a str,
    pub options: &'a str,
}

impl<'a> Mount<'a> {
    pub fn parse(line: &'a str) -> Option<Self> {
        let (mount, filesystem) = line.split_once(" - ")?;
        let (mut mount, mut filesystem) = (mount.split(' ').skip(3), filesystem.split(' '));
        let (root, at) = (mount.next()?, mount.next()?);
        let (kind, options) = (filesystem.next()?, filesystem.nth(1)?);
        Some(Self { root, at, kind, options })
    }
}

/// Device numbers, as `st_dev` encodes them, of file systems whose files are only memory.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct MemoryDevices {
    /// The tmpfs and devtmpfs mounts that a process sees, and the kernel's internal mount for memfd, System V and
    /// shared anonymous memory.
    pub tmpfs: HashSet<u64>,
    /// The hugetlbfs mounts that the process sees.
    pub hugetlbfs: HashSet<u64>,
}

impl MemoryDevices {
    /// The memory file systems that process `pid` sees. If its list of mounts cannot be read, there is only the
    /// kernel's internal mount.
    pub fn of(pid: u32) -> Self {
        let mut devices = Self::parse(&text::read(proc_file(pid, "mountinfo")).unwrap_or_default());
        devices.tmpfs.extend(*INTERNAL_MOUNT);
        devices
    }

    fn parse(mountinfo: &str) -> Self {
        let mut devices = Self::default();
        let mount = |line: &str| {
            let (mount, filesystem) = line.split_once(" - ")?;
            let (major, minor) = mount.split(' ').nth(2)?.split_once(':')?;
            let device = rustix::fs::makedev(major.parse().ok()?, minor.parse().ok()?);
            Some((filesystem.split(' ').next()?.to_owned(), device))
        };
        for (kind, device) in mountinfo.lines().filter_map(mount) {
            match kind.as_str() {
                "tmpfs" | "devtmpfs" => _ = devices.tmpfs.insert(device),
                "hugetlbfs" => _ = devices.hugetlbfs.insert(device),
                _ => {}
            }
        }
        devices
    }
}

/// Device number of the kernel's internal mount, read from a memfd that is made to find it out.
static INTERNAL_MOUNT: LazyLock<Option<u64>> = LazyLock::new(|| {
    let file = memfd_create("pagefold-probe", MemfdFlags::CLOEXEC).ok()?;
    fstat(&file).ok().map(|stat| stat.st_dev)
});

/// The device of the kernel's internal mount; `None` if no memory file can be made.
pub(crate) fn internal_mount() -> Option<u64> {
    *INTERNAL_MOUNT
}

/// Whether `/proc` is mounted so that processes of other users cannot be seen at all
/// (`hidepid=invisible`, `hidepid=ptraceable`).
pub fn proc_hides_processes() -> bool {
    text::read("/proc/self/mountinfo").is_ok_and(|mountinfo| parse_hides_processes(&mountinfo))
}

/// Whether process `pid` sees the whole `/proc` of some PID namespace, by the kernel's list of the process's mounts.
/// Nothing is opened there: a file system that was mounted over `/proc` could make the caller wait.
pub fn has_proc(pid: u32) -> bool {
    text::read(proc_file(pid, "mountinfo")).is_ok_and(|mountinfo| parse_has_proc(&mountinfo))
}

/// Whether `/proc` knows the calling thread by the numbers that system calls have for it. The `/proc` of another PID
/// namespace has other numbers, and other processes by ours. A child that was forked after `unshare(CLONE_NEWPID)` sees
/// such a `/proc`, until it mounts its own.
pub fn proc_is_ours() -> bool {
    let own = format!("{}/task/{}", std::process::id(), rustix::thread::gettid().as_raw_nonzero());
    std::fs::read_link("/proc/thread-self").is_ok_and(|shown| shown == Path::new(&own))
}

fn parse_has_proc(mountinfo: &str) -> bool {
    // A later mount on the same directory covers a previous one.
    let last = mountinfo.lines().filter_map(Mount::parse).rfind(|mount| mount.at == "/proc");
    last.is_some_and(|mount| mount.kind == "proc" && mount.root == "/")
}

fn parse_hides_processes(mountinfo: &str) -> bool {
    let hides = |options: &str| {
        options.split(',').any(|o| matches!(o, "hidepid=2" | "hidepid=4" | "hidepid=invisible" | "hidepid=ptraceable"))
    };
    // A later mount on the same directory covers a previous one.
    let proc = mountinfo.lines().rfind(|l| l.split(' ').nth(4) == Some("/proc"));
    proc.and_then(|l| l.split_once(" - ")).and_then(|(_, fs)| fs.split(' ').nth(2)).is_some_and(hides)
}

/// Type of the file system (`f_type`) of a mount that this process sees, by the mount's unique number. `None` for
/// others, and before Linux 6.8. The file system is not asked.
pub fn filesystem_of_mount(mount: u64) -> Option<u32> {
    ask(mnt_id_req { size: MNT_ID_REQ_SIZE_VER0, mnt_id: mount, ..BASIC })
}

/// As [`filesystem_of_mount`], for a mount that process `pid` sees. This process has to be root. `None` also before
/// Linux 6.11.
pub fn filesystem_of_mount_of(pid: u32, mount: u64) -> Option<u32> {
    /// `NS_GET_MNTNS_ID`: `_IOR(0xb7, 5, u64)`.
    const GET_NUMBER: libc::Ioctl = 0x8008_b705_u32 as libc::Ioctl;
    let namespace = File::open(proc_file(pid, "ns/mnt")).ok()?;
    let mut number = 0_u64;
    // SAFETY: the kernel writes the namespace's number to the variable.
    let answer = unsafe { libc::ioctl(namespace.as_raw_fd(), GET_NUMBER, &raw mut number) };
    let question = mnt_id_req { size: MNT_ID_REQ_SIZE_VER1, mnt_id: mount, mnt_ns_id: number, ..BASIC };
    (answer == 0).then(|| ask(question)).flatten()
}

/// The request to `statmount` for the type of a file system. The mount is still to be filled in.
const BASIC: mnt_id_req = mnt_id_req { size: 0, spare: 0, mnt_id: 0, param: STATMOUNT_SB_BASIC as u64, mnt_ns_id: 0 };

fn ask(question: mnt_id_req) -> Option<u32> {
    let mut answer = std::mem::MaybeUninit::<statmount>::zeroed();
    // SAFETY: the kernel reads as many bytes of the question as that says, and writes at most the answer's size.
    let answered = unsafe {
        libc::syscall(__NR_statmount.into(), &raw const question, answer.as_mut_ptr(), size_of::<statmount>(), 0)
    };
    if answered != 0 {
        return None;
    }
    // SAFETY: filled, and all-zero before.
    let answer = unsafe { answer.assume_init() };
    (answer.mask & u64::from(STATMOUNT_SB_BASIC) != 0).then_some(answer.sb_magic as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
22 28 0:20 / /proc rw,nosuid,nodev,noexec,relatime shared:12 - proc proc rw,hidepid=invisible
23 28 0:5 / /dev rw,nosuid shared:2 - devtmpfs udev rw,size=12334492k,mode=755
24 23 0:22 / /dev/shm rw,nosuid,nodev shared:4 - tmpfs tmpfs rw
28 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard
31 23 0:33 / /dev/hugepages rw,relatime shared:15 - hugetlbfs hugetlbfs rw,pagesize=2M
";

    #[test]
    fn last_mount_at_proc_decides() {
        let proc = "22 28 0:20 / /proc rw shared:12 - proc proc rw\n23 22 0:21 / /proc/sys ro - proc proc rw\n";
        assert!(parse_has_proc(proc) && has_proc(std::process::id()));
        for other in ["40 22 0:33 / /proc rw - fuse.x x rw\n", "40 22 0:20 /self /proc rw - proc proc rw\n"] {
            assert!(!parse_has_proc(&format!("{proc}{other}")), "{other}");
        }
        assert!(!parse_has_proc(""));
    }

    #[test]
    fn memory_file_systems_are_found_by_type() {
        let device = |minor| rustix::fs::makedev(0, minor);
        let expected = MemoryDevices { tmpfs: [5, 22].map(device).into(), hugetlbfs: [device(33)].into() };
        assert_eq!(MemoryDevices::parse(MOUNTS), expected);
    }

    #[test]
    fn last_mount_of_proc_decides() {
        assert!(parse_hides_processes(MOUNTS));
        let covered = format!("{MOUNTS}99 28 0:77 / /proc rw - proc proc rw\n");
        assert!(!parse_hides_processes(&covered));
        assert!(!parse_hides_processes(""));
    }

    #[test]
    fn filesystem_of_mount_is_told_where_process_sees_it() {
        use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
        let unique = StatxFlags::from_bits_retain(1 << 14);
        let mount = |path| statx(CWD, path, AtFlags::empty(), unique).map(|found| (found.stx_mask, found.stx_mnt_id));
        match mount("/proc/self/status") {
            Ok((mask, mount)) if mask & unique.bits() != 0 => {
                assert_eq!(filesystem_of_mount(mount), Some(0x9FA0));
                assert_eq!(filesystem_of_mount_of(std::process::id(), mount), Some(0x9FA0));
            }
            found => eprintln!("skipped: no unique numbers of mounts here: {found:?}"),
        }
        assert_eq!(filesystem_of_mount(u64::MAX), None);
        assert_eq!(filesystem_of_mount_of(std::process::id(), u64::MAX), None);
        assert_eq!(filesystem_of_mount_of(u32::MAX, 1), None);
    }

    #[test]
    fn proc_of_another_namespace_is_not_ours() {
        const INSIDE: &str = "PAGEFOLD_TEST_INSIDE";
        if std::env::var_os(INSIDE).is_some() {
            return assert!(!proc_is_ours());
        }
        assert!(proc_is_ours() && std::thread::spawn(proc_is_ours).join().unwrap());
        if !rustix::process::geteuid().is_root() {
            return eprintln!("skipped: only root can make a PID namespace");
        }
        let name = "mounts::tests::proc_of_another_namespace_is_not_ours";
        let mut command = std::process::Command::new("unshare");
        command.args(["--pid", "--fork"]).arg(std::env::current_exe().unwrap()).args(["--exact", name]);
        let inside = command.env(INSIDE, "1").output().unwrap();
        assert!(inside.status.success() && String::from_utf8_lossy(&inside.stdout).contains("1 passed"), "{inside:?}");
    }
}
