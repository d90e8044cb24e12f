//! System calls by the processor's instruction, without the C library in between. They leave `errno` alone, cannot be
//! interposed, and take no lock.

use std::arch::asm;

/// The kernel's answer: a value, or a negated error number (-4095 to -1).
pub type Answer = isize;

/// Makes a system call.
///
/// # Safety
/// As for that system call: memory that it reads, writes or maps must be the caller's to use so.
#[inline]
pub unsafe fn call(number: libc::c_long, a: [usize; 6]) -> Answer {
    let answer: isize;
    // SAFETY: this is the kernel's calling convention on x86-64. The kernel keeps all registers but rax, rcx and r11,
    // and uses no stack of the caller. A forked child goes on here with a copy of the stack. The caller promises that
    // the system call itself is sound.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") number as isize => answer,
            in("rdi") a[0],
            in("rsi") a[1],
            in("rdx") a[2],
            in("r10") a[3],
            in("r8") a[4],
            in("r9") a[5],
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack)
        );
    }
    answer
}

/// The error number of an answer; `None` if the call succeeded.
pub const fn error(answer: Answer) -> Option<i32> {
    if answer < 0 && answer >= -4095 { Some(-(answer as i32)) } else { None }
}
