//! Workers whose supervisor has gone without ending them. They run on, so that the next supervisor can adopt them, and
//! are ended if none comes.

use act::keep_files_from_children;
use api::place::Place;
use cli::{note, say};
use host::ProcessId;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::Duration;

/// Time without a supervisor after which workers are ended: 30 s.
const ORPHANED: Duration = Duration::from_secs(30);

/// Starts a process that ends the workers at `place` in half a minute ([`end_orphans`]).
pub fn end_orphans_later(place: &Place) {
    keep_files_from_children();
    let started = Command::new(cli::OWN_PROGRAM)
        .arg0("pagefoldd")
        .args(["--end-orphans", "--dir"])
        .arg(place.dir())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn();
    if let Err(e) = started {
        note!("nobody will end the workers if no supervisor follows: {e}");
    }
}

/// Waits half a minute, and then ends the workers at `place`, unless a supervisor has taken over.
///
/// # Errors
/// The directory cannot be read.
pub fn end_orphans(place: &Place) -> anyhow::Result<()> {
    let _ = rustix::process::setsid();
    std::thread::sleep(ORPHANED);
    // The lock is free only where no supervisor runs.
    let Some(_lock) = place.lock()? else { return Ok(()) };
    for group in place.workers()? {
        let path = place.worker_socket(&group);
        let worker = host::Seqpacket::connect(&path).ok().and_then(|s| ProcessId::of(s.peer().ok()?.pid).ok());
        if worker.is_some_and(|worker| worker.terminate()) {
            say!("pagefold: group {group}: no supervisor has followed; the worker is ended");
        }
        let _ = std::fs::remove_file(&path);
    }
    Ok(())
}
