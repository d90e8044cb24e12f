//! A file that a command writes. Until the new content is complete, its path leads to the file that was there before.
//!
//! ```text
//!  create --> a file without a name, in the directory of the path --> commit: written to disk, named, moved to the path
//!                            |
//!                            +-- error, signal, kill: the kernel drops it, and the path is as it was
//! ```
//!
//! Where a file system knows no files without a name (`O_TMPFILE`), the new file has one from the start: `.NAME.PID.part`.
//! An error removes it, a signal does not. A pipe, a terminal or `/dev/null` is written in place.

use anyhow::Context;
use rustix::fs::{AtFlags, CWD, OFlags, linkat};
use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// A file that is being written.
#[derive(Debug)]
pub struct OutputFile {
    /// The path as the user wrote it.
    named: PathBuf,
    file: File,
    end: End,
}

/// What is left to be done so that the file is at its path.
#[derive(Debug)]
enum End {
    /// Nothing: a pipe, a terminal or a device is written in place.
    InPlace,
    /// The file has to be moved to `to`. Its name until then is `part`, which it may not have yet (`has_name`).
    Move { part: PathBuf, to: PathBuf, has_name: bool },
}

impl OutputFile {
    /// Begins to write a file at `path`. A file that is there already must be writable, and is unchanged until
    /// [`Self::commit`].
    ///
    /// # Errors
    /// No file can be made there.
    pub fn create(path: &Path) -> anyhow::Result<Self> {
        Self::begin(path, OFlags::TMPFILE).with_context(|| format!("cannot create {}", path.display()))
    }

    fn begin(path: &Path, tmpfile: OFlags) -> io::Result<Self> {
        // A symbolic link is followed, so that it stays one.
        let to = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        let before = match File::options().write(true).open(&to) {
            Ok(file) if !file.metadata()?.is_file() => {
                return Ok(Self { named: path.to_owned(), file, end: End::InPlace });
            }
            Ok(file) => Some(file.metadata()?.permissions()),
            Err(e) if e.kind() == io::ErrorKind::NotFound => None,
            Err(e) => return Err(e),
        };
        let name = to.file_name().ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?.to_string_lossy();
        let dir = to.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let part = dir.join(format!(".{name}.{}.part", std::process::id()));
        let nameless = File::options().write(true).custom_flags(tmpfile.bits().cast_signed()).mode(0o666).open(dir);
        let (file, has_name) = match nameless {
            Ok(file) => (file, false),
            // A file system that does not know `O_TMPFILE` answers `EOPNOTSUPP`. A kernel that does not know it answers
            // `EISDIR`, because it takes this for writing to a directory.
            Err(e)
                if matches!(e.raw_os_error().map(rustix::io::Errno::from_raw_os_error), Some(NOT_KNOWN | IS_DIR)) =>
            {
                (File::options().write(true).create_new(true).open(&part)?, true)
            }
            Err(e) => return Err(e),
        };
        let output = Self { named: path.to_owned(), file, end: End::Move { part, to, has_name } };
        if let Some(permissions) = before {
            output.file.set_permissions(permissions)?;
        }
        Ok(output)
    }

    /// A handle to write to.
    ///
    /// # Errors
    /// No file descriptors are left.
    pub fn handle(&self) -> io::Result<File> {
        self.file.try_clone()
    }

    /// The path, for messages.
    pub fn path(&self) -> &Path {
        &self.named
    }

    /// Puts the file at its path, now that its content is complete.
    ///
    /// # Errors
    /// It cannot be written to disk, or not be moved there. The path is as it was before.
    pub fn commit(mut self) -> anyhow::Result<()> {
        self.finish().with_context(|| format!("cannot write {}", self.named.display()))
    }

    fn finish(&mut self) -> io::Result<()> {
        let End::Move { part, to, has_name } = &mut self.end else { return Ok(()) };
        // Otherwise the new name could reach the disk before the content, and a power failure leave an empty file.
        self.file.sync_all()?;
        if !*has_name {
            let own = format!("/proc/self/fd/{}", self.file.as_raw_fd());
            linkat(CWD, own, CWD, &*part, AtFlags::SYMLINK_FOLLOW)?;
            *has_name = true;
        }
        fs::rename(&*part, &*to)?;
        *has_name = false;
        Ok(())
    }
}

const NOT_KNOWN: rustix::io::Errno = rustix::io::Errno::OPNOTSUPP;
const IS_DIR: rustix::io::Errno = rustix::io::Errno::ISDIR;

impl Drop for OutputFile {
    fn drop(&mut self) {
        if let End::Move { part, has_name: true, .. } = &self.end {
            let _ = fs::remove_file(part);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::fs::{PermissionsExt, symlink};

    fn names(dir: &Path) -> Vec<String> {
        let name = |entry: io::Result<fs::DirEntry>| entry.unwrap().file_name().into_string().unwrap();
        let mut names: Vec<_> = fs::read_dir(dir).unwrap().map(name).collect();
        names.sort();
        names
    }

    /// The two ways to begin a file: without a name, and as on a file system without `O_TMPFILE` (`O_DIRECTORY` makes
    /// the kernel answer `EISDIR`).
    const WAYS: [OFlags; 2] = [OFlags::TMPFILE, OFlags::DIRECTORY];

    #[test]
    fn path_keeps_old_content_until_new_content_is_complete() {
        for way in WAYS {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("report");
            fs::write(&path, "old").unwrap();
            fs::set_permissions(&path, PermissionsExt::from_mode(0o640)).unwrap();
            let output = OutputFile::begin(&path, way).unwrap();
            output.handle().unwrap().write_all(b"half").unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), "old");
            drop(output);
            assert_eq!(
                (fs::read_to_string(&path).unwrap().as_str(), names(dir.path())),
                ("old", vec!["report".into()])
            );
            let output = OutputFile::begin(&path, way).unwrap();
            output.handle().unwrap().write_all(b"new").unwrap();
            output.commit().unwrap();
            assert_eq!(
                (fs::read_to_string(&path).unwrap().as_str(), names(dir.path())),
                ("new", vec!["report".into()])
            );
            assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o640);
        }
    }

    #[test]
    fn new_file_has_usual_rights_and_its_way_is_checked() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("report");
        OutputFile::create(&path).unwrap().commit().unwrap();
        fs::write(dir.path().join("usual"), "").unwrap();
        let mode = |name| fs::metadata(dir.path().join(name)).unwrap().permissions().mode();
        assert_eq!(mode("report"), mode("usual"));
        let nowhere = OutputFile::create(Path::new("/nowhere/report")).unwrap_err();
        assert!(format!("{nowhere:#}").starts_with("cannot create /nowhere/report: No such file"), "{nowhere:#}");
        assert!(OutputFile::create(dir.path()).is_err() && OutputFile::create(Path::new("")).is_err());
    }

    #[test]
    fn links_stay_and_devices_are_written_in_place() {
        let dir = tempfile::tempdir().unwrap();
        let (target, link) = (dir.path().join("target"), dir.path().join("link"));
        fs::write(&target, "old").unwrap();
        symlink(&target, &link).unwrap();
        let output = OutputFile::create(&link).unwrap();
        output.handle().unwrap().write_all(b"new").unwrap();
        output.commit().unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read_to_string(&target).unwrap(), "new");
        let null = OutputFile::create(Path::new("/dev/null")).unwrap();
        null.handle().unwrap().write_all(b"x").unwrap();
        null.commit().unwrap();
        assert!(!fs::metadata("/dev/null").unwrap().is_file());
    }
}
