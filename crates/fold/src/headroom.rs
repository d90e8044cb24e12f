//! Members near the memory limit of their control group.
//!
//! When a page is folded, the kernel charges its member's control group for one page less. When the page is written and
//! so becomes private again, it charges for one page more. So the memory that a control group takes once all of its
//! folded pages were written does not depend on how many were folded. Folding itself takes further memory in that
//! control group: for mappings (VMAs), and for the agent's tables. With little room below the limit, the kernel would
//! kill a process because of this memory alone. So folding may take no more of it than
//!
//! ```text
//!   left = the lesser of  room below the limit - folded pages - tables to come - KEPT
//!                         1/64 of the limit - mappings of folded pages
//! ```
//!
//! The first bound keeps the control group below its limit now. The second is for a member that grows to its limit
//! later. Mappings that folding has made are not given back then: a page that is unfolded stays in a mapping of its
//! own, and the agent joins such mappings only where it gets a huge page. So mappings take only a part of the limit
//! that a member can do without.
//!
//! | left | the members of that control group |
//! |---|---|
//! | some | fold. What the requested runs take is subtracted until the limit is read again |
//! | nothing | fold nothing more, state `no_headroom`. Their agents pause if there is no room below the limit; otherwise they join mappings of written pages |
//! | nothing, and without folding they would be beyond the limit | fold little by little: the kernel would have killed one already |
//!
//! Limits are read when a member's statistics come. With much memory left, they are read again after 2 s at the
//! earliest; without a limit, after 10 s. A limit that cannot be read counts as none. Room in swap does not count: a
//! write fault that finds memory only by swapping is slow.

use crate::group::Group;
use crate::table::MemberId;
use host::Bound;
use page::pages_to_bytes;
use std::path::Path;
use std::time::{Duration, Instant};
use wire::{DONATION_PAGES, FoldRun, Target};

/// Memory that an agent takes for a moment, in bytes: 4 MiB. It is a copy of 2 MiB that the agent makes a huge page of,
/// the donation window, and 1 MiB for everything else. Not all agents of a control group take it at once: for each
/// agent beyond the first, 1/8 is kept.
const KEPT_BYTES: u64 = pages_to_bytes(512 + DONATION_PAGES as u64) + (1 << 20);
/// After nothing was left, folding begins again when the room below the limit is larger by this than what is needed: 1
/// MiB.
const AGAIN_BYTES: u64 = 1 << 20;
/// Kernel memory of a run, in bytes: 672, for two mappings (VMAs) and what the write fault of a folded page needs.
/// 5,120 runs of one page took 663 bytes each, and nothing more when the pages were written.
const RUN_BYTES: u64 = 672;
/// Part of a memory limit that the kernel memory of mappings of folded pages may take: 1/64. If runs have 11 pages on
/// average, this is enough to fold as much memory as the limit.
const MAPPINGS_PART: u64 = 64;
/// After mappings took all of their part of the limit, folding begins again when 1/8 of that part is free.
const MAPPINGS_AGAIN_PART: u64 = 8;
/// Memory that an agent's tables may come to take for each page of its process, in bytes: 32. In four guests they took
/// 19.
const TABLE_BYTES: u64 = 32;
/// Memory that folding may take between two readings of the limit, in bytes, if the members would be beyond the limit
/// without folding; and how long nothing must have been left before: 1 MiB, 5 s. Agents report a moment late which
/// folded pages were written.
const BEYOND: (u64, Duration) = (1 << 20, Duration::from_secs(5));
/// Time after which a count that stays the same is a new one: 60 s. Agents count again within that time.
const COUNTED: Duration = Duration::from_secs(60);
/// If more memory than this is left, in bytes, the limit is read again after this time at the earliest: 64 MiB, 2 s.
const MUCH: (u64, Duration) = (64 << 20, Duration::from_secs(2));
/// Time after which limits are read again if no limit applies to the member: 10 s.
const UNBOUND_EVERY: Duration = Duration::from_secs(10);

/// Memory that a member's control group leaves to folding.
#[derive(Debug, Default)]
pub struct Headroom {
    /// The path of the member's control group, read from the kernel.
    group: Option<String>,
    next_look: Option<Instant>,
    /// Memory that folding may still take in the control group, in bytes; `None`: no memory limit applies.
    left: Option<u64>,
    /// Since when nothing is left; `None` if something is.
    short_since: Option<Instant>,
    /// Number of mappings in the member's statistics, and since when they have said so.
    counted: Option<(u64, Instant)>,
    /// Number of runs with mappings that the member was asked to fold since the last count in its statistics, and
    /// between the two last counts: it may have counted before it folded these.
    unseen_runs: [u64; 2],
    /// Least number of mappings that the process is known to have had, without mappings of folded pages; `None` before
    /// the first count.
    own_mappings: Option<u64>,
    /// Why nothing more of the member is folded; `None` if it is folded.
    pub refusal: Option<String>,
    /// Whether its agent is told to pause, because the search for pages takes memory.
    pub rests: bool,
}

/// Memory of members in a control group, in bytes.
#[derive(Clone, Copy, Debug, Default)]
struct Account {
    members: u64,
    /// Folded pages, pages of unanswered requests to fold, and pages of zeros that were discarded.
    folded: u64,
    /// The part of `folded` that members were asked to fold and have not answered for.
    asked: u64,
    /// Memory that folding has taken for mappings and agents' tables, by the members' latest statistics.
    taken: u64,
    to_come: u64,
    /// Kernel memory of the mappings (VMAs) that folding has made.
    mappings: u64,
    /// Kernel memory of mappings for requested folds that members' statistics may not show yet.
    unseen: u64,
}

impl Account {
    fn kept(&self) -> u64 {
        KEPT_BYTES / 8 * (self.members + 7)
    }

    /// Memory that folding may still take below this limit for each member: by the room below it, and by the part of it
    /// that mappings may take. `was_short`: nothing was left when the limit was read before.
    fn left(&self, bound: &Bound, was_short: bool) -> [u64; 2] {
        let kept = self.kept() + if was_short { AGAIN_BYTES } else { 0 };
        let room = bound.room.saturating_sub(self.folded.saturating_add(self.to_come).saturating_add(kept));
        let most = bound.limit / MAPPINGS_PART;
        let most = most - if was_short { most / MAPPINGS_AGAIN_PART } else { 0 };
        [room, most.saturating_sub(self.mappings.saturating_add(self.unseen))].map(|left| left / self.members.max(1))
    }

    /// Why nothing is left below this limit, as text for the operator.
    fn refusal(&self, bound: &Bound) -> String {
        let (group, [room, folded, mappings]) =
            (bound.group.display(), [bound.room, self.folded, self.mappings].map(|bytes| bytes >> 20));
        if self.left(bound, true)[0] == 0 {
            return format!(
                "the memory limit of control group {group} leaves {room} MiB, and {folded} MiB are folded there: if all of that were \
                 written, too little would be left for the memory that folding takes, and the kernel could end a process"
            );
        }
        format!(
            "folding has taken {mappings} MiB of control group {group} for mappings, which are not given back: more than \
             1/{MAPPINGS_PART} of its memory limit could end a process that grows to that"
        )
    }

    /// Whether the members would be beyond the limit without folding, even if folding takes twice as much as is known.
    fn is_beyond(&self, room: u64) -> bool {
        self.folded.saturating_sub(room) > self.taken.saturating_mul(2).saturating_add(self.kept())
    }
}

impl Headroom {
    /// Whether the member may be asked to fold.
    pub const fn is_left(&self) -> bool {
        !matches!(self.left, Some(0))
    }

    /// Subtracts the memory of the mappings that these runs need if all of them are folded. Pages of zeros need no
    /// mapping.
    pub fn spend(&mut self, runs: &[FoldRun]) {
        let mapped = runs.iter().filter(|run| run.target != Target::Zero).count() as u64;
        self.left = self.left.map(|left| left.saturating_sub(mapped * RUN_BYTES));
        self.unseen_runs[0] += mapped;
    }

    /// Notes the number of mappings in a member's statistics. Agents count them seldom, and repeat the last count until
    /// then. Another number is a new count, which has the mappings of all runs that were folded before.
    fn note_count(&mut self, vmas: u64, now: Instant) {
        let is_same = |(last, since): (u64, Instant)| last == vmas && now.saturating_duration_since(since) < COUNTED;
        if !self.counted.is_some_and(is_same) {
            (self.counted, self.unseen_runs) = (Some((vmas, now)), [0, self.unseen_runs[0]]);
        }
    }

    /// Notes how many mappings the process has (`all`), and how many pages are folded or were written since they were
    /// folded (`pages`). Each of these pages accounts for two mappings at most.
    fn note_mappings(&mut self, all: u64, pages: u64) {
        let least = all.saturating_sub(pages.saturating_mul(2));
        self.own_mappings = Some(self.own_mappings.map_or(least, |own| own.min(all)));
    }

    /// Kernel memory, in bytes, of the mappings that folding has made, if the process has `all` mappings.
    fn mappings_bytes(&self, all: u64) -> u64 {
        all.saturating_sub(self.own_mappings.unwrap_or(all)).saturating_mul(RUN_BYTES / 2)
    }

    /// Decides by the limit that leaves least, and the account of its control group. `least` is `None` if no limit
    /// applies.
    fn judge(&mut self, least: Option<&(Account, Bound)>, now: Instant) {
        let left = least.map(|(account, bound)| account.left(bound, self.short_since.is_some()));
        self.left = left.map(|[room, mappings]| room.min(mappings));
        self.next_look = match left {
            None => Some(now + UNBOUND_EVERY),
            // Until the next reading, requests are subtracted ([`Self::spend`]).
            Some([room, _]) => (room > MUCH.0).then_some(now + MUCH.1),
        };
        let Some((account, bound)) = least.filter(|_| !self.is_left()) else {
            (self.short_since, self.refusal, self.rests) = (None, None, false);
            return;
        };
        // Pages of unanswered requests count twice: as folded, and as the member's private memory. So nothing is
        // decided before the members have answered, and before their statistics show the mappings.
        if account.asked > 0 || account.unseen > 0 {
            return;
        }
        let since = *self.short_since.get_or_insert(now);
        if account.is_beyond(bound.room) && now.saturating_duration_since(since) >= BEYOND.1 {
            (self.left, self.refusal, self.rests) = (Some(BEYOND.0), None, false);
            return;
        }
        (self.refusal, self.rests) = (Some(account.refusal(bound)), account.left(bound, true)[0] == 0);
    }
}

impl Group {
    /// Reads the limits of all members' control groups, because the members are about to be told to fold.
    pub(crate) fn look_before_folding(&mut self, now: Instant) {
        for id in self.members.keys().copied().collect::<Vec<_>>() {
            self.members.entry(id).and_modify(|member| member.headroom.next_look = None);
            self.look_at_headroom(id, now);
        }
    }

    /// Reads the limits of a member's control group, if it is time for this. Returns whether the refusal to fold this
    /// member, or the pause of its agent, has begun or ended, so that the member must be sent new settings.
    pub(crate) fn look_at_headroom(&mut self, id: MemberId, now: Instant) -> bool {
        let (Some(limits), Some(member)) = (&self.limits, self.members.get_mut(&id)) else { return false };
        let headroom = &mut member.headroom;
        if headroom.next_look.is_some_and(|next| now < next) {
            return false;
        }
        headroom.group = limits.group_of(member.identity.pid);
        if member.stats.vmas > 0 {
            let mapped = self.planner.place(id).mapped;
            headroom.note_mappings(member.stats.vmas, mapped.saturating_add(member.stats.broken_pages));
        }
        let bounds = headroom.group.as_deref().map(|group| limits.bounds(group)).unwrap_or_default();
        let (was_short, was) = (headroom.short_since.is_some(), (headroom.refusal.is_some(), headroom.rests));
        let accounts = bounds.into_iter().map(|bound| (self.account(&bound.group), bound));
        let least = accounts.min_by_key(|(account, bound)| account.left(bound, was_short).into_iter().min());
        let Some(member) = self.members.get_mut(&id) else { return false };
        member.headroom.note_count(member.stats.vmas, now);
        member.headroom.judge(least.as_ref(), now);
        (member.headroom.refusal.is_some(), member.headroom.rests) != was
    }

    /// The account of a control group: the memory of all members in it and in the control groups below it.
    fn account(&mut self, bound: &Path) -> Account {
        let mut all = Account::default();
        for (id, member) in &self.members {
            if !member.headroom.group.as_ref().is_some_and(|group| Path::new(group).starts_with(bound)) {
                continue;
            }
            let (stats, place) = (&member.stats, self.planner.place(*id));
            // Members choose these numbers, so no sum of them may overflow.
            let add = |to: &mut u64, bytes: u64| *to = to.saturating_add(bytes);
            let bytes = |pages: u64| pages_to_bytes(pages.min(u64::MAX >> 16));
            // Pages that were folded and not touched since are in no page table.
            let frames = if member.resident_pages == u64::MAX { 0 } else { member.resident_pages + place.mapped };
            all.members += 1;
            add(&mut all.folded, bytes((place.mapped + place.sent).saturating_add(stats.zero_pages)));
            add(&mut all.asked, bytes(place.sent));
            add(&mut all.taken, stats.agent_bytes.saturating_add(stats.vmas.saturating_mul(RUN_BYTES / 2)));
            add(&mut all.mappings, member.headroom.mappings_bytes(stats.vmas));
            let unseen: u64 = member.headroom.unseen_runs.iter().sum();
            add(&mut all.unseen, unseen.saturating_mul(RUN_BYTES));
            add(&mut all.to_come, frames.saturating_mul(TABLE_BYTES).saturating_sub(stats.agent_bytes));
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const M: u64 = 1 << 20;

    /// A member of which 100 MiB are folded. Folding has taken 3 MiB, 2 of them for mappings, and will take 1 MiB more.
    const ONE: Account =
        Account { members: 1, folded: 100 * M, asked: 0, taken: 3 * M, to_come: M, mappings: 2 * M, unseen: 0 };

    fn bound(room: u64, limit: u64) -> Bound {
        Bound { group: "/t".into(), limit, room }
    }

    #[test]
    fn folding_gets_no_memory_that_its_broken_pages_need() {
        let all = 101 * M + KEPT_BYTES;
        let left = |account: &Account, room, was_short| account.left(&bound(room, 4096 * M), was_short)[0];
        assert_eq!([all - M, all, all + 7 * M].map(|room| left(&ONE, room, false)), [0, 0, 7 * M]);
        assert_eq!([M, 3 * M].map(|more| left(&ONE, all + more, true)), [0, 2 * M], "it begins again with more");
        let two = Account { members: 2, ..ONE };
        assert_eq!(left(&two, all + KEPT_BYTES / 8 + 6 * M, false), 3 * M, "each has a part");
    }

    #[test]
    fn mappings_take_a_64th_of_the_limit_at_most() {
        let left = |limit, was_short| ONE.left(&bound(1024 * M, limit), was_short)[1];
        assert_eq!([128 * M, 192 * M].map(|limit| left(limit, false)), [0, M]);
        assert_eq!([128 * M, 192 * M].map(|limit| left(limit, true)), [0, M - 3 * M / 8], "it begins again with less");
        let mut headroom = Headroom::default();
        headroom.judge(Some(&(ONE, bound(1024 * M, 128 * M))), Instant::now());
        let why = headroom.refusal.clone().unwrap_or_default();
        assert!(why.contains("has taken 2 MiB of control group /t for mappings") && why.contains("1/64"), "{why}");
        assert!(!headroom.rests, "its agent gives mappings back");
        headroom.judge(Some(&(ONE, bound(1024 * M, 256 * M))), Instant::now());
        assert_eq!((headroom.left, headroom.refusal), (Some(3 * M / 2), None));
        let soon = Account { unseen: 2 * M, ..ONE };
        let mut headroom = Headroom::default();
        headroom.judge(Some(&(soon, bound(1024 * M, 256 * M))), Instant::now());
        assert_eq!((headroom.left, headroom.refusal), (Some(0), None), "statistics do not show them yet, and decide");
    }

    #[test]
    fn mappings_of_the_program_itself_do_not_count() {
        let mut headroom = Headroom::default();
        assert_eq!(headroom.mappings_bytes(500), 0, "nothing is known");
        headroom.note_mappings(500, 0);
        headroom.note_mappings(900, 200);
        assert_eq!(headroom.mappings_bytes(900), 400 * RUN_BYTES / 2);
        headroom.note_mappings(450, 0);
        assert_eq!(headroom.mappings_bytes(450), 0);
        // A worker that was started again finds folded pages.
        let mut again = Headroom::default();
        again.note_mappings(900, 200);
        assert_eq!(again.mappings_bytes(900), 400 * RUN_BYTES / 2);
        again.note_mappings(u64::MAX, u64::MAX);
    }

    #[test]
    fn members_that_are_beyond_their_limit_without_folding_go_on_after_a_while() {
        let (mut headroom, now) = (Headroom::default(), Instant::now());
        let mut look = |room, account: Account, after| {
            headroom.judge(Some(&(account, bound(room, 4096 * M))), now + after);
            (
                headroom.left,
                headroom.refusal.as_ref().map(|why| why.contains("group /t leaves 80 MiB, and 100 MiB are")),
            )
        };
        let (room, all) = (80 * M, 101 * M + KEPT_BYTES);
        assert_eq!(look(room, Account { asked: 1, ..ONE }, Duration::ZERO), (Some(0), None), "its answers decide");
        assert_eq!(look(room, ONE, Duration::ZERO), (Some(0), Some(true)), "it may not have told of all breaks");
        assert_eq!(look(room, ONE, BEYOND.1), (Some(BEYOND.0), None));
        assert_eq!(look(all, ONE, BEYOND.1), (Some(0), Some(false)), "folding takes what is missing");
        assert_eq!(look(all + 2 * M, ONE, BEYOND.1), (Some(M), None), "the limit was raised");
        headroom.judge(None, now);
        assert!(headroom.is_left() && headroom.left.is_none());
    }

    #[test]
    fn requests_spend_what_is_left_and_zeros_do_not() {
        let run = |target| FoldRun { start: page::HostVirt(4096), pages: 9, target };
        let slot = run(Target::Slot(page::PoolSlot::new(0, 1).unwrap()));
        let mut headroom = Headroom { left: Some(2 * RUN_BYTES - 1), ..Headroom::default() };
        let mut left = |runs: &[FoldRun]| {
            headroom.spend(runs);
            headroom.left
        };
        assert_eq!([left(&[run(Target::Zero)]), left(&[slot])], [Some(2 * RUN_BYTES - 1), Some(RUN_BYTES - 1)]);
        assert_eq!(left(&[slot]), Some(0));
    }

    #[test]
    fn runs_are_unseen_until_mappings_were_counted_twice() {
        let (mut headroom, now) = (Headroom::default(), Instant::now());
        let mut unseen = |seconds, vmas, more| {
            headroom.unseen_runs[0] += more;
            headroom.note_count(vmas, now + Duration::from_secs(seconds));
            headroom.unseen_runs.iter().sum::<u64>()
        };
        // The same number is repeated, whatever was asked for since.
        assert_eq!([unseen(0, 100, 5), unseen(1, 100, 7), unseen(9, 100, 0)], [5, 12, 12]);
        assert_eq!([unseen(10, 120, 1), unseen(11, 120, 0), unseen(20, 121, 0)], [8, 8, 0]);
        assert_eq!([unseen(21, 121, 3), unseen(79, 121, 0), unseen(80, 121, 0), unseen(140, 121, 0)], [3, 3, 3, 0]);
    }
}
