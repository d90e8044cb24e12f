//! Examines a file by asking only the kernel (`statx` with `AT_STATX_DONT_SYNC`), and not the file's file system. 9p
//! asks its server all the same.

use super::judge::Facts;
use super::mounts;
use crate::raw;
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, open, openat2};
use rustix::io::Errno;
use std::ffi::{CStr, CString};
use std::os::fd::{AsRawFd, OwnedFd};

/// `STATX_MNT_ID_UNIQUE`, from Linux 6.8 on: asks for the number of the mount, and for nothing that the file system
/// would have to tell.
const UNIQUE_MOUNT: u32 = 1 << 14;
/// Most attempts to find a path while files are renamed.
const ATTEMPTS: usize = 100;

/// What the kernel knows of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Look {
    mode: u32,
    /// Major and minor number of the device, for device files.
    pub device: (u32, u32),
    /// Number of the file's mount; 0 if the kernel does not tell.
    pub mount: u64,
}

impl Look {
    /// Whether the file can be judged only if its file system is known.
    pub const fn needs_filesystem(self) -> bool {
        self.mode & libc::S_IFMT == libc::S_IFREG
    }

    /// Facts about the file if it is on this filesystem and was opened with these flags.
    pub const fn facts(self, filesystem: Option<u32>, flags: i32) -> Facts {
        Facts { mode: self.mode, device: self.device, filesystem, flags }
    }
}

/// Examines the file that a path leads to. If the path is empty, `dir` is the file itself. The error is the kernel's
/// error number. Allocates nothing, because hooks call it, too.
pub fn look(dir: i32, path: &CStr) -> Result<Look, Option<i32>> {
    let flags = libc::AT_EMPTY_PATH | libc::AT_STATX_DONT_SYNC;
    let mut found = std::mem::MaybeUninit::<libc::statx>::zeroed();
    let place = found.as_mut_ptr() as usize;
    let arguments = [dir as usize, path.as_ptr() as usize, flags as usize, UNIQUE_MOUNT as usize, place, 0];
    // SAFETY: the path ends with 0, and the kernel fills the structure.
    let answer = unsafe { raw::call(libc::SYS_statx, arguments) };
    if answer != 0 {
        return Err(raw::error(answer));
    }
    // SAFETY: filled, and all-zero before.
    let found = unsafe { found.assume_init() };
    // For a file that this user may not examine, FUSE tells nothing. It counts as a plain file.
    let mode = if found.stx_mask & libc::STATX_TYPE == 0 { libc::S_IFREG } else { found.stx_mode.into() };
    let mount = if found.stx_mask & UNIQUE_MOUNT == 0 { 0 } else { found.stx_mnt_id };
    Ok(Look { mode, device: (found.stx_rdev_major, found.stx_rdev_minor), mount })
}

/// Opens (`O_PATH`) and examines the file that a path leads to. The descriptor stays with this file even if the path
/// later leads to another one. Closing it asks no file system.
pub fn keep(path: &CStr) -> Result<(OwnedFd, Look), Errno> {
    let file = open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    let look = look(file.as_raw_fd(), c"").map_err(|error| Errno::from_raw_os_error(error.unwrap_or(libc::EIO)))?;
    Ok((file, look))
}

/// Facts about a file that was just opened, and the number of its mount. `None` if it has been closed meanwhile. A file
/// about which the kernel tells nothing counts as a plain file on an unknown mount. For hooks: allocates nothing.
pub fn opened(file: i32) -> Option<(Facts, u64)> {
    let look = match look(file, c"") {
        Ok(look) => look,
        Err(Some(libc::EBADF)) => return None,
        Err(_) => Look { mode: libc::S_IFREG, device: (0, 0), mount: 0 },
    };
    // SAFETY: reads the flags of a descriptor.
    let flags = unsafe { raw::call(libc::SYS_fcntl, [file as usize, libc::F_GETFL as usize, 0, 0, 0, 0]) };
    let filesystem = look.needs_filesystem().then(|| mounts::known(look.mount)).flatten();
    raw::error(flags).is_none().then(|| (look.facts(filesystem, flags as i32), look.mount))
}

/// Facts about the file of this name, as if it were open for direct reads; `None` if it is not found. The path is
/// looked up in the kernel's cache alone (`RESOLVE_CACHED`), which has the names of open files, so no file system is
/// asked.
pub fn named(path: &str) -> Option<Facts> {
    let name = CString::new(path).ok()?;
    let (flags, resolve) = (OFlags::PATH | OFlags::CLOEXEC, ResolveFlags::CACHED);
    let open = || openat2(CWD, &name, flags, Mode::empty(), resolve);
    let file = (0..ATTEMPTS).map(|_| open()).find(|file| !matches!(file, Err(Errno::AGAIN)))?.ok()?;
    let look = look(file.as_raw_fd(), c"").ok()?;
    let path = CString::new(format!("/proc/thread-self/fd/{}", file.as_raw_fd())).ok()?;
    let filesystem = look.needs_filesystem().then(|| mounts::filesystem(look, &path)).flatten();
    Some(look.facts(filesystem, libc::O_RDWR | libc::O_DIRECT))
}
