//! A program a little below the memory limit of its control group, of which all is written that folding has taken. It lives, as it does
//! without Pagefold. One that grows to its limit after it was folded lives, too, if it leaves what folding may have taken.

mod common;

use common::formats::assert_documented;
use common::service::{Member, Service, cannot_fold, cgroup_path, find_member, limit, small_memory, until};
use common::{Afterwards, number};
use serde_json::Value;
use std::process::Command;
use std::time::Duration;

/// Pages that have a duplicate. Each has some pages behind it that have none, so that each takes a mapping of its own when it is folded.
const FOLDED: u64 = 10_000;
/// Distance of two of them, in pages.
const APART: u64 = 8;
/// Memory by which a program grows, in bytes: 96 MiB.
const GROWTH: u64 = 96 * M;
/// Bytes of a mebibyte.
const M: u64 = 1 << 20;
/// Memory with which the program runs unbounded, in bytes.
const MUCH: u64 = 1024 * M;

/// Fills its memory, or writes all of it. Before, it looks whether each page holds what it was given. Or it grows, a mebibyte at a time.
const PROGRAM: &str = "
import mmap, sys, time
apart, growth = int(sys.argv[2]), int(sys.argv[3])
pages = apart * int(sys.argv[1])
memory = mmap.mmap(-1, pages * 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
NOHUGEPAGE, DONTFORK, MERGEABLE = 15, 10, 12
for advice in NOHUGEPAGE, DONTFORK, MERGEABLE: memory.madvise(advice)
twice = lambda seed: lambda n: n if n % apart else seed + n // (2 * apart)
kinds = {'fill': twice(10**9), 'other': twice(2 * 10**9), 'storm': lambda n: 10**10 + n}
last = lambda n: 0
page = lambda number: (b'%016d' % number) * 256 if number else bytes(4096)
grown = []
for line in sys.stdin:
    if line.strip() == 'grow':
        for mib in range(growth >> 20):
            grown.append(mmap.mmap(-1, 1 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
            for at in range(0, 1 << 20, 4096): grown[-1][at] = 1
            time.sleep(0.03)
        print('ok', flush=True)
        continue
    content = kinds[line.strip()]
    for n in range(pages):
        at = slice(n * 4096, n * 4096 + 4096)
        assert memory[at] == page(last(n)), n
        memory[at] = page(content(n))
    last = content
    print('ok', flush=True)
";

/// How often all is written: once, or 100 times in the long form.
fn storms() -> u32 {
    if common::is_long() { 100 } else { 1 }
}

/// Distance of the limit from what the program takes alone: 1 MiB in the long form, which has the machine for itself. An agent at rest takes
/// nearly as much ([`AT_REST`]), and a kernel's charges in advance are given back late on a busy machine. So the short form has 3 MiB.
/// Mappings of all single pages take 6 MiB.
fn margin() -> u64 {
    if storms() > 1 { M } else { 3 * M }
}

/// Most memory that an agent takes in its program's control group while nothing is folded, in bytes: 1.5 MiB.
const AT_REST: u64 = 3 * M / 2;

fn script(cgroup: &str, folded: u64, apart: u64) -> String {
    format!("echo $$ > {cgroup}/cgroup.procs && exec /usr/bin/python3 -c \"$0\" {folded} {apart} {GROWTH}")
}

fn row(service: &Service) -> Value {
    find_member(&service.show("acme"), "a").cloned().unwrap_or_default()
}

/// Waits until `least` pages are folded, nothing more is, and `group show` says that it is for the memory limit. Returns the pages.
fn until_folded(service: &Service, least: u64) -> u64 {
    let (mut before, mut folded) = (u64::MAX, u64::MAX);
    until(120, "nothing more of it is folded, and group show says why", || {
        std::thread::sleep(Duration::from_millis(300));
        let row = row(service);
        before = std::mem::replace(&mut folded, number(&row["folded_pages"]));
        let is_done = row["state"] == "no_headroom" && before == folded && folded >= least;
        if !is_done {
            eprintln!("{} pages are folded, {}: {}", row["folded_pages"], row["state"], row["detail"]);
        }
        is_done
    });
    folded
}

/// Fills the program's memory, waits until it is folded, and has it write all. Returns the pages that were folded.
fn storm(service: &Service, program: &mut Member, least: u64) -> u64 {
    assert_eq!(program.tell("fill"), "ok");
    let folded = until_folded(service, least);
    assert_eq!(program.tell("storm"), "ok");
    program.assert_is_well();
    folded
}

/// Waits until the member folds again.
fn assert_goes_on(service: &Service, program: &mut Member) {
    // A content that did not stay folded waits for a while.
    assert_eq!(program.tell("other"), "ok");
    until(60, "it is folded, with more room", || {
        let row = row(service);
        row["state"] == "folding" && number(&row["folded_pages"]) >= 100
    });
}

/// The same program twice, as a member and without Pagefold, each in a control group of its own. Both have filled their memory.
struct Pair {
    service: Service,
    program: Member,
    without: Member,
    cgroup: String,
    beside: String,
    /// Memory of the one without Pagefold, in bytes.
    alone: u64,
    /// Memory that the member's control group has more while nothing is folded, in bytes.
    at_rest: u64,
    _afterwards: [Afterwards; 2],
}

impl Pair {
    /// `None`, with the reason printed, where there can be none.
    fn start(folded: u64, apart: u64) -> Option<Self> {
        let service = Service::start_with(Some("[[group]]\nname = \"acme-TOKEN\"\nfold = \"off\"\n"));
        let (cgroup, afterwards) = small_memory(&format!("{}-a", service.mark().1), MUCH)?;
        let (beside, too) = small_memory(&format!("{}-b", service.mark().1), MUCH)?;
        if host::free_swap_bytes() > 0 {
            eprintln!("skipped: with swap, no break ends a program");
            return None;
        }
        let mut command = Command::new("sh");
        command.args(["-c", &script(&beside, folded, apart), PROGRAM]);
        let mut without = Member::spawn(command, "without", &service.place());
        let words = ["sh", "-c", &script(&cgroup, folded, apart), PROGRAM];
        let mut program = service.run_with("acme", "a", &[], &words, &[("PAGEFOLD_EAGER", "1")]);
        for program in [&mut without, &mut program] {
            assert_eq!(program.tell("fill"), "ok");
        }
        until(60, "it is a member", || {
            row(&service)["state"] == "off" && number(&row(&service)["enrolled_pages"]) >= apart * folded
        });
        let limits = host::MemoryLimits::find().expect("a tree of control groups");
        let [alone, member] =
            [&beside, &cgroup].map(|cgroup| MUCH - limits.room_bytes(cgroup_path(cgroup)).expect("a limit"));
        let (at_rest, _afterwards) = (member.saturating_sub(alone), [afterwards, too]);
        Some(Self { service, program, without, cgroup, beside, alone, at_rest, _afterwards })
    }

    /// Sets the limits of the control groups to so much more than the program takes alone.
    fn limit(&self, member: u64, without: u64) {
        limit(&self.cgroup, self.alone + member);
        limit(&self.beside, self.alone + without);
    }
}

/// Fails without the look at control groups: folding takes 6 MiB for mappings of single pages, and the program is killed.
#[test]
fn program_below_its_memory_limit_lives_through_storms() {
    if cannot_fold() {
        return;
    }
    let Some(pair) = Pair::start(FOLDED, APART) else { return };
    pair.limit(margin(), margin());
    let Pair { service, mut program, mut without, cgroup, alone, at_rest, .. } = pair;
    assert!(at_rest < AT_REST, "{at_rest} bytes");
    service.set("acme", &["--fold", "on"]);
    for _ in 0..storms() {
        for kind in ["storm", "fill"] {
            assert_eq!(without.tell(kind), "ok");
        }
        storm(&service, &mut program, 0);
    }
    without.assert_is_well();
    let shown = service.show("acme");
    assert_documented(&["group show --json", "Savings of folding"], &shown);
    let (why, fix) = (row(&service)["detail"].to_string(), row(&service)["fix"].to_string());
    assert!(why.contains(&format!("the memory limit of control group {} leaves", cgroup_path(&cgroup))), "{shown}");
    assert!(fix.contains("raise the memory limit"), "{shown}");
    limit(&cgroup, alone + 12 * M);
    let most = storm(&service, &mut program, 100);
    assert!(most < FOLDED, "{most} pages");
    for _ in 1..storms() / 5 {
        storm(&service, &mut program, 0);
    }
    until(60, "all is written", || number(&row(&service)["folded_pages"]) == 0);
    limit(&cgroup, MUCH);
    assert_goes_on(&service, &mut program);
}

/// Fails if mappings may take more than 1/64 of the limit. Those of all single pages take 13 MiB, and stay when the program grows.
#[test]
fn program_that_grows_to_its_limit_lacks_a_64th_of_it_at_most() {
    if cannot_fold() {
        return;
    }
    let Some(pair) = Pair::start(2 * FOLDED, APART / 2) else { return };
    // Mappings, the agent's tables, and the agent at rest.
    let lacks = (pair.alone + GROWTH) / 64 + pair.alone / 4096 * 32 + AT_REST;
    pair.limit(GROWTH + lacks + M, GROWTH + M);
    let Pair { service, mut program, mut without, .. } = pair;
    service.set("acme", &["--fold", "on"]);
    let folded = until_folded(&service, 2000);
    assert!((2000..2 * FOLDED).contains(&folded), "{folded} pages");
    let why = row(&service)["detail"].to_string();
    assert!(why.contains("for mappings, which are not given back") && why.contains("1/64"), "{why}");
    for kind in ["grow", "storm"] {
        for program in [&mut without, &mut program] {
            assert_eq!(program.tell(kind), "ok", "{kind}");
        }
    }
    without.assert_is_well();
    program.assert_is_well();
}
