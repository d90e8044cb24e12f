//! Verdicts for people, and as the standard test harness prints them.

use crate::rig::{Peer, Verdict};

pub fn list(peers: &[Peer]) {
    for peer in peers {
        let short = if peer.is_short { "short" } else { "" };
        println!("{:<12} {short:<5} {:>6} pages  {}", peer.name, peer.floor, peer.about);
    }
}

/// The names of the columns of [`row`].
pub fn head() -> String {
    format!("{:<12} {:<8} {:>8} {:>8} {:>6}  reason", "program", "same", "folded", "floor", "s")
}

pub fn row(v: &Verdict) -> String {
    let same = match v.ok {
        Some(true) => "yes",
        Some(false) => "NO",
        None => "skipped",
    };
    format!("{:<12} {same:<8} {:>8} {:>8} {:>6.1}  {}", v.program, v.folded_pages, v.floor, v.seconds, v.reason)
}

pub fn as_tests(verdicts: &[Verdict]) {
    for v in verdicts {
        let word = match v.ok {
            Some(true) => "ok".to_owned(),
            Some(false) => "FAILED".to_owned(),
            None => {
                eprintln!("skipped: {}", v.reason);
                "ok".to_owned()
            }
        };
        println!("test {} ... {word}", v.program);
    }
    let count = |ok: Option<bool>| verdicts.iter().filter(|v| v.ok == ok).count();
    let (passed, failed, ignored) = (count(Some(true)), count(Some(false)), count(None));
    println!("\nfailures:\n");
    for v in verdicts.iter().filter(|v| v.ok == Some(false)) {
        println!("{}: {}", v.program, v.reason);
    }
    let result = if failed == 0 { "ok" } else { "FAILED" };
    println!(
        "\ntest result: {result}. {passed} passed; {failed} failed; {ignored} ignored; 0 measured; 0 filtered out"
    );
}
