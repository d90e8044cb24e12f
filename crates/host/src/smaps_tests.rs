use super::*;
use std::collections::HashSet;
use std::process::{Child, Command, Stdio};

/// `smaps` of a real process, shortened. The last name holds blanks, an escaped newline and the mark of a deleted file.
const SMAPS: &str = "\
55be3f066000-55be3f069000 r--p 00001000 fe:00 247741                     /usr/bin/sed
Size:                 12 kB
KernelPageSize:        4 kB
Rss:                  12 kB
Pss:                   7 kB
Shared_Clean:          4 kB
Private_Clean:         8 kB
Private_Dirty:         0 kB
KSM:                   0 kB
AnonHugePages:         0 kB
Swap:                  0 kB
SwapPss:               0 kB
Locked:                0 kB
THPeligible:           0
ProtectionKey:         0
VmFlags: rd mr mw me 
7fd893e00000-7fd89be00000 rw-p 00000000 00:00 0 
Size:             131072 kB
Rss:                4096 kB
Pss:                4096 kB
Pss_Dirty:          4096 kB
Private_Clean:         0 kB
Private_Dirty:      4096 kB
Anonymous:          4092 kB
KSM:                   8 kB
AnonHugePages:      2048 kB
ShmemPmdMapped:        0 kB
FilePmdMapped:         0 kB
Shared_Hugetlb:        0 kB
Private_Hugetlb:    2048 kB
Swap:                 16 kB
Locked:                4 kB
VmFlags: rd wr mr mw me dc ac hg mg um 
7fd89be00000-7fd89be02000 rw-s 00000000 00:01 1031                       /memfd:my ram\\012x (deleted)
Rss:                   8 kB
";

fn parse_text(text: &str) -> Result<Vec<Mapping>> {
    parse(text.as_bytes(), Path::new("/proc/1/smaps"))
}

#[test]
fn all_fields_of_current_kernel_are_parsed() {
    let maps = parse_text(SMAPS).unwrap();
    assert_eq!(maps.len(), 3);
    let sed = &maps[0];
    assert_eq!((sed.start.0, sed.bytes(), sed.offset), (0x55be_3f06_6000, 0x3000, 0x1000));
    assert_eq!((sed.read, sed.write, sed.execute, sed.shared), (true, false, false, false));
    assert_eq!((sed.device, sed.inode, sed.name.as_str()), (rustix::fs::makedev(0xfe, 0), 247_741, "/usr/bin/sed"));
    assert_eq!((sed.usage.pss_bytes, sed.usage.uss_bytes, sed.usage.ksm_bytes), (7 << 10, 8 << 10, Some(0)));
    assert_eq!(sed.file_path(7), Path::new("/proc/7/map_files/55be3f066000-55be3f069000"));
    let ram = &maps[1];
    assert_eq!(ram.name, "");
    let expected = Usage {
        rss_bytes: 4096 << 10,
        pss_bytes: 4096 << 10,
        uss_bytes: 4096 << 10,
        swap_bytes: 16 << 10,
        anonymous_bytes: 4092 << 10,
        thp_bytes: 2048 << 10,
        hugetlb_bytes: 2048 << 10,
        ksm_bytes: Some(8 << 10),
        locked_bytes: 4 << 10,
    };
    assert_eq!(ram.usage, expected);
    assert!(ram.has_flag(b"mg") && ram.has_flag(b"um") && !ram.has_flag(b"lo"));
    assert!(!ram.has_file() && sed.has_file());
}

#[test]
fn fields_that_old_kernels_lack_are_none() {
    let memfd = &parse_text(SMAPS).unwrap()[2];
    assert_eq!(memfd.name, "/memfd:my ram\\012x (deleted)");
    assert!(memfd.shared && memfd.write);
    assert_eq!((memfd.usage.ksm_bytes, memfd.vm_flags.len()), (None, 0));
}

#[test]
fn malformed_line_is_error_with_its_number() {
    for bad in ["Rss: 1 kB\n", "nonsense\n", "2000-1000 rw-p 0 0:0 0 \n", "1000-2000 rw-p 0 0:0 0 \nRss: many kB\n"] {
        assert!(matches!(parse_text(bad), Err(Error::Malformed { .. })), "{bad:?}");
    }
    let text = format!("{SMAPS}Rss: 99999999999999999999 kB\n");
    assert!(matches!(parse_text(&text), Err(Error::Malformed { line: 36, .. })));
    assert_eq!(parse_text("").unwrap(), []);
    // The largest value that can be written in KiB, twice: the sum must saturate.
    let most = format!("1000-2000 rw-p 0 0:0 0 \n{}", "KSM: 18014398509481983 kB\n".repeat(2));
    let usage = parse_text(&most).unwrap()[0].usage;
    assert_eq!(usage.plus(&usage).ksm_bytes, Some(u64::MAX));
}

#[test]
fn files_that_are_only_memory_are_told_from_other_files() {
    let line = |rights: &str, device: &str, inode: u32, name: &str| {
        parse_text(&format!("1000-2000 {rights} 00000000 {device} {inode}  {name}\n")).unwrap().remove(0)
    };
    let mut maps = vec![
        line("rw-s", "00:01", 5, "/memfd:pc.ram (deleted)"),
        line("rw-s", "00:16", 6, "/dev/shm/x"),
        line("rw-s", "00:01", 7, "/SYSV00000000 (deleted)"),
        line("rw-s", "00:01", 8, "/dev/zero (deleted)"),
        line("rw-s", "00:21", 9, "/run/on-a-tmpfs"),
        line("rw-s", "00:00", 0, "[anon_shmem:ram]"),
        line("rw-s", "fe:00", 9, "/home/on-a-disk"),
        line("r--p", "fe:00", 10, "/usr/lib/libc.so.6"),
        line("rw-p", "00:00", 0, "[heap]"),
        line("rw-p", "00:00", 0, ""),
    ];
    let tmpfs = [rustix::fs::makedev(0, 0x21)].into();
    mark_shmem(&mut maps, &MemoryDevices { tmpfs, hugetlbfs: HashSet::new() });
    let shmem: Vec<bool> = maps.iter().map(|m| m.shmem).collect();
    assert_eq!(shmem, [true, true, true, true, true, true, false, false, false, false]);
}

#[test]
fn hugetlbfs_below_dev_is_memory_wherever_it_is_mounted() {
    let smaps = "7f0000000000-7f0000200000 rw-s 00000000 00:21 7 /dev/hugepages1G/ram (deleted)\n";
    let read = |text: &str, hugetlbfs: &[u64]| {
        let mut maps = parse(text.as_bytes(), Path::new("maps")).unwrap();
        mark_shmem(&mut maps, &MemoryDevices { hugetlbfs: hugetlbfs.iter().copied().collect(), ..Default::default() });
        (maps[0].hugetlb, maps[0].shmem, maps[0].is_device())
    };
    assert_eq!(read(smaps, &[rustix::fs::makedev(0, 0x21)]), (true, true, false));
    assert_eq!(read(&format!("{smaps}VmFlags: rd wr sh ht \n"), &[]), (true, true, false));
    assert_eq!(read(smaps, &[rustix::fs::makedev(0, 0x22)]), (false, false, true));
}

/// A child that has stopped itself, so that its counters do not change during the test.
fn stopped(script: &str) -> Child {
    let child = Command::new("sh").args(["-c", script]).stdin(Stdio::piped()).spawn().unwrap();
    while crate::ProcessStat::read(child.id()).unwrap().state != b'T' {
        std::thread::yield_now();
    }
    child
}

fn end(mut child: Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn mappings_add_up_to_totals_of_smaps_rollup() {
    // The shell in parentheses is a fork. It shares the string's pages until the test closes its end of the input.
    let child = stopped("x=$(head -c 3000000 /dev/zero | tr '\\0' x); (kill -STOP $$; read end); :");
    let rollup = || std::fs::read_to_string(format!("/proc/{}/smaps_rollup", child.id())).unwrap();
    let of = |rollup: &str, key: &str| -> u64 {
        let line = rollup.lines().find(|l| l.split(':').next() == Some(key)).unwrap();
        line.split_ascii_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
    };
    // The fork may still touch a page or two, and others map the same libraries, some for a moment: both change the
    // proportional set.
    let mut tries = 0..100;
    let (usage, maps, rollup) = loop {
        let before = rollup();
        let (usage, maps) = (Usage::of(child.id()).unwrap(), Mapping::read_all(child.id()).unwrap());
        let after = rollup();
        if before == after && (usage.pss_bytes == of(&after, "Pss") || tries.next().is_none()) {
            break (usage, maps, after);
        }
    };
    let kib = |key: &str| of(&rollup, key);
    assert_eq!(usage.rss_bytes, kib("Rss"));
    assert_eq!(usage.pss_bytes, kib("Pss"));
    assert_eq!(usage.uss_bytes, kib("Private_Clean") + kib("Private_Dirty"));
    assert_eq!(usage.swap_bytes, kib("Swap"));
    assert_eq!(usage.ksm_bytes, Some(kib("KSM")));
    assert!(usage.rss_bytes > 3_000_000 && usage.uss_bytes < usage.pss_bytes);
    let sum = maps.iter().fold(Usage::default(), |sum, m| sum.plus(&m.usage));
    assert_eq!((sum.rss_bytes, sum.uss_bytes, sum.swap_bytes), (usage.rss_bytes, usage.uss_bytes, usage.swap_bytes));
    // The kernel rounds the proportional set of each mapping down to a KiB, but the total only once.
    assert!(sum.pss_bytes <= usage.pss_bytes && usage.pss_bytes - sum.pss_bytes <= (maps.len() as u64) << 10);
    end(child);
}

#[test]
fn list_cut_short_by_end_of_process_is_error() {
    let child = stopped("kill -STOP $$");
    let path = PathBuf::from(format!("/proc/{}/smaps", child.id()));
    let mut reader = BufReader::with_capacity(4096, File::open(&path).unwrap());
    // The first part is read while the process lives, so the list parses well and just ends early.
    assert!(!reader.fill_buf().unwrap().is_empty());
    end(child);
    assert!(read_whole(reader, &path).unwrap_err().is_gone());
}

#[test]
fn process_without_memory_is_gone_not_empty() {
    let mut zombie = Command::new("true").spawn().unwrap();
    while !crate::ProcessStat::read(zombie.id()).unwrap().has_ended() {
        std::thread::yield_now();
    }
    assert!(Usage::of(zombie.id()).unwrap_err().is_gone());
    assert!(Mapping::read_all(zombie.id()).unwrap_err().is_gone());
    zombie.wait().unwrap();
    let kthreadd = crate::Process::read(2).unwrap();
    if kthreadd.stat.kernel_thread {
        assert!(Mapping::read_all(2).unwrap_err().is_gone());
    }
}
