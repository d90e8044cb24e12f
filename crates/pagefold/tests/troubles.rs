//! Troubles of a service itself: folding goes on, and an event says what is lost.

mod common;

use common::http::{Events, Http, Target};
use common::number;
use common::service::{Member, Service, cannot_fold, until};
use std::fs::{self, File};
use std::io::Write;
use std::process::Command;
use std::time::Duration;

/// Holds 8 MiB, in which every content is there twice. For a line it makes as many more, or gives up the newest.
const HOLDER: &str = "
import os, sys
held = []
def more():
    half = os.urandom(4 << 20)
    held.append(bytearray(half + half))
more()
for line in sys.stdin:
    held.pop() if line == 'less\\n' else more()
    print('ok', flush=True)
";
const CONFIG: &str = "[api]\n[[group]]\nname = 'acme-TOKEN'\n";

fn holder(service: &Service) -> Member {
    service.run("acme", "a", &["--all-anonymous"], &["python3", "-c", HOLDER])
}

fn folded(service: &Service) -> u64 {
    number(&service.show("acme")["savings"]["folded_bytes"])
}

/// The stream of events, once it tells what happens from then on.
fn events(service: &Service) -> Events {
    let stream = Events::open(&Http::at(Target::Unix(service.place().join("api.sock"))));
    std::thread::sleep(Duration::from_secs(4));
    stream
}

#[test]
fn full_disk_leaves_folding_as_it_is_and_is_told() {
    if cannot_fold() {
        return;
    }
    let service = Service::start_on_small_disk(CONFIG);
    let mut member = holder(&service);
    until(60, "it folds", || folded(&service) > 6 << 20);
    let mut stream = events(&service);
    let filler = service.place().join("filler");
    let mut file = File::create(&filler).expect("make a file");
    let (group, mut percent) = (service.group("acme"), 40);
    // A state that was written meanwhile may leave a page free afterwards.
    until(60, "a change that is to outlive the service is refused", || {
        while file.write_all(&[7; 4096]).is_ok() {}
        percent += 1;
        let refused = service.pagefold(&["group", "set", &group, "--huge-pages", &percent.to_string()]);
        let why = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(refused.status.success() || why.contains("No space left"), "{why}");
        !refused.status.success()
    });
    // Folding goes on.
    assert_eq!(member.tell("more"), "ok");
    until(60, "new memory folds, too", || folded(&service) > 14 << 20);
    let text = stream.read_until("is lost if the service ends");
    assert!(text.contains("event: trouble\n") && text.contains("state_not_written"), "{text}");
    let listed = service.pagefold(&["group", "list"]);
    let said = String::from_utf8_lossy(&listed.stderr).into_owned();
    assert!(listed.status.success() && said.contains("is lost if the service ends"), "{said}");
    drop(file);
    fs::remove_file(&filler).expect("remove it again");
    stream.read_until("event: trouble_over\n");
    service.set("acme", &["--huge-pages", "40"]);
}

#[test]
fn worker_that_does_not_reach_its_prover_is_told() {
    if cannot_fold() {
        return;
    }
    let service = Service::start_with(Some(CONFIG));
    let mut member = holder(&service);
    until(60, "it folds", || folded(&service) > 6 << 20);
    if !service.log().contains("prover started") || service.log().contains("there is no prover on this host") {
        eprintln!("skipped: there is no prover on this host");
        return;
    }
    let mut stream = events(&service);
    let (users, hidden) = (service.place().join("users"), service.place().join("hidden"));
    let (socket, hidden_too) = (service.place().join("prove.sock"), service.place().join("hidden.sock"));
    let all = [(&users, &hidden), (&socket, &hidden_too)];
    all.iter().for_each(|(shown, hidden)| fs::rename(shown, hidden).expect("hide the prover"));
    let log = service.log();
    let line = log.lines().rfind(|line| line.contains("prover started: process ")).expect("a prover");
    let pid = line.rsplit(' ').next().expect("a process");
    assert!(Command::new("kill").args(["-9", pid]).status().expect("run kill").success());
    stream.read_until("event: no_prover\n");
    assert_eq!(member.tell("more"), "ok");
    until(60, "folding goes on", || folded(&service) > 14 << 20);
    all.iter().for_each(|(shown, hidden)| fs::rename(hidden, shown).expect("show it again"));
    // Slots that are free again are what the prover is asked about.
    assert_eq!(member.tell("less"), "ok");
    stream.read_until("event: prover\n");
}
