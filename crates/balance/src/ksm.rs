//! Rules that drive ksmd, the kernel's own merger: observations of the host in, values of ksmd's knobs out.
//!
//! | rule | runs | `pages_to_scan` |
//! |---|---|---|
//! | `need` | while memory is short ([`Host::is_short`]) | 1024; doubles while a window merges 1/64 of the pages that it scans; halves when a full scan has ended and less than 1/1024 merged; 64 to 4096 |
//! | `ksmtuned` | while VMs' address spaces and 1/5 of RAM exceed RAM, or free memory is below 1/5 | 300 more where free memory is below 1/5, else 50 less; 64 to 1250; begins at 0 |
//! | `mom` | the same, free memory as the mean of 10 looks | the same, from what the knob has |
//! | `advisor` | always | the kernel's own advisor's (`advisor_mode`, since Linux 6.8) |
//!
//! `ksmtuned` is the script of that name, looks every 60 s, and counts `MemFree`, `Buffers` and `Cached` as free. `mom`
//! is oVirt's `ksm.rules` (`03-ksm.policy` of vdsm), and looks every 10 s. Both sleep 10 ms for 16 GiB of RAM, more for
//! less RAM, and 10 ms at least.
//!
//! With any rule, ksmd does not run after a window in which the host has swapped: it would read pages that the kernel
//! has just swapped out (Li). Pages that are merged stay so while ksmd does not run.

use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Most pages that a host may swap in a second without stopping ksmd: 64.
const SWAPS_A_SECOND: u64 = 64;
/// Part of time in which some task waits for memory (PSI), in percent: memory becomes short at the first figure, and
/// stops being short below the second.
const STALLED_PERCENT: (f64, f64) = (10.0, 1.0);
/// `pages_to_scan` by rule `need`: at first, at least, at most.
const NEED_PAGES: (u64, u64, u64) = (1024, 64, 4096);
/// `sleep_millisecs` by rule `need`: 10 ms.
const NEED_SLEEP_MS: u64 = 10;
/// Part of the scanned pages that must be merged for rule `need` to double `pages_to_scan`: 1/64.
const PLENTY: u64 = 64;
/// Merged part of the scanned pages below which, after a full scan, rule `need` halves `pages_to_scan`: 1/1024.
const LITTLE: u64 = 1024;
/// Pages by which `ksmtuned` and `mom` raise and lower `pages_to_scan`; its lowest and highest value.
const TUNED_PAGES: (u64, u64, u64, u64) = (300, 50, 64, 1250);
/// RAM for which `ksmtuned` and `mom` sleep [`TUNED_SLEEP_MS`]: 16 GiB.
const TUNED_RAM_BYTES: u64 = 16 << 30;
/// Sleep of `ksmtuned` and `mom`: 10 ms.
const TUNED_SLEEP_MS: u64 = 10;
/// Part of RAM that `ksmtuned` and `mom` want to be free: 1/5.
const TUNED_PART: u64 = 5;

/// A rule by which ksmd is driven.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Rule {
    /// Off until memory is short; then as fast as merging pays.
    Need,
    /// The rule of the script `ksmtuned`.
    Ksmtuned,
    /// The rule of oVirt's MOM.
    Mom,
    /// The kernel's advisor.
    Advisor,
}

impl Rule {
    /// All rules.
    pub const ALL: [Self; 4] = [Self::Need, Self::Ksmtuned, Self::Mom, Self::Advisor];

    /// The name used on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Need => "need",
            Self::Ksmtuned => "ksmtuned",
            Self::Mom => "mom",
            Self::Advisor => "advisor",
        }
    }

    /// Time between two decisions, as the rule was published.
    pub const fn window(self) -> Duration {
        match self {
            Self::Ksmtuned => Duration::from_secs(60),
            Self::Need | Self::Mom | Self::Advisor => Duration::from_secs(10),
        }
    }
}

/// What a driver has seen of the host at the end of a window (the time between two decisions).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Host {
    /// RAM, in bytes.
    pub total_bytes: u64,
    /// `MemAvailable`.
    pub available_bytes: u64,
    /// `MemFree`, `Buffers` and `Cached` together, at up to 10 looks, the latest last.
    pub free_bytes: Vec<u64>,
    /// Address spaces of processes that are called qemu.
    pub vm_bytes: u64,
    /// Part of the last 10 s in which some task waited for memory, in percent. `None` without PSI.
    pub stalled_percent: Option<f64>,
    /// Length of the window.
    pub window: Duration,
    /// Pages that were swapped in or out in it.
    pub swapped_pages: u64,
    /// Pages that ksmd has scanned in it; `None` before Linux 6.6.
    pub scanned_pages: Option<u64>,
    /// Pages that were merged in it, less those whose merging ended.
    pub merged_pages: i64,
    /// Full scans that ended in it.
    pub full_scans: u64,
    /// The knob `pages_to_scan`.
    pub pages_to_scan: u64,
    /// Whether this driver let ksmd run in the window.
    pub ran: bool,
    /// `pages_to_scan` as this driver set it last; `None` before it has.
    pub driven_pages: Option<u64>,
}

/// Bounds that the operator has set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Available memory below which memory is short, in bytes.
    pub short_below_bytes: u64,
    /// Whether every rule waits until memory is short.
    pub off_until_short: bool,
}

/// Values of ksmd's knobs for a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Knobs {
    /// ksmd does not run. Merged pages stay merged.
    Off,
    /// ksmd scans this many pages between two sleeps of this many milliseconds.
    Scan(u64, u64),
    /// ksmd scans as the kernel's advisor decides.
    Advised,
}

impl Host {
    /// Whether memory is short: less than `below_bytes` is available, or tasks wait for memory. Once ksmd runs for
    /// that, memory counts as short until 5/4 of `below_bytes` are available and hardly any task waits.
    pub fn is_short(&self, below_bytes: u64) -> bool {
        let stalled = self.stalled_percent.unwrap_or(0.0);
        if self.ran {
            self.available_bytes < below_bytes.saturating_add(below_bytes / 4) || stalled >= STALLED_PERCENT.1
        } else {
            self.available_bytes < below_bytes || stalled >= STALLED_PERCENT.0
        }
    }

    fn swaps(&self) -> bool {
        self.swapped_pages > SWAPS_A_SECOND.saturating_mul(self.window.as_secs().max(1))
    }
}

/// Decides ksmd's knobs for the next window, and says why.
pub fn drive(rule: Rule, bounds: &Bounds, host: &Host) -> (Knobs, String) {
    if host.swaps() {
        return (Knobs::Off, format!("the host swapped {} pages", host.swapped_pages));
    }
    let is_short = host.is_short(bounds.short_below_bytes);
    if !is_short && (bounds.off_until_short || rule == Rule::Need) {
        return (Knobs::Off, "memory is not short".into());
    }
    match rule {
        Rule::Need => need(host),
        Rule::Ksmtuned => {
            let free = host.free_bytes.last().copied().unwrap_or(0);
            tuned(host, free, host.driven_pages.unwrap_or(0))
        }
        Rule::Mom => {
            let looks = u64::try_from(host.free_bytes.len()).unwrap_or(0);
            let sum = host.free_bytes.iter().fold(0, |sum: u64, free| sum.saturating_add(*free));
            tuned(host, sum.checked_div(looks).unwrap_or(0), host.pages_to_scan)
        }
        Rule::Advisor => (Knobs::Advised, "the kernel's advisor sets the rate".into()),
    }
}

fn need(host: &Host) -> (Knobs, String) {
    let (first, least, most) = NEED_PAGES;
    let Some(before) = host.driven_pages.filter(|_| host.ran) else {
        return (Knobs::Scan(first, NEED_SLEEP_MS), "memory is short".into());
    };
    let merged = u64::try_from(host.merged_pages).unwrap_or(0);
    // On a kernel that does not count scanned pages, the number is taken from the knobs and the window's length.
    let batches = u64::try_from(host.window.as_millis()).unwrap_or(u64::MAX) / NEED_SLEEP_MS;
    let scanned = host.scanned_pages.unwrap_or(before.saturating_mul(batches));
    let pages = if merged > 0 && merged.saturating_mul(PLENTY) >= scanned {
        before.saturating_mul(2).min(most)
    } else if host.full_scans > 0 && merged.saturating_mul(LITTLE) < scanned {
        (before / 2).max(least)
    } else {
        before
    };
    let seconds = host.window.as_secs();
    (Knobs::Scan(pages, NEED_SLEEP_MS), format!("{merged} pages merged of {scanned} scanned in {seconds} s"))
}

/// The rule of `ksmtuned` and of `mom`: scan more pages than before (`pages`) while less than a fifth of RAM is free,
/// and fewer otherwise. `ksmtuned` takes the free memory of this moment, and the pages that it set itself. `mom` takes
/// the mean of several looks, and the pages that ksmd's knob shows.
fn tuned(host: &Host, free_bytes: u64, pages: u64) -> (Knobs, String) {
    let (boost, decay, least, most) = TUNED_PAGES;
    let wanted = host.total_bytes / TUNED_PART;
    let is_free = free_bytes > wanted;
    if host.vm_bytes.saturating_add(wanted) < host.total_bytes && is_free {
        return (Knobs::Off, "VMs and a fifth fit into RAM, and more than a fifth of RAM is free".into());
    }
    let is_low = free_bytes < wanted;
    let pages = if is_low { pages.saturating_add(boost) } else { pages.saturating_sub(decay) };
    let sleep = TUNED_SLEEP_MS.saturating_mul(TUNED_RAM_BYTES).checked_div(host.total_bytes).unwrap_or(0);
    let why = if is_low { "less than a fifth of RAM is free" } else { "VMs and a fifth exceed RAM" };
    (Knobs::Scan(pages.clamp(least, most), sleep.max(TUNED_SLEEP_MS)), why.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;
    const BOUNDS: Bounds = Bounds { short_below_bytes: 2 * GIB, off_until_short: false };

    /// A host of 10 GiB without pressure.
    fn free() -> Host {
        Host {
            total_bytes: 10 * GIB,
            available_bytes: 8 * GIB,
            free_bytes: vec![8 * GIB],
            window: Duration::from_secs(10),
            pages_to_scan: 100,
            ..Host::default()
        }
    }

    fn short() -> Host {
        Host { available_bytes: GIB, free_bytes: vec![GIB], ..free() }
    }

    fn knobs(rule: Rule, host: &Host) -> Knobs {
        drive(rule, &BOUNDS, host).0
    }

    #[test]
    fn no_rule_merges_on_a_free_host_but_the_advisor_unless_it_waits() {
        assert_eq!(Rule::ALL.map(|rule| knobs(rule, &free())), [Knobs::Off, Knobs::Off, Knobs::Off, Knobs::Advised]);
        let waits = Bounds { off_until_short: true, ..BOUNDS };
        assert_eq!(drive(Rule::Advisor, &waits, &free()).0, Knobs::Off);
        assert_eq!(drive(Rule::Advisor, &waits, &short()).0, Knobs::Advised);
        // VMs are too large for RAM, and nothing is short.
        let many = Host { vm_bytes: 9 * GIB, ..free() };
        assert!(matches!(knobs(Rule::Ksmtuned, &many), Knobs::Scan(..)));
        assert_eq!(drive(Rule::Ksmtuned, &waits, &many).0, Knobs::Off);
    }

    #[test]
    fn every_rule_stops_while_the_host_swaps() {
        let swaps = Host { swapped_pages: 641, ..short() };
        assert_eq!(Rule::ALL.map(|rule| knobs(rule, &swaps)), [Knobs::Off; 4]);
        assert!(drive(Rule::Need, &BOUNDS, &swaps).1.contains("641 pages"));
        let little = Host { swapped_pages: 640, ..short() };
        assert!(Rule::ALL.iter().all(|rule| knobs(*rule, &little) != Knobs::Off));
    }

    #[test]
    fn need_goes_on_until_a_quarter_more_is_available_and_no_task_waits() {
        let at = |available_bytes, ran, stalled| {
            let host = Host { available_bytes, ran, stalled_percent: Some(stalled), ..free() };
            host.is_short(BOUNDS.short_below_bytes)
        };
        let below = 2 * GIB - 1;
        assert_eq!([at(below, false, 0.0), at(2 * GIB, false, 0.0)], [true, false]);
        let half_more = 5 * GIB / 2;
        assert_eq!([at(half_more - 1, true, 0.0), at(half_more, true, 0.0)], [true, false]);
        assert_eq!([at(8 * GIB, false, 9.9), at(8 * GIB, false, 10.0)], [false, true]);
        assert_eq!([at(8 * GIB, true, 0.9), at(8 * GIB, true, 1.0)], [false, true]);
        assert!(!Host { stalled_percent: None, ..free() }.is_short(BOUNDS.short_below_bytes));
    }

    #[test]
    fn need_is_as_fast_as_it_merges() {
        assert_eq!(knobs(Rule::Need, &short()), Knobs::Scan(1024, 10));
        let ran = |scanned_pages, merged_pages, full_scans| Host {
            ran: true,
            driven_pages: Some(1024),
            scanned_pages,
            merged_pages,
            full_scans,
            ..short()
        };
        let of = |host: &Host| match knobs(Rule::Need, host) {
            Knobs::Scan(pages, 10) => pages,
            other => panic!("{other:?}"),
        };
        assert_eq!(of(&ran(Some(640_000), 10_000, 0)), 2048);
        assert_eq!(of(&ran(Some(640_000), 9999, 1)), 1024);
        assert_eq!(of(&ran(Some(640_000), 624, 0)), 1024, "a scan that has not ended may merge yet");
        assert_eq!(of(&ran(Some(640_000), 624, 1)), 512);
        assert_eq!(of(&ran(Some(640_000), -9, 1)), 512);
        assert_eq!(of(&ran(None, 16_000, 0)), 2048, "1,024,000 pages may have been scanned");
        assert_eq!(of(&ran(None, 15_999, 0)), 1024);
        let bounds = [
            Host { driven_pages: Some(4096), ..ran(Some(1), 1, 0) },
            Host { driven_pages: Some(64), ..ran(Some(1), 0, 1) },
        ];
        assert_eq!(bounds.map(|host| of(&host)), [4096, 64]);
        let after_a_stop = Host { ran: false, ..ran(Some(0), 0, 0) };
        assert_eq!(of(&after_a_stop), 1024);
    }

    /// The figures of the published script, on a host of 10 GiB.
    #[test]
    fn ksmtuned_boosts_and_decays_within_its_bounds() {
        let driven = |pages, host: Host| match knobs(Rule::Ksmtuned, &Host { driven_pages: pages, ..host }) {
            Knobs::Scan(pages, sleep) => (pages, sleep),
            other => panic!("{other:?}"),
        };
        // 10 ms x 16 GiB / 10 GiB.
        assert_eq!(
            [None, Some(300), Some(1250)].map(|pages| driven(pages, short())),
            [(300, 16), (600, 16), (1250, 16)]
        );
        let many = Host { vm_bytes: 8 * GIB, ..free() };
        assert_eq!(
            [Some(600), Some(64), None].map(|pages| driven(pages, many.clone())),
            [(550, 16), (64, 16), (64, 16)]
        );
        assert_eq!(knobs(Rule::Ksmtuned, &Host { vm_bytes: 8 * GIB - 1, ..free() }), Knobs::Off);
        let large = Host { total_bytes: 64 * GIB, ..short() };
        assert_eq!(driven(None, large), (300, 10));
        // Free memory is what is free now.
        assert_eq!(driven(None, Host { free_bytes: vec![8 * GIB, GIB], ..short() }), (300, 16));
    }

    #[test]
    fn mom_goes_by_the_mean_of_its_looks_and_by_the_knob() {
        let pages = |host: Host| match knobs(Rule::Mom, &host) {
            Knobs::Scan(pages, 16) => Some(pages),
            Knobs::Off => None,
            other => panic!("{other:?}"),
        };
        assert_eq!(pages(short()), Some(400));
        assert_eq!(pages(Host { free_bytes: vec![8 * GIB, GIB], ..short() }), None, "the mean is 4.5 GiB");
        assert_eq!(pages(Host { free_bytes: vec![2 * GIB, GIB], ..short() }), Some(400));
        assert_eq!(pages(Host { driven_pages: Some(7), pages_to_scan: 1200, ..short() }), Some(1250));
    }

    #[test]
    fn numbers_at_their_ends_are_taken() {
        for host in [Host::default(), Host { total_bytes: u64::MAX, vm_bytes: u64::MAX, swapped_pages: 0, ..short() }] {
            for rule in Rule::ALL {
                let ran = Host {
                    ran: true,
                    driven_pages: Some(u64::MAX),
                    pages_to_scan: u64::MAX,
                    merged_pages: i64::MAX,
                    window: Duration::MAX,
                    ..host.clone()
                };
                drive(rule, &Bounds { short_below_bytes: u64::MAX, off_until_short: true }, &ran);
            }
        }
    }
}
