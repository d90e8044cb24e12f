//! Programs in C that a bench compiles and runs: no library of Pagefold is linked into them.

use anyhow::{Context, ensure};
use cli::exit::Stop;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Compiles a program's source in a directory. Returns its path there.
///
/// # Errors
/// There is no compiler, or it does not take the source.
pub fn compiled(dir: &Path, name: &str, source: &str, flags: &[&str]) -> anyhow::Result<PathBuf> {
    let (file, program) = (dir.join(format!("{name}.c")), dir.join(name));
    fs::write(&file, source).with_context(|| format!("cannot write {}", file.display()))?;
    let made = Command::new("cc").args(["-O1", "-o"]).args([&program, &file]).args(flags).status();
    let made = made.map_err(|e| Stop::HostLacks(format!("cannot run cc: {e}; apt-get install gcc libc6-dev")))?;
    ensure!(made.success(), "cc does not compile {name}");
    Ok(program)
}
