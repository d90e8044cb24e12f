//! Makes the C library's own calls go through the doors.
//!
//! `malloc` and its like call `mmap` and `munmap` inside the C library, where nothing can be put in front of them. So the
//! first instruction of the library's functions is replaced by a jump to the doors; since these make the system call by
//! themselves, nothing of what is overwritten is needed any more. It is done once, before the program's own code runs and
//! while there is one thread, all functions or none; written through `/proc/self/mem`, which needs no change of
//! protection of what is there, so that a host that forbids writable code forbids this and nothing is half done.

use super::{advice, exit, memory, remap};
use crate::raw;
use page::PAGE_BYTES;
use std::ffi::CStr;
use std::fmt;
use std::fs::File;
use std::os::unix::fs::FileExt;

/// Why it was not done.
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

/// The instruction that marks where an indirect call may arrive. It stays where it is.
const ENDBR64: [u8; 4] = [0xF3, 0x0F, 0x1E, 0xFA];
/// `jmp` to an address relative to the next instruction.
const JUMP: u8 = 0xE9;
const JUMP_BYTES: usize = 5;

/// A function of the C library and the jump to be written into it.
struct Place {
    address: usize,
    jump: [u8; JUMP_BYTES],
}

/// Lets all calls of the C library itself go through the doors.
///
/// # Errors
/// Then nothing is changed.
pub fn patch() -> Result<(), Refusal> {
    if std::fs::read_dir("/proc/self/task").map_err(|_| Refusal::Threads)?.count() != 1 {
        return Err(Refusal::Threads);
    }
    patch_all()
}

/// The same; for who knows that no thread is within any of the functions.
pub fn patch_all() -> Result<(), Refusal> {
    let functions: [(&CStr, &'static str, usize); 7] = [
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
    let mut places = Vec::new();
    let mut stones = None;
    for (symbol, name, door) in functions {
        // SAFETY: looks a name up in a loaded library.
        let found = unsafe { libc::dlsym(library, symbol.as_ptr()) } as usize;
        if found == 0 {
            return Err(Refusal::Missing(name));
        }
        let mut far = || {
            stones = stones.take().or_else(|| Stones::near(found));
            place(found, stones.as_mut()?.to(door))
        };
        places.push(place(found, door).or_else(&mut far).ok_or(Refusal::NoRoom(name))?);
    }
    if stones.is_some_and(|stones| !stones.set()) {
        return Err(Refusal::Forbidden);
    }
    write(&places)
}

/// A page of code near the library that jumps to doors far away.
struct Stones {
    page: usize,
    code: Vec<u8>,
}

impl Stones {
    /// Room below the library. Doors are asked for one after the other, then [`Stones::set`].
    fn near(function: usize) -> Option<Self> {
        const APART: usize = 1 << 20;
        let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE) as usize;
        let access = (libc::PROT_READ | libc::PROT_WRITE) as usize;
        let start = function / PAGE_BYTES * PAGE_BYTES;
        let page = (1..1500)
            .flat_map(|n| [start.checked_sub(n * APART), start.checked_add(n * APART)])
            .flatten()
            .find(|at| {
                // SAFETY: maps only where nothing is mapped. A kernel that does not know the flag wastes a page elsewhere.
                let mapped = unsafe { raw::call(libc::SYS_mmap, [*at, PAGE_BYTES, access, flags, usize::MAX, 0]) };
                mapped as usize == *at
            })?;
        Some(Self { page, code: Vec::new() })
    }

    /// Where a jump to this door will lie.
    fn to(&mut self, door: usize) -> usize {
        let at = self.page + self.code.len();
        // `jmp [rip]`, and where to.
        self.code.extend([0xFF, 0x25, 0, 0, 0, 0]);
        self.code.extend(door.to_le_bytes());
        at
    }

    /// Makes code of it.
    fn set(self) -> bool {
        // SAFETY: the page is mapped, writable, larger than a few jumps, and nobody knows of it.
        unsafe { std::ptr::copy_nonoverlapping(self.code.as_ptr(), self.page as *mut u8, self.code.len()) };
        let access = (libc::PROT_READ | libc::PROT_EXEC) as usize;
        // SAFETY: as above.
        0 == unsafe { raw::call(libc::SYS_mprotect, [self.page, PAGE_BYTES, access, 0, 0, 0]) }
    }
}

fn place(function: usize, door: usize) -> Option<Place> {
    // SAFETY: a function of the C library has at least as many bytes: a system call alone takes more.
    let beginning = unsafe { (function as *const [u8; 4]).read_unaligned() };
    let address = if beginning == ENDBR64 { function + ENDBR64.len() } else { function };
    let distance = (door as i64).checked_sub((address + JUMP_BYTES) as i64)?;
    let [a, b, c, d] = i32::try_from(distance).ok()?.to_le_bytes();
    Some(Place { address, jump: [JUMP, a, b, c, d] })
}

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
