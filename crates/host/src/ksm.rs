//! KSM, with which the kernel merges identical pages: `/sys/kernel/mm/ksm` for the host and `/proc/PID/ksm_stat` for a
//! process. Fields have the kernel's names. A field that a kernel does not have is `None`.

use crate::memory_files::proc_file;
use crate::{Error, ProcessStat, Result, ThreadCpu, pids};
use std::fs;
use std::path::Path;
use std::time::Duration;

/// Size of the record that ksmd keeps of a page (`ksm_rmap_item`), in bytes: 64.
const RECORD_BYTES: u64 = 64;

/// State of ksmd.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ksm {
    /// `run`: 0 off, 1 merging, 2 off and everything unmerged.
    pub run: u64,
    /// `pages_shared`: frames that hold merged pages.
    pub pages_shared: u64,
    /// `pages_sharing`: further mappings of these frames, which is the number of pages saved.
    pub pages_sharing: u64,
    /// `pages_unshared` and `pages_volatile`: further pages that ksmd keeps a record of.
    pub pages_unshared: u64,
    /// See `pages_unshared`.
    pub pages_volatile: u64,
    /// `ksm_zero_pages`, since Linux 6.6: pages that were merged with the kernel's zero page.
    pub ksm_zero_pages: Option<u64>,
    /// `merge_across_nodes`, of kernels with NUMA: whether pages of different nodes become one.
    pub merge_across_nodes: Option<u64>,
    /// `pages_scanned`, since Linux 6.6: visits to pages; a page counts at each visit.
    pub pages_scanned: Option<u64>,
    /// `full_scans`: rounds over all mergeable memory.
    pub full_scans: Option<u64>,
    /// `pages_to_scan` before each sleep.
    pub pages_to_scan: Option<u64>,
    /// `sleep_millisecs`
    pub sleep_millisecs: Option<u64>,
    /// `smart_scan`, since Linux 6.7: ksmd skips pages that did not merge for a while.
    pub smart_scan: Option<u64>,
    /// `advisor_mode`, since Linux 6.8: the advisor that sets `pages_to_scan`.
    pub advisor_mode: Option<String>,
    /// `use_zero_pages`: zeros become the kernel's zero page.
    pub use_zero_pages: Option<u64>,
    /// `general_profit` in bytes, since Linux 6.4; negative when KSM's bookkeeping costs more than merging saves.
    pub general_profit: Option<i64>,
}

/// KSM's account of one process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KsmStat {
    /// `ksm_rmap_items`: pages that ksmd keeps a record of.
    pub ksm_rmap_items: Option<u64>,
    /// `ksm_merging_pages`
    pub ksm_merging_pages: Option<u64>,
    /// `ksm_zero_pages`: merged with the kernel's zero page.
    pub ksm_zero_pages: Option<u64>,
    /// `ksm_merge_any`, since Linux 6.16: the process asked for all its memory to be merged (`prctl`).
    pub ksm_merge_any: Option<bool>,
    /// `ksm_mergeable`, since Linux 6.16: some of its memory may be merged.
    pub ksm_mergeable: Option<bool>,
}

impl Ksm {
    /// Reads the state; `None` on a kernel without KSM.
    pub fn read() -> Option<Self> {
        Self::read_from(Path::new("/sys/kernel/mm/ksm"))
    }

    /// Memory that merging saves, less ksmd's records, in bytes: the kernel's own account, or the same sum where it has
    /// none.
    pub fn net_bytes(&self) -> i64 {
        let signed = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
        let saved = page::pages_to_bytes(self.pages_sharing.saturating_add(self.ksm_zero_pages.unwrap_or(0)));
        let pages = [self.pages_shared, self.pages_sharing, self.pages_unshared, self.pages_volatile];
        let records = pages.into_iter().fold(0, u64::saturating_add).saturating_mul(RECORD_BYTES);
        self.general_profit.unwrap_or_else(|| signed(saved).saturating_sub(signed(records)))
    }

    fn read_from(directory: &Path) -> Option<Self> {
        let text = |name: &str| fs::read_to_string(directory.join(name)).ok();
        let number = |name: &str| text(name)?.trim().parse().ok();
        Some(Self {
            run: number("run")?,
            pages_shared: number("pages_shared")?,
            pages_sharing: number("pages_sharing")?,
            pages_unshared: number("pages_unshared").unwrap_or(0),
            pages_volatile: number("pages_volatile").unwrap_or(0),
            ksm_zero_pages: number("ksm_zero_pages"),
            merge_across_nodes: number("merge_across_nodes"),
            pages_scanned: number("pages_scanned"),
            full_scans: number("full_scans"),
            pages_to_scan: number("pages_to_scan"),
            sleep_millisecs: number("sleep_millisecs"),
            smart_scan: number("smart_scan"),
            advisor_mode: text("advisor_mode").as_deref().and_then(chosen).map(str::to_owned),
            use_zero_pages: number("use_zero_pages"),
            general_profit: text("general_profit").and_then(|t| t.trim().parse().ok()),
        })
    }
}

/// Processor time that ksmd has used since the host started. `None` if it is not found, as in a PID namespace that does
/// not show it.
pub fn ksmd_cpu_time() -> Option<Duration> {
    let is_ksmd = |pid: &u32| {
        let has_name = fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name == "ksmd\n");
        has_name && ProcessStat::read(*pid).is_ok_and(|stat| stat.kernel_thread)
    };
    let pid = pids().ok()?.into_iter().find(is_ksmd)?;
    Some(ThreadCpu::of_process(pid).ok()?.iter().map(|thread| thread.used).sum())
}

impl KsmStat {
    /// Reads the account of process `pid`; all fields are `None` on kernels without `ksm_stat` (before Linux 6.1).
    ///
    /// # Errors
    /// [`Error::is_gone`] and [`Error::is_denied`].
    pub fn of(pid: u32) -> Result<Self> {
        let path = proc_file(pid, "ksm_stat");
        match fs::read_to_string(&path) {
            Ok(text) => Ok(Self::parse(&text)),
            Err(_) if !Path::new("/proc/self/ksm_stat").exists() => Ok(Self::default()),
            Err(e) => Err(Error::file("read", path, e)),
        }
    }

    /// Parses lines `name value`, with or without a colon, and skips unknown names.
    fn parse(text: &str) -> Self {
        let value = |name: &str| {
            let line = text.lines().find(|l| l.split([' ', ':']).next() == Some(name))?;
            line.split_ascii_whitespace().last()
        };
        let number = |name: &str| value(name)?.parse().ok();
        let yes = |name: &str| value(name).map(|v| v == "yes");
        Self {
            ksm_rmap_items: number("ksm_rmap_items"),
            ksm_merging_pages: number("ksm_merging_pages"),
            ksm_zero_pages: number("ksm_zero_pages"),
            ksm_merge_any: yes("ksm_merge_any"),
            ksm_mergeable: yes("ksm_mergeable"),
        }
    }
}

/// The chosen one of several values, which the kernel puts in brackets: `none [scan-time]`.
pub fn chosen(choices: &str) -> Option<&str> {
    Some(choices.split_once('[')?.1.split_once(']')?.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_of_newer_kernels_are_none_on_older_ones() {
        let directory = tempfile::tempdir().unwrap();
        let put = |name: &str, value: &str| fs::write(directory.path().join(name), value).unwrap();
        assert_eq!(Ksm::read_from(directory.path()), None);
        for (name, value) in [("run", "1\n"), ("pages_shared", "554\n"), ("pages_sharing", "22731\n")] {
            put(name, value);
        }
        let old = Ksm { run: 1, pages_shared: 554, pages_sharing: 22_731, ..Ksm::default() };
        assert_eq!(Ksm::read_from(directory.path()), Some(old.clone()));
        put("advisor_mode", "none [scan-time]\n");
        put("general_profit", "-4096\n");
        let new = Ksm::read_from(directory.path()).unwrap();
        assert_eq!((new.advisor_mode.as_deref(), new.general_profit), (Some("scan-time"), Some(-4096)));
        assert_eq!(new.net_bytes(), -4096);
        let records = Ksm { pages_unshared: 1000, pages_volatile: 715, ..old };
        assert_eq!(records.net_bytes(), 22_731 * 4096 - 25_000 * 64);
    }

    #[test]
    fn ksm_stat_tells_whether_process_opted_in() {
        let stat = KsmStat::parse(
            "ksm_rmap_items 12\nksm_zero_pages 0\nksm_merging_pages 7\nksm_process_profit -768\nksm_merge_any: yes\nksm_mergeable: no\n",
        );
        assert_eq!((stat.ksm_rmap_items, stat.ksm_merging_pages), (Some(12), Some(7)));
        assert_eq!((stat.ksm_merge_any, stat.ksm_mergeable), (Some(true), Some(false)));
        let old = KsmStat::parse("ksm_rmap_items 0\nksm_merging_pages 0\n");
        assert_eq!((old.ksm_merge_any, old.ksm_zero_pages), (None, None));
    }

    #[test]
    fn this_kernel_can_be_read() {
        if !Path::new("/sys/kernel/mm/ksm").exists() {
            eprintln!("skipped: this kernel has no KSM");
            return;
        }
        assert!(Ksm::read().is_some_and(|ksm| ksm.run <= 2 && ksm.pages_to_scan.is_some()));
        assert!(KsmStat::of(std::process::id()).unwrap().ksm_rmap_items.is_some());
    }
}
