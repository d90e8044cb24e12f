//! `/proc/PID/smaps` and `smaps_rollup`: the mappings of a process and the memory that each holds. Counters have the
//! kernel's names, and are in bytes.
//!
//! Totals of a process come from one read of `smaps_rollup`. The kernel then walks all page tables in one go and
//! rounds the proportional set once. Mappings come from `smaps`. If a process ends or executes another program while
//! its `smaps` is read, the list just stops; this module detects that and returns an error.

use crate::memory_files::{proc_file, thread_with_memory};
use crate::mounts::MemoryDevices;
use crate::{Error, Result};
use page::HostVirt;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// The counters of one mapping, or of a whole process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// `Rss`
    pub rss_bytes: u64,
    /// `Pss`
    pub pss_bytes: u64,
    /// `Private_Clean` + `Private_Dirty`
    pub uss_bytes: u64,
    /// `Swap`
    pub swap_bytes: u64,
    /// `Anonymous`
    pub anonymous_bytes: u64,
    /// `AnonHugePages` + `ShmemPmdMapped` + `FilePmdMapped`
    pub thp_bytes: u64,
    /// `Private_Hugetlb` + `Shared_Hugetlb`
    pub hugetlb_bytes: u64,
    /// `KSM`, since Linux 6.6
    pub ksm_bytes: Option<u64>,
    /// `Locked`
    pub locked_bytes: u64,
}

/// One mapping (VMA) of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// First address.
    pub start: HostVirt,
    /// First address behind the mapping.
    pub end: HostVirt,
    /// Readable, that is, neither `PROT_NONE` nor write-only.
    pub read: bool,
    /// Writable.
    pub write: bool,
    /// Executable.
    pub execute: bool,
    /// `MAP_SHARED`
    pub shared: bool,
    /// Offset in the file.
    pub offset: u64,
    /// Device of the file, as `st_dev` encodes it; 0 for none.
    pub device: u64,
    /// Inode of the file; 0 for none.
    pub inode: u64,
    /// Path of the file, or the kernel's name in brackets; empty for plain anonymous memory. It is as the kernel
    /// prints it: a newline is `\012`, and a file that has no name any more ends in ` (deleted)`.
    pub name: String,
    /// Whether the file behind it is memory that only looks like a file: memfd, tmpfs, hugetlbfs, System V, shared
    /// anonymous memory.
    pub shmem: bool,
    /// Whether it is of hugetlbfs pages, by the mount that its file is on, or by `VmFlags`.
    pub hugetlb: bool,
    /// Memory that it holds.
    pub usage: Usage,
    /// Two-letter `VmFlags`, in the kernel's order (`mg` mergeable, `ht` hugetlb, `io` device, `pf` PFN map,
    /// `lo` locked, `nh`, `hg` huge page advice, `um` `uw` userfaultfd).
    pub vm_flags: Vec<[u8; 2]>,
}

impl Usage {
    /// The totals of process `pid`, from one read of `smaps_rollup`, or summed over `smaps` on kernels
    /// without it (before 4.14).
    ///
    /// # Errors
    /// [`Error::is_gone`] if the process has ended or never had memory (a kernel thread);
    /// [`Error::is_denied`] if the caller may not look.
    pub fn of(pid: u32) -> Result<Self> {
        let path = proc_file(pid, "smaps_rollup");
        match File::open(&path) {
            Ok(file) => {
                let mut entries = parse(BufReader::new(file), &path)?;
                entries.pop().map(|m| m.usage).ok_or_else(|| gone(&path))
            }
            Err(e) if e.raw_os_error() == Some(libc::ENOENT) => {
                Ok(Mapping::read_all(pid)?.iter().fold(Self::default(), |sum, m| sum.plus(&m.usage)))
            }
            Err(e) => Err(Error::file("open", path, e)),
        }
    }

    /// The sum of both. `ksm_bytes` is known if it is known in either.
    pub fn plus(&self, other: &Self) -> Self {
        Self {
            rss_bytes: self.rss_bytes.saturating_add(other.rss_bytes),
            pss_bytes: self.pss_bytes.saturating_add(other.pss_bytes),
            uss_bytes: self.uss_bytes.saturating_add(other.uss_bytes),
            swap_bytes: self.swap_bytes.saturating_add(other.swap_bytes),
            anonymous_bytes: self.anonymous_bytes.saturating_add(other.anonymous_bytes),
            thp_bytes: self.thp_bytes.saturating_add(other.thp_bytes),
            hugetlb_bytes: self.hugetlb_bytes.saturating_add(other.hugetlb_bytes),
            ksm_bytes: match (self.ksm_bytes, other.ksm_bytes) {
                (None, None) => None,
                (a, b) => Some(a.unwrap_or(0).saturating_add(b.unwrap_or(0))),
            },
            locked_bytes: self.locked_bytes.saturating_add(other.locked_bytes),
        }
    }

    /// Adds one line `Key: N kB`; keys without a counter here are skipped.
    fn add(&mut self, key: &[u8], bytes: u64) {
        let sum = match key {
            b"Rss" => &mut self.rss_bytes,
            b"Pss" => &mut self.pss_bytes,
            b"Private_Clean" | b"Private_Dirty" => &mut self.uss_bytes,
            b"Anonymous" => &mut self.anonymous_bytes,
            b"Swap" => &mut self.swap_bytes,
            b"AnonHugePages" | b"ShmemPmdMapped" | b"FilePmdMapped" => &mut self.thp_bytes,
            b"Private_Hugetlb" | b"Shared_Hugetlb" => &mut self.hugetlb_bytes,
            b"KSM" => self.ksm_bytes.get_or_insert(0),
            b"Locked" => &mut self.locked_bytes,
            _ => return,
        };
        *sum = sum.saturating_add(bytes);
    }
}

impl Mapping {
    /// All mappings of process `pid`, in address order.
    ///
    /// # Errors
    /// [`Error::is_gone`] if the process has ended, executed another program meanwhile, or never had memory (a kernel
    /// thread); [`Error::is_denied`] if the caller may not look.
    pub fn read_all(pid: u32) -> Result<Vec<Self>> {
        Self::read(pid, "smaps")
    }

    /// Parses the saved text of a `smaps`. [`Mapping::shmem`] then depends on the file's name alone.
    ///
    /// # Errors
    /// [`Error::Malformed`]
    pub fn parse_all(smaps: &str) -> Result<Vec<Self>> {
        let mut mappings = parse(smaps.as_bytes(), Path::new("smaps"))?;
        mark_shmem(&mut mappings, &MemoryDevices::default());
        Ok(mappings)
    }

    /// All mappings of process `pid`, without usage and `VmFlags`. They come from `/proc/PID/maps`, for which the
    /// kernel need not walk the page tables.
    ///
    /// # Errors
    /// As for [`Mapping::read_all`].
    pub fn list(pid: u32) -> Result<Vec<Self>> {
        Self::read(pid, "maps")
    }

    fn read(pid: u32, name: &str) -> Result<Vec<Self>> {
        let path = proc_file(pid, name);
        let file = File::open(&path).map_err(|e| Error::file("open", &path, e))?;
        let mut mappings = read_whole(BufReader::with_capacity(1 << 16, file), &path)?;
        mark_shmem(&mut mappings, &MemoryDevices::of(pid));
        Ok(mappings)
    }

    /// The link in `/proc/PID/map_files` to the file that process `pid` maps here. Opening the link opens that very
    /// file, even if it has no name any more.
    pub fn file_path(&self, pid: u32) -> PathBuf {
        format!("/proc/{}/map_files/{:x}-{:x}", thread_with_memory(pid), self.start.0, self.end.0).into()
    }

    /// Whether it maps a memory file (`memfd_create`). The name alone is no proof: a file on disk, or one that a
    /// program serves, may have it.
    pub fn is_memory_file(&self) -> bool {
        self.name.starts_with("/memfd:") && crate::mounts::internal_mount() == Some(self.device)
    }

    /// Whether it maps a device or the kernel's own data rather than memory. The name decides, except for hugetlbfs,
    /// which may be mounted anywhere below `/dev`.
    pub fn is_device(&self) -> bool {
        const MEMORY: [&str; 3] = ["/dev/zero", "/dev/shm/", "/dev/hugepages/"];
        let device =
            !self.hugetlb && self.name.starts_with("/dev/") && !MEMORY.iter().any(|m| self.name.starts_with(m));
        let kernel = ["[vvar", "[vsyscall", "anon_inode:"].iter().any(|k| self.name.starts_with(k));
        device || kernel
    }

    /// Length in bytes of address space.
    pub fn bytes(&self) -> u64 {
        self.end.0.saturating_sub(self.start.0)
    }

    /// Whether the two-letter VM flag is set.
    pub fn has_flag(&self, flag: &[u8; 2]) -> bool {
        self.vm_flags.contains(flag)
    }

    /// Whether its file has the name of a C library: `libc.so.6`, `libc-2.31.so`, `ld-musl-x86_64.so.1`.
    pub fn is_c_library(&self) -> bool {
        let name = self.name.rsplit('/').next().unwrap_or_default();
        ["libc.", "libc-", "ld-musl-"].iter().any(|begin| name.starts_with(begin))
    }

    /// Whether it maps a file, including files that are only memory.
    pub fn has_file(&self) -> bool {
        self.inode != 0 || self.name.starts_with('/')
    }
}

fn gone(path: &Path) -> Error {
    Error::file("read", path, std::io::Error::from_raw_os_error(libc::ESRCH))
}

/// Parses an open `smaps` and makes sure that it is complete. If the address space goes away in the middle of the
/// read, the kernel reports the end of the file at that point. The open file stays bound to the address space that it
/// was opened for. So if that is gone, nothing can be read from the start of the file either.
fn read_whole(mut reader: BufReader<File>, path: &Path) -> Result<Vec<Mapping>> {
    let mappings = parse(&mut reader, path)?;
    let again = reader.get_ref().read_at(&mut [0], 0).map_err(|e| Error::file("read", path, e))?;
    if again == 0 { Err(gone(path)) } else { Ok(mappings) }
}

/// Parses `smaps`, `maps` or `smaps_rollup`. `path` is for messages.
fn parse(mut reader: impl BufRead, path: &Path) -> Result<Vec<Mapping>> {
    let mut mappings: Vec<Mapping> = Vec::new();
    let mut line = Vec::with_capacity(256);
    for number in 1.. {
        line.clear();
        if reader.read_until(b'\n', &mut line).map_err(|e| Error::file("read", path, e))? == 0 {
            break;
        }
        let text = line.strip_suffix(b"\n").unwrap_or(&line);
        let understood = if text.first().is_some_and(u8::is_ascii_uppercase) {
            mappings.last_mut().and_then(|m| field(m, text))
        } else {
            header(text).map(|m| mappings.push(m))
        };
        if understood.is_none() {
            let problem = format!("cannot make sense of {:?}", String::from_utf8_lossy(text));
            return Err(Error::Malformed { path: path.into(), line: number, problem });
        }
    }
    Ok(mappings)
}

/// `55be3f066000-55be3f069000 r--p 00000000 fe:00 247741       /usr/bin/sed`
fn header(line: &[u8]) -> Option<Mapping> {
    let (range, rest) = split(line, b' ')?;
    let (start, end) = split(range, b'-')?;
    let (rights, rest) = split(rest, b' ')?;
    let (offset, rest) = split(rest, b' ')?;
    let (device, rest) = split(rest, b' ')?;
    let (major, minor) = split(device, b':')?;
    // The kernel pads the inode with blanks up to the name, and ends the line with one if there is none.
    let (inode, name) = split(rest, b' ').unwrap_or((rest, b""));
    let &[read, write, execute, shared] = rights else { return None };
    let (start, end) = (HostVirt(hex(start)?), HostVirt(hex(end)?));
    let name = String::from_utf8_lossy(name.trim_ascii_start()).into_owned();
    Some(Mapping {
        start,
        end: (end >= start).then_some(end)?,
        read: read == b'r',
        write: write == b'w',
        execute: execute == b'x',
        shared: shared == b's',
        offset: hex(offset)?,
        device: rustix::fs::makedev(hex(major)?.try_into().ok()?, hex(minor)?.try_into().ok()?),
        inode: std::str::from_utf8(inode).ok()?.parse().ok()?,
        name,
        shmem: false,
        hugetlb: false,
        usage: Usage::default(),
        vm_flags: Vec::new(),
    })
}

/// `Rss:     12 kB`, `VmFlags: rd mr mw me `, `THPeligible:    0`
fn field(mapping: &mut Mapping, line: &[u8]) -> Option<()> {
    let (key, value) = split(line, b':')?;
    let value = value.trim_ascii();
    if key == b"VmFlags" {
        mapping.vm_flags.extend(value.split(|&b| b == b' ').filter_map(|f| <[u8; 2]>::try_from(f).ok()));
    } else if let Some(kib) = value.strip_suffix(b" kB") {
        let kib: u64 = std::str::from_utf8(kib).ok()?.parse().ok()?;
        mapping.usage.add(key, kib.checked_mul(1024)?);
    }
    Some(())
}

fn split(bytes: &[u8], at: u8) -> Option<(&[u8], &[u8])> {
    let i = bytes.iter().position(|&b| b == at)?;
    Some((&bytes[..i], &bytes[i + 1..]))
}

fn hex(digits: &[u8]) -> Option<u64> {
    u64::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()
}

/// Sets [`Mapping::shmem`] and [`Mapping::hugetlb`]. A file is only memory if it has a name that the kernel gives to
/// such files, or is on a tmpfs or hugetlbfs.
fn mark_shmem(mappings: &mut [Mapping], devices: &MemoryDevices) {
    const NAMES: [&str; 5] = ["/memfd:", "/dev/shm/", "/SYSV", "/dev/zero (deleted)", "/anon_hugepage"];
    for m in mappings.iter_mut().filter(|m| m.has_file() || m.name.starts_with("[anon_shmem:")) {
        m.hugetlb = m.has_flag(b"ht") || (m.device != 0 && devices.hugetlbfs.contains(&m.device));
        m.shmem = m.hugetlb
            || m.name.starts_with("[anon_shmem:")
            || NAMES.iter().any(|n| m.name.starts_with(n))
            || (m.device != 0 && devices.tmpfs.contains(&m.device));
    }
}

#[cfg(test)]
#[path = "smaps_tests.rs"]
mod tests;
