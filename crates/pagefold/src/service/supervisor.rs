//! The supervisor: one thread that waits for sockets, and never for anybody in particular.

use super::ask::MemberLine;
use super::config::{Config, GroupConfig, WORKER_UIDS};
use super::decide;
use super::group::{Group, Heard};
use super::log::note;
use super::place::{Lock, Place, own_uid};
use super::prover::Prover;
use super::requests::Client;
use super::state::State;
use super::worker::Worker;
use anyhow::Context;
use fold::control::{GroupReport, Identity};
use host::{Caught, CgroupHome, PeerProcess, ProcessId, Seqpacket, SeqpacketListener, Signals};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::AsFd;
use rustix::process::{WaitOptions, wait};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};

/// How often members are looked after.
const TICK: Duration = Duration::from_secs(1);
/// Connections that are dealt with before others get their turn.
const TURN: usize = 64;
/// Where accepting fails, it is tried again after so long.
const PAUSE: Duration = Duration::from_millis(200);
/// The prover's, among the users of workers: no group can be called that.
const PROVER: &str = ":prover";

/// How a service is run.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// It was started for a member, and ends by itself.
    pub private: bool,
    /// Its workers end with it.
    pub stop_workers: bool,
    /// A group without members keeps its worker so long, and a private service without members runs so long.
    pub linger: Duration,
}

/// A running service.
pub struct Supervisor {
    pub(super) place: Place,
    pub(super) config: Config,
    pub(super) state: State,
    pub(super) groups: BTreeMap<String, Group>,
    pub(super) clients: Vec<Client>,
    options: Options,
    agents: SeqpacketListener,
    control: SeqpacketListener,
    prover: Prover,
    signals: Signals,
    /// Control groups of workers that have ended.
    leftover: Vec<CgroupHome>,
    idle_since: Option<Instant>,
    accept_after: Option<Instant>,
    said_no_home: bool,
    _lock: Lock,
}

impl Supervisor {
    /// Takes the place, and over whatever an earlier supervisor left there.
    ///
    /// # Errors
    /// The place is not ours, or sockets cannot be made there.
    pub fn new(place: Place, config: Config, options: Options, lock: Lock) -> anyhow::Result<Self> {
        let signals = Signals::catch().context("cannot catch signals")?;
        host::raise_open_files_limit();
        let (state, complaint) = State::read(&place.state_file());
        if let Some(complaint) = complaint {
            note!("{complaint}; members that run will have to be started again");
        }
        let agents = SeqpacketListener::bind(&place.agent_socket())?;
        let control = SeqpacketListener::bind(&place.control_socket())?;
        // Members of root's service are other users' processes; who they are decides what they may.
        let mode = if own_uid() == 0 { 0o666 } else { 0o600 };
        for path in [agents.path(), control.path()] {
            fs::set_permissions(path, Permissions::from_mode(mode))
                .with_context(|| format!("cannot set the rights of {}", path.display()))?;
        }
        let prover = Prover::new(&place, !config.without_prover)?;
        let mut supervisor = Self {
            place,
            config,
            state,
            groups: BTreeMap::new(),
            clients: Vec::new(),
            options,
            agents,
            control,
            prover,
            signals,
            leftover: Vec::new(),
            idle_since: None,
            accept_after: None,
            said_no_home: false,
            _lock: lock,
        };
        supervisor.begin()?;
        Ok(supervisor)
    }

    /// Groups of the configuration, and those that have members or a worker already.
    fn begin(&mut self) -> anyhow::Result<()> {
        let configured: Vec<String> = self.config.groups.iter().flatten().map(|(name, _)| name.clone()).collect();
        let left: BTreeSet<String> = self.state.members().iter().map(|m| m.group.clone()).collect();
        for name in configured.iter().chain(&left) {
            self.group(name);
        }
        for name in self.place.workers()? {
            match Worker::adopt(&self.place, &name) {
                Ok(Some(worker)) => self.group(&name).worker = Some(worker),
                Ok(None) => {}
                Err(e) => note!("group {name}: {e:#}"),
            }
        }
        note!(
            "serving at {}: {} groups, {} members that run already",
            self.place.dir().display(),
            self.groups.len(),
            self.state.members().len()
        );
        Ok(())
    }

    /// The group of that name, which is made if it is not there.
    pub(super) fn group(&mut self, name: &str) -> &mut Group {
        let config = self.config.groups.as_ref().and_then(|groups| groups.get(name)).cloned().unwrap_or_default();
        let state = &self.state;
        self.groups.entry(name.to_owned()).or_insert_with(|| {
            let change = state.change(name, config.settings).unwrap_or_default();
            if !change.is_empty() {
                note!("group {name}: runs as it was set on the fly, and not as it is configured");
            }
            Group::new(name, config, change)
        })
    }

    /// Serves until it is told to end.
    ///
    /// # Errors
    /// The kernel refuses to wait.
    pub fn run(mut self) -> anyhow::Result<()> {
        let mut buffer = Vec::new();
        let mut next_tick = Instant::now();
        loop {
            self.wait(next_tick)?;
            if self.caught_end() {
                return self.end();
            }
            self.accept_agents();
            self.accept_clients();
            self.hear_workers(&mut buffer);
            self.hear_clients(&mut buffer);
            if next_tick <= Instant::now() {
                next_tick = Instant::now() + TICK;
                if self.tick() {
                    note!("no member is left: this service ends");
                    self.options.stop_workers = true;
                    // Whoever starts the next one begins anew.
                    let state = self.place.state_file();
                    let ended = self.end();
                    let _ = fs::remove_file(state);
                    return ended;
                }
            }
            self.start_workers();
            if let Err(e) = self.state.write(&self.place.state_file()) {
                note!("{e:#}");
            }
        }
    }

    fn wait(&self, next_tick: Instant) -> anyhow::Result<()> {
        let now = Instant::now();
        let starts = self.groups.values().filter_map(|g| g.start_at(self.state.members_of(&g.name), now));
        let until = starts
            .chain(self.prover.start_at(now))
            .chain([next_tick])
            .chain(self.accept_after)
            .min()
            .unwrap_or(next_tick);
        let pause = until.saturating_duration_since(now);
        let timeout = Timespec { tv_sec: pause.as_secs().cast_signed(), tv_nsec: pause.subsec_nanos().into() };
        let mut fds = vec![PollFd::new(&self.signals, PollFlags::IN)];
        if self.accept_after.is_none_or(|after| after <= now) {
            fds.extend([PollFd::new(&self.agents, PollFlags::IN), PollFd::new(&self.control, PollFlags::IN)]);
        }
        let events = |writes: bool| if writes { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
        for worker in self.groups.values().filter_map(|g| g.worker.as_ref()) {
            fds.push(PollFd::from_borrowed_fd(worker.as_fd(), events(worker.has_waiting())));
        }
        for client in &self.clients {
            fds.push(PollFd::from_borrowed_fd(client.as_fd(), events(client.has_waiting())));
        }
        match poll(&mut fds, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(e) => Err(e).context("cannot wait for sockets"),
        }
    }

    fn caught_end(&mut self) -> bool {
        while let Some(caught) = self.signals.next() {
            match caught {
                Caught::End => return true,
                // That a worker has ended is known from its socket.
                Caught::Child => {
                    while let Ok(Some((pid, status))) = wait(WaitOptions::NOHANG) {
                        self.prover.child_ended(pid, status);
                    }
                }
            }
        }
        false
    }

    fn accept(&mut self, agents: bool) -> Option<Seqpacket> {
        if self.accept_after.is_some_and(|after| after > Instant::now()) {
            return None;
        }
        self.accept_after = None;
        let listener = if agents { &self.agents } else { &self.control };
        listener.accept().unwrap_or_else(|e| {
            note!("{e}");
            self.accept_after = Some(Instant::now() + PAUSE);
            None
        })
    }

    fn accept_agents(&mut self) {
        for _ in 0..TURN {
            let Some(socket) = self.accept(true) else { return };
            let admitted = PeerProcess::of(&socket).map_err(|e| e.to_string()).and_then(|peer| {
                let groups = self.groups.iter().map(|(name, group)| (name.as_str(), &group.config));
                decide::member_of(&peer, &self.state, groups)
            });
            match admitted.and_then(|member| self.admit(member, socket)) {
                Ok(()) => {}
                Err(why) => note!("a connection was refused: {why}"),
            }
        }
    }

    /// Whoever is refused finds its socket closed.
    fn admit(&mut self, member: MemberLine, socket: Seqpacket) -> Result<(), String> {
        let process = ProcessId { pid: member.identity.pid, start_ticks: member.identity.started };
        if self.state.find(process).is_none() {
            self.state.add(member.clone())?;
            note!("group {}: process {} is member {} by a rule", member.group, process.pid, member.identity.name);
        }
        let group = self.group(&member.group);
        group.idle_since = None;
        if !group.admit(member.identity, socket) {
            return Err(format!("too many wait for the worker of group {}", member.group));
        }
        self.state.set_connected(process);
        Ok(())
    }

    fn accept_clients(&mut self) {
        for _ in 0..TURN {
            let Some(socket) = self.accept(false) else { return };
            match Client::new(socket) {
                Ok(client) if self.has_room_for(&client) => self.clients.push(client),
                Ok(client) => note!("user {} has too many questions at once", client.uid()),
                Err(e) => note!("a question was refused: {e}"),
            }
        }
    }

    fn hear_workers(&mut self, buffer: &mut Vec<u8>) {
        let names: Vec<String> =
            self.groups.iter().filter(|(_, g)| g.worker.is_some()).map(|(n, _)| n.clone()).collect();
        for name in names {
            for _ in 0..TURN {
                let group = self.group(&name);
                if let Some(worker) = &mut group.worker {
                    worker.flush();
                }
                let Some(heard) = group.hear(buffer) else { break };
                match heard {
                    Heard::Members(members) => self.found_members(&name, members),
                    Heard::Report(report) => self.reported(&name, &report),
                    Heard::Nothing => {}
                    Heard::Ended(home) => {
                        self.leftover.extend(home);
                        self.reported(&name, &GroupReport::none());
                    }
                }
            }
        }
    }

    /// What a worker's members are was decided by the supervisor before us.
    fn found_members(&mut self, name: &str, members: Vec<Identity>) {
        for identity in members {
            let process = ProcessId { pid: identity.pid, start_ticks: identity.started };
            if self.state.find(process).is_none() && process.is_alive() {
                let member = MemberLine { group: name.to_owned(), identity, uid: own_uid(), connected: true };
                if let Err(why) = self.state.add(member) {
                    note!("group {name}: {why}");
                }
            }
        }
        let place = self.place.clone();
        let group = self.group(name);
        let Some(worker) = &group.worker else { return };
        if worker.process.is_alive() {
            note!("group {name}: worker, process {}, is at work", worker.process.pid);
        } else {
            // It listened only after we had connected; now it is known who it is.
            group.worker = Worker::adopt(&place, name).ok().flatten();
        }
    }

    fn start_workers(&mut self) {
        let now = Instant::now();
        if self.prover.start_at(now).is_some_and(|at| at <= now) {
            let uid = self.worker_uid(PROVER);
            self.prover.start(uid);
        }
        let due = |g: &Group, members| g.start_at(members, now).is_some_and(|at| at <= now);
        let names: Vec<String> =
            self.groups.values().filter(|g| due(g, self.state.members_of(&g.name))).map(|g| g.name.clone()).collect();
        for name in names {
            let uid = self.worker_uid(&name);
            let (place, mut no_home) = (self.place.clone(), None);
            let group = self.group(&name);
            group.uid = uid;
            group.start(&place, &mut no_home);
            if let Some(why) = no_home.filter(|_| !std::mem::replace(&mut self.said_no_home, true)) {
                note!("workers have no control groups of their own: {why}");
            }
        }
    }

    /// The user that a group's worker runs as: of root's service, one that nobody else has.
    fn worker_uid(&mut self, group: &str) -> Option<u32> {
        if own_uid() != 0 {
            return None;
        }
        if let Some(uid) = self.state.worker_uids.get(group) {
            return Some(*uid);
        }
        let processes = host::pids().unwrap_or_default();
        let mut taken: BTreeSet<u32> =
            processes.into_iter().filter_map(|pid| Some(host::Process::read(pid).ok()?.uid)).collect();
        taken.extend(self.state.worker_uids.values());
        let uid = self.config.worker_uids.clone().unwrap_or(WORKER_UIDS).find(|uid| !taken.contains(uid))?;
        self.state.worker_uids.insert(group.to_owned(), uid);
        self.state.touch();
        Some(uid)
    }

    /// Once a second. Whether this service has nothing left to do.
    fn tick(&mut self) -> bool {
        self.state.forget_dead();
        self.leftover.retain(|home| !home.remove());
        self.forget_silent_clients();
        let now = Instant::now();
        let (mut ended, place) = (Vec::new(), &self.place);
        for group in self.groups.values_mut() {
            let members = self.state.members_of(&group.name);
            let idle = if members > 0 { None } else { Some(*group.idle_since.get_or_insert(now)) };
            group.idle_since = idle;
            if idle.is_some_and(|since| now.duration_since(since) >= self.options.linger) {
                ended.extend(group.end(place));
            }
        }
        self.leftover.extend(ended);
        let busy = !self.state.members().is_empty();
        self.idle_since = if busy { None } else { Some(self.idle_since.unwrap_or(now)) };
        // Somebody who asks may be about to join.
        let over = self.idle_since.is_some_and(|since| now.duration_since(since) >= self.options.linger);
        self.options.private && over && self.clients.is_empty()
    }

    /// Members go on in any case. Workers go on for a successor, or end now.
    fn end(mut self) -> anyhow::Result<()> {
        self.prover.end();
        self.state.write(&self.place.state_file())?;
        let workers = self.groups.values().filter(|g| g.worker.is_some()).count();
        if self.options.stop_workers {
            let homes: Vec<_> = self.groups.values_mut().filter_map(|group| group.end(&self.place)).collect();
            let until = Instant::now() + Duration::from_secs(2);
            let mut left = homes;
            while !left.is_empty() && Instant::now() < until {
                left.retain(|home| !home.remove());
                std::thread::sleep(Duration::from_millis(10));
            }
        } else if workers > 0 {
            note!("{workers} workers go on for 30 s, for the next supervisor; without one they end then");
            super::client::end_orphans_later(&self.place);
        }
        for socket in [self.place.agent_socket(), self.place.control_socket()] {
            let _ = fs::remove_file(socket);
        }
        note!("ended");
        Ok(())
    }

    /// Whether a user may start members of a group and change it.
    pub(super) fn may(&self, uid: u32, config: &GroupConfig) -> bool {
        uid == 0 || uid == own_uid() || config.users.contains(&uid)
    }
}
