//! Processor time of this process.

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

#[cfg(test)]
mod tests {
    use super::own_cpu_time;

    #[test]
    fn time_grows_with_work() {
        let before = own_cpu_time();
        while own_cpu_time() < before + std::time::Duration::from_millis(20) {}
        assert!(own_cpu_time() >= before + std::time::Duration::from_millis(20));
    }
}
