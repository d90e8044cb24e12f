//! Kinds of a VM's pages as found from outside, compared with the guest kernel's own figures from inside.

mod common;

use guest::{GuestRam, Survey};
use insight::{Frames, GuestMemory, Kernel, Saved};
use lab::{Cache, Image, Lab, Spec};
use page::{GuestPageKind as Kind, GuestPhys, Lru};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

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

const SOON: Duration = Duration::from_secs(60);

/// A lab with one guest. Dropping it ends the guest.
struct World {
    lab: Lab,
    guest: lab::Guest,
    dir: tempfile::TempDir,
    _leave: Leave,
}

/// Kernel, memory, devices and options of a guest.
struct Recipe<'a> {
    suite: Option<&'a str>,
    memory_mib: u64,
    disk: bool,
    append: &'a str,
    qemu_args: &'a [&'a str],
}

impl World {
    /// Boots a guest; `None`, with the reason printed, if the host lacks something.
    fn boot(recipe: &Recipe<'_>) -> Option<Self> {
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

    fn shell(&self, script: &str) -> String {
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

    fn found(&self) -> guest::Guest {
        let pid = self.guest.pid.expect("it runs");
        let survey = Survey::take().expect("/proc");
        survey.guests(&[], &[]).into_iter().find(|g| g.pids == [pid]).expect("it is found")
    }

    fn ram(&self) -> GuestRam {
        guest::open_ram(&self.found(), None).expect("its memory").remove(0)
    }

    fn qmp(&self, command: &str, arguments: serde_json::Value) -> serde_json::Value {
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

fn compare(world: &World, when: &str) -> (GuestRam, Frames) {
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

/// Asserts that the cached pages of each file, found from outside, are those that `fincore` sees in the guest.
fn compare_files(world: &World, when: &str) {
    let libraries = "/mnt/ld-linux-x86-64.so.2 --library-path /mnt";
    let seen =
        world.shell(&format!("{libraries} /mnt/fincore -rbno PAGES,FILE /mnt/whole /mnt/deep/er/half /mnt/unread"));
    let ram = world.ram();
    let kernel = Kernel::find(&ram).expect("a kernel");
    let frames = kernel.classify();
    let mut pages: BTreeMap<String, u64> = BTreeMap::new();
    for number in frames.file_of.iter().filter(|number| **number > 0) {
        let file = kernel.file(frames.files[*number as usize - 1]);
        *pages.entry(file.and_then(|f| f.path).unwrap_or_default()).or_default() += 1;
    }
    let mut compared = 0;
    for (count, path) in seen.lines().filter_map(|line| line.trim().split_once(' ')) {
        let inside: u64 = count.parse().expect("a count");
        // Linux 5.10 may read ahead a page behind the file's end, which cannot be mapped and which fincore does not
        // see.
        let found = pages.get(path.trim()).copied().unwrap_or(0);
        assert!((inside..=inside + 1).contains(&found), "{when}: {found} of {inside} pages of {path}: {pages:?}");
        compared += u64::from(inside > 0);
    }
    assert!(compared >= 2, "{when}: {seen}");
}

/// Compares three states of a guest: idle; with page cache, many processes and files in memory; and after it has freed
/// all that.
fn under_load(suite: Option<&str>) {
    let recipe = Recipe { suite, memory_mib: 256, disk: true, append: "", qemu_args: &[] };
    let Some(world) = World::boot(&recipe) else { return };
    let name = suite.unwrap_or("installed");
    compare(&world, &format!("{name}, quiet"));
    world.shell(
        "mount -t ext4 -o ro /dev/vda /mnt 2>/dev/null || { mkdir -p /mnt; mount -t ext4 -o ro /dev/vda /mnt; }",
    );
    world.shell("cat /mnt/whole >/dev/null; dd if=/mnt/deep/er/half of=/dev/null bs=1M count=8 2>/dev/null");
    world.shell("dd if=/dev/zero of=/tmp/in-memory bs=1M count=20 2>/dev/null");
    world.shell("for n in $(seq 60); do tail -f /dev/null & done; sleep 1");
    compare(&world, &format!("{name}, loaded"));
    compare_files(&world, name);
    world.shell("killall tail; rm /tmp/in-memory; echo 3 >/proc/sys/vm/drop_caches; sleep 1");
    compare(&world, &format!("{name}, given up"));
}

#[test]
fn kinds_are_what_the_guest_says_on_the_installed_kernel() {
    under_load(None);
}

#[test]
fn kinds_are_what_the_guest_says_on_linux_5_10() {
    under_load(Some("bullseye"));
}

#[test]
fn kinds_are_what_the_guest_says_on_linux_6_12() {
    under_load(Some("trixie"));
}

#[test]
fn kinds_are_what_the_guest_says_on_the_newest_linux() {
    under_load(Some("sid"));
}

#[test]
fn kinds_are_right_without_kaslr_and_on_other_machines() {
    for (append, qemu_args, memory_mib) in [
        ("nokaslr", &["-machine", "q35"][..], 128),
        // Five levels, and memory on both sides of the hole.
        ("", &["-cpu", "max", "-machine", "pc,max-ram-below-4g=128M"], 256),
        ("", &["-object", "memory-backend-memfd,id=mem,size=128M,share=on", "-machine", "q35,memory-backend=mem"], 128),
    ] {
        let recipe = Recipe { suite: None, memory_mib, disk: false, append, qemu_args };
        let Some(world) = World::boot(&recipe) else { return };
        let when = format!("{append} {qemu_args:?}");
        let (ram, _) = compare(&world, &when);
        // The VMM's mappings alone, without QMP, also lead to the kernel.
        let mappings = host::Mapping::read_all(ram.pid).expect("its mappings");
        let by_mappings = guest::RamMap::by_mappings(&world.found(), &mappings);
        let found = by_mappings
            .into_iter()
            .map(|map| GuestRam::open(ram.pid, map).expect("its memory"))
            .any(|ram| Kernel::find(&ram).is_ok());
        assert!(found, "{when}");
        let levels = Kernel::find(&ram).expect("a kernel").paging_levels();
        assert_eq!(levels, if qemu_args[1] == "max" { 5 } else { 4 }, "{when}");
    }
}

/// Memory of DIMMs, present at boot and plugged while the guest runs. Only QEMU knows their addresses.
#[test]
fn plugged_memory_is_found_where_qemu_says() {
    let dimm = ["-object", "memory-backend-ram,id=d0,size=128M", "-device", "pc-dimm,memdev=d0"];
    let qemu_args = [&["-m", "256M,slots=2,maxmem=1G"][..], &dimm].concat();
    let recipe = Recipe { suite: None, memory_mib: 256, disk: false, append: "", qemu_args: &qemu_args };
    let Some(world) = World::boot(&recipe) else { return };
    world.shell("for m in /sys/devices/system/memory/memory*; do echo online >$m/state; done 2>/dev/null; true");
    let (ram, frames) = compare(&world, "a DIMM");
    assert_eq!(ram.index().count(), 384 << 8, "{:?}", ram.map.blocks());
    let far = ram.map.blocks().iter().filter(|b| b.guest.0 >= 4 << 30).map(|b| b.bytes).sum::<u64>();
    assert_eq!(far, 128 << 20);
    let above = frames.index.of((4 << 30) >> 12).expect("memory above 4 GiB");
    let known = frames.uses[above..].iter().filter(|u| u.kind() != Kind::Unknown).count();
    assert!(known > 100 << 8, "{known}");
    // One more DIMM while the guest runs.
    world.qmp("object-add", serde_json::json!({"qom-type": "memory-backend-ram", "id": "d1", "size": 128 << 20}));
    world.qmp("device_add", serde_json::json!({"driver": "pc-dimm", "memdev": "d1", "id": "dimm1"}));
    let deadline = Instant::now() + SOON;
    while world.shell("ls -d /sys/devices/system/memory/memory* | wc -l").trim() != "4" && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(200));
    }
    world.shell("for m in /sys/devices/system/memory/memory*; do echo online >$m/state; done 2>/dev/null; true");
    let (ram, _) = compare(&world, "one more DIMM");
    assert_eq!(ram.index().count(), 512 << 8, "{:?}", ram.map.blocks());
}

/// The unplugged part of a virtio-mem device is offline to the guest, or unknown to it.
#[test]
fn unplugged_part_of_virtio_mem_is_offline_and_the_rest_has_kinds() {
    let device = "virtio-mem-pci,id=vm0,memdev=v0,block-size=2M,requested-size=72M";
    let qemu_args = ["-m", "256M,maxmem=1G", "-object", "memory-backend-ram,id=v0,size=128M", "-device", device];
    let recipe = Recipe { suite: None, memory_mib: 256, disk: false, append: "", qemu_args: &qemu_args };
    let Some(world) = World::boot(&recipe) else { return };
    let plugged = |mib: u64| {
        world.qmp("qom-set", serde_json::json!({"path": "vm0", "property": "requested-size", "value": mib << 20}));
        let deadline = Instant::now() + SOON;
        let size = || world.qmp("qom-get", serde_json::json!({"path": "vm0", "property": "size"}));
        while size() != mib << 20 {
            assert!(Instant::now() < deadline, "{}", size());
            std::thread::sleep(Duration::from_millis(200));
        }
        world.shell("for m in /sys/devices/system/memory/memory*; do echo online >$m/state; done 2>/dev/null; true");
        let (ram, frames) = compare(&world, &format!("{mib} MiB of virtio-mem"));
        assert_eq!(ram.index().count(), 384 << 8, "{:?}", ram.map.blocks());
        let offline = insight::count(&frames.uses)[Kind::Balloon as usize];
        assert!(offline.abs_diff((128 - mib) << 8) < 256, "{offline}");
    };
    plugged(72);
    plugged(128);
    // The guest gives some of it back.
    plugged(40);
}

/// The balloon returns to the host those pages that were found to be free and backed.
#[test]
fn free_pages_that_are_backed_come_back_through_the_balloon() {
    let recipe =
        Recipe { suite: None, memory_mib: 256, disk: false, append: "", qemu_args: &["-device", "virtio-balloon-pci"] };
    let Some(world) = World::boot(&recipe) else { return };
    // Memory that was used and freed. It holds no zeros, since the host's merger may take those away meanwhile.
    world.shell("tr '\\0' x </dev/zero | dd of=/tmp/x bs=1M count=120 iflag=fullblock 2>/dev/null; rm /tmp/x; sleep 1");
    let look = || {
        let ram = world.ram();
        let frames = Kernel::find(&ram).expect("a kernel").classify();
        let free = |place: &usize| frames.uses[*place].kind() == Kind::Free;
        let backed = (0..frames.uses.len()).filter(free).filter(|place| ram.is_backed(*place)).count() as u64;
        (insight::count(&frames.uses), backed, ram.backed_frames())
    };
    let (before, free_backed, resident) = look();
    assert!(free_backed > 100 << 8, "{free_backed}");
    let give = before[Kind::Free as usize] * 9 / 10;
    world.qmp("balloon", serde_json::json!({"value": (256_u64 << 20) - (give << 12)}));
    let deadline = Instant::now() + SOON;
    let (after, left, resident_after) = loop {
        let now = look();
        if now.0[Kind::Balloon as usize] + 64 >= give || Instant::now() > deadline {
            break now;
        }
        std::thread::sleep(Duration::from_millis(300));
    };
    assert!(after[Kind::Balloon as usize].abs_diff(give) < 256, "{} of {give}", after[Kind::Balloon as usize]);
    // The footprint fell by the number of pages that were free and backed, and are no longer backed.
    let (fell, gone) = (resident.saturating_sub(resident_after), free_backed - left);
    assert!(fell.abs_diff(gone) <= gone / 50 + 256, "{fell} of {gone}");
    assert!(gone * 10 >= free_backed * 8, "{gone} of {free_backed}");
}

/// Random numbers that are the same in every run.
struct Dice(u64);

impl Dice {
    fn throw(&mut self, sides: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % sides
    }
}

/// Address of the VMCOREINFO note in a saved guest.
fn note_of(saved: &Saved) -> usize {
    let mut note = None;
    saved.heads(&mut |at, head| {
        if head[12..].starts_with(b"VMCOREINFO\0") {
            note = Some(at.0 as usize);
        }
        note.is_none()
    });
    note.expect("the note")
}

/// Overwrites up to 400 words of a saved guest, in these frames and in the note. Returns the addresses and former
/// values.
fn damage(saved: &mut Saved, dice: &mut Dice, places: &[usize], note: Option<usize>) -> Vec<(usize, [u8; 8])> {
    let mut undo = Vec::new();
    for n in 0..1 + dice.throw(400) {
        let frame = match (note, n % 4) {
            (Some(note), 0) => note,
            _ => places[dice.throw(places.len())] << 12,
        };
        let at = frame + dice.throw(512) * 8;
        let other = places[dice.throw(places.len())] << 12;
        let old: [u8; 8] = saved.bytes_mut()[at..at + 8].try_into().expect("eight bytes");
        let copied: [u8; 8] = saved.bytes_mut()[other..other + 8].try_into().expect("eight bytes");
        let new = match dice.throw(6) {
            0 => [0; 8],
            1 => [0xff; 8],
            // A page table, or a list, that leads to itself.
            2 => (at as u64 & !0xfff | 0x67).to_le_bytes(),
            3 => copied,
            4 => (u64::from_le_bytes(old) ^ 1 << dice.throw(64)).to_le_bytes(),
            _ => (0xffff_8880_0000_0000 | at as u64).to_le_bytes(),
        };
        saved.bytes_mut()[at..at + 8].copy_from_slice(&new);
        undo.push((at, old));
    }
    undo
}

/// Looks for the kernel in a damaged guest and reads everything that leads from it. Returns whether there is a kernel.
fn read_to_an_end(saved: &Saved, count: usize) -> bool {
    let Ok(kernel) = Kernel::find(saved) else { return false };
    let frames = kernel.classify();
    assert_eq!(frames.uses.len(), count);
    frames.files.iter().for_each(|file| drop(kernel.file(*file)));
    true
}

/// A guest may write anything anywhere: reading its memory ends within bounds nevertheless.
#[test]
fn damaged_guest_is_read_to_an_end_in_bounded_time() {
    let recipe = Recipe { suite: None, memory_mib: 96, disk: false, append: "", qemu_args: &[] };
    let Some(world) = World::boot(&recipe) else { return };
    let (ram, frames) = compare(&world, "to be damaged");
    let bytes = ram.index().count() << 12;
    let mut saved = Saved::new(vec![0; bytes]);
    assert!(ram.read(GuestPhys(0), saved.bytes_mut()));
    drop(world);
    let begin = Instant::now();
    let whole = insight::count(&Kernel::find(&saved).expect("a kernel").classify().uses);
    let usual = begin.elapsed();
    assert_eq!(whole.iter().sum::<u64>(), ram.index().count() as u64);
    // Frames where damage matters: page tables, descriptions of frames, types and variables.
    let hurts = [Kind::PageTables, Kind::Reserved, Kind::KernelRodata, Kind::KernelData, Kind::Slab];
    let places: Vec<usize> =
        (0..frames.uses.len()).filter(|place| hurts.contains(&frames.uses[*place].kind())).collect();
    let note = note_of(&saved);
    let mut dice = Dice(7);
    let (mut lost, mut slowest) = (0, Duration::ZERO);
    for round in 0..150 {
        let undo = damage(&mut saved, &mut dice, &places, (round % 3 == 0).then_some(note));
        let begin = Instant::now();
        lost += u32::from(!read_to_an_end(&saved, ram.index().count()));
        slowest = slowest.max(begin.elapsed());
        for (at, old) in undo.into_iter().rev() {
            saved.bytes_mut()[at..at + 8].copy_from_slice(&old);
        }
    }
    eprintln!("usual {usual:?}, slowest {slowest:?}, {lost} of 150 without a kernel");
    assert!(lost < 150, "nothing was damaged that mattered, or everything");
    assert!(slowest < usual * 20 + Duration::from_secs(1), "{slowest:?}, usually {usual:?}");
    let again = insight::count(&Kernel::find(&saved).expect("a kernel").classify().uses);
    assert_eq!(again, whole, "the damage was undone");
}
