//! The parts of the agent's thread that differ by the way in which the agent came into its program. It was loaded with it, or put into it
//! while it ran.

#[cfg(target_env = "gnu")]
mod loaded {
    use crate::fold::Folder;
    use crate::section::Section;
    use host::Pagemap;

    pub use crate::inherit::compare as compare_child;
    pub use crate::resign::{be_told_to_leave, give_up_all, is_asked as is_leaving, sleep};

    /// Stands for the search for memory in a process without hooks. With hooks, there is none.
    #[derive(Debug)]
    pub enum Enrolment {}

    impl Enrolment {
        /// Finds nothing.
        pub const fn look(&mut self, _: &Section) {}

        /// Finds nothing.
        pub const fn look_before_fold(&mut self, _: &Section) {}
    }

    /// The library stays in a process that it was loaded into.
    pub const fn leave(_: &mut Result<Folder, String>, _: &Pagemap, _: bool) -> bool {
        true
    }
}

#[cfg(target_env = "gnu")]
pub use loaded::*;

#[cfg(not(target_env = "gnu"))]
mod attached {
    use crate::fold::Folder;
    use crate::follow::{self, Following};
    use crate::leave::{Origin, inherited, restore};
    use crate::pool::Pool;
    use crate::{gate, keeper, maps, table, world};
    use act::{PROGRAMS, SharedMark, Userfault};
    use host::Pagemap;
    use page::PageRange;
    use std::path::PathBuf;
    use std::sync::{Arc, OnceLock};
    use std::time::Duration;
    use wire::MemberStats;

    pub use crate::enrol::Enrolment;
    pub use crate::world::{is_leaving, sleep};

    /// Time without a page that could be made private, after which the agent looks anew: 5 s.
    const LEAVE_TIME: Duration = Duration::from_secs(5);
    /// Number of such times after which the agent stays: 6. With eager folding, 2.
    const LEAVE_TRIES: [u32; 2] = [6, 2];
    /// Time between two attempts at inherited memory: 50 ms.
    const AGAIN: Duration = Duration::from_millis(50);

    static LEASES: OnceLock<Vec<PageRange>> = OnceLock::new();

    /// Records the leases that this process has inherited from a member that forked it. To be called before this
    /// process has a lease of its own.
    pub fn know_leases() {
        let _ = LEASES.set(leases());
    }

    fn leases() -> Vec<PageRange> {
        let all = maps::mappings(table::everything(), false).unwrap_or_default();
        all.into_iter().filter(|mapping| mapping.lease).map(|mapping| mapping.range).collect()
    }

    /// To be called when nothing of the pool is mapped any more.
    fn drop_inherited_leases() {
        let Some(inherited) = LEASES.get().filter(|inherited| !inherited.is_empty()) else { return };
        for lease in leases().into_iter().filter(|lease| inherited.contains(lease)) {
            // SAFETY: the kernel lists it as a lease, and it was one before this agent had one of its own. The program knows
            // nothing of it.
            drop(unsafe { SharedMark::inherited(lease.start) });
        }
    }

    /// The program beside it tells an agent without hooks to leave, and no worker does.
    pub const fn be_told_to_leave() {}

    /// Everything is made anonymous while the agent leaves.
    pub const fn give_up_all(_: &mut Folder, _: (&Pagemap, &Pool), _: &mut MemberStats) -> bool {
        true
    }

    /// Makes everything as it was before the agent came. Nothing of the agent's runs afterwards but the calling thread. False if
    /// the agent stays, and goes on with its work: something holds pages that map the pool, and does not let them go.
    pub fn leave(all: &mut Result<Folder, String>, pagemap: &Pagemap, is_eager: bool) -> bool {
        let Ok(folder) = all else { return true };
        // The worker has not told this agent of all segments of a pool whose mappings this process has inherited.
        maps::know_named_pools();
        let mut tries = 0..LEAVE_TRIES[usize::from(is_eager)];
        if !tries.any(|_| restore(folder, pagemap, LEAVE_TIME, Origin::Folded)) {
            world::stay();
            // While the agent leaves, the other side leads no calls there.
            gate::range().inspect(|gate| world::tell_gate(gate.start));
            return false;
        }
        while !follow::wait_for_keeper() {}
        loop {
            match restore_inherited(folder, pagemap) {
                Ok(true) => break,
                Ok(false) => {}
                // The keeper may be starting again.
                Err(()) => std::thread::sleep(AGAIN),
            }
        }
        drop_inherited_leases();
        let following = Arc::clone(folder.section().following());
        *all = Err(String::new());
        following.retire();
        true
    }

    /// Makes private what another follower looks after, because this process has inherited it from a member. Says whether nothing of
    /// that is left.
    fn restore_inherited(folder: &mut Folder, pagemap: &Pagemap) -> Result<bool, ()> {
        let Some(page) = inherited(folder.section().following())? else { return Ok(true) };
        let (lent, claim) = keeper::borrow(page).map_err(drop)?;
        let following = Following::start(lent, true, PathBuf::new()).map_err(drop)?;
        following.expect_discards();
        following.publish();
        folder.follow_by(&following);
        while !restore(folder, pagemap, LEAVE_TIME, Origin::Inherited) {}
        while !follow::wait_for_keeper() {}
        following.retire();
        following.wait_for_end();
        // From here on, the others that have this userfaultfd open follow the child.
        drop(claim);
        // Threads that sleep on other memory try again, and are answered.
        let _ = following.watch().wake(PROGRAMS);
        Ok(false)
    }

    /// An agent that was put into a process begins in none of its forked children.
    #[expect(clippy::unnecessary_wraps, reason = "in place of what can fail")]
    pub const fn compare_child(_: Option<&Userfault>) -> Result<(), ()> {
        Ok(())
    }
}

#[cfg(not(target_env = "gnu"))]
pub use attached::*;
