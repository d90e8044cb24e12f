//! The directory of a service, and the sockets and files in it.
//!
//! ```text
//!   DIR/lock               held by the supervisor that runs
//!   DIR/agent.sock         members
//!   DIR/prove.sock         members that ask whether anybody else holds their pages; root's service only
//!   DIR/control.sock       the command line
//!   DIR/hand.sock          connections that are handed on
//!   DIR/history.sock       questions about figures over time, where [history] is configured: `history`
//!   DIR/users/UID/...      agent, prove, control and hand sockets for one user alone: `host::own_socket`
//!   DIR/workers/GROUP.sock a group's worker, for supervisors only
//!   DIR/state.json         members, and settings changed on the fly, for the next supervisor
//!   DIR/journal/           who has changed what: `cli::journal`
//!   DIR/log                log of a private service
//! ```

use anyhow::{Context, bail};
use std::fmt;
use std::fs::{self, DirBuilder, File, Permissions, TryLockError};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// The directory of root's service, which serves the whole host.
const HOSTS: &str = "/run/pagefold";
/// The environment variable that names the service's directory.
pub const DIR_VARIABLE: &str = "PAGEFOLD_DIR";
/// The rule by which a service is found, for help texts; [`Meant`] follows it.
pub const RULE: &str = "\
The service's directory [default: PAGEFOLD_DIR; else, for serve, the configuration's; else /run/pagefold, the host's, \
which root serves; else your own: pagefold in XDG_RUNTIME_DIR, or /tmp/pagefold-UID]";

/// A service's directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    dir: PathBuf,
}

/// Which service the caller means. The first directory that is given counts: by the option, by `PAGEFOLD_DIR`, by the
/// configuration (of `serve`). If none is given, it is the host's service, or else the caller's own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Meant {
    /// The service in this directory, which an option names.
    Named(Place),
    /// The service in this directory, which the environment or the configuration names.
    Preset(Place),
    /// No directory is given: the host's service, or else the caller's own.
    Nearest,
}

impl Meant {
    /// Applies [`RULE`] to the directory of an option, that of the environment, and that of the configuration.
    pub fn of(option: Option<&Path>, configured: Option<&Path>) -> Self {
        let variable = std::env::var_os(DIR_VARIABLE).filter(|dir| !dir.is_empty()).map(PathBuf::from);
        match (option, variable.as_deref().or(configured)) {
            (Some(dir), _) => Self::Named(Place::at(dir)),
            (None, Some(dir)) => Self::Preset(Place::at(dir)),
            (None, None) => Self::Nearest,
        }
    }

    /// The place of a service that the caller starts.
    pub fn place(self) -> Place {
        match self {
            Self::Named(place) | Self::Preset(place) => place,
            Self::Nearest => Place::own(),
        }
    }
}

/// Why a directory is not trusted to be a service's.
#[derive(Debug)]
pub struct Untrusted(String);

impl fmt::Display for Untrusted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The lock of a service's directory, which its only supervisor holds.
pub struct Lock {
    /// Closing it releases the lock.
    _file: File,
}

/// The effective user of this process.
pub fn own_uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

impl Place {
    /// The place in this directory.
    pub fn at(dir: &Path) -> Self {
        Self { dir: dir.to_owned() }
    }

    /// The place of the host's service, which root runs.
    pub fn hosts() -> Self {
        Self::at(Path::new(HOSTS))
    }

    /// The place of the caller's own service. For root, it is the host's service.
    pub fn own() -> Self {
        if own_uid() == 0 {
            return Self::hosts();
        }
        match std::env::var_os("XDG_RUNTIME_DIR").filter(|dir| !dir.is_empty()) {
            Some(dir) => Self::at(&PathBuf::from(dir).join("pagefold")),
            None => Self::at(&PathBuf::from(format!("/tmp/pagefold-{}", own_uid()))),
        }
    }

    /// The directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The socket to which members connect.
    pub fn agent_socket(&self) -> PathBuf {
        self.dir.join("agent.sock")
    }

    /// The socket of the prover.
    pub fn prove_socket(&self) -> PathBuf {
        self.dir.join("prove.sock")
    }

    /// The socket through which connections are handed on: see [`crate::hand`].
    pub fn hand_socket(&self) -> PathBuf {
        self.dir.join("hand.sock")
    }

    /// The socket to which the command line connects.
    pub fn control_socket(&self) -> PathBuf {
        self.dir.join("control.sock")
    }

    /// The socket of the process that keeps a history: see [`crate::history`].
    pub fn history_socket(&self) -> PathBuf {
        self.dir.join("history.sock")
    }

    /// The socket of a group's worker.
    pub fn worker_socket(&self, group: &str) -> PathBuf {
        self.dir.join("workers").join(format!("{group}.sock"))
    }

    /// The file with the state for the next supervisor.
    pub fn state_file(&self) -> PathBuf {
        self.dir.join("state.json")
    }

    /// The log of a private service.
    pub fn log_file(&self) -> PathBuf {
        self.dir.join("log")
    }

    /// Names of the groups for which there is a worker's socket. The worker may have ended.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn workers(&self) -> anyhow::Result<Vec<String>> {
        let dir = self.dir.join("workers");
        let listing = fs::read_dir(&dir).with_context(|| format!("cannot list {}", dir.display()))?;
        let group = |entry: fs::DirEntry| entry.file_name().to_str()?.strip_suffix(".sock").map(str::to_owned);
        Ok(listing.flatten().filter_map(group).filter(|name| crate::name::check("group", name).is_ok()).collect())
    }

    /// Makes the directory, and `workers` in it. Every user may enter the directory of root's service, so that members
    /// can connect.
    ///
    /// # Errors
    /// The directory cannot be made, or belongs to another user.
    pub fn make(&self) -> anyhow::Result<()> {
        let mode = if own_uid() == 0 { 0o755 } else { 0o700 };
        make_dir(&self.dir, mode)?;
        make_dir(&self.dir.join("workers"), 0o700)
    }

    /// The owner of the directory, if the caller may ask the owner's service: the owner must be the caller or root,
    /// because sockets in another user's directory may lead anywhere. Root may ask any user's service
    /// ([`crate::client`] says with which precautions).
    ///
    /// # Errors
    /// The directory is not there, or [`Untrusted`].
    pub fn owner(&self) -> anyhow::Result<u32> {
        match own_uid() {
            0 => check_dir(&self.dir, None),
            own => check_dir(&self.dir, Some(&[own, 0])),
        }
    }

    /// Whether the directory has the sockets of a service.
    fn is_a_services(&self) -> bool {
        [self.control_socket(), self.agent_socket()].iter().all(|path| path.exists())
    }

    /// Takes the lock of the directory; `None` where another supervisor holds it.
    ///
    /// # Errors
    /// The file cannot be made.
    pub fn lock(&self) -> anyhow::Result<Option<Lock>> {
        let path = self.dir.join("lock");
        // A process that can open the file can hold the lock, so no other user may.
        let open = File::options().create(true).truncate(false).write(true).mode(0o600).open(&path);
        let file = open.with_context(|| format!("cannot create {}", path.display()))?;
        match file.try_lock() {
            Ok(()) => Ok(Some(Lock { _file: file })),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(e)) => Err(e).with_context(|| format!("cannot lock {}", path.display())),
        }
    }
}

fn make_dir(dir: &Path, mode: u32) -> anyhow::Result<()> {
    match DirBuilder::new().mode(mode).create(dir) {
        // The process's umask may have taken rights away.
        Ok(()) => fs::set_permissions(dir, Permissions::from_mode(mode))
            .with_context(|| format!("cannot set the rights of {}", dir.display())),
        Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => check_dir(dir, Some(&[own_uid()])).map(drop),
        Err(e) => Err(e).with_context(|| format!("cannot create {}", dir.display())),
    }
}

/// The owner of a directory, if it is one of `owners` (`None`: any), and nobody else may write to the directory.
fn check_dir(dir: &Path, owners: Option<&[u32]>) -> anyhow::Result<u32> {
    // A symbolic link is not followed, because its owner can change where it leads.
    let found = fs::symlink_metadata(dir).with_context(|| format!("cannot look at {}", dir.display()))?;
    let shown = dir.display();
    if !found.is_dir() {
        bail!(Untrusted(format!("{shown} is not a directory")));
    }
    if owners.is_some_and(|owners| !owners.contains(&found.uid())) {
        bail!(Untrusted(format!(
            "{shown} belongs to user {}, and only that user and root may ask there: use another directory",
            found.uid()
        )));
    }
    if found.mode() & 0o022 != 0 {
        let mode = found.mode() & 0o7777;
        let fix = if Place::at(dir).is_a_services() {
            format!("chmod go-w {shown}, or use another directory")
        } else {
            format!("use a directory of the service's own, such as {}", dir.join("pagefold").display())
        };
        bail!(Untrusted(format!("others may write in {shown} (mode {mode:04o}): {fix}")));
    }
    Ok(found.uid())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directory_that_others_may_write_is_refused() {
        let temp = tempfile::tempdir().unwrap();
        let dir = temp.path().join("d");
        let place = Place::at(&dir);
        assert!(place.owner().is_err());
        place.make().unwrap();
        place.make().unwrap();
        assert_eq!(place.owner().unwrap(), own_uid());
        fs::set_permissions(&dir, Permissions::from_mode(0o777)).unwrap();
        let why = place.make().unwrap_err().to_string();
        assert!(why.contains("mode 0777") && !why.contains("chmod"), "{why}");
        assert!(place.owner().is_err());
        // The advice to change rights is for directories of services only.
        fs::write(place.control_socket(), "").unwrap();
        fs::write(place.agent_socket(), "").unwrap();
        assert!(place.make().unwrap_err().to_string().contains("chmod go-w"));
        let link = temp.path().join("link");
        std::os::unix::fs::symlink(temp.path(), &link).unwrap();
        assert!(Place::at(&link).make().unwrap_err().to_string().contains("not a directory"));
        if own_uid() == 0 {
            fs::set_permissions(&dir, Permissions::from_mode(0o755)).unwrap();
            std::os::unix::fs::chown(&dir, Some(65534), None).unwrap();
            assert!(place.make().unwrap_err().to_string().contains("belongs to user 65534"));
        }
    }

    #[test]
    fn directory_has_one_supervisor() {
        let temp = tempfile::tempdir().unwrap();
        let place = Place::at(&temp.path().join("d"));
        place.make().unwrap();
        let lock = place.lock().unwrap();
        assert!(lock.is_some() && place.lock().unwrap().is_none());
        drop(lock);
        assert!(place.lock().unwrap().is_some());
    }
}
