//! The file systems of mounts.
//!
//! `fstatfs` asks the file system itself, which may never answer: a file system in user space, or one whose server
//! cannot be reached. `statmount` asks only the kernel. It takes the unique number of a mount, which the kernel never
//! uses again, and answers for mounts that this process sees.
//!
//! Hooks run on threads of the program, and ask nothing: they use what is known about mounts. The agent's thread finds
//! out about the other mounts before anything more is folded.

use super::facts;
use super::look::{self, Look};
use crate::lock::Lock;
use std::ffi::CStr;

/// Number of mounts that are remembered. Each file that is opened on another mount changes the generation, so that a
/// section under way folds nothing.
const KNOWN: usize = 64;
/// Most questions of hooks that wait for the agent's thread.
const ASKED: usize = 16;

/// A hook's question about a mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Question {
    pub mount: u64,
    /// Whether a file was opened there for direct reads.
    pub direct: bool,
}

/// What is known of mounts, and the questions. Fixed in size, because hooks allocate nothing. Unused elements have the
/// mount number 0, which no mount has.
struct Mounts {
    known: [(u64, u32); KNOWN],
    asked: [Question; ASKED],
}

const NOTHING: Question = Question { mount: 0, direct: false };
static MOUNTS: Lock<Mounts> = Lock::new(Mounts { known: [(0, 0); KNOWN], asked: [NOTHING; ASKED] });

/// See [`super::begin_anew`].
///
/// # Safety
/// As there.
pub unsafe fn begin_anew() {
    // SAFETY: by the caller.
    unsafe { MOUNTS.begin_anew(Mounts { known: [(0, 0); KNOWN], asked: [NOTHING; ASKED] }) };
}

/// The type of a mount's file system (`f_type`); `None` if it is not known. For hooks.
pub fn known(mount: u64) -> Option<u32> {
    let mounts = MOUNTS.lock();
    mounts.known.iter().take_while(|known| known.0 != 0).find(|known| known.0 == mount).map(|known| known.1)
}

/// Leaves a question about a mount to the agent's thread. For hooks. Returns whether there was room for the question.
pub fn ask(question: Question) -> bool {
    if question.mount == 0 {
        return false;
    }
    let mut mounts = MOUNTS.lock();
    let place = mounts.asked.iter_mut().find(|asked| **asked == question || asked.mount == 0);
    place.map(|asked| *asked = question).is_some()
}

/// Takes all questions that hooks have left.
pub fn asked() -> impl Iterator<Item = Question> {
    let asked = std::mem::replace(&mut MOUNTS.lock().asked, [NOTHING; ASKED]);
    asked.into_iter().filter(|question| question.mount != 0)
}

/// The type of the file system of a mount; `None` if this process does not see the mount. For the agent's thread.
pub fn seen(mount: u64) -> Option<u32> {
    known(mount).or_else(|| facts::file_system(mount).inspect(|filesystem| learn(mount, *filesystem)))
}

/// The type of a file's file system, by an earlier look at the file and its path. For the agent's thread. `None` also
/// if the path leads to another file by now, which may be on another mount.
///
/// If the process does not see the mount, the file system itself is asked. Such mounts are the kernel's own (memfd),
/// and those of other mount namespaces.
pub fn filesystem(look: Look, path: &CStr) -> Option<u32> {
    seen(look.mount).or_else(|| {
        let (file, _) = look::keep(path).ok().filter(|(_, kept)| *kept == look)?;
        let filesystem = rustix::fs::fstatfs(file).ok()?.f_type as u32;
        learn(look.mount, filesystem);
        Some(filesystem)
    })
}

fn learn(mount: u64, filesystem: u32) {
    let mut mounts = MOUNTS.lock();
    let place = mounts.known.iter_mut().find(|known| known.0 == mount || known.0 == 0);
    place.into_iter().for_each(|known| *known = (mount, filesystem));
}
