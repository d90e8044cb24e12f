//! The guests and facts that `pagefold balance` looks at.

use super::Common;
use crate::cmd::absent::why_absent;
use api::client::Service;
use api::shown;
use balance::{Facts, GroupFacts, History, Ladder, Params, RungEvent, Step};
use cli::say;
use guest::Guest;
use lend::{Entry, Gatherer, Ledger, Means, Outcome, Rules, Saved, Turn, carry_out};
use std::time::{Duration, Instant};

/// Pause between the two looks that a rate takes: guests tell statistics every 2 s.
const BETWEEN_LOOKS: Duration = Duration::from_millis(2500);

/// Pause between two glances at the host's memory: 500 ms. A loan must be back in 10 s.
const GLANCE_EVERY: Duration = Duration::from_millis(500);

/// Guests, their facts, and what was done.
pub struct World<'a> {
    common: &'a Common,
    pub guests: Vec<Guest>,
    pub facts: Facts,
    pub gatherer: Gatherer,
    pub ledger: Ledger,
    pub history: History,
}

impl<'a> World<'a> {
    /// A world that was not looked at.
    pub fn new(common: &'a Common) -> anyhow::Result<Self> {
        let ledger = Ledger::open(common.service.meant().place().dir())?;
        let own = common.rules();
        let rules = ledger.rules().filter(|_| own == Rules::default()).cloned().unwrap_or(own);
        Ok(Self {
            common,
            guests: Vec::new(),
            facts: Facts::default(),
            gatherer: Gatherer::new(rules),
            ledger,
            history: History::default(),
        })
    }

    pub fn at(&self) -> Duration {
        self.gatherer.at()
    }

    /// Looks twice, so that there are rates.
    pub fn look_twice(&mut self) -> anyhow::Result<()> {
        self.look()?;
        if self.guests.iter().any(|guest| guest.facts.qemu.as_ref().is_some_and(|facts| facts.balloon)) {
            std::thread::sleep(BETWEEN_LOOKS);
            self.look()?;
        }
        Ok(())
    }

    /// Looks at guests, groups and host.
    pub fn look(&mut self) -> anyhow::Result<()> {
        let common = self.common;
        self.guests = common.selection.resolve(&|| common.service.members())?;
        for guest in &mut self.guests {
            // A group that folds a guest is the group whose savings are its own.
            if let Some(group) = &guest.facts.folded_in {
                guest.group.clone_from(group);
            }
        }
        self.facts = self.gatherer.gather(&self.guests, &self.ledger, &saved(common)?)?;
        self.history.keep(&self.facts);
        Ok(())
    }

    /// Waits for the next round. It begins at once where the host falls below its floor meanwhile.
    pub fn rest(&self, pause: Duration) {
        let (floor, end) = (self.facts.host.floor_bytes, Instant::now() + pause);
        let was_above = self.facts.host.available_bytes >= floor;
        let is_below = || was_above && self.gatherer.available_bytes().is_some_and(|available| available < floor);
        while !is_below() && Instant::now() < end {
            std::thread::sleep(GLANCE_EVERY.min(end.saturating_duration_since(Instant::now())));
        }
    }

    /// Takes the host's memory into account, and tells of a step on the ladder.
    pub fn climb(&mut self, ladder: &mut Ladder, turn: &Turn) -> anyhow::Result<Option<RungEvent>> {
        let event = ladder.see(self.at(), &self.facts);
        self.facts.host.rung = ladder.rung();
        self.ledger.note_rung(turn, ladder.rung())?;
        if let Some(event) = &event {
            self.ledger.write_down(turn, &Entry::Rung { at_s: host::boot_clock_s(), event })?;
            say!("pagefold: memory: {}: {}", event.rung.name(), event.reason);
        }
        Ok(event)
    }

    /// Carries out the two phases of a plan, and tells guests again that have not done as they were told.
    pub fn carry_out(
        &mut self,
        phases: (&[Step], &[Step]),
        turn: &Turn,
        params: &Params,
    ) -> anyhow::Result<Vec<Outcome>> {
        let reminders = self.gatherer.due_reminders(&self.facts);
        let mut means = Means { guests: &self.guests, ledger: &mut self.ledger, turn, params };
        means.remind(&reminders)?;
        carry_out(phases, &mut means)
    }
}

/// Savings of all groups, as `group show` has them; none without a service.
fn saved(common: &Common) -> anyhow::Result<Saved> {
    let mut saved = Saved::default();
    for service in Service::find(&common.service.meant()).unwrap_or_default() {
        let members = service.members()?;
        for line in service.groups()? {
            let Ok(mut state) = service.show(&line.name) else { continue };
            shown::complete(&mut state, &members, why_absent);
            let bill = &state.report.bill;
            let (saved_bytes, cpu_s) = (state.report.savings.saved_bytes(), bill.worker_cpu_s + bill.agent_cpu_s);
            saved.groups.insert(line.name, GroupFacts { saved_bytes, cpu_s });
            saved.guests.extend(state.report.members.iter().map(|member| (member.pid, member.saved_bytes)));
        }
    }
    Ok(saved)
}
