//! Leads the C library's own calls through the hooks.
//!
//! `malloc` and similar functions call `mmap` and `munmap` inside the C library, where these calls cannot be
//! interposed. So the first instruction of the library's functions is replaced by a jump to the hooks. The hooks make
//! the system call by themselves, so the overwritten code is not needed any more.
//!
//! The agent patches all functions or none. It does so once, before the program's own code runs and while there is one
//! thread. It writes through `/proc/self/mem`, which needs no change of the code's protection. So a host that forbids
//! writable code forbids this write, and nothing is half done.

use super::{advice, exit, heap, memory, remap};
use agent::raw;
use page::PAGE_BYTES;
use std::ffi::CStr;
use std::fmt;
use std::fs::File;
use std::os::unix::fs::FileExt;

/// Why the C library was not patched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The process has several threads already.
    Threads,
    /// The C library is not glibc, or lacks this function.
    Missing(&'static str),
    /// There is no room for a jump near this function.
    NoRoom(&'static str),
    /// The kernel does not allow code to be changed.
    Forbidden,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Threads => f.write_str("other threads were running before the program's own code"),
            Self::Missing(name) => {
                write!(f, "the C library has no {name} that could be followed (only glibc is known)")
            }
            Self::NoRoom(name) => write!(f, "there is no room for code near the C library's {name}"),
            Self::Forbidden => f.write_str("this kernel does not let a program change its code through /proc/self/mem"),
        }
    }
}

/// Instruction that marks the target of an indirect call. It stays where it is.
const ENDBR64: [u8; 4] = [0xF3, 0x0F, 0x1E, 0xFA];
/// Code of `jmp` to an address relative to the next instruction.
const JUMP: u8 = 0xE9;
/// Length of that jump, in bytes.
const JUMP_BYTES: usize = 5;

/// A function of the C library and the jump to be written into it.
struct Place {
    address: usize,
    jump: [u8; JUMP_BYTES],
}

/// Leads all calls inside the C library through the hooks.
///
/// # Errors
/// Why it was not done. Nothing is changed then.
pub fn patch() -> Result<(), Refusal> {
    if std::fs::read_dir("/proc/self/task").map_err(|_| Refusal::Threads)?.count() != 1 {
        return Err(Refusal::Threads);
    }
    patch_all()
}

/// As [`patch`], for callers that know that no thread is in any of these functions.
pub fn patch_all() -> Result<(), Refusal> {
    let functions: [(&CStr, &'static str, usize); 8] = [
        (c"brk", "brk", heap::brk as *const () as usize),
        (c"mmap", "mmap", memory::mmap as *const () as usize),
        (c"munmap", "munmap", memory::munmap as *const () as usize),
        (c"mprotect", "mprotect", memory::mprotect as *const () as usize),
        (c"pkey_mprotect", "pkey_mprotect", memory::pkey_mprotect as *const () as usize),
        (c"mremap", "mremap", remap::mremap as *const () as usize),
        (c"madvise", "madvise", advice::madvise as *const () as usize),
        (c"_exit", "_exit", exit::_exit as *const () as usize),
    ];
    // SAFETY: asks for a library that is loaded, and does not load it.
    let library = unsafe { libc::dlopen(c"libc.so.6".as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    if library.is_null() {
        return Err(Refusal::Missing("libc.so.6"));
    }
    // SAFETY: looks a name up in a loaded library.
    let find = |name: &CStr| unsafe { libc::dlsym(library, name.as_ptr()) };
    let noted_end = find(c"__curbrk");
    if noted_end.is_null() {
        return Err(Refusal::Missing("__curbrk"));
    }
    heap::note_end_at(noted_end.cast());
    let mut places = Vec::new();
    let mut trampolines = None;
    for (symbol, name, hook) in functions {
        let found = find(symbol) as usize;
        if found == 0 {
            return Err(Refusal::Missing(name));
        }
        let mut far = || {
            trampolines = trampolines.take().or_else(|| Trampolines::near(found));
            place(found, trampolines.as_mut()?.jump_to(hook))
        };
        places.push(place(found, hook).or_else(&mut far).ok_or(Refusal::NoRoom(name))?);
    }
    if trampolines.is_some_and(|trampolines| !trampolines.make_executable()) {
        return Err(Refusal::Forbidden);
    }
    write(&places)
}

/// A page of code near the C library, with jumps to hooks that are too far away for a relative jump.
struct Trampolines {
    page: usize,
    code: Vec<u8>,
}

impl Trampolines {
    /// Maps the page, below or above the library. The caller asks for hooks one after the other, and then calls
    /// [`Trampolines::make_executable`].
    fn near(function: usize) -> Option<Self> {
        /// Distance between two places that are tried, in bytes.
        const APART: usize = 1 << 20;
        let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE) as usize;
        let access = (libc::PROT_READ | libc::PROT_WRITE) as usize;
        let start = function / PAGE_BYTES * PAGE_BYTES;
        let page = (1..1500)
            .flat_map(|n| [start.checked_sub(n * APART), start.checked_add(n * APART)])
            .flatten()
            .find(|at| {
                // SAFETY: maps only where nothing is mapped. A kernel that does not know the flag wastes a page
                // elsewhere.
                let mapped = unsafe { raw::call(libc::SYS_mmap, [*at, PAGE_BYTES, access, flags, usize::MAX, 0]) };
                mapped as usize == *at
            })?;
        Some(Self { page, code: Vec::new() })
    }

    /// The address at which a jump to this hook will lie.
    fn jump_to(&mut self, hook: usize) -> usize {
        let at = self.page + self.code.len();
        // `jmp [rip]`, and the address to jump to.
        self.code.extend([0xFF, 0x25, 0, 0, 0, 0]);
        self.code.extend(hook.to_le_bytes());
        at
    }

    /// Writes the jumps and makes the page executable. Returns whether the kernel allows that.
    fn make_executable(self) -> bool {
        // SAFETY: the page is mapped, writable, larger than a few jumps, and nobody knows of it.
        unsafe { std::ptr::copy_nonoverlapping(self.code.as_ptr(), self.page as *mut u8, self.code.len()) };
        let access = (libc::PROT_READ | libc::PROT_EXEC) as usize;
        // SAFETY: as above.
        0 == unsafe { raw::call(libc::SYS_mprotect, [self.page, PAGE_BYTES, access, 0, 0, 0]) }
    }
}

/// The jump that is to be written into a function; `None` if the hook is too far away.
fn place(function: usize, hook: usize) -> Option<Place> {
    // SAFETY: a function of the C library has at least four bytes: a system call alone takes more.
    let beginning = unsafe { (function as *const [u8; 4]).read_unaligned() };
    let address = if beginning == ENDBR64 { function + ENDBR64.len() } else { function };
    let distance = (hook as i64).checked_sub((address + JUMP_BYTES) as i64)?;
    let [a, b, c, d] = i32::try_from(distance).ok()?.to_le_bytes();
    Some(Place { address, jump: [JUMP, a, b, c, d] })
}

/// Writes all jumps. If one cannot be written, undoes those before it.
fn write(places: &[Place]) -> Result<(), Refusal> {
    let memory = File::options().write(true).open("/proc/self/mem").map_err(|_| Refusal::Forbidden)?;
    let mut before = Vec::new();
    for place in places {
        // SAFETY: the function's first bytes, as above; copied, because they are about to change.
        before.push(unsafe { (place.address as *const [u8; JUMP_BYTES]).read_unaligned() });
        if memory.write_all_at(&place.jump, place.address as u64).is_err() {
            for (place, before) in places.iter().zip(before) {
                let _ = memory.write_all_at(&before, place.address as u64);
            }
            return Err(Refusal::Forbidden);
        }
    }
    Ok(())
}
