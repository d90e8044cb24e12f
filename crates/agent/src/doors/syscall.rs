//! `syscall`: what a program asks for by number goes through the same doors as what it asks for by name.
//!
//! Everything else is made as the C library makes it: in one go from registers to registers, since the caller may be a child on
//! the same stack, which must not find a frame of ours on it.

use super::{advice, exit, memory, remap};
use crate::raw::{Answer, c_answer};
use std::arch::naked_asm;
use std::ffi::c_long;

/// `syscall`
///
/// # Safety
/// As the system call.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn syscall(number: c_long) -> c_long {
    naked_asm!(
        "cmp rdi, {mmap}",
        "je 2f",
        "cmp rdi, {mprotect}",
        "je 2f",
        "cmp rdi, {munmap}",
        "je 2f",
        "cmp rdi, {mremap}",
        "je 2f",
        "cmp rdi, {madvise}",
        "je 2f",
        "cmp rdi, {mlock}",
        "je 2f",
        "cmp rdi, {munlock}",
        "je 2f",
        "cmp rdi, {mlockall}",
        "je 2f",
        "cmp rdi, {munlockall}",
        "je 2f",
        "cmp rdi, {mlock2}",
        "je 2f",
        "cmp rdi, {pkey_mprotect}",
        "je 2f",
        "cmp rdi, {exit_group}",
        "je 2f",
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
        mmap = const libc::SYS_mmap,
        mprotect = const libc::SYS_mprotect,
        munmap = const libc::SYS_munmap,
        mremap = const libc::SYS_mremap,
        madvise = const libc::SYS_madvise,
        mlock = const libc::SYS_mlock,
        munlock = const libc::SYS_munlock,
        mlockall = const libc::SYS_mlockall,
        munlockall = const libc::SYS_munlockall,
        mlock2 = const libc::SYS_mlock2,
        pkey_mprotect = const libc::SYS_pkey_mprotect,
        exit_group = const libc::SYS_exit_group,
        ours = sym ours,
        failed = sym failed,
    )
}

/// # Safety
/// As the system call of this number, which has a door.
unsafe extern "C" fn ours(number: c_long, a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> c_long {
    let address = a as *mut _;
    // SAFETY: passed on as it came.
    #[expect(clippy::multiple_unsafe_ops_per_block, reason = "one of them is made")]
    let answer = unsafe {
        match number {
            libc::SYS_mmap => return memory::mmap(address, b, c as i32, d as i32, e as i32, f as i64) as c_long,
            libc::SYS_mremap => return remap::mremap(address, b, c, d as i32, e as *mut _) as c_long,
            libc::SYS_munmap => memory::munmap(address, b),
            libc::SYS_mprotect => memory::mprotect(address, b, c as i32),
            libc::SYS_pkey_mprotect => memory::pkey_mprotect(address, b, c as i32, d as i32),
            libc::SYS_madvise => advice::madvise(address, b, c as i32),
            libc::SYS_mlock => memory::mlock(address, b),
            libc::SYS_mlock2 => memory::mlock2(address, b, c as u32),
            libc::SYS_munlock => memory::munlock(address, b),
            libc::SYS_mlockall => memory::mlockall(a as i32),
            libc::SYS_munlockall => memory::munlockall(),
            _ => exit::_exit(a as i32),
        }
    };
    answer.into()
}

extern "C" fn failed(answer: Answer) -> c_long {
    c_answer(answer) as c_long
}
