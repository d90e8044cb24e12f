//! Reasons that a program's own doing causes, or the rights that it has.

use crate::common::service::{Member, Service, cannot_fold, find_member, until};
use crate::common::supervised::Installed;
use crate::common::{Afterwards, json_of, unprivileged};
use crate::{carry_out, fix, known_pages, until_state};
use serde_json::Value;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

/// A program with 64 equal pages at `memory`, and the C library. More is added.
const HOLDS: &str = "
import ctypes, mmap, os, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
def map(advise):
    found = mmap.mmap(-1, 64 * 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    found.write(b'x' * 64 * 4096)
    if advise: found.madvise(mmap.MADV_MERGEABLE)
    return found
memory = map(True)
at = lambda memory: ctypes.addressof(ctypes.c_char.from_buffer(memory))
";
/// A wait for a line.
const WAITS: &str = "print('ready', flush=True)
sys.stdin.readline()
";

fn python(parts: &[&str]) -> String {
    [&[HOLDS], parts, &[WAITS]].concat().concat()
}

#[test]
fn program_that_lends_pages_to_a_pipe_is_named_and_folded_without() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let lends = "
if len(sys.argv) > 1:
    piece = struct.pack('QQ', at(memory), 4096)
    assert libc.vmsplice(os.pipe()[1], piece, 1, 0) == 4096
";
    let script = python(&[lends]);
    let _lends = service.run("acme", "a", &[], &["python3", "-c", &script, "lend"]);
    let row = until_state(&service, "a", "unpinned");
    assert!(row["detail"].as_str().is_some_and(|why| why.contains("has used vmsplice")), "{row}");
    assert!(fix(&row).starts_with("start it again without what is named"), "{row}");
    let _again = service.run("acme", "b", &[], &["python3", "-c", &script]);
    until_state(&service, "b", "folding");
}

#[test]
fn agent_that_yields_takes_memory_back_when_the_program_is_done() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let registers = "
file = libc.syscall(323, os.O_CLOEXEC)
api, register = struct.pack('QQQ', 0xaa, 0, 0), struct.pack('QQQQ', at(memory), 64 * 4096, 2, 0)
buffer = lambda words: ctypes.create_string_buffer(words, len(words))
ioctl = lambda request, words: libc.ioctl(file, ctypes.c_ulong(request), buffer(words))
assert ioctl(0xc018aa3f, api) == 0, ctypes.get_errno()
assert ioctl(0xc020aa00, register) == 0, ctypes.get_errno()
print('registered', flush=True)
sys.stdin.readline()
assert ioctl(0x8010aa01, register[:16]) == 0, ctypes.get_errno()
";
    let mut member = service.run("acme", "a", &[], &["python3", "-c", &python(&[registers])]);
    let row = until_state(&service, "a", "yielded");
    assert!(fix(&row).starts_with("wait for its migration or snapshot to end"), "{row}");
    let doctor = json_of(&service.pagefold(&["doctor", "--pid", &member.pid().to_string(), "--json"]));
    assert!(doctor.to_string().contains("a migration or a snapshot needs the userfaultfd"), "{doctor}");
    assert_eq!(member.tell("done"), "ready");
    until_state(&service, "a", "folding");
}

/// A function that makes a system call by an instruction of its own: number, three arguments.
const BARE: &str = "
code = mmap.mmap(-1, 4096, prot=7)
code.write(bytes.fromhex('4889f8 4889f7 4889d6 4889ca 0f05 c3'))
bare = ctypes.CFUNCTYPE(*[ctypes.c_long] * 5)(at(code))
";

#[test]
fn program_that_changes_mappings_by_itself_is_named_and_folded_by_its_own_advice() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let protects = "
other = map(False)
print('filled', flush=True)
sys.stdin.readline()
assert bare(10, at(other), 32 * 4096, 1) == 0
";
    let script = python(&[BARE, protects]);
    let words = ["python3", "-c", &script];
    let folds_all = || find_member(&service.show("acme"), "a").is_some_and(|m| m["folded_pages"].as_u64() >= Some(128));
    let mut member = service.run("acme", "a", &["--all-anonymous"], &words);
    until(60, "both are folded", folds_all);
    assert_eq!(member.tell("protect"), "ready");
    // It is seen where something is to be replaced there.
    service.set("acme", &["--fold", "unfold"]);
    let row = until_state(&service, "a", "lost_track");
    service.set("acme", &["--fold", "on"]);
    assert!(fix(&row).ends_with("or start it again without --all-anonymous"), "{row}");
    assert_eq!(until_state(&service, "a", "lost_track")["state"], "lost_track");
    let mut again = service.run("acme", "b", &[], &words);
    until(60, "it waits", || !again.lines().is_empty());
    assert_eq!(again.tell("protect"), "ready");
    until_state(&service, "b", "folding");
    service.set("acme", &["--fold", "unfold"]);
    until_state(&service, "b", "unfolded");
}

/// The limit is raised for the whole host, which does no harm, and set back.
#[test]
fn limit_of_mappings_is_named_and_raised() {
    if cannot_fold() {
        return;
    }
    let knob = "/proc/sys/vm/max_map_count";
    let before: u64 = fs::read_to_string(knob).expect("the limit").trim().parse().expect("a number");
    if before > 1 << 19 {
        return eprintln!("skipped: {before} mappings are allowed here, more than half of what the remedy says");
    }
    let service = Service::start();
    let _afterwards = Afterwards::run(&format!("echo {before} > {knob}"));
    let maps = "
pages = int(sys.argv[1]) // 4096
area = libc.mmap
area.restype, area.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
area = area(None, pages * 4096, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
for page in range(0, pages, 2): assert libc.mprotect(ctypes.c_void_p(area + page * 4096), 4096, 1) == 0
";
    let script = python(&[maps]);
    // Half of the limit is the program's own.
    let bytes = (before / 2 * 4096).to_string();
    let words = ["python3", "-c", &script, &bytes];
    let _bound = service.run("acme", "a", &[], &words);
    let row = until_state(&service, "a", "no_vma");
    let (command, then) = fix(&row).split_once(", and ").expect("two steps");
    assert!(then.starts_with("wait"), "{row}");
    carry_out(&service, command);
    until_state(&service, "a", "folding");
}

/// `pagefold run` refuses users without userfaultfd. This one is root until it executes the next program.
#[test]
fn program_without_userfaultfd_is_told_and_folded_when_it_is_given_access() {
    if cannot_fold() {
        return;
    }
    let minors = fs::read_to_string("/proc/misc").expect("the list of devices");
    let Some(minor) = minors.lines().find_map(|line| line.trim().strip_suffix(" userfaultfd")) else {
        return eprintln!("skipped: this kernel has no /dev/userfaultfd");
    };
    if fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").is_ok_and(|word| word.trim() != "0") {
        return eprintln!("skipped: anybody may use userfaultfd here");
    }
    // Of this test's own, and so is the directory of mounts.
    let run = |words: &[&str]| {
        assert!(Command::new(words[0]).args(&words[1..]).status().expect("run it").success(), "{words:?}");
    };
    run(&["mknod", "-m", "600", "/run/userfaultfd", "c", "10", minor]);
    run(&["mount", "--bind", "/run/userfaultfd", "/dev/userfaultfd"]);
    let service = Service::start();
    let home = service.place();
    fs::set_permissions(home.parent().expect("a directory"), Permissions::from_mode(0o755)).expect("open it");
    let becomes_other = unprivileged(&known_pages());
    let mut words = vec![becomes_other.get_program().to_str().expect("text")];
    words.extend(becomes_other.get_args().filter_map(|word| word.to_str()));
    let start = |name: &str| {
        let mut member = service.run("acme", name, &[], &words);
        for line in ["alloc x 400", "fill x 0 200 1", "fill x 200 200 1", "mergeable x"] {
            assert_eq!(member.tell(line), "ok");
        }
        member
    };
    let _without = start("a");
    let row = until_state(&service, "a", "no_move");
    assert!(row["detail"].as_str().is_some_and(|why| why.contains("may not use userfaultfd")), "{row}");
    assert!(fix(&row).contains("or give access to /dev/userfaultfd; then start it again"), "{row}");
    run(&["chmod", "666", "/dev/userfaultfd"]);
    let _with = start("b");
    until_state(&service, "b", "folding");
}

#[test]
fn attached_program_without_memory_is_told_so_until_it_has_some() {
    let Some(installed) = Installed::attaching() else { return };
    let _supervisor = installed.serve("[[group]]\nname = 'acme'\n", &[]);
    let (source, program) = (installed.path("bare.c"), installed.text("bare"));
    fs::write(&source, BARE_PROGRAM).expect("write a program");
    let flags = ["-O1", "-static", "-nostdlib", "-fno-builtin", "-fno-stack-protector", "-o", &program];
    assert!(Command::new("cc").args(flags).arg(&source).status().expect("run cc").success());
    let mut member = Member::spawn(Command::new(&program), "bare", installed.dir.path());
    let pid = member.pid();
    let mut tell = |word: &str| assert_eq!(member.tell(word), "ok");
    tell("map");
    let mut attach = Command::new(installed.path("pagefold"));
    attach.args(["attach", &pid.to_string(), "--group", "acme", "--all-anonymous"]);
    let attached = attach.env("PAGEFOLD_DIR", installed.path("s")).env("PAGEFOLD_EAGER", "1").output().expect("run it");
    assert!(attached.status.success(), "{attached:?}");
    let row = |state: &str| {
        let mut row = Value::Null;
        until(120, state, || {
            let shown = installed.show("acme");
            let members = shown["members"].as_array().expect("members");
            row = members.iter().find(|m| m["pid"] == pid).cloned().unwrap_or_default();
            row["state"] == state
        });
        row
    };
    row("folding");
    tell("unmap");
    assert!(fix(&row("nothing_mapped")).starts_with("nothing, if it has little memory"));
    tell("map");
    row("folding");
}

/// A program without a C library: it maps memory and unmaps it in turn, at each line.
const BARE_PROGRAM: &str = r#"
static long bare(long number, long a, long b, long c, long d, long e, long f)
{
	register long r10 __asm__("r10") = d, r8 __asm__("r8") = e, r9 __asm__("r9") = f;

	__asm__ volatile("syscall" : "+a"(number) : "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9) : "rcx", "r11", "memory");
	return number;
}
__attribute__((force_align_arg_pointer)) void _start(void)
{
	enum { BYTES = 2048 * 4096 };
	char byte;
	volatile char *area = 0;

	while (bare(0, 0, (long)&byte, 1, 0, 0, 0) > 0) {
		if (byte != '\n')
			continue;
		if (area) {
			bare(11, (long)area, BYTES, 0, 0, 0, 0);
			area = 0;
		} else {
			area = (char *)bare(9, 0, BYTES, 3, 0x22, -1, 0);
			for (long n = 0; n < BYTES; n++)
				area[n] = n / 4096 % 8 + 1;
		}
		bare(1, 1, (long)"ok\n", 3, 0, 0, 0);
	}
	bare(231, 0, 0, 0, 0, 0, 0);
}
"#;
