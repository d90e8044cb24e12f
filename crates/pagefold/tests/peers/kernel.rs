//! The kernel's own tests of memory, and stress-ng's.

use crate::attach::OWN_USERFAULTFD;
use crate::rig::{Ended, Peer, Side};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

pub const SELFTESTS: Peer = Peer {
    name: "selftests",
    about: "the kernel's own mm selftests that build here and leave the host's settings alone",
    floor: 0,
    needs: &[
        (KERNEL_SOURCE, "linux-source-6.12"),
        ("cc", "gcc"),
        ("/usr/include/numa.h", "libnuma-dev"),
        ("/usr/include/sys/capability.h", "libcap-dev"),
    ],
    is_short: true,
    at_once: false,
    recipe: selftests,
};

pub const STRESS: Peer = Peer {
    name: "stress-ng",
    about: "40 of stress-ng's stressors of memory, with --verify",
    floor: 1000,
    needs: &[("stress-ng", "stress-ng")],
    is_short: false,
    at_once: false,
    recipe: stress,
};

/// The kernel's source, as Debian packs it.
const KERNEL_SOURCE: &str = "/usr/src/linux-source-6.12.tar.xz";

/// Programs of the selftests with the arguments that `run_vmtests.sh` gives them.
///
/// Left out are those that need huge pages of hugetlbfs, take memory offline, or need a module that Debian's kernels lack
/// (`hmm`, `gup_test`). Others change settings of the host: KSM (`ksm_*`), THP (`khugepaged`, `split_huge_page_test`). One
/// crashes by itself in half of all runs (`pkey_sighandler_tests`).
const SELFTEST_PROGRAMS: [(&str, &[&str]); 25] = [
    ("mlock2-tests", &[]),
    ("mremap_test", &[]),
    ("pagemap_ioctl", &[]),
    ("cow", &[]),
    ("droppable", &[]),
    ("gup_longterm", &[]),
    ("madv_populate", &[]),
    ("map_fixed_noreplace", &[]),
    ("map_populate", &[]),
    ("mdwe_test", &[]),
    ("memfd_secret", &[]),
    ("migration", &[]),
    ("mkdirty", &[]),
    ("mlock-random-test", &[]),
    ("mremap_dontunmap", &[]),
    ("mrelease_test", &[]),
    ("mseal_test", &[]),
    ("on-fault-limit", &[]),
    ("protection_keys", &[]),
    ("soft-dirty", &[]),
    ("transhuge-stress", &["-d", "3"]),
    ("uffd-stress", &["anon", "20", "16"]),
    ("uffd-unit-tests", &[]),
    ("va_high_addr_switch", &[]),
    ("virtual_address_range", &[]),
];
/// Number of programs at the beginning of that list which belong to the short run.
const SHORT_PROGRAMS: usize = 3;
/// Least number of programs that must build and say something, of all and of the short run.
const LEAST_PROGRAMS: [usize; 2] = [18, 3];

/// Unpacks what is needed to build the selftests; returns their directory.
fn unpacked(dir: &Path) -> PathBuf {
    let root = "linux-source-6.12";
    let parts = ["tools/testing/selftests", "tools/include", "tools/arch/x86/include", "mm/gup_test.h"];
    let mut tar = Command::new("tar");
    tar.arg("-xf").arg(KERNEL_SOURCE).args(parts.map(|part| format!("{root}/{part}"))).current_dir(dir);
    assert!(tar.status().expect("run tar").success(), "unpack {KERNEL_SOURCE}");
    let sources = dir.join(root).join("tools/testing/selftests/mm");
    // The makefile asks for liburing here.
    fs::write(sources.join("local_config.h"), "").expect("write a file");
    sources
}

/// Builds a program of the selftests; `false` if it does not build here.
fn built(sources: &Path, name: &str) -> bool {
    let mut command = Command::new("cc");
    command.args(["-O2", "-w", "-pthread", "-mxsave", "-U_FORTIFY_SOURCE", "-isystem", "../../../include/uapi"]);
    command.args(["-I", "../../../..", "-I", ".", "-o", &format!("built-{name}"), &format!("{name}.c")]);
    command.args(["vm_util.c", "thp_settings.c"]);
    if name.starts_with("uffd-") {
        command.arg("uffd-common.c");
    }
    command.args(["-lrt", "-lm", "-lnuma", "-lcap"]).current_dir(sources);
    command.output().expect("run cc").status.success()
}

fn selftests(side: &Side) -> Value {
    let sources = unpacked(side.dir);
    let (count, least) =
        if side.is_short { (SHORT_PROGRAMS, LEAST_PROGRAMS[1]) } else { (SELFTEST_PROGRAMS.len(), LEAST_PROGRAMS[0]) };
    let mut outcome = BTreeMap::new();
    for (name, words) in &SELFTEST_PROGRAMS[..count] {
        if !built(&sources, name) {
            continue;
        }
        let program = sources.join(format!("built-{name}"));
        let program = program.to_str().expect("a plain path");
        let huge_pages = HugePages::note();
        let ended = side.run_to_end(name, &[&[program], *words].concat(), 120);
        drop(huge_pages);
        outcome.insert(*name, json!({"status": ended.status.to_string(), "results": results_of(&ended)}));
        let source = fs::read_to_string(sources.join(format!("{name}.c"))).expect("a source");
        if source.contains("userfaultfd") {
            side.refused.forgive(&format!("built-{name}"), OWN_USERFAULTFD);
        }
    }
    assert!(outcome.len() >= least, "only {} programs build: {:?}", outcome.len(), outcome.keys());
    json!(outcome)
}

/// The host's number of huge pages, put back when dropped. Some selftests raise it, after which others do more.
struct HugePages(Option<String>);

impl HugePages {
    const SETTING: &'static str = "/proc/sys/vm/nr_hugepages";

    fn note() -> Self {
        Self(fs::read_to_string(Self::SETTING).ok())
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        let _ = self.0.as_ref().map(|number| fs::write(Self::SETTING, number));
    }
}

/// The lines by which a selftest says how its cases ended, sorted. Of their numbers only the first is kept, which is that of
/// the case; others may be measurements.
fn results_of(ended: &Ended) -> Vec<String> {
    let says = |line: &&str| {
        ["ok ", "not ok ", "[PASS]", "[FAIL]", "[SKIP]", "Testing "].iter().any(|word| line.starts_with(word))
    };
    let mut results: Vec<String> = ended.output.lines().filter(says).map(without_measures).collect();
    results.sort_unstable();
    results
}

/// Replaces all numbers but the first: `ok 7 pages 3.5` becomes `ok 7 pages N.N`.
fn without_measures(line: &str) -> String {
    let (mut text, mut numbers, mut was_digit) = (String::new(), 0, false);
    for c in line.chars() {
        let starts_number = c.is_ascii_digit() && !was_digit;
        was_digit = c.is_ascii_digit();
        numbers += u32::from(starts_number);
        if !was_digit || numbers == 1 {
            text.push(c);
        } else if starts_number {
            text.push('N');
        }
    }
    text
}

/// Stressors, each with the options that bound it. Left out are those that fill the host's memory, change its settings, or
/// raise what the kernel logs as errors of the hardware.
const STRESSORS: [&str; 40] = [
    "clone",
    "context",
    "fork",
    "heapsort",
    "hsearch",
    "judy",
    "list",
    "madvise",
    "malloc --malloc-bytes 64M",
    "matrix",
    "matrix-3d",
    "mcontend",
    "membarrier",
    "memcpy",
    "memfd --memfd-bytes 64M",
    "memthrash",
    "mergesort",
    "mincore",
    "mlock",
    "mmap --mmap-bytes 64M",
    "mmapaddr",
    "mmapfixed",
    "mmapfork",
    "mprotect",
    "mremap --mremap-bytes 64M",
    "msync",
    "munmap",
    "pageswap",
    "pkey",
    "qsort",
    "remap",
    "shm --shm-bytes 8M",
    "skiplist",
    "stackmmap",
    "stream",
    "tree",
    "vm --vm-bytes 64M",
    "vm-addr",
    "vm-rw --vm-rw-bytes 16M",
    "zlib",
];
/// Stressors that run at the same time.
const AT_ONCE: usize = 4;

fn stress(side: &Side) -> Value {
    // A stressor is a child, which has to live for a while before it is attached.
    let seconds = match (side.is_short, side.is_attached) {
        (true, _) => "1",
        (false, false) => "6",
        (false, true) => "12",
    };
    let mut outcome = BTreeMap::new();
    for some in STRESSORS.chunks(AT_ONCE) {
        let start = |stressor: &&'static str| {
            let (name, options) = stressor.split_once(' ').unwrap_or((stressor, ""));
            let line =
                format!("stress-ng --{name} 1 --verify --timeout {seconds} --temp-path {} {options}", side.path(""));
            let words: Vec<&str> = line.split_whitespace().collect();
            (name, side.start(name, &words))
        };
        let running: Vec<_> = some.iter().map(start).collect();
        for (name, mut member) in running {
            let status = member.end(120);
            member.until_all_is_read();
            let text = format!("{}\n{}", member.lines().join("\n"), member.errors());
            let failed = text.lines().filter(|line| line.contains("fail:") || line.contains("error:")).count();
            outcome.insert(name, format!("{status}, {failed} complaints"));
        }
    }
    json!(outcome)
}
