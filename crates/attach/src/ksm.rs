//! Has ksmd merge all memory of a running process, or ends that.
//!
//! The kernel accepts this request only from the process itself: `process_madvise` on another process answers `EINVAL`
//! to `MADV_MERGEABLE` (Linux 6.18). So one thread is borrowed for one system call, `prctl(PR_SET_MEMORY_MERGE)`.
//! Nothing else is put into the process, and nobody stays beside it. Children that it forks have the same setting.
//!
//! If a filter of system calls (seccomp) does not allow the call, the process cannot be merged.

use crate::halt::Halts;
use crate::inject::{borrow_thread, error, give_up};
use crate::program::Program;
use crate::remote::Remote;
use crate::threads;
use crate::waited::Clocks;
use act::seccomp;
use act::trace::Tracee;
use anyhow::{Context, bail, ensure};
use host::{KsmStat, Signals};
use std::time::Duration;

/// The option of `prctl` that has all memory of a process merged.
const MERGE: u64 = libc::PR_SET_MEMORY_MERGE as u64;
/// Longest time for the call: 1 hour. A call that ends merging returns only after all merged pages have become private
/// again.
const PATIENCE: Duration = Duration::from_secs(3600);

/// Whether all memory of a process is merged by ksmd already, as far as the kernel tells.
pub fn is_merged(pid: u32) -> Option<bool> {
    KsmStat::of(pid).ok()?.ksm_merge_any
}

/// The pages of a process that ksmd has merged.
pub fn merged_pages(pid: u32) -> Option<u64> {
    let stat = KsmStat::of(pid).ok()?;
    Some(stat.ksm_merging_pages? + stat.ksm_zero_pages.unwrap_or(0))
}

/// Has ksmd merge all memory of a process if `merge`, and otherwise ends that. Returns how long a thread of it was
/// stopped; zero if nothing had to be changed. `tell`: see [`crate::inject::inject`].
///
/// # Errors
/// The process cannot be traced, its filter of system calls does not allow the call, or the kernel is older than 6.4.
pub fn set(pid: u32, merge: bool, signals: &Signals, tell: impl FnOnce(&anyhow::Error)) -> anyhow::Result<Duration> {
    if is_merged(pid) == Some(merge) {
        return Ok(Duration::ZERO);
    }
    let program = Program::open(pid).context("cannot open its memory")?;
    let mut halts = Halts::new(program, Clocks::default());
    let done = Remote::open(pid).and_then(|remote| {
        let call = |tracee: &Tracee| set_by(pid, tracee, &remote, merge);
        borrow_thread(&mut halts, call).map(|((), stopped)| stopped)
    });
    match done {
        Ok(stopped) => {
            halts.finish(signals);
            Ok(stopped)
        }
        Err(why) => Err(give_up(halts, why, signals, tell)),
    }
}

/// Has a stopped thread make the call of `prctl`.
fn set_by(pid: u32, tracee: &Tracee, remote: &Remote, merge: bool) -> anyhow::Result<()> {
    if threads::is_filtered(pid, tracee.thread()) {
        let filters = tracee.filters().context("its filters of system calls (seccomp) cannot be read")?;
        let call = seccomp::call_with("prctl", libc::SYS_prctl, [Some(MERGE), Some(merge.into()), Some(0)]);
        ensure!(
            filters.iter().all(|filter| seccomp::allows(filter, &call)),
            "it filters its system calls (seccomp), and does not let it call prctl(PR_SET_MEMORY_MERGE)"
        );
    }
    let arguments = [MERGE, merge.into(), 0, 0, 0, 0];
    let answer = remote.call_for(tracee, libc::SYS_prctl, arguments, PATIENCE)?;
    if answer != 0 {
        bail!("the kernel refuses prctl(PR_SET_MEMORY_MERGE), which takes Linux 6.4 with KSM: {}", error(answer));
    }
    Ok(())
}
