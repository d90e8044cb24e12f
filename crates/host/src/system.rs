//! This machine and this process.

use std::fs;

/// Which kernel runs, and on which machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kernel {
    /// As `uname -r` prints it.
    pub release: String,
    /// As `uname -n` prints it.
    pub host_name: String,
}

impl Kernel {
    /// The running one.
    pub fn this() -> Self {
        let names = rustix::system::uname();
        let text = |name: &std::ffi::CStr| name.to_string_lossy().into_owned();
        Self { release: text(names.release()), host_name: text(names.nodename()) }
    }
}

/// The most memory that this process has had resident (`VmHWM`).
pub fn own_peak_rss_bytes() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_and_process_tell() {
        let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
        assert_eq!(Kernel::this().release, release.trim());
        assert!(own_peak_rss_bytes().unwrap() > 100 << 10);
    }
}
