//! Knowledge about kinds of files: whether a read may write the reader's memory by other ways than page tables or
//! pinned pages.
//!
//! *Pins* means: direct reads take their pages by `pin_user_pages` (`iov_iter_extract_pages`). A fold notices that,
//! because the kernel refuses to move a page that may be pinned. Folding needs `UFFDIO_MOVE`, so the kernel is 6.8 or
//! newer, and there:
//!
//! | code that pins | since | which serves |
//! |---|---|---|
//! | `block/bio.c` (`bio_iov_iter_get_pages`) | 6.3 | block devices, btrfs |
//! | the same, through `iomap_dio_rw` | 6.3 | ext4, xfs, f2fs; ext2 from 6.5 on |
//! | `fs/direct-io.c` | 6.5 | filesystems that use it |
//!
//! *Copies* means: the processor writes the data through the page tables, as the program itself would.
//!
//! All other files are unknown, and a member that has one open is not folded. For years, NFS took plain references for
//! direct reads (`iov_iter_get_pages_alloc2` in `fs/nfs/direct.c`), and so did 9p, ceph, cifs and fuse. These file
//! systems may read directly even if the program did not ask for it (mounted without a cache, `FOPEN_DIRECT_IO`).

/// Facts about an open file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Facts {
    /// `st_mode`
    pub mode: u32,
    /// Major and minor number of the device, for device files.
    pub device: (u32, u32),
    /// `f_type` of its filesystem, if that is known.
    pub filesystem: Option<u32>,
    /// Flags, as `fcntl(F_GETFL)` returns them.
    pub flags: i32,
}

/// The judgement of an open file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Pins, copies, or does not write memory at all.
    Harmless,
    /// Depends on the name of the anonymous inode.
    ByName,
    /// Depends on the name of the character device.
    ByDevice,
    /// Depends on the socket.
    BySocket,
    /// Depends on the filesystem, which is not known.
    ByFilesystem,
    /// The file's reads are not known to copy. This is a reason not to fold as long as the file is open.
    PlainReads,
    /// The file's direct reads are not known to pin, and may go on after its descriptor was closed.
    DirectReads,
}

/// Filesystems whose direct reads (`O_DIRECT`) pin, and whose other reads copy, with their `f_type`.
const PINNING: [(&str, u32); 4] =
    [("ext4", 0xEF53), ("xfs", 0x5846_5342), ("btrfs", 0x9123_683E), ("f2fs", 0xF2F5_2010)];
/// Filesystems whose reads copy; it is not known whether direct reads pin.
const COPYING: [(&str, u32); 9] = [
    ("nfs", 0x6969),
    ("overlay", 0x794C_7630),
    ("squashfs", 0x7371_7368),
    ("erofs", 0xE0F5_E1E2),
    ("iso9660", 0x9660),
    ("udf", 0x1501_3346),
    ("vfat", 0x4D44),
    ("exfat", 0x2011_BAB0),
    ("ecryptfs", 0xF15F),
];
/// Filesystems without a device behind them, on which everything copies.
const MEMORY: [(&str, u32); 21] = [
    ("tmpfs", 0x0102_1994),
    ("ramfs", 0x8584_58F6),
    ("hugetlbfs", 0x9584_58F6),
    ("proc", 0x9FA0),
    ("sysfs", 0x6265_6572),
    ("devpts", 0x1CD1),
    ("cgroup", 0x0027_E0EB),
    ("cgroup2", 0x6367_7270),
    ("debugfs", 0x6462_6720),
    ("tracefs", 0x7472_6163),
    ("securityfs", 0x7363_6673),
    ("selinuxfs", 0xF97C_FF8C),
    ("bpf", 0xCAFE_4A11),
    ("nsfs", 0x6E73_6673),
    ("pipefs", 0x5049_5045),
    ("pidfs", 0x5049_4446),
    ("efivarfs", 0xDE5E_81E4),
    ("mqueue", 0x1980_0202),
    ("configfs", 0x6265_6570),
    ("secretmem", 0x5345_434D),
    ("pstore", 0x6165_676C),
];
/// Other filesystems that messages call by their names.
const NAMES: [(&str, u32); 7] = [
    ("9p", 0x0102_1997),
    ("ceph", 0x00C3_6400),
    ("cifs", 0xFF53_4D42),
    ("smb2", 0xFE53_4D42),
    ("fuse", 0x6573_5546),
    ("orangefs", 0x2003_0528),
    ("zfs", 0x2FC1_2FC1),
];
/// `f_type` of the filesystem of anonymous inodes.
const ANONYMOUS_INODES: u32 = 0x0904_1934;

/// Filesystems that the operator does not trust to pin: bit `n` stands for element `n` of [`PINNING`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Distrusted(pub u32);

impl Distrusted {
    /// Parses names that are separated by commas.
    pub fn parse(names: &str) -> Self {
        let alias = |name: &str| if matches!(name, "ext2" | "ext3") { "ext4".to_owned() } else { name.to_owned() };
        let place = |name: &str| PINNING.iter().position(|(known, _)| *known == alias(name.trim()));
        Self(names.split(',').filter_map(place).fold(0, |bits, place| bits | 1 << place))
    }

    fn includes(self, filesystem: u32) -> bool {
        let place = PINNING.iter().position(|(_, magic)| *magic == filesystem);
        place.is_some_and(|place| self.0 >> place & 1 == 1)
    }

    /// Whether any filesystem is distrusted. Then block devices are distrusted, too: these filesystems lie on them, and
    /// the kernel reads them by the same code.
    fn any(self) -> bool {
        self.0 != 0
    }
}

fn is_among(list: &[(&str, u32)], filesystem: u32) -> bool {
    list.iter().any(|(_, magic)| *magic == filesystem)
}

/// The name of a filesystem.
pub fn filesystem_name(filesystem: u32) -> String {
    let mut all = PINNING.iter().chain(&COPYING).chain(&MEMORY).chain(&NAMES);
    let name = all.find(|(_, magic)| *magic == filesystem).map(|(name, _)| (*name).to_owned());
    name.unwrap_or_else(|| match filesystem {
        0 => "a filesystem that cannot be told".to_owned(),
        _ => format!("a filesystem of type {filesystem:#x}"),
    })
}

/// Judges an open file as far as these facts go. Allocates nothing, because hooks call it too.
pub fn judge(file: Facts, distrusted: Distrusted) -> Verdict {
    let direct = file.flags & libc::O_DIRECT != 0;
    let only_written = file.flags & libc::O_ACCMODE == libc::O_WRONLY;
    if file.flags & libc::O_PATH != 0 {
        return Verdict::Harmless;
    }
    match file.mode & libc::S_IFMT {
        libc::S_IFDIR | libc::S_IFIFO | libc::S_IFLNK => Verdict::Harmless,
        libc::S_IFSOCK => Verdict::BySocket,
        libc::S_IFCHR => Verdict::ByDevice,
        // The kernel shows no file type for most anonymous inodes.
        0 => Verdict::ByName,
        // Writing to a file only reads memory. It does no harm if a page is folded that is read through a plain
        // reference.
        _ if only_written && file.filesystem != Some(ANONYMOUS_INODES) => Verdict::Harmless,
        libc::S_IFBLK if direct && distrusted.any() => Verdict::DirectReads,
        libc::S_IFBLK => Verdict::Harmless,
        _ => file.filesystem.map_or(Verdict::ByFilesystem, |known| judge_by_filesystem(known, direct, distrusted)),
    }
}

fn judge_by_filesystem(filesystem: u32, direct: bool, distrusted: Distrusted) -> Verdict {
    if filesystem == ANONYMOUS_INODES {
        return Verdict::ByName;
    }
    let pins = is_among(&PINNING, filesystem) && !distrusted.includes(filesystem);
    let copies = is_among(&COPYING, filesystem) || is_among(&PINNING, filesystem);
    match direct {
        _ if is_among(&MEMORY, filesystem) || pins => Verdict::Harmless,
        true => Verdict::DirectReads,
        false if copies => Verdict::Harmless,
        false => Verdict::PlainReads,
    }
}

/// Whether an anonymous inode of this name (`anon_inode:[eventfd]`) is known not to write memory behind the page
/// tables.
pub fn is_known_inode(link: &str) -> bool {
    const KNOWN: [&str; 18] = [
        "eventfd",
        "eventpoll",
        "timerfd",
        "signalfd",
        "inotify",
        "fanotify",
        "userfaultfd",
        "pidfd",
        "perf_event",
        "io_uring",
        "bpf-map",
        "bpf-prog",
        "bpf_link",
        "bpf_iter",
        "btf",
        "fscontext",
        "landlock-ruleset",
        "seccomp notify",
    ];
    let Some(name) = link.strip_prefix("anon_inode:") else { return false };
    let name = name.trim_start_matches('[').trim_end_matches(']');
    // Virtual machines, processors, their statistics and devices. KVM writes into a guest through the page tables, and
    // is told (`mmu_notifier`) before these change.
    KNOWN.contains(&name) || name.starts_with("kvm-") || name.starts_with("bpf-")
}

/// Whether a character device is known not to write memory behind the page tables, by its number, and by what
/// `/sys/dev/char` calls it: `misc/kvm`.
pub fn is_known_device((major, minor): (u32, u32), name: Option<&str>) -> bool {
    // null, zero, full, random, urandom, kmsg; terminals.
    let by_number = matches!((major, minor), (1, 3 | 5 | 7 | 8 | 9 | 11) | (4 | 5 | 136..=143, _));
    let Some((class, device)) = name.and_then(|name| name.rsplit_once('/')) else { return by_number };
    let class = class.rsplit_once('/').map_or(class, |(_, class)| class);
    let misc = ["kvm", "tun", "vhost-net", "vhost-vsock", "userfaultfd", "hpet", "rtc"];
    by_number || matches!(class, "rtc" | "tty" | "macvtap" | "ptp") || class == "misc" && misc.contains(&device)
}

/// Whether sockets of this family are known to copy what they receive.
pub const fn is_known_family(family: i32) -> bool {
    matches!(
        family,
        libc::AF_UNIX | libc::AF_INET | libc::AF_INET6 | libc::AF_NETLINK | libc::AF_PACKET | libc::AF_VSOCK
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(filesystem: u32, flags: i32) -> Facts {
        Facts { mode: libc::S_IFREG | 0o644, device: (0, 0), filesystem: Some(filesystem), flags }
    }

    fn verdict(filesystem: u32, flags: i32) -> Verdict {
        judge(file(filesystem, flags), Distrusted::default())
    }

    #[test]
    fn direct_reads_are_harmless_where_they_are_known_to_pin() {
        for filesystem in [0xEF53, 0x5846_5342, 0x9123_683E, 0xF2F5_2010, 0x0102_1994] {
            assert_eq!(verdict(filesystem, libc::O_DIRECT), Verdict::Harmless);
            assert_eq!(verdict(filesystem, 0), Verdict::Harmless);
        }
        for filesystem in [0x6969, 0x794C_7630, 0x7371_7368] {
            assert_eq!(verdict(filesystem, libc::O_DIRECT | libc::O_RDWR), Verdict::DirectReads);
            assert_eq!(verdict(filesystem, libc::O_RDWR), Verdict::Harmless);
        }
        for filesystem in [0x0102_1997, 0x00C3_6400, 0xFF53_4D42, 0x6573_5546, 0x1234_5678] {
            assert_eq!(verdict(filesystem, libc::O_DIRECT), Verdict::DirectReads);
            assert_eq!(verdict(filesystem, 0), Verdict::PlainReads);
        }
    }

    #[test]
    fn files_that_are_only_written_or_never_read_are_harmless() {
        assert_eq!(verdict(0x6573_5546, libc::O_WRONLY | libc::O_DIRECT), Verdict::Harmless);
        assert_eq!(verdict(0x6573_5546, libc::O_PATH), Verdict::Harmless);
        let directory = Facts { mode: libc::S_IFDIR | 0o755, ..file(0x6573_5546, 0) };
        assert_eq!(judge(directory, Distrusted::default()), Verdict::Harmless);
    }

    #[test]
    fn plain_file_is_judged_when_its_filesystem_is_known() {
        let of = |mode, flags| Facts { mode, filesystem: None, ..file(0, flags) };
        let judged = |mode, flags| judge(of(mode, flags), Distrusted::default());
        assert_eq!(judged(libc::S_IFREG | 0o644, libc::O_RDWR), Verdict::ByFilesystem);
        assert_eq!(judged(libc::S_IFREG | 0o644, libc::O_WRONLY), Verdict::Harmless);
        assert_eq!(judged(libc::S_IFSOCK | 0o777, libc::O_RDWR), Verdict::BySocket);
        assert_eq!(judged(0o600, libc::O_RDWR), Verdict::ByName);
    }

    #[test]
    fn a_filesystem_can_be_distrusted() {
        let distrusted = Distrusted::parse("nonsense, ext3,xfs");
        assert_eq!(judge(file(0xEF53, libc::O_DIRECT), distrusted), Verdict::DirectReads);
        assert_eq!(judge(file(0x5846_5342, libc::O_DIRECT), distrusted), Verdict::DirectReads);
        assert_eq!(judge(file(0xEF53, 0), distrusted), Verdict::Harmless);
        assert_eq!(judge(file(0x9123_683E, libc::O_DIRECT), distrusted), Verdict::Harmless);
        let block = Facts { mode: libc::S_IFBLK | 0o660, device: (8, 0), ..file(0x0102_1994, libc::O_DIRECT) };
        assert_eq!(judge(block, Distrusted::default()), Verdict::Harmless);
        assert_eq!(judge(block, distrusted), Verdict::DirectReads);
    }

    #[test]
    fn inodes_and_devices_are_known_by_their_kernel_names() {
        for known in ["anon_inode:[eventfd]", "anon_inode:inotify", "anon_inode:kvm-vcpu:0", "anon_inode:bpf-map"] {
            assert!(is_known_inode(known), "{known}");
        }
        for unknown in ["anon_inode:[vfio-device]", "anon_inode:sync_file", "/kvm-vm", "anon_inode:[vfio-cdev]"] {
            assert!(!is_known_inode(unknown), "{unknown}");
        }
        assert!(is_known_device((10, 232), Some("../../devices/virtual/misc/kvm")));
        assert!(is_known_device((1, 3), None) && is_known_device((136, 7), None) && is_known_device((5, 2), None));
        assert!(is_known_device((248, 0), Some("../../devices/pnp0/00:02/rtc/rtc0")));
        for unknown in
            ["../../devices/virtual/misc/vfio", "../../devices/virtual/vfio/12", "misc/fuse", "misc/vhost-scsi"]
        {
            assert!(!is_known_device((10, 196), Some(unknown)), "{unknown}");
        }
        assert!(!is_known_device((10, 232), None));
        assert!(is_known_family(libc::AF_UNIX) && !is_known_family(libc::AF_XDP) && !is_known_family(libc::AF_ALG));
    }
}
