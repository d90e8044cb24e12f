//! The rung `pace` of the pressure ladder: while it lasts, some groups fold faster or scan slower.
//!
//! A pace lapses in the service unless this process repeats it, because this process may be killed at any instant.

use super::world::World;
use api::client::Service;
use balance::{PaceChange, Paces};
use cli::say;
use lend::{Entry, Paced, Turn};
use std::time::Duration;

/// Time for which a pace stays in force, beyond two rounds: 60 s.
const STANDS_S: u32 = 60;

impl World<'_> {
    /// Changes the paces of groups where the pressure ladder requires it, and sends the paces in force to the services
    /// again. `every` is the time between two rounds.
    pub fn pace(&self, paces: &mut Paces, every: Duration, turn: &Turn) -> anyhow::Result<Vec<Paced>> {
        let changes = paces.see(self.at(), &self.facts);
        if changes.is_empty() && paces.in_force().next().is_none() {
            return Ok(Vec::new());
        }
        let services = self.services().unwrap_or_default();
        let round_s = u32::try_from(every.as_secs()).unwrap_or(u32::MAX);
        let for_s = round_s.saturating_mul(2).saturating_add(STANDS_S);
        let tell = |group: &str, pages_per_s| tell(&services, group, pages_per_s, for_s);
        let is_changed = |group: &str| changes.iter().any(|change| change.group == group);
        // A service that does not answer is asked again in the next round.
        paces
            .in_force()
            .filter(|(group, _)| !is_changed(group))
            .for_each(|(group, pages)| _ = tell(group, Some(pages)));
        let paced = |change: PaceChange| {
            let problem = tell(&change.group, change.pages_per_s).err().map(|error| cli::exit::in_words(&error));
            Paced { change, problem }
        };
        let all: Vec<Paced> = changes.iter().cloned().map(paced).collect();
        for paced in &all {
            self.ledger.write_down(turn, Entry::Pace { at_s: host::boot_clock_s(), paced })?;
            say!("pagefold: memory: {}", in_words(paced));
        }
        Ok(all)
    }
}

/// Sends a group's pace to the services that have the group. `None` ends the pace. Fails if no service has the group.
fn tell(services: &[Service], group: &str, pages_per_s: Option<u32>, for_s: u32) -> anyhow::Result<()> {
    let mut is_told = false;
    for service in services {
        if service.groups()?.iter().any(|line| line.name == group) {
            service.pace(group, pages_per_s, for_s)?;
            is_told = true;
        }
    }
    anyhow::ensure!(is_told, "no service has the group {group}");
    Ok(())
}

fn in_words(Paced { change, problem }: &Paced) -> String {
    let pages = change.pages_per_s.map_or_else(String::new, |pages| format!(", {pages} pages a second"));
    let but = problem.as_ref().map_or_else(String::new, |problem| format!("; {problem}"));
    format!("group {}: {} pace{pages}: {}{but}", change.group, change.pace.name(), change.reason)
}
