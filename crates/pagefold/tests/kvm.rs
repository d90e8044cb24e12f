//! A vCPU that writes memory: it counts in pages of its guest, which become duplicates from time to time.

mod common;

use common::number;
use common::service::{Service, cannot_fold, seconds, until};

#[test]
fn writes_of_a_vcpu_are_not_lost() {
    if cannot_fold() {
        return;
    }
    if let Err(e) = std::fs::File::options().read(true).write(true).open("/dev/kvm") {
        return eprintln!("skipped: cannot open /dev/kvm: {e}");
    }
    let service = Service::start();
    let words = ["vcpu", "--seconds", &seconds(10).to_string(), "--until-input-ends"];
    let mut machine = service.torture("acme", "machine", &[], &words);
    service.show("acme");
    service.set("acme", &["--scan-rate", "400000"]);
    let mut most = 0;
    // The guest itself sees fewer folds than the group makes.
    until(120, "pages of a guest that are folded", || {
        machine.assert_is_well();
        let shown = service.show("acme");
        most = most.max(number(&shown["sharing_pages"]));
        most > 150 && number(&shown["folds"]) > 2000
    });
    machine.close_input();
    let counted = machine.finish(seconds(10) + 60);
    eprintln!("{most} {counted}");
    assert!(number(&counted["checked_writes"]) > 100_000, "{counted}");
    assert!(number(&counted["folds_seen"]) > 500, "{counted}");
}
