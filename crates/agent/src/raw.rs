//! System calls without the C library in between: they leave `errno` alone, cannot be interposed, and take no lock.

pub use act::raw::{Answer, call, error};
use std::arch::asm;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

/// Makes `mmap` over the memory that lies at this address (`MAP_FIXED`).
///
/// Kernels before Linux 6.12 unmap that memory before they allocate the new mapping. If that fails, nothing is mapped
/// there, and the call is made again until it succeeds, as by `act::move_mapping_over`.
///
/// # Safety
/// The caller may replace the memory there.
pub unsafe fn map_over(arguments: [usize; 6]) -> Answer {
    let is_mapped = || {
        let mut is_resident = 0_u8;
        let asked = [arguments[0], page::PAGE_BYTES, &raw mut is_resident as usize, 0, 0, 0];
        // SAFETY: the kernel writes one byte for the page, and touches nothing of it.
        error(unsafe { call(libc::SYS_mincore, asked) }).is_none()
    };
    loop {
        // SAFETY: by the caller.
        let mapped = unsafe { call(libc::SYS_mmap, arguments) };
        if error(mapped) != Some(libc::ENOMEM) || is_mapped() {
            return mapped;
        }
        std::thread::sleep(act::AGAIN);
    }
}

/// Calls `futex` on a word of the agent's, without time-out.
pub fn futex(word: &AtomicU32, operation: i32, value: u32) -> Answer {
    let arguments = [word.as_ptr() as usize, operation as usize, value as usize, 0, 0, 0];
    // SAFETY: waiting and waking read no memory but the word, which is borrowed until the call returns.
    unsafe { call(libc::SYS_futex, arguments) }
}

/// Waits while a word of this process has this value. `false` if the time `most` has passed.
pub fn futex_wait(word: &AtomicU32, value: u32, most: Option<Duration>) -> bool {
    let most = most.map(|most| [most.as_secs(), most.subsec_nanos().into()]);
    let until = most.as_ref().map_or(0, |most| most.as_ptr() as usize);
    let operation = (libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG) as usize;
    // SAFETY: reads the word, which is borrowed, and two words of this frame in the form of `struct timespec`.
    let answer = unsafe { call(libc::SYS_futex, [word.as_ptr() as usize, operation, value as usize, until, 0, 0]) };
    error(answer) != Some(libc::ETIMEDOUT)
}

/// Sets the calling thread's signal mask and returns the old one.
pub fn set_signal_mask(mask: u64) -> u64 {
    let mut old = 0_u64;
    let arguments = [libc::SIG_SETMASK as usize, &raw const mask as usize, &raw mut old as usize, 8, 0, 0];
    // SAFETY: both pointers are to eight bytes of this frame, which is what the kernel's signal set takes on x86-64.
    unsafe { call(libc::SYS_rt_sigprocmask, arguments) };
    old
}

/// An address on the calling thread's stack.
pub fn stack() -> usize {
    let pointer: usize;
    // SAFETY: reads a register.
    unsafe { asm!("mov {}, rsp", out(reg) pointer, options(nomem, nostack, preserves_flags)) };
    pointer
}

/// The answer as a function of the C library returns it: the value, or -1 with the error in `errno`.
pub fn c_answer(answer: Answer) -> Answer {
    let Some(number) = error(answer) else { return answer };
    // SAFETY: returns the address of the calling thread's own `errno`, which exists from the thread's first instruction
    // on.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: as above, and only this thread uses it.
    unsafe { *errno = number };
    -1
}
