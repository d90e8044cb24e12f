//! Known bugs (faults) of the kernel in `UFFDIO_MOVE`, which moves pages, and in `PAGEMAP_SCAN`, which finds written
//! pages, by kernel version.
//!
//! Only the version number is known. A distribution may have fixed a bug without changing the number. For some branches
//! of stable kernels it is not known which version has the fix. In both cases a fault *may* apply.

use serde::Serialize;

/// A kernel's version: `6.12.20`.
type Version = (u16, u16, u16);

/// Whether a fault applies to a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Applies {
    /// The fault is not in this kernel.
    No,
    /// The fault is in kernels of this version, and may have been mended in this one.
    May,
    /// The fault is in this kernel.
    Yes,
}

/// A fault, in the shape that `pagefold doctor --json` prints.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct KernelFault {
    /// A name.
    pub id: &'static str,
    /// Consequence of the fault if nothing avoided it.
    pub effect: &'static str,
    /// Whether the fault applies to this kernel.
    pub applies: Applies,
    /// How Pagefold's calls avoid the fault.
    pub avoided_by: &'static str,
    /// The test that checks this.
    pub test: &'static str,
}

/// In which versions of the stable branches a fault was fixed.
#[derive(Clone, Copy)]
enum Stable {
    /// The first version of each branch that has the fix. Branches that are not listed have the fault.
    Known(&'static [Version]),
    /// It is not known which branches have the fix.
    Unknown,
}

/// A fault and the versions that have it.
struct Row {
    id: &'static str,
    effect: &'static str,
    /// The first version that has the fault.
    since: (u16, u16),
    /// The first mainline version without the fault; `None`: not known.
    fixed: Option<(u16, u16)>,
    stable: Stable,
    avoided_by: &'static str,
    test: &'static str,
}

/// The fault because of which nothing is folded on a host with swap.
const SWAP_CACHE: &str = "move_swap_cache";

const ROWS: [Row; 12] = [
    Row {
        id: "move_huge_page",
        effect: "CVE-2024-27007: a huge page is moved before it is known not to be pinned; memory is corrupted",
        since: (6, 8),
        fixed: Some((6, 9)),
        stable: Stable::Unknown,
        avoided_by: "less than a huge page is moved by one call, so the kernel splits it first",
        test: "huge_page_is_never_moved_whole",
    },
    Row {
        id: "move_large_folio",
        effect: "several threads that move pages of one large folio keep each other from it for ever",
        since: (6, 8),
        fixed: Some((6, 14)),
        stable: Stable::Unknown,
        avoided_by: "one thread of a member moves pages, and gives up a page after eight attempts",
        test: "only_section_moves_pages",
    },
    Row {
        id: SWAP_CACHE,
        effect: "CVE-2025-21984: a page is moved that is just being swapped out or in; the kernel stops (BUG)",
        since: (6, 8),
        fixed: Some((6, 14)),
        stable: Stable::Known(&[(6, 12, 20), (6, 13, 8)]),
        avoided_by: "nothing is folded on such a kernel while the host has swap",
        test: "nothing_is_folded_with_swap_where_kernel_would_stop",
    },
    Row {
        id: "move_swap_entry",
        effect: "CVE-2025-38242: a page is moved while it is swapped in; the kernel's counts of resident memory are wrong",
        since: (6, 8),
        fixed: Some((6, 16)),
        stable: Stable::Unknown,
        avoided_by: "only present pages are moved; what is swapped out in the microseconds before costs a wrong count",
        test: "pages_that_are_not_there_are_left_out",
    },
    Row {
        id: "move_migration_entry",
        effect: "a huge page that the kernel migrates is waited for under a wrong lock",
        since: (6, 8),
        fixed: Some((7, 2)),
        stable: Stable::Unknown,
        avoided_by: "huge pages are split before pages of them are moved, and khugepaged makes none of memory whose writes are noted",
        test: "huge_page_is_never_moved_whole",
    },
    Row {
        id: "move_swap_mark",
        effect: "a page that was moved while in swap looks write-protected, so that its two megabytes do not become a huge page",
        since: (6, 8),
        fixed: None,
        stable: Stable::Unknown,
        avoided_by: "only present pages are moved",
        test: "pages_that_are_not_there_are_left_out",
    },
    Row {
        id: "move_split_fails",
        effect: "a huge page cannot be split for want of memory: the move fails with ENOMEM",
        since: (6, 8),
        fixed: None,
        stable: Stable::Unknown,
        avoided_by: "a page that cannot be moved is left where it is, counted, and asked for again later, whatever the error",
        test: "refused_pages_are_left_where_they_are_and_counted",
    },
    Row {
        id: "register_special",
        effect: "CVE-2026-68166: shadow stacks and special mappings can be registered",
        since: (6, 6),
        fixed: None,
        stable: Stable::Unknown,
        avoided_by: "only private anonymous memory is enrolled that the agent saw being mapped; no stacks, no huge pages of hugetlbfs",
        test: "stacks_and_hugetlb_memory_are_not_enrolled",
    },
    Row {
        id: "scan_unpopulated",
        effect: "pages that are not there read as not written, and are not watched from then on",
        since: (6, 7),
        fixed: None,
        stable: Stable::Unknown,
        avoided_by: "a scan asks for present pages only, and a page that is populated later reads as written",
        test: "discarded_memory_that_is_used_again_reads_as_written",
    },
    Row {
        id: "scan_huge_hole",
        effect: "a huge page that was discarded as a whole is not reported",
        since: (6, 7),
        fixed: Some((7, 2)),
        stable: Stable::Unknown,
        avoided_by: "discards are heard of by hooks and messages, and bytes are compared before a page is folded",
        test: "discarded_memory_that_is_used_again_reads_as_written",
    },
    Row {
        id: "scan_hugetlb_hole",
        effect: "CVE-2026-72174: a scan of hugetlbfs memory that protects what it finds hangs, and cannot be killed",
        since: (6, 7),
        fixed: None,
        stable: Stable::Unknown,
        avoided_by: "such scans are made of enrolled memory only, which is never of hugetlbfs",
        test: "stacks_and_hugetlb_memory_are_not_enrolled",
    },
    Row {
        id: "scan_migration",
        effect: "a page that the kernel migrates may read as not written",
        since: (6, 7),
        // The fix was made in 2024.
        fixed: Some((6, 13)),
        stable: Stable::Unknown,
        avoided_by: "bytes are compared before a page is folded, while nobody can write it",
        test: "equal_pages_are_folded_and_others_are_as_they_were",
    },
];

/// The faults, as they apply to the kernel with this release (`uname -r`).
pub fn kernel_faults(release: &str) -> Vec<KernelFault> {
    let parsed = parse(release);
    let fault = |row: &Row| {
        // A release string that cannot be parsed may be of any version.
        let applies = parsed.map_or(Applies::May, |(version, plain)| row.applies(version, plain));
        KernelFault { id: row.id, effect: row.effect, applies, avoided_by: row.avoided_by, test: row.test }
    };
    ROWS.iter().map(fault).collect()
}

/// Why nothing may be folded on a host with this kernel; `None` if it may.
pub fn refuses_folding(release: &str, has_swap: bool) -> Option<String> {
    let fault = kernel_faults(release).into_iter().find(|f| f.id == SWAP_CACHE && f.applies != Applies::No)?;
    let may = if fault.applies == Applies::May { "may have" } else { "has" };
    has_swap.then(|| {
        format!(
            "this kernel ({release}) {may} a fault by which folding could stop a host that swaps: {}; \
                 use Linux 6.12.20, 6.13.8, 6.14 or newer, or swapoff -a",
            fault.effect
        )
    })
}

impl Row {
    fn applies(&self, version: Version, plain: bool) -> Applies {
        let main = (version.0, version.1);
        if main < self.since || self.fixed.is_some_and(|fixed| main >= fixed) {
            return Applies::No;
        }
        match self.stable {
            Stable::Known(repairs) if repairs.iter().any(|r| (r.0, r.1) == main && version.2 >= r.2) => Applies::No,
            Stable::Known(_) if plain && self.fixed.is_some() => Applies::Yes,
            _ => Applies::May,
        }
    }
}

/// The version in a release, and whether the release is nothing but the version: then no distribution has added fixes
/// of its own. A release candidate (`-rc6`) counts as the version before it, with unknown fixes. `None` if this is not
/// a release.
fn parse(release: &str) -> Option<(Version, bool)> {
    let mut rest = release;
    let mut numbers = [0_u16; 3];
    for (n, number) in numbers.iter_mut().enumerate() {
        if n > 0 {
            match rest.strip_prefix('.') {
                Some(behind) if behind.starts_with(|c: char| c.is_ascii_digit()) => rest = behind,
                _ if n == 1 => return None,
                _ => break,
            }
        }
        let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        *number = rest[..end].parse().ok()?;
        rest = &rest[end..];
    }
    let [major, minor, patch] = numbers;
    if rest.starts_with("-rc") {
        let before = if minor > 0 { (major, minor - 1, 0) } else { (major.checked_sub(1)?, u16::MAX, 0) };
        return Some((before, false));
    }
    Some(((major, minor, patch), rest.is_empty()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn applies(id: &str, release: &str) -> Applies {
        kernel_faults(release).into_iter().find(|fault| fault.id == id).unwrap().applies
    }

    #[test]
    fn faults_apply_by_version() {
        use Applies::{May, No, Yes};
        for (release, expected) in [
            ("6.7.12", No),
            ("6.8.0", Yes),
            ("6.8.0-31-generic", May),
            ("6.12.19", Yes),
            ("6.12.20", No),
            ("6.12.48+deb13-amd64", No),
            ("6.13.8", No),
            ("6.13.7", Yes),
            ("6.14.0", No),
            ("6.14-rc7", May),
            ("6.18.44-fc-v657", No),
            ("7.0-rc1", No),
        ] {
            assert_eq!(applies(SWAP_CACHE, release), expected, "{release}");
        }
        assert_eq!((applies("move_huge_page", "6.8.12"), applies("move_huge_page", "6.9.1")), (May, No));
        assert_eq!((applies("scan_huge_hole", "7.2-rc5"), applies("scan_huge_hole", "7.2.0")), (May, No));
        assert_eq!(applies("scan_hugetlb_hole", "9.9.9"), May, "nobody knows of a repair");
        assert_eq!(applies("move_huge_page", "5.14.0-503.el9.x86_64"), No);
    }

    #[test]
    fn odd_releases_are_parsed() {
        for (release, expected) in [
            ("6.1.0-13-amd64", Some(((6, 1, 0), false))),
            ("6.6.87.2-microsoft-standard-WSL2", Some(((6, 6, 87), false))),
            ("6.12.20", Some(((6, 12, 20), true))),
            ("6.12", Some(((6, 12, 0), true))),
            ("6.12+", Some(((6, 12, 0), false))),
            ("6.9.0-rc3", Some(((6, 8, 0), false))),
            ("7.0.0-rc3", Some(((6, u16::MAX, 0), false))),
            ("", None),
            ("6", None),
            ("6.", None),
            ("linux-6.1", None),
            ("6.99999999999", None),
            ("99999999999.1.1", None),
        ] {
            assert_eq!(parse(release), expected, "{release}");
        }
        assert_eq!(applies("move_huge_page", "unknown"), Applies::May);
    }

    #[test]
    fn only_hosts_that_swap_are_refused() {
        assert!(refuses_folding("6.12.5", true).unwrap().contains("has a fault"));
        assert!(refuses_folding("6.8.0-31-generic", true).unwrap().contains("may have a fault"));
        assert_eq!((refuses_folding("6.12.5", false), refuses_folding("6.14.2", true)), (None, None));
    }
}
