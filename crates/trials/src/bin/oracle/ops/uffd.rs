//! A userfaultfd of the program itself, as VMMs use one for a migration. While a mapping is registered with it, a
//! thread of the program provides its missing pages.

use super::{Done, Outcome, judge, map};
use crate::content::{self, PAGE};
use crate::plot::{Access, Kind, Page, Plot};
use crate::sys::{self, Answer, Way};
use crate::verdict::Wrong;
use crate::worker::{UNLOCKS, Worker, bytes};
use std::sync::atomic::Ordering::SeqCst;

/// Numbers of userfaultfd's ioctls: `_IOWR(0xAA, 0x3F, struct uffdio_api)`, `_IOWR(0xAA, 0x00, struct
/// uffdio_register)`, `_IOR(0xAA, 0x01, struct uffdio_range)`, `_IOWR(0xAA, 0x03, struct uffdio_copy)`.
const UFFDIO_API: usize = 0xc018_aa3f;
const UFFDIO_REGISTER: usize = 0xc020_aa00;
const UFFDIO_UNREGISTER: usize = 0x8010_aa01;
const UFFDIO_COPY: usize = 0xc028_aa03;
const MISSING: u64 = 1;
const PAGEFAULT: u64 = 0x12;

/// Calls `ioctl` with a structure of 64-bit words.
fn call<const N: usize>(way: Way, fd: i32, request: usize, mut words: [u64; N]) -> Answer {
    let arguments = [fd as usize, request, words.as_mut_ptr() as usize, 0, 0, 0];
    // SAFETY: each request is made with as many words as its structure has; the kernel checks the addresses in it.
    unsafe { sys::call(way, libc::SYS_ioctl, arguments) }
}

/// Opens a userfaultfd and starts a thread that serves it. `None` if the kernel does not let this process open one.
pub fn open() -> Option<i32> {
    // SAFETY: takes flags and returns a descriptor.
    let fd = unsafe { sys::raw(libc::SYS_userfaultfd, [libc::O_CLOEXEC as usize, 0, 0, 0, 0, 0]) }.ok()? as i32;
    call(Way::Raw, fd, UFFDIO_API, [0xaa, 0, 0]).ok()?;
    std::thread::spawn(move || serve(fd));
    Some(fd)
}

/// The class of the content that a missing page at this address gets.
const fn class_at(address: usize) -> u8 {
    (address / PAGE % content::CLASSES) as u8
}

/// Provides each missing page, until the process ends.
fn serve(fd: i32) {
    let mut message = [0_u64; 4];
    loop {
        let arguments = [fd as usize, (&raw mut message) as usize, 32, 0, 0, 0];
        // SAFETY: as many bytes as there is room for.
        let read = unsafe { sys::raw(libc::SYS_read, arguments) };
        if read == Ok(32) && message[0] & 0xff == PAGEFAULT {
            let page = message[2] as usize / PAGE * PAGE;
            let from = content::address(class_at(page)) as u64;
            // The call fails if the page is there by then. The thread that touched it then goes on without it.
            let _ = call(Way::Raw, fd, UFFDIO_COPY, [page as u64, from, PAGE as u64, 0, 0]);
        }
    }
}

/// Registers a new mapping, touches some of it, discards and touches again, and unregisters it. The mapping becomes a
/// plot.
pub fn step(worker: &mut Worker<'_>, at: usize, way: Way) -> Outcome {
    let Some(fd) = worker.plan.userfaults else { return Ok(Done::NotNow) };
    if worker.plots[at].kind == Kind::Heap {
        return Ok(Done::NotNow);
    }
    let pages = 1 + worker.random.below(64.min(worker.plan.most_pages));
    let Ok(start) = map(way, 0, pages, Access::Write, 0) else { return Ok(Done::Refused(libc::ENOMEM)) };
    let mut plot = Plot::fresh(Kind::Mapping, start, pages, &mut worker.random);
    plot.unlocks = UNLOCKS.load(SeqCst);
    let old = std::mem::replace(&mut worker.plots[at], plot);
    // SAFETY: the plot that was there is this thread's own, and was given up.
    unsafe { sys::call(Way::Libc, libc::SYS_munmap, [old.start, bytes(old.len()), 0, 0, 0, 0]) }.ok();
    worker.note(at, "UFFDIO_REGISTER", way, (0, pages), 0);
    let range = [start as u64, bytes(pages) as u64];
    judge("UFFDIO_REGISTER", 0, call(way, fd, UFFDIO_REGISTER, [range[0], range[1], MISSING, 0]), 0, &[])?;
    let used = while_registered(worker, at, way);
    worker.note(at, "UFFDIO_UNREGISTER", way, (0, pages), 0);
    let answer = call(way, fd, UFFDIO_UNREGISTER, range);
    used?;
    judge("UFFDIO_UNREGISTER", 0, answer, 0, &[])?;
    // Once the mapping is unregistered, untouched pages are zeros.
    worker.plots[at].mark(0, &mut worker.random);
    worker.check(at, 0, pages)?;
    Ok(Done::Yes)
}

fn while_registered(worker: &mut Worker<'_>, at: usize, way: Way) -> Result<(), Wrong> {
    for _ in 0..4 {
        let (from, pages) = worker.part(at);
        for page in from..from + pages {
            let plot = &mut worker.plots[at];
            // The model has zeros for pages that were not touched.
            if plot.pages[page].is_untouched() {
                let class = class_at(plot.address(page));
                plot.pages[page].hold(class);
            }
        }
        worker.note(at, "touch", way, (from, pages), 0);
        worker.check(at, from, pages)?;
        let page = from + worker.random.below(pages);
        worker.plots[at].mark(page, &mut worker.random);
        let (from, pages) = (page, 1 + worker.random.below(worker.plots[at].len() - page));
        worker.note(at, "MADV_DONTNEED", way, (from, pages), 0);
        let answer = super::discard::madvise(worker, at, way, (from, pages), libc::MADV_DONTNEED);
        judge("MADV_DONTNEED", from, answer, 0, &[])?;
        worker.plots[at].part_mut(from, pages).iter_mut().for_each(Page::zero);
    }
    Ok(())
}
