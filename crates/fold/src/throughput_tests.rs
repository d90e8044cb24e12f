//! The cost of planning: `cargo test --release -p fold -- --nocapture planning_costs`.

use crate::plan::{Planner, Policy};
use crate::pool::Pool;
use crate::segment::SlotState;
use host::own_cpu_time;
use page::{Fingerprint, HostVirt};
use wire::{Outcome, RestedRun};

/// Pages of each member; fewer in debug builds, whose times nobody reads.
const PAGES: u64 = if cfg!(debug_assertions) { 1 << 16 } else { 1 << 20 };

fn policy() -> Policy {
    Policy { folds: true, intra_member_only: false, zeros: true, split_huge_at: None, index_pages: 64 << 20 }
}

fn fingerprint(n: u64) -> Fingerprint {
    Fingerprint((n + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ n.rotate_left(40))
}

fn frame(first: u64, contents: impl Iterator<Item = u64>) -> (Vec<RestedRun>, Vec<Fingerprint>) {
    let fingerprints: Vec<Fingerprint> = contents.map(fingerprint).collect();
    let pages = fingerprints.len() as u16;
    (vec![RestedRun { start: HostVirt(first << 12), pages, huge: false }], fingerprints)
}

fn cost(what: &str, pages: u64, work: impl FnOnce()) {
    let before = own_cpu_time();
    work();
    let us = (own_cpu_time() - before).as_nanos() as f64 / 1e3;
    println!("{what}: {:.3} us a page ({pages} pages)", us / pages as f64);
}

#[test]
fn planning_costs_few_bytes_a_page() {
    let mut planner = Planner::new(Pool::new("test", 1 << 24), policy());
    let (one, other) = (planner.join(), planner.join());
    let frames = |first: u64| -> Vec<_> {
        (0..PAGES / 4096).map(|n| frame(first + n * 4096, n * 4096..(n + 1) * 4096)).collect()
    };
    let unique = frames(1 << 30);
    cost("pages seen for the first time", PAGES, || unique.iter().for_each(|(runs, f)| planner.rested(one, runs, f)));
    let bytes = planner.bytes() as f64 / PAGES as f64;
    println!("{bytes:.1} bytes a page");
    assert!(bytes < 32.0, "{bytes}");
    cost("the same pages, unchanged", PAGES, || unique.iter().for_each(|(runs, f)| planner.rested(one, runs, f)));
    cost("pages with a duplicate", PAGES, || unique.iter().for_each(|(runs, f)| planner.rested(other, runs, f)));
    cost("slots filled (without the copy)", PAGES, || {
        loop {
            let donation = planner.next_donation(other);
            if donation.pages() == 0 {
                break;
            }
            donation.slots.iter().for_each(|slot| planner.filled(*slot));
        }
    });
    for member in [one, other] {
        cost("pages folded", PAGES, || {
            loop {
                let runs = planner.next_folds(member);
                if runs.is_empty() {
                    break;
                }
                let pages = runs.iter().map(|run| usize::from(run.pages)).sum();
                planner.folded(member, &runs, &vec![Outcome::Folded; pages]);
            }
        });
    }
    let bytes = planner.bytes() as f64 / (2 * PAGES) as f64;
    println!("{bytes:.1} bytes a page, all of them folded");
    assert!(bytes < 40.0, "{bytes}");
    assert_eq!(planner.place(one).mapped + planner.place(other).mapped, 2 * PAGES);
    cost("pages of a member that leaves", PAGES, || drop(planner.leave(one, crate::dispatch::Donation::default())));
}

impl Planner {
    /// Settles a slot as if its bytes had come.
    fn filled(&mut self, slot: page::PoolSlot) {
        assert_eq!(self.pool.state(slot), SlotState::Pending);
        self.became_live(slot);
        self.give_back([slot]);
    }
}
