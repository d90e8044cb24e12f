//! Files whose contents can be read without waiting for a process or a server: files on file systems that this host's
//! kernel serves by itself.
//!
//! A read of a file of FUSE, 9p or a network file system waits for the server's answer, and the reader cannot be killed
//! before. A question for the file system's type (`statfs`) waits as well. The kernel's list of mounts tells the type
//! without asking the server.

use crate::memory_files::proc_file;
use crate::mounts::Mount;
use crate::{Mapping, text};
use std::collections::BTreeSet;
use std::fs;

/// Types of file systems that the kernel serves from memory and block devices.
const LOCAL: [&str; 20] = [
    "bcachefs",
    "btrfs",
    "devtmpfs",
    "erofs",
    "exfat",
    "ext2",
    "ext3",
    "ext4",
    "f2fs",
    "hugetlbfs",
    "iso9660",
    "jfs",
    "nilfs2",
    "ramfs",
    "rootfs",
    "squashfs",
    "tmpfs",
    "vfat",
    "xfs",
    "zfs",
];
/// A file system that shows directories of other file systems, which are chosen when it is mounted.
const OVERLAY: &str = "overlay";

/// Devices of local file systems.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LocalFiles(BTreeSet<u64>);

impl LocalFiles {
    /// The local file systems that this process sees, and those that process `pid` sees. An overlay that was mounted in
    /// another user namespace does not count.
    pub fn of(pid: u32) -> Self {
        let namespace = |path: String| fs::read_link(path).ok();
        let own = namespace("/proc/self/ns/user".to_owned());
        let is_ours = own.is_some() && own == namespace(proc_file(pid, "ns/user").to_string_lossy().into_owned());
        let list = |path| text::read(path).unwrap_or_default();
        let mut all = parse(&list("/proc/self/mountinfo".into()), true);
        all.extend(parse(&list(proc_file(pid, "mountinfo")), is_ours));
        Self(all)
    }

    /// Whether no page of a mapping has to be fetched from a server: it has no file, its file is memory, or its file
    /// system is local.
    pub fn hold(&self, mapping: &Mapping) -> bool {
        mapping.inode == 0 || mapping.shmem || self.0.contains(&mapping.device)
    }
}

fn parse(mountinfo: &str, with_overlays: bool) -> BTreeSet<u64> {
    let device = |line: &str| {
        let kind = Mount::parse(line)?.kind;
        let (major, minor) = line.split(' ').nth(2)?.split_once(':')?;
        let device = rustix::fs::makedev(major.parse().ok()?, minor.parse().ok()?);
        (LOCAL.contains(&kind) || kind == OVERLAY && with_overlays).then_some(device)
    };
    mountinfo.lines().filter_map(device).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_that_a_user_may_serve_are_not_local() {
        let mounts = "28 1 254:0 / / rw shared:1 - ext4 /dev/vda rw\n29 28 0:40 / /fuse rw - fuse.ext4 x rw,user_id=0\n\
            30 28 0:41 / /nfs rw - nfs4 x rw\n31 28 0:42 / /over rw - overlay overlay rw,lowerdir=/fuse\n\
            32 28 0:43 / /p rw - 9p x rw\n33 28 0:44 / /c rw - virtiofs x rw\n34 28 0:45 / /t rw - tmpfs tmpfs rw\n";
        let devices =
            |all: &[(u32, u32)]| all.iter().map(|(major, minor)| rustix::fs::makedev(*major, *minor)).collect();
        assert_eq!(parse(mounts, false), devices(&[(254, 0), (0, 45)]));
        assert_eq!(parse(mounts, true), devices(&[(254, 0), (0, 45), (0, 42)]));
    }

    #[test]
    fn own_program_is_local_and_a_file_of_unknown_device_is_not() {
        let pid = std::process::id();
        let (local, all) = (LocalFiles::of(pid), Mapping::list(pid).unwrap());
        let program = all.iter().find(|mapping| mapping.execute && mapping.has_file()).unwrap();
        assert!(local.hold(program), "{program:?}");
        let foreign = Mapping { device: u64::MAX, shmem: false, ..program.clone() };
        assert!(!local.hold(&foreign));
        assert!(local.hold(&Mapping { inode: 0, ..foreign }), "it is memory");
    }
}
