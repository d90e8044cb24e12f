//! Checks before a process is attached, and reasons to refuse it.

use crate::{gate, threads};
use host::{AuxiliaryVector, Mapping, MemoryLimits, Process, ProcessStat};
use linux_raw_sys::auxvec::AT_PHENT;
use rustix::process::Pid;
use std::time::{Duration, Instant};

/// Size of a program header of a 64-bit program, in bytes: `Elf64_Phdr`.
const HEADER_BYTES: u64 = 56;

/// Memory that an agent takes, in bytes: 2 MiB. A process whose control group has less left is refused, unless the host
/// has free swap.
const AGENT_BYTES: u64 = 2 << 20;
/// Time in which a child of vfork may execute a program: 500 ms. If the process still shares its memory after that, it
/// is refused.
const VFORK_TIME: Duration = Duration::from_millis(500);
/// Pause between two checks whether a process still shares its memory: 5 ms.
const LOOK: Duration = Duration::from_millis(5);

/// Facts about a process that may be attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Facts {
    /// Bytes of memory that would be enrolled.
    pub enrolled_bytes: u64,
    /// Number of its threads.
    pub threads: usize,
    /// Whether its system calls are filtered (seccomp). The filters apply to the agent's threads, too. They are read
    /// later, while a thread is stopped.
    pub is_filtered: bool,
}

/// Checks whether ksmd can merge a process's memory, for which one of the process's threads has to make a system call.
///
/// # Errors
/// None of its threads can make the call, for this reason.
pub fn check_for_ksm(pid: u32) -> Result<Facts, String> {
    let threads = check_threads(pid, check_traced)?;
    let mappings = Mapping::read_all(pid).map_err(|e| e.to_string())?;
    check_alone(pid)?;
    let enrolled_bytes = foldable_bytes(&mappings, true);
    Ok(Facts { enrolled_bytes, threads: threads.len(), is_filtered: false })
}

/// Checks whether an agent can be put into a process.
///
/// # Errors
/// The process cannot have an agent, for this reason.
pub fn check(pid: u32, all_anonymous: bool) -> Result<Facts, String> {
    // A process with an agent is traced at times, so this check comes before the one for tracers.
    if has_agent(pid) {
        return Err("there is an agent in it already".into());
    }
    let threads = check_threads(pid, check_traced)?;
    let is_filtered = check_filters(pid, &threads)?;
    check_proc(pid)?;
    check_library(pid)?;
    check_memory(pid)?;
    let mappings = Mapping::read_all(pid).map_err(|e| e.to_string())?;
    let is_forked = ProcessStat::read(pid).is_ok_and(|stat| stat.forked);
    if mappings.iter().any(|mapping| is_looked_after(mapping) && !(is_forked && is_inherited(mapping))) {
        return Err(
            "a userfaultfd looks after some of its memory: its own, or that of an agent which is there already".into(),
        );
    }
    check_alone(pid)?;
    let enrolled_bytes = foldable_bytes(&mappings, all_anonymous);
    if enrolled_bytes == 0 && !all_anonymous {
        return Err("it has advised no memory to be mergeable (madvise MADV_MERGEABLE): see --all-anonymous".into());
    }
    Ok(Facts { enrolled_bytes, threads: threads.len(), is_filtered })
}

/// Checks that an agent would get a userfaultfd. Either this program may open `/dev/userfaultfd`, or the process may
/// make one itself, because it is the caller's own.
///
/// # Errors
/// The agent would get none, for this reason.
pub fn check_userfaultfd() -> Result<(), String> {
    match host::userfaultfd_features() {
        Err(e) if e.kind() == std::io::ErrorKind::PermissionDenied => Err(
            "you may not use userfaultfd: run as root, or set vm.unprivileged_userfaultfd=1, or give this user access to /dev/userfaultfd".into(),
        ),
        _ => Ok(()),
    }
}

/// Whether a mapping is registered with a userfaultfd.
fn is_looked_after(mapping: &Mapping) -> bool {
    [b"um", b"uw", b"ui"].iter().any(|flag| mapping.has_flag(flag))
}

/// Whether a forked child may have inherited this mapping of the pool, with its userfaultfd, from a member. Such a
/// child is not refused for it: the keeper (`pagefold-prove`) serves that memory.
fn is_inherited(mapping: &Mapping) -> bool {
    !mapping.shared && mapping.name.starts_with(act::POOL_NAMES)
}

/// Checks a process with `check` for each of its threads. Returns the threads.
fn check_threads(pid: u32, check: fn(u32, Pid) -> Result<(), String>) -> Result<Vec<Pid>, String> {
    let process = Process::read_without_arguments(pid).map_err(|e| e.to_string())?;
    if process.stat.kernel_thread {
        return Err("it is a thread of the kernel's, and has no memory of its own".into());
    }
    if process.stat.has_ended() {
        return Err("it has ended".into());
    }
    let all = threads::list(pid).map_err(|e| format!("its threads cannot be listed: {e}"))?;
    for thread in &all {
        check(pid, *thread)?;
        check_runs(pid, *thread)?;
    }
    check_program(pid)?;
    Ok(all)
}

fn check_alone(pid: u32) -> Result<(), String> {
    check_soon_alone(VFORK_TIME, || act::trace::sharer_of_memory(pid))
}

/// Waits until no other process shares the memory. A child of vfork does that until it executes a program. `look`
/// returns a process that shares the memory. An error if there still is one after `time`.
fn check_soon_alone(time: Duration, look: impl Fn() -> Option<u32>) -> Result<(), String> {
    let until = Instant::now() + time;
    while let Some(other) = look() {
        if Instant::now() > until {
            return Err(format!("it shares its memory with process {other}, as a child of vfork does"));
        }
        std::thread::sleep(LOOK);
    }
    Ok(())
}

/// Bytes of memory that may be folded: all private anonymous memory, or only what the program has advised
/// (`MADV_MERGEABLE`).
fn foldable_bytes(mappings: &[Mapping], all_anonymous: bool) -> u64 {
    let is_foldable = |mapping: &&Mapping| {
        !mapping.shared
            && mapping.inode == 0
            && mapping.read
            && mapping.write
            && !mapping.has_flag(b"gd")
            && (mapping.name.is_empty() || mapping.name == "[heap]" || mapping.name.starts_with("[anon:"))
            && (all_anonymous || mapping.has_flag(b"mg"))
    };
    mappings.iter().filter(is_foldable).map(|mapping| mapping.end.0 - mapping.start.0).sum()
}

fn check_traced(pid: u32, thread: Pid) -> Result<(), String> {
    if let Some(tracer) = threads::status(pid, thread, "TracerPid").filter(|tracer| tracer != "0") {
        return Err(format!("process {tracer} traces it (a debugger, strace): a process has one tracer at most"));
    }
    Ok(())
}

/// Checks that a thread can run: neither is its control group frozen nor its process stopped.
///
/// # Errors
/// The thread cannot run, for this reason.
pub fn check_runs(pid: u32, thread: Pid) -> Result<(), String> {
    if let Some(group) = host::frozen_group(pid, thread.as_raw_nonzero().get().cast_unsigned()) {
        return Err(format!("control group {group} is frozen, and this process in it: thaw that first"));
    }
    if threads::status(pid, thread, "State").is_some_and(|state| state.starts_with('T')) {
        return Err(format!("it is suspended (SIGSTOP): let it go on first, by kill -CONT {pid}"));
    }
    Ok(())
}

/// Whether a process has an agent, by the names of its threads. A program can give its own threads these names, and so
/// keeps an agent away.
pub fn has_agent(pid: u32) -> bool {
    threads::list(pid).is_ok_and(|all| all.iter().any(|thread| threads::is_named_as_agents(pid, *thread)))
}

/// Whether system calls are filtered (seccomp). All threads must have the same filters: the agent's threads get those
/// of one thread, and must not have more rights than any other.
fn check_filters(pid: u32, all: &[Pid]) -> Result<bool, String> {
    const FIELDS: [&str; 3] = ["Seccomp", "Seccomp_filters", "NoNewPrivs"];
    let filters = |thread: &Pid| {
        let fields = threads::statuses(pid, *thread, FIELDS);
        // A thread that has ended has no filters any more, or no `status`.
        fields.filter(|_| threads::runs_program(pid, *thread))
    };
    let mut each = all.iter().filter_map(filters);
    let first = each.next().unwrap_or_default();
    if each.any(|other| other != first) {
        return Err("its threads have different filters of system calls (seccomp)".into());
    }
    Ok(first[0].as_ref().is_some_and(|mode| mode != "0"))
}

/// Checks that the program is a 64-bit one, by the auxiliary vector. Its file is not read, because the file's server
/// (FUSE, NFS) may not answer.
fn check_program(pid: u32) -> Result<(), String> {
    let vector = AuxiliaryVector::of(pid).map_err(|e| format!("the kernel does not tell of its program: {e}"))?;
    if vector.value(AT_PHENT) == Some(HEADER_BYTES) { Ok(()) } else { Err("it is a program of 32 bits".into()) }
}

fn check_library(pid: u32) -> Result<(), String> {
    gate::library_out_of_reach(pid).map_or(Ok(()), |name| {
        Err(format!(
            "its C library {name} lies on a file system that may keep its readers waiting (FUSE, a network's): copy it to a local one"
        ))
    })
}

/// Checks that the process's control group has room for an agent's memory. At the group's limit, the kernel would end a
/// process there.
fn check_memory(pid: u32) -> Result<(), String> {
    let Some(limits) = MemoryLimits::find() else { return Ok(()) };
    let Some(group) = limits.group_of(pid) else { return Ok(()) };
    let room = limits.room_bytes(&group).filter(|room| *room < AGENT_BYTES && host::free_swap_bytes() < AGENT_BYTES);
    room.map_or(Ok(()), |room| {
        Err(format!(
            "its control group {group} or one above it has {} left of its memory limit, and the agent takes up to {}: raise the limit",
            cli::bytes(room),
            cli::bytes(AGENT_BYTES)
        ))
    })
}

/// Checks that the process sees a `/proc` in its mount namespace: the agent reads there about its process.
fn check_proc(pid: u32) -> Result<(), String> {
    if host::has_proc(pid) { Ok(()) } else { Err("there is no /proc where it runs".into()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Subject;
    use std::cell::Cell;
    use std::process::Command;

    /// Maps memory of many kinds, 64 MiB each, when it is told to.
    const MAPS: &str = "
kept = []
def place(access, flags, advice=0, file=-1):
    made = mmap.mmap(file, 64 << 20, flags | 0x4000, access)
    if advice: made.madvise(advice)
    kept.append(made)
say('ready')
sys.stdin.readline()
ANONYMOUS, PRIVATE, SHARED, GROWS = mmap.MAP_ANONYMOUS, mmap.MAP_PRIVATE, mmap.MAP_SHARED, 0x100
file = tempfile.TemporaryFile()
file.truncate(64 << 20)
MAPPED
say('mapped')
wait_for_end()
";

    /// Memory that may be folded, and of that the part that was advised, in units of 64 MiB, as this mapping changes
    /// it.
    fn foldable(mapped: &str) -> [u64; 2] {
        let mut subject = Subject::start(&MAPS.replace("MAPPED", mapped));
        subject.line();
        let look = || {
            let mappings = Mapping::read_all(subject.pid()).expect("it runs");
            [true, false].map(|all| foldable_bytes(&mappings, all))
        };
        let before = look();
        subject.tell("map");
        assert_eq!(subject.line(), "mapped");
        let mappings = Mapping::read_all(subject.pid()).expect("it runs");
        [(true, before[0]), (false, before[1])]
            .map(|(all, before)| (foldable_bytes(&mappings, all) - before + (1 << 20)) / (64 << 20))
    }

    #[test]
    fn private_anonymous_memory_that_may_be_written_is_foldable() {
        for (mapped, expected) in [
            ("place(3, PRIVATE | ANONYMOUS)", [1, 0]),
            ("place(3, PRIVATE | ANONYMOUS, 12)", [1, 1]),
            ("place(3, SHARED | ANONYMOUS)", [0, 0]),
            ("place(1, PRIVATE | ANONYMOUS)", [0, 0]),
            ("place(3, PRIVATE, 0, file.fileno())", [0, 0]),
            ("place(3, PRIVATE | ANONYMOUS | GROWS)", [0, 0]),
        ] {
            assert_eq!(foldable(mapped), expected, "{mapped}");
        }
    }

    #[test]
    fn process_is_looked_at_before_it_is_stopped() {
        let refused = |script: &str, all: bool| {
            let subject = Subject::start(&format!("{script}\nsay('ready')\nwait_for_end()"));
            assert_eq!(subject.line(), "ready");
            check(subject.pid(), all)
        };
        let why = refused("", false).unwrap_err();
        assert!(why.contains("--all-anonymous"), "{why}");
        let facts = refused("threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()", true).unwrap();
        assert!(facts.enrolled_bytes > 0 && facts.threads == 2 && !facts.is_filtered, "{facts:?}");
        let advised = refused("kept = mmap.mmap(-1, 64 << 20, 0x22, 3)\nkept.madvise(12)", false).unwrap();
        assert_eq!((advised.enrolled_bytes, advised.threads), (64 << 20, 1));
        let why = refused("raw(157, 15, b'pagefold', 0, 0, 0)", true).unwrap_err();
        assert!(why.contains("an agent in it already"), "{why}");
        let follow = "watch = raw(323, 0o2000001)
kept = mmap.mmap(-1, 1 << 20, 0x22, 3)
at = ctypes.addressof(ctypes.c_char.from_buffer(kept))
assert raw(16, watch, 0xc018aa3f, struct.pack('QQQ', 0xaa, 0, 0)) == 0
assert raw(16, watch, 0xc020aa00, struct.pack('QQQQ', at, 1 << 20, MODE, 0)) == 0";
        for mode in ["1", "2"] {
            let why = refused(&follow.replace("MODE", mode), true).unwrap_err();
            assert!(why.contains("a userfaultfd looks after"), "{why}");
        }
        let one_filters = "def filtered():
    code = ctypes.create_string_buffer(struct.pack('HBBI', 6, 0, 0, 0x7fff0000))
    assert raw(157, 38, 1, 0, 0, 0) == 0
    assert raw(317, 1, 0, struct.pack('HxxxxxxQ', 1, ctypes.addressof(code))) == 0
ONE
time.sleep(0.01)
";
        let facts = refused(&one_filters.replace("ONE", "filtered()"), true).unwrap();
        assert!(facts.is_filtered);
        let apart = "def one():\n    filtered()\n    say('ready')\n    time.sleep(1000)\nthreading.Thread(target=one, daemon=True).start()";
        let why = refused(&one_filters.replace("ONE", apart), true).unwrap_err();
        assert!(why.contains("different filters"), "{why}");
    }

    #[test]
    fn process_that_is_traced_or_has_ended_or_is_the_kernels_is_refused() {
        let subject = Subject::start("say('ready')\nwait_for_end()");
        subject.line();
        let mut halts = subject.halts();
        crate::testing::halt(&mut halts, &[]);
        let why = [check(subject.pid(), true), check_for_ksm(subject.pid())].map(Result::unwrap_err);
        halts.go();
        // The kernel names the thread that traces it: this one.
        let expected = format!("process {} traces it", rustix::thread::gettid().as_raw_nonzero());
        assert!(why.iter().all(|why| why.starts_with(&expected)), "{why:?}");
        let mut ended = Command::new("true").spawn().unwrap();
        crate::testing::wait_for("it has ended", || check(ended.id(), true) == Err("it has ended".into()));
        ended.wait().unwrap();
        if host::pids().unwrap().contains(&2) && ProcessStat::read(2).is_ok_and(|stat| stat.kernel_thread) {
            assert!(check(2, true).unwrap_err().contains("a thread of the kernel's"));
        }
    }

    /// A Go program that starts others all the time was refused now and then.
    #[test]
    fn child_of_vfork_that_soon_executes_a_program_is_waited_for() {
        let looks = Cell::new(0);
        let there_for = |number: u32, time: Duration| {
            looks.set(0);
            let look = || {
                looks.set(looks.get() + 1);
                (looks.get() <= number).then_some(7)
            };
            check_soon_alone(time, look)
        };
        assert_eq!(there_for(3, Duration::from_secs(20)), Ok(()));
        let why = there_for(u32::MAX, Duration::from_secs(1)).unwrap_err();
        assert!(why.contains("process 7") && looks.get() > 2, "{why}");
    }
}
