//! Pressure on this machine: tasks that wait for memory or a processor (PSI), and the watermarks of its zones.

use crate::text;

/// Part of the last 10 s in which some task waited for memory, in percent (`/proc/pressure/memory`). `None` on kernels
/// without PSI.
pub fn memory_stalled_percent() -> Option<f64> {
    stalled(&text::read("/proc/pressure/memory").ok()?)
}

/// Part of the last 10 s in which some task waited for a processor, in percent (`/proc/pressure/cpu`). `None` on
/// kernels without PSI.
pub fn cpu_waited_percent() -> Option<f64> {
    stalled(&text::read("/proc/pressure/cpu").ok()?)
}

/// Free memory below which the kernel reclaims: the high watermarks of all zones. `None` if the kernel does not tell.
pub fn high_watermark_bytes() -> Option<u64> {
    high(&text::read("/proc/zoneinfo").ok()?)
}

fn stalled(text: &str) -> Option<f64> {
    let some = text.lines().find_map(|line| line.strip_prefix("some "))?;
    some.split(' ').find_map(|field| field.strip_prefix("avg10="))?.parse().ok()
}

fn high(text: &str) -> Option<u64> {
    // A zone's watermark is a line "high N". Lines about per-processor lists have a colon ("high: N").
    let pages = text.lines().filter_map(|line| line.trim_start().strip_prefix("high ")?.trim().parse::<u64>().ok());
    pages.reduce(u64::saturating_add).map(page::pages_to_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stalls_and_watermarks_are_read() {
        let pressure = "some avg10=1.25 avg60=0.01 avg300=0.01 total=5502517\nfull avg10=0.50 avg60=0.00 total=1\n";
        assert_eq!((stalled(pressure), stalled("full avg10=1.00\n")), (Some(1.25), None));
        let zones = "Node 0, zone DMA\n  pages free 3840\n        boost    0\n        high     16\n              high:     0\n\
                     Node 0, zone Normal\n        high     3659\n              high_min: 6\n";
        assert_eq!((high(zones), high("")), (Some((16 + 3659) << 12), None));
    }

    #[test]
    fn this_host_has_watermarks() {
        assert!((1..crate::ram_bytes() / 4).contains(&high_watermark_bytes().unwrap()));
    }
}
