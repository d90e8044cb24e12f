//! Files that another process names, by its own view of the file systems.
//!
//! The process may be hostile. So the way to the file is walked step by step, and no step is taken on a file system
//! that asks a server. The kernel tells of each step which mount it is on, and of each mount its kind. Symbolic links
//! are not followed: an absolute one would lead to the caller's own files.

use crate::memory_files::proc_file;
use crate::plain_file::read_found;
use crate::{Error, Result, text};
use rustix::fd::{AsRawFd, OwnedFd};
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, openat, openat2};
use std::io;
use std::path::{Component, Path};

/// Types of file systems on which an access never waits for a server or another process.
const LOCAL: [&str; 12] =
    ["bcachefs", "btrfs", "devtmpfs", "erofs", "ext2", "ext3", "ext4", "f2fs", "rootfs", "squashfs", "tmpfs", "xfs"];

/// The content of a plain file of at most `most` bytes that process `pid` names by `path`, from its root or its working
/// directory.
///
/// # Errors
/// It cannot be read, is longer, or is no plain file. It is not read either if it is on a file system that asks a
/// server, or if its path has a symbolic link.
pub fn read_file_of(pid: u32, path: &Path, most: u64) -> Result<Vec<u8>> {
    find(pid, path).and_then(|found| read_found(found, most)).map_err(|e| Error::file("read", path, e))
}

/// Finds the file that the process names, as an `O_PATH` descriptor.
fn find(pid: u32, path: &Path) -> io::Result<OwnedFd> {
    let mounts = text::read(proc_file(pid, "mountinfo")).map_err(io::Error::other)?;
    let from = proc_file(pid, if path.is_absolute() { "root" } else { "cwd" });
    let mut found = openat(CWD, from, OFlags::PATH | OFlags::CLOEXEC | OFlags::DIRECTORY, Mode::empty())?;
    for step in path.components() {
        let name = match step {
            Component::RootDir | Component::CurDir => continue,
            Component::Normal(name) => name,
            Component::ParentDir | Component::Prefix(_) => return Err(io::Error::other("a path with `..`")),
        };
        if !is_local(&found, &mounts)? {
            return Err(io::Error::other("on a file system that asks a server"));
        }
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let resolve = ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS | ResolveFlags::BENEATH;
        found = openat2(&found, name, flags, Mode::empty(), resolve)?;
    }
    if is_local(&found, &mounts)? { Ok(found) } else { Err(io::Error::other("on a file system that asks a server")) }
}

/// Whether a file is on one of the mounts listed that are of a local file system.
fn is_local(file: &OwnedFd, mounts: &str) -> io::Result<bool> {
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", file.as_raw_fd()))?;
    let Some(number) = info.lines().find_map(|line| line.strip_prefix("mnt_id:")) else { return Ok(false) };
    let mount = mounts.lines().find(|line| line.split(' ').next() == Some(number.trim()));
    let kind = mount.and_then(|line| line.split_once(" - ")?.1.split(' ').next());
    Ok(kind.is_some_and(|kind| LOCAL.contains(&kind)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    #[test]
    fn only_plain_files_on_local_file_systems_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let own = std::process::id();
        let read = |name: &str| read_file_of(own, &dir.path().join(name), 5).map_err(|e| e.to_string());
        fs::create_dir(dir.path().join("below")).unwrap();
        fs::write(dir.path().join("below/file"), "12345").unwrap();
        fs::write(dir.path().join("long"), "123456").unwrap();
        symlink(dir.path().join("below"), dir.path().join("link")).unwrap();
        assert_eq!(read("below/file").unwrap(), b"12345");
        assert_eq!(read("./below//file").unwrap(), b"12345");
        for (name, why) in [
            ("none", "No such file"),
            ("below", "not a plain file"),
            ("long", "more than 5 bytes"),
            ("link/file", "symbolic links"),
            ("below/../long", "`..`"),
        ] {
            let error = read(name).unwrap_err();
            assert!(error.contains(why), "{name}: {error}");
        }
        let error = read_file_of(own, Path::new("/proc/self/status"), 5).unwrap_err().to_string();
        assert!(error.contains("asks a server"), "{error}");
        assert!(read_file_of(own, Path::new("Cargo.toml"), 1 << 20).is_ok(), "from the working directory");
    }

    #[test]
    fn pipe_is_not_opened() {
        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join("pipe");
        rustix::fs::mknodat(CWD, &pipe, rustix::fs::FileType::Fifo, Mode::RUSR, 0).unwrap();
        let error = read_file_of(std::process::id(), &pipe, 5).unwrap_err().to_string();
        assert!(error.contains("not a plain file"), "{error}");
    }
}
