//! Chooses an accelerator for VMs: KVM if it can run Linux on this host, and emulation otherwise.
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
use host::KvmTrial;
use std::fs::File;
use std::io::ErrorKind;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

/// Time limit of the trial boot under KVM: 6 s. A boot takes about 1 s where KVM works.
const PATIENCE: Duration = Duration::from_secs(6);

/// Whether KVM can run Linux on this host, and why not. A trial boot, if one is needed, has its files in `dir`, and its
/// process bears `mark`.
pub(crate) fn trial(cache: &Cache, boot: &Boot, dir: &Path, mark: &Mark) -> Result<KvmTrial> {
    if let Some(known) = KvmTrial::known(cache.dir()) {
        return Ok(known);
    }
    let _lock = cache.lock("kvm")?;
    if let Some(known) = KvmTrial::known(cache.dir()) {
        return Ok(known);
    }
    let failed = boots_under_kvm(&Boot { disk: None, ..boot.clone() }, &dir.join(".kvm"), mark)?.err();
    let trial = failed.map_or(KvmTrial::Boots, KvmTrial::Fails);
    let answer = KvmTrial::file(cache.dir())?;
    std::fs::write(&answer, trial.text()).map_err(|e| Error::file("write", &answer, e))?;
    Ok(trial)
}

/// Boots a kernel under KVM. The inner error is the reason why it does not boot.
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
        // QEMU has ended. The last line of its own output says more than that its socket was closed.
        _ => format!("a VM can be created, but no kernel boots in it: QEMU ends ({})", last_line(&said)),
    }))
}

/// The last line of a program's output, cut to 200 characters.
fn last_line(text: &str) -> String {
    let line = text.lines().last().map(str::trim).filter(|line| !line.is_empty()).unwrap_or("without a word");
    line.chars().take(200).collect()
}
