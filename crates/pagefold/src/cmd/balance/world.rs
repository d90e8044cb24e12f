//! The guests and facts that `pagefold balance` works with.

use super::Common;
use crate::cmd::which::membership;
use anyhow::Context;
use api::ask::MemberLine;
use api::client::Service;
use api::promise::{Look, Promises};
use api::shown;
use balance::{
    Assurance, Facts, GroupFacts, History, Ladder, Params, Plan, Policy, Rung, RungEvent, Standing, Step, Stillness,
    plan,
};
use cli::say;
use guest::{Guest, Survey};
use host::ProcessId;
use lend::{Entry, Gatherer, Hold, Ledger, Means, Outcome, Rules, Saved, Turn, carry_out, resume_left, wake_left};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Pause between two gatherings of facts, from which rates are computed: 2.5 s. Guests' balloons report statistics
/// every 2 s.
const BETWEEN_LOOKS: Duration = Duration::from_millis(2500);

/// Pause between two reads of the host's available memory: 200 ms. If guests write many folded pages at once, the
/// memory that is never lent is used up in a second.
const GLANCE_EVERY: Duration = Duration::from_millis(200);

/// Time after which every process of the host is read in full again: 1 minute. Until then, only the state of known ones
/// is read.
const SURVEY_EVERY: Duration = Duration::from_secs(60);

/// Settings with which the facts of a round are recorded for later admissions.
#[derive(Clone, Copy)]
pub struct Keep {
    /// Time between two rounds of balancing.
    pub every: Duration,
    /// The policy of admission where nobody names another one.
    pub assurance: Assurance,
}

/// Guests, their facts, and the history of steps.
pub struct World<'a> {
    common: &'a Common,
    /// Processes of the host, and the time at which each of them was read.
    survey: Option<(Survey, Instant)>,
    pub guests: Vec<Guest>,
    pub facts: Facts,
    /// When facts were last gathered: the begin of that, in milliseconds since the host started.
    began_ms: u64,
    pub gatherer: Gatherer,
    pub ledger: Ledger,
    pub history: History,
}

impl<'a> World<'a> {
    /// Without guests and facts yet. A command without rules of its own takes the rules of the process that balances
    /// continuously.
    pub fn new(common: &'a Common, is_balancer: bool) -> anyhow::Result<Self> {
        let ledger = Ledger::open(common.service.meant().place().dir())?;
        let own = common.rules();
        let rules = ledger.rules().filter(|_| !is_balancer && own == Rules::default()).cloned().unwrap_or(own);
        Ok(Self {
            common,
            survey: None,
            guests: Vec::new(),
            facts: Facts::default(),
            began_ms: 0,
            gatherer: Gatherer::new(rules),
            ledger,
            history: History::default(),
        })
    }

    /// The directory of the service whose ledger this is.
    pub fn place_dir(&self) -> PathBuf {
        self.common.service.meant().place().dir().to_owned()
    }

    pub fn at(&self) -> Duration {
        self.gatherer.at()
    }

    /// Gathers facts twice, so that rates are known.
    pub fn look_twice(&mut self) -> anyhow::Result<()> {
        self.look()?;
        self.look_again()
    }

    /// Gathers facts again, after balloons have reported newer statistics. Does nothing if no guest has a balloon.
    pub fn look_again(&mut self) -> anyhow::Result<()> {
        if self.guests.iter().any(|guest| guest.facts.qemu.as_ref().is_some_and(|facts| facts.balloon)) {
            std::thread::sleep(BETWEEN_LOOKS);
            self.look()?;
        }
        Ok(())
    }

    /// The services that the command line or the environment means.
    pub fn services(&self) -> anyhow::Result<Vec<Service>> {
        Service::find(&self.common.service.meant())
    }

    /// Finds the guests, and gathers the facts of guests, groups and host.
    pub fn look(&mut self) -> anyhow::Result<()> {
        let common = self.common;
        self.began_ms = host::boot_clock_ms();
        let services = self.services();
        let asked = ask_for_members(services.as_deref().unwrap_or_default())?;
        let (survey, read) = match self.survey.take() {
            Some((survey, read)) if read.elapsed() < SURVEY_EVERY => (survey.renewed(), read),
            _ => (Survey::take(), Instant::now()),
        };
        let (survey, _) = self.survey.insert((survey.context("cannot look for guests")?, read));
        self.guests = common.selection.resolve_in(survey, &|| match &services {
            Ok(_) if asked.is_empty() => Ok(None),
            Ok(_) => Ok(Some(asked.iter().flat_map(|(_, members)| members.iter().map(membership)).collect())),
            Err(error) => Err(anyhow::anyhow!("{}", cli::exit::in_words(error))),
        })?;
        for guest in &mut self.guests {
            // If a group folds the guest, the guest's savings are in that group.
            if let Some(group) = &guest.facts.folded_in {
                guest.group.clone_from(group);
            }
        }
        self.facts = self.gatherer.gather(&self.guests, &self.ledger, &saved(&asked)?)?;
        self.history.keep(&self.facts);
        Ok(())
    }

    /// Opens the promises, and updates the reservations in the facts from them.
    pub fn promises(&mut self) -> anyhow::Result<Promises> {
        let promises = self.ledger.promises()?;
        let runs = |name: &str| self.facts.guests.iter().any(|guest| guest.name == name);
        self.facts.reservations = promises.reservations(self.began_ms, runs);
        Ok(promises)
    }

    /// Plans a round. With `keep`, facts and growth are stored for admissions under the lock of the promises, so that
    /// no memory is both lent and promised. Without `keep`, nothing is stored; and if the plan lends memory, the facts
    /// that were stored last are dropped, so that none of this memory is promised by them.
    pub fn plan(
        &mut self,
        policy: &dyn Policy,
        at: Duration,
        params: &Params,
        keep: Option<Keep>,
    ) -> anyhow::Result<Plan> {
        let mut promises = self.promises()?;
        let plan = plan(&self.facts, policy, &self.history, at, params);
        let Some(keep) = keep else {
            return if plan.grows.is_empty() { Ok(plan) } else { promises.forget_look().map(|()| plan) };
        };
        let look = Look {
            boot: host::boot_id()?,
            balancer: ProcessId::of(std::process::id())?,
            began_ms: self.began_ms,
            every_s: keep.every.as_secs(),
            within: self.gatherer.rules().within.clone(),
            assurance: keep.assurance,
            standing: Standing::of(&self.facts, &plan.grows, params),
        };
        promises.keep(&look, |name| self.facts.guests.iter().any(|guest| guest.name == name))?;
        Ok(plan)
    }

    /// Notes guests whose balloons have reached their target. By this note, later rounds know that these balloons work.
    fn note_arrived(&mut self, turn: &Turn) -> anyhow::Result<()> {
        let Self { guests, facts, ledger, .. } = self;
        let has_arrived = |guest: &&Guest| {
            let of = facts.guests.iter().find(|of| of.id == guest.id && of.can_balloon());
            of.is_some_and(|of| {
                of.target_bytes.is_some_and(|target| balance::has_arrived(of.ram_bytes, of.actual_bytes, target))
            })
        };
        ledger.note_arrived(turn, guests.iter().filter(has_arrived))
    }

    /// Whether the last round had nothing to do and available memory has hardly changed since. Then this round is
    /// skipped.
    pub fn is_still(&self, stillness: &mut Stillness) -> bool {
        let available = self.gatherer.available_bytes();
        available.is_some_and(|available| stillness.passes_over(&self.facts.host, available))
    }

    /// Waits for the next round. Returns at once if available memory falls below the host's floor meanwhile, or below
    /// half of the floor.
    pub fn rest(&mut self, pause: Duration) {
        let (floor, end) = (self.facts.host.floor_bytes, Instant::now() + pause);
        let depth = |available: u64| u64::from(available < floor) + u64::from(available < floor / 2);
        let was = depth(self.facts.host.available_bytes);
        let mut last = None;
        loop {
            let now = Instant::now();
            let Some(available) = self.gatherer.available_bytes() else { return };
            if let Some((at, before)) = last {
                let ms = u64::try_from(now.duration_since(at).as_millis()).unwrap_or(u64::MAX).max(1);
                let fallen = u64::saturating_sub(before, available);
                self.facts.host.falling_bytes_per_s = fallen.saturating_mul(1000) / ms;
            }
            last = Some((now, available));
            if now >= end || depth(available) > was {
                return;
            }
            std::thread::sleep(GLANCE_EVERY.min(end - now));
        }
    }

    /// Updates the pressure ladder from the host's memory. Returns the step on the ladder, if there was one.
    pub fn climb(&mut self, ladder: &mut Ladder, turn: &Turn) -> anyhow::Result<Option<RungEvent>> {
        let before = ladder.rung();
        let event = ladder.see(self.at(), &self.facts);
        self.facts.host.rung = ladder.rung();
        self.ledger.note_rung(turn, ladder.rung())?;
        if let Some(event) = &event {
            self.ledger.write_down(turn, Entry::Rung { at_s: host::boot_clock_s(), event })?;
            say!("pagefold: memory: {}: {}", event.rung.name(), event.reason);
            if event.rung == Rung::Reclaim && before < Rung::Reclaim {
                self.reclaim(turn)?;
            }
        }
        Ok(event)
    }

    /// Has control groups give back page cache, as much as would end the pressure.
    fn reclaim(&mut self, turn: &Turn) -> anyhow::Result<()> {
        let rules = self.gatherer.rules();
        let bytes = balance::relief_bytes(&self.facts.host);
        let reclaimed = lend::reclaim(&rules.caches(&self.guests), bytes, rules.within.is_some());
        self.ledger.write_down(turn, Entry::Reclaim { at_s: host::boot_clock_s(), reclaimed: &reclaimed })?;
        let (freed, count) = (reclaimed.freed_bytes >> 20, reclaimed.groups.len());
        let by = reclaimed.way.map_or_else(String::new, |way| format!(" by {way}"));
        let but = reclaimed.problem.as_ref().map_or_else(String::new, |problem| format!("; {problem}"));
        say!("pagefold: memory: {freed} MiB of page cache are back from control groups ({count}){by}{but}");
        Ok(())
    }

    /// Waits for the lock of the ledger. Resumes guests that a killed process has left paused, and wakes those that it
    /// had not finished parking.
    pub fn take_turn(&mut self) -> anyhow::Result<Turn> {
        let turn = self.ledger.take_turn()?;
        resume_left(&mut self.ledger, &turn)?;
        wake_left(self.common.service.meant().place().dir());
        Ok(turn)
    }

    /// Pauses guests where balance requires it, by the facts that were gathered last and the memory available now.
    pub fn pause(&mut self, hold: &mut Hold, turn: &Turn, params: &Params) -> anyhow::Result<()> {
        let Some(available) = self.gatherer.available_bytes() else { return Ok(()) };
        self.facts.host.available_bytes = available;
        let pauses = balance::pauses(&self.facts, params, |guest| self.ledger.has_run(guest));
        hold.pause(&pauses, &self.guests, &mut self.ledger, turn)
    }

    /// Records the outcomes of steps that were made at time `at`.
    pub fn learn(&mut self, outcomes: &[Outcome], at: Duration) {
        for outcome in outcomes.iter().filter(|outcome| outcome.problem.is_none()) {
            self.history.note(&outcome.step, at);
        }
        // A step whose size the guest was never told says nothing about its balloon driver.
        for outcome in outcomes.iter().filter(|outcome| outcome.is_told) {
            self.gatherer.made(&self.facts, outcome, at);
        }
    }

    /// Carries out the two phases of a plan. Guests that have not reached their size are told it again. Paused guests
    /// are resumed meanwhile, or at the latest after the first phase.
    pub fn carry_out(
        &mut self,
        phases: (&[Step], &[Step]),
        hold: &mut Hold,
        turn: &Turn,
        params: &Params,
    ) -> anyhow::Result<Vec<Outcome>> {
        self.note_arrived(turn)?;
        let reminders = self.gatherer.due_reminders(&self.facts);
        let gatherer = &self.gatherer;
        let available = || gatherer.available_bytes().unwrap_or(0);
        let (guests, ledger, facts) = (&self.guests, &mut self.ledger, &self.facts);
        let mut means = Means { guests, ledger, turn, params, hold, facts, available: &available };
        means.remind(&reminders)?;
        carry_out(phases, &mut means)
    }
}

/// Services, each with its members.
type Asked<'a> = Vec<(&'a Service, Vec<MemberLine>)>;

fn ask_for_members(services: &[Service]) -> anyhow::Result<Asked<'_>> {
    services.iter().map(|service| Ok((service, service.members()?))).collect()
}

/// Savings of all groups, as `group show` has them; none without a service.
fn saved(asked: &Asked) -> anyhow::Result<Saved> {
    let mut saved = Saved::default();
    for (service, members) in asked {
        for line in service.groups()? {
            let Ok(mut state) = service.show(&line.name) else { continue };
            shown::complete(&mut state, members, |_, _| None);
            let bill = &state.report.bill;
            let figures = GroupFacts {
                saved_bytes: state.report.savings.saved_bytes(),
                cpu_s: bill.worker_cpu_s + bill.agent_cpu_s,
                pages_hashed: bill.pages_hashed,
                folds: bill.folds,
                short_folds: bill.short_folds,
                scan_rate: state.settings.scan_rate,
            };
            saved.groups.insert(line.name, figures);
            saved.guests.extend(state.report.members.iter().map(|member| (member.pid, member.saved_bytes)));
        }
    }
    Ok(saved)
}
