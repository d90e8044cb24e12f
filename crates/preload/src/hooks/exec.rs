//! `execve` and similar functions: the program that a member executes becomes the member, because it is the same
//! process.
//!
//! ```text
//!   pagefold run --> sh wrapper --fork--> dirname        no variables, no agent: it is another process
//!                       |
//!                       exec: the variables are there again
//!                       v
//!                    python3 server.py                   the same pid and start time: the same member
//! ```
//!
//! The agent removes its variables from the environment when it starts, so that no child finds them. Here they are put
//! back, for the very process that was enrolled and for no other: a child has another pid, however it was made. The
//! variables only start an agent. The supervisor decides by pid and start time whether its process is a member.
//!
//! Nothing is added to an environment that already names a socket (`PAGEFOLD_SOCKET`). The new environment is built in
//! memory that is mapped for the call, because a signal handler may execute a program.

use super::is_member;
use crate::start;
use agent::follow;
use agent::raw::{self, Answer, c_answer};
use std::arch::naked_asm;
use std::ffi::{CStr, CString, c_char, c_int};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicIsize, Ordering};

/// Pointers to strings, with a null pointer at the end.
pub type Strings = *const *const c_char;
/// The type of `execvpe`.
pub type Search = unsafe extern "C" fn(*const c_char, Strings, Strings) -> c_int;

/// The settings by which the next program of this process becomes the same member.
struct Carried {
    process: Answer,
    /// The agent's variables, as `NAME=value`.
    variables: Vec<CString>,
    /// Path of the agent's library, for [`start::PRELOAD`].
    library: Vec<u8>,
}

static CARRIED: OnceLock<Carried> = OnceLock::new();
/// Whether the next program is to run without an agent.
static CARRIES_NONE: AtomicBool = AtomicBool::new(false);
/// Process (pid) that the agent serves.
static SERVED: AtomicIsize = AtomicIsize::new(0);

/// Notes that the agent serves this process. To be called before the process becomes a member.
pub fn serve() {
    SERVED.store(pid(), Ordering::Relaxed);
}

/// Sets the variables that the next program of this process gets. For the constructor.
pub fn carry(variables: Vec<CString>, library: &[u8]) {
    let _ = CARRIED.set(Carried { process: pid(), variables, library: library.to_vec() });
}

/// From here on, the next program of this process gets no agent.
pub fn carry_no_more() {
    CARRIES_NONE.store(true, Ordering::Relaxed);
}

/// Whether the caller belongs to the process that the agent serves, and is no child that shares its memory (`vfork`).
pub fn is_served() -> bool {
    SERVED.load(Ordering::Relaxed) == pid()
}

/// The C library's function that looks a program up in `PATH`. The constructor calls this first: later, a child or a
/// signal handler must not wait for the loader.
pub fn search() -> Option<Search> {
    static FOUND: OnceLock<Option<Search>> = OnceLock::new();
    *FOUND.get_or_init(|| {
        // SAFETY: looks a name up in the libraries that are loaded after this one.
        let found = unsafe { libc::dlsym(libc::RTLD_NEXT, c"execvpe".as_ptr()) };
        // SAFETY: this is the type of the C library's function of that name.
        (!found.is_null()).then(|| unsafe { std::mem::transmute::<*mut libc::c_void, Search>(found) })
    })
}

/// The id of the calling process, also in a child that shares the member's memory.
fn pid() -> Answer {
    // SAFETY: only returns a number.
    unsafe { raw::call(libc::SYS_getpid, [0; 6]) }
}

/// The variables for the caller's next program; `None` if the caller does not belong to the process that was enrolled.
fn carried() -> Option<&'static Carried> {
    CARRIED.get().filter(|carried| carried.process == pid() && !CARRIES_NONE.load(Ordering::Relaxed))
}

/// An environment for the next program: the caller's, or one with the agent's variables added.
struct Environment {
    pointers: Strings,
    /// Address and length of the memory that holds it; `None` if it is the caller's own.
    mapped: Option<(usize, usize)>,
}

impl Environment {
    /// # Safety
    /// `given` is null, or an environment as `execve` takes it.
    unsafe fn of(given: Strings) -> Self {
        let plain = Self { pointers: given, mapped: None };
        // Children that were just forked have to be handed to the keeper first, as at the end of the process.
        if is_member() && is_served() {
            follow::wait_for_keeper();
        }
        let Some(carried) = carried().filter(|_| !given.is_null()) else { return plain };
        // SAFETY: the caller's promise.
        let count = unsafe { length(given) };
        // SAFETY: so many pointers are there, to strings that live until the program is executed.
        let entries = unsafe { std::slice::from_raw_parts(given, count) };
        // SAFETY: as above.
        let text = |entry: &*const c_char| unsafe { CStr::from_ptr(*entry) }.to_bytes();
        if entries.iter().any(|entry| value(text(entry), start::SOCKET).is_some()) {
            return plain;
        }
        let theirs = entries.iter().find_map(|entry| value(text(entry), start::PRELOAD)).unwrap_or_default();
        let colon: &[u8] = if theirs.is_empty() { b"" } else { b":" };
        let preload = [start::PRELOAD.as_bytes(), b"=", &carried.library, colon, theirs, b"\0"];
        let pointers = (count + carried.variables.len() + 2) * size_of::<usize>();
        let size = pointers + preload.iter().map(|part| part.len()).sum::<usize>();
        let Some(mapped) = map(size) else { return plain };
        let mut at = mapped + pointers;
        for part in preload {
            // SAFETY: the mapping has room for all parts behind the pointers.
            unsafe { std::ptr::copy_nonoverlapping(part.as_ptr(), at as *mut u8, part.len()) };
            at += part.len();
        }
        let others = entries.iter().filter(|entry| value(text(entry), start::PRELOAD).is_none()).copied();
        let ours = carried.variables.iter().map(|variable| variable.as_ptr());
        let all = ours.chain([(mapped + pointers) as *const c_char]).chain(others);
        for (n, pointer) in all.enumerate() {
            let place = (mapped + n * size_of::<usize>()) as *mut *const c_char;
            // SAFETY: there is room for so many pointers, and for a null one, which the mapping begins as.
            unsafe { place.write(pointer) };
        }
        Self { pointers: mapped as Strings, mapped: Some((mapped, size)) }
    }
}

impl Drop for Environment {
    /// Frees the environment, if the program could not be executed.
    fn drop(&mut self) {
        if let Some((address, length)) = self.mapped {
            // SAFETY: this memory was mapped for the environment alone.
            unsafe { raw::call(libc::SYS_munmap, [address, length, 0, 0, 0, 0]) };
        }
    }
}

/// Number of pointers before the null pointer.
///
/// # Safety
/// There is a null pointer at the end.
unsafe fn length(strings: Strings) -> usize {
    let mut count = 0;
    let mut at = strings;
    // SAFETY: the caller's promise: no pointer before this one was null.
    while !unsafe { at.read() }.is_null() {
        count += 1;
        at = at.wrapping_add(1);
    }
    count
}

/// Maps zeroed memory for one call.
fn map(length: usize) -> Option<usize> {
    let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: maps new memory where nothing is.
    let at = unsafe { raw::call(libc::SYS_mmap, [0, length, access as usize, flags as usize, usize::MAX, 0]) };
    raw::error(at).is_none().then_some(at as usize)
}

/// The value of an environment entry; `None` if it is another variable.
fn value<'a>(entry: &'a [u8], name: &str) -> Option<&'a [u8]> {
    entry.strip_prefix(name.as_bytes())?.strip_prefix(b"=")
}

/// The environment of the process.
fn environ() -> Strings {
    unsafe extern "C" {
        static environ: Strings;
    }
    // SAFETY: the C library's variable, which programs change while no other thread reads it.
    unsafe { environ }
}

/// `execve`
///
/// # Safety
/// As the system call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn execve(path: *const c_char, arguments: Strings, environment: Strings) -> c_int {
    // SAFETY: the caller's promise.
    let environment = unsafe { Environment::of(environment) };
    let words = [path as usize, arguments as usize, environment.pointers as usize, 0, 0, 0];
    // SAFETY: the caller's arguments are passed on, with an environment that lives until the call returns.
    c_answer(unsafe { raw::call(libc::SYS_execve, words) }) as c_int
}

/// `execveat`
///
/// # Safety
/// As the system call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn execveat(
    dir: c_int,
    path: *const c_char,
    arguments: Strings,
    environment: Strings,
    flags: c_int,
) -> c_int {
    // SAFETY: the caller's promise.
    let environment = unsafe { Environment::of(environment) };
    let pointers = environment.pointers as usize;
    let words = [dir as usize, path as usize, arguments as usize, pointers, flags as usize, 0];
    // SAFETY: as in `execve`.
    c_answer(unsafe { raw::call(libc::SYS_execveat, words) }) as c_int
}

/// `fexecve`
///
/// # Safety
/// As the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fexecve(file: c_int, arguments: Strings, environment: Strings) -> c_int {
    // SAFETY: the caller's arguments are passed on unchanged.
    unsafe { execveat(file, c"".as_ptr(), arguments, environment, libc::AT_EMPTY_PATH) }
}

/// `execv`
///
/// # Safety
/// As the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn execv(path: *const c_char, arguments: Strings) -> c_int {
    // SAFETY: the caller's arguments are passed on unchanged.
    unsafe { execve(path, arguments, environ()) }
}

/// `execvpe`: the C library looks the program up.
///
/// # Safety
/// As the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn execvpe(file: *const c_char, arguments: Strings, environment: Strings) -> c_int {
    let Some(search) = search() else { return c_answer(super::refuse(libc::ENOSYS)) as c_int };
    // SAFETY: the caller's promise.
    let environment = unsafe { Environment::of(environment) };
    // SAFETY: the caller's arguments are passed on, with an environment that lives until the call returns.
    unsafe { search(file, arguments, environment.pointers) }
}

/// `execvp`
///
/// # Safety
/// As the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn execvp(file: *const c_char, arguments: Strings) -> c_int {
    // SAFETY: the caller's arguments are passed on unchanged.
    unsafe { execvpe(file, arguments, environ()) }
}

/// The body of a function that takes its arguments one by one: puts them in a row, and calls `with(first, row)`.
macro_rules! in_a_row {
    ($with:ident) => {
        naked_asm!(
            "pop rax",
            "push r9",
            "push r8",
            "push rcx",
            "push rdx",
            "push rsi",
            "mov rsi, rsp",
            "push rax",
            "call {with}",
            "pop rcx",
            "add rsp, 40",
            "push rcx",
            "ret",
            with = sym $with,
        )
    };
}

/// `execl`: the caller's stack goes on where the arguments in registers end, so that all arguments lie in a row.
///
/// # Safety
/// As the C library's function.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn execl() -> c_int {
    in_a_row!(execv)
}

/// `execlp`
///
/// # Safety
/// As the C library's function.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn execlp() -> c_int {
    in_a_row!(execvp)
}

/// `execle`
///
/// # Safety
/// As the C library's function.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn execle() -> c_int {
    in_a_row!(execve_after)
}

/// `execve` with an environment that follows the end of the arguments.
///
/// # Safety
/// As `execve`, with that environment.
unsafe extern "C" fn execve_after(path: *const c_char, arguments: Strings) -> c_int {
    // SAFETY: the caller's promise.
    let end = unsafe { length(arguments) };
    // SAFETY: as above; the environment is the argument after the null pointer.
    let environment = unsafe { arguments.add(end + 1) };
    // SAFETY: as above.
    let environment = unsafe { environment.read() };
    // SAFETY: as above.
    unsafe { execve(path, arguments, environment.cast()) }
}
