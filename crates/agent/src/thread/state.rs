//! What the worker is told about the member's state: counts, and the reasons why memory is not folded.

use super::{Agent, STATS_SOON, Session, follow_forks};
use crate::cpu_time::cpu_time;
use crate::fold::{Folder, orphaned_pages};
use crate::program::Program;
use crate::{arena, give_way, table};
use host::Pagemap;
use page::PageRange;
use rustix::time::ClockId;
use std::io;
use std::time::{Duration, Instant};
use wire::{FoldMode, MemberState, Pace};

/// End of a message to people. Its beginning tells how the program was seen to change its mappings.
const BY_ITSELF: &str = "by a system call of its own, past the C library, and may do it again at any moment: nothing more of it is folded; \
    what is folded stays so, and its slots are held until it ends";

/// The reason given when memory is not folded because no prover of the service has the right to have forks reported.
const UNFOLLOWED: &str = "forked children of the program would get this memory and could not be followed: \
    that takes a service that runs as root (its prover); memory advised MADV_DONTFORK is folded";

/// The reason given when memory is not folded because it is locked.
const LOCKED: &str = "locked memory (mlock, mem-lock=on of QEMU) is not folded: \
    its pages were promised to stay, and a folded one is copied when it is written";

/// The reason given when memory is not folded because of its NUMA policy.
const BOUND: &str = "memory with a NUMA policy of its own (mbind, host-nodes= of QEMU) is not folded: \
    what takes its place could not have that policy";

/// The reason given when no memory is enrolled.
const NOTHING_ADVISED: &str = "the program has advised no memory to be mergeable (madvise MADV_MERGEABLE)";

impl Agent {
    /// Tells the worker that the program changes mappings in a way that bypasses the hooks. From then on, no mapping is
    /// replaced and no slot released.
    pub(super) fn say_why_it_rests(&mut self, session: &mut Session, how: &str) -> io::Result<()> {
        let counts = table::lock().counts();
        session.told.notice(counts, false);
        if self.stats.state != MemberState::LostTrack {
            session.told.again_within(STATS_SOON);
        }
        if Instant::now() < session.told.due {
            return Ok(());
        }
        let stats = &mut self.stats;
        (stats.enrolled_pages, stats.folded_pages, stats.broken_pages) =
            (counts.enrolled, counts.folded + counts.at_home, counts.broken);
        (stats.state, stats.detail) = (MemberState::LostTrack, format!("the program has {how} {BY_ITSELF}"));
        session.tell(stats)
    }

    /// A message for people about memory that maps a pool without a worker: how much there is, and when it is folded
    /// again. `None` if there is none.
    fn orphans(&mut self) -> Option<String> {
        let pages = if self.has_orphans { orphaned_pages(&self.pagemap).ok()? } else { 0 };
        self.has_orphans = pages > 0;
        self.has_orphans.then(|| {
            format!(
                "{:.1} MiB still map a pool whose service and worker ended, and count as not folded: each page is folded again once it \
                 rests and another page of the group holds the same",
                page::pages_to_bytes(pages) as f64 / f64::from(1 << 20)
            )
        })
    }

    pub(super) fn say_how_it_goes(&mut self, session: &mut Session, pace: Pace) -> io::Result<()> {
        let (counts, folds, (yielded, shut), (open, unfollowed)) = {
            let table = table::lock();
            let known = table.known(table::everything());
            let yielded = known.iter().any(|(_, traits)| traits.is_yielded());
            let asked = || known.iter().map(|(_, traits)| traits).filter(|traits| traits.asked);
            let locked = asked().any(|traits| traits.is_locked()).then_some(LOCKED);
            let shut = locked.or_else(|| asked().any(|traits| traits.has_policy()).then_some(BOUND));
            (table.counts(), table.folds(), (yielded, shut), table.open_and_unfollowed())
        };
        let (orphans, stats) = (self.orphans(), &mut self.stats);
        stats.enrolled_pages = counts.enrolled;
        stats.folded_pages = counts.folded + counts.at_home;
        stats.zero_pages = counts.zeroed;
        stats.broken_pages = counts.broken;
        (stats.done.folds, stats.done.short_folds) = (folds.0 - self.folds_before.0, folds.1 - self.folds_before.1);
        let follower = self.folder.as_ref().map_or(Duration::ZERO, |folder| folder.section().following().cpu_time());
        stats.done.agent_cpu_us = (cpu_time(ClockId::ThreadCPUTime) + follower - self.cpu_before).as_micros() as u64;
        stats.agent_bytes = touched_bytes(&self.pagemap, arena::handed_out());
        let (state, detail) = match &mut self.folder {
            Err(why) => (MemberState::NoMove, why.clone()),
            Ok(folder) => {
                if self.asked.all_anonymous || counts.enrolled > 0 {
                    folder.survey();
                }
                folder.tidy();
                give_way::take_back(folder.section());
                if unfollowed > 0 && counts.folded + counts.broken == 0 {
                    follow_forks(self.asked, folder, &mut self.silence);
                }
                stats.vmas = folder.vmas().count();
                let forks = self.forks.rests(Instant::now()).map(|left| match self.forks.are_too_many() {
                    true => many_children(left),
                    false => often_forks(left),
                });
                let others = forks.as_deref().or(shut).or(orphans.as_deref());
                let left_out = if unfollowed > 0 { Some(UNFOLLOWED) } else { others };
                let refusal = self.asked.refusal().filter(|_| pace.fold == FoldMode::On);
                refusal.map(|why| (MemberState::NoMove, why)).unwrap_or_else(|| {
                    let enrolled = (counts.enrolled, self.asked.all_anonymous.then_some(self.program));
                    state_of(folder, pace, (session.unfolded, yielded), enrolled, (open, left_out))
                })
            }
        };
        if state != MemberState::Off || pace.fold != FoldMode::Unfold {
            stats.detail = detail;
        }
        stats.state = state;
        session.tell(stats)
    }
}

/// Memory of those pages of a range that were touched. If the kernel does not tell, all pages count.
fn touched_bytes(pagemap: &Pagemap, range: PageRange) -> u64 {
    let touched = pagemap.present_ranges(range.start, range.end());
    page::pages_to_bytes(touched.map_or(range.pages, |parts| parts.iter().map(|part| part.pages).sum()))
}

/// A message for people: why a program that forks often is not folded.
fn often_forks(left: Duration) -> String {
    format!(
        "the program forks so often that its children's copies of mappings took more time than folding may: the shortest \
         runs are private again, and nothing more is folded for {} s",
        left.as_secs() + 1
    )
}

/// A message for people: why a program with many children is not folded.
fn many_children(left: Duration) -> String {
    format!(
        "as many of the program's forked children live as are followed for one program (512, or half of RLIMIT_NOFILE), or for all of \
         its user's: its memory is private again, and nothing more is folded for {} s",
        left.as_secs() + 1
    )
}

fn state_of(
    folder: &Folder,
    pace: Pace,
    (unfolded, yielded): (bool, bool),
    (enrolled, all_of): (u64, Option<&dyn Program>),
    (open, left_out): (u64, Option<&str>),
) -> (MemberState, String) {
    let plain = |state| (state, String::new());
    if let Some(reason) = folder.unpinned() {
        return (MemberState::Unpinned, reason.to_string());
    }
    match pace.fold {
        FoldMode::Unfold if unfolded => plain(MemberState::Unfolded),
        FoldMode::Unfold | FoldMode::Off => plain(MemberState::Off),
        FoldMode::On if yielded => {
            (MemberState::Yielded, "the program uses a userfaultfd of its own on its memory".to_owned())
        }
        FoldMode::On if enrolled == 0 => all_of
            .map_or_else(|| (MemberState::NothingEnrolled, NOTHING_ADVISED.to_owned()), Program::why_nothing_is_mapped),
        FoldMode::On if open == 0 && left_out.is_some() => {
            (MemberState::NotFoldable, left_out.unwrap_or_default().to_owned())
        }
        FoldMode::On if folder.vmas().are_spent() => (
            MemberState::NoVma,
            format!(
                "{} mappings; folding adds none from {} on, see vm.max_map_count",
                folder.vmas().count(),
                folder.vmas().most()
            ),
        ),
        FoldMode::On => (MemberState::Folding, left_out.unwrap_or_default().to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use page::PAGE_BYTES;

    #[test]
    fn memory_that_was_handed_out_and_never_touched_costs_nothing() {
        let pagemap = Pagemap::open(std::process::id()).unwrap();
        let stack = arena::map(16 * PAGE_BYTES).unwrap();
        assert_eq!(touched_bytes(&pagemap, stack), 0);
        for page in [3, 12] {
            // SAFETY: memory that was just given away to this test.
            unsafe { (stack.start.add_pages(page).0 as *mut u8).write_volatile(1) };
        }
        assert_eq!(touched_bytes(&pagemap, stack), 2 * PAGE_BYTES as u64);
    }
}
