//! Figures about this machine, and about the memory of processes.

use crate::memory_files::proc_file;
use crate::{MemoryLimits, Result, text};
use std::path::Path;

/// The caller's user, whose rights it has.
pub fn own_uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// The kernel, and the machine that it runs on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kernel {
    /// As `uname -r` prints it.
    pub release: String,
    /// As `uname -n` prints it.
    pub host_name: String,
}

impl Kernel {
    /// The running kernel.
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

/// RAM of this machine, as the kernel counts it (`totalram`).
pub fn ram_bytes() -> u64 {
    let info = rustix::system::sysinfo();
    info.totalram.saturating_mul(info.mem_unit.into())
}

/// RAM that processes could still take before the kernel has to swap (`MemAvailable`).
///
/// # Errors
/// `/proc` is not there.
pub fn available_bytes() -> Result<u64> {
    status_bytes("/proc/meminfo", "MemAvailable:").map(Option::unwrap_or_default)
}

/// RAM that holds nothing, or copies of files and directories (`MemFree`, `Buffers`, `Cached` without `Shmem`,
/// `SReclaimable`). Reading files does not change this figure.
///
/// # Errors
/// `/proc` is not there.
pub fn free_bytes() -> Result<u64> {
    let of = |key| status_bytes("/proc/meminfo", key).map(Option::unwrap_or_default);
    let cached = of("Cached:")?.saturating_sub(of("Shmem:")?);
    let free = [of("MemFree:")?, of("Buffers:")?, of("SReclaimable:")?, cached];
    Ok(free.into_iter().fold(0, u64::saturating_add))
}

/// RAM that `ksmtuned` and others call free: `MemFree`, `Buffers` and `Cached` together.
///
/// # Errors
/// `/proc` is not there.
pub fn free_and_cached_bytes() -> Result<u64> {
    let text = text::read("/proc/meminfo")?;
    let of = |key| size_in(&text, key).unwrap_or(0);
    Ok([of("MemFree:"), of("Buffers:"), of("Cached:")].into_iter().fold(0, u64::saturating_add))
}

/// Pages that this machine has read from swap or written there since it started (`pswpin` and `pswpout`).
///
/// # Errors
/// `/proc` is not there.
pub fn swapped_pages() -> Result<u64> {
    let text = text::read("/proc/vmstat")?;
    let of = |line: &str| line.strip_prefix("pswpin ").or(line.strip_prefix("pswpout "))?.parse::<u64>().ok();
    Ok(text.lines().filter_map(of).fold(0, u64::saturating_add))
}

/// Memory that Pagefold leaves to other programs unless configured otherwise: 1/20 of the host's RAM, and 1 GiB at
/// most.
pub fn usual_reserve_bytes() -> u64 {
    (ram_bytes() / 20).min(1 << 30)
}

/// Memory that this process may take without a promise: available memory less the usual reserve, within the limits of
/// its control groups.
pub fn spare_bytes() -> u64 {
    let spare = available_bytes().unwrap_or_default().saturating_sub(usual_reserve_bytes());
    let limits = MemoryLimits::find();
    let group = limits.as_ref().and_then(|limits| limits.group_of(std::process::id()));
    limits.zip(group).map_or(spare, |(limits, group)| limits.left().take(&group, spare))
}

/// Whether the host has any swap.
pub fn has_swap() -> bool {
    rustix::system::sysinfo().totalswap > 0
}

/// Size of all swap (`totalswap`).
pub fn total_swap_bytes() -> u64 {
    let info = rustix::system::sysinfo();
    info.totalswap.saturating_mul(info.mem_unit.into())
}

/// Seconds since this machine started: a clock that nobody sets, the same for all processes.
pub fn boot_clock_s() -> u64 {
    u64::try_from(rustix::time::clock_gettime(rustix::time::ClockId::Boottime).tv_sec).unwrap_or(0)
}

/// Milliseconds since this machine started, by the same clock as [`boot_clock_s`].
pub fn boot_clock_ms() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let [seconds, nanoseconds] = [time.tv_sec, time.tv_nsec].map(|part| u64::try_from(part).unwrap_or(0));
    seconds * 1000 + nanoseconds / 1_000_000
}

/// The id that the kernel draws at each start of the machine (`boot_id`): 36 characters.
///
/// # Errors
/// `/proc` is not there.
pub fn boot_id() -> Result<String> {
    Ok(text::read("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}

/// Swap that is not in use (`freeswap`).
pub fn free_swap_bytes() -> u64 {
    let info = rustix::system::sysinfo();
    info.freeswap.saturating_mul(info.mem_unit.into())
}

/// Memory of the page tables of process `pid` (`VmPTE`).
///
/// # Errors
/// The process is gone, or may not be looked at.
pub fn page_table_bytes(pid: u32) -> Result<u64> {
    status_bytes(proc_file(pid, "status"), "VmPTE:").map(Option::unwrap_or_default)
}

/// Private memory of process `pid` that is in swap (`VmSwap`).
///
/// # Errors
/// The process is gone, or may not be looked at.
pub fn swapped_bytes(pid: u32) -> Result<u64> {
    status_bytes(proc_file(pid, "status"), "VmSwap:").map(Option::unwrap_or_default)
}

/// A size from a file with lines `Key: N kB`, such as `status`.
fn status_bytes(path: impl AsRef<Path>, key: &str) -> Result<Option<u64>> {
    Ok(size_in(&text::read(path)?, key))
}

fn size_in(text: &str, key: &str) -> Option<u64> {
    let kib = text.lines().find_map(|l| l.strip_prefix(key)?.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    kib.map(|kib| kib.saturating_mul(1024))
}

/// The time at which this machine started, in seconds since 1970, by the clock as it is set at the moment (`btime`).
///
/// # Errors
/// `/proc` is not there.
pub fn boot_time_s() -> Result<u64> {
    let stat = text::read("/proc/stat")?;
    let field = stat.lines().find_map(|line| line.strip_prefix("btime ")?.trim().parse().ok());
    Ok(field.unwrap_or_default())
}

/// Bytes that the kernel takes for one object of the slab cache `cache`, such as `ksm_rmap_item`. `None` if the cache
/// does not exist, or the kernel does not tell.
pub fn slab_object_bytes(cache: &str) -> Option<u64> {
    text::read(format!("/sys/kernel/slab/{cache}/slab_size")).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn figures_agree_with_proc() {
        let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
        assert_eq!(Kernel::this().release, release.trim());
        assert!(own_peak_rss_bytes().unwrap() > 100 << 10);
        let meminfo = fs::read_to_string("/proc/meminfo").unwrap();
        let total = meminfo.lines().next().unwrap().split_ascii_whitespace().nth(1).unwrap();
        assert_eq!(ram_bytes(), total.parse::<u64>().unwrap() * 1024);
        assert!((1..ram_bytes()).contains(&available_bytes().unwrap()));
        assert!((1..ram_bytes()).contains(&free_and_cached_bytes().unwrap()));
        let vmstat = fs::read_to_string("/proc/vmstat").unwrap();
        assert!(swapped_pages().is_ok() && vmstat.contains("\npswpin ") && vmstat.contains("\npswpout "));
        let swap = status_bytes("/proc/meminfo", "SwapTotal:").unwrap().unwrap();
        assert!(free_swap_bytes() <= swap);
    }

    #[test]
    fn sizes_at_their_ends_are_the_largest_number_at_most() {
        let of = |kib: &str| size_in(&format!("VmRSS: 1 kB\nVmSwap:\t{kib} kB\n"), "VmSwap:");
        let wanted = [Some(0), Some(1024), Some(1 << 62), Some(u64::MAX), None, None];
        let ends = ["0", "1", "4503599627370496", "18446744073709551615", "18446744073709551616", "-1"];
        assert_eq!(ends.map(of), wanted);
    }

    #[test]
    fn status_of_process_with_non_utf8_name_is_read() {
        let named = std::thread::spawn(|| {
            fs::write("/proc/thread-self/comm", b"\xff\xfe").unwrap();
            let thread = fs::read_link("/proc/thread-self").unwrap();
            status_bytes(format!("/proc/{}/status", thread.display()), "VmSwap:")
        });
        assert!(named.join().unwrap().unwrap().is_some());
    }
}
