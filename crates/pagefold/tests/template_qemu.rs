//! QEMUs whose RAM is a template, by the command line that people use.

mod common;

use common::number;
use common::service::{Service, cannot_fold, find_member};
use common::template::Template;
use std::os::unix::fs::MetadataExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Pages of 128 MiB, and those of them that hold something: 16 MiB.
const PAGES: usize = 32 << 10;
const FILLED: u64 = 4096;
/// Pages that the firmware may write before the machine stands still: 1 MiB.
const WRITTEN: u64 = 256;

#[test]
fn qemu_asks_its_ram_in_and_is_born_folded_in_a_few_mappings() {
    let has_qemu = Command::new("qemu-system-x86_64").arg("-version").stdout(Stdio::null()).status().is_ok();
    if cannot_fold() || !has_qemu {
        eprintln!("skipped: no QEMU");
        return;
    }
    let service = Service::start();
    let group = service.group("acme");
    let template = Template::known(&group, PAGES, FILLED as usize, 1);
    assert_eq!(template.load(&service, &group, "debian"), Ok(()));
    let memory = format!("memory-backend-file,id=ram,size=128M,mem-path={},share=off", template.path());
    let words = [
        &["qemu-system-x86_64", "-nodefaults", "-no-user-config", "-display", "none", "-monitor", "stdio", "-S"][..],
        &["-accel", "tcg,tb-size=16", "-m", "128M", "-machine", "pc,memory-backend=ram", "-object", &memory],
    ]
    .concat();
    let clones = ["a", "b"].map(|name| service.run("acme", name, &[], &words));
    let end = Instant::now() + Duration::from_secs(120);
    loop {
        let shown = service.show("acme");
        let folded = |name| find_member(&shown, name).map_or(0, |member| number(&member["folded_pages"]));
        if ["a", "b"].iter().all(|name| folded(name) >= FILLED - WRITTEN) {
            break;
        }
        assert!(Instant::now() < end, "{shown}");
        std::thread::sleep(Duration::from_millis(100));
    }
    let inode = std::fs::metadata(template.path()).expect("the template").ino().to_string();
    for clone in &clones {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", clone.pid())).expect("its mappings");
        // Other memory of QEMU's, such as its firmware, is folded in the usual way.
        let ram =
            maps.lines().filter(|line| line.contains(" rw-p ") && line.split(' ').any(|word| word == inode)).count();
        assert!((1..=3).contains(&ram), "{maps}");
    }
    let audit = service.assert_audit_is_clean();
    let found = audit["by_group"].as_array().expect("groups").iter().find(|found| found["name"] == group.as_str());
    let found = found.expect("the group");
    let [frames, engine] = ["savings", "engine"].map(|account| number(&found[account]["folded_bytes"]));
    assert!(frames.abs_diff(engine) <= (2 * WRITTEN) << 12, "{found}");
}
