//! A clone that is parked and woken.

use crate::common::service::{Service, cannot_fold};
use crate::rig::Rig;
use std::thread::sleep;
use std::time::Duration;

#[test]
fn parked_clone_has_the_hosts_time_when_it_is_woken() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let rig = Rig::folded_by(&service);
    if !rig.template("web", &service.group("acme"), &[]) {
        return;
    }
    rig.clone("web", &[]);
    rig.json(&["park", "web-1", "--fold-for", "1"]);
    // So far behind would its clock be.
    sleep(Duration::from_secs(3));
    let woken = rig.json(&["wake", "web-1", "--clock-within", "60"]);
    assert_eq!(woken["clock"], "set", "{woken}");
    let (clock, apart) = rig.clock("web-1");
    assert!(apart <= 0.5, "{clock} is {apart} s away from the host's");
    assert_eq!(rig.inside("web-1", "hostname"), "web-1", "it is who it was");
}
