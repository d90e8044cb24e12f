//! Checks that everything that may write the member's memory other than through its page tables pins the pages it
//! writes.
//!
//! A fold is safe because the kernel refuses to move a page that may be pinned for DMA. It does not refuse a page of
//! which someone holds a plain reference (`get_user_pages`). If such a page were folded while a device still reads data
//! into it, the data would be lost. So a member is folded only while all files that it has open are known to pin or to
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
//! *For ever*, because a read may go on after the descriptor was closed (asynchronous I/O, files registered with an
//! `io_uring`). Reads that end with their system call are assumed to be over some time after the file was last seen
//! open ([`LINGER`]).
//!
//! Files that were opened in a way that bypasses the hooks (system calls made without the C library) are seen by the
//! survey alone. So the survey is also repeated from time to time while the generation stays.

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
/// Time after a file was last seen open, after which all system calls on it are assumed to have ended: 60 s.
const LINGER: Duration = Duration::from_secs(60);

/// Filesystems that are not trusted to pin, as the bits of [`Distrusted`].
static DISTRUSTED: AtomicU32 = AtomicU32::new(0);
/// The first finding of a hook that holds for ever: a [`Sticky`] in the upper half, a detail in the lower; 0 for none.
static STICKY: AtomicU64 = AtomicU64::new(0);
/// The finding of the last survey that found something, and when it was made; without a time if the finding holds for
/// ever.
static SEEN: Lock<Option<(Reason, Option<Instant>)>> = Lock::new(None);

/// The kind of a hook's finding. Its detail is the number of a file system or of a socket's family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Sticky {
    /// The program has opened a file of this filesystem for direct reads.
    DirectReads = 1,
    /// The program has called `vmsplice`.
    Spliced = 2,
    /// The program has made a socket of this family.
    Socket = 3,
    /// The program has called `setsockopt(TCP_ULP)`: the kernel decrypts into pages that it holds by plain references
    /// (`tls_setup_from_iter`).
    Tls = 4,
}

/// How long a survey's finding holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Holds {
    /// For this survey alone: a file could not be examined.
    Once,
    /// While the file is open, and for [`LINGER`] after that.
    While,
    /// For ever: a read may go on after the descriptor was closed.
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

/// Reads which filesystems the operator or a test distrusts. Called by the library's constructor.
pub fn init() {
    if let Ok(names) = std::env::var(NOT_PINNING) {
        distrust(&names);
    }
}

/// From here on, trusts none of these filesystems to pin. Their names are separated by commas. Returns whether any of
/// the names means a filesystem that is otherwise trusted.
pub fn distrust(names: &str) -> bool {
    let distrusted = Distrusted::parse(names);
    DISTRUSTED.store(distrusted.0, Ordering::Relaxed);
    distrusted.0 != 0
}

/// Gives a forked child locks of its own. Findings that hold for ever hold in the child, too.
///
/// # Safety
/// The calling thread is the only one, and holds none of these locks.
pub(crate) unsafe fn begin_anew() {
    // SAFETY: by the caller.
    unsafe { SEEN.begin_anew(None) };
    // SAFETY: by the caller.
    unsafe { mounts::begin_anew() };
}

/// Judges every open file of the process. For the agent's thread.
///
/// # Errors
/// An open file, or something that the process did before, may write memory without pinning it.
pub fn survey() -> Result<(), Reason> {
    if let Some(reason) = said_by_hook() {
        return Err(reason);
    }
    let found = files::worst();
    // This is done after the survey, which has found out about the mounts of open files.
    answer_hooks();
    if let Some(reason) = said_by_hook() {
        return Err(reason);
    }
    take_in(&mut SEEN.lock(), found)
}

/// Records a survey's finding. The error is the reason that holds now, if there is one.
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

/// Judges files that hooks could not judge, because their mounts were not known.
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

/// Changes the generation, because a file was opened that is not known to pin or to copy. The next survey finds that
/// file by itself.
fn stir() {
    openings::count();
}

/// Notes for good a reason that may last longer than the file is open, and changes the generation.
pub fn stick(what: Sticky, detail: u32) {
    let _ = STICKY.compare_exchange(0, (what as u64) << 32 | u64::from(detail), Ordering::SeqCst, Ordering::SeqCst);
    stir();
}

/// The hook's finding that holds for ever, in words for people; `None` if there is none.
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

/// The end of all such messages.
const UNPINNED: &str = "which is not known to pin the memory that it reads or writes; nothing can be folded safely";

/// Judges a file that the program is about to be given. `mount` is the number of the file's mount.
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
