//! Processor time of this process, and of this thread.

use rustix::time::{ClockId, clock_gettime};
use std::time::Duration;

/// Processor time that this process has used since it started, in user mode and in the kernel.
pub fn own_cpu_time() -> Duration {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the pointer is to a whole `rusage`, which the call fills.
    let done = unsafe { libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr()) };
    assert_eq!(done, 0, "getrusage(RUSAGE_SELF) has no reason to fail");
    // SAFETY: it was zeroed, which is a valid `rusage`, and then filled.
    let usage = unsafe { usage.assume_init() };
    let time = |t: libc::timeval| {
        Duration::from_secs(t.tv_sec.unsigned_abs()) + Duration::from_micros(t.tv_usec.unsigned_abs())
    };
    time(usage.ru_utime) + time(usage.ru_stime)
}

/// Processor time that this thread has used since it started, in user mode and in the kernel.
pub fn own_thread_cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::{own_cpu_time, own_thread_cpu_time};

    #[test]
    fn time_grows_with_work() {
        let before = own_cpu_time();
        while own_cpu_time() < before + std::time::Duration::from_millis(20) {}
        assert!(own_cpu_time() >= before + std::time::Duration::from_millis(20));
    }

    #[test]
    fn time_of_this_thread_is_not_that_of_others() {
        let others = own_thread_cpu_time();
        let busy = std::thread::spawn(|| while own_thread_cpu_time() < std::time::Duration::from_millis(50) {});
        busy.join().unwrap();
        assert!(own_thread_cpu_time() < others + std::time::Duration::from_millis(25));
    }
}
