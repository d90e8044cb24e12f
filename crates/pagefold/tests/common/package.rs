//! The Debian package, built by `./x package` of the programs under test.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tempfile::TempDir;

/// The source tree.
pub fn tree() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the source tree")
}

/// Runs a command, which must succeed.
pub fn done(command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    assert!(output.status.success(), "{command:?}: {output:?}");
    output
}

/// Its standard output.
pub fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Builds the packages `pagefold` and `pagefold-lab` of the programs under test in a directory; `None` where there is no `cargo deb`.
pub fn both(dir: &TempDir) -> Option<(PathBuf, PathBuf)> {
    let pagefold = built(dir)?;
    let lab = find(dir, "pagefold-lab_");
    Some((pagefold, lab))
}

fn find(dir: &TempDir, begin: &str) -> PathBuf {
    let made = fs::read_dir(dir.path().join("debian")).expect("packages").flatten().map(|made| made.path());
    let is_it = |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(begin));
    made.into_iter().find(is_it).unwrap_or_else(|| panic!("no package {begin}"))
}

/// Builds the packages likewise, and returns `pagefold`.
pub fn built(dir: &TempDir) -> Option<PathBuf> {
    if !Command::new("cargo").args(["deb", "--version"]).output().is_ok_and(|o| o.status.success()) {
        eprintln!("skipped: cargo-deb is not installed; ./x package does that");
        return None;
    }
    let programs = Path::new(env!("CARGO_BIN_EXE_pagefold"));
    let agent = "../x86_64-unknown-linux-musl/debug/pagefold-agent";
    let helper = "../x86_64-unknown-linux-musl/guest/pagefold-identity";
    if !programs.with_file_name(agent).exists() {
        eprintln!("skipped: nothing is built for x86_64-unknown-linux-musl: ./x build");
        return None;
    }
    fs::create_dir(dir.path().join("release")).expect("make a directory");
    for name in [
        "pagefold",
        "pagefold-lab",
        "storms",
        "pagefoldd",
        "pagefold-worker",
        "pagefold-prove",
        "pagefold-web",
        "pagefold-attach",
        "pagefold-history",
        "pagefold-place",
        agent,
        helper,
        "libpagefold.so",
    ] {
        let program = programs.parent().expect("a directory").join(name);
        let name = Path::new(name).file_name().expect("a name");
        assert!(program.exists(), "{} is not there: ./x build", program.display());
        symlink(program, dir.path().join("release").join(name)).expect("link a program");
    }
    done(Command::new(tree().join("x")).args(["package", "--built"]).env("CARGO_TARGET_DIR", dir.path()));
    Some(find(dir, "pagefold_"))
}

/// Makes a package with the same files, of a newer version.
pub fn next_version(package: &Path, next: &Path) {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let (root, control) = (dir.path().join("root"), dir.path().join("root/DEBIAN/control"));
    done(Command::new("dpkg-deb").arg("--raw-extract").arg(package).arg(&root));
    let text = fs::read_to_string(&control).expect("the control file");
    let line = |line: &str| format!("{line}{}\n", if line.starts_with("Version: ") { "+next" } else { "" });
    fs::write(&control, text.lines().map(line).collect::<String>()).expect("write the control file");
    done(Command::new("dpkg-deb").args(["--root-owner-group", "-Zgzip", "-z1", "--build"]).arg(&root).arg(next));
}
