//! The client: finds a service, starts a private one, and asks.

use crate::ask::{self, Answer, Ask, GroupLine, GroupState, MemberLine};
use crate::place::{Meant, Place};
use anyhow::{Context, bail};
use host::Seqpacket;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Time for a service to answer: 10 s.
const PATIENCE: Duration = Duration::from_secs(10);
/// Time for a service to start again that has left its socket: 3 s.
const RESTART_PATIENCE: Duration = Duration::from_secs(3);
/// Time for a private service to start: 10 s.
const START_PATIENCE: Duration = Duration::from_secs(10);
/// A connection to a supervisor.
pub struct Service {
    /// Its directory.
    pub place: Place,
    socket: Seqpacket,
}

impl Service {
    /// Connects to the service at `place`.
    ///
    /// # Errors
    /// There is none, or its directory is not to be trusted.
    pub fn connect(place: Place) -> anyhow::Result<Self> {
        place.check()?;
        let socket = Seqpacket::connect(&place.control_socket())?;
        Ok(Self { place, socket })
    }

    /// Connects to the service at `place`; waits while nobody listens at its socket, because it may be starting again.
    fn connect_soon(place: &Place) -> anyhow::Result<Self> {
        let until = Instant::now() + RESTART_PATIENCE;
        loop {
            match Self::connect(place.clone()) {
                Err(e) if e.downcast_ref().is_some_and(host::Error::is_refused) && Instant::now() < until => {
                    std::thread::sleep(Duration::from_millis(10));
                }
                done => return done,
            }
        }
    }

    /// The services that the caller may mean and that answer, the likeliest first.
    ///
    /// # Errors
    /// The named one does not answer.
    pub fn find(meant: &Meant) -> anyhow::Result<Vec<Self>> {
        match meant {
            Meant::Named(place) | Meant::Preset(place) => {
                let named = format!("no service answers in {}: start one with pagefold serve", place.dir().display());
                Ok(vec![Self::connect_soon(place).context(named)?])
            }
            Meant::Nearest => {
                let mut places = vec![Place::hosts(), Place::own()];
                places.dedup();
                Ok(places.into_iter().filter_map(|place| Self::connect(place).ok()).collect())
            }
        }
    }

    /// Starts a private service at `place`, or finds the one that another process is starting.
    ///
    /// # Errors
    /// It does not start.
    pub fn start_private(place: Place) -> anyhow::Result<Self> {
        place.make()?;
        let dir = place.dir().to_str().context("the directory of the private service is not text")?.to_owned();
        // The service outlives the process that starts it. So it inherits neither the working directory, which may be
        // removed, nor the environment, by whose marks a lab finds its guests.
        let started = Command::new("/proc/self/exe")
            .args(["serve", "--private", "--detach", "--dir", &dir])
            .env_clear()
            .current_dir("/")
            .stdin(Stdio::null())
            .status()
            .context("cannot start a private service")?;
        let until = Instant::now() + START_PATIENCE;
        loop {
            match Self::connect(place.clone()) {
                Ok(service) => return Ok(service),
                Err(e) if Instant::now() > until || !started.success() => {
                    let log = place.log_file();
                    return Err(e.context(format!("the private service does not start; see {}", log.display())));
                }
                Err(_) => std::thread::sleep(Duration::from_millis(10)),
            }
        }
    }

    /// The supervisor's process.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn pid(&self) -> anyhow::Result<u32> {
        Ok(self.socket.peer()?.pid)
    }

    fn send(&self, question: &Ask) -> anyhow::Result<()> {
        if !self.socket.send(&ask::encode(question), &[]).context("the service has hung up")? {
            bail!("the service is too busy");
        }
        Ok(())
    }

    fn answer(&self) -> anyhow::Result<Answer> {
        let until = Instant::now() + PATIENCE;
        let mut buffer = Vec::new();
        loop {
            if let Some(answer) = ask::receive(&self.socket, &mut buffer).context("the service has hung up")? {
                return match answer {
                    Answer::Refused(why) => Err(anyhow::Error::msg(cli::printable(&why))),
                    answer => Ok(answer),
                };
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                bail!("the service in {} does not answer", self.place.dir().display());
            }
            let timeout = Timespec { tv_sec: left.as_secs().cast_signed(), tv_nsec: left.subsec_nanos().into() };
            // Whether this was interrupted or not, the loop reads the socket again.
            let _ = poll(&mut [PollFd::new(&self.socket, PollFlags::IN)], Some(&timeout));
        }
    }

    /// Makes this process a member; returns its name.
    ///
    /// # Errors
    /// The service refuses.
    pub fn join(&self, group: &str, name: Option<&str>, program: &str) -> anyhow::Result<String> {
        let (group, name, program) = (group.to_owned(), name.map(str::to_owned), program.to_owned());
        self.send(&Ask::Join { group, name, program })?;
        match self.answer()? {
            Answer::Joined(name) => Ok(name),
            other => unexpected(&other),
        }
    }

    /// All groups that the caller may see.
    ///
    /// # Errors
    /// The service does not answer.
    pub fn groups(&self) -> anyhow::Result<Vec<GroupLine>> {
        self.send(&Ask::Groups)?;
        let mut groups = Vec::new();
        loop {
            match self.answer()? {
                Answer::Group(group) => groups.push(group),
                Answer::Done => return Ok(groups),
                other => return unexpected(&other),
            }
        }
    }

    /// All members that the caller may see.
    ///
    /// # Errors
    /// The service does not answer.
    pub fn members(&self) -> anyhow::Result<Vec<MemberLine>> {
        self.send(&Ask::Members)?;
        let mut members = Vec::new();
        loop {
            match self.answer()? {
                Answer::Member(member) => members.push(member),
                Answer::Done => return Ok(members),
                other => return unexpected(&other),
            }
        }
    }

    /// A group's state.
    ///
    /// # Errors
    /// The service refuses, or the worker does not answer.
    pub fn show(&self, group: &str) -> anyhow::Result<GroupState> {
        self.send(&Ask::Show { group: group.to_owned() })?;
        match self.answer()? {
            Answer::Report(state) => Ok(*state),
            other => unexpected(&other),
        }
    }

    /// Changes a group's settings.
    ///
    /// # Errors
    /// The service refuses.
    pub fn set(&self, group: &str, change: crate::change::Change) -> anyhow::Result<()> {
        self.send(&Ask::Set { group: group.to_owned(), change })?;
        match self.answer()? {
            Answer::Done => Ok(()),
            other => unexpected(&other),
        }
    }
}

fn unexpected<T>(answer: &Answer) -> anyhow::Result<T> {
    bail!("the service answers something else than was asked: {answer:?}")
}
