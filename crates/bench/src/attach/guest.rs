//! A VM that `pagefold bench attach` attaches to. Its guest computes and writes all the time.

use super::subject::{Subject, traces};
use crate::guardian::Guardian;
use anyhow::{Context, ensure};
use cli::say;
use lab::{Cache, Lab, Progress, Spec};
use page::HostVirt;
use std::fs;
use std::ops::Range;
use std::path::Path;
use std::time::Duration;

/// RAM of the guest: 128 MiB.
const RAM_BYTES: u64 = 128 << 20;
/// Time limit for a command in the guest.
const PATIENCE: Duration = Duration::from_secs(60);
/// Script for the guest. It makes a file of 2,000 pages in memory, in which each of 200 page contents is there ten
/// times, and begins to read the file and write another one without end.
const BEGIN: &str =
    "mkdir -p /d && mount -t tmpfs none /d && dd if=/dev/urandom of=/d/part bs=4096 count=200 2>/dev/null &&
for n in 1 2 3 4 5 6 7 8 9 10; do cat /d/part; done > /d/file && sync
(while :; do md5sum /d/file; dd if=/dev/urandom of=/d/noise bs=65536 count=32; done) > /dev/null 2>&1 &";
/// Number of parts of 200 pages that the file consists of, all with the same contents.
const PARTS: usize = 10;

/// The VM, in a lab of its own.
pub struct Vm {
    guest: lab::Guest,
    pid: u32,
    ram: Range<HostVirt>,
    sum: String,
    /// Number of times that a part of the file was written again so far.
    written: usize,
    // Ends its guest when it is dropped.
    _lab: Lab,
}

impl Vm {
    /// Boots the VM and puts its guest under load.
    ///
    /// # Errors
    /// QEMU or a right is missing on this host.
    pub fn start(dir: &Path, guardian: &mut Guardian) -> anyhow::Result<Self> {
        let dir = dir.join("lab");
        guardian.keep_lab(&dir)?;
        let lab = Lab::open(&dir)?;
        let spec = Spec { memory_bytes: Some(RAM_BYTES), ..Spec::new(lab::Image::Tiny) };
        let mut guests = lab.up(&spec, &Cache::open(&lab::cache_dir()?)?, &|event| {
            if let Progress::Building(_) = event {
                say!("pagefold: building the image for the guest, once");
            }
        })?;
        let guest = guests.pop().context("the lab has no guest")?;
        let pid = guest.pid.context("the guest has no process")?;
        let largest = host::Mapping::list(pid)?.into_iter().filter(|mapping| !mapping.shared);
        let largest = largest.max_by_key(|mapping| mapping.end.0 - mapping.start.0).context("QEMU has no memory")?;
        let ram = largest.start..largest.end;
        let mut vm = Self { guest, pid, ram, sum: String::new(), written: 0, _lab: lab };
        vm.tell(BEGIN)?;
        vm.sum = vm.tell("md5sum /d/file")?;
        Ok(vm)
    }

    fn tell(&self, script: &str) -> anyhow::Result<String> {
        let said = self.guest.exec(&["sh", "-c", script], PATIENCE)?;
        ensure!(said.status == 0, "the guest cannot do this: {script}");
        Ok(String::from_utf8_lossy(&said.stdout).into_owned())
    }
}

impl Subject for Vm {
    fn pid(&self) -> u32 {
        self.pid
    }

    fn is_whole(&self) -> bool {
        false
    }

    fn look(&mut self) -> anyhow::Result<Vec<String>> {
        let mut all = traces(self.pid)?;
        // The mappings of the guest's RAM. Neighbours of the same kind count as one: memory that was folded and became
        // a huge page again stays a separate mapping.
        let within = |mapping: &host::Mapping| self.ram.start <= mapping.start && mapping.end <= self.ram.end;
        let mut parts = host::Mapping::list(self.pid)?;
        parts.retain(within);
        parts.dedup_by(|next, part| {
            let kind = |part: &host::Mapping| (part.shared, part.read, part.write, part.execute, part.inode);
            let is_one = part.end == next.start && kind(part) == kind(next);
            if is_one {
                part.end = next.end;
            }
            is_one
        });
        all.extend(parts.iter().map(|part| format!("RAM {:x}-{:x} {}", part.start.0, part.end.0, part.name)));
        Ok(all)
    }

    fn break_folds(&mut self) -> anyhow::Result<()> {
        // Each call writes the next part of the file, with the bytes that it has already. The other parts are not
        // written meanwhile, and can be folded.
        let first = self.written % PARTS * 200;
        self.written += 1;
        self.tell(&format!("dd if=/d/part of=/d/file seek={first} conv=notrunc bs=4096 2>/dev/null")).map(drop)
    }

    fn check(&mut self) -> anyhow::Result<()> {
        let sum = self.tell("md5sum /d/file")?;
        ensure!(sum == self.sum, "the guest has other bytes than it wrote");
        let status = fs::read_to_string(format!("/proc/{}/stat", self.pid))?;
        ensure!(!status.is_empty(), "QEMU has ended");
        Ok(())
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        let _ = self._lab.down();
    }
}
