//! The agent as one object that `pagefold-attach` puts into a running process. The object is a whole program with a C
//! library and an allocator of its own. It runs on a thread that `pagefold-attach` made, and needs no library of the
//! process, in whichever language the process is written.
//!
//! ```text
//!   the object's C library starts, on a stack of its own, as in a new process
//!      v
//!   run: settings from the environment that the stack holds; the channel is descriptor 0
//!      |  folds, and follows what the program does by the kernel's messages and list (`enrol`, `follow`, `channel`)
//!      v  told to leave
//!   all as it was before (`leave`); the thread waits until the other side has it unmap the object, and end
//! ```
//!
//! The object changes nothing that belongs to the whole process: no signal's handler and no program break. It starts no
//! other program. All signals are blocked on its threads. It has a C library of its own, so its thread-local data,
//! `errno` and streams are not the program's.

mod borrow;
mod channel;
mod enrol;
mod gate;
mod leave;
mod policies;
mod program;
#[cfg(test)]
#[path = "../../agent/src/scarce.rs"]
#[expect(dead_code, reason = "tests of the core use the rest")]
mod scarce;
#[cfg(test)]
#[path = "../../agent/src/testing.rs"]
#[expect(dead_code, reason = "tests of the core use the rest")]
mod testing;

use crate::channel::Attach;
use crate::enrol::Enrolment;
use crate::program::Attached;
use agent::thread::{self, Asked, Files};
use agent::{arena, world};
#[cfg(test)]
use agent::{follow, maps, raw, references, section, table, witness};
use page::{HostVirt, PAGE_BYTES, PageRange};
use rustix::fd::{FromRawFd, OwnedFd};
use std::arch::asm;
use std::env;
use std::panic::catch_unwind;
use std::path::PathBuf;
use std::sync::OnceLock;

/// Variable with the path of the socket to connect to.
const SOCKET: &str = "PAGEFOLD_SOCKET";
/// Variable with the addresses at which the object lies, in hexadecimal: `START-END`.
const OBJECT: &str = "PAGEFOLD_OBJECT";
/// Variable that enrols all private anonymous memory.
const ALL: &str = "PAGEFOLD_ALL";
/// Variable with the number of mappings (VMAs) of the process at which folding stops adding mappings.
const VMA_BUDGET: &str = "PAGEFOLD_VMA_BUDGET";
/// Variable with the address of a gate that this process has inherited from its parent, in hexadecimal.
const GATE: &str = "PAGEFOLD_GATE";
/// Variable that makes the agent fold every page that has rested, even if it may soon be written again; for tests.
const EAGER: &str = "PAGEFOLD_EAGER";

/// Variable that is set if this thread shares its root and working directory with the program (`CLONE_FS`).
const SHARED: &str = "PAGEFOLD_SHARED_DIRECTORIES";

static ASKED: OnceLock<Asked> = OnceLock::new();
static PROGRAM: OnceLock<Attached> = OnceLock::new();

/// Runs the agent of this process until the agent is told to leave. Ends the thread.
pub fn run() -> ! {
    // Folded pages do not need this thread. If a bug ends it, nothing more is folded.
    let _ = catch_unwind(|| {
        world::enter(&Attach);
        std::panic::set_hook(Box::new(|_| {}));
        world::join();
        // A `pagefold-attach` that takes the place of a killed one finds this thread by its name.
        // SAFETY: names the calling thread.
        unsafe { libc::prctl(libc::PR_SET_NAME, c"pagefold".as_ptr()) };
        // SAFETY: the thread was started with this descriptor open in a table of its own, and nobody else uses it.
        let channel = unsafe { OwnedFd::from_raw_fd(0) };
        let Ok(pagemap) = channel::open(channel.into()) else { return };
        if env::var_os(SHARED).is_none() {
            // SAFETY: the thread was made without `CLONE_FS`, so this changes its own working directory alone. At `/`,
            // it keeps no other file system from being unmounted.
            unsafe { libc::chdir(c"/".as_ptr()) };
        }
        let Some((asked, object)) = asked() else { return };
        let asked = ASKED.get_or_init(|| asked);
        channel::know(object, asked.all_anonymous);
        program::know_leases();
        let enrolment = Enrolment::new(asked.all_anonymous, object);
        let program = PROGRAM.get_or_init(|| Attached::new(enrolment, asked.eager));
        let inherited = env::var(GATE).ok().and_then(|at| u64::from_str_radix(&at, 16).ok()).map(HostVirt);
        // Without a gate, `mremap` goes to the kernel, which may refuse it.
        if let Ok(gate) = gate::open(inherited) {
            channel::tell_gate(gate.start);
        }
        if thread::run(asked, Files::with(pagemap, asked), false, program).is_ok() {
            gate::close();
            channel::left([Some(arena::range()), gate::range()].into_iter().flatten().collect());
            // `pagefold-attach` makes this thread unmap everything, and end.
            channel::wait_for_end()
        }
    });
    loop {
        // SAFETY: ends this thread alone, on which nothing runs any more.
        unsafe { libc::syscall(libc::SYS_exit, 0) };
    }
}

/// The settings, and the addresses of the object; `None` if they are missing, or the object was not loaded as it must
/// be.
fn asked() -> Option<(Asked, PageRange)> {
    let object = env::var(OBJECT).ok()?;
    let (start, end) = object.split_once('-')?;
    let [start, end] = [start, end].map(|text| u64::from_str_radix(text, 16).ok());
    let object = range(start?, end?);
    let asked = Asked {
        socket: PathBuf::from(env::var_os(SOCKET)?),
        all_anonymous: env::var_os(ALL).is_some(),
        most_vmas: env::var(VMA_BUDGET).ok().and_then(|most| most.parse().ok()),
        compare_fingerprints: false,
        children_after: None,
        eager: env::var_os(EAGER).is_some(),
        kernel: host::Kernel::this().release,
    };
    // If the thread-local data lies outside the object, the kernel has joined its mapping with one of the program's.
    (object.start.0..object.end().0).contains(&thread_pointer()).then_some((asked, object))
}

const fn range(start: u64, end: u64) -> PageRange {
    PageRange { start: HostVirt(start), pages: (end - start) / PAGE_BYTES as u64 }
}

fn thread_pointer() -> u64 {
    let pointer: u64;
    // SAFETY: the first word of thread-local data is its own address on x86-64.
    unsafe { asm!("mov {}, fs:0", out(reg) pointer, options(nostack, preserves_flags, readonly)) };
    pointer
}
