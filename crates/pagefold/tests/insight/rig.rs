//! A lab with one guest, and the guest kernel's own figures compared with what is found from outside.

use crate::common;
use guest::{GuestRam, Survey};
use insight::{Frames, Kernel};
use lab::{Cache, Image, Lab, Spec};
use page::{GuestPageKind as Kind, Lru};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// Number of guests that may run now: one for each of two processors, because emulated guests need them.
static FREE: (Mutex<u32>, Condvar) = (Mutex::new(2), Condvar::new());

/// Leave to run a guest.
struct Leave;

impl Leave {
    fn wait() -> Self {
        let free = FREE.0.lock().unwrap_or_else(PoisonError::into_inner);
        *FREE.1.wait_while(free, |free| *free == 0).unwrap_or_else(PoisonError::into_inner) -= 1;
        Self
    }
}

impl Drop for Leave {
    fn drop(&mut self) {
        *FREE.0.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        FREE.1.notify_one();
    }
}

pub const SOON: Duration = Duration::from_secs(60);

/// A lab with one guest. Dropping it ends the guest.
pub struct World {
    lab: Lab,
    pub guest: lab::Guest,
    dir: tempfile::TempDir,
    _leave: Leave,
}

/// Kernel, memory, devices and options of a guest.
pub struct Recipe<'a> {
    pub suite: Option<&'a str>,
    pub memory_mib: u64,
    pub disk: bool,
    pub append: &'a str,
    pub qemu_args: &'a [&'a str],
}

impl World {
    /// Boots a guest; `None`, with the reason printed, if the host lacks something.
    pub fn boot(recipe: &Recipe<'_>) -> Option<Self> {
        if common::not_root() {
            return None;
        }
        let leave = Leave::wait();
        let dir = tempfile::Builder::new().prefix("inside").tempdir_in("/tmp").expect("a temporary directory");
        let lab = Lab::open(&dir.path().join("lab")).expect("a path");
        let cache = Cache::open(&lab::cache_dir().expect("a cache")).expect("a path");
        let kernel = match recipe.suite.map(|suite| lab::kernel_of_suite(&cache, suite)).transpose() {
            Ok(kernel) => kernel,
            Err(problem) => {
                eprintln!("skipped: no kernel of {}: {problem}", recipe.suite.unwrap_or("this host"));
                return None;
            }
        };
        let mut qemu_args: Vec<String> = recipe.qemu_args.iter().map(|word| (*word).to_owned()).collect();
        if recipe.disk {
            let disk = disk(dir.path());
            qemu_args.push("-drive".to_owned());
            qemu_args.push(format!("if=none,id=data,format=raw,snapshot=on,file={}", disk.display()));
            qemu_args.extend(["-device".to_owned(), "virtio-blk-pci,drive=data".to_owned()]);
        }
        let spec = Spec {
            memory_bytes: Some(recipe.memory_mib << 20),
            kernel,
            append: recipe.append.to_owned(),
            qemu_args,
            ..Spec::new(Image::Tiny)
        };
        let up = lab.up(&spec, &cache, &|_| {});
        match up {
            Ok(mut guests) => Some(Self { lab, guest: guests.remove(0), dir, _leave: leave }),
            Err(lab::Error::Stop(cli::exit::Stop::HostLacks(what))) => {
                eprintln!("skipped: {what}");
                None
            }
            Err(problem) => panic!("{problem}"),
        }
    }

    pub fn shell(&self, script: &str) -> String {
        let output = self.guest.exec(&["sh", "-c", script], SOON).expect("an answer");
        assert_eq!(output.status, 0, "{script}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Prints the end of the logs of the guest and of its VMM.
    fn print_logs(&self) {
        let dir = self.dir.path().join("lab").join(&self.guest.name);
        for log in ["console.log", "log"] {
            let text = std::fs::read(dir.join(log)).unwrap_or_default();
            eprintln!("{log}: {}", String::from_utf8_lossy(&text[text.len().saturating_sub(4000)..]));
        }
    }

    pub fn found(&self) -> guest::Guest {
        let pid = self.guest.pid.expect("it runs");
        let survey = Survey::take().expect("/proc");
        survey.guests(&[], &[]).into_iter().find(|g| g.pids == [pid]).expect("it is found")
    }

    pub fn ram(&self) -> GuestRam {
        guest::open_ram(&self.found(), None).expect("its memory").remove(0)
    }

    pub fn qmp(&self, command: &str, arguments: serde_json::Value) -> serde_json::Value {
        self.guest.qmp(SOON).expect("QMP").execute(command, arguments).expect(command)
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.print_logs();
        }
        let ended = self.lab.down();
        assert!(ended.is_ok() || std::thread::panicking(), "{ended:?} in {}", self.dir.path().display());
    }
}

/// A file system with files to cache, and with `fincore`, which tells the cached pages of a file.
fn disk(dir: &Path) -> PathBuf {
    let tree = dir.join("tree");
    fs::create_dir_all(tree.join("deep/er")).expect("make it");
    let copy = |from: &str| {
        let to = tree.join(Path::new(from).file_name().expect("a name"));
        assert!(Command::new("cp").args(["-L", from]).arg(to).status().expect("run cp").success());
    };
    copy("/usr/bin/fincore");
    let linked = Command::new("ldd").arg("/usr/bin/fincore").output().expect("run ldd");
    String::from_utf8_lossy(&linked.stdout).split_whitespace().filter(|word| word.starts_with('/')).for_each(copy);
    for (name, mib, seed) in [("whole", 12, 1_u64), ("deep/er/half", 16, 2), ("unread", 4, 3)] {
        let mut x = seed;
        let bytes: Vec<u8> = std::iter::repeat_with(|| {
            x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (x >> 56) as u8
        })
        .take(mib << 20)
        .collect();
        fs::write(tree.join(name), bytes).expect("write it");
    }
    let image = dir.join("disk");
    fs::File::create(&image).and_then(|file| file.set_len(64 << 20)).expect("make a disk");
    let made = Command::new("mke2fs").args(["-q", "-t", "ext4", "-d"]).arg(&tree).arg(&image).status();
    assert!(made.expect("run mke2fs").success());
    image
}

/// The guest kernel's own figures, read inside.
struct Truth {
    flags: Vec<u64>,
    meminfo: BTreeMap<String, u64>,
    /// Free pages that processors keep to themselves.
    kept: u64,
    /// Frames of the kernel's text, read-only data and data.
    image: Vec<(Kind, std::ops::Range<u64>)>,
}

mod kpf {
    pub const SLAB: u64 = 1 << 7;
    pub const BUDDY: u64 = 1 << 10;
    pub const ANON: u64 = 1 << 12;
    pub const SWAPBACKED: u64 = 1 << 14;
    pub const OFFLINE: u64 = 1 << 23;
    pub const PGTABLE: u64 = 1 << 26;
    pub const RESERVED: u64 = 1 << 32;
}

impl Truth {
    fn of(world: &World) -> Self {
        let dir = world.dir.path();
        let zipped = world.guest.exec(&["sh", "-c", "gzip -c </proc/kpageflags"], SOON).expect("an answer").stdout;
        fs::write(dir.join("flags.gz"), zipped).expect("write it");
        let unzipped = Command::new("gzip").arg("-dc").arg(dir.join("flags.gz")).output().expect("run gzip").stdout;
        let flags = unzipped.as_chunks::<8>().0.iter().map(|word| u64::from_ne_bytes(*word)).collect();
        let text = world.shell("cat /proc/meminfo");
        let lines = text.lines().filter_map(|line| line.split_once(':'));
        let kib = |rest: &str| rest.trim().split(' ').next()?.parse::<u64>().ok();
        let meminfo = lines.filter_map(|(name, rest)| Some((name.to_owned(), kib(rest)? / 4))).collect();
        let zones = world.shell("cat /proc/zoneinfo");
        let kept =
            zones.lines().filter_map(|line| line.trim().strip_prefix("count:")?.trim().parse::<u64>().ok()).sum();
        let iomem = world.shell("cat /proc/iomem");
        let range = |what: &str| {
            let line = iomem.lines().find(|line| line.ends_with(what)).expect(what);
            let (first, last) = line.split(" : ").next().and_then(|r| r.trim().split_once('-')).expect("a range");
            let address = |hex: &str| u64::from_str_radix(hex, 16).expect("an address");
            address(first) >> 12..(address(last) + 1) >> 12
        };
        let image = vec![
            (Kind::KernelText, range("Kernel code")),
            (Kind::KernelRodata, range("Kernel rodata")),
            (Kind::KernelData, range("Kernel data")),
        ];
        Self { flags, meminfo, kept, image }
    }

    fn kind(flags: u64) -> Option<Kind> {
        match flags {
            _ if flags & kpf::RESERVED != 0 => Some(Kind::Reserved),
            _ if flags & kpf::BUDDY != 0 => Some(Kind::Free),
            _ if flags & kpf::PGTABLE != 0 => Some(Kind::PageTables),
            _ if flags & kpf::SLAB != 0 => Some(Kind::Slab),
            _ if flags & kpf::OFFLINE != 0 => Some(Kind::Balloon),
            _ if flags & kpf::ANON != 0 => Some(Kind::Anonymous),
            _ if flags & kpf::SWAPBACKED != 0 => Some(Kind::Shmem),
            _ => None,
        }
    }

    /// Asserts that every kind agrees within 2% or 1 MiB.
    fn compare(&self, frames: &Frames, when: &str) {
        let found = insight::count(&frames.uses);
        let of = |kind: Kind| found[kind as usize];
        let mut wanted: BTreeMap<Kind, u64> = BTreeMap::new();
        for kind in self.flags.iter().filter_map(|flags| Self::kind(*flags)) {
            *wanted.entry(kind).or_default() += 1;
        }
        *wanted.entry(Kind::Free).or_default() += self.kept;
        wanted.insert(Kind::KernelStack, self.meminfo["KernelStack"]);
        let cached = self.meminfo["Cached"] + self.meminfo["Buffers"];
        wanted.insert(Kind::PageCache, cached.saturating_sub(self.meminfo["Shmem"]));
        // The guest also counts its kernel image as reserved; the image is compared range by range below.
        let reserved = wanted.remove(&Kind::Reserved).unwrap_or(0);
        let mut in_image = 0;
        for (frame, flags) in self.flags.iter().enumerate().filter(|(_, flags)| *flags & kpf::RESERVED != 0) {
            let use_of = frames.index.of(frame as u64).map(|place| frames.uses[place].kind());
            in_image += u64::from(use_of.is_some_and(|kind| kind != Kind::Reserved && kind != Kind::Unknown));
            assert!(use_of != Some(Kind::Free), "{when}: frame {frame:#x} is reserved ({flags:#x})");
        }
        wanted.insert(Kind::Reserved, reserved - in_image);
        eprintln!("{when}: {:?}", wanted.iter().map(|(k, n)| (k.name(), *n, of(*k))).collect::<Vec<_>>());
        for (kind, want) in wanted {
            let allowed = (want / 50).max(256);
            assert!(of(kind).abs_diff(want) <= allowed, "{when}: {} {} against {want}", kind.name(), of(kind));
        }
        for (kind, range) in &self.image {
            let of_range = || range.clone().filter_map(|frame| frames.index.of(frame));
            let same = of_range().filter(|place| frames.uses[*place].kind() == *kind).count();
            assert!(same * 100 >= of_range().count() * 98, "{when}: {kind:?} {same} of {range:?}");
        }
        assert!(of(Kind::Unknown) < 256, "{when}: {} unknown", of(Kind::Unknown));
        // Frames on each list of the guest's reclaim. The guest counts those of the multi-generational LRU the same
        // way.
        let on = |lists: &[Lru]| frames.uses.iter().filter(|u| lists.contains(&u.lru())).count() as u64;
        let inactive = on(&[Lru::Inactive, Lru::InactiveReferenced]);
        for (name, found) in
            [("Active", on(&[Lru::Active])), ("Inactive", inactive), ("Unevictable", on(&[Lru::Unevictable]))]
        {
            let want = self.meminfo[name];
            eprintln!("{when}: {name} {want} {found}");
            assert!(found.abs_diff(want) <= (want / 50).max(256), "{when}: {name} {found} against {want}");
        }
    }
}

pub fn compare(world: &World, when: &str) -> (GuestRam, Frames) {
    let truth = Truth::of(world);
    world.qmp("stop", serde_json::json!({}));
    let ram = world.ram();
    let frames = {
        let kernel = Kernel::find(&ram).unwrap_or_else(|e| panic!("{when}: {e}"));
        assert!(kernel.has_types(), "{when}: no BTF");
        assert!(kernel.kaslr_offset().is_some(), "{when}");
        kernel.classify()
    };
    world.qmp("cont", serde_json::json!({}));
    truth.compare(&frames, when);
    (ram, frames)
}
