//! The rung `advise` of the pressure ladder: a guest is proposed for another host. If a rule has a destination for it,
//! `pagefold migrate` is started at once; else the operator has to move it.

use super::Common;
use super::world::World;
use crate::cmd::migrate;
use balance::{GuestFacts, Rung};
use cli::say;
use cli::size::bytes;
use guest::{Guest, Leaving};
use lend::{Entry, Movable, Proposed, Turn};
use std::process::{Child, Command, Stdio};

/// Most page-table entries of folded pages that are read for the figures of a proposal: 2^20, as many as 4 GiB have.
/// Proposals are made while memory is short, and each slot that is found takes some.
const MOST_MEASURED_PAGES: u64 = 1 << 20;

impl World<'_> {
    /// Proposes a guest for another host, and records the proposal; `None` if none is due.
    pub fn propose(&mut self, turn: &Turn) -> anyhow::Result<Option<Proposed>> {
        let mut proposals = self.ledger.proposals().clone();
        let can_go = |facts: &GuestFacts| self.guest(&facts.id).is_some_and(|guest| self.can_go(guest));
        let Some(made) = proposals.see(self.gatherer.at_s(), &self.facts, &can_go) else { return Ok(None) };
        // `pagefold migrate --dry-run` measures by the same function. If more pages are folded, the proposal keeps
        // the figures that were gathered last.
        if let Some(leaving) = self.guest(&made.guest).and_then(|guest| Leaving::of(guest, 0, MOST_MEASURED_PAGES).ok())
        {
            proposals.measured(leaving.frees_bytes, leaving.takes_bytes);
        }
        let proposal = proposals.last().cloned().unwrap_or(made);
        self.ledger.note_proposals(turn, proposals)?;
        let Some(guest) = self.guest(&proposal.guest) else { return Ok(None) };
        let proposed = Proposed::of(proposal, guest, self.destination(guest));
        self.ledger.write_down(turn, Entry::Proposal { at_s: host::boot_clock_s(), proposed: &proposed })?;
        say!("pagefold: memory: {}", in_words(&proposed));
        Ok(Some(proposed))
    }

    /// The proposal made last; `None` if its guest has gone, or the host is not short of memory any more.
    pub fn proposed(&self) -> Option<Proposed> {
        let proposal = self.ledger.proposals().last().filter(|_| self.facts.host.rung >= Rung::Advise)?;
        let guest = self.guest(&proposal.guest)?;
        Some(Proposed::of(proposal.clone(), guest, self.destination(guest)))
    }

    fn destination(&self, guest: &Guest) -> Option<&str> {
        self.gatherer.rules().destination(guest, &self.guests)
    }

    fn guest(&self, id: &str) -> Option<&Guest> {
        self.guests.iter().find(|guest| guest.id == id)
    }

    /// Whether a guest can be moved, as far as can be told without asking its QEMU.
    fn can_go(&self, guest: &Guest) -> bool {
        Movable::of(guest).is_ok() && migrate::check_outside(&self.place_dir(), guest).is_ok()
    }
}

/// The `pagefold migrate` that this process has started. It goes on if this process is killed.
#[derive(Default)]
pub struct Mover(Option<Child>);

impl Mover {
    /// Moves a guest that was just proposed, if there is a destination for it and no other move is under way. The
    /// journal of the move tells how it ended.
    pub fn go(&mut self, proposed: Option<&Proposed>, common: &Common) {
        self.0.take_if(|child| child.try_wait().is_ok_and(|ended| ended.is_some()));
        let Some(proposed) = proposed.filter(|proposed| proposed.to.is_some() && self.0.is_none()) else { return };
        let mut command = Command::new(cli::OWN_PROGRAM);
        command.args(proposed.command.splitn(5, ' ').skip(1)).args(common.service.words());
        command.args(common.move_within.iter().flat_map(|within| ["--within".to_owned(), within.to_string()]));
        command.stdin(Stdio::null()).stdout(Stdio::null());
        match command.spawn() {
            Ok(child) => self.0 = Some(child),
            Err(why) => say!("pagefold: memory: cannot run {}: {why}", proposed.command),
        }
    }
}

/// A proposal in a sentence.
pub fn in_words(Proposed { proposal, to, command }: &Proposed) -> String {
    let by = if to.is_some() { " (a rule starts it)" } else { "" };
    let [frees, costs] = [proposal.frees_bytes, proposal.costs_bytes].map(bytes);
    format!(
        "moving {} to another host frees {frees} here, and takes {costs} there: {command}{by}",
        cli::printable(&proposal.guest)
    )
}

/// A proposal with the times of its first and next mention. `now_s` is in seconds since the host started.
pub fn standing(proposed: &Proposed, now_s: u64) -> String {
    let (ago, next) = (now_s.saturating_sub(proposed.proposal.first_s), proposed.proposal.next_s.saturating_sub(now_s));
    let words = in_words(proposed);
    format!("{words}\nproposed first {} min ago, the next time in {} min if memory is short then", ago / 60, next / 60)
}
