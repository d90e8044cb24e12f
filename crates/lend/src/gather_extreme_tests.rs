//! Tests with the lowest and highest numbers that a guest and its QEMU can tell: no fact about a guest goes beyond its
//! RAM.

use super::*;
use crate::balloon;
use crate::fake_qemu::FakeQemu;
use serde_json::{Value, json};
use std::path::Path;

const EXTREMES: [u64; 5] = [0, 1, 1 << 52, i64::MAX as u64, u64::MAX];
const STATISTICS: [&str; 9] = [
    "stat-total-memory",
    "stat-free-memory",
    "stat-available-memory",
    "stat-disk-caches",
    "stat-major-faults",
    "stat-minor-faults",
    "stat-swap-in",
    "stat-alloc-stalls",
    "stat-oom-kills",
];
const M: u64 = 1 << 20;

fn statistics(told_at_s: u64, name: &str, number: u64) -> Value {
    let mut stats: serde_json::Map<_, _> =
        STATISTICS.map(|name| (name.to_owned(), json!(100 * M))).into_iter().collect();
    stats.insert(name.to_owned(), json!(number));
    json!({"last-update": told_at_s, "stats": stats})
}

/// Answers of a guest: these statistics, and this size.
fn answer(statistics: &Value, size_bytes: u64) -> Answer {
    Some(Told { size_bytes, plugged_bytes: None, statistics: balloon::parse(statistics), device: None })
}

#[test]
fn statistics_at_their_ends_are_facts_within_ram() {
    let now = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs();
    for number in EXTREMES {
        for name in STATISTICS {
            for (size, told_at_s) in [(256 * M, now), (number, now), (256 * M, number)] {
                let mut watched = Watched::default();
                watched.take(1, answer(&statistics(now - 4, STATISTICS[0], 7), 128 * M), 256 * M);
                watched.take(1, answer(&statistics(told_at_s, name, number), size), 256 * M);
                watched.take(1, answer(&statistics(told_at_s.saturating_add(2), name, 3), 128 * M), 256 * M);
                let claims = watched.claims();
                assert!(claims.is_none_or(|claims| claims.faults_per_s.is_finite()), "{name} {number}");
                let guest = GuestFacts { ram_bytes: 256 * M, actual_bytes: size, claims, ..GuestFacts::default() };
                let facts = Facts { guests: vec![guest], ..Facts::default() }.bounded();
                let [guest] = &facts.guests[..] else { panic!("one guest") };
                let claims = guest.claims.unwrap_or_default();
                let all = [claims.total_bytes, claims.free_bytes, claims.available_bytes, claims.cache_bytes];
                assert!(guest.actual_bytes <= 256 * M && all.iter().all(|bytes| *bytes <= 256 * M), "{name} {number}");
            }
        }
    }
}

#[test]
fn sizes_at_their_ends_are_facts_within_ram() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = Ledger::open(dir.path()).unwrap();
    for number in EXTREMES {
        let one = FakeQemu::start("one", 256 * M, Path::new("/nonexistent"));
        one.state().size_bytes = number;
        one.state().dimms = vec![number; 2];
        for ram_bytes in [number, 256 * M] {
            let mut guest = one.guest.clone();
            guest.ram_bytes = Some(ram_bytes);
            let rules = Rules { guaranteed: vec![("one".parse().unwrap(), number)], ..Rules::default() };
            let saved = Saved { guests: [(guest.pids[0], i64::MIN)].into(), ..Saved::default() };
            let facts = Gatherer::new(rules).gather(&[guest], &ledger, &saved).unwrap();
            let most = |guest: &GuestFacts| guest.actual_bytes.max(guest.guaranteed_bytes).max(guest.resident_bytes);
            assert!(facts.guests.iter().all(|guest| most(guest) <= guest.ram_bytes), "{number}: {facts:?}");
        }
    }
}
