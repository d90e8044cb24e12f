//! The rung `advise` of the pressure ladder: a guest that should go to another host. Nobody moves it but the operator.

use super::world::World;
use crate::cmd::migrate;
use balance::{GuestFacts, Rung};
use cli::say;
use cli::size::bytes;
use guest::Guest;
use lend::{Entry, Movable, Proposed, Turn};

impl World<'_> {
    /// Proposes a guest for another host, where that is due.
    pub fn propose(&mut self, turn: &Turn) -> anyhow::Result<Option<Proposed>> {
        let mut proposals = self.ledger.proposals().clone();
        let can_go = |facts: &GuestFacts| self.guest(&facts.id).is_some_and(|guest| self.can_go(guest));
        let Some(proposal) = proposals.see(self.gatherer.at_s(), &self.facts, &can_go) else { return Ok(None) };
        self.ledger.note_proposals(turn, proposals)?;
        let Some(guest) = self.guest(&proposal.guest) else { return Ok(None) };
        let proposed = Proposed::of(proposal, guest);
        self.ledger.write_down(turn, Entry::Proposal { at_s: host::boot_clock_s(), proposed: &proposed })?;
        say!("pagefold: memory: {}", in_words(&proposed));
        Ok(Some(proposed))
    }

    /// The proposal that stands: its guest is there, and the host is short of memory.
    pub fn proposed(&self) -> Option<Proposed> {
        let proposal = self.ledger.proposals().last().filter(|_| self.facts.host.rung >= Rung::Advise)?;
        Some(Proposed::of(proposal.clone(), self.guest(&proposal.guest)?))
    }

    fn guest(&self, id: &str) -> Option<&Guest> {
        self.guests.iter().find(|guest| guest.id == id)
    }

    /// Whether nothing speaks against moving a guest that can be told without asking its QEMU.
    fn can_go(&self, guest: &Guest) -> bool {
        Movable::of(guest).is_ok() && migrate::check_outside(&self.place_dir(), guest).is_ok()
    }
}

/// A proposal in a sentence.
pub fn in_words(Proposed { proposal, command }: &Proposed) -> String {
    let [frees, costs] = [proposal.frees_bytes, proposal.costs_bytes].map(bytes);
    format!(
        "moving {} to another host frees {frees} here, and takes {costs} there: {command}",
        cli::printable(&proposal.guest)
    )
}

/// A proposal that stands, at a time in seconds since the host started.
pub fn standing(proposed: &Proposed, now_s: u64) -> String {
    let (ago, next) = (now_s.saturating_sub(proposed.proposal.first_s), proposed.proposal.next_s.saturating_sub(now_s));
    let words = in_words(proposed);
    format!("{words}\nproposed first {} min ago, the next time in {} min if memory is short then", ago / 60, next / 60)
}
