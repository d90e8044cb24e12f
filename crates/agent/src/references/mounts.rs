//! The file systems of mounts.
//!
//! `fstatfs` asks the file system itself, which may leave that without an answer: one in user space, or one whose server
//! is away. `statmount` asks nobody. It takes the number of a mount, which the kernel never uses again, and knows the
//! mounts that this process sees.
//!
//! Hooks run on threads of the program, and ask for nothing: they go by the mounts that are known. The agent's thread
//! finds out about the others before anything more is folded.

use super::facts;
use super::look::{self, Look};
use crate::lock::Lock;
use std::ffi::CStr;

/// Number of mounts that are remembered. Each file that is opened on another one ends a section that is under way.
const KNOWN: usize = 64;
/// Number of questions that hooks may have open.
const ASKED: usize = 16;

/// A hook's question about a mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Question {
    pub mount: u64,
    /// Whether a file was opened there for direct reads.
    pub direct: bool,
}

/// Fixed in size, because hooks allocate nothing. Unused places have the mount number 0, which no mount has.
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

/// The file system of a mount (`f_type`), if it is known. For hooks.
pub fn known(mount: u64) -> Option<u32> {
    let mounts = MOUNTS.lock();
    mounts.known.iter().take_while(|known| known.0 != 0).find(|known| known.0 == mount).map(|known| known.1)
}

/// Has the agent's thread find out about a mount. For hooks. Says whether there was room.
pub fn ask(question: Question) -> bool {
    if question.mount == 0 {
        return false;
    }
    let mut mounts = MOUNTS.lock();
    let place = mounts.asked.iter_mut().find(|asked| **asked == question || asked.mount == 0);
    place.map(|asked| *asked = question).is_some()
}

/// Takes all questions of hooks.
pub fn asked() -> impl Iterator<Item = Question> {
    let asked = std::mem::replace(&mut MOUNTS.lock().asked, [NOTHING; ASKED]);
    asked.into_iter().filter(|question| question.mount != 0)
}

/// The file system of a mount that this process sees. For the agent's thread.
pub fn seen(mount: u64) -> Option<u32> {
    known(mount).or_else(|| facts::file_system(mount).inspect(|filesystem| learn(mount, *filesystem)))
}

/// The file system of a file, by a look at it and its path. For the agent's thread. `None` also if the path leads to
/// another file by now: nothing may be learned of a mount by another one's file.
///
/// The file system itself is asked where the process does not see the mount. These are the kernel's own mounts (memfd),
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
