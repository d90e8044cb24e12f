//! Reads by io_uring.

use crate::owners::ok;
use crate::tally::fail;
use io_uring::{IoUring, opcode, types::Fd};
use std::os::fd::RawFd;

/// A ring for reads.
pub struct Ring(IoUring);

impl Ring {
    pub fn new(depth: u32) -> Self {
        Self(ok("io_uring_setup", IoUring::new(depth)))
    }

    /// Registers a buffer, which pins its pages.
    pub fn register(&self, address: usize, bytes: usize) {
        let buffer = libc::iovec { iov_base: address as *mut _, iov_len: bytes };
        // SAFETY: a part of an area that lives as long as the ring; the bytes that the kernel writes there are read by
        // atomics.
        ok("register a buffer", unsafe { self.0.submitter().register_buffers(&[buffer]) });
    }

    pub fn unregister(&self) {
        ok("unregister a buffer", self.0.submitter().unregister_buffers());
    }

    /// Adds a read with a number to tell it by.
    pub fn push(&mut self, fd: RawFd, address: usize, bytes: usize, offset: u64, number: usize, fixed: bool) {
        let (to, len) = (address as *mut u8, bytes as u32);
        let entry = if fixed {
            opcode::ReadFixed::new(Fd(fd), to, len, 0).offset(offset).build()
        } else {
            opcode::Read::new(Fd(fd), to, len).offset(offset).build()
        };
        // SAFETY: file and memory stay until the read has been collected, which happens before the caller does
        // anything else.
        let pushed = unsafe { self.0.submission().push(&entry.user_data(number as u64)) };
        if pushed.is_err() {
            fail("the ring is full");
        }
    }

    pub fn submit(&self) {
        ok("io_uring_enter", self.0.submit());
    }

    /// Waits for `reads` reads, each of which must have read `bytes` bytes.
    pub fn collect(&mut self, reads: usize, bytes: usize) {
        let mut left = reads;
        while left > 0 {
            match self.0.submit_and_wait(1) {
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => continue,
                result => _ = ok("io_uring_enter", result),
            }
            for done in self.0.completion() {
                if usize::try_from(done.result()) != Ok(bytes) {
                    fail(&format!("read {} of the ring: {}", done.user_data(), done.result()));
                }
                left -= 1;
            }
        }
    }
}
