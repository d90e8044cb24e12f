//! The client of a service: finds the service, or starts a private one, and asks it questions.
//!
//! A user trusts their own service and root's. Root may also ask a private service of any user, and the user may have
//! made a socket there that answers anything at all. So the client treats every service in this way:
//!
//! | a hostile service | the client |
//! |---|---|
//! | has a socket that leads elsewhere, say to root's own service | asks only if the listening process belongs to the directory's owner, as the kernel tells |
//! | never answers, or never ends | waits 10 s for all answers to a question, and takes 16 MiB of them |
//! | sends files | takes none |
//! | sends characters that steer a terminal | replaces them, and takes only valid names |
//! | names processes that are not its own | leaves them out ([`Service::members`], [`Service::show`]) |
//! | wants a process of root's as a member | refuses to join |

use crate::ask::{self, Answer, Ask, GroupLine, GroupState, MemberLine, Trouble};
use crate::change::Change;
use crate::control::Settings;
use crate::enrol::{NotAttached, Rule, Via};
use crate::name;
use crate::place::{Meant, Place, Untrusted, own_uid};
use crate::promise::{Answered, Asked};
use anyhow::{Context, bail};
use cli::exit::Stop;
use cli::journal::By;
use host::{Peer, Process, ProcessId, Seqpacket};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::Value;
use std::collections::BTreeMap;
use std::io;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Time for a service to send all answers to a question: 10 s.
const PATIENCE: Duration = Duration::from_secs(10);
/// Time to wait for a service that refuses connections or has hung up, because it may be restarting: 3 s.
const RESTART_PATIENCE: Duration = Duration::from_secs(3);
/// Pause between two attempts to reach a service that is starting.
const RETRY_PAUSE: Duration = Duration::from_millis(10);
/// Time for a private service to start: 10 s.
const START_PATIENCE: Duration = Duration::from_secs(10);
/// Most bytes of answers to one question: 16 MiB, some ten thousands of members.
const MOST_ANSWER_BYTES: usize = 16 << 20;

/// A connection to a supervisor.
pub struct Service {
    /// The service's directory.
    pub place: Place,
    socket: Seqpacket,
    /// The user whose service it is.
    owner: u32,
}

/// The answers to one question.
struct Answers<'a> {
    service: &'a Service,
    until: Instant,
    buffer: Vec<u8>,
    /// Bytes that the answers may still have.
    left: usize,
}

impl Service {
    /// Connects to the service at `place`.
    ///
    /// # Errors
    /// There is no service, or its directory is not to be trusted.
    pub fn connect(place: Place) -> anyhow::Result<Self> {
        let owner = place.owner()?;
        let socket = Seqpacket::connect_to_service(&place.control_socket())?;
        let user = Peer::user_of(&socket).context("the service has hung up")?;
        if user != owner {
            let dir = place.dir().display();
            bail!("{dir} belongs to user {owner}, and a process of user {user} listens there: it is not asked");
        }
        Ok(Self { place, socket, owner })
    }

    /// Connects to the service at `place`. Waits for 3 s while its socket takes no connection: the service may be
    /// restarting, or the socket's queue may be full.
    ///
    /// # Errors
    /// There is no service, or its directory is not to be trusted.
    pub fn connect_soon(place: &Place) -> anyhow::Result<Self> {
        let until = Instant::now() + RESTART_PATIENCE;
        loop {
            match Self::connect(place.clone()) {
                Err(e) if e.downcast_ref().is_some_and(host::Error::is_refused) && Instant::now() < until => {
                    std::thread::sleep(RETRY_PAUSE);
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
                match Self::connect_soon(place) {
                    Err(e) if e.is::<Untrusted>() => Err(e),
                    found => Ok(vec![found.context(named)?]),
                }
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
        // removed, nor the environment, by whose variables a test lab recognizes processes that it has started.
        let started = Command::new(cli::pagefold())
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
                Err(_) => std::thread::sleep(RETRY_PAUSE),
            }
        }
    }

    /// The pid of the supervisor.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn pid(&self) -> anyhow::Result<u32> {
        Ok(self.socket.peer()?.pid)
    }

    /// Asks a question, and calls `take` to read the answers. If the service ends before it has answered, it may be
    /// restarting, and the question is asked again. So each question must be one that may be asked twice.
    fn asked<T>(&self, question: &Ask, take: impl Fn(Answers<'_>) -> anyhow::Result<T>) -> anyhow::Result<T> {
        let until = Instant::now() + RESTART_PATIENCE;
        let mut restarted = None;
        loop {
            let service: &Self = restarted.as_ref().unwrap_or(self);
            match service.ask(question).and_then(&take) {
                Err(e) if has_ended(&e) && Instant::now() < until => {
                    std::thread::sleep(RETRY_PAUSE);
                    restarted = Some(Self::connect_soon(&self.place).map_err(|_| e)?);
                }
                done => return done,
            }
        }
    }

    /// Sends a question. The answers must come within [`PATIENCE`].
    fn ask(&self, question: &Ask) -> anyhow::Result<Answers<'_>> {
        if !self.socket.send(&ask::encode(question), &[]).context("the service has hung up")? {
            bail!("the service is too busy");
        }
        let until = Instant::now() + PATIENCE;
        Ok(Answers { service: self, until, buffer: Vec::new(), left: MOST_ANSWER_BYTES })
    }

    /// Whether this service may have process `pid` as a member: a user's service has processes of that user only.
    /// Answers about other processes are not believed.
    fn may_have(&self, pid: u32) -> bool {
        let foreign = self.owner != own_uid() && self.owner != 0;
        !foreign || Process::read(pid).is_ok_and(|process| process.uid == self.owner)
    }

    /// Makes this process a member whose pages are merged by `via`. Returns the member's name.
    ///
    /// # Errors
    /// The service refuses.
    pub fn join(&self, group: &str, name: Option<&str>, program: &str, via: Via) -> anyhow::Result<String> {
        if self.owner != own_uid() && self.owner != 0 {
            let (dir, owner) = (self.place.dir().display(), self.owner);
            bail!(
                "{dir} is the service of user {owner}, who would decide over memory of root's: run the program as that user"
            );
        }
        let (group, name, program) = (group.to_owned(), name.map(str::to_owned), program.to_owned());
        self.asked(&Ask::Join { group, name, program, via }, |mut answers| match answers.next()? {
            Answer::Joined(name) => Ok(name),
            other => unexpected(&other),
        })
    }

    /// Makes a running process a member, and returns the member's name. The caller then puts an agent into the process,
    /// or turns on merging by ksmd there. `by_rule` says that a rule asks for this. With `dry_run`, the service only
    /// says whether the process might become a member.
    ///
    /// # Errors
    /// The service refuses.
    pub fn attach(
        &self,
        process: ProcessId,
        group: &str,
        name: Option<&str>,
        by_rule: bool,
        via: Via,
        dry_run: bool,
    ) -> anyhow::Result<String> {
        let ProcessId { pid, start_ticks: started } = process;
        let (group, name) = (group.to_owned(), name.map(str::to_owned));
        self.asked(&Ask::Attach { pid, started, group, name, by_rule, via, dry_run }, |mut answers| {
            match answers.next()? {
                Answer::Joined(name) => Ok(name),
                other => unexpected(&other),
            }
        })
    }

    /// Asks the service to promise memory for a process all of whose pages are to become private. With `for_good`, no
    /// rule attaches the process again.
    ///
    /// # Errors
    /// The service refuses, because memory is short for example.
    pub fn may_leave(&self, process: ProcessId, for_good: bool) -> anyhow::Result<()> {
        let ProcessId { pid, start_ticks: started } = process;
        self.done(&Ask::MayLeave { pid, started, for_good })
    }

    /// Tells the service which forked children of an attached process are no members, and why.
    ///
    /// # Errors
    /// The service does not answer, or refuses.
    pub fn children(&self, process: ProcessId, not_attached: Vec<NotAttached>) -> anyhow::Result<()> {
        let ProcessId { pid, start_ticks: started } = process;
        self.done(&Ask::Children { pid, started, not_attached })
    }

    /// The rules by which running processes are enrolled. `not_attached` reports processes that a rule fits and that
    /// could not be attached; `None`: they are the same as reported before.
    ///
    /// # Errors
    /// The service does not answer, or refuses.
    pub fn rules(&self, not_attached: Option<Vec<NotAttached>>) -> anyhow::Result<Vec<Rule>> {
        self.asked(&Ask::Rules { not_attached }, |mut answers| {
            let mut rules = Vec::new();
            loop {
                match answers.next()? {
                    Answer::Rule(rule) => rules.push(Rule { group: valid("group", rule.group)?, ..rule }),
                    Answer::Done => return Ok(rules),
                    other => return unexpected(&other),
                }
            }
        })
    }

    /// Adds a rule that holds until it is dropped.
    ///
    /// # Errors
    /// The service refuses.
    pub fn add_rule(&self, rule: Rule) -> anyhow::Result<()> {
        self.done(&Ask::AddRule(rule))
    }

    /// Drops the rules that were added for this control group, or this container.
    ///
    /// # Errors
    /// The service refuses.
    pub fn drop_rules(&self, cgroup: Option<String>, container: Option<String>) -> anyhow::Result<()> {
        self.done(&Ask::DropRules { cgroup, container })
    }

    /// Asks a question that is answered by `Done`.
    fn done(&self, question: &Ask) -> anyhow::Result<()> {
        self.asked(question, |mut answers| match answers.next()? {
            Answer::Done => Ok(()),
            other => unexpected(&other),
        })
    }

    /// Ends the membership of a process whose agent is gone.
    ///
    /// # Errors
    /// The service refuses.
    pub fn leave(&self, process: ProcessId) -> anyhow::Result<()> {
        let ProcessId { pid, start_ticks: started } = process;
        self.done(&Ask::Leave { pid, started })
    }

    /// All groups that the caller may see.
    ///
    /// # Errors
    /// The service does not answer.
    pub fn groups(&self) -> anyhow::Result<Vec<GroupLine>> {
        self.asked(&Ask::Groups, |mut answers| {
            let mut groups = Vec::new();
            loop {
                match answers.next()? {
                    Answer::Group(group) => groups.push(GroupLine { name: valid("group", group.name)?, ..group }),
                    Answer::Done => return Ok(groups),
                    other => return unexpected(&other),
                }
            }
        })
    }

    /// All members that the caller may see.
    ///
    /// # Errors
    /// The service does not answer.
    pub fn members(&self) -> anyhow::Result<Vec<MemberLine>> {
        self.asked(&Ask::Members, |mut answers| {
            let mut members = Vec::new();
            loop {
                match answers.next()? {
                    Answer::Member(mut member) => {
                        member.group = valid("group", member.group)?;
                        member.identity.name = valid("member", member.identity.name)?;
                        if self.may_have(member.identity.pid) {
                            members.push(member);
                        }
                    }
                    Answer::Done => return Ok(members),
                    other => return unexpected(&other),
                }
            }
        })
    }

    /// What is wrong with the service itself at present.
    ///
    /// # Errors
    /// The service does not answer.
    pub fn troubles(&self) -> anyhow::Result<Vec<Trouble>> {
        self.asked(&Ask::Troubles, |mut answers| {
            let mut troubles = Vec::new();
            loop {
                match answers.next()? {
                    Answer::Trouble(trouble) => troubles.push(trouble),
                    Answer::Done => return Ok(troubles),
                    other => return unexpected(&other),
                }
            }
        })
    }

    /// A group's state.
    ///
    /// # Errors
    /// The service refuses, or the worker does not answer.
    pub fn show(&self, group: &str) -> anyhow::Result<GroupState> {
        self.asked(&Ask::Show { group: group.to_owned() }, |mut answers| match answers.next()? {
            Answer::Report(mut state) => {
                state.name = valid("group", state.name)?;
                state.worker_pid = state.worker_pid.filter(|pid| self.may_have(*pid));
                state
                    .report
                    .members
                    .retain(|m| name::check("member", &m.name).is_ok() && (!m.connected || self.may_have(m.pid)));
                Ok(*state)
            }
            other => unexpected(&other),
        })
    }

    /// Why pages of a member are not folded: a reason for each page, in the order asked. The bounds are those of
    /// [`Ask::Why`].
    ///
    /// # Errors
    /// The service refuses, or member or worker do not answer.
    pub fn why(&self, group: &str, pid: u32, pages: Vec<(u64, u16)>) -> anyhow::Result<Vec<wire::Why>> {
        let wanted: usize = pages.iter().map(|(_, pages)| usize::from(*pages)).sum();
        self.asked(&Ask::Why { group: group.to_owned(), pid, pages }, |mut answers| match answers.next()? {
            Answer::Because(reasons) if reasons.len() == wanted => {
                let known = |number: &u8| wire::Why::of(*number).unwrap_or(wire::Why::Other);
                Ok(reasons.iter().map(known).collect())
            }
            other => unexpected(&other),
        })
    }

    /// Has a group fingerprint at most this many pages a second for `for_s` seconds, in place of its scan rate. `None`
    /// ends the replacement.
    ///
    /// # Errors
    /// The service refuses.
    pub fn pace(&self, group: &str, pages_per_s: Option<u32>, for_s: u32) -> anyhow::Result<()> {
        self.done(&Ask::Pace { group: group.to_owned(), pages_per_s, for_s })
    }

    /// Changes a group's settings; returns all of them.
    ///
    /// # Errors
    /// The service refuses.
    pub fn set(&self, group: &str, change: Change) -> anyhow::Result<Settings> {
        self.settings_after(&Ask::Set { group: group.to_owned(), change, by: None })
    }

    /// As [`Self::set`], for a user who asked the web side.
    ///
    /// # Errors
    /// The service refuses.
    pub fn set_for(&self, by: By, group: &str, change: Change) -> anyhow::Result<Settings> {
        self.settings_after(&Ask::Set { group: group.to_owned(), change, by: Some(by) })
    }

    /// Asks whether further guests fit, for a user who asked the web side.
    ///
    /// # Errors
    /// The service refuses, or hangs up.
    pub fn admit_for(&self, by: By, asked: Asked) -> anyhow::Result<Answered> {
        self.asked(&Ask::Admit { asked, by: Some(by) }, |mut answers| match answers.next()? {
            Answer::Admission(answered) => Ok(*answered),
            other => unexpected(&other),
        })
    }

    /// Reports requests to the web side with invalid tokens: how many in all, and how many from each address.
    ///
    /// # Errors
    /// The service refuses, or hangs up.
    pub fn login_failed(&self, times: u32, addresses: BTreeMap<String, u32>) -> anyhow::Result<()> {
        self.done(&Ask::LoginFailed { addresses, times })
    }

    /// Lines of the journal after a place in it, each with the place at which it ends, and the place from which to read
    /// on.
    ///
    /// # Errors
    /// The service refuses, or hangs up.
    pub fn journal(&self, after: u64) -> anyhow::Result<(Vec<(u64, Value)>, u64)> {
        self.asked(&Ask::Journal { after }, |mut answers| match answers.next()? {
            Answer::Journal(lines, next) => Ok((lines, next)),
            other => unexpected(&other),
        })
    }

    /// Undoes all changes of a group's settings on the fly, so that it runs as configured. Returns its settings.
    ///
    /// # Errors
    /// The service refuses, or hangs up.
    pub fn reset(&self, group: &str) -> anyhow::Result<Settings> {
        self.settings_after(&Ask::Reset { group: group.to_owned() })
    }

    fn settings_after(&self, question: &Ask) -> anyhow::Result<Settings> {
        self.asked(question, |mut answers| match answers.next()? {
            Answer::Set(settings) => Ok(*settings),
            other => unexpected(&other),
        })
    }
}

impl Answers<'_> {
    fn next(&mut self) -> anyhow::Result<Answer> {
        let socket = &self.service.socket;
        loop {
            if let Some(answer) = ask::receive(socket, &mut self.buffer).context("the service has hung up")? {
                let Some(left) = self.left.checked_sub(self.buffer.len()) else {
                    bail!("the service in {} does not stop answering", self.service.place.dir().display());
                };
                self.left = left;
                return match answer {
                    Answer::Refused(why) => Err(anyhow::Error::msg(why)),
                    Answer::NoGroup(why) => Err(Stop::Usage(why).into()),
                    answer => Ok(answer),
                };
            }
            let left = self.until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                bail!("the service in {} does not answer", self.service.place.dir().display());
            }
            let timeout = Timespec { tv_sec: left.as_secs().cast_signed(), tv_nsec: left.subsec_nanos().into() };
            // Whether this was interrupted or not, the loop reads the socket again.
            let _ = poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&timeout));
        }
    }
}

/// Whether the error says that the service ended, or closed the connection, before it answered.
fn has_ended(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|e| {
        matches!(e.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset)
    })
}

fn valid(what: &str, name: String) -> anyhow::Result<String> {
    name::check(what, &name).map_err(|why| anyhow::anyhow!("the service's answer is no answer: {why}"))?;
    Ok(name)
}

fn unexpected<T>(answer: &Answer) -> anyhow::Result<T> {
    bail!("the service answers something else than was asked: {answer:?}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use host::{Files, SeqpacketListener};

    /// Accepts the next connection, and reads a question from it.
    fn questioned(listener: &SeqpacketListener) -> Seqpacket {
        loop {
            if let Some(socket) = listener.accept().unwrap() {
                while ask::receive::<Ask>(&socket, &mut Vec::new()).unwrap().is_none() {}
                return socket;
            }
        }
    }

    #[test]
    fn service_that_ended_before_it_answered_is_asked_again() {
        let dir = tempfile::tempdir().unwrap();
        let place = Place::at(dir.path());
        let listener = SeqpacketListener::bind(&place.control_socket(), Files::Refused).unwrap();
        let service = Service::connect(place).unwrap();
        let answers = std::thread::spawn(move || {
            drop(questioned(&listener));
            questioned(&listener).send(&ask::encode(&Answer::Done), &[]).unwrap();
        });
        assert!(service.groups().unwrap().is_empty());
        answers.join().unwrap();
    }
}
