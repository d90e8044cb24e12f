//! The RAM of a QEMU whose memory does not stand on its command line, or does not lie where it usually does.

mod common;

use common::{Afterwards, json_of, not_root, number, pagefold};
use serde_json::Value;
use std::fs;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A QEMU that is killed in the end.
struct Qemu(Child);

impl Drop for Qemu {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts a paused QEMU; `None` if it is not installed.
fn qemu(more: &[&str]) -> Option<Qemu> {
    let mut command = Command::new("qemu-system-x86_64");
    command.args(["-S", "-nodefaults", "-display", "none", "-accel", "tcg,tb-size=32", "-no-user-config"]);
    command.args(more).stdin(Stdio::null()).stdout(Stdio::null());
    command.spawn().map(Qemu).map_err(|e| eprintln!("skipped: cannot run QEMU: {e}")).ok()
}

/// Waits until a guest is as it should be, and returns it.
fn until_guest(pid: u32, words: &[&str], is_right: impl Fn(&Value) -> bool) -> Value {
    let began = Instant::now();
    loop {
        let guests = json_of(&pagefold(words));
        let guest = guests["guests"].as_array().expect("a list").iter().find(|guest| guest["pids"][0] == pid).cloned();
        match guest {
            Some(guest) if is_right(&guest) => return guest,
            found => assert!(began.elapsed() < Duration::from_secs(60), "{found:?}"),
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn memory_in_a_configuration_file_counts() {
    if not_root() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let config = dir.path().join("qemu.conf");
    let text = "# Memory\n[memory]\nsize = \"96M\"\n\n[device \"balloon\"]\ndriver = \"virtio-balloon-pci\"\n";
    fs::write(&config, text).expect("write the configuration");
    let name = format!("conf-{}", std::process::id());
    let Some(qemu) = qemu(&["-name", &name, "-readconfig", config.to_str().expect("a plain path")]) else { return };
    let pid = qemu.0.id();
    until_guest(pid, &["guests", "--json"], |guest| guest["ram_bytes"] == 96 << 20);
}

#[test]
fn huge_pages_mounted_anywhere_below_dev_are_guest_ram() {
    if not_root() {
        return;
    }
    // 32 MiB of huge pages, for as long as the test runs.
    const POOL: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";
    let place = format!("/dev/pagefold-huge-{}", std::process::id());
    let before: u64 = fs::read_to_string(POOL).expect("huge pages").trim().parse().expect("a number");
    let _afterwards = Afterwards::run(&format!("umount -l {place}; rmdir {place}; echo {before} > {POOL}"));
    fs::write(POOL, (before + 16).to_string()).expect("root");
    fs::create_dir(&place).expect("make a directory");
    let mounted = Command::new("mount").args(["-t", "hugetlbfs", "n", &place]).status().expect("run mount");
    assert!(mounted.success());
    let now: u64 = fs::read_to_string(POOL).expect("huge pages").trim().parse().expect("a number");
    if now < before + 16 {
        eprintln!("skipped: the kernel has no {} huge pages to give", before + 16);
        return;
    }
    let name = format!("huge-{}", std::process::id());
    let more = ["-name", &name, "-m", "32", "-mem-path", &place, "-mem-prealloc"];
    let Some(qemu) = qemu(&more) else { return };
    let pid = qemu.0.id();
    until_guest(pid, &["guests", "--json"], |guest| guest["hugetlb_bytes"] == 32 << 20);
    // While QEMU begins, pages of its own come and go, of which the census says that it could not read them.
    let census = loop {
        let output = pagefold(&["census", "--guest", &name, "--json"]);
        if output.status.success() {
            break json_of(&output);
        }
    };
    let regions = census["guests"][0]["regions"].as_array().expect("a list");
    let ram = regions.iter().find(|region| region["region"] == "guest_ram");
    assert_eq!(ram.map(|ram| number(&ram["resident_pages"])), Some(8192), "{census}");
}
