//! The choice of an accelerator: KVM where it runs Linux, emulation elsewhere.
//!
//! An open `/dev/kvm` proves little: in nested virtual machines, KVM may run tiny payloads and no kernel. So the lab
//! boots a kernel under KVM once, and keeps the answer in the cache until the host boots again.

use crate::agent;
use crate::cache::{Cache, remove_dir};
use crate::error::{Error, Result, tail_of};
use crate::image::Boot;
use crate::life::Mark;
use crate::place;
use crate::qemu::{Accelerator, Machine, Sockets, command};
use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

/// Time-out of the trial boot under KVM: 6 s. A boot takes about 1 s where KVM works.
const PATIENCE: Duration = Duration::from_secs(6);

/// Time after which a failed trial is repeated: 1 h. A busy host may have been the cause.
const AGAIN: Duration = Duration::from_secs(3600);
/// Content of the answer's file where KVM works; otherwise the file has the reason.
const WORKS: &str = "yes";

/// Outcome of the trial whether KVM runs a kernel here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trial {
    /// A kernel boots.
    Boots,
    /// It does not, for this reason.
    Fails(String),
}

/// The outcome that the next [`crate::Lab::up`] with this cache goes by; `None` if it will make a trial first.
pub fn kvm_trial(cache: &Cache) -> Option<Trial> {
    if let Err(e) = host::create_vm() {
        return Some(Trial::Fails(format!("/dev/kvm: {e}")));
    }
    let answer = answer_file(cache).ok()?;
    let text = fs::read_to_string(&answer).ok()?;
    if text == WORKS {
        return Some(Trial::Boots);
    }
    let age = fs::metadata(&answer).and_then(|m| m.modified()).ok()?.elapsed().unwrap_or_default();
    let minutes = age.as_secs() / 60;
    (age < AGAIN).then(|| Trial::Fails(format!("{text} (tried {minutes} min ago; tried again when that is an hour)")))
}

impl Trial {
    /// The outcome. A trial boot, where one is needed, uses `dir` and bears `mark`.
    pub(crate) fn make(cache: &Cache, boot: &Boot, dir: &Path, mark: &Mark) -> Result<Self> {
        if let Some(known) = kvm_trial(cache) {
            return Ok(known);
        }
        let _lock = cache.lock("kvm")?;
        if let Some(known) = kvm_trial(cache) {
            return Ok(known);
        }
        let failed = boots_under_kvm(&Boot { disk: None, ..boot.clone() }, &dir.join(".kvm"), mark)?.err();
        let answer = answer_file(cache)?;
        let text = failed.as_deref().unwrap_or(WORKS);
        fs::write(&answer, text).map_err(|e| Error::file("write", &answer, e))?;
        Ok(failed.map_or(Self::Boots, Self::Fails))
    }
}

fn answer_file(cache: &Cache) -> Result<PathBuf> {
    Ok(cache.dir().join(format!("kvm-{}", host::boot_id()?)))
}

/// Boots a kernel, or gives the reason why it does not.
fn boots_under_kvm(boot: &Boot, dir: &Path, mark: &Mark) -> Result<std::result::Result<(), String>> {
    remove_dir(dir)?;
    place::private_dir(dir)?;
    let machine = Machine {
        name: "kvm-probe",
        dir,
        boot,
        accelerator: Accelerator::Kvm,
        memory_bytes: 128 << 20,
        append: "",
        qemu_args: &[],
        disk: None,
        state: None,
    };
    let mut qemu = command(&machine)?;
    mark.put_on(&mut qemu);
    let log = dir.join("log");
    let errors = File::create(&log).map_err(|e| Error::file("create", &log, e))?;
    let mut child = qemu.stdout(Stdio::null()).stderr(errors).spawn().map_err(|e| Error::file("run", "qemu", e))?;
    let id = host::ProcessId::of(child.id());
    let alive = || id.as_ref().is_ok_and(host::ProcessId::is_alive);
    let ready = agent::wait_ready(&Sockets::in_dir(dir).agent, Instant::now() + PATIENCE, alive);
    // Both calls fail only if QEMU has ended by itself.
    let _ = child.kill();
    let _ = child.wait();
    let said = tail_of(&log);
    remove_dir(dir)?;
    let seconds = PATIENCE.as_secs();
    Ok(ready.map_err(|e| match e.kind() {
        ErrorKind::TimedOut | ErrorKind::WouldBlock => {
            format!("a VM can be created, but no kernel boots in it within {seconds} s")
        }
        // QEMU has ended; that it closed its socket says less than its own last words.
        _ => format!("a VM can be created, but no kernel boots in it: QEMU ends ({})", last_line(&said)),
    }))
}

/// The last line of a program's output, at most 200 characters of it.
fn last_line(text: &str) -> String {
    let line = text.lines().last().map(str::trim).filter(|line| !line.is_empty()).unwrap_or("without a word");
    line.chars().take(200).collect()
}
