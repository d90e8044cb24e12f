//! Forked copies of VMMs beside guests.

use super::*;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

fn qemu(pid: u32, parent: u32, forked: bool) -> Process {
    let stat = ProcessStat { parent, forked, layout: Some((1, 2)), ..ProcessStat::default() };
    let cmdline = ["/usr/bin/qemu-system-x86_64", "-name", "db"].map(str::to_owned).to_vec();
    Process { pid, stat, cmdline, exe: Some("/usr/bin/qemu-system-x86_64".into()), ..Process::default() }
}

fn found(processes: Vec<Process>, named: &[u32]) -> Vec<String> {
    let guests = Survey { processes, ..Survey::default() }.guests(named, &[]);
    guests.into_iter().map(|guest| guest.id).collect()
}

#[test]
fn copies_of_a_found_vmm_are_no_guests() {
    let all = || vec![qemu(7, 1, false), qemu(8, 7, true), qemu(9, 8, true)];
    assert_eq!(found(all(), &[]), ["qemu:db"], "a copy, and a copy of that");
    assert_eq!(found(all(), &[8]), ["qemu:db", "process:8"]);
    let cgroups = Cgroups::parse("0::/lxc.payload.web");
    let inside = all().into_iter().map(|process| Process { cgroups: cgroups.clone(), ..process }).collect();
    assert_eq!(found(inside, &[]), ["qemu:db"], "a copy is no container");
}

#[test]
fn second_vmm_of_the_same_name_is_a_second_guest() {
    let two = ["qemu:db", "qemu:db@8"];
    assert_eq!(found(vec![qemu(7, 1, false), qemu(8, 7, false)], &[]), two, "it has executed its program");
    assert_eq!(found(vec![qemu(7, 1, true), qemu(8, 1, true)], &[]), two, "their parent is no VMM");
    assert_eq!(found(vec![qemu(8, 7, true)], &[]), ["qemu:db"], "its VMM has ended");
    let original = || qemu(7, 1, false);
    for other in [
        Process { exe: Some("/opt/qemu-system-x86_64".into()), ..original() },
        Process { cmdline: [original().cmdline, vec!["-S".into()]].concat(), ..original() },
        Process { stat: ProcessStat { layout: Some((3, 2)), ..original().stat }, ..original() },
    ] {
        assert_eq!(found(vec![other.clone(), qemu(8, 7, true)], &[]), two, "{other:?}");
    }
    // The VMM is another user's, which counts as none.
    let strangers = |process: Process| Process { exe_owner: Some(1006), ..process };
    let both = || vec![strangers(original()), strangers(qemu(8, 7, true))];
    assert_eq!(found(both(), &[8]), ["qemu:db"]);
    assert_eq!(found(both(), &[7, 8]), ["qemu:db", "process:8"]);
}

/// A shell under a VMM's name, and a forked copy of it, which waits for a line. Dropping it ends both.
struct Forked(Child);

impl Forked {
    fn start(program: &std::path::Path, name: &str) -> Self {
        let mut command = Command::new(program);
        command.args(["-c", "(read -r line; true); true", "-name", name]);
        Self(command.stdin(Stdio::piped()).spawn().unwrap())
    }

    /// The copy, once it is there.
    fn copy(&self) -> u32 {
        let until = Instant::now() + Duration::from_secs(120);
        loop {
            if let [copy] = host::children(self.0.id())[..] {
                return copy;
            }
            assert!(Instant::now() < until, "it does not fork");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Forked {
    fn drop(&mut self) {
        // The copy sees the end of its input then.
        drop(self.0.stdin.take());
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn process_that_forks_is_one_guest_and_two_that_were_started_are_two() {
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("qemu-system-x86_64");
    // Not copied by this process: what it writes cannot be executed as long as a child of another test has that open.
    assert!(Command::new("cp").arg("/bin/bash").arg(&program).status().unwrap().success());
    let name = format!("forks-{}", std::process::id());
    let pids = |named: &[u32]| -> Vec<u32> {
        let guests = Survey::take().unwrap().guests(named, &[]);
        guests.iter().filter(|guest| guest.kind.is_vm() && guest.name == name).map(|guest| guest.pids[0]).collect()
    };
    let one = Forked::start(&program, &name);
    let copy = one.copy();
    let read = |pid: u32| Process::read(pid).unwrap();
    assert_eq!(read(copy).cmdline, read(one.0.id()).cmdline);
    assert_eq!([pids(&[]), pids(&[copy])], [[one.0.id()], [one.0.id()]]);
    let other = Forked::start(&program, &name);
    other.copy();
    let mut both = pids(&[]);
    both.sort_unstable();
    let mut started = [one.0.id(), other.0.id()];
    started.sort_unstable();
    assert_eq!(both, started);
}
