//! `syscall`: system calls that a program makes by number go through the same hooks as calls by name.
//!
//! All other numbers are passed to the kernel as the C library does it, from registers to registers, without using the
//! stack: some calls make a child that goes on with the caller's stack (`vfork`, `clone`), and must find no frame of
//! the agent's there.

use super::{advice, exec, exit, filter, heap, memory, policy, remap};
use agent::raw::{Answer, c_answer};
use std::arch::naked_asm;
use std::ffi::c_long;

/// The body of [`syscall`]: numbers that are listed go to [`ours`], all others to the kernel.
macro_rules! hook_numbers {
    ($($name:ident = $number:path,)+) => {
        naked_asm!(
            $(concat!("cmp rdi, {", stringify!($name), "}"), "je 2f",)+
            "mov rax, rdi",
            "mov rdi, rsi",
            "mov rsi, rdx",
            "mov rdx, rcx",
            "mov r10, r8",
            "mov r8, r9",
            "mov r9, [rsp + 8]",
            "syscall",
            "cmp rax, -4095",
            "jae 3f",
            "ret",
            "2: jmp {ours}",
            "3: mov rdi, rax",
            "jmp {failed}",
            $($name = const $number,)+
            ours = sym ours,
            failed = sym failed,
        )
    };
}

/// `syscall`
///
/// # Safety
/// As the system call.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn syscall(number: c_long) -> c_long {
    hook_numbers! {
        brk = libc::SYS_brk,
        mmap = libc::SYS_mmap,
        mprotect = libc::SYS_mprotect,
        munmap = libc::SYS_munmap,
        mremap = libc::SYS_mremap,
        madvise = libc::SYS_madvise,
        mlock = libc::SYS_mlock,
        munlock = libc::SYS_munlock,
        mlockall = libc::SYS_mlockall,
        munlockall = libc::SYS_munlockall,
        mlock2 = libc::SYS_mlock2,
        pkey_mprotect = libc::SYS_pkey_mprotect,
        mbind = libc::SYS_mbind,
        set_home_node = policy::SYS_SET_HOME_NODE,
        exit_group = libc::SYS_exit_group,
        execve = libc::SYS_execve,
        execveat = libc::SYS_execveat,
        prctl = libc::SYS_prctl,
        seccomp = libc::SYS_seccomp,
    }
}

/// # Safety
/// As the system call of this number, which has a hook.
unsafe extern "C" fn ours(number: c_long, a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> c_long {
    let address = a as *mut _;
    // SAFETY: the caller's arguments are passed on unchanged, with the caller's promises.
    #[expect(clippy::multiple_unsafe_ops_per_block, reason = "one of them is made")]
    let answer = unsafe {
        match number {
            libc::SYS_brk => return heap::set_end(a) as c_long,
            libc::SYS_mmap => return memory::mmap(address, b, c as i32, d as i32, e as i32, f as i64) as c_long,
            libc::SYS_mremap => return remap::mremap(address, b, c, d as i32, e as *mut _) as c_long,
            libc::SYS_mbind | policy::SYS_SET_HOME_NODE => {
                return c_answer(policy::bind(number, [a, b, c, d, e, f])) as c_long;
            }
            libc::SYS_prctl => return c_answer(filter::control([a, b, c, d, e, f])) as c_long,
            libc::SYS_seccomp => return c_answer(filter::set([a, b, c, d, e, f])) as c_long,
            libc::SYS_munmap => memory::munmap(address, b),
            libc::SYS_mprotect => memory::mprotect(address, b, c as i32),
            libc::SYS_pkey_mprotect => memory::pkey_mprotect(address, b, c as i32, d as i32),
            libc::SYS_madvise => advice::madvise(address, b, c as i32),
            libc::SYS_mlock => memory::mlock(address, b),
            libc::SYS_mlock2 => memory::mlock2(address, b, c as u32),
            libc::SYS_munlock => memory::munlock(address, b),
            libc::SYS_mlockall => memory::mlockall(a as i32),
            libc::SYS_munlockall => memory::munlockall(),
            libc::SYS_execve => exec::execve(a as *const _, b as *const _, c as *const _),
            libc::SYS_execveat => exec::execveat(a as i32, b as *const _, c as *const _, d as *const _, e as i32),
            _ => exit::_exit(a as i32),
        }
    };
    answer.into()
}

extern "C" fn failed(answer: Answer) -> c_long {
    c_answer(answer) as c_long
}
