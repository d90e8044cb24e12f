//! Kinds of a VM's pages as found from outside, compared with the guest kernel's own figures from inside.

#[path = "../common/mod.rs"]
mod common;

mod damaged;
mod rig;

use guest::GuestRam;
use insight::Kernel;
use page::GuestPageKind as Kind;
use rig::{Recipe, SOON, World, compare};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

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
    while look().0[Kind::Balloon as usize] + 64 < give && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(300));
    }
    // Looked at once more: a look takes a while, in which the balloon grew.
    let (after, left, resident_after) = look();
    assert!(after[Kind::Balloon as usize].abs_diff(give) < 256, "{} of {give}", after[Kind::Balloon as usize]);
    // The footprint fell by the number of pages that were free and backed, and are no longer backed.
    let (fell, gone) = (resident.saturating_sub(resident_after), free_backed - left);
    assert!(fell.abs_diff(gone) <= gone / 50 + 256, "{fell} of {gone}");
    assert!(gone * 10 >= free_backed * 8, "{gone} of {free_backed}");
}
