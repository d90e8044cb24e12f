//! Clones whose QEMU something else starts: the script of `pagefold clone --snippet`, by a shell, and by stand-ins for `virsh` and `qm`.
//!
//! The stand-ins give QEMU the options that libvirt 9 and Proxmox VE 8 give a machine of their own, and those of the script.
//! `./x suite trixie snippets` runs all of it with the QEMU of another suite of Debian's, and one test with its libvirt.

mod common;

#[allow(dead_code, reason = "each test binary uses its part of this")]
#[path = "clones/rig.rs"]
mod rig;

use common::service::{Service, cannot_fold, find_member, until};
use common::{Ends, number};
use rig::{Rig, text};
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};
use tempfile::TempDir;

/// Starts QEMU as libvirt does: without capabilities, with memory of its own for the machine, paused.
const VIRSH: &str = r#"#!/usr/bin/env python3
import subprocess, sys, xml.etree.ElementTree as tree
assert sys.argv[1:3] == ['create', '--paused']
domain = tree.parse(sys.argv[3]).getroot()
assert (domain.tag, domain.get('type'), domain.find('memory').get('unit')) == ('domain', 'qemu', 'b')
assert domain.find('seclabel/label').text == '+0:+0' and domain.find('features/acpi') is not None
name, memory, kind = domain.find('name').text, int(domain.find('memory').text), domain.find('os/type').get('machine')
words = [domain.find('devices/emulator').text, '-name', 'guest=%s,debug-threads=on' % name, '-S', '-object',
    '{"qom-type":"memory-backend-ram","id":"pc.ram","size":%d}' % memory,
    '-machine', kind + ',usb=off,dump-guest-core=off,memory-backend=pc.ram', '-accel', 'tcg', '-cpu', 'qemu64',
    '-m', 'size=%dk' % (memory >> 10), '-overcommit', 'mem-lock=off', '-smp', '1,sockets=1,cores=1,threads=1',
    '-uuid', '1b4e28ba-2fa1-11d2-883f-0016d3cca427', '-display', 'none', '-no-user-config', '-nodefaults',
    '-chardev', 'socket,id=charmonitor,path=DIR/monitor,server=on,wait=off', '-mon', 'chardev=charmonitor,id=monitor,mode=control',
    '-rtc', 'base=utc', '-no-shutdown', '-boot', 'strict=on']
words += [arg.get('value') for arg in domain.iter('{http://libvirt.org/schemas/domain/qemu/1.0}arg')]
none = subprocess.DEVNULL
without = ['setpriv', '--bounding-set=-all', '--inh-caps=-all']
subprocess.Popen(without + words, stdin=none, stdout=none, stderr=open('DIR/log', 'w'), start_new_session=True)
"#;

/// Starts a VM as Proxmox VE does: the hook, then QEMU in the background, then the hook again.
const QM: &str = r#"#!/usr/bin/env python3
import shlex, subprocess, sys
action, vm = sys.argv[1:]
config = dict(line.rstrip('\n').split(': ', 1) for line in open('DIR/pve/%s.conf' % vm))
hook = 'DIR/snippets/' + config['hookscript'].split('/')[1]
if action == 'start':
    subprocess.check_call([hook, vm, 'pre-start'])
    words = ['qemu-system-x86_64', '-name', config['name'] + ',debug-threads=on', '-no-shutdown',
        '-chardev', 'socket,id=qmp,path=DIR/%s.qmp,server=on,wait=off' % vm, '-mon', 'chardev=qmp,mode=control',
        '-pidfile', 'DIR/%s.pid' % vm, '-daemonize', '-smp', config['cores'] + ',sockets=1,maxcpus=1', '-nodefaults',
        '-boot', 'menu=on,strict=on,reboot-timeout=1000', '-vga', config['vga'], '-cpu', 'qemu64', '-m', config['memory'],
        '-device', 'pci-bridge,id=pci.1,chassis_nr=1,bus=pci.0,addr=0x1e', '-machine', 'type=' + config['machine']]
    subprocess.check_call(words + shlex.split(config['args']))
    subprocess.check_call([hook, vm, 'post-start'])
else:
    subprocess.check_call([hook, vm, 'post-stop'])
"#;

/// Address of the real libvirt.
const LIBVIRT: &str = "qemu:///system";

/// A directory with stand-ins, which come first in the path.
struct Hands(TempDir);

impl Hands {
    fn new() -> Self {
        let hands = Self(tempfile::Builder::new().prefix("hands").tempdir_in("/tmp").expect("a temporary directory"));
        for (name, program) in [("virsh", VIRSH), ("qm", QM)] {
            let path = hands.0.path().join(name);
            fs::write(&path, program.replace("DIR", &hands.dir())).expect("write a program");
            fs::set_permissions(path, Permissions::from_mode(0o755)).expect("make it executable");
        }
        ["pve", "snippets"].iter().for_each(|dir| fs::create_dir(hands.0.path().join(dir)).expect("a directory"));
        hands
    }

    fn dir(&self) -> String {
        self.0.path().to_str().expect("a plain path").to_owned()
    }

    /// Runs the script of a clone. Files of managers lie in the stand-ins' directory.
    fn run(&self, rig: &Rig, script: &str, words: &[&str]) -> Ends {
        let dir = self.dir();
        let moved = [
            ("/etc/pagefold/qemu", "links"),
            ("/etc/pve/qemu-server", "pve"),
            ("/var/lib/vz/snippets", "snippets"),
            ("/run/pagefold-hand", "hand"),
        ];
        let script =
            moved.iter().fold(script.to_owned(), |text, (from, to)| text.replace(from, &format!("{dir}/{to}")));
        let mut shell = rig.program("sh", &[&["-ec", &script, "script"][..], words].concat());
        let path = std::env::var("PATH").expect("a path");
        shell.env("PATH", format!("{dir}:{path}")).stdout(Stdio::null()).stderr(Stdio::piped());
        Ends(shell.spawn().expect("run sh"))
    }
}

/// The script of the clone `hand`.
fn script(rig: &Rig, group: &str, by: &str) -> String {
    text(&rig.json(&["clone", "web", "--group", group, "--name", "hand", "--snippet", by]), "snippet")
}

fn state(rig: &Rig, name: &str) -> String {
    let listed = rig.json(&["clones"])["clones"].as_array().expect("a list").clone();
    listed.iter().find(|clone| clone["name"] == name).map_or_else(String::new, |clone| text(clone, "state"))
}

/// Inode of the template that a process maps.
fn template_of(pid: u64) -> Option<String> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).expect("its mappings");
    let line = maps.lines().find(|line| line.contains("/memfd:pagefold.template-web"))?;
    line.split_whitespace().nth(4).map(str::to_owned)
}

fn pid_of(rig: &Rig, name: &str) -> u64 {
    let listed = rig.json(&["clones"])["clones"].as_array().expect("a list").clone();
    let clone = listed.iter().find(|clone| clone["name"] == name).expect("it lives");
    number(&clone["process"]["pid"])
}

fn until_running(rig: &Rig, child: &mut Ends) {
    until(90, "the clone is handed out", || {
        if let Some(status) = child.0.try_wait().expect("look at the script").filter(|status| !status.success()) {
            panic!("the script has failed: {status}: {}", errors(child));
        }
        state(rig, "hand") == "running"
    });
    assert_eq!(rig.inside("hand", "hostname"), "hand");
}

fn errors(child: &mut Ends) -> String {
    let mut said = String::new();
    let _ = std::io::Read::read_to_string(child.0.stderr.as_mut().expect("a pipe"), &mut said);
    said
}

#[test]
fn plain_command_line_starts_a_clone_that_answers() {
    let (rig, hands) = (Rig::new(), Hands::new());
    if !rig.template("web", "acme", &[]) {
        return;
    }
    let mut child = hands.run(&rig, &script(&rig, "acme", "command"), &[]);
    until_running(&rig, &mut child);
    assert_eq!(pid_of(&rig, "hand"), u64::from(child.0.id()));
    let other = rig.clone("web", &[]);
    let memory = template_of(pid_of(&rig, "hand"));
    assert!(memory.is_some() && memory == template_of(number(&other[0]["pid"])), "one memory file for both");
    for words in [&["rollback", "hand"][..], &["save", "hand", "/tmp/hand.saved"]] {
        let said = rig.fails(words, 2);
        assert!(said.contains("its machine was started elsewhere"), "{said}");
    }
    rig.json(&["clones", "end", "hand"]);
    child.0.wait().expect("it has ended");
}

#[test]
fn plain_command_line_of_a_group_with_service_is_born_folded() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let (rig, hands, group) = (Rig::folded_by(&service), Hands::new(), service.group("acme"));
    if !rig.template("web", &group, &[]) {
        return;
    }
    let mut child = hands.run(&rig, &script(&rig, &group, "command"), &[]);
    until_running(&rig, &mut child);
    let wanted = (number(&rig.json(&["template", "show", "web"])["stored_bytes"]) >> 12) / 2;
    until(120, "it is folded", || {
        let shown = service.show("acme");
        find_member(&shown, "hand").is_some_and(|member| number(&member["folded_pages"]) >= wanted)
    });
    service.assert_audit_is_clean();
}

#[test]
fn domain_of_libvirt_is_a_clone_that_answers() {
    let (rig, hands) = (Rig::new(), Hands::new());
    if !rig.template("web", "acme", &[]) {
        return;
    }
    let script = script(&rig, "acme", "libvirt");
    validate(&script);
    let mut child = hands.run(&rig, &script, &[]);
    until_running(&rig, &mut child);
    assert!(child.0.wait().expect("the script ends").success());
}

/// libvirt in the root of `./x suite`, where nothing of it is the host's.
#[test]
fn domain_of_the_real_libvirt_is_a_clone_that_answers() {
    if std::env::var_os("PAGEFOLD_SUITE").is_none() {
        return eprintln!("skipped: ./x suite trixie snippets");
    }
    let rig = Rig::new();
    if !rig.template("web", "acme", &[]) {
        return;
    }
    fs::create_dir_all("/run/libvirt").expect("make a directory");
    fs::write("/etc/libvirt/qemu.conf", "security_driver = \"none\"\nstdio_handler = \"file\"\n")
        .expect("configure it");
    fs::write("/etc/libvirt/libvirtd.conf", "auth_unix_ro = \"none\"\nauth_unix_rw = \"none\"\n")
        .expect("configure it");
    let daemon = Command::new("libvirtd").stdin(Stdio::null()).stderr(Stdio::null()).spawn();
    let _daemon = Ends(daemon.expect("start libvirtd"));
    until(60, "libvirt answers", || virsh(&["list"]).is_some());
    let words = ["clone", "web", "--group", "acme", "--name", "hand", "--snippet", "libvirt", "--timeout", "300"];
    let script = text(&rig.json(&words), "snippet");
    validate(&script);
    let mut shell = rig.program("sh", &["-ec", &script]);
    shell.env("LIBVIRT_DEFAULT_URI", LIBVIRT);
    let mut child = Ends(shell.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("run sh"));
    // libvirt asks a QEMU that it has not seen before for everything that it can do.
    until(300, "the clone is handed out, or the script has failed", || {
        state(&rig, "hand") == "running" || child.0.try_wait().expect("look at the script").is_some()
    });
    until_running(&rig, &mut child);
    assert!(child.0.wait().expect("the script ends").success(), "{}", errors(&mut child));
    assert_eq!(virsh(&["domstate", "hand"]).as_deref(), Some("running"));
    assert!(template_of(pid_of(&rig, "hand")).is_some(), "it maps the template");
    rig.json(&["clones", "end", "hand"]);
    until(60, "the domain has ended", || virsh(&["domstate", "hand"]).is_none());
}

/// Output of virsh, if it succeeds.
fn virsh(words: &[&str]) -> Option<String> {
    let output = Command::new("virsh").args(["-c", LIBVIRT]).args(words).output().expect("run virsh");
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// By libvirt's own schema, where that is on this host.
fn validate(script: &str) {
    let begin = script.find("<domain").expect("a domain");
    let end = script.find("</domain>").expect("its end") + "</domain>".len();
    let dir = tempfile::tempdir().expect("a temporary directory");
    let file = dir.path().join("domain.xml");
    fs::write(&file, &script[begin..end]).expect("write a domain");
    match Command::new("virt-xml-validate").arg(&file).arg("domain").output() {
        Ok(output) => assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr)),
        Err(_) => eprintln!("skipped in part: there is no virt-xml-validate"),
    }
}

#[test]
fn vm_of_proxmox_is_a_clone_that_answers() {
    let (rig, hands) = (Rig::new(), Hands::new());
    if !rig.template("web", "acme", &[]) {
        return;
    }
    let mut child = hands.run(&rig, &script(&rig, "acme", "proxmox"), &["100"]);
    until_running(&rig, &mut child);
    assert!(child.0.wait().expect("the script ends").success(), "{}", errors(&mut child));
    let stopped = rig.program(&format!("{}/qm", hands.dir()), &["stop", "100"]).status().expect("run the stand-in");
    assert!(stopped.success() && rig.living().is_empty(), "the hook ends the clone");
}

#[test]
fn other_machine_than_the_clones_is_ended_with_the_reason() {
    let (rig, hands) = (Rig::new(), Hands::new());
    if !rig.template("web", "acme", &[]) {
        return;
    }
    let script = script(&rig, "acme", "command");
    let memory =
        script.split_once(",mem-path=").and_then(|(_, rest)| rest.split_once(",share=off")).expect("its memory").0;
    let own = script
        .replace(&format!(",mem-path={memory},share=off"), "")
        .replace("memory-backend-file", "memory-backend-ram");
    for (script, why) in [
        (own, "does not map the template's memory privately"),
        (script.replace("-incoming defer", ""), "migrate-incoming"),
    ] {
        let mut child = hands.run(&rig, &script, &[]);
        child.0.wait().expect("it is ended");
        let said = errors(&mut child);
        assert!(said.contains("clone hand is not handed out") && said.contains(why), "{said}");
        assert!(rig.living().is_empty());
    }
}

#[test]
fn clone_that_nobody_starts_is_awaited_no_longer_than_it_was_said() {
    let rig = Rig::new();
    if !rig.template("web", "acme", &[]) {
        return;
    }
    let words = ["clone", "web", "--group", "acme", "--name", "hand", "--await", "--no-fold", "--timeout", "1"];
    let said = rig.fails(&words, 1);
    assert!(said.contains("nobody has started its machine within 1 s"), "{said}");
    assert!(!rig.clones().join("hand").exists(), "its name is free again");
}
