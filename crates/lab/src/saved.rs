//! Saved guests: VMs that were booted once, each on its own, and are restored from that state whenever they are wanted.
//!
//! ```text
//!    boot -> ready -> idle -> state into one file, writes to the disk into another --> cache
//!                                                                                       |
//!    QEMU with the same devices reads the state; new writes go to an unnamed file <-----+
//! ```
//! The nth VM of an image in a lab is always restored from the same saved guest. Inside, it has the saved guest's name.

use crate::agent;
use crate::cache::Key;
use crate::error::{Error, Result, tail_of};
use crate::image::{Boot, Workshop};
use crate::program;
use crate::qemu::{self, Accelerator, Machine, Sockets};
use crate::settle::{self, Idle};
use crate::spec::Spec;
use guest::qmp::{Qmp, QmpError};
use host::ProcessId;
use serde_json::json;
use std::fs::File;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// Beginning of a saved guest's name.
pub(crate) const NAME: &str = "saved";
/// Time limit for a guest that was just booted to become idle: 60 s.
const IDLE_PATIENCE: Duration = Duration::from_secs(60);
/// Interval between two queries whether the state is saved: 50 ms.
const STEP: Duration = Duration::from_millis(50);
/// Time-out of a QMP command: 30 s.
const QMP_TIMEOUT: Duration = Duration::from_secs(30);
/// Limit of the speed at which the state is written, in bytes a second. QEMU's default is lower than a disk's speed.
const BANDWIDTH: u64 = 1 << 40;

/// Files of a saved guest.
#[derive(Clone, Debug)]
pub(crate) struct Saved {
    /// State of the machine, with the contents of its RAM.
    pub(crate) state: PathBuf,
    /// The guest's writes to its disk, in a file over the image's disk.
    pub(crate) disk: Option<PathBuf>,
}

/// The saved guests of a request, beginning with number `first`. Those that are missing are booted and saved first.
pub(crate) fn prepare(
    (spec, first): (&Spec, usize),
    boot: &Boot,
    accelerator: Accelerator,
    workshop: &Workshop,
) -> Result<Vec<Saved>> {
    program::find("qemu-img")?;
    let version = program::output(program::command("qemu-system-x86_64")?.arg("--version"))?;
    let make = |number: usize| {
        let name = format!("{NAME}-{number}");
        let (kernel, disk) = (boot.kernel.to_string_lossy(), boot.disk.as_deref().map(Path::to_string_lossy));
        let key = [&*kernel, &boot.initramfs.to_string_lossy(), &disk.unwrap_or_default(), &spec.append, &name];
        let key = key.iter().fold(Key::default(), |key, part| key.with(part.as_bytes()));
        let key = spec.qemu_args.iter().fold(key.with(&version), |key, word| key.with(word.as_bytes()));
        let key = key.with(&spec.memory_bytes().to_le_bytes()).with(format!("{accelerator:?}").as_bytes());
        let dir = workshop.image(&name, &key, |dir| boot_and_save(spec, boot, accelerator, workshop, (&name, dir)))?;
        Ok(Saved::in_dir(&dir, boot))
    };
    thread::scope(|scope| {
        let make = &make;
        let making: Vec<_> = (first..first + spec.guests).map(|number| scope.spawn(move || make(number))).collect();
        making.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic))).collect()
    })
}

impl Saved {
    fn in_dir(dir: &Path, boot: &Boot) -> Self {
        Self { state: dir.join("state"), disk: boot.disk.as_ref().map(|_| dir.join("disk.qcow2")) }
    }
}

/// Boots a guest of this name, and saves it in a directory.
fn boot_and_save(
    spec: &Spec,
    boot: &Boot,
    accelerator: Accelerator,
    workshop: &Workshop,
    (name, dir): (&str, &Path),
) -> Result<()> {
    let saved = Saved::in_dir(dir, boot);
    if let (Some(disk), Some(image)) = (&saved.disk, &boot.disk) {
        let mut create = program::command("qemu-img")?;
        create.args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b"]).arg(image).arg(disk);
        program::output(&mut create)?;
    }
    let mut command = qemu::command(&Machine {
        name,
        dir,
        boot,
        accelerator,
        memory_bytes: spec.memory_bytes(),
        append: &spec.append,
        qemu_args: &spec.qemu_args,
        disk: saved.disk.as_deref().map(qemu::Disk::Kept),
        state: None,
    })?;
    let log = dir.join("log");
    let file = File::create(&log).map_err(|e| Error::file("create", &log, e))?;
    let mut child = workshop.mark.put_on(&mut command).stdout(Stdio::null()).stderr(file).spawn();
    let child = child.as_mut().map_err(|e| Error::file("run", "qemu", std::io::Error::from(e.kind())))?;
    let result = save(spec, child, dir, &saved);
    let _ = child.kill();
    let _ = child.wait();
    result.map_err(|problem| {
        let text = format!("cannot be saved: {problem}\n  {}\n  {}", tail_of(&log), tail_of(&qemu::console_log(dir)));
        Error::guest(name, text.trim_end())
    })
}

/// Waits until a guest is ready and idle, and has QEMU write its state.
fn save(spec: &Spec, child: &Child, dir: &Path, saved: &Saved) -> std::result::Result<(), String> {
    let process = ProcessId::of(child.id()).map_err(|e| e.to_string())?;
    let sockets = Sockets::in_dir(dir);
    let deadline = Instant::now() + spec.patience;
    agent::wait_ready(&sockets.agent, deadline, || process.is_alive()).map_err(|e| e.to_string())?;
    settle::settle(&[process], Idle::default(), IDLE_PATIENCE, &|_| {});
    write_state(&sockets.qmp, &saved.state, deadline).map_err(|e| e.to_string())
}

fn write_state(qmp: &Path, state: &Path, deadline: Instant) -> std::result::Result<(), QmpError> {
    let mut qmp = Qmp::connect(qmp, QMP_TIMEOUT)?;
    let refused = |reason: String| QmpError::Refused { command: "migrate".into(), reason };
    qmp.execute("migrate-set-parameters", json!({"max-bandwidth": BANDWIDTH}))?;
    qmp.execute("migrate", json!({"uri": format!("exec:cat > {}", quoted(state))}))?;
    loop {
        let answer = qmp.execute("query-migrate", json!({}))?;
        match answer["status"].as_str() {
            Some("completed") => break,
            Some("failed" | "cancelled") => return Err(refused(answer.to_string())),
            _ if Instant::now() > deadline => return Err(refused("the state is not written in time".into())),
            _ => thread::sleep(STEP),
        }
    }
    // The answer may be missing, because QEMU ends.
    let _ = qmp.execute("quit", json!({}));
    Ok(())
}

/// QEMU's argument by which a machine is restored from a saved state.
pub(crate) fn incoming(state: &Path) -> String {
    format!("exec:cat {}", quoted(state))
}

/// A path as a single word of the shell.
fn quoted(path: &Path) -> String {
    format!("'{}'", path.to_string_lossy().replace('\'', r"'\''"))
}
