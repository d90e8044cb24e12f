//! Real VMs: booted, used, ended.

mod common;

use common::{SOON, TestLab, group, processes_with, sh, skipped, text};
use host::ProcessId;
use lab::Image;
use serde_json::json;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};

const PROGRAMS: [&str; 2] = ["qemu-system-x86_64", "busybox"];

#[test]
fn two_vms_boot_at_once_and_end_without_trace() {
    if let Some(why) = skipped(&PROGRAMS) {
        return eprintln!("{why}");
    }
    let test = TestLab::new();
    let guests = test.up(Image::Tiny, 2, |spec| spec.memory_bytes = Some(160 << 20)).expect("two guests");
    assert!(guests.iter().all(|guest| guest.running && guest.ready_seconds.is_some()));
    for (guest, number) in guests.iter().zip(1..) {
        assert_eq!(guest.name, format!("{}-{number}", group()));
        assert_eq!(text(guest, "hostname"), guest.name);
        let kib: u64 = text(guest, "awk '/MemTotal/ {print $2}' /proc/meminfo").parse().expect("a number");
        assert!((100 << 10..160 << 10).contains(&kib), "{kib} KiB of 160 MiB");
        let mut qmp = guest.qmp(SOON).expect("QMP");
        assert_eq!(qmp.execute("query-name", json!({})).expect("a name")["name"], guest.name.as_str());
        assert!(qmp.execute("no-such-command", json!({})).is_err());
    }
    let mode = fs::metadata(test.lab.dir().join(&guests[0].name)).expect("its directory").permissions().mode();
    assert_eq!(mode & 0o777, 0o700);
    let groups = fs::read_to_string(test.lab.groups_file()).expect("the mapping file");
    assert!(groups.contains(&format!("\"{}\", \"{}\"", guests[0].name, guests[1].name)), "{groups}");

    // One more, with a device and a word for its kernel.
    let device = |spec: &mut lab::Spec| {
        spec.qemu_args = vec!["-device".into(), "virtio-balloon-pci".into()];
        spec.append = "pagefold.test=yes".into();
    };
    let third = test.up(Image::Tiny, 1, device).expect("a third guest");
    assert_eq!(third[0].name, format!("{}-3", group()));
    assert!(text(&third[0], "cat /proc/cmdline").contains("pagefold.test=yes"));
    assert_eq!(text(&third[0], "ls /sys/bus/virtio/drivers/virtio_balloon | grep -c ^virtio"), "1");
    assert_eq!(test.lab.guests().expect("the list").len(), 3);

    let dir = test.lab.dir().to_str().expect("a plain path").to_owned();
    assert_eq!(processes_with(&dir).len(), 3);
    assert_eq!(test.lab.down().expect("down").len(), 3);
    assert_eq!(processes_with(&dir), [0; 0]);
    assert!(!test.lab.dir().exists());
    assert!(test.lab.down().expect("down again").is_empty());
}

#[test]
fn commands_run_inside_exactly_as_given() {
    if let Some(why) = skipped(&PROGRAMS) {
        return eprintln!("{why}");
    }
    let test = TestLab::new();
    let guest = &test.up(Image::Tiny, 1, |spec| spec.memory_bytes = Some(96 << 20)).expect("a guest")[0];

    let words = ["printf", "<%s>", "a b", "", "it's", "$HOME `id` \\n", "gr\u{fc}n\n"];
    let said = guest.exec(&words, SOON).expect("it runs");
    assert_eq!(String::from_utf8(said.stdout).expect("text"), "<a b><><it's><$HOME `id` \\n><gr\u{fc}n\n>");

    let every_byte = sh(guest, r#"i=0; while [ $i -lt 256 ]; do printf "\\$(printf %03o $i)"; i=$((i+1)); done"#);
    assert_eq!(every_byte.stdout, (0..=255).collect::<Vec<u8>>());

    let failed = sh(guest, "echo out; echo err >&2; exit 7");
    assert_eq!((failed.status, &failed.stdout[..], &failed.stderr[..]), (7, &b"out\n"[..], &b"err\n"[..]));

    // A command that takes too long is killed with its children, and the next command runs.
    let late = guest.exec(&["sh", "-c", "sleep 4321 & sleep 4321"], Duration::from_secs(1));
    assert!(late.expect_err("too long").to_string().contains("more than 1 s"));
    assert_eq!(text(guest, "ps | grep -c 'sleep 432[1]' || true"), "0");

    // A child left in the background delays no answer, even if it keeps the output open.
    let begin = Instant::now();
    assert_eq!(text(guest, "sleep 77 & echo started"), "started");
    assert!(begin.elapsed() < Duration::from_secs(20));
    assert_eq!(text(guest, "ps | grep -c 'sleep 7[7]' || true"), "1");

    // Output beyond the room for it is cut off, and the next command has all the room again.
    // A megabyte takes its time on the emulated serial line.
    let room = guest.exec(&["sh", "-c", "yes | head -c 3000000"], SOON * 5).expect("an answer").stdout.len();
    assert!((1_000_000..=1 << 20).contains(&room), "{room}");
    assert_eq!(text(guest, "echo fine"), "fine");

    // The guest's kernel fails in the middle of a command, and is gone before the next one.
    let end = guest.exec(&["sh", "-c", "echo c > /proc/sysrq-trigger"], SOON).expect_err("an end").to_string();
    assert!(end.contains("it ended (exit status: 0)") && end.contains("Kernel panic"), "{end}");
    let process = ProcessId::of(guest.pid.expect("a process"));
    while process.as_ref().is_ok_and(ProcessId::is_alive) {}
    let after = guest.exec(&["true"], SOON).expect_err("nobody there").to_string();
    assert!(after.contains("it has ended") && after.contains("Kernel panic"), "{after}");
}

#[test]
fn saved_guests_go_on_from_where_they_were_saved() {
    if let Some(why) = skipped(&PROGRAMS) {
        return eprintln!("{why}");
    }
    let saved = |spec: &mut lab::Spec| (spec.saved, spec.memory_bytes) = (true, Some(96 << 20));
    let before = Instant::now();
    // The times of the kernel's messages differ from boot to boot.
    let mut boots = Vec::new();
    for _ in 0..2 {
        let test = TestLab::new();
        let mut guests = test.up(Image::Tiny, 1, saved).expect("a saved guest");
        guests.extend(test.up(Image::Tiny, 1, saved).expect("another one"));
        let traces = |guest| text(guest, "dmesg | head -100 | md5sum; ls /root");
        boots.push(guests.iter().map(traces).collect::<Vec<_>>());
        // A file that it writes is not saved.
        sh(&guests[0], "touch /root/written");
        let alive: f64 = text(&guests[1], "cut -d' ' -f1 /proc/uptime").parse().expect("seconds");
        // It was saved when it was idle, at most a minute after its boot, and longer on a busy host.
        assert!(alive < before.elapsed().as_secs_f64() + 120.0, "it has not run since: {alive} s");
    }
    assert_eq!(boots[0], boots[1]);
    assert_ne!(boots[0][0], boots[0][1], "each was booted on its own");
    let refused = TestLab::new().up(Image::Process, 1, saved).expect_err("no VM").to_string();
    assert!(refused.contains("for VMs only"), "{refused}");
}

#[test]
fn a_guest_that_does_not_come_up_is_explained_and_ended() {
    if let Some(why) = skipped(&PROGRAMS) {
        return eprintln!("{why}");
    }
    let test = TestLab::new();
    let before = Instant::now();
    let panics = test.up(Image::Tiny, 1, |spec| spec.append = "rdinit=/none init=/none root=/none".into());
    let text = panics.expect_err("no first program").to_string();
    assert!(text.contains("it ended") && text.contains("Kernel panic"), "{text}");
    assert!(before.elapsed() < Duration::from_secs(60));

    let wrong = test.up(Image::Tiny, 1, |spec| spec.qemu_args = vec!["-no-such-option".into()]);
    let text = wrong.expect_err("no such option").to_string();
    assert!(text.contains("no-such-option"), "{text}");

    let silent = |spec: &mut lab::Spec| {
        spec.qemu_args = vec!["-S".into()];
        spec.patience = Duration::from_secs(1);
    };
    let text = test.up(Image::Tiny, 1, silent).expect_err("it never runs").to_string();
    assert!(text.contains("in time"), "{text}");

    assert!(test.lab.guests().expect("the list").is_empty());
    assert!(processes_with(test.lab.dir().to_str().expect("a plain path")).is_empty());
}

#[test]
fn debian_runs_its_services() {
    if let Some(why) = skipped(&["qemu-system-x86_64", "busybox", "mmdebstrap", "mke2fs"]) {
        return eprintln!("{why}");
    }
    let test = TestLab::new();
    // A guest that was saved has booted, too, and its services since.
    let guests = test.up(Image::Debian, 1, |spec| spec.saved = true).expect("a guest");
    // Where processors are wanted, a service may take longer than systemd gives it.
    let active = "systemctl start mariadb apache2 2>/dev/null; systemctl is-active mariadb apache2";
    assert_eq!(text(&guests[0], active), "active\nactive");
    assert_eq!(text(&guests[0], "mariadb -NBe 'SELECT 6 * 7'"), "42");
    // Writes are the guest's own: the image stays as it is.
    let image = fs::read_dir(lab::cache_dir().expect("a cache")).expect("list it").filter_map(|entry| {
        let path = entry.ok()?.path().join("disk");
        path.exists().then(|| fs::metadata(path).expect("stat").modified().expect("a time"))
    });
    let before: Vec<_> = image.collect();
    text(&guests[0], "echo written >/root/file && sync && cat /root/file");
    let disks = fs::read_dir(lab::cache_dir().expect("a cache")).expect("list it");
    let after: Vec<_> =
        disks.filter_map(|entry| fs::metadata(entry.ok()?.path().join("disk")).ok()?.modified().ok()).collect();
    assert_eq!(before, after);
}
