//! Output of `pagefold balance`, as text and JSON.

use super::proposals;
use balance::{Budget, DriverState, Facts, Plan, Reserve, RungEvent, Step, Wish, price};
use cli::size::{bytes, mib, signed_bytes};
use lend::{Outcome, Paced, Paused, Proposed};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// An answer of `status`, `plan` and `explain`.
#[derive(Serialize)]
pub struct Answer<'a> {
    /// Facts of host, groups and guests. Claims of a guest are bounded by what the host knows.
    pub facts: &'a Facts,
    /// Memory to lend.
    pub budget: Budget,
    /// Memory for the case that every folded page breaks.
    pub reserve: Reserve,
    /// The guest that is proposed for another host, if one is.
    pub proposal: Option<Proposed>,
    /// Absent in `status`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub plan: Option<&'a Plan>,
    /// Only in `explain`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub explained: Option<Explained>,
}

/// Prices of memory, and wishes of the policy.
#[derive(Serialize)]
pub struct Explained {
    /// Memory that guests could give, the cheapest first.
    offers: Vec<ShownOffer>,
    /// Sizes that the policy wants for guests.
    wishes: Vec<ShownWish>,
    /// Memory that balloons keep from guests that report free pages, if the policy `reporting` is the better one.
    reporting_better_by_bytes: Option<u64>,
}

/// Memory of one price that a guest could give.
#[derive(Serialize)]
struct ShownOffer {
    /// The guest.
    guest: String,
    /// The price.
    tier: price::Tier,
    /// The memory.
    bytes: u64,
    /// The part of `bytes` that the host gets as spare memory.
    part_freed: f64,
    /// The part of `bytes` that the host gets as frames.
    part_in_frames: f64,
}

/// The size that the policy wants for a guest.
#[derive(Serialize)]
struct ShownWish {
    /// The guest.
    guest: String,
    #[serde(flatten)]
    wish: Wish,
}

/// Steps of one round against pressure.
#[derive(Default, Serialize)]
pub struct Answered {
    /// A step on the pressure ladder, if there was one.
    pub rung: Option<RungEvent>,
    /// Groups that were given another pace.
    pub paced: Vec<Paced>,
    /// The guest that was proposed for another host, if one was.
    pub proposal: Option<Proposed>,
}

/// An answer of `apply`.
#[derive(Serialize)]
pub struct Done<'a> {
    /// Seconds since the host started.
    pub at_s: u64,
    /// The plan.
    pub plan: &'a Plan,
    /// The end of each of its steps.
    pub outcomes: &'a [Outcome],
    /// State of each guest's balloon driver, by id.
    pub drivers: BTreeMap<&'a str, DriverState>,
    #[serde(flatten)]
    pub answered: &'a Answered,
    /// Guests that were paused.
    pub paused: &'a [Paused],
}

impl Explained {
    pub fn of(facts: &Facts, wishes: Vec<Wish>) -> Self {
        let id = |n: usize| facts.guests[n].id.clone();
        let offers = price::offers(facts).into_iter().map(|offer| ShownOffer {
            guest: id(offer.guest),
            tier: offer.tier,
            bytes: offer.bytes,
            part_freed: offer.part_freed,
            part_in_frames: offer.part_in_frames,
        });
        let wishes = wishes.into_iter().enumerate().map(|(n, wish)| ShownWish { guest: id(n), wish });
        let reporting_better_by_bytes = balance::policy::reporting_better_by_bytes(facts);
        Self { offers: offers.collect(), wishes: wishes.collect(), reporting_better_by_bytes }
    }
}

impl Done<'_> {
    pub fn text(&self) -> String {
        let mut text = outcomes_text(self.outcomes);
        for Paused { pause, paused_ms, problem } in self.paused {
            let end = problem.as_ref().map_or_else(String::new, |problem| format!("; {problem}"));
            let guest = cli::printable(&pause.guest);
            let _ = writeln!(text, "{guest}: paused for {paused_ms} ms: {}{end}", pause.reason);
        }
        add_refused(&mut text, self.plan);
        if text.is_empty() { "nothing to do\n".into() } else { text }
    }
}

/// An answer of `status`, `plan` and `explain` as text.
pub fn text(answer: &Answer) -> String {
    let (host, mut text) = (&answer.facts.host, String::new());
    let stalled = host.stalled_percent.map_or_else(|| "unknown".into(), |percent| format!("{percent:.1}%"));
    let _ = writeln!(
        text,
        "host: {} available, {} of it never lent; tasks waited for memory: {stalled}; against pressure: {}",
        bytes(host.available_bytes),
        bytes(host.floor_bytes),
        host.rung.name()
    );
    let _ =
        writeln!(text, "spare: {}, lent: {}", signed_bytes(answer.budget.spare_bytes), bytes(answer.budget.lent_bytes));
    let Reserve { demand_bytes, ready_bytes, withdrawable_bytes } = answer.reserve;
    let holds = if answer.reserve.holds() { "holds" } else { "is too small" };
    let _ = writeln!(
        text,
        "reserve {holds}: guests may take {}; free above the floor {}, to be withdrawn in 10 s {}\n",
        bytes(demand_bytes),
        bytes(ready_bytes),
        bytes(withdrawable_bytes)
    );
    if let Some(proposed) = &answer.proposal {
        let _ = writeln!(text, "{}\n", proposals::standing(proposed, host::boot_clock_s()));
    }
    add_guests(&mut text, answer.facts);
    if let Some(explained) = &answer.explained {
        explained.add_to(&mut text);
    }
    if let Some(plan) = answer.plan {
        let _ = writeln!(text, "\nplan by {}:", plan.policy);
        let steps = steps_text(&[plan.frees.clone(), plan.grows.clone()].concat());
        text.push_str(if steps.is_empty() { "nothing to do\n" } else { &steps });
        add_refused(&mut text, plan);
    }
    text
}

fn add_guests(text: &mut String, facts: &Facts) {
    let _ = writeln!(
        text,
        "{:<24} {:<12} {:>9} {:>9} {:>9} {:>9} {:>9}  balloon",
        "guest, sizes in MiB", "group", "RAM", "size", "kept", "resident", "shared"
    );
    for guest in &facts.guests {
        let _ = writeln!(
            text,
            "{:<24} {:<12} {:>9} {:>9} {:>9} {:>9} {:>9}  {}",
            cli::printable(&guest.id),
            cli::printable(&guest.group),
            mib(guest.ram_bytes),
            mib(guest.size_bytes()),
            mib(guest.guaranteed_bytes),
            mib(guest.resident_bytes),
            mib(guest.folded_bytes),
            guest.driver.name()
        );
    }
    for reservation in &facts.reservations {
        let _ = writeln!(text, "reserved for {}: {}", cli::printable(&reservation.name), bytes(reservation.bytes));
    }
}

fn add_refused(text: &mut String, plan: &Plan) {
    for refusal in &plan.refused {
        let _ =
            writeln!(text, "{}: no {} more: {}", cli::printable(&refusal.guest), bytes(refusal.bytes), refusal.reason);
    }
}

impl Explained {
    fn add_to(&self, text: &mut String) {
        let _ = writeln!(text, "\noffers, the cheapest first:");
        for offer in &self.offers {
            let guest = cli::printable(&offer.guest);
            let freed = offer.part_freed * 100.0;
            let _ = writeln!(text, "{guest}: {} of {}, {freed:.0}% of it freed", bytes(offer.bytes), offer.tier.name());
        }
        let _ = writeln!(text, "\nthe policy wants:");
        for ShownWish { guest, wish } in &self.wishes {
            let _ = writeln!(text, "{}: {}: {}", cli::printable(guest), bytes(wish.size_bytes), wish.reason);
        }
        if let Some(kept) = self.reporting_better_by_bytes {
            let kept = bytes(kept);
            let _ = writeln!(
                text,
                "\nthe policy reporting is better now: the host has to spare the {kept} that balloons keep from guests which report free pages"
            );
        }
    }
}

/// Steps of a plan as text, one a line.
pub fn steps_text(steps: &[Step]) -> String {
    let line = |step: &Step| {
        let (from, to, guest) = (bytes(step.from_bytes), bytes(step.to_bytes), cli::printable(&step.guest));
        format!("{guest}: {from} -> {to}: {}\n", step.reason)
    };
    steps.iter().map(line).collect()
}

/// Outcomes of steps as text, one a line.
pub fn outcomes_text(outcomes: &[Outcome]) -> String {
    let line = |outcome: &Outcome| {
        let step = &outcome.step;
        let (from, to, guest) = (bytes(step.from_bytes), bytes(step.to_bytes), cli::printable(&step.guest));
        let end = match (&outcome.problem, outcome.landed_s) {
            (Some(problem), _) => problem.clone(),
            (None, Some(s)) => {
                format!("done in {s:.1} s, the host has {} more", signed_bytes(outcome.host_freed_bytes))
            }
            (None, None) => "under way".into(),
        };
        format!("{guest}: {from} -> {to}: {}; {end}\n", step.reason)
    };
    outcomes.iter().map(line).collect()
}
