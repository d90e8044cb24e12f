//! A lab for the tests of real guests, and commands inside.

use lab::{Cache, Guest, Image, Lab, Output, Spec};
use std::fs;
use std::path::Path;
use std::time::Duration;

/// Time-out of a command inside that should end at once: 30 s.
pub const SOON: Duration = Duration::from_secs(30);

/// A lab of a test's own. Dropping it ends its guests, also when the test fails.
pub struct TestLab {
    pub lab: Lab,
    _dir: tempfile::TempDir,
}

impl TestLab {
    pub fn new() -> Self {
        let dir = tempfile::Builder::new().prefix("lab").tempdir_in("/tmp").expect("a temporary directory");
        Self { lab: Lab::open(&dir.path().join("l")).expect("open the lab"), _dir: dir }
    }

    /// Brings up guests of one group. Its name contains this process's pid, so other tests' guests have other names.
    pub fn up(&self, image: Image, guests: usize, change: impl FnOnce(&mut Spec)) -> lab::Result<Vec<Guest>> {
        let mut spec = Spec { guests, groups: vec![group()], ..Spec::new(image) };
        change(&mut spec);
        let cache = Cache::open(&lab::cache_dir().expect("a cache directory")).expect("open the cache");
        self.lab.up(&spec, &cache, &|_| {})
    }
}

impl Drop for TestLab {
    fn drop(&mut self) {
        if let Err(error) = self.lab.down() {
            eprintln!("a lab is left behind: {error}");
        }
    }
}

/// The group of the guests of this test program.
pub fn group() -> String {
    format!("t{}", std::process::id())
}

/// The reason why this host cannot run real guests; `None` if it can.
pub fn skipped(programs: &[&str]) -> Option<String> {
    let missing = programs.iter().find(|program| {
        !["/usr/bin", "/usr/sbin", "/bin", "/sbin"].iter().any(|dir| Path::new(dir).join(program).exists())
    });
    let is_root = fs::metadata("/proc/self").is_ok_and(|meta| std::os::unix::fs::MetadataExt::uid(&meta) == 0);
    match (missing, is_root) {
        (Some(program), _) => Some(format!("skipped: no program {program}")),
        (None, false) => Some("skipped: not root".into()),
        (None, true) => None,
    }
}

/// Runs a shell script inside.
pub fn sh(guest: &Guest, script: &str) -> Output {
    guest.exec(&["sh", "-c", script], SOON).expect("the guest answers")
}

/// Standard output of a shell script inside, which must succeed.
pub fn text(guest: &Guest, script: &str) -> String {
    let output = sh(guest, script);
    assert_eq!(output.status, 0, "{script}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text").trim().to_owned()
}

/// Processes in whose command line a text occurs, without those that have ended.
pub fn processes_with(needle: &str) -> Vec<u32> {
    let pids = fs::read_dir("/proc").expect("list /proc").filter_map(|entry| {
        let name = entry.ok()?.file_name();
        name.to_str()?.parse::<u32>().ok()
    });
    let mentions = |pid: &u32| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains(needle)
    };
    pids.filter(mentions).filter(|pid| *pid != std::process::id()).collect()
}
