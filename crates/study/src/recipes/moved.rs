//! `li-exp3`: a guest moves to another host while both hosts' memory is counted.
//!
//! ```text
//!   guests on the source, guests on the target -> folded until that is settled -> pagefold migrate: frames of both hosts
//!     -> 2 s after its end -> folded until that is settled
//! ```
//!
//! The hosts are two groups of one service of Pagefold's: no frame belongs to both.

use super::{D256, alike, rep_of, timeline};
use crate::plan::Planned;
use crate::record::{MERGED, Measured, Timeline};
use crate::rig::{Group, Merger, Rig, System, Taken, Vms, VmsWanted, frames_of, mb, pause, wait};
use anyhow::{Context, bail, ensure};
use guest::Qmp;
use host::ProcessId;
use std::collections::HashSet;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Names of the hosts' groups.
const HOSTS: [&str; 2] = ["source", "target"];
/// Guests like the one that moves, on each host of the arm `beside`.
const LIKE: usize = 2;
/// Random data that each guest holds besides its system, in MiB.
const OWN_MIB: u32 = 32;
/// Most bytes a second of the migration: 94% of 1 Gbit/s.
const BANDWIDTH: &str = "117500000";
/// Time between two counts of the hosts' memory.
const LOOK: Duration = Duration::from_millis(500);
/// Time from the end of the migration to the count by which the prediction is judged.
const SOON: Duration = Duration::from_secs(2);
/// Time limit for the QEMU on the target to be ready for the migration.
const WAITS: Duration = Duration::from_secs(30);
/// Time limit of an answer of that QEMU.
const ANSWER: Duration = Duration::from_millis(500);

/// The QEMU on the target that waits for the migration. Dropping this ends it.
struct Waiting {
    child: Child,
    pid: u32,
    uri: String,
}

impl Waiting {
    /// Starts a QEMU with the same machine as process `pid` has, as a member of the target's group. It waits for a
    /// migration.
    fn start(rig: &mut Rig, merger: &mut Merger, guest: &lab::Guest) -> anyhow::Result<Self> {
        let (pid, qmp) = (guest.pid.context("it has ended")?, guest.qmp.as_ref().context("it has no QMP socket")?);
        let old = qmp.parent().context("a socket without a directory")?.to_str().context("a path that is no text")?;
        let dir = rig.dir().join("waits");
        fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        let socket = dir.join("in");
        let _ = fs::remove_file(&socket);
        let uri = format!("unix:{}", socket.display());
        let words = machine(pid, old, dir.to_str().context("a path that is no text")?)?;
        let fold = merger.lab()?.context("nobody folds")?;
        let mut command = Command::new(fold.pagefold);
        command.args(["run", "--group", HOSTS[1], "--name", "moved", "--service"]);
        command.arg(fold.service.context("no service")?).arg("--").args(words).args(["-incoming", &uri]);
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().context("cannot start QEMU")?;
        let pid = child.id();
        rig.guardian().keep_process(ProcessId::of(pid)?)?;
        let waiting = Self { child, pid, uri };
        let answers = dir.join(qmp.file_name().context("a socket without a name")?);
        ensure!(
            wait(WAITS, || Ok(status(&answers).is_some_and(|is| is == "inmigrate")))?,
            "no QEMU waits on the target"
        );
        merger.meet(&[(pid, HOSTS[1].to_owned())])?;
        Ok(waiting)
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        // Fails only if it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The command line of a running QEMU, with paths in another directory, and without the argument for the saved state
/// from which it was restored.
fn machine(pid: u32, old: &str, new: &str) -> anyhow::Result<Vec<String>> {
    let line = fs::read(format!("/proc/{pid}/cmdline")).context("cannot read its command line")?;
    let line = String::from_utf8(line).context("a command line that is no text")?;
    Ok(with_directory(&line, old, new))
}

fn with_directory(line: &str, old: &str, new: &str) -> Vec<String> {
    let mut words: Vec<String> = line.split_terminator('\0').map(|word| word.replace(old, new)).collect();
    if let Some(at) = words.iter().position(|word| word == "-incoming") {
        words.drain(at..words.len().min(at + 2));
    }
    words
}

fn status(qmp: &Path) -> Option<String> {
    let answer = Qmp::connect(qmp, ANSWER).ok()?.execute("query-status", serde_json::json!({})).ok()?;
    answer["status"].as_str().map(str::to_owned)
}

/// For each of the two hosts, the processes of its guests.
struct Two<'a> {
    merger: &'a Merger,
    pids: [Vec<u32>; 2],
}

impl Two<'_> {
    /// Memory of a host's guests and of its pool, in MB.
    fn mb(&self, host: usize) -> anyhow::Result<f64> {
        let pids: Vec<u32> = self.pids[host].iter().copied().filter(|pid| ProcessId::of(*pid).is_ok()).collect();
        let pool: Vec<u32> = self.merger.worker_of(HOSTS[host])?.into_iter().collect();
        Ok(mb(Taken::by(&pids, &pool)?.frames as f64))
    }
}

/// Starts the guests of an arm. The first one is the guest that will move.
fn guests(rig: &mut Rig, planned: &Planned, merger: &mut Merger) -> anyhow::Result<Vms> {
    let like = if planned.arm == "beside" { LIKE } else { 0 };
    let of = |guests, first, host: usize| VmsWanted {
        groups: vec![HOSTS[host].to_owned()],
        system: System::TINY,
        ..alike(guests, first, D256 / 2)
    };
    let mut vms = rig.vms(&of(1 + like, rep_of(planned), 0), merger)?;
    if like > 0 {
        vms.add(rig, &of(like, rep_of(planned) + 1 + like, 1), merger)?;
    }
    vms.tell(&vms.guests, &format!("dd if=/dev/urandom of=/tmp/own bs=1M count={OWN_MIB} 2>/dev/null"))?;
    Ok(vms)
}

/// Migrates a guest. `look` is called again and again meanwhile.
fn migrate(pid: u32, uri: &str, service: &Path, look: &mut dyn FnMut() -> anyhow::Result<()>) -> anyhow::Result<()> {
    let mut command = Command::new(crate::rig::program()?);
    command.args(["migrate", &pid.to_string(), "--to", uri, "--bandwidth", BANDWIDTH, "--service"]).arg(service);
    let mut child =
        command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().context("cannot run pagefold migrate")?;
    loop {
        let looked = look().and_then(|()| pause(LOOK));
        if let Some(ended) = child.try_wait().context("cannot wait for pagefold migrate")? {
            looked?;
            return if ended.success() { Ok(()) } else { bail!("the guest was not moved") };
        }
        looked.inspect_err(|_| _ = child.kill())?;
    }
}

/// The recipe of `li-exp3`.
pub fn migrated(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    let mut merger = rig.merger("fold", &HOSTS.map(Group::of))?;
    let vms = guests(rig, planned, &mut merger)?;
    let (begin, mut settling) = (Instant::now(), timeline());
    merger.on()?;
    merger.settle(begin, &mut settling)?;
    let (mut measured, mover) = (Measured::default(), vms.pids()[0]);
    measured.put(MERGED, merger.taken(&vms.pids())?.merged_pages as f64);
    let on = |host: usize| {
        vms.guests.iter().filter(|one| one.group == HOSTS[host]).filter_map(|one| one.pid).collect::<Vec<u32>>()
    };
    let pids: [Vec<u32>; 2] = [on(0), on(1)];
    let unique = mb(alone(mover, &pids[0])? as f64);
    let service = merger.lab()?.and_then(|fold| fold.service).context("no service")?;
    let before = Two { merger: &merger, pids: pids.clone() };
    let before = [before.mb(0)?, before.mb(1)?];
    let waiting = Waiting::start(rig, &mut merger, &vms.guests[0])?;
    let mut two = Two { merger: &merger, pids };
    two.pids[1].push(waiting.pid);
    let (after, lines) = moved(&two, mover, &waiting.uri, &service)?;
    merger.settle(begin, &mut settling)?;
    let settled = two.mb(1)?;
    let (loss, gain, kept) = (before[0] - after[0], after[1] - before[1], settled - before[1]);
    measured.put("unique_mb", unique);
    for (host, when, value) in [
        ("source_mb", "before", before[0]),
        ("source_mb", "after", after[0]),
        ("target_mb", "before", before[1]),
        ("target_mb", "after", after[1]),
        ("target_mb", "settled", settled),
    ] {
        measured.put_at(host, when, value);
    }
    measured.put("rid_share", loss / unique);
    measured.put("gain_over_loss", gain / loss);
    measured.put("settled_over_loss", kept / loss);
    measured.timelines.extend(lines);
    Ok(measured)
}

/// Migrates the guest. Returns the memory of both hosts 2 s after the end of the migration, in MB, and their memory
/// over time.
fn moved(two: &Two<'_>, mover: u32, uri: &str, service: &Path) -> anyhow::Result<([f64; 2], [Timeline; 2])> {
    let mut lines = HOSTS.map(|name| Timeline { name: name.into(), unit: "MB".into(), ..Timeline::default() });
    let began = Instant::now();
    let mut look = || -> anyhow::Result<()> {
        for (host, line) in lines.iter_mut().enumerate() {
            // A count fails if the guest ends in the middle of it, and is left out.
            line.points.extend(two.mb(host).ok().map(|value| (began.elapsed().as_secs_f64(), value)));
        }
        Ok(())
    };
    migrate(mover, uri, service, &mut look)?;
    let end = Instant::now();
    while end.elapsed() + LOOK < SOON {
        look()?;
        pause(LOOK)?;
    }
    Ok(([two.mb(0)?, two.mb(1)?], lines))
}

/// Number of frames that a guest maps and no other guest of its host does.
fn alone(pid: u32, all: &[u32]) -> anyhow::Result<usize> {
    let mut own = frames_of(pid)?;
    for other in all.iter().filter(|other| **other != pid) {
        let theirs: HashSet<_> = frames_of(*other)?;
        own.retain(|frame| !theirs.contains(frame));
    }
    Ok(own.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machine_is_the_same_in_another_directory_and_waits_for_nothing_else() {
        let line = "qemu\0-m\x00128B\0-mon\0/lab/a/qmp\0-incoming\0exec:cat '/cache/state'\0";
        assert_eq!(with_directory(line, "/lab/a", "/new"), ["qemu", "-m", "128B", "-mon", "/new/qmp"]);
        let path = Path::new("/new");
        assert!(status(path).is_none(), "nobody answers there");
    }
}
