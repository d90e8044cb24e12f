//! This machine and this process.

use crate::{Result, text};

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
    status_bytes("/proc/self/status", "VmHWM:").ok().flatten()
}

/// RAM of this machine.
pub fn ram_bytes() -> u64 {
    let info = rustix::system::sysinfo();
    info.totalram.saturating_mul(info.mem_unit.into())
}

/// What of this machine's RAM could be used without anybody swapping (`MemAvailable`).
///
/// # Errors
/// `/proc` is not there.
pub fn available_bytes() -> Result<u64> {
    status_bytes("/proc/meminfo", "MemAvailable:").map(Option::unwrap_or_default)
}

/// What of a process's private memory is in swap (`VmSwap`).
///
/// # Errors
/// The process is gone, or may not be looked at.
pub fn swapped_bytes(pid: u32) -> Result<u64> {
    status_bytes(&format!("/proc/{pid}/status"), "VmSwap:").map(Option::unwrap_or_default)
}

/// A size from a `status` file.
fn status_bytes(path: &str, key: &str) -> Result<Option<u64>> {
    let status = text::read(path)?;
    let kib = status.lines().find_map(|l| l.strip_prefix(key)?.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    Ok(kib.map(|kib| kib * 1024))
}

/// What the kernel takes for one object of a cache of its own, such as `ksm_rmap_item`; `None` where it does not tell, or
/// the cache is not there.
pub fn slab_object_bytes(cache: &str) -> Option<u64> {
    text::read(format!("/sys/kernel/slab/{cache}/slab_size")).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn this_machine_and_process_tell() {
        let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
        assert_eq!(Kernel::this().release, release.trim());
        assert!(own_peak_rss_bytes().unwrap() > 100 << 10);
        let meminfo = fs::read_to_string("/proc/meminfo").unwrap();
        let total = meminfo.lines().next().unwrap().split_ascii_whitespace().nth(1).unwrap();
        assert_eq!(ram_bytes(), total.parse::<u64>().unwrap() * 1024);
        assert!((1..ram_bytes()).contains(&available_bytes().unwrap()));
    }

    #[test]
    fn a_process_cannot_hide_behind_a_name_that_is_not_text() {
        let named = std::thread::spawn(|| {
            fs::write("/proc/thread-self/comm", b"\xff\xfe").unwrap();
            let thread = fs::read_link("/proc/thread-self").unwrap();
            status_bytes(&format!("/proc/{}/status", thread.display()), "VmSwap:")
        });
        assert!(named.join().unwrap().unwrap().is_some());
    }
}
