//! Programs that become members while they run, and cease to be.

use crate::rig::Side;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Time that a program runs before it is attached: 0.3 s. Most are busy starting then.
const AFTER: Duration = Duration::from_millis(300);
/// Time for the program to be executed by its starter, and time for all members to be detached.
const PATIENCE: Duration = Duration::from_secs(120);
/// The reason why a program cannot be attached while it looks after its memory by a userfaultfd. A piece of memory has room for one.
pub const OWN_USERFAULTFD: &str = "a userfaultfd looks after some of its memory";
/// Time between two looks.
const AGAIN: Duration = Duration::from_millis(50);

/// Reasons for which programs could not be attached.
#[derive(Clone, Debug, Default)]
pub struct Refused(Arc<Mutex<Vec<String>>>);

impl Refused {
    fn add(&self, why: String) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(why);
    }

    /// Forgets what was refused to a program for this reason. Returns whether anything was.
    pub fn forgive(&self, program: &str, reason: &str) -> bool {
        let is_forgiven = |why: &String| why.starts_with(&format!("{program}: ")) && why.contains(reason);
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let before = all.len();
        all.retain(|why| !is_forgiven(why));
        all.len() < before
    }

    /// All of them.
    pub fn reasons(&self) -> Vec<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Has `attach` make a member of a process soon after it runs `program`. One that has ended by then need not be one.
pub fn soon(mut attach: Command, pid: u32, program: &str, refused: &Refused) {
    let name = Path::new(program).file_name().and_then(|name| name.to_str()).unwrap_or(program).to_owned();
    let (refused, end) = (refused.clone(), Instant::now() + PATIENCE);
    std::thread::spawn(move || {
        // A script is run by another program: that is one, too.
        let is_set_up =
            |pid| ["pagefold", "setpriv", "setsid", "env"].iter().all(|by| host::runs_program(pid, by) != Some(true));
        while !is_set_up(pid) && Instant::now() < end {
            std::thread::sleep(AGAIN);
        }
        std::thread::sleep(AFTER);
        let Output { status, stderr, .. } = attach.output().expect("run pagefold");
        if !status.success() && runs(pid) {
            refused.add(format!("{name}: {}", String::from_utf8_lossy(&stderr).trim()));
        }
    });
}

/// Whether a process has not ended.
fn runs(pid: u32) -> bool {
    host::ProcessId::of(pid).is_ok_and(|process| process.is_alive())
}

impl Side<'_> {
    /// Detaches all members while they run, and asserts that nothing of the pool is left in any. Nothing happens where programs are
    /// not attached.
    pub fn let_go(&self) {
        if !self.is_attached {
            return;
        }
        let end = Instant::now() + PATIENCE;
        let mut seen = Vec::new();
        loop {
            let shown = self.shown();
            let members = shown["members"].as_array().expect("members");
            let pid = |member: &serde_json::Value| u32::try_from(member["pid"].as_u64()?).ok();
            // This is a second old at most: it may name some that have left.
            let is_left = |pid: &u32| runs(*pid) && !seen.contains(pid);
            let pids: Vec<u32> = members.iter().filter_map(pid).filter(is_left).collect();
            if pids.is_empty() {
                break;
            }
            for pid in pids {
                let Output { status, stderr, .. } = self.pagefold(&["detach", &pid.to_string(), "--wait", "120"]);
                let errors = String::from_utf8_lossy(&stderr);
                // A server may end a child of its at any time.
                assert!(status.success() || !runs(pid), "process {pid} is not detached: {errors}");
                seen.push(pid);
            }
            assert!(Instant::now() < end, "there are ever more members: {seen:?}");
        }
        for pid in seen {
            let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
            assert!(!maps.contains("pagefold"), "process {pid} is detached: {maps}");
        }
    }
}
