use super::*;
use crate::Facts;
use Region::{Files, GuestRam, Heap, Other, Shared, Stack, TranslationCache};

const M: u64 = 1 << 20;

fn mappings(smaps: &str) -> Vec<Mapping> {
    Mapping::parse_all(smaps).unwrap()
}

fn vm(kind: GuestKind, blocks: &[u64]) -> Guest {
    let ram: u64 = blocks.iter().sum();
    Guest {
        id: "vm:x".into(),
        name: "x".into(),
        kind,
        pids: vec![1],
        group: "x".into(),
        ram_bytes: Some(ram).filter(|b| *b > 0),
        facts: Facts { ram_blocks_bytes: blocks.to_vec(), ..Facts::default() },
    }
}

fn regions(guest: &Guest, smaps: &str) -> Vec<Region> {
    let maps = mappings(smaps);
    let map = RegionMap::new(Some(guest), &maps);
    (0..maps.len()).map(|n| map.region_of(n)).collect()
}

/// Lines of `smaps` of a real `qemu-system-x86_64 -accel tcg,tb-size=32 -m 128`. A thread's stack of 8 MiB lies right
/// before the RAM.
const TCG: &str = "\
55cc6ac61000-55cc6b068000 r--p 00000000 fe:00 10166332                   /usr/bin/qemu-system-x86_64
VmFlags: rd mr mw me
55cc6b068000-55cc6b5ff000 r-xp 00407000 fe:00 10166332                   /usr/bin/qemu-system-x86_64
VmFlags: rd ex mr mw me
55cc6bdee000-55cc6be21000 rw-p 00000000 00:00 0 
VmFlags: rd wr mr mw me ac
55cca57de000-55cca6a08000 rw-p 00000000 00:00 0                          [heap]
VmFlags: rd wr mr mw me ac
7fd88c021000-7fd890000000 ---p 00000000 00:00 0 
VmFlags: mr mw me nr
7fd892200000-7fd893200000 rw-p 00000000 00:00 0 
VmFlags: rd wr mr mw me dc ac hg mg
7fd893600000-7fd893e00000 rw-p 00000000 00:00 0 
VmFlags: rd wr mr mw me ac nh
7fd893e00000-7fd89be00000 rw-p 00000000 00:00 0 
VmFlags: rd wr mr mw me dc ac hg mg
7fd89be00000-7fd89be01000 ---p 00000000 00:00 0 
VmFlags: mr mw me
7fd8a0800000-7fd8a27ff000 rwxp 00000000 00:00 0 
VmFlags: rd wr ex mr mw me ac hg
7fd8a52d6000-7fd8a52da000 r--p 00000000 00:00 0                          [vvar]
VmFlags: rd mr pf io de dd
7fd8a52dc000-7fd8a52de000 r-xp 00000000 00:00 0                          [vdso]
VmFlags: rd ex mr mw me de
7fffebbf2000-7fffebc13000 rw-p 00000000 00:00 0                          [stack]
VmFlags: rd wr mr mw me gd ac
ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0                  [vsyscall]
VmFlags: ex
";

#[test]
fn regions_of_emulated_vm_are_told() {
    let expected =
        [Files, Files, Heap, Heap, Heap, Heap, Heap, GuestRam, Heap, TranslationCache, Other, Other, Stack, Other];
    assert_eq!(regions(&vm(GuestKind::Qemu, &[128 * M]), TCG), expected);
}

#[test]
fn ram_of_unknown_size_is_largest_mergeable_mapping() {
    // No mapping has 100 MiB, so the largest one that is advised as mergeable is taken.
    let regions = regions(&vm(GuestKind::Qemu, &[100 * M]), TCG);
    assert_eq!(regions.iter().filter(|r| **r == GuestRam).count(), 1);
    assert_eq!(regions[7], GuestRam);
}

#[test]
fn list_without_flags_gives_same_regions_if_size_is_known() {
    let list: String = TCG.lines().filter(|l| !l.starts_with("VmFlags")).map(|l| format!("{l}\n")).collect();
    let vm = |ram| vm(GuestKind::Qemu, &[ram]);
    assert_eq!(regions(&vm(128 * M), &list), regions(&vm(128 * M), TCG));
    // Without a size it cannot be told from the stack right before it.
    assert_eq!(regions(&vm(100 * M), &list)[6..9], [GuestRam, GuestRam, Heap]);
}

#[test]
fn anonymous_code_is_translation_cache_only_in_emulator() {
    let maps = mappings(TCG);
    let map = RegionMap::new(None, &maps);
    assert_eq!((map.region_of(9), map.region_of(7)), (Heap, Heap));
}

#[test]
fn translation_cache_may_be_mapped_twice() {
    let smaps = "\
7f0000000000-7f0002000000 rw-s 00000000 00:01 2054                       /memfd:tcg-jit (deleted)
7f0002000000-7f0004000000 r-xs 00000000 00:01 2054                       /memfd:tcg-jit (deleted)
7f0004000000-7f0006000000 rw-s 00000000 00:01 2055                       /memfd:other (deleted)
";
    assert_eq!(
        regions(&vm(GuestKind::Qemu, &[64 * M]), smaps)[..2],
        [TranslationCache, TranslationCache],
        "and it is not RAM either"
    );
}

#[test]
fn ram_may_be_split_into_many_mappings() {
    let smaps = "\
7f0000000000-7f0000800000 rw-p 00000000 00:00 0 
7f0000800000-7f0001000000 rw-p 00000000 00:00 0 
VmFlags: rd wr dc mg
7f0001000000-7f0001001000 rw-p 00005000 00:01 77                         /memfd:pool (deleted)
VmFlags: rd wr dc
7f0001001000-7f0004800000 rw-p 00000000 00:00 0 
VmFlags: rd wr dc mg
7f0004800000-7f0004801000 ---p 00000000 00:00 0 
";
    assert_eq!(regions(&vm(GuestKind::Qemu, &[64 * M]), smaps), [Heap, GuestRam, GuestRam, GuestRam, Heap]);
}

#[test]
fn shared_ram_is_told_from_other_shared_memory() {
    let smaps = "\
7f0000000000-7f0010000000 rw-s 00000000 00:01 1030                       /memfd:memory-backend-memfd (deleted)
7f0020000000-7f0020400000 rw-s 00000000 00:19 5                          /dev/shm/ivshmem
7f0030000000-7f0030001000 rw-s 00000000 00:0d 1041                       anon_inode:kvm-vcpu:0
7f0030002000-7f0030003000 rw-s 00000000 00:0f 14                         /[aio] (deleted)
7f0030004000-7f0030005000 rw-s 00000000 00:05 90                         /dev/vfio/12
7f0030006000-7f0030007000 rw-s 00000000 00:01 91                         /dev/zero (deleted)
7f0030008000-7f0030009000 rw-p 00000000 00:05 4                          /dev/zero
7f003000a000-7f003000b000 rw-p 00000000 00:00 0                          [anon:glibc: malloc]
7f003000c000-7f003000d000 rw-s 00000000 00:01 92                         [anon_shmem:ring]
7f003000e000-7f003000f000 r--s 00000000 fe:00 93                         /usr/lib/locale/C.utf8/LC_CTYPE
";
    let expected = [GuestRam, Shared, Other, Other, Other, Shared, Heap, Heap, Shared, Files];
    assert_eq!(regions(&vm(GuestKind::Qemu, &[256 * M]), smaps), expected);
}

#[test]
fn blocks_of_numa_nodes_may_have_equal_size() {
    let smaps = "\
7f0000000000-7f0004000000 rw-p 00000000 00:00 0 
VmFlags: rd wr mg
7f0010000000-7f0014000000 rw-p 00000000 00:00 0 
VmFlags: rd wr mg
7f0020000000-7f0024000000 rw-p 00000000 00:00 0 
VmFlags: rd wr
";
    assert_eq!(regions(&vm(GuestKind::Qemu, &[64 * M, 64 * M]), smaps), [GuestRam, GuestRam, Heap]);
}

#[test]
fn ram_on_hugetlbfs_is_rounded_up_to_huge_pages() {
    let smaps = "\
7f0000000000-7f0008200000 rw-s 00000000 00:21 1030                       /dev/hugepages/qemu (deleted)
VmFlags: rd wr sh ht
";
    assert_eq!(regions(&vm(GuestKind::Qemu, &[129 * M]), smaps), [GuestRam]);
}

#[test]
fn ram_may_be_on_both_sides_of_hole() {
    let smaps = "\
7f0000000000-7f00d0000000 rw-p 00000000 00:00 0 
7f00d0000000-7f00d0001000 ---p 00000000 00:00 0 
7f0100000000-7f0130000000 rw-p 00000000 00:00 0 
7f0130000000-7f0130001000 ---p 00000000 00:00 0 
7f0140000000-7f0140200000 rw-p 00000000 00:00 0 
";
    assert_eq!(regions(&vm(GuestKind::Firecracker, &[4096 * M]), smaps), [GuestRam, Heap, GuestRam, Heap, Heap]);
    assert_eq!(ram_by_mappings(GuestKind::Firecracker, &mappings(smaps)), Some(4096 * M));
    let smaps = "\
7f0000000000-7f00c0000000 rw-s 00000000 00:01 7                          /memfd:ch_ram (deleted)
7f0100000000-7f0140000000 rw-s c0000000 00:01 7                          /memfd:ch_ram (deleted)
";
    assert_eq!(regions(&vm(GuestKind::CloudHypervisor, &[4096 * M]), smaps), [GuestRam, GuestRam]);
    assert_eq!(ram_by_mappings(GuestKind::CloudHypervisor, &mappings(smaps)), Some(4096 * M));
}

#[test]
fn ram_of_microvm_configured_through_api_is_largest_row() {
    let smaps = "\
55cc6bdee000-55cc6be21000 rw-p 00000000 00:00 0                          [heap]
7f0000000000-7f0008000000 rw-p 00000000 00:00 0 
7f0008000000-7f0008001000 ---p 00000000 00:00 0 
7f0100000000-7f0100200000 rw-p 00000000 00:00 0 
";
    assert_eq!(ram_by_mappings(GuestKind::Firecracker, &mappings(smaps)), Some(128 * M));
    assert_eq!(ram_by_mappings(GuestKind::Firecracker, &mappings(&smaps[..80])), None);
    assert_eq!(regions(&vm(GuestKind::Firecracker, &[]), smaps), [Heap, GuestRam, Heap, Heap]);
}

#[test]
fn process_without_mappings_or_vm_has_no_ram() {
    assert_eq!(regions(&vm(GuestKind::Qemu, &[64 * M]), ""), []);
    let container = vm(GuestKind::Lxc, &[]);
    assert_eq!(regions(&container, TCG)[7..10], [Heap, Heap, Heap]);
}
