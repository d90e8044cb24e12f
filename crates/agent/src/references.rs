//! Checks that everything which may write the member's memory behind the processor's back pins the pages it writes.
//!
//! A fold is safe because the kernel refuses to move a page that may be pinned for DMA. The kernel does not see a plain
//! reference (`get_user_pages`). A page that is the target of such a read in flight would be folded, and the data that
//! the read brings would be lost. So a member is folded only while everything that it has open is known to pin or to
//! copy ([`judge`]).
//!
//! ```text
//!   the program opens something                       the agent, before each batch
//!      | hook: the opened file is judged before          |  survey: judges every open file, unless it
//!      | the program learns its number                   |  did so at this generation
//!      v                                                 v
//!   known: nothing          not known:                 not known: Err(reason), nothing is folded
//!                           generation + 1,               | known
//!                           direct reads: for ever        v move pages out -> check the generation again -> fold
//!                           on a new mount: the survey judges
//! ```
//!
//! *For ever*, because a read that was begun outlives the descriptor (asynchronous I/O, files registered with an
//! `io_uring`). Reads that end with their system call are taken to be over some time after the file was seen last
//! ([`LINGER`]).
//!
//! Only the survey sees files that were opened past the hooks (system calls made without the C library). So the survey
//! is also repeated from time to time while the generation stays.

mod facts;
pub mod files;
pub mod judge;
pub mod look;
mod mounts;
mod rings;
mod tables;

use crate::lock::Lock;
use crate::openings;
pub use crate::openings::number as generation;
use crate::table;
use judge::{Distrusted, Facts, Verdict, filesystem_name};
use mounts::Question;
use std::fmt;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Variable with the names of filesystems that are not trusted to pin, separated by commas.
const NOT_PINNING: &str = "PAGEFOLD_NOT_PINNING";
/// Time after which a system call that was under way when its file was closed is taken to have ended.
const LINGER: Duration = Duration::from_secs(60);

/// Filesystems that are not trusted to pin, as [`Distrusted`] keeps them.
static DISTRUSTED: AtomicU32 = AtomicU32::new(0);
/// First finding of a hook that holds for ever: see [`Sticky`].
static STICKY: AtomicU64 = AtomicU64::new(0);
/// Finding of the last survey that had one, and when that was; without a time if the finding holds for ever.
static SEEN: Lock<Option<(Reason, Option<Instant>)>> = Lock::new(None);

/// A hook's finding, without words: a kind in the upper half, a detail in the lower. 0 is nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Sticky {
    /// Direct reads from this filesystem.
    DirectReads = 1,
    /// `vmsplice`.
    Spliced = 2,
    /// A socket of this family.
    Socket = 3,
    /// `setsockopt(TCP_ULP)`: the kernel decrypts into pages that it holds by plain references (`tls_setup_from_iter`).
    Tls = 4,
}

/// How long a survey's finding holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Holds {
    /// For this survey alone: the survey could not look at a file.
    Once,
    /// While the file is open, and [`LINGER`] longer.
    While,
    /// A read may outlive the descriptor.
    ForEver,
}

/// The reason why a member must not be folded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reason(String);

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Reads which filesystems the operator or a test distrusts. For the constructor.
pub fn init() {
    if let Ok(names) = std::env::var(NOT_PINNING) {
        distrust(&names);
    }
}

/// Trusts none of these filesystems to pin, whose names are separated by commas. Returns whether one of them may not pin.
pub fn distrust(names: &str) -> bool {
    let distrusted = Distrusted::parse(names);
    DISTRUSTED.store(distrusted.0, Ordering::Relaxed);
    distrusted.0 != 0
}

/// Gives a forked child locks of its own. Findings that hold for ever hold in the child, too.
///
/// # Safety
/// The calling thread is the only one, and holds none of them.
pub(crate) unsafe fn begin_anew() {
    // SAFETY: by the caller.
    unsafe { SEEN.begin_anew(None) };
    // SAFETY: by the caller.
    unsafe { mounts::begin_anew() };
}

/// Judges every open file of the process. For the agent's thread.
///
/// # Errors
/// One of them, or something that the process did before, may write memory without pinning it.
pub fn survey() -> Result<(), Reason> {
    if let Some(reason) = said_by_hook() {
        return Err(reason);
    }
    let found = files::worst();
    // Afterwards, because the survey gets to know the mounts of files that are open.
    answer_hooks();
    if let Some(reason) = said_by_hook() {
        return Err(reason);
    }
    take_in(&mut SEEN.lock(), found)
}

/// Records a survey's finding. Returns the reason that holds now, if there is one.
fn take_in(seen: &mut Option<(Reason, Option<Instant>)>, found: Option<(Reason, Holds)>) -> Result<(), Reason> {
    match (&*seen, found) {
        (Some((reason, None)), _) => return Err(reason.clone()),
        (_, Some((reason, Holds::Once))) => return Err(reason),
        (_, Some((reason, holds))) => *seen = Some((reason, (holds == Holds::While).then(Instant::now))),
        (_, None) => {}
    }
    match &*seen {
        Some((reason, when)) if when.is_none_or(|when| when.elapsed() < LINGER) => Err(reason.clone()),
        _ => Ok(()),
    }
}

/// Judges files that hooks could not, because they were opened on mounts that were not known.
fn answer_hooks() {
    for question in mounts::asked() {
        let filesystem = mounts::seen(question.mount);
        let file = Facts { mode: libc::S_IFREG, device: (0, 0), filesystem, flags: libc::O_RDWR | libc::O_DIRECT };
        if question.direct && judge::judge(file, distrusted()) != Verdict::Harmless {
            stick(Sticky::DirectReads, filesystem.unwrap_or(0));
        }
    }
}

fn distrusted() -> Distrusted {
    Distrusted(DISTRUSTED.load(Ordering::Relaxed))
}

/// Changes the generation, because a file was opened that is not known to pin or to copy. Surveys find that file by
/// themselves.
fn stir() {
    openings::count();
}

/// Notes for good a reason that outlives the open file, and changes the generation.
pub fn stick(what: Sticky, detail: u32) {
    let _ = STICKY.compare_exchange(0, (what as u64) << 32 | u64::from(detail), Ordering::SeqCst, Ordering::SeqCst);
    stir();
}

/// A hook's finding in words, for people.
pub fn said_by_hook() -> Option<Reason> {
    let sticky = STICKY.load(Ordering::SeqCst);
    let detail = sticky as u32;
    let text = match sticky >> 32 {
        0 => return None,
        1 => format!(
            "the program has opened a file on {} for direct reads (O_DIRECT), {UNPINNED}",
            filesystem_name(detail)
        ),
        2 => format!("the program has used vmsplice, {UNPINNED}"),
        3 => format!("the program has opened a socket of family {detail}, {UNPINNED}"),
        _ => format!("the program has a socket that the kernel decrypts (TCP_ULP), {UNPINNED}"),
    };
    Some(Reason(text))
}

/// End of all reasons.
const UNPINNED: &str = "which is not known to pin the memory that it reads or writes; nothing can be folded safely";

/// Judges a file on a mount, that the program is about to be given.
pub fn in_hook(file: Facts, mount: u64) {
    match judge::judge(file, distrusted()) {
        Verdict::Harmless => {}
        Verdict::DirectReads => stick(Sticky::DirectReads, file.filesystem.unwrap_or(0)),
        Verdict::ByFilesystem => {
            let direct = file.flags & libc::O_DIRECT != 0;
            if !mounts::ask(Question { mount, direct }) && direct {
                stick(Sticky::DirectReads, 0);
            }
            stir();
        }
        Verdict::ByDevice if judge::is_known_device(file.device, None) => {}
        // The survey judges these, because it knows their names.
        Verdict::PlainReads | Verdict::ByName | Verdict::BySocket => stir(),
        Verdict::ByDevice => {
            stir();
            // Waits for the end of a section that is under way, because the device may pin pages without waiting for
            // absent ones. Later sections find the generation changed before they take a page out.
            drop(table::lock());
        }
    }
}

#[cfg(test)]
mod tests;
