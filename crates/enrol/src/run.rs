//! [`run`], the loop that carries out the rules, and [`plan`], which only says what they would do.

use crate::attach::Order;
use crate::crew::Crew;
use crate::decide::{Rules, Standing, Verdict};
use crate::facts::{Facts, Looker};
use crate::watch::Watch;
use anyhow::Context;
use api::client::Service;
use api::enrol::{MOST_NOT_ATTACHED, MOST_REASON, NotAttached, Rule};
use api::place::Place;
use host::ProcessId;
use serde::Serialize;
use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Time between two looks at the processes of the host: 2 s.
const EVERY: Duration = Duration::from_secs(2);
/// Time between two checks whether the `pagefold-attach` that serves a member was killed: 10 s.
const LEFT_ALONE: Duration = Duration::from_secs(10);
/// Age from which on a process that runs one of Pagefold's own programs is taken to go on doing so: 30 s. A younger one
/// may be about to execute another program (`execve`), as `pagefold run` does.
const YOUNG_S: u64 = 30;

/// A process that a rule fits, and the decision about it.
#[derive(Debug, Serialize)]
pub struct Planned {
    /// Its pid.
    pub pid: u32,
    /// The file name of its program.
    pub program: String,
    /// The group that the rule names.
    pub group: String,
    /// The rule.
    pub rule: String,
    /// `member`, `attach` or `wait`.
    pub decision: &'static str,
    /// The reason of `wait`.
    pub why: Option<String>,
    /// Bytes of its private memory.
    pub private_bytes: u64,
}

/// Lists every process that a rule fits, with the decision. For a process to be attached, `program` checks by a dry run
/// whether it could be.
///
/// # Errors
/// The service does not answer, or processes cannot be listed.
pub fn plan(service: &Service, program: &Path) -> anyhow::Result<Vec<Planned>> {
    let rules = Rules::new(service.rules(None)?);
    let (mut looker, members) = (Looker::new(), members(service)?);
    let mut all = Vec::new();
    for pid in host::pids()? {
        let Some(facts) = looker.look(pid, rules.want_names()) else { continue };
        let standing = Standing { is_member: members.contains(&facts.process()), failed: None };
        let (rule, decision, why) = match rules.decide(&facts, &standing) {
            Verdict::Nothing => continue,
            Verdict::Member(rule) => (rule, "member", None),
            Verdict::Soon(rule) => (rule, "wait", Some("it has just started".to_owned())),
            Verdict::Wait(rule, why, _) => (rule, "wait", Some(why)),
            Verdict::Attach(rule, all) => {
                let order = order(&facts, rule, all, true);
                let refused = order.carry_out(program, service.place.dir())?.err();
                (rule, if refused.is_some() { "wait" } else { "attach" }, refused.map(|refused| refused.why))
            }
        };
        let (group, rule) = (rule.group.clone(), rule.to_string());
        let Facts { pid, program, private_bytes, .. } = facts;
        all.push(Planned { pid, program, group, rule, decision, why, private_bytes });
    }
    Ok(all)
}

/// Carries out the rules of the service at `place`, for ever.
///
/// # Errors
/// Processes cannot be listed.
pub fn run(place: &Place, program: PathBuf) -> anyhow::Result<()> {
    let mut enroller = Enroller {
        place: place.clone(),
        service: None,
        rules: Rules::default(),
        looker: Looker::new(),
        watch: Watch::default(),
        crew: Crew::new(program, place.dir().to_owned()),
        not_attached: BTreeMap::new(),
        members_due: Instant::now(),
    };
    let mut due = Instant::now();
    loop {
        if due <= Instant::now() {
            due = Instant::now() + EVERY;
            // If the service does not answer, it may be restarting. Nothing new is ordered until it answers.
            if enroller.ask_rules().is_ok() {
                enroller.look()?;
                enroller.look_beside_members();
            }
        }
        enroller.start();
        if let Some((process, failed)) = enroller.crew.done(due.saturating_duration_since(Instant::now())) {
            enroller.done(process, failed);
        }
        enroller.crew.collect();
    }
}

/// The state of [`run`].
struct Enroller {
    place: Place,
    service: Option<Service>,
    rules: Rules,
    looker: Looker,
    watch: Watch,
    crew: Crew,
    /// Processes that a rule fits and that are not attached, by pid. If an attempt failed, also the time of the next
    /// one.
    not_attached: BTreeMap<u32, (NotAttached, Option<Instant>)>,
    /// The time of the next check whether a `pagefold-attach` that serves a member was killed.
    members_due: Instant,
}

impl Enroller {
    /// Reports to the service the processes that are not attached, and gets its rules.
    fn ask_rules(&mut self) -> anyhow::Result<()> {
        let service = match self.service.take() {
            Some(service) => service,
            None => Service::connect(self.place.clone())?,
        };
        let now = Instant::now();
        let told = self.not_attached.values().take(MOST_NOT_ATTACHED.0).map(|(one, again)| NotAttached {
            again_s: again.map(|again| again.saturating_duration_since(now).as_secs()),
            ..one.clone()
        });
        let rules = Rules::new(service.rules(Some(told.collect()))?);
        if rules != self.rules {
            self.watch.look_at_all(now);
            self.not_attached.clear();
            self.rules = rules;
        }
        self.service = Some(service);
        Ok(())
    }

    /// Looks at processes that are due, and orders those that are to be attached.
    fn look(&mut self) -> anyhow::Result<()> {
        if self.rules.is_empty() {
            return Ok(());
        }
        let (pids, now) = (host::pids().context("cannot list processes")?, Instant::now());
        let due = self.watch.due(&pids, now);
        self.not_attached.retain(|pid, _| pids.binary_search(pid).is_ok());
        self.looker.look_anew();
        let mut members = None;
        for pid in due {
            let Some(facts) = self.looker.look(pid, self.rules.want_names()) else {
                self.watch.looked(pid, 0, now);
                continue;
            };
            // Pagefold's own processes are rarely looked at: there is a `pagefold-attach` for each attached member.
            // Young ones are, because they may be about to execute another program.
            if facts.is_own && facts.age_s >= YOUNG_S {
                self.watch.rests(pid, facts.start_ticks, now);
                continue;
            }
            let nobody = Standing { is_member: false, failed: self.watch.failed(&facts, now) };
            if self.rules.decide(&facts, &nobody) == Verdict::Nothing {
                self.not_attached.remove(&pid);
                self.watch.looked(pid, facts.start_ticks, now);
                continue;
            }
            let Some(service) = &self.service else { return Ok(()) };
            if members.is_none() {
                members = Some(self::members(service)?);
            }
            let is_member = members.as_ref().is_some_and(|members| members.contains(&facts.process()));
            self.follow(&facts, &Standing { is_member, ..nobody }, now);
        }
        Ok(())
    }

    /// Orders a new `pagefold-attach` for each member whose old one was killed.
    fn look_beside_members(&mut self) {
        let now = Instant::now();
        let Some(service) = self.service.as_ref().filter(|_| self.members_due <= now) else { return };
        self.members_due = now + LEFT_ALONE;
        for member in service.members().unwrap_or_default() {
            let process = ProcessId { pid: member.identity.pid, start_ticks: member.identity.started };
            let may = !self.crew.is_ordered(process) && !self.watch.waits(process, now);
            if may && member.is_left_alone() && process.is_alive() {
                let (name, all_anonymous, by_rule, dry_run, undo) = (None, false, false, false, false);
                let (group, via) = (member.group, member.via);
                self.crew.order(Order {
                    process,
                    group,
                    name,
                    all_anonymous,
                    by_rule,
                    dry_run,
                    via,
                    undo,
                    again: true,
                });
            }
        }
    }

    /// Decides about a process, and carries the decision out.
    fn follow(&mut self, facts: &Facts, standing: &Standing, now: Instant) {
        let (pid, start) = (facts.pid, facts.start_ticks);
        let Self { rules, watch, crew, not_attached, .. } = self;
        match rules.decide(facts, standing) {
            Verdict::Nothing => watch.looked(pid, start, now),
            Verdict::Member(_) => {
                not_attached.remove(&pid);
                watch.rests(pid, start, now);
            }
            Verdict::Soon(_) => watch.soon(pid, start, now),
            Verdict::Wait(rule, why, again_s) => {
                let again = again_s.map(|seconds| now + Duration::from_secs(seconds));
                not_attached.insert(pid, (not_attached_of(facts, &rule.group, why), again));
                watch.looked(pid, start, now);
            }
            Verdict::Attach(rule, all) => {
                watch.busy(pid, start, now);
                crew.order(order(facts, rule, all, false));
            }
        }
    }

    /// Starts waiting orders. Each process is decided about again first, because its order may have waited for long. An
    /// order that would not be given any more is dropped.
    fn start(&mut self) {
        let Self { looker, rules, watch, crew, .. } = self;
        crew.start(|order| {
            if order.again {
                return true;
            }
            let facts =
                looker.look(order.process.pid, rules.want_names()).filter(|facts| facts.process() == order.process);
            let is_same = facts.is_some_and(|facts| {
                let verdict = rules.decide(&facts, &Standing::default());
                matches!(verdict, Verdict::Attach(rule, all)
                    if (&rule.group, all, rule.via) == (&order.group, order.all_anonymous, order.via))
            });
            if !is_same {
                watch.tried(order.process.pid, order.process.start_ticks, None, Instant::now());
                watch.soon(order.process.pid, order.process.start_ticks, Instant::now());
            }
            is_same
        });
    }

    /// Notes the result of an order. If it failed, the process is listed as not attached, with the reason and the next
    /// attempt.
    fn done(&mut self, process: ProcessId, failed: Option<String>) {
        let now = Instant::now();
        let wait = self.watch.tried(process.pid, process.start_ticks, failed.clone(), now);
        let (Some(why), Some(wait)) = (failed, wait) else {
            self.not_attached.remove(&process.pid);
            return;
        };
        let facts = self.looker.look(process.pid, self.rules.want_names()).filter(|facts| facts.process() == process);
        let Some(facts) = facts else { return };
        if let Verdict::Attach(rule, _) = self.rules.decide(&facts, &Standing::default()) {
            self.not_attached.insert(process.pid, (not_attached_of(&facts, &rule.group, why), Some(now + wait)));
        }
    }
}

fn order(facts: &Facts, rule: &Rule, all_anonymous: bool, dry_run: bool) -> Order {
    let (process, group) = (facts.process(), rule.group.clone());
    let name = facts.member_name();
    Order { process, group, name, all_anonymous, by_rule: true, dry_run, via: rule.via, undo: false, again: false }
}

fn not_attached_of(facts: &Facts, group: &str, why: String) -> NotAttached {
    let why = why.chars().take(MOST_REASON).collect();
    let (program, group) = (facts.program.clone(), group.to_owned());
    NotAttached { pid: facts.pid, program, group, family: None, why, again_s: None }
}

fn members(service: &Service) -> anyhow::Result<HashSet<ProcessId>> {
    let process =
        |member: api::ask::MemberLine| ProcessId { pid: member.identity.pid, start_ticks: member.identity.started };
    Ok(service.members()?.into_iter().map(process).collect())
}
