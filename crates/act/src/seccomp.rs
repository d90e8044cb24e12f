//! Whether a program's filters of system calls (seccomp) let an agent work. The agent's threads inherit the filters of
//! that thread of the program which is made to start the first of them.
//!
//! Each filter is executed for each system call of the agent ([`CALLS`]), as the kernel does it (`man 2 seccomp`).
//! Arguments that are always the same are known. A branch that depends on an unknown value is followed both ways. So a
//! filter passes only if it allows all that the agent may ask for.
//!
//! ```text
//!   filters, calls --> the strictest answer of each path --> allowed by all: none
//!                                                        \-> otherwise: the first call that is not
//! ```

/// An instruction of a filter of system calls.
pub type FilterInstruction = libc::sock_filter;

/// A system call of the agent, with the arguments that are always the same.
#[derive(Clone, Copy, Debug)]
pub struct AgentCall {
    /// Its name.
    pub name: &'static str,
    /// Its number.
    pub number: i64,
    /// Its first three arguments, as far as they are known.
    pub arguments: [Option<u64>; 3],
    /// Whether the filter may also answer with an error: the agent then finds out in another way.
    pub or_error: bool,
}

const fn call(name: &'static str, number: i64) -> AgentCall {
    call_with(name, number, [None; 3])
}

/// A call that must be allowed, with these of its arguments.
pub const fn call_with(name: &'static str, number: i64, arguments: [Option<u64>; 3]) -> AgentCall {
    AgentCall { name, number, arguments, or_error: false }
}

/// Flags of `clone` for the agent's first thread: it shares the program's memory and signal handlers, and belongs to
/// its process.
const FIRST_THREAD: u64 = (libc::CLONE_VM | libc::CLONE_SIGHAND | libc::CLONE_THREAD) as u64;

/// Flags of the `clone` calls by which the agent's C library makes its other threads. Filters such as QEMU's allow only
/// these flags.
const OTHER_THREADS: u64 = (libc::CLONE_VM
    | libc::CLONE_FS
    | libc::CLONE_FILES
    | libc::CLONE_SIGHAND
    | libc::CLONE_THREAD
    | libc::CLONE_SYSVSEM
    | libc::CLONE_SETTLS
    | libc::CLONE_PARENT_SETTID
    | libc::CLONE_CHILD_CLEARTID
    | libc::CLONE_DETACHED) as u64;

/// System calls of the agent that is put into a running program, and those that are made in the program on its behalf.
/// The agent makes no others, except after a bug, to end itself.
pub const CALLS: &[AgentCall] = &[
    call("arch_prctl", libc::SYS_arch_prctl),
    call("brk", libc::SYS_brk),
    call("chdir", libc::SYS_chdir),
    call("clock_gettime", libc::SYS_clock_gettime),
    call("clock_nanosleep", libc::SYS_clock_nanosleep),
    call_with("clone", libc::SYS_clone, [Some(OTHER_THREADS), None, None]),
    call("close", libc::SYS_close),
    call("close_range", libc::SYS_close_range),
    call("dup3", libc::SYS_dup3),
    call("eventfd2", libc::SYS_eventfd2),
    call("exit", libc::SYS_exit),
    call("fallocate", libc::SYS_fallocate),
    call("fcntl", libc::SYS_fcntl),
    call("fstat", libc::SYS_fstat),
    call("fstatfs", libc::SYS_fstatfs),
    call("ftruncate", libc::SYS_ftruncate),
    call("futex", libc::SYS_futex),
    AgentCall { or_error: true, ..call("get_mempolicy", libc::SYS_get_mempolicy) },
    call("getcwd", libc::SYS_getcwd),
    call("getdents64", libc::SYS_getdents64),
    call("getpid", libc::SYS_getpid),
    call("getrlimit", libc::SYS_getrlimit),
    call("getsockopt", libc::SYS_getsockopt),
    call("gettid", libc::SYS_gettid),
    call("ioctl", libc::SYS_ioctl),
    call("lseek", libc::SYS_lseek),
    call("lstat", libc::SYS_lstat),
    call("madvise", libc::SYS_madvise),
    call("memfd_create", libc::SYS_memfd_create),
    call("mmap", libc::SYS_mmap),
    call("mprotect", libc::SYS_mprotect),
    call("mremap", libc::SYS_mremap),
    call("msync", libc::SYS_msync),
    call("munlock", libc::SYS_munlock),
    call("munmap", libc::SYS_munmap),
    call("nanosleep", libc::SYS_nanosleep),
    call("newfstatat", libc::SYS_newfstatat),
    call("open", libc::SYS_open),
    call("openat", libc::SYS_openat),
    call("openat2", libc::SYS_openat2),
    call("poll", libc::SYS_poll),
    call("ppoll", libc::SYS_ppoll),
    call_with("prctl", libc::SYS_prctl, [Some(libc::PR_SET_NAME as u64), None, None]),
    call_with("prctl", libc::SYS_prctl, [Some(libc::PR_GET_DUMPABLE as u64), None, None]),
    call("pread64", libc::SYS_pread64),
    call("prlimit64", libc::SYS_prlimit64),
    AgentCall { or_error: true, ..call("process_vm_readv", libc::SYS_process_vm_readv) },
    call("pwrite64", libc::SYS_pwrite64),
    call("read", libc::SYS_read),
    call("readlink", libc::SYS_readlink),
    call("recvmsg", libc::SYS_recvmsg),
    call("restart_syscall", libc::SYS_restart_syscall),
    call("rt_sigprocmask", libc::SYS_rt_sigprocmask),
    call("sched_getaffinity", libc::SYS_sched_getaffinity),
    call("sched_yield", libc::SYS_sched_yield),
    call("sendmsg", libc::SYS_sendmsg),
    call("set_robust_list", libc::SYS_set_robust_list),
    call("set_tid_address", libc::SYS_set_tid_address),
    call("sigaltstack", libc::SYS_sigaltstack),
    call_with(
        "socketpair",
        libc::SYS_socketpair,
        [Some(libc::AF_UNIX as u64), Some((libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC) as u64), Some(0)],
    ),
    call("stat", libc::SYS_stat),
    call("statfs", libc::SYS_statfs),
    call("statx", libc::SYS_statx),
    call("sysinfo", libc::SYS_sysinfo),
    call("uname", libc::SYS_uname),
    call("write", libc::SYS_write),
];

/// Further system calls of an agent that is loaded with its program, which uses the program's C library, and of its
/// hooks.
const OF_LOADED: &[AgentCall] = &[
    or_error("clone3", libc::SYS_clone3),
    call("connect", libc::SYS_connect),
    or_error("getrandom", libc::SYS_getrandom),
    or_error("kcmp", libc::SYS_kcmp),
    or_error("mlock", libc::SYS_mlock),
    or_error("pidfd_getfd", libc::SYS_pidfd_getfd),
    or_error("pidfd_open", libc::SYS_pidfd_open),
    or_error("rseq", libc::SYS_rseq),
    or_error("setsockopt", libc::SYS_setsockopt),
    call("socket", libc::SYS_socket),
    or_error("statmount", linux_raw_sys::general::__NR_statmount as i64),
    or_error("userfaultfd", libc::SYS_userfaultfd),
];

const fn or_error(name: &'static str, number: i64) -> AgentCall {
    AgentCall { or_error: true, ..call(name, number) }
}

/// `AUDIT_ARCH_X86_64`.
const ARCHITECTURE: u32 = 0xc000_003e;
/// `SECCOMP_RET_ACTION_FULL`, `SECCOMP_RET_ALLOW`, `SECCOMP_RET_LOG` and `SECCOMP_RET_ERRNO`.
const ACTION: u32 = 0xffff_0000;
const ALLOW: u32 = 0x7fff_0000;
const LOG: u32 = 0x7ffc_0000;
const ERROR: u32 = 0x0005_0000;
/// Length in bytes of the data that a filter can read: the kernel's `struct seccomp_data`.
const DATA_BYTES: u32 = 64;
/// Most instructions that are executed for one call and filter. A filter that takes more does not pass.
const MOST_STEPS: usize = 200_000;

/// The state of a filter's execution. An unknown value is `None`.
#[derive(Clone, Copy, Debug)]
struct State {
    at: usize,
    a: Option<u32>,
    x: Option<u32>,
    memory: [Option<u32>; 16],
}

/// The name of the first system call of the agent that these filters do not allow; `None` if they allow all.
pub fn forbidden(filters: &[Vec<FilterInstruction>]) -> Option<&'static str> {
    CALLS.iter().find(|call| !filters.iter().all(|filter| allows(filter, call))).map(|call| call.name)
}

/// As [`forbidden`], for one filter and an agent that is loaded with its program.
pub fn forbidden_when_loaded(filter: &[FilterInstruction]) -> Option<&'static str> {
    CALLS.iter().chain(OF_LOADED).find(|call| !allows(filter, call)).map(|call| call.name)
}

/// Flags of `clone` with which these filters let the agent's first thread be made. If possible, the thread gets a root
/// and a working directory of its own.
pub fn first_thread(filters: &[Vec<FilterInstruction>]) -> u64 {
    let apart = call_with("clone", libc::SYS_clone, [Some(FIRST_THREAD), None, None]);
    if filters.iter().all(|filter| allows(filter, &apart)) { FIRST_THREAD } else { OTHER_THREADS }
}

/// Whether a filter allows a call for all values of its unknown arguments.
pub fn allows(filter: &[FilterInstruction], call: &AgentCall) -> bool {
    let mut open = vec![State { at: 0, a: Some(0), x: Some(0), memory: [Some(0); 16] }];
    let mut steps = 0;
    while let Some(mut state) = open.pop() {
        loop {
            steps += 1;
            let Some(instruction) = filter.get(state.at).filter(|_| steps <= MOST_STEPS) else { return false };
            match step(*instruction, &mut state, call) {
                Next::Goes => {}
                Next::Forks(other) => open.push(State { at: other, ..state }),
                Next::Returns(Some(action)) if [ALLOW, LOG].contains(&(action & ACTION)) => break,
                // The caller would take error 0 for an answer.
                Next::Returns(Some(action)) if call.or_error && action & ACTION == ERROR && action != ERROR => break,
                Next::Returns(_) | Next::Unknown => return false,
            }
        }
    }
    true
}

/// What follows an instruction.
enum Next {
    /// The filter goes on at the instruction that the state names.
    Goes,
    /// A branch on an unknown value: the filter may go on at the instruction that the state names, or at this one.
    Forks(usize),
    /// The filter ends with this answer; `None` if it is not known.
    Returns(Option<u32>),
    /// The kernel accepts no filter with this instruction.
    Unknown,
}

/// Executes one instruction. Codes are those of `linux/bpf_common.h`.
fn step(instruction: FilterInstruction, state: &mut State, call: &AgentCall) -> Next {
    let FilterInstruction { code, jt, jf, k } = instruction;
    let cell = k as usize % 16;
    state.at += 1;
    match code {
        0x20 => state.a = load(k, call),
        0x00 => state.a = Some(k),
        0x01 => state.x = Some(k),
        0x80 => state.a = Some(DATA_BYTES),
        0x81 => state.x = Some(DATA_BYTES),
        0x60 => state.a = state.memory[cell],
        0x61 => state.x = state.memory[cell],
        0x02 => state.memory[cell] = state.a,
        0x03 => state.memory[cell] = state.x,
        0x07 => state.x = state.a,
        0x87 => state.a = state.x,
        0x06 => return Next::Returns(Some(k)),
        0x16 => return Next::Returns(state.a),
        0x05 => state.at = state.at.saturating_add(k as usize),
        0x84 => state.a = state.a.map(u32::wrapping_neg),
        _ => {
            let operand = if code & 0x08 == 0 { Some(k) } else { state.x };
            return match code & 0x07 {
                4 => arithmetic(code & 0xf0, operand, state),
                5 => branch(code & 0xf0, operand, (jt, jf), state),
                _ => Next::Unknown,
            };
        }
    }
    Next::Goes
}

fn arithmetic(operation: u16, operand: Option<u32>, state: &mut State) -> Next {
    let both = state.a.zip(operand);
    state.a = match operation {
        0x00 => both.map(|(a, by)| a.wrapping_add(by)),
        0x10 => both.map(|(a, by)| a.wrapping_sub(by)),
        0x20 => both.map(|(a, by)| a.wrapping_mul(by)),
        // On a division by 0, the kernel ends the filter with an answer that forbids the call.
        0x30 => match both.and_then(|(a, by)| a.checked_div(by)) {
            None => return Next::Unknown,
            quotient => quotient,
        },
        0x40 => both.map(|(a, by)| a | by),
        0x50 => both.map(|(a, by)| a & by),
        0x60 => both.map(|(a, by)| a.wrapping_shl(by)),
        0x70 => both.map(|(a, by)| a.wrapping_shr(by)),
        0xa0 => both.map(|(a, by)| a ^ by),
        _ => return Next::Unknown,
    };
    Next::Goes
}

fn branch(operation: u16, operand: Option<u32>, (jt, jf): (u8, u8), state: &mut State) -> Next {
    let holds = match (operation, state.a.zip(operand)) {
        (0x10, Some((a, to))) => a == to,
        (0x20, Some((a, to))) => a > to,
        (0x30, Some((a, to))) => a >= to,
        (0x40, Some((a, to))) => a & to != 0,
        (0x10 | 0x20 | 0x30 | 0x40, None) => {
            let other = state.at + usize::from(jf);
            state.at += usize::from(jt);
            return Next::Forks(other);
        }
        _ => return Next::Unknown,
    };
    state.at += usize::from(if holds { jt } else { jf });
    Next::Goes
}

/// A word of the data that a filter can read (number, architecture, address of the instruction, arguments); `None` if
/// it is not known.
fn load(offset: u32, call: &AgentCall) -> Option<u32> {
    match offset {
        0 => u32::try_from(call.number).ok(),
        4 => Some(ARCHITECTURE),
        16.. => {
            let value = (*call.arguments.get((offset as usize - 16) / 8)?)?;
            Some(if offset.is_multiple_of(8) { value as u32 } else { (value >> 32) as u32 })
        }
        // The address of the calling instruction.
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KILL: u32 = 0x8000_0000;
    const PERMISSION_DENIED: u32 = 0x0005_0001;
    const MREMAP: u32 = libc::SYS_mremap as u32;
    const CLONE: u32 = libc::SYS_clone as u32;

    const fn instruction(code: u16, jt: u8, jf: u8, k: u32) -> FilterInstruction {
        FilterInstruction { code, jt, jf, k }
    }

    const fn load_word(offset: u32) -> FilterInstruction {
        instruction(0x20, 0, 0, offset)
    }

    const fn if_equal(k: u32, jt: u8, jf: u8) -> FilterInstruction {
        instruction(0x15, jt, jf, k)
    }

    const fn answer(k: u32) -> FilterInstruction {
        instruction(0x06, 0, 0, k)
    }

    /// A filter that gives this answer to one call, and allows all others.
    fn all_but(number: u32, its: u32) -> Vec<FilterInstruction> {
        vec![load_word(0), if_equal(number, 0, 1), answer(its), answer(ALLOW)]
    }

    #[test]
    fn call_that_is_not_allowed_is_named() {
        assert_eq!(forbidden(&[]), None);
        assert_eq!(forbidden(&[vec![answer(ALLOW)]]), None);
        assert_eq!(forbidden(&[vec![answer(KILL)]]), Some("arch_prctl"), "the first of all");
        for (its, expected) in [(KILL, Some("mremap")), (PERMISSION_DENIED, Some("mremap")), (LOG | 7, None)] {
            assert_eq!(forbidden(&[all_but(MREMAP, its)]), expected, "{its:x}");
            assert_eq!(forbidden(&[vec![answer(ALLOW)], all_but(MREMAP, its), vec![answer(ALLOW)]]), expected);
        }
        assert_eq!(forbidden(&[all_but(libc::SYS_kexec_load as u32, KILL)]), None, "none of the agent's");
        for (its, expected) in [(KILL, false), (ERROR, false), (PERMISSION_DENIED, true)] {
            let found = forbidden(&[all_but(libc::SYS_get_mempolicy as u32, its)]);
            assert_eq!(found, (!expected).then_some("get_mempolicy"), "{its:x}");
        }
        // The filter kills only calls of another architecture, which the agent does not make.
        assert_eq!(forbidden(&[vec![load_word(4), if_equal(ARCHITECTURE, 0, 1), answer(ALLOW), answer(KILL)]]), None);
    }

    #[test]
    fn calls_of_an_agent_that_was_loaded_count_besides() {
        assert_eq!(forbidden_when_loaded(&[answer(ALLOW)]), None);
        for (number, its, expected) in [
            (libc::SYS_ioctl, KILL, Some("ioctl")),
            (libc::SYS_connect, PERMISSION_DENIED, Some("connect")),
            (libc::SYS_clone3, KILL, Some("clone3")),
            // As QEMU's sandbox: its C library then calls `clone`.
            (libc::SYS_clone3, PERMISSION_DENIED, None),
            (libc::SYS_execve, KILL, None),
        ] {
            assert_eq!(forbidden_when_loaded(&all_but(number as u32, its)), expected, "{number}: {its:x}");
        }
    }

    #[test]
    fn argument_that_is_known_counts_and_any_other_may_be_anything() {
        // As Docker's: no thread in namespaces of its own.
        let namespaces = instruction(0x54, 0, 0, 0x7e02_0000);
        let docker = [load_word(0), if_equal(CLONE, 0, 4), load_word(16), namespaces, if_equal(0, 1, 0), answer(KILL)];
        assert_eq!(forbidden(&[[&docker[..], &[answer(ALLOW)]].concat()]), None);
        let none = [load_word(0), if_equal(CLONE, 0, 3), load_word(16), if_equal(0, 1, 0), answer(KILL), answer(ALLOW)];
        assert_eq!(forbidden(&[none.to_vec()]), Some("clone"));
        let high = [load_word(0), if_equal(CLONE, 0, 3), load_word(20), if_equal(0, 1, 0), answer(KILL), answer(ALLOW)];
        assert_eq!(forbidden(&[high.to_vec()]), None, "the upper half of the flags is 0");
        for kill_if in [0, 1] {
            let by_address =
                [load_word(0), if_equal(MREMAP, 0, 3), load_word(16), if_equal(7, kill_if, 1 - kill_if), answer(KILL)];
            assert_eq!(forbidden(&[[&by_address[..], &[answer(ALLOW)]].concat()]), Some("mremap"));
        }
    }

    #[test]
    fn first_thread_shares_directories_where_filters_want_that() {
        assert_eq!(first_thread(&[]), FIRST_THREAD);
        assert_eq!(first_thread(&[all_but(MREMAP, KILL)]), FIRST_THREAD);
        // As QEMU's sandbox: no clone without each of the flags of a C library's threads.
        for flag in [libc::CLONE_VM, libc::CLONE_FS, libc::CLONE_FILES, libc::CLONE_SETTLS, libc::CLONE_CHILD_CLEARTID]
        {
            let masked = instruction(0x54, 0, 0, flag.cast_unsigned());
            let qemu = [load_word(0), if_equal(CLONE, 0, 4), load_word(16), masked, if_equal(0, 0, 1), answer(KILL)];
            let qemu = [&qemu[..], &[answer(ALLOW)]].concat();
            assert_eq!(forbidden(std::slice::from_ref(&qemu)), None, "{flag:x}");
            let expected = if FIRST_THREAD & flag as u64 == 0 { OTHER_THREADS } else { FIRST_THREAD };
            assert_eq!(first_thread(&[qemu]), expected, "{flag:x}");
        }
    }

    #[test]
    fn values_are_computed_as_by_the_kernel() {
        // (5 + 3) * 2 - 1, shifted, complemented and kept in memory: 0x3c & 0x34.
        let steps =
            [(0x00, 5), (0x04, 3), (0x24, 2), (0x14, 1), (0x64, 2), (0x02, 3), (0x00, 0), (0x60, 3), (0x54, 0x34)];
        let mut filter: Vec<_> = steps.map(|(code, k)| instruction(code, 0, 0, k)).to_vec();
        filter.extend([if_equal(0x34, 0, 1), answer(ALLOW), answer(KILL)]);
        assert_eq!(forbidden(&[filter]), None);
        // The answer is computed: `LOG` by way of X.
        let by_x = [instruction(0x01, 0, 0, LOG), instruction(0x87, 0, 0, 0), instruction(0x16, 0, 0, 0)];
        assert_eq!(forbidden(&[by_x.to_vec()]), None);
    }

    #[test]
    fn operations_and_branches_are_those_of_the_kernel() {
        for (code, a, by, result) in [
            (0x04, u32::MAX, 2, 1),
            (0x14, 1, 2, u32::MAX),
            (0x24, 1 << 31, 3, 1 << 31),
            (0x34, 7, 2, 3),
            (0x44, 5, 2, 7),
            (0x54, 6, 3, 2),
            (0x64, 3, 31, 1 << 31),
            (0x74, 1 << 31, 30, 2),
            (0x84, 1, 0, u32::MAX),
            (0xa4, 6, 3, 5),
        ] {
            let end = [if_equal(result, 0, 1), answer(ALLOW), answer(KILL)];
            let by_number = [instruction(0x00, 0, 0, a), instruction(code, 0, 0, by)];
            assert_eq!(forbidden(&[[&by_number[..], &end].concat()]), None, "{code:x}");
            let by_x = [instruction(0x01, 0, 0, by), instruction(0x00, 0, 0, a), instruction(code | 8, 0, 0, 77)];
            // The kernel knows one form of `neg`.
            if code != 0x84 {
                assert_eq!(forbidden(&[[&by_x[..], &end].concat()]), None, "{code:x}");
            }
        }
        for (code, a, to, holds) in [
            (0x15, 5, 5, true),
            (0x15, 5, 6, false),
            (0x25, 6, 5, true),
            (0x25, 5, 5, false),
            (0x35, 5, 5, true),
            (0x35, 4, 5, false),
            (0x45, 6, 2, true),
            (0x45, 6, 1, false),
        ] {
            let answers = if holds { [answer(ALLOW), answer(KILL)] } else { [answer(KILL), answer(ALLOW)] };
            for (code, to, x) in [(code, to, 77), (code | 8, 77, to)] {
                let begin = [instruction(0x01, 0, 0, x), instruction(0x00, 0, 0, a), instruction(code, 0, 1, to)];
                assert_eq!(forbidden(&[[&begin[..], &answers].concat()]), None, "{code:x} {a} {to}");
            }
            // The same branch on an unknown value is followed both ways.
            let begin = [load_word(8), instruction(code, 0, 1, to)];
            assert!(forbidden(&[[&begin[..], &answers].concat()]).is_some(), "{code:x}");
        }
        let by_zero = [instruction(0x00, 0, 0, 7), instruction(0x3c, 0, 0, 0), answer(ALLOW)];
        assert!(forbidden(&[by_zero.to_vec()]).is_some(), "X is 0 at first");
        let memory = [instruction(0x02, 0, 0, 3), instruction(0x01, 0, 0, 9), instruction(0x03, 0, 0, 4)];
        let kept = [instruction(0x61, 0, 0, 3), instruction(0x60, 0, 0, 4), instruction(0x07, 0, 0, 0)];
        let jump = [instruction(0x05, 0, 0, 1), answer(KILL), instruction(0x87, 0, 0, 0)];
        let end = [if_equal(9, 0, 1), answer(ALLOW), answer(KILL)];
        assert_eq!(forbidden(&[[&memory[..], &kept, &jump, &end].concat()]), None);
    }

    #[test]
    fn filter_that_cannot_be_understood_allows_nothing() {
        for filter in [
            vec![],
            vec![load_word(0)],
            vec![instruction(0x28, 0, 0, 0), answer(ALLOW)],
            vec![instruction(0x05, 0, 0, u32::MAX), answer(ALLOW)],
            vec![instruction(0xff, 0, 0, 0), answer(ALLOW)],
            vec![load_word(8), instruction(0x16, 0, 0, 0)],
        ] {
            assert!(forbidden(&[filter]).is_some());
        }
        // Each branch doubles the number of paths.
        let doubling = [load_word(8), if_equal(1, 0, 0)];
        let many: Vec<_> = (0..2000).flat_map(|_| doubling).chain([answer(ALLOW)]).collect();
        assert!(forbidden(&[many]).is_some());
    }

    #[test]
    fn calls_are_in_order_and_each_is_there_once() {
        let keys: Vec<_> = CALLS.iter().map(|call| (call.name, call.arguments)).collect();
        assert!(keys.is_sorted_by(|one, next| one.0 < next.0 || one.0 == next.0 && one.1 != next.1));
    }
}
