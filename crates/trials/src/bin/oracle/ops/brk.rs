//! The program break. Only one thread moves it, and only if it is where the thread left it. The C library's allocator
//! moves the break for allocations of the main thread, which makes none meanwhile.

use super::{Done, Outcome};
use crate::content::{PAGE, Random};
use crate::plot::{Access, Kind, Plot};
use crate::sys::{self, Way};
use crate::verdict::Wrong;
use crate::worker::{Worker, bytes};

/// Initial size of the part of the heap that belongs to the plot, in pages.
const FIRST: usize = 8;

/// The program break as this program found it.
pub struct Break {
    found: usize,
}

/// The current break.
fn present() -> usize {
    // SAFETY: an address below the heap changes nothing.
    unsafe { sys::raw(libc::SYS_brk, [0; 6]) }.unwrap_or(0)
}

/// Moves the break.
fn set(way: Way, to: usize) -> bool {
    // SAFETY: the memory between the two places is the caller's.
    let answer = unsafe { sys::call(way, libc::SYS_brk, [to, 0, 0, 0, 0, 0]) };
    if way == Way::Libc { answer.is_ok() } else { answer == Ok(to) }
}

/// Keeps the allocator from moving the break by itself. Called by the main thread, before there are others.
pub fn keep_allocator_off() {
    for (option, value) in [(libc::M_TRIM_THRESHOLD, i32::MAX), (libc::M_TOP_PAD, 8 << 20)] {
        // SAFETY: two numbers.
        unsafe { libc::mallopt(option, value) };
    }
    // This allocation makes the heap grow once.
    drop(std::hint::black_box(vec![1_u8; 64 << 10]));
}

impl Break {
    /// Raises the break by some pages.
    pub fn new() -> Option<Self> {
        let found = present();
        set(Way::Libc, found.next_multiple_of(PAGE) + bytes(FIRST)).then_some(Self { found })
    }

    /// The model of these pages.
    pub fn plot(own: Option<&Self>, random: &mut Random) -> Option<Plot> {
        own.map(|own| Plot::fresh(Kind::Heap, own.found.next_multiple_of(PAGE), FIRST, random))
    }

    /// Puts the break back, so that the allocator finds it where it left it.
    pub fn give_back(self, plots: &[Plot]) {
        let heap = plots.iter().find(|plot| plot.kind == Kind::Heap);
        if heap.is_some_and(|heap| present() == heap.address(heap.len())) {
            set(Way::Libc, self.found);
        }
    }
}

/// Raises or lowers the break.
pub fn step(worker: &mut Worker<'_>, at: usize, way: Way) -> Outcome {
    let plot = &worker.plots[at];
    let old = plot.len();
    let pages = 1 + worker.random.below(worker.plan.most_pages);
    if plot.kind != Kind::Heap || present() != plot.address(old) {
        return Ok(Done::NotNow);
    }
    let to = plot.start + bytes(pages);
    worker.note(at, "brk", way, (0, old), pages);
    worker.check(at, 0, old)?;
    if !set(way, to) {
        // Lowering the break fails only if the kernel allows no more mappings.
        return Ok(Done::Refused(libc::ENOMEM));
    }
    if present() != to {
        return Err(Wrong::Answer { call: "brk", page: 0, expected: 0, found: libc::ENOMEM });
    }
    let plot = &mut worker.plots[at];
    plot.pages.truncate(pages);
    plot.extend(pages.saturating_sub(old), Access::Write, 0);
    worker.check(at, 0, pages)?;
    Ok(Done::Yes)
}
