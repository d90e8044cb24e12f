//! Guests that work for a long time: tables, mappings and slots kept for them do not grow, and freed slots return their
//! memory. The test takes a quarter of a minute, or hours with `PAGEFOLD_SOAK_SECONDS`.

mod common;

use common::lab::{self, Lab};
use common::number;
use common::service::{Service, cannot_fold, seconds, until};
use serde_json::Value;
use std::fs;
use std::time::{Duration, Instant};

const GROUP: &str = "acme";
const GUESTS: u64 = 2;
const MEMORY_MIB: u64 = 512;
/// Length from which a run is long: 20 minutes. In a long run, [`assert_nothing_grows`] also compares its two halves,
/// and the guests' page caches rest for long enough to be worth folding.
const LONG: Duration = Duration::from_secs(20 * 60);

/// Least number of refolded pages in the second half of a long run. With fewer, the test would have tried nothing.
const FOLDED_AGAIN: u64 = 20_000;

/// Figures of everything kept for the group, at one moment.
#[derive(Clone, Copy, Debug)]
#[expect(dead_code, reason = "printed")]
struct Kept {
    seconds: u64,
    sharing: u64,
    broken: u64,
    folds: u64,
    refolds: u64,
    short_folds: u64,
    slots: u64,
    /// Pages of the pool's files.
    pool: u64,
    vmas: u64,
    index_kib: u64,
    agents_kib: u64,
    worker_kib: u64,
}

impl Kept {
    fn of(service: &Service, began: Instant) -> Self {
        let shown = service.show(GROUP);
        let worker = service.worker_pid(GROUP).expect("a worker");
        let n = |field: &str| number(&shown[field]);
        Self {
            seconds: began.elapsed().as_secs(),
            sharing: n("sharing_pages"),
            broken: n("broken_pages"),
            folds: n("folds"),
            refolds: n("refolds"),
            short_folds: n("short_folds"),
            slots: n("slots"),
            pool: pool_pages(worker),
            vmas: n("vmas"),
            index_kib: n("index_bytes") >> 10,
            agents_kib: n("agent_bytes") >> 10,
            worker_kib: private_kib(worker),
        }
    }
}

/// Pages of the memory files that a worker has open.
fn pool_pages(worker: u32) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let files = fs::read_dir(format!("/proc/{worker}/fd")).expect("list the worker's files").flatten();
    let is_pool =
        |path: &fs::DirEntry| fs::read_link(path.path()).is_ok_and(|to| to.to_string_lossy().contains("memfd:"));
    let size = |path: fs::DirEntry| fs::metadata(path.path()).map_or((0, 0), |meta| (meta.ino(), meta.blocks() / 8));
    // The worker may have a file open twice.
    files.filter(is_pool).map(size).collect::<std::collections::BTreeMap<_, _>>().values().sum()
}

/// Anonymous memory of a process, in KiB. The pool's pages are not in it: [`pool_pages`] counts them.
fn private_kib(pid: u32) -> u64 {
    let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
    let line = rollup.lines().find(|line| line.starts_with("Anonymous:")).unwrap_or_default();
    line.split_whitespace().nth(1).and_then(|n| n.parse().ok()).unwrap_or(0)
}

/// Maximum of a figure over some moments.
fn most(kept: &[Kept], of: impl Fn(&Kept) -> u64) -> u64 {
    kept.iter().map(of).max().unwrap_or(0)
}

/// Asserts that tables and pool stay small. The tables take less than 1/50 of the guests' memory, and the pool is not
/// much larger than the slots in use.
fn assert_little_is_kept(kept: &[Kept]) {
    for at in kept {
        // The index is part of the worker's memory.
        let tables = at.agents_kib + at.worker_kib;
        assert!(tables < GUESTS * MEMORY_MIB * 1024 / 50, "more than a fiftieth of the guests' memory: {at:?}");
    }
    let end = kept[kept.len() - 1];
    // Free slots are reused before the pool grows, and a segment without slots in use returns its memory. So the pool
    // is as large as the largest number of slots in use at one time. Two exceptions are allowed: scattered free slots
    // (1/8 at most), and a segment that is half used.
    let slots = most(kept, |k| k.slots);
    assert!(end.pool <= slots * 9 / 8 + 4096, "{slots} slots at most in use: {end:?}");
}

/// Asserts, for a long run, that no figure grows from the first half to the second, apart from a tenth and a slack.
fn assert_nothing_grows(kept: &[Kept]) {
    let end = kept[kept.len() - 1];
    // The caches have turned over in the first half; the second half only repeats that.
    let (first, last) = kept.split_at(kept.len() / 2);
    assert!(
        end.refolds > last[0].refolds + FOLDED_AGAIN,
        "the guests' work has nothing folded again: {:?}, {end:?}",
        last[0]
    );
    let flat = |what: &str, of: fn(&Kept) -> u64, slack: u64| {
        let (first, last) = (most(first, of), most(last, of));
        assert!(last <= first + first / 10 + slack, "{what}: {first} at most in the first half, {last} in the second");
    };
    flat("index", |k| k.index_kib, 256);
    flat("tables of the agents", |k| k.agents_kib, 256);
    flat("the worker's memory", |k| k.worker_kib, 1024);
    flat("mappings", |k| k.vmas, 1000);
    flat("slots", |k| k.slots, 1000);
    flat("pages of the pool", |k| k.pool, 2000);
}

#[test]
fn nothing_grows_while_guests_work() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let lab = Lab::new(&[service.mark()]);
    let (group, place) = (service.group(GROUP), service.place());
    let (number_of, memory) = (GUESTS.to_string(), format!("{MEMORY_MIB}M"));
    let words = ["--image", "debian", "--guests", &number_of, "--memory", &memory, "--groups", &group, "--saved"];
    let fold = ["--fold", "--service", place.to_str().expect("a path")];
    let Some(guests) = lab.up(&[&words[..], &fold].concat()) else { return };
    let guests: Vec<String> = guests.iter().map(lab::name).collect();
    // A guest that has just booted takes a minute to be thought idle, and one that works is not folded for some
    // minutes.
    until(200, "guests are folded", || number(&service.show(GROUP)["sharing_pages"]) > 10_000);
    let (began, time) = (Instant::now(), Duration::from_secs(seconds(12)));
    lab.everywhere(&guests, &bench::workload::churn_script(if time >= LONG { 45 } else { 5 }, 500));
    let every = (time / 60).clamp(Duration::from_secs(1), Duration::from_secs(60));
    let mut kept = Vec::new();
    while began.elapsed() < time {
        std::thread::sleep(every);
        kept.push(Kept::of(&service, began));
        eprintln!("{:?}", kept[kept.len() - 1]);
    }
    assert_little_is_kept(&kept);
    if time >= LONG {
        assert_nothing_grows(&kept);
    }
    assert!(kept[kept.len() - 1].sharing > 0, "{:?}", kept[kept.len() - 1]);

    // The last sharer leaves, and the slots go with it.
    lab.run(&["down"]);
    until(60, "the slots of guests that are gone are free", || {
        let shown: Value = service.show(GROUP);
        number(&shown["slots"]) == 0 && service.worker_pid(GROUP).is_none_or(|worker| pool_pages(worker) == 0)
    });
    service.assert_audit_is_clean();
}
