//! The choice of an accelerator: KVM where it runs Linux, emulation elsewhere.
//!
//! An open `/dev/kvm` proves little: in nested virtual machines, KVM may run tiny payloads and no kernel. So the lab
//! boots a kernel under KVM once, and keeps the answer in the cache until the host boots again.

use crate::agent;
use crate::cache::{Cache, remove_dir};
use crate::error::{Error, Result};
use crate::image::Boot;
use crate::life::Mark;
use crate::place;
use crate::qemu::{Accelerator, Machine, Sockets, command};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

/// Time-out of the trial boot under KVM: 6 s. A boot takes about 1 s where KVM works.
const PATIENCE: Duration = Duration::from_secs(6);

impl Accelerator {
    /// The better accelerator of those that work here. A trial boot, where one is needed, uses `dir` and bears `mark`.
    pub(crate) fn choose(cache: &Cache, boot: &Boot, dir: &Path, mark: &Mark) -> Result<Self> {
        if File::options().read(true).write(true).open("/dev/kvm").is_err() {
            return Ok(Self::Tcg);
        }
        let _lock = cache.lock("kvm")?;
        let answer = answer_file(cache)?;
        if let Ok(text) = fs::read_to_string(&answer) {
            return Ok(if text == "yes" { Self::Kvm } else { Self::Tcg });
        }
        let works = boots_under_kvm(&Boot { disk: None, ..boot.clone() }, &dir.join(".kvm"), mark)?;
        fs::write(&answer, if works { "yes" } else { "no" }).map_err(|e| Error::file("write", &answer, e))?;
        Ok(if works { Self::Kvm } else { Self::Tcg })
    }
}

fn answer_file(cache: &Cache) -> Result<PathBuf> {
    let path = Path::new("/proc/sys/kernel/random/boot_id");
    let boot_id = fs::read_to_string(path).map_err(|e| Error::file("read", path, e))?;
    Ok(cache.dir().join(format!("kvm-{}", boot_id.trim())))
}

fn boots_under_kvm(boot: &Boot, dir: &Path, mark: &Mark) -> Result<bool> {
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
    let mut child =
        qemu.stdout(Stdio::null()).stderr(Stdio::null()).spawn().map_err(|e| Error::file("run", "qemu", e))?;
    let id = host::ProcessId::of(child.id());
    let alive = || id.as_ref().is_ok_and(host::ProcessId::is_alive);
    let ready = agent::wait_ready(&Sockets::in_dir(dir).agent, Instant::now() + PATIENCE, alive);
    // Both calls fail only if QEMU has ended by itself.
    let _ = child.kill();
    let _ = child.wait();
    remove_dir(dir)?;
    Ok(ready.is_ok())
}
