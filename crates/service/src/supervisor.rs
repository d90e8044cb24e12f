//! The supervisor: one thread that polls all sockets, and never blocks on a single peer.

use super::balance_config::Balance;
use super::beside::Beside;
use super::config::Config;
use super::decide;
use super::entrances::{Entrance, Entrances, To};
use super::group::{Group, Heard};
use super::handed::Handed;
use super::helper::Held;
use super::hidden;
use super::park_config::Park;
use super::prover::Prover;
use super::registry::Registry;
use super::requests::Clients;
use super::segments;
use super::sketch_config::Sketch;
use super::state::State;
use super::templates;
use super::trail::Trail;
use super::trouble;
use super::web::Web;
use super::worker::{self, Worker};
use act::{CgroupHome, FileStore};
use anyhow::Context;
use api::ask::MemberLine;
use api::control::{GroupReport, Identity, Needs, Room};
use api::hand::Server;
use api::place::{Lock, Place};
use cli::note;
use cli::size::plural;
use host::{Caught, PeerProcess, ProcessId, Seqpacket, Signals};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, OwnedFd};
use rustix::process::{WaitOptions, wait};
use serde_json::json;
use std::collections::BTreeSet;
use std::fs;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Time between two calls of [`Supervisor::tick`], which checks members, groups and clients: 1 s.
const TICK: Duration = Duration::from_secs(1);
/// Time between two requests for a report to every worker, so that its bill is kept: 10 s.
const BILLS: Duration = Duration::from_secs(10);
/// Time after which the memory limits of members are read again, if no member has connected meanwhile: 15 s.
const LIMITS: Duration = Duration::from_secs(15);
/// Most messages of one worker that are handled before those of others.
const TURN: usize = 64;
/// Key of the user that the prover runs as in [`State::worker_uids`]. It is no valid name of a group.
const PROVER: &str = ":prover";
/// Key of the user that the web side runs as in [`State::worker_uids`].
const WEB: &str = ":web";

/// Key of the user that the process which keeps a history runs as in [`State::worker_uids`].
const HISTORY: &str = ":history";

/// The options of a service.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Whether the service was started for one member, and ends by itself.
    pub private: bool,
    /// Whether the workers end with the service.
    pub stop_workers: bool,
    /// Whether another program, not the supervisor, starts the process that carries out the enrol rules.
    pub enrol_apart: bool,
    /// Time without members after which a group's worker ends, and so does a private service.
    pub linger: Duration,
}

/// A running service.
pub struct Supervisor {
    registry: Registry,
    clients: Clients,
    options: Options,
    /// The file of the workers' program.
    worker: Held,
    entrances: Entrances,
    handed: Handed,
    prover: Prover,
    web: Web,
    balancer: Beside,
    sketcher: Beside,
    parker: Beside,
    historian: Beside,
    enroller: Beside,
    signals: Signals,
    /// Control groups of ended workers that could not be removed yet.
    leftover: Vec<CgroupHome>,
    idle_since: Option<Instant>,
    said_no_home: bool,
    said_no_history: bool,
    bills_due: Instant,
    limits_due: Instant,
    _lock: Lock,
}

impl Supervisor {
    /// Begins to serve at `place`, and takes over the state and the workers of an earlier supervisor.
    ///
    /// # Errors
    /// Sockets cannot be made at the place, or the program of workers is missing.
    pub fn new(place: Place, config: Config, options: Options, lock: Lock) -> anyhow::Result<Self> {
        // A private service belongs to the member that started it. A service manager, if there is one, manages that
        // member, and is asked to keep no files.
        let (store, files) = if options.private { Default::default() } else { FileStore::take() };
        let held = |name| Held::find(name).with_context(|| format!("cannot find {name}"));
        let (worker, pagefold) = (held(worker::PROGRAM)?, Rc::new(held("pagefold")?));
        let signals = Signals::catch().context("cannot catch signals")?;
        act::raise_open_files_limit();
        let state = State::read(&place.state_file())?;
        let entrances = Entrances::new(place.clone())?;
        let prover = Prover::new(&place, !config.without_prover)?;
        let web = Web::new(&place, config.api.as_ref())?;
        let beside = |work, arguments| Beside::new(&place, &pagefold, work, arguments);
        let balancer = beside("balancing memory between guests", config.balance.as_ref().map(Balance::arguments));
        let sketcher = beside("sketching guests", config.sketch.as_ref().map(Sketch::arguments));
        let parker = beside("parking idle guests", config.park.as_ref().map(Park::arguments));
        let historian = beside("keeping figures over time", None);
        let enroller = beside("enrolling processes by rules", None);
        let mut supervisor = Self {
            registry: Registry::new(place, config, state),
            clients: Clients::default(),
            options,
            worker,
            entrances,
            handed: Handed::default(),
            prover,
            web,
            balancer,
            sketcher,
            parker,
            historian,
            enroller,
            signals,
            leftover: Vec::new(),
            idle_since: None,
            said_no_home: false,
            said_no_history: false,
            bills_due: Instant::now(),
            limits_due: Instant::now(),
            _lock: lock,
        };
        supervisor.registry.store = Rc::new(store);
        if !options.private {
            supervisor.registry.trail = Trail::kept(supervisor.registry.place.dir());
        }
        supervisor.begin()?;
        supervisor.take_over(files);
        Ok(supervisor)
    }

    /// Makes the groups of the configuration and those that have members already, and adopts workers that an earlier
    /// supervisor has left running.
    fn begin(&mut self) -> anyhow::Result<()> {
        let configured: Vec<String> =
            self.registry.config.groups.iter().flatten().map(|(name, _)| name.clone()).collect();
        let left: BTreeSet<String> = self.registry.state.members().iter().map(|m| m.group.clone()).collect();
        for name in configured.iter().chain(&left) {
            self.registry.group(name);
        }
        for name in self.registry.place.workers()? {
            match Worker::adopt(&self.registry.place, &name) {
                Ok(Some(worker)) => self.registry.group(&name).worker = Some(worker),
                Ok(None) => {}
                Err(e) => note!("group {name}: {e:#}"),
            }
        }
        self.registry.bound_pools();
        let (directory, file) = (self.registry.place.dir(), &self.registry.config.file);
        let more = json!({ "version": cli::version(), "directory": directory, "file": file });
        self.registry.trail.write_own("service_started", more);
        note!(
            "serving at {}: {}, {} that run already",
            self.registry.place.dir().display(),
            plural(self.registry.groups.len() as u64, "group"),
            plural(self.registry.state.members().len() as u64, "member")
        );
        Ok(())
    }

    /// Takes over pools' files that the service manager has kept: templates, and other segments of groups that have
    /// members. The store forgets all others. An adopted worker names its segments by itself.
    fn take_over(&mut self, files: Vec<(String, OwnedFd)>) {
        let mut taken = 0_u64;
        for (name, file) in files {
            let known = segments::parse(&name)
                .filter(|(group, _, template)| template.is_some() || self.registry.state.members_of(group) > 0);
            match known {
                Some((group, info, template)) => {
                    self.registry.group(group).segments.restore(info, template, file);
                    taken += 1;
                }
                None => _ = self.registry.store.forget(&name),
            }
        }
        if taken > 0 {
            note!("{} of pools, kept by the service manager", plural(taken, "file"));
        }
    }

    /// Serves until it is told to end.
    ///
    /// # Errors
    /// The kernel refuses to poll the sockets.
    pub fn run(mut self) -> anyhow::Result<()> {
        let mut buffer = Vec::new();
        let mut next_tick = Instant::now();
        loop {
            self.wait(next_tick)?;
            if self.caught_end() {
                return self.end();
            }
            self.accept();
            self.hear_workers(&mut buffer);
            self.clients.hear(&mut self.registry, &mut buffer);
            if next_tick <= Instant::now() {
                next_tick = Instant::now() + TICK;
                if self.tick() {
                    note!("no member is left: this service ends");
                    self.options.stop_workers = true;
                    // The next private service begins anew, without this one's state.
                    let state = self.registry.place.state_file();
                    let ended = self.end();
                    let _ = fs::remove_file(state);
                    return ended;
                }
            }
            self.start_workers();
            self.write_state();
        }
    }

    fn wait(&self, next_tick: Instant) -> anyhow::Result<()> {
        let now = Instant::now();
        let starts =
            self.registry.groups.values().filter_map(|g| g.start_at(self.registry.state.members_of(&g.name), now));
        let until = starts
            .chain(self.prover.start_at(now))
            .chain(self.web.start_at(now))
            .chain(self.balancer.start_at(now))
            .chain(self.sketcher.start_at(now))
            .chain(self.parker.start_at(now))
            .chain(self.historian.start_at(now))
            .chain(self.enroller.start_at(now))
            .chain([next_tick])
            .chain(self.entrances.due(now))
            .chain(self.clients.due(now))
            .min()
            .unwrap_or(next_tick);
        let pause = until.saturating_duration_since(now);
        let timeout = Timespec { tv_sec: pause.as_secs().cast_signed(), tv_nsec: pause.subsec_nanos().into() };
        let mut fds = vec![PollFd::new(&self.signals, PollFlags::IN)];
        fds.extend(self.entrances.sockets(now, |entrance| self.has_room(entrance)));
        fds.extend(self.handed.sockets());
        let events = |writes: bool| if writes { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
        for worker in self.registry.groups.values().filter_map(|g| g.worker.as_ref()) {
            fds.push(PollFd::from_borrowed_fd(worker.as_fd(), events(worker.has_waiting())));
        }
        fds.extend(self.clients.sockets(now).map(|(socket, event)| PollFd::from_borrowed_fd(socket, event)));
        match poll(&mut fds, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(e) => Err(e).context("cannot wait for sockets"),
        }
    }

    fn caught_end(&mut self) -> bool {
        while let Some(caught) = self.signals.next() {
            match caught {
                Caught::End => return true,
                // The end of a worker shows at its socket.
                Caught::Child => {
                    // Once an ended child is waited for, its processor time cannot be read any more.
                    self.registry.state.look_at_ended_workers();
                    while let Ok(Some((pid, status))) = wait(WaitOptions::NOHANG) {
                        self.prover.child_ended(pid, status);
                        self.web.child_ended(pid, status);
                        self.balancer.child_ended(pid, status);
                        self.sketcher.child_ended(pid, status);
                        self.parker.child_ended(pid, status);
                        self.historian.child_ended(pid, status);
                        self.enroller.child_ended(pid, status);
                    }
                }
                Caught::Hangup => self.reload(),
            }
        }
        false
    }

    /// Whether one more connection to that socket would have a place.
    fn has_room(&self, entrance: Entrance) -> bool {
        match entrance.to {
            To::Agents => true,
            To::Control => self.clients.has_room(entrance.whose()),
            To::Hand => self.handed.has_room(entrance.whose()),
            To::Prover => !self.prover.is_missing(),
        }
    }

    /// Accepts the connections that wait at all sockets, and takes over what clients hand on, such as connections of
    /// agents that cannot connect by themselves.
    fn accept(&mut self) {
        let now = Instant::now();
        for entrance in self.entrances.all() {
            while self.has_room(entrance)
                && let Some(socket) = self.entrances.accept(entrance, now)
            {
                match entrance.to {
                    To::Agents => self.accept_agent(socket),
                    To::Control => self.clients.add(socket, entrance.whose()),
                    To::Hand => self.handed.add(socket, entrance.whose()),
                    To::Prover => self.prover.hand_on(socket, None),
                }
            }
        }
        let (connections, questions) = self.handed.take();
        questions.into_iter().for_each(|question| templates::answer(&mut self.registry, question));
        for (server, socket) in connections {
            match server {
                Server::Worker => self.accept_agent(socket),
                Server::Prover => {
                    let pagemap = hidden::pagemap(&socket, &self.registry.state);
                    self.prover.hand_on(socket, pagemap.as_ref());
                }
            }
        }
    }

    fn accept_agent(&mut self, socket: Seqpacket) {
        let admitted = PeerProcess::of(&socket)
            .map_err(|e| e.to_string())
            .and_then(|peer| decide::member_of(&peer, &self.registry.state, &self.registry.groups));
        match admitted.and_then(|member| self.admit(member, socket)) {
            Ok(()) => {}
            Err(why) => note!("a connection was refused: {why}"),
        }
    }

    /// Passes a member's socket on to its group's worker. If that is refused, the socket is closed.
    ///
    /// The next supervisor does not take a worker's word for which processes are members. So the member is in the state
    /// file before the worker hears of it.
    fn admit(&mut self, member: MemberLine, socket: Seqpacket) -> Result<(), String> {
        let process = ProcessId { pid: member.identity.pid, start_ticks: member.identity.started };
        if self.registry.state.find(process).is_none() {
            self.registry.keep(|state| state.add(member.clone()))?;
            let how = member.family.as_ref().map_or_else(|| "by a rule".to_owned(), |f| format!("forked by {f}"));
            note!("group {}: process {} is member {}, {how}", member.group, process.pid, member.identity.name);
        }
        if !member.connected {
            // The member's memory limit bounds the pool from the member's first connection on, so limits are read again
            // at the next tick.
            self.limits_due = Instant::now();
        }
        let group = self.registry.group(&member.group);
        group.idle_since = None;
        self.registry.unscheduled.add(&member.group, process.pid);
        let group = self.registry.group(&member.group);
        if !group.admit(member.identity, socket) {
            return Err(format!("too many wait for the worker of group {}", member.group));
        }
        self.registry.state.set_connected(process);
        Ok(())
    }

    fn hear_workers(&mut self, buffer: &mut Vec<u8>) {
        let names: Vec<String> =
            self.registry.groups.iter().filter(|(_, g)| g.worker.is_some()).map(|(n, _)| n.clone()).collect();
        for name in names {
            for _ in 0..TURN {
                let group = self.registry.group(&name);
                if let Some(worker) = &mut group.worker {
                    worker.flush();
                }
                let Some(heard) = group.hear(buffer) else { break };
                self.take_in(&name, heard);
            }
        }
    }

    /// Acts on a message of a group's worker.
    fn take_in(&mut self, name: &str, heard: Heard) {
        match heard {
            Heard::Members(members) => self.found_members(name, &members),
            Heard::Report(worker, report) => self.heard_report(name, worker, &report),
            Heard::Needs(needs) => self.heard_needs(name, &needs),
            Heard::Because(question, reasons) => self.clients.because(name, question, &reasons),
            Heard::Nothing => {}
            Heard::Ended(home) => {
                self.leftover.extend(home);
                self.clients.reported(&mut self.registry, name, &GroupReport::none());
            }
        }
    }

    /// Adds a worker's bill to its group's, and writes it to the state file before a client is told of it.
    fn heard_report(&mut self, name: &str, worker: ProcessId, report: &GroupReport) {
        self.registry.state.bill(name, worker, &report.bill);
        if self.clients.wait_for(name) {
            self.write_state();
        }
        self.clients.reported(&mut self.registry, name, report);
    }

    /// Promises a worker memory for pages that are to become private, or refuses it.
    fn heard_needs(&mut self, name: &str, needs: &Needs) {
        let allowed = self.registry.within_limits(needs);
        let allowed = allowed.map_err(|why| format!("{why}: raise the limit; it is tried again every few seconds"));
        let promised = allowed
            .and_then(|needs| self.registry.promise(|room, memory| room.promise(name, &needs, memory, Instant::now())));
        let room = match promised {
            Ok((members, time)) => Room::Promised { members, seconds: time.as_secs() },
            Err(why) => Room::Refused(why),
        };
        if !needs.members.is_empty() {
            self.registry.group(name).give_room(room);
        }
    }

    /// Writes the state if it has changed. A failure is logged once, and the write is tried again each time that the
    /// supervisor wakes.
    fn write_state(&mut self) {
        match self.registry.state.write(&self.registry.place.state_file()) {
            Ok(()) => self.registry.troubles.set(trouble::STATE, None),
            Err(e) => {
                if !self.registry.troubles.has(trouble::STATE) {
                    note!("{e:#}; it is tried again");
                }
                let lost = "folding goes on; new members and changes of settings are refused, and what was billed since \
                            is lost if the service ends";
                self.registry.troubles.set(trouble::STATE, Some(format!("{e:#}: {lost}")));
            }
        }
    }

    /// Compares the members that an adopted worker names with the members that a supervisor once admitted. A living
    /// process that was never admitted is no member, although the worker claims it: that is logged.
    fn found_members(&mut self, name: &str, members: &[Identity]) {
        for identity in members {
            let process = ProcessId { pid: identity.pid, start_ticks: identity.started };
            let is_admitted = self.registry.state.find(process).is_some_and(|member| member.group == name);
            if !is_admitted && process.is_alive() {
                note!("group {name}: the worker claims process {}, which was never admitted to it", process.pid);
            }
        }
        let place = self.registry.place.clone();
        let group = self.registry.group(name);
        let Some(worker) = &group.worker else { return };
        if worker.process.is_alive() {
            note!("group {name}: worker, process {}, is at work", worker.process.pid);
        } else {
            // We connected before the worker had called `listen`, so the peer was the ended supervisor. A new
            // connection tells the worker's process.
            group.worker = Worker::adopt(&place, name).ok().flatten();
        }
    }

    fn start_workers(&mut self) {
        let now = Instant::now();
        if self.prover.start_at(now).is_some_and(|at| at <= now) {
            match self.registry.worker_uid(PROVER) {
                Ok(uid) => self.prover.start(uid),
                Err(why) => self.prover.not_started(&why),
            }
        }
        self.tell_claims();
        self.start_web(now);
        self.balancer.start_if_due(now);
        self.sketcher.start_if_due(now);
        self.parker.start_if_due(now);
        self.start_history(now);
        self.enroller
            .set(self.wants_enroller().then(|| ["enrol", "apply", "--until-hangup"].map(str::to_owned).into()));
        self.enroller.start_if_due(now);
        let due = |g: &Group, members| g.start_at(members, now).is_some_and(|at| at <= now);
        let names: Vec<String> = self
            .registry
            .groups
            .values()
            .filter(|g| due(g, self.registry.state.members_of(&g.name)))
            .map(|g| g.name.clone())
            .collect();
        if !names.is_empty() {
            // The bound of the pool must be known before a worker is started.
            self.registry.bound_pools();
        }
        for name in names {
            let uid = self.registry.worker_uid(&name);
            let (place, mut no_home) = (self.registry.place.clone(), None);
            let group = self.registry.group(&name);
            match uid {
                Ok(uid) => group.start(&self.worker, &place, uid, &mut no_home),
                Err(why) => group.not_started(&why),
            }
            if let Some(why) = no_home.filter(|_| !std::mem::replace(&mut self.said_no_home, true)) {
                note!("workers have no control groups of their own: {why}");
            }
        }
    }

    /// Gives each user who may connect sockets of its own, and tells the prover which users and processes have places
    /// there.
    fn tell_claims(&mut self) {
        let state = &self.registry.state;
        let mut users: BTreeSet<u32> = state.members().iter().map(|member| member.uid).collect();
        let has_worker = |group: &String| self.registry.groups.get(group).is_some_and(|group| group.worker.is_some());
        // The user that the prover runs as is one of them: a part of an earlier prover (its keeper) that still follows
        // members' forked children connects to hand them on.
        let asks = |group: &String| group == PROVER || has_worker(group);
        let workers = state.worker_uids.iter().filter(|(group, _)| asks(group)).map(|(_, uid)| *uid).collect();
        self.entrances.set(self.registry.users(), &users, self.prover.is_wanted().then_some(&workers));
        users.extend(workers);
        self.prover.tell_claims(users, state.members().iter().map(|member| member.identity.pid).collect());
    }

    /// Whether this service keeps a `pagefold enrol apply` running. Attached members need one, too, also without a
    /// rule.
    fn wants_enroller(&self) -> bool {
        let is_any_attached = self.registry.state.members().iter().any(|member| member.attached_by.is_some());
        !self.options.enrol_apart && (self.registry.has_rules() || is_any_attached)
    }

    fn start_web(&mut self, now: Instant) {
        if self.web.start_at(now).is_some_and(|at| at <= now) {
            match self.registry.worker_uid(WEB) {
                Ok(uid) => {
                    self.registry.web_uid = uid;
                    self.web.start(uid);
                }
                Err(why) => self.web.not_started(&why),
            }
        }
    }

    fn start_history(&mut self, now: Instant) {
        let arguments = self.registry.config.history.clone().and_then(|history| {
            let reader = match self.registry.config.api {
                Some(_) => self.registry.worker_uid(WEB),
                None => Ok(None),
            };
            let uids = self.registry.worker_uid(HISTORY).and_then(|uid| Ok((uid, reader?)));
            match uids {
                Ok((uid, reader)) => {
                    self.registry.history_uid = uid;
                    Some(history.arguments(uid, reader))
                }
                Err(why) => {
                    if !std::mem::replace(&mut self.said_no_history, true) {
                        note!("keeping figures over time: {why}");
                    }
                    None
                }
            }
        });
        self.historian.set(arguments);
        self.historian.start_if_due(now);
    }

    /// Reads the configuration again, and takes over the parts that a running service can take over.
    fn reload(&mut self) {
        let Some(path) = self.registry.config.file.clone() else {
            note!("SIGHUP: this service has no configuration that could be read again");
            return;
        };
        let read = Config::read(&path);
        let problem = read.as_ref().err().map(|e| format!("{e:#}"));
        self.registry.trail.write_own("configuration_read", json!({ "file": path, "problem": problem }));
        match read {
            Ok(config) => {
                self.balancer.set(config.balance.as_ref().map(Balance::arguments));
                self.sketcher.set(config.sketch.as_ref().map(Sketch::arguments));
                self.parker.set(config.park.as_ref().map(Park::arguments));
                self.registry.reload(config);
                if let Some(api) = &self.registry.config.api {
                    self.web.set(api);
                }
            }
            Err(e) => note!("SIGHUP: everything stays as it was: {e:#}"),
        }
    }

    /// The work of every second. Returns whether a private service has nothing left to do.
    fn tick(&mut self) -> bool {
        self.registry.state.forget_some_dead();
        self.leftover.retain(|home| !home.remove());
        self.clients.forget_silent();
        let now = Instant::now();
        self.prover.watch(now);
        self.registry.trail.flush();
        self.registry.schedule_agents(now);
        self.look_for_troubles(now);
        if self.limits_due <= now {
            self.limits_due = now + LIMITS;
            self.registry.bound_pools();
        }
        let asks = self.bills_due <= now;
        if asks {
            self.bills_due = now + BILLS;
        }
        self.end_still_workers(now);
        let (mut ended, mut homes, place) = (Vec::new(), Vec::new(), &self.registry.place);
        for group in self.registry.groups.values_mut() {
            group.end_pace(now);
            if asks {
                let _ = group.ask_report();
            }
            let members = self.registry.state.members_of(&group.name);
            let idle = if members > 0 { None } else { Some(*group.idle_since.get_or_insert(now)) };
            group.idle_since = idle;
            if idle.is_some_and(|since| now.duration_since(since) >= self.options.linger) {
                if group.worker.is_some() {
                    ended.push(group.name.clone());
                }
                homes.extend(group.end(place));
            }
        }
        self.leftover.extend(homes);
        for name in ended {
            self.clients.reported(&mut self.registry, &name, &GroupReport::none());
        }
        self.registry.forget_ended();
        let busy = !self.registry.state.members().is_empty();
        self.idle_since = if busy { None } else { Some(self.idle_since.unwrap_or(now)) };
        // A client that is connected may be about to join.
        let over = self.idle_since.is_some_and(|since| now.duration_since(since) >= self.options.linger);
        self.options.private && over && self.clients.is_empty()
    }

    fn end_still_workers(&mut self, now: Instant) {
        let still = |group: &mut Group| Some((group.name.clone(), group.end_if_still(now)?));
        let ended: Vec<_> = self.registry.groups.values_mut().filter_map(still).collect();
        ended.into_iter().for_each(|(name, heard)| self.take_in(&name, heard));
    }

    fn look_for_troubles(&mut self, now: Instant) {
        self.registry.has_prover = self.prover.is_wanted();
        self.registry.troubles.look_at_prover(self.prover.is_missing(), now);
        self.registry.troubles.set(trouble::JOURNAL, self.registry.trail.problem());
        let has_rules = self.registry.has_rules();
        let idle = self.registry.enrolment.is_idle(has_rules, now).then(|| {
            let lost = "nobody carries out the rules by which processes are enrolled";
            if self.options.enrol_apart {
                format!("{lost}: start pagefold enrol apply (systemctl start pagefold-enrol)")
            } else {
                format!("{lost}: see the log")
            }
        });
        self.registry.troubles.set(trouble::ENROL, idle);
    }

    /// Ends the service. Members run on in any case. Workers run on for the next supervisor, or end at once with
    /// [`Options::stop_workers`].
    fn end(mut self) -> anyhow::Result<()> {
        self.prover.end();
        self.web.end();
        self.balancer.end();
        self.sketcher.end();
        self.parker.end();
        self.historian.end();
        self.enroller.end();
        // If this write fails, little is lost, such as the latest bills: changes and new members were written before
        // they took effect.
        self.write_state();
        let workers = self.registry.groups.values().filter(|g| g.worker.is_some()).count();
        if self.options.stop_workers {
            let homes: Vec<_> =
                self.registry.groups.values_mut().filter_map(|group| group.end(&self.registry.place)).collect();
            let until = Instant::now() + Duration::from_secs(2);
            let mut left = homes;
            while !left.is_empty() && Instant::now() < until {
                left.retain(|home| !home.remove());
                std::thread::sleep(Duration::from_millis(10));
            }
        } else if workers > 0 {
            note!("workers go on for 30 s, for the next supervisor; without one they end then: {workers}");
            crate::orphans::end_orphans_later(&self.registry.place);
        }
        self.entrances.end();
        self.registry.trail.write_own("service_ended", json!({ "directory": self.registry.place.dir() }));
        note!("ended");
        Ok(())
    }
}
