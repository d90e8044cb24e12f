//! One turn of a workload: its programs run as members of a service that this turn has for itself, or plainly.

use crate::guardian::Guardian;
use crate::serving::Serving;
use anyhow::{Context, bail, ensure};
use cli::exit::Stop;
use host::ProcessId;
use std::cell::{Cell, RefCell};
use std::ffi::OsString;
use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Name of the members' group.
pub const GROUP: &str = "bench";
/// Users besides root that programs run as. Debian's packages make them for their servers.
const USERS: [&str; 2] = ["postgres", "mysql"];
/// Time limit for members to be folded, and for a server to answer or to end.
const PATIENCE: Duration = Duration::from_secs(60);
/// Interval between two checks while something is waited for.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// Time without further folds after which folding counts as settled.
const NO_MORE: Duration = Duration::from_secs(2);

/// What a turn is given.
#[derive(Clone, Copy)]
pub struct Place<'a> {
    /// The workload's directory.
    pub dir: &'a Path,
    /// Whether programs are members.
    pub is_member: bool,
    /// Whether members fold all pages that were not written for a while (`PAGEFOLD_EAGER`).
    pub is_eager: bool,
    /// Whether only a small part of the work is wanted.
    pub is_short: bool,
    /// Pages that must be folded before the work begins.
    pub floor: u64,
    /// Lines of the group's configuration.
    pub settings: &'a str,
}

/// One turn: with members, or without.
pub struct Side<'a> {
    place: Place<'a>,
    /// Empty directory for the files of this turn.
    dir: PathBuf,
    serving: Option<Serving>,
    guardian: RefCell<&'a mut Guardian>,
    folded_pages: Cell<u64>,
}

impl<'a> Side<'a> {
    /// Makes the directory of a turn, and starts the service if programs are to be members.
    ///
    /// # Errors
    /// The service does not start.
    pub fn new(place: Place<'a>, guardian: &'a mut Guardian) -> anyhow::Result<Self> {
        let dir = place.dir.join("turn");
        fs::create_dir(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
        // Servers that run as other users keep their data in it.
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o777)).context("cannot open the turn's directory")?;
        let config = format!("[[group]]\nname = \"{GROUP}\"\nusers = {:?}\n{}\n", users(), place.settings);
        let serving = place.is_member.then(|| Serving::start(place.dir, &config, guardian)).transpose()?;
        Ok(Self { place, dir, serving, guardian: RefCell::new(guardian), folded_pages: Cell::new(0) })
    }

    /// Ends the turn, after its programs have ended. Returns the number of pages that were folded when the work began.
    ///
    /// # Errors
    /// The service cannot be ended, or a directory not removed.
    pub fn finish(mut self) -> anyhow::Result<u64> {
        if let Some(serving) = &mut self.serving {
            serving.end()?;
        }
        fs::remove_dir_all(&self.dir).with_context(|| format!("cannot remove {}", self.dir.display()))?;
        Ok(self.folded_pages.get())
    }

    /// The amount of work: `whole`, or `short` if only a small part of the work is wanted.
    pub const fn amount(&self, whole: u64, short: u64) -> u64 {
        if self.place.is_short { short } else { whole }
    }

    /// Number of pages that must be folded before the work begins: 0 without members.
    pub const fn floor(&self) -> u64 {
        if self.place.is_member { self.place.floor } else { 0 }
    }

    /// The directory of the service; `None` without members.
    pub fn service(&self) -> Option<&Path> {
        self.serving.as_ref().map(Serving::dir)
    }

    /// The service; `None` without members.
    pub const fn serving(&self) -> Option<&Serving> {
        self.serving.as_ref()
    }

    /// Path of a file in the turn's directory, as text.
    ///
    /// # Errors
    /// The path is not UTF-8.
    pub fn path(&self, name: &str) -> anyhow::Result<String> {
        text(&self.dir.join(name))
    }

    /// A directory that `make` fills the first time; later turns get the same.
    ///
    /// # Errors
    /// What `make` fails with.
    pub fn prepared(&self, make: impl FnOnce(&str) -> anyhow::Result<()>) -> anyhow::Result<String> {
        let dir = self.place.dir.join("prepared");
        let path = text(&dir)?;
        if !dir.exists() {
            fs::create_dir(&dir).with_context(|| format!("cannot create {path}"))?;
            fs::set_permissions(&dir, fs::Permissions::from_mode(0o777)).context("cannot open a directory")?;
            make(&path)?;
        }
        Ok(path)
    }

    /// The command that runs a program in this turn. As a member, all of its anonymous memory is enrolled.
    fn command(&self, name: &str, user: Option<&str>, words: &[&str]) -> anyhow::Result<Command> {
        let mut all: Vec<OsString> = Vec::new();
        if let Some(user) = user {
            all.extend(["setpriv", "--init-groups", "--reuid", user, "--regid", user].map(OsString::from));
            // With this capability, a member that does not run as root may open a userfaultfd that reports faults of
            // the kernel, too.
            all.extend(["--inh-caps", "+sys_ptrace", "--ambient-caps", "+sys_ptrace", "--"].map(OsString::from));
        }
        if let Some(service) = self.service() {
            all.push(cli::pagefold().into());
            all.extend(["run", "--group", GROUP, "--name", name, "--all-anonymous", "--service"].map(OsString::from));
            all.extend([service.as_os_str().to_owned(), "--".into()]);
        }
        all.extend(words.iter().map(OsString::from));
        let mut command = Command::new(&all[0]);
        command.args(&all[1..]).current_dir(&self.dir).stdin(Stdio::null());
        command.envs(self.environment());
        Ok(command)
    }

    /// Environment variables of all that this turn starts.
    pub fn environment(&self) -> Option<(&'static str, &'static str)> {
        (self.place.is_member && self.place.is_eager).then_some(("PAGEFOLD_EAGER", "1"))
    }

    /// Starts a server as a user, and waits until it answers.
    ///
    /// # Errors
    /// The server ends, or does not answer.
    pub fn serve(
        &self,
        name: &str,
        user: Option<&str>,
        words: &[&str],
        answers: impl Fn() -> bool,
    ) -> anyhow::Result<Running> {
        self.until_it_answers(name, self.command(name, user, words)?, answers)
    }

    /// Starts a server that is never a member, and waits until it answers.
    ///
    /// # Errors
    /// The server ends, or does not answer.
    pub fn serve_aside(&self, name: &str, words: &[&str], answers: impl Fn() -> bool) -> anyhow::Result<Running> {
        self.until_it_answers(name, self.plain(words), answers)
    }

    fn until_it_answers(
        &self,
        name: &str,
        mut command: Command,
        answers: impl Fn() -> bool,
    ) -> anyhow::Result<Running> {
        let log = self.dir.join(format!("{name}.log"));
        let file = || File::create(&log).with_context(|| format!("cannot create {}", log.display()));
        command.stdout(Stdio::null()).stderr(file()?);
        let child = command.spawn().with_context(|| format!("cannot start {name}"))?;
        let mut running = Running { child };
        self.guardian.borrow_mut().keep_process(ProcessId::of(running.child.id())?)?;
        let end = Instant::now() + PATIENCE;
        while !answers() {
            let said = || fs::read_to_string(&log).unwrap_or_default();
            if let Some(status) = running.child.try_wait().context("cannot wait for a server")? {
                bail!("{name} ended with {status}: {}", said().trim());
            }
            ensure!(Instant::now() < end, "{name} does not answer: {}", said().trim());
            std::thread::sleep(LOOK_EVERY);
        }
        Ok(running)
    }

    /// Runs a program to its end. Returns its output and the seconds that it took.
    ///
    /// # Errors
    /// The program fails.
    pub fn run(&self, name: &str, words: &[&str]) -> anyhow::Result<(String, f64)> {
        to_end(self.command(name, None, words)?)
    }

    /// Runs a program that is never a member, to its end. Returns its output and the seconds that it took.
    ///
    /// # Errors
    /// The program fails.
    pub fn aside(&self, words: &[&str]) -> anyhow::Result<(String, f64)> {
        to_end(self.plain(words))
    }

    fn plain(&self, words: &[&str]) -> Command {
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).current_dir(&self.dir).stdin(Stdio::null());
        command
    }

    /// Waits until enough pages are folded and no more are added. Without members, waits for `NO_MORE`.
    ///
    /// # Errors
    /// Too few pages are folded.
    pub fn rest(&self) -> anyhow::Result<()> {
        let Some(serving) = &self.serving else {
            std::thread::sleep(NO_MORE);
            return Ok(());
        };
        let (begin, mut most, mut grown) = (Instant::now(), 0, Instant::now());
        while begin.elapsed() < PATIENCE && (most < self.place.floor || grown.elapsed() < NO_MORE) {
            let folded = serving.show(GROUP).map_or(0, |state| state.report.sharing_pages);
            if folded > most {
                (most, grown) = (folded, Instant::now());
            }
            std::thread::sleep(LOOK_EVERY);
        }
        ensure!(most >= self.place.floor, "only {most} pages are folded, of at least {}", self.place.floor);
        self.note_folded(most);
        Ok(())
    }

    /// Notes how many pages are folded when the work begins.
    pub fn note_folded(&self, pages: u64) {
        self.folded_pages.set(pages);
    }

    /// Has the guardian end a lab when the bench ends.
    ///
    /// # Errors
    /// The guardian has ended.
    pub fn keep_lab(&self, dir: &Path) -> anyhow::Result<()> {
        self.guardian.borrow_mut().keep_lab(dir)
    }
}

/// Runs a command to its end. Returns its output and the seconds that it took.
fn to_end(mut command: Command) -> anyhow::Result<(String, f64)> {
    let words = format!("{command:?}");
    let begin = Instant::now();
    let output = command.output().with_context(|| format!("cannot start {words}"))?;
    let seconds = begin.elapsed().as_secs_f64();
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{words}: {}: {}", output.status, errors.trim());
    Ok((String::from_utf8_lossy(&output.stdout).into_owned(), seconds))
}

/// A path as text.
fn text(path: &Path) -> anyhow::Result<String> {
    path.to_str().map(str::to_owned).with_context(|| format!("{} is not UTF-8", path.display()))
}

/// Checks that programs are installed; each comes with its Debian package.
///
/// # Errors
/// Some are missing; the error names their packages.
pub fn check_programs(needs: &[(&str, &str)]) -> anyhow::Result<()> {
    let missing = needs.iter().filter(|(program, _)| find(program).is_none());
    let mut packages: Vec<&str> = missing.map(|(_, package)| *package).collect();
    packages.dedup();
    if packages.is_empty() {
        return Ok(());
    }
    Err(Stop::HostLacks(format!("not installed: apt-get install {}", packages.join(" "))).into())
}

/// The users among `USERS` that this host has.
fn users() -> Vec<&'static str> {
    let known = fs::read_to_string("/etc/passwd").unwrap_or_default();
    let is_known = |user: &&str| known.lines().any(|line| line.split(':').next() == Some(*user));
    USERS.into_iter().filter(is_known).collect()
}

/// Path of a program; `None` if it is not installed. An absolute path has to exist.
fn find(what: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let usual = ["/usr/sbin", "/usr/bin"].map(PathBuf::from);
    std::env::split_paths(&path).chain(usual).map(|dir| dir.join(what)).find(|file| file.is_file())
}

/// A running server. Dropping it ends the server by `SIGTERM`.
pub struct Running {
    child: Child,
}

impl Running {
    /// Process id of the server.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let pid = rustix::process::Pid::from_child(&self.child);
        // Fails only if the process has ended already.
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        let end = Instant::now() + PATIENCE;
        while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < end {
            std::thread::sleep(LOOK_EVERY);
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
