//! A member that connects again and again.

mod common;

use common::not_root;
use common::supervised::{Fake, Installed};
use std::fs;
use std::time::{Duration, Instant};

/// Members beside it.
const MEMBERS: u64 = 40;
/// Times that it comes back, in as many seconds.
const TIMES: u64 = 7;
/// Least number of reads by a supervisor that looks at the memory limits of one member. They were 4 to 5.
const READS: u64 = 3;
/// Time after which memory limits are read anyway, in seconds.
const LIMITS_S: u64 = 15;

/// Times that a process has read from something.
fn reads(pid: u32) -> u64 {
    let io = fs::read_to_string(format!("/proc/{pid}/io")).expect("it runs");
    let count = io.lines().find_map(|line| line.strip_prefix("syscr: ")).expect("a number");
    count.parse().expect("a number")
}

/// Its first connection has the supervisor look at the memory limits of all members. So had all others.
#[test]
fn member_that_comes_back_causes_no_look_at_limits_of_all() {
    if not_root() {
        return;
    }
    let installed = Installed::new();
    let supervisor = installed.serve("[[group]]\nname = 'acme'\n", &[]);
    let mut others: Vec<Fake> = (0..MEMBERS).map(|n| installed.member("acme", &format!("other-{n}"))).collect();
    let mut liar = installed.member("acme", "liar");
    for member in others.iter_mut().chain([&mut liar]) {
        assert!(member.connects(&installed), "{}", installed.log());
    }
    // The look for the last of them.
    std::thread::sleep(Duration::from_secs(2));
    let mut window = |comes_back: bool| {
        let (before, began) = (reads(supervisor.0.id()), Instant::now());
        for _ in 0..TIMES {
            assert!(!comes_back || liar.connects(&installed), "{}", installed.log());
            std::thread::sleep(Duration::from_secs(1));
        }
        let looks = 1 + began.elapsed().as_secs() / LIMITS_S;
        (reads(supervisor.0.id()) - before).saturating_sub(looks * MEMBERS * READS)
    };
    let (quiet, attacked) = (window(false), window(true));
    assert!(attacked < quiet + MEMBERS * READS * TIMES, "{attacked} reads, and {quiet} while nobody connects");
}
