//! Makes `mremap` of a program's C library jump to the agent's gate (`attached::gate`), and undoes that. The gate is
//! code of the agent's that has the agent move or resize folded memory: the kernel itself refuses that.
//!
//! ```text
//!   the program's threads stand still, and none is within the bytes that change
//!      v
//!   mremap: first instruction
//!           jmp ------> way in the gate's page: the opposite of the first instruction
//!                                               mov r11, address of __errno_location
//!                                               jmp to the gate's code
//!                                               the bytes that the first jump has replaced, and a hash of their page
//! ```
//!
//! The first instruction stays, if it is known how to undo it ([`undone`]). There a tracer sets its breakpoints (`perf
//! probe`, uprobes): the kernel executes the instruction elsewhere, and goes on behind it. A breakpoint within the jump
//! would make another jump of it, or none. So the jump is as short as the distance allows: 5 bytes up to 2 GiB,
//! otherwise 14.
//!
//! The way holds all that is needed to undo the change. So another program than the one that made it can do that, also
//! in a forked child.

use crate::c_library::{self, Function};
use crate::ending::Order;
use crate::memory::Memory;
use crate::threads;
use anyhow::{Context, ensure};
use host::{AuxiliaryVector, LocalFiles, Mapping, Pagemap};
use linux_raw_sys::auxvec::AT_BASE;
use page::{HostVirt, PAGE_BYTES, PageRange};
use rustix::process::Pid;
use std::fs::{self, File};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};
use std::{iter, slice};
use wire::attach::{GATE_MARK, GATE_MARK_AT, GATE_PAGES, GATE_WAY_BYTES, GATE_WAYS, GATE_WAYS_AT};

/// The function that is led to the gate, and the one that returns the address of `errno`.
const NAMES: [&str; 2] = ["mremap", "__errno_location"];
/// Machine code of first instructions that are known, with the code that undoes each: `endbr64`; `push rbp`, and `pop
/// rbp`; `sub rsp, BYTES`, and `lea rsp, [rsp + BYTES]`.
const MARKS: [u8; 4] = [0xf3, 0x0f, 0x1e, 0xfa];
const PUSHES: [u8; 2] = [0x55, 0x5d];
const SUBTRACTS: [u8; 3] = [0x48, 0x83, 0xec];
const ADDS: [u8; 4] = [0x48, 0x8d, 0x64, 0x24];
/// Length of the longest code that undoes a first instruction, in bytes.
const UNDO_BYTES: usize = 5;
/// Most bytes of the jump that may differ from what was written, for the jump still to be taken for ours: 2. A
/// breakpoint changes one byte.
const MOST_BREAKPOINTS: usize = 2;
/// `jmp [rip]`: the address to jump to stands behind it.
const JUMP: [u8; 6] = [0xff, 0x25, 0, 0, 0, 0];
/// Length of [`JUMP`] with the address behind it, in bytes.
const JUMP_BYTES: usize = 14;
/// First bytes of `mov r11, NUMBER` and of `jmp DISTANCE`.
const TO_R11: [u8; 2] = [0x49, 0xbb];
const TO_CODE: u8 = 0xe9;
/// Length of `jmp DISTANCE`, in bytes.
const NEAR_BYTES: usize = 5;
/// Offsets in a way: of the replaced bytes, the hash of their pages, and their address.
const REPLACED_AT: usize = 24;
const HASH_AT: usize = 40;
const FUNCTION_AT: usize = 48;
/// Longest wait for a program's C library to be loaded, and the pause between two looks: 1 s, 10 ms.
const LOADING: (Duration, Duration) = (Duration::from_secs(1), Duration::from_millis(10));
/// Most bytes of a thread's stack that are searched for return addresses in code that is to change: 8 MiB.
const STACK_BYTES: u64 = 8 << 20;

/// A way to the gate: the piece of code to which one changed function jumps, and what is needed to undo the jump.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Way {
    /// Address of the way.
    at: u64,
    replaced: [u8; JUMP_BYTES],
    /// Hash of the pages that hold the replaced bytes, before the change.
    hash: u64,
    /// Address of the replaced bytes.
    function: u64,
}

impl Way {
    /// Reads the way at an address; `None` if that place in the gate is not used yet.
    fn read(memory: &File, at: u64) -> Option<Self> {
        let mut bytes = [0; GATE_WAY_BYTES];
        memory.read_exact_at(&mut bytes, at).ok()?;
        let number = |at: usize| bytes[at..].first_chunk().map_or(0, |eight| u64::from_ne_bytes(*eight));
        let replaced = *bytes[REPLACED_AT..].first_chunk()?;
        let way = Self { at, replaced, hash: number(HASH_AT), function: number(FUNCTION_AT) };
        (way.function != 0).then_some(way)
    }

    /// The machine code and data of the way, for a gate at address `gate`.
    fn encode(&self, gate: u64, Leadable { errno, undo, .. }: &Leadable) -> [u8; GATE_WAY_BYTES] {
        let mut bytes = [0; GATE_WAY_BYTES];
        let (undo, to_r11) = (&undo.0[..undo.1], undo.1);
        let code = to_r11 + TO_R11.len() + size_of::<u64>();
        // The way and the gate's code lie in one page.
        let distance = gate.wrapping_sub(self.at + code as u64 + 5) as u32;
        let parts: [(usize, &[u8]); 8] = [
            (0, undo),
            (to_r11, &TO_R11),
            (to_r11 + TO_R11.len(), &errno.to_ne_bytes()),
            (code, &[TO_CODE]),
            (code + 1, &distance.to_ne_bytes()),
            (REPLACED_AT, &self.replaced),
            (HASH_AT, &self.hash.to_ne_bytes()),
            (FUNCTION_AT, &self.function.to_ne_bytes()),
        ];
        for (at, part) in parts {
            bytes[at..at + part.len()].copy_from_slice(part);
        }
        bytes
    }

    /// The bytes that lead from the function to the way. Bytes behind a short jump are unchanged.
    fn jump(&self) -> [u8; JUMP_BYTES] {
        let mut bytes = self.replaced;
        let distance = self.at.wrapping_sub(self.function + NEAR_BYTES as u64).cast_signed();
        if let Ok(distance) = i32::try_from(distance) {
            bytes[0] = TO_CODE;
            bytes[1..NEAR_BYTES].copy_from_slice(&distance.to_ne_bytes());
        } else {
            bytes[..JUMP.len()].copy_from_slice(&JUMP);
            bytes[JUMP.len()..].copy_from_slice(&self.at.to_ne_bytes());
        }
        bytes
    }

    /// The bytes to write to undo the jump, given the bytes that are `there` now: each byte of the jump becomes the
    /// former one again. Bytes that differ from the jump's are breakpoints, and stay. `None`: the code no longer leads
    /// to the gate.
    fn undone(&self, there: &[u8; JUMP_BYTES]) -> Option<[u8; JUMP_BYTES]> {
        let (mut bytes, jump) = (*there, self.jump());
        let is_ours = |at: &usize| there[*at] == jump[*at];
        (0..JUMP_BYTES).filter(is_ours).for_each(|at| bytes[at] = self.replaced[at]);
        let others = (0..JUMP_BYTES).filter(|at| !is_ours(at)).count();
        (others <= MOST_BREAKPOINTS && bytes != *there).then_some(bytes)
    }

    /// Addresses of the jump's bytes, but for the first: a thread that is about to execute the first byte may find it
    /// changed.
    const fn inner(&self) -> Range<u64> {
        self.function + 1..self.function + JUMP_BYTES as u64
    }

    /// The pages that hold the jump's bytes.
    fn pages(&self) -> PageRange {
        let (first, last) =
            (self.function / PAGE_BYTES as u64, (self.function + JUMP_BYTES as u64 - 1) / PAGE_BYTES as u64);
        PageRange { start: HostVirt(first * PAGE_BYTES as u64), pages: last - first + 1 }
    }
}

/// The addresses at which a gate's ways lie, used or not.
fn places(gate: u64) -> impl Iterator<Item = u64> {
    (0..GATE_WAYS).map(move |n| gate + (GATE_WAYS_AT + n * GATE_WAY_BYTES) as u64)
}

fn is_gate(memory: &File, place: u64) -> bool {
    let mut mark = [0; GATE_MARK.len()];
    let at = place.checked_add(GATE_MARK_AT as u64);
    at.is_some_and(|at| memory.read_exact_at(&mut mark, at).is_ok()) && mark == GATE_MARK
}

/// An `mremap` in a C library of the process, which can be changed so that it jumps to a gate.
#[derive(Clone, Copy, Debug)]
pub struct Leadable {
    /// The function, without its first instruction if that stays.
    function: Function,
    /// Address of `__errno_location`.
    errno: u64,
    /// The first bytes of the function.
    begin: [u8; JUMP_BYTES],
    undo: Undo,
}

/// Code that undoes a function's first instruction, and the length of this code in bytes.
type Undo = ([u8; UNDO_BYTES], usize);

/// Length in bytes of a function's first instruction, and the code that undoes it. The length is 0 for an instruction
/// that is not known.
fn undone(begin: &[u8; JUMP_BYTES]) -> (usize, Undo) {
    let mut code = [0; UNDO_BYTES];
    match begin {
        [first, ..] if *first == PUSHES[0] => {
            code[0] = PUSHES[1];
            (1, (code, 1))
        }
        // The operand is a signed byte; only positive operands are undone.
        [one, two, three, bytes @ 1..0x80, ..] if [*one, *two, *three] == SUBTRACTS => {
            code[..ADDS.len()].copy_from_slice(&ADDS);
            code[ADDS.len()] = *bytes;
            (SUBTRACTS.len() + 1, (code, UNDO_BYTES))
        }
        _ if begin.starts_with(&MARKS) => (MARKS.len(), (code, 0)),
        _ => (0, (code, 0)),
    }
}

/// The functions of a process (`mremap`, one in each C library) that can be led to a gate. The threads may run
/// meanwhile.
pub fn leadable(pid: u32) -> Vec<Leadable> {
    let Ok(memory) = Memory::open(pid) else { return Vec::new() };
    let found = c_library::find(&memory, NAMES);
    let with_begin = |[function, errno]: [Function; 2]| {
        let mut begin = [0; JUMP_BYTES];
        memory.read(function.start, &mut begin)?;
        let (first, undo) = undone(&begin);
        let function =
            Function { start: function.start + first as u64, bytes: function.bytes.saturating_sub(first as u64) };
        memory.read(function.start, &mut begin)?;
        Some(Leadable { function, errno: errno.start, begin, undo })
    };
    found.into_iter().filter_map(with_begin).collect()
}

/// The name of a C library whose file may keep readers waiting, if the functions' addresses are not found without
/// reading it.
pub fn library_out_of_reach(pid: u32) -> Option<String> {
    c_library::out_of_reach(&Memory::open(pid).ok()?, NAMES)
}

/// Waits until a program that is being loaded has its C library: a second at most. A program without a dynamic loader
/// is linked statically, and is not waited for.
pub fn wait_for_library(pid: u32) {
    let until = Instant::now() + LOADING.0;
    while has_loader(pid) && leadable(pid).is_empty() && Instant::now() < until {
        std::thread::sleep(LOADING.1);
    }
}

/// Whether the kernel has loaded a dynamic loader (ELF interpreter) beside the program, which loads the program's
/// libraries.
fn has_loader(pid: u32) -> bool {
    let base = AuxiliaryVector::of(pid).ok().and_then(|vector| vector.value(AT_BASE));
    base.is_some_and(|base| base != 0)
}

/// The gate that a process has inherited from its attached parent by fork.
pub fn inherited(pid: u32) -> Option<HostVirt> {
    let memory = File::open(host::proc_file(pid, "mem")).ok()?;
    leadable(pid).iter().find_map(|led| gate_of(&memory, led.function.start, &led.begin)).map(HostVirt)
}

/// The gate to which these bytes jump if they are the code at address `at`; `None` if they do not jump to a gate.
fn gate_of(memory: &File, at: u64, bytes: &[u8; JUMP_BYTES]) -> Option<u64> {
    let way = match bytes {
        [first, a, b, c, d, ..] if *first == TO_CODE => {
            let distance = i64::from(i32::from_ne_bytes([*a, *b, *c, *d]));
            at.wrapping_add(NEAR_BYTES as u64).wrapping_add_signed(distance)
        }
        _ => u64::from_ne_bytes(*bytes.strip_prefix(&JUMP)?.first_chunk()?),
    };
    Some(way / PAGE_BYTES as u64 * PAGE_BYTES as u64).filter(|gate| is_gate(memory, *gate))
}

/// Leads these functions to the gate, unless they lead there already. The threads stand still, but for the agent's
/// `own`. Returns whether nothing is left to be done; false if a thread is within the code that is to change.
///
/// # Errors
/// There is no gate, or the kernel does not let code be changed.
pub fn lead(pid: u32, own: &[u64], gate: HostVirt, found: &[Leadable]) -> anyhow::Result<bool> {
    let memory = File::options().read(true).write(true).open(host::proc_file(pid, "mem"))?;
    ensure!(is_gate(&memory, gate.0), "there is no gate");
    let mut free = places(gate.0).filter(|at| Way::read(&memory, *at).is_none());
    let mut is_all = true;
    for leadable @ Leadable { function, begin, .. } in found {
        let mut replaced = [0; JUMP_BYTES];
        memory.read_exact_at(&mut replaced, function.start)?;
        // The function leads to a gate already, or somebody has put other code there. Or the process has executed
        // another program since the functions were found.
        let is_led = replaced.starts_with(&JUMP) || gate_of(&memory, function.start, &replaced).is_some();
        if is_led || replaced != *begin || function.bytes < JUMP_BYTES as u64 {
            continue;
        }
        let Some(at) = free.next() else { break };
        let way = Way { at, replaced, hash: 0, function: function.start };
        if is_entered(pid, own, &memory, slice::from_ref(&way.inner())) {
            is_all = false;
            continue;
        }
        if !are_the_files(pid, way.pages()) {
            continue;
        }
        let way = Way { hash: hash(&memory, way.pages())?, ..way };
        memory.write_all_at(&way.encode(gate.0, leadable), at)?;
        memory.write_all_at(&way.jump(), function.start).context("code cannot be changed")?;
    }
    Ok(is_all)
}

/// Undoes what [`lead`] has changed. The threads stand still, but for the agent's `own`. Returns system calls that are
/// to be made in the process, so that it maps the file's own pages again in place of its changed copies. `None`:
/// nothing was changed, as a thread is in the gate or in a jump to it.
///
/// # Errors
/// The process has ended.
pub fn lead_back(pid: u32, own: &[u64], memory: &File, gate: PageRange) -> anyhow::Result<Option<Vec<Order>>> {
    let ways: Vec<Way> = places(gate.start.0).filter_map(|at| Way::read(memory, at)).collect();
    let places: Vec<_> = ways.iter().map(Way::inner).chain(iter::once(gate.start.0..gate.end().0)).collect();
    if is_entered(pid, own, memory, &places) {
        return Ok(None);
    }
    let mut orders = Vec::new();
    for way in &ways {
        let mut there = [0; JUMP_BYTES];
        // Otherwise the library is unmapped by now, or a former `pagefold-attach` has led the function back.
        if memory.read_exact_at(&mut there, way.function).is_ok()
            && let Some(bytes) = way.undone(&there)
        {
            memory.write_all_at(&bytes, way.function)?;
        }
        if hash(memory, way.pages()).is_ok_and(|hash| hash == way.hash) && are_of_a_file(pid, way.pages()) {
            // Nobody else has changed these pages, so their private copies are dropped. On locked memory, the call does
            // nothing.
            let (start, bytes) = (way.pages().start.0, page::pages_to_bytes(way.pages().pages));
            orders.push((libc::SYS_madvise, [start, bytes, libc::MADV_DONTNEED as u64, 0, 0, 0]));
        }
    }
    Ok(Some(orders))
}

/// The first of these ranges that is a gate.
pub fn among(memory: &File, ranges: &[PageRange]) -> Option<PageRange> {
    let is_it = |range: &&PageRange| range.pages == GATE_PAGES && is_gate(memory, range.start.0);
    ranges.iter().find(is_it).copied()
}

/// Whether these pages lie in one mapping of a file.
fn are_of_a_file(pid: u32, pages: PageRange) -> bool {
    let maps = |mapping: &Mapping| mapping.inode != 0 && mapping.start <= pages.start && pages.end() <= mapping.end;
    Mapping::list(pid).is_ok_and(|mappings| mappings.iter().any(maps))
}

/// Whether these pages are present, and all of them the page cache's: not one is a private copy that was changed.
fn are_the_files(pid: u32, pages: PageRange) -> bool {
    let mut entries = Vec::new();
    Pagemap::open(pid).is_ok_and(|map| map.read(pages.start, pages.pages, &mut entries).is_ok())
        && entries.len() as u64 == pages.pages
        && entries.iter().all(|entry| entry.present() && entry.file_or_shared())
}

/// A hash (FNV-1a) of the content of pages.
fn hash(memory: &File, pages: PageRange) -> anyhow::Result<u64> {
    let mut bytes = vec![0; usize::try_from(page::pages_to_bytes(pages.pages))?];
    memory.read_exact_at(&mut bytes, pages.start.0)?;
    let add = |all: u64, byte: &u8| (all ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    Ok(bytes.iter().fold(0xcbf2_9ce4_8422_2325, add))
}

/// Whether a thread is at one of these addresses, or will return there. A signal handler may have interrupted the code
/// there, so each thread's whole stack is searched. The program's threads stand still.
fn is_entered(pid: u32, own: &[u64], memory: &File, places: &[Range<u64>]) -> bool {
    let (Ok(mappings), local) = (Mapping::list(pid), LocalFiles::of(pid)) else { return true };
    let is_there = |address: u64| places.iter().any(|place| place.contains(&address));
    let is_own = |thread: &Pid| own.contains(&thread.as_raw_nonzero().get().cast_unsigned().into());
    threads::list(pid).unwrap_or_default().into_iter().filter(|thread| !is_own(thread)).any(|thread| {
        if !threads::runs_program(pid, thread) {
            return false;
        }
        let text = fs::read_to_string(threads::of(pid, thread, "syscall")).unwrap_or_default();
        let mut words = text.split_ascii_whitespace().rev();
        let mut next = || u64::from_str_radix(words.next()?.strip_prefix("0x")?, 16).ok();
        // The last two are the instruction's address and the stack pointer; a thread that runs has none.
        let (Some(instruction), Some(stack)) = (next(), next()) else { return true };
        // A stack whose pages were folded may be several mappings, so neighbouring mappings are searched, too. They end
        // at the inaccessible page between two stacks. Another thread's stack must not be searched: old addresses lie
        // below its stack pointer.
        let mut end = stack;
        for mapping in mappings.iter().filter(|mapping| mapping.end.0 > stack) {
            if mapping.start.0 > end || !(mapping.read && mapping.write) {
                break;
            }
            if !local.hold(mapping) {
                return true;
            }
            end = mapping.end.0;
        }
        let end = end.min(stack.saturating_add(STACK_BYTES));
        is_there(instruction) || words_of(memory, stack / 8 * 8..end).any(is_there)
    })
}

/// The 64-bit words in a range of memory, as far as it can be read.
fn words_of(memory: &File, range: Range<u64>) -> impl Iterator<Item = u64> {
    const PIECE: u64 = 64 << 10;
    let pieces = (range.start..range.end).step_by(PIECE as usize);
    pieces.flat_map(move |at| {
        let mut bytes = vec![0; PIECE.min(range.end - at) as usize];
        let read = memory.read_at(&mut bytes, at).unwrap_or(0);
        bytes.truncate(read);
        let words = bytes.as_chunks::<8>().0.to_vec();
        words.into_iter().map(u64::from_ne_bytes)
    })
}

#[cfg(test)]
#[path = "gate_tests.rs"]
mod tests;
