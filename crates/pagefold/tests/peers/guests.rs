//! QEMU guests through what QEMU itself does with their memory: ballooning, plugging, snapshots, migration. Files inside have
//! the same digests before and after, and a loop inside copies and compares them all the time.

use crate::common::lab::{self, Lab};
use crate::common::service::{Member, until};
use crate::rig::{Peer, Side};
use guest::qmp::Qmp;
use serde_json::{Value, json};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A peer that boots QEMU guests.
const fn qemu(name: &'static str, about: &'static str, floor: u64, is_short: bool, recipe: fn(&Side) -> Value) -> Peer {
    let needs = &[("qemu-system-x86_64", "qemu-system-x86"), ("qemu-img", "qemu-utils"), ("busybox", "busybox-static")];
    Peer { name, about, floor, needs, is_short, at_once: false, recipe }
}

pub const BALLOON: Peer =
    qemu("qemu-balloon", "balloon in and out, and free-page reporting, under load", 1000, true, balloon);
pub const PLUG: Peer =
    qemu("qemu-plug", "virtio-mem: memory plugged, filled, given up and unplugged", 1000, false, plug);
pub const LOCKED: Peer = qemu("qemu-locked", "memory locked by QEMU, which cannot be folded", 0, false, locked);
pub const SNAPSHOT: Peer =
    qemu("qemu-snapshot", "savevm and loadvm; a background snapshot under load", 1000, false, snapshot);
pub const MIGRATE: Peer = qemu("qemu-migrate", "precopy, then postcopy, under load", 1000, false, migrate);

/// Time-out of one of QEMU's operations here.
const PATIENCE: u64 = 120;
/// Files whose digests are compared, and a loop that copies one of them, compares, and counts its rounds.
const FILL: &str =
    "seq 1 1500000 > /tmp/known; seq 1000 800000 > /tmp/other; dd if=/dev/zero of=/tmp/zeros bs=1M count=8 2>/dev/null";
const LOAD: &str = "(while [ ! -e /tmp/over ]; do cp /tmp/other /tmp/copy; cmp /tmp/other /tmp/copy || echo x >> /tmp/bad; \
                    echo x >> /tmp/rounds; done; echo x > /tmp/done) >/dev/null 2>&1 &";
const END: &str = "touch /tmp/over; while [ ! -e /tmp/done ]; do sleep 0.1; done; [ -s /tmp/rounds ] && [ ! -e /tmp/bad ] && \
                   cd /tmp && sha256sum known other zeros copy";

/// Two guests of the lab's.
struct Vms {
    lab: Lab,
    names: Vec<String>,
    monitors: BTreeMap<String, Monitor>,
}

/// A connection to a QEMU's monitor, which takes one client at a time.
struct Monitor(RefCell<Qmp>);

impl Monitor {
    fn connect(socket: &Path) -> Self {
        let qmp = Qmp::connect(socket, Duration::from_secs(PATIENCE));
        Self(RefCell::new(qmp.unwrap_or_else(|e| panic!("QMP: {e}"))))
    }

    fn tell(&self, command: &str, arguments: Value) -> Value {
        self.0.borrow_mut().execute(command, arguments).unwrap_or_else(|e| panic!("{command}: {e}"))
    }

    /// Waits until QEMU says that its migration is completed.
    fn until_migrated(&self) {
        until(PATIENCE, "QEMU has written or sent its state", || {
            let state = self.tell("query-migrate", json!({}));
            assert!(!["failed", "cancelled"].iter().any(|word| state["status"] == *word), "{state}");
            state["status"] == "completed"
        });
    }
}

impl Vms {
    /// Boots them, fills them, lets them rest while they are folded, and starts the load.
    fn boot(side: &Side, append: &str, qemu_args: &[&str]) -> Self {
        let lab = Lab::new(&side.environment());
        let group = side.group();
        let mut words =
            vec!["--image", "tiny", "--guests", "2", "--memory", "160M", "--groups", &group, "--append", append];
        qemu_args.iter().for_each(|word| words.extend(["--qemu-arg", word]));
        let place = side.place();
        if side.is_member {
            words.extend(["--fold", "--service", &place]);
        }
        let guests = lab.up(&words).expect("guests");
        let names: Vec<String> = guests.iter().map(lab::name).collect();
        let monitor = |name: &String| (name.clone(), Monitor::connect(&lab.dir().join("lab").join(name).join("qmp")));
        let vms = Self { monitors: names.iter().map(monitor).collect(), names, lab };
        vms.everywhere(FILL);
        side.rest();
        vms.everywhere(LOAD);
        vms
    }

    fn everywhere(&self, script: &str) -> Vec<String> {
        self.lab.everywhere(&self.names, script)
    }

    /// Ends the load, and returns the digests of the files, which the load must have left alone.
    fn finish(&self) -> Value {
        json!(self.everywhere(END))
    }

    fn dir(&self, name: &str) -> PathBuf {
        self.lab.dir().join("lab").join(name)
    }

    fn qmp(&self, name: &str, command: &str, arguments: Value) -> Value {
        self.monitors[name].tell(command, arguments)
    }
}

fn balloon(side: &Side) -> Value {
    let vms = Vms::boot(side, "", &["-device", "virtio-balloon-pci,free-page-reporting=on"]);
    for bytes in [112_u64 << 20, 160 << 20] {
        for name in &vms.names {
            vms.qmp(name, "balloon", json!({"value": bytes}));
        }
        for name in &vms.names {
            until(PATIENCE, "the balloon has its size", || {
                vms.qmp(name, "query-balloon", json!({}))["actual"]
                    .as_u64()
                    .is_some_and(|now| now.abs_diff(bytes) < 1 << 20)
            });
        }
    }
    // The guest reports the memory that is free again, QEMU discards it, and it is filled anew.
    vms.everywhere("rm /tmp/zeros; sleep 4; dd if=/dev/zero of=/tmp/zeros bs=1M count=8 2>/dev/null");
    vms.finish()
}

/// Size of a guest's memory that can be plugged.
const PLUGGABLE_BYTES: u64 = 128 << 20;

fn plug(side: &Side) -> Value {
    let backend = format!("memory-backend-ram,id=plug,size={PLUGGABLE_BYTES}");
    let device = "virtio-mem-pci,id=plug0,memdev=plug,requested-size=0,block-size=2M";
    // The guest's buffers for devices that reach low memory only would take most of its memory, once it may grow.
    let append = "memhp_default_state=online_movable swiotlb=noforce";
    let vms = Vms::boot(side, append, &["-m", "160M,maxmem=1G", "-object", &backend, "-device", device]);
    let mut counted = Vec::new();
    for bytes in [PLUGGABLE_BYTES, 0, PLUGGABLE_BYTES] {
        for name in &vms.names {
            let place = json!({"path": "plug0", "property": "requested-size", "value": bytes});
            vms.qmp(name, "qom-set", place);
        }
        for name in &vms.names {
            until(PATIENCE, "virtio-mem has its size", || {
                vms.qmp(name, "qom-get", json!({"path": "plug0", "property": "size"})) == bytes
            });
        }
        // More than fits in without what was plugged, if it was.
        let blocks = if bytes > 0 { 96 } else { 8 };
        let fill = format!(
            "mkdir -p /mnt; mount -t tmpfs -o size=110M none /mnt; \
             yes pagefold | dd of=/mnt/one bs=1M count=1 iflag=fullblock 2>/dev/null; \
             for n in $(seq {blocks}); do cat /mnt/one; done > /mnt/plugged; sleep 3; md5sum /mnt/plugged; umount /mnt"
        );
        counted.push(vms.everywhere(&fill));
    }
    json!({"files": vms.finish(), "plugged": counted})
}

fn locked(side: &Side) -> Value {
    let vms = Vms::boot(side, "", &["-overcommit", "mem-lock=on"]);
    if side.is_member {
        let shown = side.shown();
        let says_why = shown["members"].as_array().expect("members").iter().all(|m| m.to_string().contains("lock"));
        assert!(says_why, "no reason why locked memory is not folded: {shown}");
    }
    vms.finish()
}

/// Runs a job of QEMU's on a snapshot in the disk `vmstate`.
fn snapshot_job(vms: &Vms, name: &str, command: &str) {
    let arguments = json!({"job-id": command, "tag": "peer", "vmstate": "vmstate", "devices": ["vmstate"]});
    vms.qmp(name, command, arguments);
    until(PATIENCE, command, || {
        let jobs = vms.qmp(name, "query-jobs", json!({}));
        let job =
            jobs.as_array().and_then(|jobs| jobs.iter().find(|job| job["id"] == command)).cloned().expect("the job");
        assert!(job["error"].is_null(), "{job}");
        job["status"] == "concluded"
    });
    vms.qmp(name, "job-dismiss", json!({"id": command}));
}

fn snapshot(side: &Side) -> Value {
    let vms = Vms::boot(side, "", &[]);
    for name in &vms.names {
        let disk = side.path(&format!("{name}.qcow2"));
        side.aside(&["qemu-img", "create", "-q", "-f", "qcow2", &disk, "2G"], "");
        let file = json!({"driver": "qcow2", "node-name": "vmstate", "file": {"driver": "file", "filename": disk}});
        vms.qmp(name, "blockdev-add", file);
        snapshot_job(&vms, name, "snapshot-save");
    }
    vms.everywhere("dd if=/dev/urandom of=/tmp/known bs=1M count=4 conv=notrunc 2>/dev/null; rm /tmp/zeros");
    for name in &vms.names {
        vms.qmp(name, "stop", json!({}));
        snapshot_job(&vms, name, "snapshot-load");
        vms.qmp(name, "cont", json!({}));
        // Written while the guest runs on: QEMU write-protects its RAM with a userfaultfd of its own.
        let on = json!({"capabilities": [{"capability": "background-snapshot", "state": true}]});
        vms.qmp(name, "migrate-set-capabilities", on);
        vms.qmp(name, "migrate", json!({"uri": format!("exec:cat > {}", side.path(&format!("{name}.state")))}));
        vms.monitors[name].until_migrated();
        assert!(fs::metadata(side.path(&format!("{name}.state"))).is_ok_and(|file| file.len() > 8 << 20), "no state");
    }
    vms.finish()
}

/// Starts a QEMU like that of a guest, which waits for the guest's state.
fn destination(side: &Side, vms: &Vms, name: &str) -> (Member, PathBuf, Monitor) {
    let (from, to) = (vms.dir(name), PathBuf::from(side.path(&format!("{name}-next"))));
    fs::create_dir_all(&to).expect("a directory");
    let guests = vms.lab.guests();
    let pid = guests.iter().find(|guest| lab::name(guest) == name).map(lab::pid).expect("its pid");
    let line = fs::read(format!("/proc/{pid}/cmdline")).expect("its command line");
    let (here, there) = (from.to_str().expect("a plain path"), to.to_str().expect("a plain path"));
    let words = String::from_utf8(line).expect("text");
    let mut words: Vec<String> = words.split_terminator('\0').map(|word| word.replace(here, there)).collect();
    words.extend(["-incoming".to_owned(), "defer".to_owned()]);
    let member = side.start(&format!("{name}-next"), &words.iter().map(String::as_str).collect::<Vec<_>>());
    let socket = to.join("qmp");
    until(PATIENCE, "the next QEMU listens", || UnixStream::connect(&socket).is_ok());
    (member, to, Monitor::connect(&socket))
}

fn migrate(side: &Side) -> Value {
    let vms = Vms::boot(side, "", &[]);
    let mut next = Vec::new();
    for (name, is_postcopy) in vms.names.iter().zip([false, true]) {
        let (member, dir, there) = destination(side, &vms, name);
        let source = &vms.monitors[name];
        let uri = format!("unix:{}", side.path(&format!("{name}.migrate")));
        if is_postcopy {
            let on = json!({"capabilities": [{"capability": "postcopy-ram", "state": true}]});
            for monitor in [source, &there] {
                monitor.tell("migrate-set-capabilities", on.clone());
            }
            // Slow enough that much is left to be fetched on demand.
            source.tell("migrate-set-parameters", json!({"max-bandwidth": 8 << 20}));
        }
        there.tell("migrate-incoming", json!({"uri": uri}));
        source.tell("migrate", json!({"uri": uri}));
        if is_postcopy {
            until(PATIENCE, "the migration is active", || {
                source.tell("query-migrate", json!({}))["status"] == "active"
            });
            source.tell("migrate-start-postcopy", json!({}));
        }
        source.until_migrated();
        until(PATIENCE, "the guest runs there", || there.tell("query-status", json!({}))["running"] == true);
        // Pages were fetched by a userfaultfd until now.
        side.attach_again(&member, &format!("{name}-next"), "qemu-system-x86_64");
        // From here on the lab's commands reach the guest in its next QEMU. The first one stays, with nothing to do.
        fs::rename(dir.join("agent"), vms.dir(name).join("agent")).expect("move a socket");
        next.push((member, there));
    }
    let outcome = vms.finish();
    next.iter_mut().for_each(|(member, _)| member.assert_is_well());
    outcome
}
