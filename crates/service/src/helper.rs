//! The programs that belong to this one and that it starts (helpers): where they are, and whether they are of the same
//! build.
//!
//! Each helper prints its version, its commit and its kind of build (`--version`). A helper of another build is not
//! started, because messages between the two could have another meaning.

use rustix::fs::{Mode, OFlags, open};
use rustix::process::WaitStatus;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// How a process has ended, in words for the log.
pub fn end_in_words(status: WaitStatus) -> String {
    match (status.exit_status(), status.terminating_signal()) {
        (Some(0), _) => "it has ended by itself".into(),
        (Some(code), _) => format!("it has ended with exit code {code}"),
        (None, Some(signal)) => format!("signal {signal} has ended it"),
        (None, None) => "it has ended".into(),
    }
}

/// The path of a helper that belongs to this program.
///
/// # Errors
/// The helper is not there (`NotFound`), or is of another build.
pub fn program(name: &str) -> io::Result<PathBuf> {
    let path = find(name)?;
    check(name, &path, &path)?;
    Ok(path)
}

/// Checks that `program`, which lies at `path`, belongs to this program.
fn check(name: &str, program: &Path, path: &Path) -> io::Result<()> {
    let told = version_of(program)?;
    let (told, own) = (cli::printable(told.trim()), cli::version());
    if told == format!("{name} {own}") {
        return Ok(());
    }
    let path = path.display();
    let why = format!(
        "{path} says that it is {told:?}, and does not belong to this Pagefold, {own}: install both from one package"
    );
    Err(io::Error::other(why))
}

/// The open file of a helper of the same build as this program. It can still be executed after an upgrade has put
/// another file at its path.
#[derive(Debug)]
pub struct Held(OwnedFd);

impl Held {
    /// Finds a helper that belongs to this program, and keeps its file open.
    ///
    /// # Errors
    /// The helper is not there (`NotFound`), or is of another build.
    pub fn find(name: &str) -> io::Result<Self> {
        let path = find(name)?;
        let held = Self(open(&path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?);
        check(name, &held.path(), &path)?;
        Ok(held)
    }

    /// A command that executes the helper. Only this process can start it, because its path is one of this process's
    /// file descriptors.
    pub fn command(&self) -> Command {
        Command::new(self.path())
    }

    fn path(&self) -> PathBuf {
        format!("/proc/self/fd/{}", self.0.as_raw_fd()).into()
    }
}

fn version_of(path: &Path) -> io::Result<String> {
    let mut command = Command::new(path);
    let output = command.arg("--version").env_clear().stdin(Stdio::null()).stderr(Stdio::null()).output()?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The path of a helper, or of another file that is installed with this program. The file lies beside this program (as
/// built), or in `../lib/pagefold` relative to it, or in `../../bin` from there (as packaged).
///
/// # Errors
/// The file is in none of these places (`NotFound`), or the path of this program is not known.
pub fn find(name: &str) -> io::Result<PathBuf> {
    let own = std::env::current_exe()?;
    let above = |n: usize, dir: &str| own.ancestors().nth(n).map(|above| above.join(dir).join(name));
    let beside = own.with_file_name(name);
    let is_in_library = own.parent().is_some_and(|dir| dir.ends_with("lib/pagefold"));
    let above_library = above(3, "bin").filter(|_| is_in_library);
    let places = [Some(beside.clone()), above(2, "lib/pagefold"), above_library];
    places.into_iter().flatten().find(|path| path.exists()).ok_or_else(|| {
        let (beside, kind) = (beside.display(), io::ErrorKind::NotFound);
        let also = "nor a file of that name in ../lib/pagefold or ../../bin";
        io::Error::new(kind, format!("neither {beside} is there, {also}"))
    })
}
