//! What the agent's first thread asks and tells in a program that the agent was put into.

use crate::borrow::borrow;
use crate::enrol::Enrolment;
use crate::leave::{Origin, inherited, restore};
use crate::{channel, gate};
use act::{PROGRAMS, SharedMark};
use agent::fold::Folder;
use agent::follow::{self, Following};
use agent::lock::Lock;
use agent::pool::Pool;
use agent::program::Program;
use agent::section::Section;
use agent::{maps, table};
use host::Pagemap;
use page::PageRange;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use wire::{MemberState, MemberStats};

/// Time without a page becoming anonymous, after which the attempt to leave is begun anew: 5 s.
const LEAVE_TIME: Duration = Duration::from_secs(5);
/// Number of such attempts after which the agent stays: 6. With eager folding, 2.
const LEAVE_TRIES: [u32; 2] = [6, 2];
/// Time between two attempts to make inherited memory anonymous, while no keeper can be reached: 50 ms.
const AGAIN: Duration = Duration::from_millis(50);

static LEASES: OnceLock<Vec<PageRange>> = OnceLock::new();

/// Records the leases that this process has inherited from the member that forked it. To be called before this process
/// has a lease of its own.
pub fn know_leases() {
    let _ = LEASES.set(leases());
}

fn leases() -> Vec<PageRange> {
    let all = maps::mappings(table::everything(), false).unwrap_or_default();
    all.into_iter().filter(|mapping| mapping.lease).map(|mapping| mapping.range).collect()
}

/// Unmaps the inherited leases. To be called when nothing of the pool is mapped any more.
fn drop_inherited_leases() {
    let Some(inherited) = LEASES.get().filter(|inherited| !inherited.is_empty()) else { return };
    for lease in leases().into_iter().filter(|lease| inherited.contains(lease)) {
        // SAFETY: the kernel lists it as a lease, and it was one before this agent had one of its own. The program
        // knows nothing of it.
        drop(unsafe { SharedMark::inherited(lease.start) });
    }
}

/// A program that the agent was put into while it ran.
pub struct Attached {
    enrolment: Lock<Enrolment>,
    is_eager: bool,
}

impl Attached {
    /// For a program whose memory was not looked for yet.
    pub const fn new(enrolment: Enrolment, is_eager: bool) -> Self {
        Self { enrolment: Lock::new(enrolment), is_eager }
    }
}

impl Program for Attached {
    fn discover(&self, section: &Section, before_fold: bool) {
        let mut enrolment = self.enrolment.lock();
        if before_fold {
            enrolment.look_before_fold(section);
        } else {
            enrolment.look(section);
        }
    }

    fn why_nothing_is_mapped(&self) -> (MemberState, String) {
        (MemberState::NothingMapped, "the program has no private anonymous memory that can be followed".into())
    }

    fn is_leaving(&self) -> bool {
        channel::is_leaving()
    }

    fn sleep(&self, time: Duration) {
        std::thread::sleep(time);
    }

    /// Restores the memory as it was before the agent came. Afterwards, only the calling thread of the agent is left.
    /// `false` if the agent stays and goes on with its work, because references to pages in mappings of the pool are
    /// not given up.
    fn leave(&self, all: &mut Result<Folder, String>, (pagemap, _): (&Pagemap, &Pool), _: &mut MemberStats) -> bool {
        let Ok(folder) = all else { return true };
        // The worker has not told this agent of all segments of a pool whose mappings this process has inherited.
        maps::know_named_pools();
        let mut tries = 0..LEAVE_TRIES[usize::from(self.is_eager)];
        if !tries.any(|_| restore(folder, pagemap, LEAVE_TIME, Origin::Folded)) {
            channel::stay();
            // While the agent leaves, `pagefold-attach` does not lead calls to the gate.
            gate::range().inspect(|gate| channel::tell_gate(gate.start));
            return false;
        }
        while !follow::wait_for_keeper() {}
        loop {
            match restore_inherited(folder, pagemap) {
                Ok(true) => break,
                Ok(false) => {}
                // The keeper may be restarting.
                Err(()) => std::thread::sleep(AGAIN),
            }
        }
        drop_inherited_leases();
        let following = Arc::clone(folder.section().following());
        *all = Err(String::new());
        following.retire();
        true
    }
}

/// Makes memory anonymous that this process has inherited from a member, and that is registered with one other
/// userfaultfd. Returns whether there was none left.
fn restore_inherited(folder: &mut Folder, pagemap: &Pagemap) -> Result<bool, ()> {
    let Some(page) = inherited(folder.section().following())? else { return Ok(true) };
    let (lent, claim) = borrow(page).map_err(drop)?;
    let following = Following::start(lent, true, PathBuf::new()).map_err(drop)?;
    following.expect_discards();
    following.publish();
    folder.follow_by(&following);
    while !restore(folder, pagemap, LEAVE_TIME, Origin::Inherited) {}
    while !follow::wait_for_keeper() {}
    following.retire();
    following.wait_for_end();
    // From here on, the other processes that have this userfaultfd open follow the memory.
    drop(claim);
    // Threads that sleep on other memory of this userfaultfd try again, and are answered.
    let _ = following.watch().wake(PROGRAMS);
    Ok(false)
}
