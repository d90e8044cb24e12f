//! Swap space that a bench makes for itself, in a file.

use crate::guardian::Guardian;
use anyhow::{Context, bail};
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A file that the host swaps to. Dropping it ends that. If the bench is cut off, the guardian does.
pub struct Swap(PathBuf);

impl Swap {
    /// Makes a file of so many MiB in a directory, which must not be in memory itself, and has the host swap to it.
    ///
    /// # Errors
    /// The file cannot be written, or the kernel refuses to swap to it.
    pub fn on(dir: &Path, mib: usize, guardian: &mut Guardian) -> anyhow::Result<Self> {
        let path = dir.join("swap");
        let cannot = || format!("cannot write {}", path.display());
        guardian.keep_swap(&path)?;
        let file = File::options().create(true).truncate(true).write(true).mode(0o600).open(&path);
        let mut file = file.with_context(cannot)?;
        let zeros = vec![0; 1 << 20];
        (0..mib).try_for_each(|_| file.write_all(&zeros)).and_then(|()| file.sync_all()).with_context(cannot)?;
        let swap = Self(path);
        let path = swap.0.to_str().context("a path that is not UTF-8")?;
        run("mkswap", &[path])?;
        run("swapon", &[path]).context("swap needs a file on a disk: set TMPDIR to a directory that is no tmpfs")?;
        Ok(swap)
    }
}

impl Drop for Swap {
    fn drop(&mut self) {
        // Where this fails, the guardian tries again and reports the error.
        let _ = end(&self.0);
    }
}

/// Ends swapping to a file, and removes it.
///
/// # Errors
/// There is too little memory for what is swapped out, or the file cannot be removed.
pub(crate) fn end(path: &Path) -> anyhow::Result<()> {
    if is_on(path)? {
        run("swapoff", &[path.to_str().context("a path that is not UTF-8")?])?;
    }
    match fs::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            Err(e).with_context(|| format!("cannot remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

/// Whether the host swaps to this file or device.
///
/// # Errors
/// The kernel does not tell.
pub(crate) fn is_on(path: &Path) -> anyhow::Result<bool> {
    let swaps = fs::read_to_string("/proc/swaps").context("cannot read /proc/swaps")?;
    let escaped = path.to_string_lossy().replace(' ', "\\040");
    Ok(swaps.lines().any(|line| line.split_whitespace().next() == Some(&escaped)))
}

/// Runs a program, and waits for its end.
///
/// # Errors
/// The program fails; the error has its output.
pub(crate) fn run(program: &str, words: &[&str]) -> anyhow::Result<()> {
    let output = Command::new(program).args(words).output().with_context(|| format!("cannot run {program}"))?;
    if !output.status.success() {
        bail!("{program} {}: {}", words.join(" "), String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}
