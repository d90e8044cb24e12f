//! Running the host's programs: finding them, naming the package of a missing one, keeping their output.

use crate::agent::Output;
use crate::error::{Error, Result, tail_of};
use crate::family::Family;
use host::ProcessId;
use rustix::process::geteuid;
use std::env;
use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Programs, each with the Debian package that contains it.
const PACKAGES: &[(&str, &str)] = &[
    ("apt-cache", "apt"),
    ("apt-get", "apt"),
    ("busybox", "busybox-static"),
    ("depmod", "kmod"),
    ("dpkg-deb", "dpkg"),
    ("gzip", "gzip"),
    ("lxc-attach", "lxc"),
    ("lxc-start", "lxc"),
    ("lxc-stop", "lxc"),
    ("mke2fs", "e2fsprogs"),
    ("mmdebstrap", "mmdebstrap"),
    ("qemu-img", "qemu-utils"),
    ("qemu-system-x86_64", "qemu-system-x86"),
    ("xz", "xz-utils"),
    ("zstd", "zstd"),
];

/// Path of a program. It is also looked for in root's directories, which an ordinary user's `PATH` leaves out.
pub(crate) fn find(name: &str) -> Result<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let usual = ["/usr/sbin", "/usr/bin", "/sbin", "/bin"].map(PathBuf::from);
    let found = env::split_paths(&path).chain(usual).map(|dir| dir.join(name)).find(|file| file.is_file());
    found.ok_or_else(|| {
        let package = PACKAGES.iter().find(|(program, _)| *program == name).map_or(name, |(_, package)| package);
        Error::host_lacks(format!("no program {name} here: apt-get install --no-install-recommends {package}"))
    })
}

/// Path of a file that belongs to Pagefold: in `../lib/pagefold` from this program, as packages install it, or where a
/// build in the source tree puts programs that run inside guests. `None` if it is in neither.
pub(crate) fn beside(name: &str) -> Option<PathBuf> {
    let own = env::current_exe().ok()?;
    let dir = own.parent()?;
    // Test programs lie one directory deeper than the built programs.
    let built = |up: &str| dir.join(up).join("x86_64-unknown-linux-musl/guest").join(name);
    let places = [dir.join("../lib/pagefold").join(name), built(".."), built("../..")];
    places.into_iter().find(|path| path.is_file())
}

/// A command of an installed program, with an empty standard input.
pub(crate) fn command(name: &str) -> Result<Command> {
    let mut command = Command::new(find(name)?);
    command.stdin(Stdio::null());
    Ok(command)
}

/// Runs a command to its end and returns its standard output.
pub(crate) fn output(command: &mut Command) -> Result<Vec<u8>> {
    let output = command.output().map_err(|e| Error::file("run", command.get_program(), e))?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    Err(failed(command, &output.status.to_string(), String::from_utf8_lossy(&output.stderr).trim().to_owned()))
}

/// Runs a command to its end, with all its output in a file.
pub(crate) fn run(command: &mut Command, log: &Path) -> Result<()> {
    let file = File::create(log).map_err(|e| Error::file("create", log, e))?;
    let both = file.try_clone().map_err(|e| Error::file("duplicate", log, e))?;
    let status = command.stdout(file).stderr(both).status();
    let status = status.map_err(|e| Error::file("run", command.get_program(), e))?;
    if status.success() { Ok(()) } else { Err(failed(command, &status.to_string(), tail_of(log))) }
}

/// Runs a command to its end, or kills it and its descendants after the time-out. Keeps the first MiB of its output;
/// its writes beyond that fail.
pub(crate) fn bounded_output(command: &mut Command, timeout: Duration) -> Result<Output> {
    let failed = |e: io::Error| Error::file("run", "a command", e);
    let deadline = Instant::now() + timeout;
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().map_err(failed)?;
    let stdout = child.stdout.take().map(|pipe| Stream::new(pipe.into())).transpose().map_err(failed)?;
    let stderr = child.stderr.take().map(|pipe| Stream::new(pipe.into())).transpose().map_err(failed)?;
    let mut streams = [stdout, stderr];
    let status = loop {
        // The order matters: only if the end is checked before the output is read is nothing missed that was written
        // before the end.
        let ended = child.try_wait().map_err(failed)?;
        for stream in streams.iter_mut().flatten() {
            stream.drain();
        }
        if let Some(status) = ended {
            break status;
        }
        if Instant::now() > deadline {
            for process in ProcessId::of(child.id()).map_or_else(|_| Vec::new(), |id| Family::now().tree(&id)) {
                process.kill();
            }
            child.wait().map_err(failed)?;
            let text = format!("the command took more than {} s", timeout.as_secs());
            return Err(failed(io::Error::new(ErrorKind::TimedOut, text)));
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    let [stdout, stderr] = streams.map(|stream| stream.map_or_else(Vec::new, |stream| stream.kept));
    let status = status.code().or_else(|| status.signal().map(|signal| 128 + signal)).unwrap_or(255);
    Ok(Output { status: u8::try_from(status).unwrap_or(255), stdout, stderr })
}

/// The reading end of a pipe, and the bytes that were read from it.
struct Stream {
    pipe: Option<File>,
    kept: Vec<u8>,
}

impl Stream {
    /// Most bytes that are kept.
    const MAX: usize = 1 << 20;

    fn new(pipe: OwnedFd) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&pipe, true)?;
        Ok(Self { pipe: Some(File::from(pipe)), kept: Vec::new() })
    }

    /// Reads the bytes that are there, without waiting for more.
    fn drain(&mut self) {
        let mut chunk = [0; 64 << 10];
        while let Some(Ok(count @ 1..)) = self.pipe.as_mut().map(|pipe| pipe.read(&mut chunk)) {
            self.kept.extend(&chunk[..count]);
            if self.kept.len() > Self::MAX {
                self.kept.truncate(Self::MAX);
                self.pipe = None;
            }
        }
    }
}

fn failed(command: &Command, status: &str, output: String) -> Error {
    Error::Program { program: command.get_program().to_string_lossy().into_owned(), status: status.into(), output }
}

/// Refuses to go on unless the user is root.
pub(crate) fn need_root(what_for: &str) -> Result<()> {
    if geteuid().is_root() {
        return Ok(());
    }
    Err(Error::host_lacks(format!(
        "{what_for} needs root: run this with sudo, or take --image process, which needs no rights"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_program_is_named_with_its_package() {
        let error = find("pagefold-no-such-program").expect_err("there is none");
        assert!(
            matches!(&error, Error::Stop(cli::exit::Stop::HostLacks(text)) if text.contains("apt-get install")),
            "{error}"
        );
        assert!(find("sh").is_ok());
    }

    fn shell(script: &str, seconds: u64) -> Result<Output> {
        bounded_output(command("sh").expect("a shell").args(["-c", script]), Duration::from_secs(seconds))
    }

    #[test]
    fn output_is_kept_apart_and_bounded() {
        let output = shell("echo out; echo err >&2; exit 7", 10).expect("it ends");
        assert_eq!(output, Output { status: 7, stdout: b"out\n".into(), stderr: b"err\n".into() });
        let output = shell("yes", 60).expect("ended by its writes failing");
        assert_eq!((output.stdout.len(), output.status), (Stream::MAX, 128 + 13));
    }

    #[test]
    fn a_command_may_leave_others_behind_but_not_take_for_ever() {
        let begin = Instant::now();
        assert_eq!(shell("sleep 5 & echo started", 10).expect("it ends").stdout, b"started\n");
        assert!(shell("sleep 64321 & sleep 64321", 1).is_err());
        assert!(begin.elapsed() < Duration::from_secs(4));
        assert_eq!(shell("pgrep -f 'sleep 6432[1]' || echo none", 10).expect("it ends").stdout, b"none\n");
    }

    #[test]
    fn a_failing_program_is_quoted() {
        let error = output(command("sh").expect("a shell").args(["-c", "echo because >&2; exit 3"]));
        let text = error.expect_err("it fails").to_string();
        assert!(text.contains("because") && text.contains('3'), "{text}");
    }
}
