//! Setting the knobs of KSM (files in `/sys/kernel/mm/ksm`), and restoring them.

use host::chosen;
use host::{Error, Result};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

const DIR: &str = "/sys/kernel/mm/ksm";
/// Knobs that are saved and restored, in this order: `pages_to_scan` can only be written while no advisor sets it, and
/// `run` comes last.
const KNOBS: [&str; 7] =
    ["pages_to_scan", "sleep_millisecs", "smart_scan", "use_zero_pages", ACROSS_NODES, ADVISOR, "run"];
/// The knob that can only be written while nothing is merged. Kernels without NUMA have none.
const ACROSS_NODES: &str = "merge_across_nodes";
/// The knob that names the advisor, since Linux 6.8.
const ADVISOR: &str = "advisor_mode";
/// Value of `run` that stops ksmd and undoes all merging.
const UNMERGE: &str = "2";

/// Saved settings of KSM: names and values of the knobs that the kernel has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KsmKnobs(pub Vec<(String, String)>);

impl KsmKnobs {
    /// Reads the settings; `None` on a kernel without KSM.
    pub fn read() -> Option<Self> {
        Self::read_from(Path::new(DIR))
    }

    fn read_from(dir: &Path) -> Option<Self> {
        let value = |name: &str| {
            let text = fs::read_to_string(dir.join(name)).ok()?;
            Some(chosen(&text).unwrap_or(text.trim()).to_owned())
        };
        value("run")?;
        Some(Self(KNOBS.iter().filter_map(|name| Some(((*name).to_owned(), value(name)?))).collect()))
    }

    /// Undoes all merging and restores the settings.
    ///
    /// # Errors
    /// The caller is not root.
    pub fn put_back(&self) -> Result<()> {
        self.put_back_in(Path::new(DIR))
    }

    fn put_back_in(&self, dir: &Path) -> Result<()> {
        set(dir, "run", UNMERGE)?;
        self.set_all(dir)
    }

    /// Restores the settings, and leaves merged pages merged. `false`, and nothing is changed, if the saved
    /// `merge_across_nodes` differs: the kernel does not let it change while pages are merged.
    ///
    /// # Errors
    /// The caller is not root.
    pub fn put_back_merged(&self) -> Result<bool> {
        self.put_back_merged_in(Path::new(DIR))
    }

    fn put_back_merged_in(&self, dir: &Path) -> Result<bool> {
        let value = |name: &str| fs::read_to_string(dir.join(name)).map(|text| text.trim().to_owned()).ok();
        let is_other = self.0.iter().any(|(name, before)| name == ACROSS_NODES && value(name).as_ref() != Some(before));
        if is_other && value("pages_shared").is_none_or(|pages| pages != "0") {
            return Ok(false);
        }
        self.set_all(dir)?;
        Ok(true)
    }

    fn set_all(&self, dir: &Path) -> Result<()> {
        if self.0.iter().any(|(name, _)| name == ADVISOR) {
            set(dir, ADVISOR, "none")?;
        }
        self.0.iter().try_for_each(|(name, value)| set(dir, name, value))
    }
}

/// Sets one of the files in `/sys/kernel/mm/ksm`.
///
/// # Errors
/// The caller is not root, the kernel has no such knob, or the knob does not take this value.
pub fn set_ksm(knob: &str, value: &str) -> Result<()> {
    set(Path::new(DIR), knob, value)
}

/// Makes ksmd merge equal pages in all memory of this process (`PR_SET_MEMORY_MERGE`), or ends that. Processes that it
/// starts inherit the setting.
///
/// # Errors
/// The kernel is older than 6.4.
pub fn set_memory_merge(merge: bool) -> io::Result<()> {
    // SAFETY: the call takes numbers alone, and changes no content of memory.
    let answer = unsafe { libc::prctl(libc::PR_SET_MEMORY_MERGE, libc::c_ulong::from(merge), 0_u64, 0_u64, 0_u64) };
    if answer == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Whether ksmd merges equal pages in all memory of this process.
///
/// # Errors
/// The kernel is older than 6.4.
pub fn memory_merge() -> io::Result<bool> {
    // SAFETY: the call takes numbers alone, and changes nothing.
    let answer = unsafe { libc::prctl(libc::PR_GET_MEMORY_MERGE, 0_u64, 0_u64, 0_u64, 0_u64) };
    if answer < 0 { Err(io::Error::last_os_error()) } else { Ok(answer == 1) }
}

fn set(dir: &Path, knob: &str, value: &str) -> Result<()> {
    let path: PathBuf = dir.join(knob);
    // The file is opened without creating it, in case the kernel does not have it.
    let write = fs::File::options().write(true).open(&path).and_then(|mut file| {
        use std::io::Write;
        file.write_all(value.as_bytes())
    });
    write.map_err(|e| Error::file("write", path, e))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merged_pages_stay_unless_they_go_with_another_policy_for_nodes() {
        let dir = tempfile::tempdir().unwrap();
        let put = |name: &str, value: &str| fs::write(dir.path().join(name), value).unwrap();
        let run = || fs::read_to_string(dir.path().join("run")).unwrap();
        [("run", "0\n"), ("merge_across_nodes", "1\n"), ("pages_shared", "0\n")].iter().for_each(|(n, v)| put(n, v));
        let knobs = KsmKnobs::read_from(dir.path()).unwrap();
        put("run", "1");
        put("pages_shared", "7\n");
        assert!(knobs.put_back_merged_in(dir.path()).unwrap() && run() == "0");
        put("run", "1");
        put("merge_across_nodes", "0\n");
        assert!(!knobs.put_back_merged_in(dir.path()).unwrap() && run() == "1");
        put("pages_shared", "0\n");
        assert!(knobs.put_back_merged_in(dir.path()).unwrap() && run() == "0");
        assert_eq!(KsmKnobs::read_from(dir.path()).unwrap(), knobs);
    }

    #[test]
    fn knobs_are_restored_and_run_comes_last() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str| dir.path().join(name);
        assert_eq!(KsmKnobs::read_from(dir.path()), None);
        for (name, value) in [("run", "0\n"), ("pages_to_scan", "100\n"), ("advisor_mode", "[none] scan-time\n")] {
            fs::write(file(name), value).unwrap();
        }
        let knobs = KsmKnobs::read_from(dir.path()).unwrap();
        let names: Vec<_> = knobs.0.iter().map(|(name, value)| format!("{name}={value}")).collect();
        assert_eq!(names, ["pages_to_scan=100", "advisor_mode=none", "run=0"]);
        set(dir.path(), "run", "1").unwrap();
        set(dir.path(), "advisor_mode", "scan-time").unwrap();
        knobs.put_back_in(dir.path()).unwrap();
        assert!(fs::read_to_string(file("advisor_mode")).unwrap().starts_with("none"));
        assert!(fs::read_to_string(file("run")).unwrap().starts_with('0'));
        let error = set(dir.path(), "no_such_knob", "1").unwrap_err();
        assert!(error.is_gone() && !file("no_such_knob").exists(), "{error}");
    }
}
