//! libvirt runs a VM as its own user, and the service balances it. The service's program is replaced while the machine is busy. Then
//! memory runs out: the VM is told to give its loan back, and paused. It has no system on it, since one takes many minutes to boot in a VM that
//! is emulated itself. So nothing comes back: that is tried in `balance`.

use crate::common::number;
use crate::common::supervised::wait_for_within;
use crate::machine::{Debian, PATIENCE};
use serde_json::Value;

/// A domain without KVM, which has a monitor besides libvirt's own.
const DOMAIN: &str = "<domain type='qemu' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>
  <name>web</name><memory unit='MiB'>384</memory><vcpu>1</vcpu>
  <os><type arch='x86_64' machine='pc'>hvm</type></os>
  <features><acpi/><tcg><tb-cache unit='MiB'>32</tb-cache></tcg></features>
  <devices><emulator>/usr/bin/qemu-system-x86_64</emulator><memballoon model='virtio' autodeflate='on'/></devices>
  <qemu:commandline><qemu:arg value='-qmp'/><qemu:arg value='unix:/var/lib/libvirt/qemu/web.qmp,server=on,wait=off'/></qemu:commandline>
</domain>
";
/// Configuration of a balancer that never lends the last 400 MiB.
const CONFIG: &str = "[balance]
policy = 'equal'
every = 1
floor = '400M'
[[guest]]
name = 'web'
guaranteed = '128M'
";
/// Takes all memory but 100 MiB, a quarter of what is never lent: less than the VM may take.
const STORM: &str = "mount -o remount,size=95% /dev/shm; a=$(awk '/MemAvailable/ {print int($2 / 1024)}' /proc/meminfo)
head -c $((a - 100))M /dev/zero > /dev/shm/taken";
/// A machine that is busy.
const LOAD: &str = "systemd-run --quiet --unit load sh -c 'while :; do head -c 32M /dev/urandom | sha256sum; done'";
/// libvirt, which may take minutes to answer first.
const VIRSH: &str = "timeout 400 virsh -c qemu:///system";

/// Waits for an entry of the balancer's journal about libvirt's VM.
fn until_entry(debian: &Debian, what: &str, kind: &str, is_it: impl Fn(&Value) -> bool) -> Value {
    wait_for_within(PATIENCE, what, || {
        let text = debian.quietly("sleep 3; pagefold journal --json 2> /dev/null | grep web || true");
        let mut lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let of_it = |line: &Value| line["entry"] == kind && line["guest"].as_str().is_some_and(|id| id.contains("web"));
        lines.find(|line| of_it(line) && is_it(line))
    })
}

/// Has libvirt run the VM, as its own user and in a control group of its own.
fn run_vm(debian: &Debian) {
    debian.sh("systemctl start virtlogd.socket libvirtd.service; systemctl is-active libvirtd.service");
    debian.sh(&format!("{VIRSH} define /mnt/more/web.xml"));
    debian.sh(&format!("{VIRSH} start web"));
    let facts = debian.sh("pid=$(pgrep -f 'guest=[w]eb'); ps -o user:20= -p $pid; cat /proc/$pid/cgroup");
    assert!(facts.starts_with("libvirt-qemu\n") && facts.contains("/machine.slice/"), "{facts}");
}

/// Waits until a balancer promises the VM its size.
fn until_promised(debian: &Debian, what: &str) {
    wait_for_within(PATIENCE, what, || {
        let text = debian.quietly("sleep 2; pagefold balance status --json 2> /dev/null || true");
        let status: Value = serde_json::from_str(&text).ok()?;
        (number(&status["facts"]["guests"][0]["guaranteed_bytes"]) == 128 << 20).then_some(())
    });
}

#[test]
fn package_balances_a_vm_of_libvirts_and_pauses_it_after_its_program_was_replaced() {
    let Some(debian) = Debian::with_package(&[("web.xml", DOMAIN), ("config", CONFIG)]) else { return };
    debian.sh("cat /mnt/more/config >> /etc/pagefold/pagefold.toml; pagefold config check /etc/pagefold/pagefold.toml");
    debian.sh("systemctl restart pagefold.service; systemctl is-active pagefold.service");
    run_vm(&debian);
    until_promised(&debian, "the balancer looks");
    debian.sh(LOAD);
    debian.sh("for p in /usr/bin/pagefold /usr/lib/pagefold/pagefoldd; do cp $p $p.next; mv $p.next $p; done");
    let program = debian.sh("readlink /proc/$(systemctl show -P MainPID pagefold.service)/exe");
    assert!(program.ends_with("(deleted)"), "it was replaced: {program}");
    debian.sh(STORM);
    let told = until_entry(&debian, "the VM is told to give its loan back", "outcome", |line| {
        line["is_told"] == true && number(&line["to_bytes"]) < number(&line["from_bytes"])
    });
    let paused = until_entry(&debian, "it is paused, and runs again", "resume", |line| number(&line["paused_ms"]) > 0);
    assert!(paused["problem"].is_null(), "{paused}");
    eprintln!("debian: told: {told}; paused: {paused}");
    debian.sh("rm /dev/shm/taken; systemctl stop load.service");
    // An upgrade by dpkg, which starts the service anew.
    debian.sh("dpkg -i /mnt/more/next.deb 2>&1; systemctl is-active pagefold.service");
    until_promised(&debian, "the next balancer looks");
    assert_eq!(debian.sh(&format!("{VIRSH} domstate web")), "running");
}
