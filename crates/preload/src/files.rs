//! The hooks through which the program gets files. A file that was opened, received or changed is judged before the
//! program can use it.
//!
//! These functions may be cancellation points (`pthread_cancel`), so the hooks call the C library's own functions and
//! not the kernel. Judging a file takes a few short system calls, and none in a process that is no member. None of them
//! asks the file's file system, which may never answer, so that the program would wait for it.

use crate::hooks::is_member;
use agent::raw::{c_answer, call};
use agent::references::{Sticky, in_hook, judge, look, stick};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};

/// A function of the libraries that are loaded after this one, looked up when it is first called.
struct Real {
    name: &'static CStr,
    address: AtomicUsize,
}

impl Real {
    const fn new(name: &'static CStr) -> Self {
        Self { name, address: AtomicUsize::new(0) }
    }

    fn find(&self) -> usize {
        let known = self.address.load(Ordering::Relaxed);
        if known != 0 {
            return known;
        }
        // SAFETY: looks a name up among the libraries behind this one.
        let found = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) } as usize;
        self.address.store(found, Ordering::Relaxed);
        found
    }
}

/// Answers that a function is not there, as the kernel does for an unknown system call.
fn missing() -> c_int {
    c_answer(-(libc::ENOSYS as isize)) as c_int
}

/// Judges a file that the program is about to be given, or has changed. `errno` stays as it is.
fn given(file: c_int) -> c_int {
    if file >= 0
        && is_member()
        && let Some((facts, mount)) = look::opened(file)
    {
        in_hook(facts, mount);
    }
    file
}

/// Defines a hook with the C name and the arguments of the function that it stands before. `after` gets the result of
/// that function, and returns the result of the hook.
macro_rules! hooks {
    ($($name:ident($($argument:ident: $type:ty),*) -> $result:ty, $after:expr;)+) => {$(
        #[doc = concat!("`", stringify!($name), "`")]
        ///
        /// # Safety
        /// As the C library's.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> $result {
            static REAL: Real = Real::new(match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                Ok(name) => name,
                Err(_) => c"",
            });
            type Function = unsafe extern "C" fn($($type),*) -> $result;
            // SAFETY: null is `None`. Anything else is the C library's function of that name, which takes these
            // arguments. A variadic argument (`...`)
            // is passed in the same register as a named one.
            let real = unsafe { std::mem::transmute::<usize, Option<Function>>(REAL.find()) };
            let Some(real) = real else { return missing() as $result };
            // SAFETY: the caller's arguments are passed on unchanged, with the caller's promises.
            let result = unsafe { real($($argument),*) };
            #[allow(clippy::redundant_closure_call, reason = "an expression that sees the arguments")]
            ($after)(result)
        }
    )+};
}

hooks! {
    open(path: *const c_char, flags: c_int, mode: c_uint) -> c_int, given;
    open64(path: *const c_char, flags: c_int, mode: c_uint) -> c_int, given;
    openat(at: c_int, path: *const c_char, flags: c_int, mode: c_uint) -> c_int, given;
    openat64(at: c_int, path: *const c_char, flags: c_int, mode: c_uint) -> c_int, given;
    __open_2(path: *const c_char, flags: c_int) -> c_int, given;
    __open64_2(path: *const c_char, flags: c_int) -> c_int, given;
    __openat_2(at: c_int, path: *const c_char, flags: c_int) -> c_int, given;
    __openat64_2(at: c_int, path: *const c_char, flags: c_int) -> c_int, given;
    open_by_handle_at(mount: c_int, handle: *mut c_void, flags: c_int) -> c_int, given;
    dup(file: c_int) -> c_int, given;
    dup2(file: c_int, number: c_int) -> c_int, given;
    dup3(file: c_int, number: c_int, flags: c_int) -> c_int, given;
    fcntl(file: c_int, command: c_int, argument: usize) -> c_int, |result| changed(file, command, result);
    fcntl64(file: c_int, command: c_int, argument: usize) -> c_int, |result| changed(file, command, result);
    recvmsg(socket: c_int, message: *mut libc::msghdr, flags: c_int) -> isize, |result| received(message, result);
    recvmmsg(socket: c_int, messages: *mut libc::mmsghdr, most: c_uint, flags: c_int, wait: *mut libc::timespec) -> c_int,
        |result| received_many(messages, result);
    socket(family: c_int, kind: c_int, protocol: c_int) -> c_int, |result| connected(family, result);
    setsockopt(socket: c_int, level: c_int, option: c_int, value: *const c_void, length: libc::socklen_t) -> c_int,
        |result| handled(level, option, result);
}

/// `vmsplice`
///
/// # Safety
/// As the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmsplice(pipe: c_int, parts: *const libc::iovec, count: usize, flags: c_uint) -> isize {
    // From here on a pipe may hold pages by plain references, for ever.
    if is_member() {
        stick(Sticky::Spliced, 0);
    }
    let arguments = [pipe as usize, parts as usize, count, flags as usize, 0, 0];
    // SAFETY: the caller's arguments are passed on unchanged, with the caller's promises.
    c_answer(unsafe { call(libc::SYS_vmsplice, arguments) })
}

/// Judges a file to which `fcntl(F_SETFL)` may have added `O_DIRECT`, or which has got another descriptor number: a
/// survey that is under way may have passed that number already.
fn changed(file: c_int, command: c_int, result: c_int) -> c_int {
    match command {
        libc::F_SETFL if result >= 0 => given(file),
        libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => given(result),
        _ => result,
    };
    result
}

/// Notes a socket of a family that is not known to copy what it receives.
fn connected(family: c_int, socket: c_int) -> c_int {
    if socket >= 0 && is_member() && !judge::is_known_family(family) {
        stick(Sticky::Socket, family as u32);
    }
    socket
}

/// Notes a socket whose contents the kernel will decrypt.
fn handled(level: c_int, option: c_int, result: c_int) -> c_int {
    if result == 0 && level == libc::IPPROTO_TCP && option == libc::TCP_ULP && is_member() {
        stick(Sticky::Tls, 0);
    }
    result
}

/// Judges files that came with a message (`SCM_RIGHTS`).
fn received(message: *const libc::msghdr, result: isize) -> isize {
    if result >= 0 && is_member() {
        // SAFETY: the kernel has just filled the header that the program gave, and the program waits for the hook's
        // answer.
        let mut control = unsafe { libc::CMSG_FIRSTHDR(message) };
        while !control.is_null() {
            files_in(control);
            // SAFETY: as above; the kernel's own lengths lead from one part to the next.
            control = unsafe { libc::CMSG_NXTHDR(message, control) };
        }
    }
    result
}

fn files_in(control: *const libc::cmsghdr) {
    // SAFETY: this is a part of a message that the kernel has filled.
    let header = unsafe { control.read_unaligned() };
    if header.cmsg_level != libc::SOL_SOCKET || header.cmsg_type != libc::SCM_RIGHTS {
        return;
    }
    // SAFETY: the result points behind the header, within the part.
    let data = unsafe { libc::CMSG_DATA(control) }.cast::<c_int>();
    let head = data as usize - control as usize;
    for at in 0..header.cmsg_len.saturating_sub(head) / size_of::<c_int>() {
        // SAFETY: the part is as long as its header says, and holds descriptors.
        let place = unsafe { data.add(at) };
        // SAFETY: as above.
        given(unsafe { place.read_unaligned() });
    }
}

fn received_many(messages: *const libc::mmsghdr, result: c_int) -> c_int {
    for at in 0..usize::try_from(result).unwrap_or(0) {
        // SAFETY: the kernel has filled `result` headers of the program's array.
        let message = unsafe { messages.add(at) };
        // SAFETY: as above.
        received(unsafe { &raw const (*message).msg_hdr }, 0);
    }
    result
}

#[cfg(test)]
mod tests;
