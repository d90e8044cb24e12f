//! Guests that work for long: nothing that is kept for them grows, and what they no longer need is given back. Half a minute as
//! a rule, hours where PAGEFOLD_SOAK_SECONDS says so.

mod common;

use common::lab::{self, Lab};
use common::number;
use common::service::{Service, cannot_fold, seconds, until};
use serde_json::Value;
use std::fs;
use std::time::{Duration, Instant};

const GROUP: &str = "acme";
const GUESTS: u64 = 2;
const MEMORY_MIB: u64 = 384;
/// From this time on, what is kept has to be no more in the second half than in the first, and the page caches rest for long enough
/// for what is in them to be worth folding.
const LONG: Duration = Duration::from_secs(20 * 60);

/// So many folds at least are of pages that were folded before, in the second half of a long time: else nothing was tried.
const FOLDED_AGAIN: u64 = 20_000;

/// Turns over a database's tables, processes and page cache, for ever; the caches rest for so many seconds, and are dropped.
fn work(pause: u64) -> String {
    format!(
        "(while :; do \
         mariadb -e 'CREATE DATABASE IF NOT EXISTS w; CREATE TABLE IF NOT EXISTS w.t (n INT AUTO_INCREMENT PRIMARY KEY, s TEXT); \
         INSERT INTO w.t (s) SELECT REPEAT(MD5(seq), 50) FROM seq_1_to_500; UPDATE w.t SET s = REPEAT(MD5(n), 40) ORDER BY RAND() LIMIT 200; \
         DELETE FROM w.t ORDER BY n LIMIT 500'; sh -c 'sleep 1'; done) </dev/null >/dev/null 2>&1 & \
         (while :; do find /usr/bin /usr/lib -type f -size -4096k -exec sha256sum {{}} + ; sleep {pause}; \
         sync; echo 3 > /proc/sys/vm/drop_caches; sleep {pause}; done) </dev/null >/dev/null 2>&1 &"
    )
}

/// What is kept for the group at one moment.
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
    /// Pages that the pool's files take.
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
    // One file may be open twice.
    files.filter(is_pool).map(size).collect::<std::collections::BTreeMap<_, _>>().values().sum()
}

/// Private memory of a process: the pool is counted by its files.
fn private_kib(pid: u32) -> u64 {
    let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
    let line = rollup.lines().find(|line| line.starts_with("Anonymous:")).unwrap_or_default();
    line.split_whitespace().nth(1).and_then(|n| n.parse().ok()).unwrap_or(0)
}

/// The most of something, over some time.
fn most(kept: &[Kept], of: impl Fn(&Kept) -> u64) -> u64 {
    kept.iter().map(of).max().unwrap_or(0)
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
    let words = ["--image", "debian", "--guests", &number_of, "--memory", &memory, "--groups", &group];
    let fold = ["--fold", "--service", place.to_str().expect("a path")];
    let Some(guests) = lab.up(&[&words[..], &fold].concat()) else { return };
    let guests: Vec<String> = guests.iter().map(lab::name).collect();
    // A guest that has just booted takes a minute to be thought idle, and one that works is not folded for some minutes.
    until(200, "guests are folded", || number(&service.show(GROUP)["sharing_pages"]) > 10_000);
    let (began, time) = (Instant::now(), Duration::from_secs(seconds(30)));
    lab.everywhere(&guests, &work(if time >= LONG { 45 } else { 5 }));
    let every = (time / 60).clamp(Duration::from_secs(1), Duration::from_secs(60));
    let mut kept = Vec::new();
    while began.elapsed() < time {
        std::thread::sleep(every);
        kept.push(Kept::of(&service, began));
        eprintln!("{:?}", kept[kept.len() - 1]);
    }
    let end = kept[kept.len() - 1];
    for at in &kept {
        // The index is part of the worker's memory.
        let tables = at.agents_kib + at.worker_kib;
        assert!(tables < GUESTS * MEMORY_MIB * 1024 / 50, "more than a fiftieth of the guests' memory: {at:?}");
    }
    if time >= LONG {
        // The caches have turned over in the first half; from then on it is the same again and again.
        let (first, last) = kept.split_at(kept.len() / 2);
        assert!(
            end.refolds > last[0].refolds + FOLDED_AGAIN,
            "the guests' work has nothing folded again: {:?}, {end:?}",
            last[0]
        );
        let flat = |what: &str, of: fn(&Kept) -> u64, slack: u64| {
            let (first, last) = (most(first, of), most(last, of));
            assert!(
                last <= first + first / 10 + slack,
                "{what}: {first} at most in the first half, {last} in the second"
            );
        };
        flat("index", |k| k.index_kib, 256);
        flat("tables of the agents", |k| k.agents_kib, 256);
        flat("the worker's memory", |k| k.worker_kib, 1024);
        flat("mappings", |k| k.vmas, 1000);
        flat("slots", |k| k.slots, 1000);
        flat("pages of the pool", |k| k.pool, 2000);
    }
    // Memory of slots that are free goes with their segment, and is used again before: the pool never takes more than was in use at
    // one time, but for what lies scattered (an eighth at most) and a piece that is half used.
    let slots = most(&kept, |k| k.slots);
    assert!(end.pool <= slots * 9 / 8 + 4096, "{slots} slots at most in use: {end:?}");
    assert!(end.sharing > 0, "{end:?}");

    // The last sharer leaves, and the slots go with it.
    lab.run(&["down"]);
    until(60, "the slots of guests that are gone are free", || {
        let shown: Value = service.show(GROUP);
        number(&shown["slots"]) == 0 && service.worker_pid(GROUP).is_none_or(|worker| pool_pages(worker) == 0)
    });
    service.assert_audit_is_clean();
}
