//! The gate: code that passes a program's `mremap` to an agent that has no hooks. The kernel refuses to move or to
//! enlarge memory of which parts are folded, because it sees several mappings there. And a mapping of the pool must not
//! grow, or it would show more of the pool.
//!
//! ```text
//!   the program calls the C library's mremap
//!      v  a jump, which pagefold-attach has written there (`attach::gate`)
//!   code of the gate: blocks signals, takes the gate's lock, writes its arguments into the gate's second page, sleeps
//!      v                              \  not served, or refused: makes the call itself
//!   the gate's thread, one of the agent's: does what a hook would do (`remap`), writes the answer
//!      v
//!   code of the gate: lets the lock go and signals in, sets the C library's errno, returns
//! ```
//!
//! A request is asked, taken and answered. The gate's thread may stop serving whenever it has taken no request, even if
//! a thread holds the lock. A request that is asked at that moment is refused by the gate's thread, or taken back by
//! the thread that asked. It is never both served by the gate's thread and made by the asking one.
//!
//! The gate consists of two pages: code, and data that the kernel clears in forked children. So the gate of a child is
//! not served until the child has an agent, which takes the gate over. `mremap` concerns the address space and not the
//! calling thread, so another thread can make the call. The program's other threads need not be stopped: none of them
//! can use memory that is being moved.

use crate::enrol;
use agent::maps::Kind;
use agent::raw::{self, Answer, futex};
use agent::table::{self, Guard};
use agent::{follow, remap, spawn};
use page::{HostVirt, PAGE_BYTES, PageRange};
use rustix::io::Errno;
use std::arch::global_asm;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering};
use wire::attach::{GATE_MARK, GATE_MARK_AT, GATE_PAGES, GATE_WAYS_AT};

// The code of the gate, copied to the first page. It is entered with the arguments of `mremap` in their registers, and
// with the address of the C library's `__errno_location` in r11: see `wire::attach`. It refers to nothing but the page
// behind it.
//
// - [rsp]: the signals that were blocked before; [rsp + 8]: all signals; [rsp + 16] and on: the arguments.
// - rbp: the second page, a `Control`; rbx: `__errno_location`.
// - r12: the answer.
global_asm!(
    ".pushsection .rodata.pagefold_gate, \"a\"",
    ".balign 16",
    "pagefold_gate_begin:",
    "push rbp",
    "push rbx",
    "push r12",
    "sub rsp, 64",
    "mov [rsp + 16], rdi",
    "mov [rsp + 24], rsi",
    "mov [rsp + 32], rdx",
    "movsxd rcx, ecx",
    "mov [rsp + 40], rcx",
    "mov [rsp + 48], r8",
    "mov rbx, r11",
    "lea rbp, [rip + pagefold_gate_begin + {page}]",
    // Signals are blocked: a handler that leaves by a jump (`longjmp`) would keep the lock.
    "mov qword ptr [rsp + 8], -1",
    "mov edi, {set_mask}",
    "lea rsi, [rsp + 8]",
    "mov rdx, rsp",
    "mov r10d, 8",
    "mov eax, {sigprocmask}",
    "syscall",
    "cmp dword ptr [rbp + {serving}], 1",
    "jne 6f",
    // The lock: 0 free, 1 held, 2 held while others sleep.
    "xor eax, eax",
    "mov ecx, 1",
    "lock cmpxchg [rbp + {lock}], ecx",
    "je 3f",
    "2:",
    "mov eax, 2",
    "xchg [rbp + {lock}], eax",
    "test eax, eax",
    "je 3f",
    "lea rdi, [rbp + {lock}]",
    "mov esi, {wait}",
    "mov edx, 2",
    "xor r10d, r10d",
    "mov eax, {futex}",
    "syscall",
    "jmp 2b",
    "3:",
    "mov rax, [rsp + 16]",
    "mov [rbp + {arguments}], rax",
    "mov rax, [rsp + 24]",
    "mov [rbp + {arguments} + 8], rax",
    "mov rax, [rsp + 32]",
    "mov [rbp + {arguments} + 16], rax",
    "mov rax, [rsp + 40]",
    "mov [rbp + {arguments} + 24], rax",
    "mov rax, [rsp + 48]",
    "mov [rbp + {arguments} + 32], rax",
    // The exchange is in order with the look at `serving` below, as the thread's own two are.
    "mov eax, {asked}",
    "xchg [rbp + {request}], eax",
    "lock inc dword ptr [rbp + {bell}]",
    "lea rdi, [rbp + {bell}]",
    "mov esi, {wake}",
    "mov edx, 1",
    "mov eax, {futex}",
    "syscall",
    "4:",
    "mov edx, [rbp + {request}]",
    "cmp edx, {answered}",
    "je 7f",
    "cmp edx, {refused}",
    "je 5f",
    "cmp edx, {asked}",
    "jne 10f",
    "cmp dword ptr [rbp + {serving}], 1",
    "je 10f",
    // No thread serves the gate any more: takes the request back.
    "mov eax, {asked}",
    "mov ecx, {refused}",
    "lock cmpxchg [rbp + {request}], ecx",
    "jmp 4b",
    "10:",
    "lea rdi, [rbp + {request}]",
    "mov esi, {wait}",
    "xor r10d, r10d",
    "mov eax, {futex}",
    "syscall",
    "jmp 4b",
    "5:",
    "call 9f",
    "6:",
    "mov rdi, [rsp + 16]",
    "mov rsi, [rsp + 24]",
    "mov rdx, [rsp + 32]",
    "mov r10, [rsp + 40]",
    "mov r8, [rsp + 48]",
    "mov eax, {mremap}",
    "syscall",
    "mov r12, rax",
    "jmp 8f",
    // The request was answered.
    "7:",
    "mov r12, [rbp + {answer}]",
    "call 9f",
    "8:",
    "mov edi, {set_mask}",
    "mov rsi, rsp",
    "xor edx, edx",
    "mov r10d, 8",
    "mov eax, {sigprocmask}",
    "syscall",
    "mov rax, r12",
    "cmp rax, -4095",
    "jb 12f",
    "call rbx",
    "neg r12d",
    "mov [rax], r12d",
    "mov rax, -1",
    "12:",
    "add rsp, 64",
    "pop r12",
    "pop rbx",
    "pop rbp",
    "ret",
    // Releases the lock.
    "9:",
    "xor eax, eax",
    "xchg [rbp + {lock}], eax",
    "cmp eax, 2",
    "jne 11f",
    "lea rdi, [rbp + {lock}]",
    "mov esi, {wake}",
    "mov edx, 1",
    "mov eax, {futex}",
    "syscall",
    "11:",
    "ret",
    "pagefold_gate_end:",
    ".popsection",
    page = const PAGE_BYTES,
    serving = const std::mem::offset_of!(Control, serving),
    lock = const std::mem::offset_of!(Control, lock),
    bell = const std::mem::offset_of!(Control, bell),
    request = const std::mem::offset_of!(Control, request),
    arguments = const std::mem::offset_of!(Control, arguments),
    answer = const std::mem::offset_of!(Control, answer),
    set_mask = const libc::SIG_SETMASK,
    sigprocmask = const libc::SYS_rt_sigprocmask,
    futex = const libc::SYS_futex,
    mremap = const libc::SYS_mremap,
    wait = const WAIT,
    wake = const WAKE,
    asked = const ASKED,
    answered = const ANSWERED,
    refused = const REFUSED,
);

unsafe extern "C" {
    #[link_name = "pagefold_gate_begin"]
    static BEGIN: u8;
    #[link_name = "pagefold_gate_end"]
    static BEHIND: u8;
}

/// Operations of `futex` between threads of one address space.
const WAIT: i32 = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
const WAKE: i32 = libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG;

/// States of a request; 0 before the first one.
const ASKED: u32 = 1;
const TAKEN: u32 = 2;
const ANSWERED: u32 = 3;
const REFUSED: u32 = 4;

/// The second page of the gate. The program can write it, so what is read there is trusted no more than the arguments
/// of a system call.
#[repr(C)]
struct Control {
    /// 1 if a thread serves the gate.
    serving: AtomicU32,
    /// Held by the thread of the program that makes a request.
    lock: AtomicU32,
    /// A futex on which the gate's thread sleeps; changed to wake it.
    bell: AtomicU32,
    /// State of the request; a futex on which the asking thread sleeps.
    request: AtomicU32,
    arguments: [AtomicU64; 5],
    answer: AtomicI64,
}

const _: () = assert!(size_of::<Control>() <= PAGE_BYTES && GATE_WAYS_AT < GATE_MARK_AT);

/// A gate that is or was served.
struct Gate {
    range: PageRange,
    control: &'static Control,
}

static GATE: OnceLock<Gate> = OnceLock::new();
/// 0 while the gate is served, 1 when its thread is to end, 2 when it serves no more.
static END: AtomicU32 = AtomicU32::new(0);

/// Opens the gate, and serves it from here on. `inherited` is the address of the gate of a parent of this process,
/// which is used again. Returns the gate's pages.
///
/// # Errors
/// Memory or threads are short, or the host forbids memory to be made executable.
pub fn open(inherited: Option<HostVirt>) -> Result<PageRange, Errno> {
    let range = match inherited {
        Some(start) => PageRange { start, pages: GATE_PAGES },
        None => make()?,
    };
    let place = range.start.add_pages(1).0 as *const Control;
    // SAFETY: the page was mapped by this function, or found by the other side to be a gate's second page. It holds
    // zeros or numbers, which atomic types may be made of, and is unmapped only after this process has no agent any
    // more.
    let control = unsafe { &*place };
    let gate = GATE.get_or_init(|| Gate { range, control });
    let begun = spawn::thread(c"pagefold-gate", spawn::SMALL_STACK_BYTES, move || serve(gate.control));
    if begun.is_err() {
        END.store(2, Ordering::SeqCst);
    }
    begun?;
    control.serving.store(1, Ordering::SeqCst);
    Ok(range)
}

/// The gate's pages; `None` if there is no gate.
pub fn range() -> Option<PageRange> {
    GATE.get().map(|gate| gate.range)
}

/// Stops serving the gate. When this returns, no request is being served, and the program makes further calls itself.
pub fn close() {
    let Some(Gate { control, .. }) = GATE.get() else { return };
    if END.compare_exchange(0, 1, Ordering::SeqCst, Ordering::SeqCst).is_err() {
        return;
    }
    ring(control);
    while END.load(Ordering::SeqCst) == 1 {
        futex(&END, WAIT, 1);
    }
}

/// Wakes the gate's thread.
fn ring(control: &Control) {
    control.bell.fetch_add(1, Ordering::SeqCst);
    futex(&control.bell, WAKE, 1);
}

/// Maps the pages of a gate, and writes its code.
fn make() -> Result<PageRange, Errno> {
    let call = |number, arguments| {
        // SAFETY: the calls below map fresh memory, and change that.
        let answer = unsafe { raw::call(number, arguments) };
        raw::error(answer).map_or(Ok(answer as usize), |error| Err(Errno::from_raw_os_error(error)))
    };
    let bytes = GATE_PAGES as usize * PAGE_BYTES;
    let access = (libc::PROT_READ | libc::PROT_WRITE) as usize;
    let kind = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as usize;
    let start = call(libc::SYS_mmap, [0, bytes, access, kind, usize::MAX, 0])?;
    let furnish = || {
        // This advice also keeps the kernel from joining the gate with a mapping of the program's.
        call(libc::SYS_madvise, [start, bytes, libc::MADV_DONTDUMP as usize, 0, 0, 0])?;
        call(libc::SYS_madvise, [start + PAGE_BYTES, PAGE_BYTES, libc::MADV_WIPEONFORK as usize, 0, 0, 0])?;
        let (code, length) = (&raw const BEGIN, (&raw const BEHIND as usize) - (&raw const BEGIN as usize));
        assert!(length <= GATE_WAYS_AT, "the gate's code has room for its ways behind it");
        // SAFETY: the code lies between its labels, and the page was just mapped and is longer.
        unsafe { std::ptr::copy_nonoverlapping(code, start as *mut u8, length) };
        // SAFETY: as above.
        unsafe { ((start + GATE_MARK_AT) as *mut [u8; 16]).write(GATE_MARK) };
        let access = (libc::PROT_READ | libc::PROT_EXEC) as usize;
        call(libc::SYS_mprotect, [start, PAGE_BYTES, access, 0, 0, 0])
    };
    if let Err(e) = furnish() {
        let _ = call(libc::SYS_munmap, [start, bytes, 0, 0, 0, 0]);
        return Err(e);
    }
    Ok(PageRange { start: HostVirt(start as u64), pages: GATE_PAGES })
}

/// Serves requests until the gate is closed. Runs on the gate's thread.
fn serve(control: &Control) {
    let goes = |from, to| control.request.compare_exchange(from, to, Ordering::SeqCst, Ordering::SeqCst).is_ok();
    loop {
        let bell = control.bell.load(Ordering::SeqCst);
        if END.load(Ordering::SeqCst) == 1 {
            break;
        }
        if goes(ASKED, TAKEN) {
            let arguments = [0, 1, 2, 3, 4].map(|n| control.arguments[n].load(Ordering::SeqCst) as usize);
            control.answer.store(remapped(arguments) as i64, Ordering::SeqCst);
            control.request.store(ANSWERED, Ordering::SeqCst);
            futex(&control.request, WAKE, 1);
        } else {
            futex(&control.bell, WAIT, bell);
        }
    }
    control.serving.store(0, Ordering::SeqCst);
    if goes(ASKED, REFUSED) {
        futex(&control.request, WAKE, 1);
    }
    END.store(2, Ordering::SeqCst);
    futex(&END, WAKE, 1);
}

fn remapped(arguments: [usize; 5]) -> Answer {
    let [a, b, c, d, e] = arguments;
    // SAFETY: the program has asked for this call, with these arguments.
    let pass = || unsafe { raw::call(libc::SYS_mremap, [a, b, c, d, e, 0]) };
    remap::serve(arguments, |old| Some(agreed(old)), pass)
}

/// The table, locked, after it was made to agree with the kernel's list in this range.
fn agreed(range: PageRange) -> Guard {
    let mut table = table::lock();
    if let (Some(following), Some((_, traits))) = (follow::current(), table.known(range).first().copied())
        && !following.shows(range, traits, Kind::Either)
    {
        enrol::agree(&mut table, following, range);
    }
    table
}
