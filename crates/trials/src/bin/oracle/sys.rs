//! System calls made in three ways: by the C library's function for the call, by its function `syscall`, and by the
//! processor's instruction. All three must have the same effect on memory.

use std::arch::asm;
use std::ffi::{c_int, c_long, c_void};

/// The way a system call is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// The C library's function for the call.
    Libc,
    /// The C library's `syscall`.
    Function,
    /// The processor's instruction.
    Raw,
}

impl Way {
    pub const ALL: [Self; 3] = [Self::Libc, Self::Function, Self::Raw];

    pub const fn name(self) -> &'static str {
        ["libc", "function", "raw"][self as usize]
    }
}

/// The kernel's answer: a value or an error number.
pub type Answer = Result<usize, i32>;

/// Makes a system call.
///
/// # Safety
/// As for that system call: the caller must be free to change all that it changes.
pub unsafe fn call(way: Way, number: c_long, a: [usize; 6]) -> Answer {
    match way {
        // SAFETY: the caller's promise.
        Way::Libc => from_libc(unsafe { by_libc(number, a) }),
        // SAFETY: the caller's promise.
        Way::Function => from_libc(unsafe { libc::syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]) } as isize),
        Way::Raw => {
            // SAFETY: the caller's promise.
            let answer = unsafe { act::raw::call(number, a) };
            act::raw::error(answer).map_or(Ok(answer as usize), Err)
        }
    }
}

/// Makes a system call by the instruction.
///
/// # Safety
/// As `call`.
pub unsafe fn raw(number: c_long, a: [usize; 6]) -> Answer {
    // SAFETY: the caller's promise.
    unsafe { call(Way::Raw, number, a) }
}

fn from_libc(answer: isize) -> Answer {
    if answer == -1 { Err(errno()) } else { Ok(answer as usize) }
}

fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

/// Calls the C library's function for a system call, if it has one.
///
/// # Safety
/// As `call`.
unsafe fn by_libc(number: c_long, a: [usize; 6]) -> isize {
    let (at, flag) = (a[0] as *mut c_void, |n: usize| a[n] as c_int);
    match number {
        // SAFETY: the caller's promise.
        libc::SYS_mmap => unsafe { libc::mmap(at, a[1], flag(2), flag(3), flag(4), a[5] as i64) as isize },
        // SAFETY: the caller's promise.
        libc::SYS_munmap => (unsafe { libc::munmap(at, a[1]) }) as isize,
        // SAFETY: the caller's promise.
        libc::SYS_mremap => (unsafe { libc::mremap(at, a[1], a[2], flag(3), a[4] as *mut c_void) }) as isize,
        // SAFETY: the caller's promise.
        libc::SYS_mprotect => (unsafe { libc::mprotect(at, a[1], flag(2)) }) as isize,
        // SAFETY: the caller's promise.
        libc::SYS_madvise => (unsafe { libc::madvise(at, a[1], flag(2)) }) as isize,
        // SAFETY: the caller's promise.
        libc::SYS_mlock => (unsafe { libc::mlock(at, a[1]) }) as isize,
        // SAFETY: the caller's promise.
        libc::SYS_mlock2 => (unsafe { libc::mlock2(at, a[1], a[2] as u32) }) as isize,
        // SAFETY: the caller's promise.
        libc::SYS_munlock => (unsafe { libc::munlock(at, a[1]) }) as isize,
        // SAFETY: the caller's promise.
        libc::SYS_mlockall => (unsafe { libc::mlockall(flag(0)) }) as isize,
        // SAFETY: the caller's promise.
        libc::SYS_munlockall => (unsafe { libc::munlockall() }) as isize,
        // SAFETY: the caller's promise.
        libc::SYS_brk => (unsafe { libc::brk(at) }) as isize,
        // SAFETY: the caller's promise.
        libc::SYS_fork => (unsafe { libc::fork() }) as isize,
        // SAFETY: the caller's promise.
        libc::SYS_ioctl => (unsafe { libc::ioctl(flag(0), a[1] as libc::Ioctl, a[2]) }) as isize,
        // SAFETY: the caller's promise.
        _ => (unsafe { libc::syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]) }) as isize,
    }
}

/// Executes a program in a child made by `vfork`, by instructions alone: the child uses no stack.
///
/// # Safety
/// The arguments are a path, and lists of words, as `execve` takes them.
pub unsafe fn vfork_exec(path: *const libc::c_char, argv: *const *const libc::c_char) -> Answer {
    let child: isize;
    let environment: [*const libc::c_char; 1] = [std::ptr::null()];
    // SAFETY: the child changes nothing of its parent's memory, which it shares: it executes the program or ends. The
    // parent goes on when it has.
    unsafe {
        asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "mov eax, 59",
            "syscall",
            "mov edi, 127",
            "mov eax, 231",
            "syscall",
            "2:",
            inlateout("rax") libc::SYS_vfork as isize => child,
            inlateout("rdi") path => _,
            in("rsi") argv,
            in("rdx") environment.as_ptr(),
            lateout("rcx") _,
            lateout("r11") _,
        );
    }
    if child < 0 { Err(-child as i32) } else { Ok(child as usize) }
}

/// Process id by a direct system call, and not as the C library remembers it.
pub fn own_pid() -> usize {
    // SAFETY: takes nothing and returns a number.
    unsafe { raw(libc::SYS_getpid, [0; 6]) }.unwrap_or(0)
}

/// The id of the calling thread.
pub fn own_tid() -> usize {
    // SAFETY: takes nothing and returns a number.
    unsafe { raw(libc::SYS_gettid, [0; 6]) }.unwrap_or(0)
}

/// Ends the whole process at once; no more of its code runs.
pub fn exit_now(code: usize) -> ! {
    loop {
        // SAFETY: takes a number and does not return.
        let _ = unsafe { raw(libc::SYS_exit_group, [code, 0, 0, 0, 0, 0]) };
    }
}

/// Sleeps without the C library, which a forked child may not use.
pub fn rest(time: std::time::Duration) {
    let time = libc::timespec { tv_sec: time.as_secs() as i64, tv_nsec: i64::from(time.subsec_nanos()) };
    // SAFETY: reads one structure that lives; signals may end it early, which does no harm.
    let _ = unsafe { raw(libc::SYS_nanosleep, [&raw const time as usize, 0, 0, 0, 0, 0]) };
}

/// Opens a file by a direct system call; -1 if it cannot be opened.
pub fn open(path: &std::ffi::CStr, flags: c_int) -> i32 {
    let arguments = [libc::AT_FDCWD as usize, path.as_ptr() as usize, (flags | libc::O_CLOEXEC) as usize, 0, 0, 0];
    // SAFETY: a path that lives, and flags.
    unsafe { raw(libc::SYS_openat, arguments) }.map_or(-1, |fd| fd as i32)
}
