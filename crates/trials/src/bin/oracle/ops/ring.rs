//! Discards that a program requests through an `io_uring`: the kernel makes them without a system call of their own.

use super::{Done, Outcome, judge};
use crate::plot::Page;
use crate::sys::Way;
use crate::worker::Worker;
use io_uring::{IoUring, opcode};

pub struct Ring(IoUring);

impl Ring {
    /// `None` where the kernel offers no rings.
    pub fn new() -> Option<Self> {
        IoUring::new(4).ok().map(Self)
    }

    /// Requests an `madvise` from the kernel through the ring, and waits for the answer.
    fn advise(&mut self, start: usize, length: usize, advice: i32) -> Result<usize, i32> {
        let error = |e: std::io::Error| e.raw_os_error().unwrap_or(0);
        let entry = opcode::Madvise::new(start as *const _, length as libc::off_t, advice).build();
        // SAFETY: memory of the caller's own, to whose contents nobody has a plain reference.
        unsafe { self.0.submission().push(&entry) }.map_err(|_| libc::EBUSY)?;
        loop {
            match self.0.submit_and_wait(1) {
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(e) => return Err(error(e)),
                Ok(_) => {}
            }
            if let Some(done) = self.0.completion().next() {
                return if done.result() < 0 { Err(-done.result()) } else { Ok(done.result() as usize) };
            }
        }
    }
}

/// `MADV_DONTNEED` by `IORING_OP_MADVISE`.
pub fn dontneed(worker: &mut Worker<'_>, at: usize, way: Way) -> Outcome {
    let Some((from, pages)) = super::discard::discardable(worker, at) else { return Ok(Done::NotNow) };
    worker.note(at, "ring_dontneed", way, (from, pages), 0);
    let (start, length) = worker.plots[at].range(from, pages);
    let Some(ring) = &mut worker.ring else { return Ok(Done::Refused(libc::ENOSYS)) };
    let answer = ring.advise(start, length, libc::MADV_DONTNEED);
    let done = judge("IORING_OP_MADVISE", from, answer, 0, &[])?;
    worker.plots[at].part_mut(from, pages).iter_mut().for_each(Page::zero);
    worker.check(at, from, pages)?;
    Ok(done)
}
