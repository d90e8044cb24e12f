//! The directories of templates, which outlive a restart of the host, and of clones, which do not; and helpers for
//! private directories, locks and files.

use anyhow::Context;
use cli::exit::Stop;
use rustix::fs::{FlockOperation, flock};
use rustix::process::geteuid;
use std::env;
use std::fs::{self, DirBuilder, File};
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

/// The directory of templates: `PAGEFOLD_TEMPLATES`, else `/var/lib/pagefold/templates` for root, else
/// `pagefold/templates` under `XDG_DATA_HOME` or `~/.local/share`.
pub fn templates_dir() -> PathBuf {
    let of_user = || Some(variable("XDG_DATA_HOME").unwrap_or(variable("HOME")?.join(".local/share")));
    variable("PAGEFOLD_TEMPLATES").unwrap_or_else(|| match of_user() {
        Some(data) if !geteuid().is_root() => data.join("pagefold/templates"),
        _ => PathBuf::from("/var/lib/pagefold/templates"),
    })
}

/// The directory of clones: `PAGEFOLD_CLONES`, else `/run/pagefold-clones` for root, else `pagefold-clones` under
/// `XDG_RUNTIME_DIR`, else `/tmp/pagefold-clones-UID`.
pub fn clones_dir() -> PathBuf {
    variable("PAGEFOLD_CLONES").unwrap_or_else(|| match variable("XDG_RUNTIME_DIR") {
        _ if geteuid().is_root() => PathBuf::from("/run/pagefold-clones"),
        Some(runtime) => runtime.join("pagefold-clones"),
        None => PathBuf::from(format!("/tmp/pagefold-clones-{}", geteuid().as_raw())),
    })
}

fn variable(name: &str) -> Option<PathBuf> {
    env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

/// Creates a directory that only its owner can enter, or checks that only its owner can enter an existing one.
pub(crate) fn private_dir(path: &Path) -> anyhow::Result<()> {
    match DirBuilder::new().recursive(true).mode(0o700).create(path) {
        Err(e) if e.kind() != ErrorKind::AlreadyExists => {
            return Err(e).with_context(|| format!("cannot make {}", path.display()));
        }
        _ => {}
    }
    let meta = fs::symlink_metadata(path).with_context(|| format!("cannot look at {}", path.display()))?;
    if meta.is_dir() && meta.uid() == geteuid().as_raw() && meta.mode() & 0o077 == 0 {
        return Ok(());
    }
    let text = format!("{} must be a directory of yours that nobody else can enter (mode 0700)", path.display());
    Err(Stop::Usage(text).into())
}

/// The lock of a directory, if nobody has it.
pub(crate) fn try_lock(dir: &Path) -> Option<File> {
    let file = File::options().create(true).append(true).open(dir.join("lock")).ok()?;
    flock(&file, FlockOperation::NonBlockingLockExclusive).ok().map(|()| file)
}

/// Waits for the lock of a directory; dropping the file releases it. A child that this process starts meanwhile holds
/// the lock, too, until it executes its own program. So the next holder of the lock sees each such process with its own
/// command line.
pub(crate) fn lock(dir: &Path) -> anyhow::Result<File> {
    let path = dir.join("lock");
    let open = || {
        let file = File::options().create(true).append(true).open(&path)?;
        flock(&file, FlockOperation::LockExclusive)?;
        Ok::<_, std::io::Error>(file)
    };
    open().with_context(|| format!("cannot lock {}", path.display()))
}

/// Replaces a file atomically.
pub(crate) fn replace(path: &Path, content: &[u8]) -> anyhow::Result<()> {
    let new = path.with_extension("new");
    let put = || {
        fs::write(&new, content)?;
        fs::rename(&new, path)
    };
    put().with_context(|| format!("cannot write {}", path.display()))
}

/// Removes a directory with all that is in it, if it is there.
pub(crate) fn remove_dir(path: &Path) -> anyhow::Result<()> {
    match fs::remove_dir_all(path) {
        Err(e) if e.kind() != ErrorKind::NotFound => {
            Err(e).with_context(|| format!("cannot remove {}", path.display()))
        }
        _ => Ok(()),
    }
}
