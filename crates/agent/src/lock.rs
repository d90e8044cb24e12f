//! A lock for data that the program's threads, its signal handlers and the agent's thread share.
//!
//! The lock is a word and `futex`, so it allocates nothing and cannot be poisoned. All signals are blocked while it is
//! held: otherwise a signal handler that unmaps memory could wait for the very thread that it interrupted. The lock is
//! not held around a `fork`: a child begins with free locks and new values ([`Lock::begin_anew`]), or uses none.

use crate::{arena, raw};
use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

const FREE: u32 = 0;
const HELD: u32 = 1;
/// State of a lock that is held while another thread sleeps.
const AWAITED: u32 = 2;

/// A value that one thread at a time may use.
#[derive(Debug)]
pub struct Lock<T> {
    state: AtomicU32,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached only through a `Guard`, and there is one guard at a time. So sharing the lock between
// threads does no more than send the value from one thread to the next.
unsafe impl<T: Send> Sync for Lock<T> {}

impl<T> Lock<T> {
    /// A free lock around this value.
    pub const fn new(value: T) -> Self {
        Self { state: AtomicU32::new(FREE), value: UnsafeCell::new(value) }
    }

    /// Makes this a free lock around `value`, in any state that it was in. The former value is not dropped.
    ///
    /// # Safety
    /// No other thread uses the lock, and nobody holds a guard of it that is still to be dropped.
    pub unsafe fn begin_anew(&self, value: T) {
        // SAFETY: by the caller, nobody else has a reference to the value. It may be half changed, and is not read.
        unsafe { self.value.get().write(value) };
        self.state.store(FREE, Ordering::Release);
    }

    /// Waits for the lock, and holds it with all signals blocked.
    pub fn lock(&self) -> Guard<'_, T> {
        if arena::is_own_thread() {
            // The caller is one of the agent's own threads, which run with all signals blocked (`spawn`).
            return self.lock_only();
        }
        let signals = raw::set_signal_mask(u64::MAX);
        self.acquire();
        Guard { lock: self, signals: Some(signals) }
    }

    /// As [`Lock::lock`], for a thread of the program. Each time that the thread has waited for `wait`, `give_up` is
    /// called; if it returns true, there is no lock, and the answer is `None`.
    pub fn lock_unless(&self, wait: Duration, give_up: impl Fn() -> bool) -> Option<Guard<'_, T>> {
        let signals = raw::set_signal_mask(u64::MAX);
        if self.acquire_unless(Some(wait), give_up) {
            return Some(Guard { lock: self, signals: Some(signals) });
        }
        raw::set_signal_mask(signals);
        None
    }

    /// As [`Lock::lock`], for callers that have blocked all signals already.
    pub fn lock_only(&self) -> Guard<'_, T> {
        self.acquire();
        Guard { lock: self, signals: None }
    }

    fn acquire(&self) {
        self.acquire_unless(None, || false);
    }

    /// Returns whether the lock was taken.
    fn acquire_unless(&self, wait: Option<Duration>, give_up: impl Fn() -> bool) -> bool {
        if self.state.compare_exchange(FREE, HELD, Ordering::Acquire, Ordering::Relaxed).is_ok() {
            return true;
        }
        for _ in 0..100 {
            std::hint::spin_loop();
            if self.state.load(Ordering::Relaxed) == FREE
                && self.state.compare_exchange(FREE, HELD, Ordering::Acquire, Ordering::Relaxed).is_ok()
            {
                return true;
            }
        }
        while self.state.swap(AWAITED, Ordering::Acquire) != FREE {
            let has_ended = !raw::futex_wait(&self.state, AWAITED, wait);
            if has_ended && give_up() {
                return false;
            }
        }
        true
    }

    fn release(&self) {
        if self.state.swap(FREE, Ordering::Release) == AWAITED {
            raw::futex(&self.state, libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG, 1);
        }
    }
}

/// Holds the lock, and gives access to the value, until it is dropped.
#[derive(Debug)]
pub struct Guard<'a, T> {
    lock: &'a Lock<T>,
    signals: Option<u64>,
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: this guard holds the lock, and nobody else makes a reference to the value without it.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for Guard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as above, and this guard is borrowed mutably as long as the reference lives.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T> Drop for Guard<'_, T> {
    fn drop(&mut self) {
        self.lock.release();
        if let Some(signals) = self.signals {
            raw::set_signal_mask(signals);
        }
    }
}
