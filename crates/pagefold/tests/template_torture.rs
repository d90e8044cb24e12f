//! No write is lost in memory that was born folded, and what is discarded there shows the template again.

mod common;

use common::number;
use common::service::{Service, cannot_fold, seconds, torture};
use common::template::Template;
use std::process::Command;
use std::time::{Duration, Instant};

/// Pages of the template.
const PAGES: usize = 2048;
/// Time limit beyond the usual time for pages to fold again.
const PATIENCE: Duration = Duration::from_secs(120);

#[test]
fn no_write_is_lost_in_memory_that_was_born_folded() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let group = service.group("acme");
    let template = Template::empty(&group, PAGES);
    let (path, pages) = (template.path(), PAGES.to_string());
    let words = ["born", "--template", &path, "--pages", &pages];
    assert!(Command::new(torture()).args(words).arg("--fill").status().expect("run torture").success());
    assert_eq!(template.load(&service, &group, "debian"), Ok(()));
    let mut members = [("one", &[][..]), ("other", &[]), ("inherited", &["--inherited"])]
        .map(|(name, more)| service.torture("acme", name, &[], &[&words[..], more].concat()));
    service.show("acme");
    service.set("acme", &["--scan-rate", "400000"]);
    let (begin, mut has_killed) = (Instant::now(), false);
    loop {
        members.iter_mut().for_each(|member| member.assert_is_well());
        let (shown, elapsed) = (service.show("acme"), begin.elapsed());
        if !has_killed && elapsed > Duration::from_secs(4) {
            has_killed = true;
            let worker = service.worker_pid("acme").expect("a worker").to_string();
            assert!(Command::new("kill").args(["-9", &worker]).status().expect("run kill").success());
        }
        let is_done = has_killed && number(&shown["refolds"]) > 100 && number(&shown["sharing_pages"]) > PAGES as u64;
        if elapsed > Duration::from_secs(seconds(12)) && is_done {
            break;
        }
        assert!(elapsed < Duration::from_secs(seconds(12)) + PATIENCE, "{shown}");
        std::thread::sleep(Duration::from_millis(250));
    }
    service.assert_audit_is_clean();
    members.iter_mut().for_each(|member| member.close_input());
    for member in &mut members {
        let counted = member.finish(600);
        assert!(number(&counted["steps"]) > 1000, "{counted}");
    }
}
