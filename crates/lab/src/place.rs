//! Directories: a lab's, with its sockets and state, and the cache, in which images outlive labs.

use crate::error::{Error, Result};
use rustix::process::geteuid;
use std::env;
use std::fs::{self, DirBuilder};
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Longest path of a Unix socket in bytes, without the final zero byte.
const SOCKET_PATH_MAX: usize = 107;

/// The lab directory, unless one is named: `PAGEFOLD_LAB_DIR`, else `pagefold-lab` under `XDG_RUNTIME_DIR`, else under
/// `/run` for root, else `/tmp/pagefold-lab-UID`.
pub fn default_lab_dir() -> PathBuf {
    if let Some(dir) = variable("PAGEFOLD_LAB_DIR") {
        return dir;
    }
    match (variable("XDG_RUNTIME_DIR"), geteuid()) {
        (Some(runtime), _) => runtime.join("pagefold-lab"),
        (None, user) if user.is_root() => PathBuf::from("/run/pagefold-lab"),
        (None, user) => PathBuf::from(format!("/tmp/pagefold-lab-{}", user.as_raw())),
    }
}

/// The cache directory: `PAGEFOLD_CACHE`, else `pagefold` under `XDG_CACHE_HOME` or `~/.cache`.
///
/// # Errors
/// [`Error::Stop`] if none of these variables nor `HOME` is set.
pub fn cache_dir() -> Result<PathBuf> {
    cli::cache_dir().ok_or_else(|| Error::usage("no place for images: set PAGEFOLD_CACHE to a directory".into()))
}

fn variable(name: &str) -> Option<PathBuf> {
    env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

/// Creates a directory that only its owner can enter, or checks that an existing directory is one.
///
/// # Errors
/// The directory cannot be made; or it belongs to another user, is a link, or is open to others.
pub fn private_dir(path: &Path) -> Result<()> {
    let meta = loop {
        match DirBuilder::new().recursive(true).mode(0o700).create(path) {
            Err(e) if e.kind() != ErrorKind::AlreadyExists => return Err(Error::file("make", path, e)),
            _ => {}
        }
        match fs::symlink_metadata(path) {
            // `lab down` has removed the directory in between.
            Err(e) if e.kind() == ErrorKind::NotFound => {}
            meta => break meta.map_err(|e| Error::file("stat", path, e))?,
        }
    };
    if meta.is_dir() && meta.uid() == geteuid().as_raw() && meta.mode() & 0o077 == 0 {
        return Ok(());
    }
    Err(Error::usage(format!(
        "{} must be a directory of yours that nobody else can enter (mode 0700): name another with --dir",
        path.display()
    )))
}

/// Checks that the path is not too long for a socket.
///
/// # Errors
/// [`Error::Stop`] that asks for a shorter directory.
pub fn check_socket_path(path: &Path) -> Result<()> {
    let len = path.as_os_str().len();
    if len <= SOCKET_PATH_MAX {
        return Ok(());
    }
    Err(Error::usage(format!(
        "{} is {len} bytes long and a socket's path has room for {SOCKET_PATH_MAX}: name a shorter directory with --dir",
        path.display()
    )))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    #[test]
    fn a_private_directory_is_made_and_an_open_one_refused() {
        let base = tempfile::tempdir().expect("a temporary directory");
        let path = base.path().join("a/b");
        private_dir(&path).expect("make it");
        private_dir(&path).expect("it may be there already");
        assert_eq!(fs::metadata(&path).expect("stat it").mode() & 0o777, 0o700);
        symlink(&path, base.path().join("link")).expect("make a link");
        assert!(private_dir(&base.path().join("link")).is_err());
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("open it");
        assert!(private_dir(&path).is_err());
    }

    #[test]
    fn socket_paths_are_bounded() {
        assert!(check_socket_path(Path::new(&"x".repeat(107))).is_ok());
        assert!(check_socket_path(Path::new(&"x".repeat(108))).is_err());
    }
}
