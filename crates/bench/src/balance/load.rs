//! The load of guests that `pagefold bench balance` compares policies with: idle and busy guests. Also takes memory of
//! the host as other programs would.

use super::rig::{PATIENCE, on_all};
use crate::guardian::Guardian;
use crate::synthetic::{filled, write_pages};
use anyhow::Context;
use lab::Guest;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

/// Size of the disk whose contents all guests have: 96 MiB.
pub const DISK: u64 = 96 << 20;

/// The system of the guests, which decides what they read and where they keep memory of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum System {
    /// The image `tiny`, with the disk of [`Load::make_disk`].
    Tiny,
    /// The image `debian`, with its own disk.
    Debian,
}

/// Shell commands by which the load is made in one system.
#[derive(Clone, Copy)]
struct Words {
    /// Directory of a file system in memory: what is written there uses the guest's memory.
    memory: &'static str,
    /// Reads what is on the disks of all guests.
    read: &'static str,
    /// Writes file `$i` of `$c` MiB into that directory: what is on the disk, from byte `$o` on, so that no other guest
    /// has pages of this content.
    copy: &'static str,
    /// Empties the page cache that copying has filled.
    forget: &'static str,
    /// Most memory that one file takes, in MiB. Copying it takes as much page cache.
    most_mib: u64,
    /// Prints how many MiB may be filled: the free memory less 64 MiB, or 48 in Debian. The kernel itself keeps 30 MiB
    /// of free memory back.
    free: &'static str,
}

/// Commands for the image `tiny`: they read a disk of 96 MiB.
const TINY: Words = Words {
    memory: "/tmp",
    read: "dd if=/dev/vda of=/dev/null bs=64k 2>/dev/null",
    copy: "dd if=/dev/vda of=/tmp/$i bs=64k count=$((c * 16)) skip=$o iflag=skip_bytes 2>/dev/null",
    forget: "echo 1 > /proc/sys/vm/drop_caches",
    most_mib: 16,
    free: "awk '/MemFree/ {print int($2 / 1024) - 64}' /proc/meminfo",
};

/// Commands for the image `debian`: they read the programs and libraries of Debian, 300 MiB.
const DEBIAN: Words = Words {
    memory: "/dev/shm",
    read: "find /usr/bin /usr/sbin /usr/lib/x86_64-linux-gnu -type f -exec cat {} + > /dev/null 2>&1",
    copy: "tail -c +$o /usr/sbin/mariadbd | head -c ${c}M > /dev/shm/$i",
    forget: "true",
    most_mib: 24,
    free: "awk '/MemFree/ {print int($2 / 1024) - 48}' /proc/meminfo",
};

impl System {
    const fn words(self) -> Words {
        match self {
            Self::Tiny => TINY,
            Self::Debian => DEBIAN,
        }
    }
}

/// Guests and their load.
pub struct Load {
    system: System,
    guests: Vec<Guest>,
    /// Number of idle guests, which come first in `guests`.
    idle: usize,
    /// Directory in memory with the files that take memory of the host.
    taken: PathBuf,
    files: u64,
    taken_bytes: u64,
}

/// Counters of a guest since it started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Suffered {
    /// Allocations that had to reclaim memory first.
    pub stalls: u64,
    /// Processes that were killed for want of memory.
    pub kills: u64,
}

impl Suffered {
    /// Reads the counters from a guest's `/proc/vmstat`.
    fn of(vmstat: &str) -> Self {
        let mut sum = Self::default();
        for (name, count) in vmstat.lines().filter_map(|line| line.split_once(' ')) {
            let count: u64 = count.trim().parse().unwrap_or(0);
            sum.stalls += if name.starts_with("allocstall") { count } else { 0 };
            sum.kills += if name == "oom_kill" { count } else { 0 };
        }
        sum
    }

    /// The sum of two guests' counters.
    pub fn plus(self, other: Self) -> Self {
        Self { stalls: self.stalls + other.stalls, kills: self.kills + other.kills }
    }

    /// The counts since an earlier reading.
    pub fn since(self, before: Self) -> Self {
        Self { stalls: self.stalls.saturating_sub(before.stalls), kills: self.kills.saturating_sub(before.kills) }
    }
}

impl Load {
    /// Makes the file of the guests' disk. No two of its pages are equal.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn make_disk(dir: &Path) -> anyhow::Result<PathBuf> {
        let path = dir.join("disk");
        write_pages(&path, (1..=DISK >> 12).map(filled))?;
        Ok(path)
    }

    /// QEMU's arguments for a guest with this disk, read-only. The host keeps no page cache for it.
    pub fn disk_of(path: &Path) -> [&str; 4] {
        let options = format!("if=none,id=load,format=raw,readonly=on,cache.direct=on,file={}", path.display());
        // Arguments of one bench, made once for each kind of guests.
        let options: &'static str = Box::leak(options.into_boxed_str());
        ["-drive", options, "-device", "virtio-blk-pci,drive=load"]
    }

    /// Starts the load in guests, the first of which are idle. `name` is the policy's.
    ///
    /// # Errors
    /// A guest does not do it.
    pub fn start(
        (system, guests): (System, Vec<Guest>),
        idle: usize,
        name: &str,
        guardian: &mut Guardian,
    ) -> anyhow::Result<Self> {
        let taken = PathBuf::from(format!("/dev/shm/pagefold-bench-{}-{name}", std::process::id()));
        guardian.keep_dir(&taken)?;
        fs::create_dir(&taken).with_context(|| format!("cannot make {}", taken.display()))?;
        let load = Self { system, guests, idle, taken, files: 0, taken_bytes: 0 };
        let Words { memory, read, free, .. } = system.words();
        load.on_all(|_| format!("mount -o remount,size=95% {memory}"))?;
        load.on_busy(&format!(
            "{read}; f=$({free}); [ $f -le 0 ] || dd if=/dev/urandom of={memory}/own bs=1M count=$f 2>/dev/null"
        ))?;
        load.on_busy(&format!("setsid sh -c 'while :; do {read}; sleep 1; done' </dev/null >/dev/null 2>&1 &"))?;
        load.fill()?;
        Ok(load)
    }

    /// Uses all memory that is free in idle guests, and frees it again.
    ///
    /// # Errors
    /// A guest does not do it.
    fn fill(&self) -> anyhow::Result<()> {
        // Content that no other page has, as fast as a guest can copy. The guest tells before each file what is free: its page
        // cache grows, and a guest that fills up ends all its processes, and itself.
        let Words { memory, copy, forget, most_mib: most, free, .. } = self.system.words();
        let script = |n: usize| {
            format!(
                "i=0; while [ $i -lt 99 ] && c=$({free}) && [ $c -gt 0 ]; do \
                 [ $c -gt {most} ] && c={most}; i=$((i + 1)); o=$(({n} * 1024 + i * 16)); {copy}; done; \
                 rm -f {memory}/[0-9]*; {forget}"
            )
        };
        self.on_all(|n| if n < self.idle { script(n + 1) } else { "true".into() })
    }

    /// Stalls and kills of each guest. One that has ended does not tell.
    ///
    /// # Errors
    /// A guest runs and does not answer.
    pub fn suffered(&self) -> anyhow::Result<Vec<Option<Suffered>>> {
        let of = |guest: &Guest| {
            if guest.pids().is_empty() {
                return Ok(None);
            }
            let output = guest.exec(&["cat", "/proc/vmstat"], PATIENCE)?;
            Ok(Some(Suffered::of(&String::from_utf8_lossy(&output.stdout))))
        };
        self.guests.iter().map(of).collect()
    }

    /// Takes memory of the host, on behalf of the control group in which this process is.
    ///
    /// # Errors
    /// The host has no memory left, or a file cannot be written.
    pub fn take(&mut self, bytes: u64) -> anyhow::Result<()> {
        let path = self.taken.join(self.files.to_string());
        let cannot = || format!("cannot write {}", path.display());
        let mut file = File::create(&path).with_context(cannot)?;
        let chunk = vec![1; 1 << 20];
        for _ in 0..bytes >> 20 {
            file.write_all(&chunk).with_context(cannot)?;
        }
        self.files += 1;
        self.taken_bytes += bytes >> 20 << 20;
        Ok(())
    }

    /// Memory of the host that is taken.
    pub fn taken_bytes(&self) -> u64 {
        self.taken_bytes
    }

    /// Gives back all that was taken of the host.
    ///
    /// # Errors
    /// A file cannot be removed.
    pub fn give_way(&mut self) -> anyhow::Result<()> {
        for n in 0..self.files {
            fs::remove_file(self.taken.join(n.to_string())).context("cannot give memory back")?;
        }
        (self.files, self.taken_bytes) = (0, 0);
        Ok(())
    }

    /// Processes of the guests.
    pub fn pids(&self) -> Vec<u32> {
        self.guests.iter().filter_map(|guest| guest.pid).collect()
    }

    fn on_busy(&self, script: &str) -> anyhow::Result<()> {
        self.on_all(|n| if n < self.idle { "true".into() } else { script.to_owned() })
    }

    fn on_all(&self, script: impl Fn(usize) -> String) -> anyhow::Result<()> {
        on_all(&self.guests, script)
    }
}
