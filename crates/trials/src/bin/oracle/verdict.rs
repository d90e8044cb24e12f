//! Kinds of faults, and how a process ends that finds one.

use crate::history::History;
use crate::sys;
use std::fmt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};

/// A fault: a result that would be different without folding.
#[derive(Clone, Copy, Debug)]
pub enum Wrong {
    /// A word of a page differs from the model.
    Byte { page: usize, offset: usize, expected: u64, found: u64 },
    /// The kernel was to answer with this error, or 0, and answered otherwise.
    Answer { call: &'static str, page: usize, expected: i32, found: i32 },
    /// A page allows an access that it must not allow, or the other way round.
    Access { page: usize, by: &'static str, expected: &'static str, found: i32 },
    /// A child ended in another way than it reported.
    Child { pid: i32, status: i32 },
    /// A child does not end.
    Hangs { pid: i32 },
}

impl Wrong {
    /// The page that the fault is about.
    pub const fn page(&self) -> usize {
        match *self {
            Self::Byte { page, .. } | Self::Answer { page, .. } | Self::Access { page, .. } => page,
            Self::Child { .. } | Self::Hangs { .. } => 0,
        }
    }
}

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Byte { page, offset, expected, found } => {
                write!(f, "MISMATCH: page {page}, offset {offset}: expected {expected:#x}, found {found:#x}")
            }
            Self::Answer { call, page, expected, found } => {
                write!(f, "MISMATCH: page {page}, {call}: expected error {expected}, found error {found}")
            }
            Self::Access { page, by, expected, found } => {
                write!(f, "MISMATCH: page {page} is to be {expected}, and {by} answers error {found}")
            }
            Self::Child { pid, status } => write!(f, "MISMATCH: the child {pid} ended with status {status:#x}"),
            Self::Hangs { pid } => write!(f, "HANGS: the child {pid} does not end"),
        }
    }
}

/// A plot, as the report of a fault describes it.
pub struct Scene<'a> {
    pub start: usize,
    pub pages: usize,
    pub history: &'a History,
    /// The pages of the plot that differ from the model, if they could be read.
    pub differing: String,
}

/// When this run started, and its seed.
static RUN: OnceLock<(Instant, u64)> = OnceLock::new();

/// Records start and seed of the run. Called once.
pub fn init(seed: u64) {
    let _ = RUN.set((Instant::now(), seed));
}

/// Ends the process with a report of the fault in this plot.
pub fn lost(who: &str, wrong: &Wrong, scene: &Scene<'_>) -> ! {
    let Scene { start, pages, history, ref differing } = *scene;
    let at = start + wrong.page() * crate::content::PAGE;
    fail(&format!(
        "{who}: {wrong}\nplot of {pages} pages at {start:#x}, page at {at:#x}\nlast operations on it:\n{history}\
         pages that differ:\n{differing}mappings there:\n{}",
        mappings_near(at)
    ))
}

/// Ends the process with exit code 1, whichever thread calls first.
pub fn fail(text: &str) -> ! {
    end(1, text)
}

/// Ends the process with exit code 3, because a thread hangs.
pub fn hangs(text: &str) -> ! {
    end(3, text)
}

fn end(code: usize, text: &str) -> ! {
    static ENDS: AtomicBool = AtomicBool::new(false);
    if ENDS.swap(true, SeqCst) {
        // Another thread reports its fault, and ends this thread with the process.
        sys::rest(Duration::from_secs(10));
    }
    let (seconds, seed) = RUN.get().map_or((0.0, 0), |(began, seed)| (began.elapsed().as_secs_f64(), *seed));
    say(&format!("oracle {}: {text}\nseed {seed}, after {seconds:.3} s\n", sys::own_pid()));
    sys::exit_now(code)
}

/// Writes to standard error without the lock of the standard library's handle.
pub fn say(text: &str) {
    let mut rest = text.as_bytes();
    while !rest.is_empty() {
        let arguments = [2, rest.as_ptr() as usize, rest.len(), 0, 0, 0];
        // SAFETY: as many bytes as there are.
        match unsafe { sys::raw(libc::SYS_write, arguments) } {
            Ok(written) if written > 0 => rest = &rest[written..],
            _ => return,
        }
    }
}

/// Standard error, for text that is formatted without allocating.
pub struct Unbuffered;

impl fmt::Write for Unbuffered {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        say(text);
        Ok(())
    }
}

/// Writes the kernel's list of mappings to standard error, without allocating: all of it, or the mapping of an address and
/// its neighbours.
pub fn say_mappings(around: Option<usize>) {
    let file = sys::open(c"/proc/self/maps", libc::O_RDONLY);
    let (mut text, mut filled) = ([0_u8; 4096], 0);
    loop {
        let room = &mut text[filled..];
        // SAFETY: as many bytes as there is room for.
        let read =
            unsafe { sys::raw(libc::SYS_read, [file as usize, room.as_mut_ptr() as usize, room.len(), 0, 0, 0]) };
        let Ok(bytes @ 1..) = read else { return };
        filled += bytes;
        let whole = text[..filled].iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        let lines = std::str::from_utf8(&text[..whole]).unwrap_or_default().split_inclusive('\n');
        lines.filter(|line| around.is_none_or(|address| is_near(line, address, crate::content::PAGE))).for_each(say);
        text.copy_within(whole..filled, 0);
        filled -= whole;
    }
}

/// Whether a line of the kernel's list of mappings is of memory at most `around` bytes away from an address.
fn is_near(line: &str, address: usize, around: usize) -> bool {
    let bounds = line.split(' ').next().and_then(|range| range.split_once('-'));
    let number = |text| usize::from_str_radix(text, 16).unwrap_or(0);
    bounds.is_some_and(|(start, end)| number(start) < address + around && number(end) + around > address)
}

/// The lines of the kernel's list of mappings around an address.
fn mappings_near(address: usize) -> String {
    const AROUND: usize = 1 << 16;
    let all = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    all.lines()
        .filter(|line| is_near(line, address, AROUND))
        .take(24)
        .fold(String::new(), |text, line| text + "  " + line + "\n")
}
