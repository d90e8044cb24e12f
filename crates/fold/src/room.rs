//! Memory for pages that are to become private.
//!
//! Nothing is made private before the supervisor has promised memory for it. The worker says how much each member
//! needs, and passes on what it was promised ([`ToAgent::Room`]).
//!
//! ```text
//!   idle --- pages are to become private ---> asked ---------------> refused
//!    ^                                        |   ^  ^                  |
//!    |                               promised |   |  +-- after 5 s -----+
//!    |                                        v   |
//!    +------------- all is private -------- promised      asks again when all of it is used, for what is left after 2 s,
//!                                                     and when its time is over
//! ```
//!
//! Without a supervisor nobody answers, and the worker waits. Where memory is short:
//!
//! | pages become private because | then |
//! |---|---|
//! | the group is set to `unfold` | each member makes as many private as was promised for it |
//! | members are to share nothing | the same, and nothing is folded meanwhile |
//! | the pool is to be made anew | the pool stays as it is, and folding goes on, until there is room for all. A renewal that is not done while the promise stands is given up |

use crate::group::{Clearing, Group};
use crate::member::Member;
use crate::table::MemberId;
use api::control::{Fold, MemberRoom, Needs, News, Room};
use page::pages_to_bytes;
use std::time::{Duration, Instant};
use wire::{FoldMode, MemberState, ToAgent};

/// Time after which the worker asks its supervisor for memory again when it was refused: 5 s.
const REFUSED_TIME: Duration = Duration::from_secs(5);
/// Time after a promise from which on the worker asks for memory for the pages that are still not private: 2 s.
const MORE_TIME: Duration = Duration::from_secs(2);
/// Time after which the worker asks its supervisor for memory again, if no answer has come: 10 s.
const ANSWER_TIME: Duration = Duration::from_secs(10);
/// Most pages in one request for memory that are not folded ones: 256 MiB. These are zeros, and pages that were written
/// since they were folded; the worker has their number from its members alone.
const OTHER_PAGES: u64 = 1 << 16;

/// The state of the worker's request to its supervisor for memory.
#[derive(Debug, Default)]
pub enum Asking {
    /// The worker wants nothing.
    #[default]
    Idle,
    /// The worker has asked for memory for `pages` pages.
    Asked { pages: u64, since: Instant },
    /// The worker was promised memory. The promise is used up once the members need memory for `left` pages or fewer.
    Promised { asked: u64, left: u64, since: Instant, until: Instant },
    /// The worker was refused, and asks again at the time `again`.
    Refused { why: String, again: Instant },
}

impl Asking {
    /// Why the supervisor refused memory, so that folded pages cannot be made private; `None` if it has not refused.
    pub fn refusal(&self) -> Option<&str> {
        match self {
            Self::Refused { why, .. } => Some(why),
            Self::Idle | Self::Asked { .. } | Self::Promised { .. } => None,
        }
    }
}

impl Group {
    /// Asks the supervisor for memory for pages that are to become private, if it is time to ask.
    pub(crate) fn tick_room(&mut self, now: Instant) {
        let needs = self.needs(now);
        let pages: u64 = needs.iter().map(|(_, _, pages)| pages).sum();
        let is_due = match &self.asking {
            Asking::Idle => pages > 0,
            Asking::Asked { since, .. } => pages == 0 || now.saturating_duration_since(*since) >= ANSWER_TIME,
            Asking::Promised { until, .. } if *until <= now => return self.lapsed(now),
            Asking::Promised { asked, left, since, .. } => {
                pages <= *left || pages > *asked || pages < *asked && now.saturating_duration_since(*since) >= MORE_TIME
            }
            Asking::Refused { again, .. } => pages == 0 || *again <= now,
        };
        if is_due {
            let needs = self.ask_for(&needs, now);
            self.tell(News::Needs(needs), Vec::new());
        }
    }

    /// The request for memory to a new supervisor, which does not know what an earlier one promised; `None` if no
    /// memory is wanted.
    pub(crate) fn ask_anew(&mut self, now: Instant) -> Option<Needs> {
        let needs = self.needs(now);
        (!matches!(self.asking, Asking::Idle)).then(|| self.ask_for(&needs, now))
    }

    fn ask_for(&mut self, needs: &[(MemberId, u32, u64)], now: Instant) -> Needs {
        let pages = needs.iter().map(|(_, _, pages)| pages).sum();
        self.asking = if pages == 0 { Asking::Idle } else { Asking::Asked { pages, since: now } };
        let room = |(_, pid, pages): &(MemberId, u32, u64)| MemberRoom { pid: *pid, bytes: pages_to_bytes(*pages) };
        Needs { members: needs.iter().map(room).collect(), whole: !self.unfolds() }
    }

    /// Whether members are told to make their pages private, as far as memory is promised.
    fn unfolds(&self) -> bool {
        self.clearing.is_some() || self.settings.fold == Fold::Unfold
    }

    /// The pages of each member that are to become private, or would be if the pool was replaced by a new one. With the
    /// member's id and pid.
    fn needs(&mut self, now: Instant) -> Vec<(MemberId, u32, u64)> {
        let (unfolds, mut others) = (self.settings.fold == Fold::Unfold, OTHER_PAGES);
        if !self.unfolds() && !self.renewal_is_due(now) {
            return Vec::new();
        }
        let mut needs = Vec::new();
        for member in self.members.values().filter(|member| can_unfold(member)) {
            let place = self.planner.place(member.id);
            let stats = &member.stats;
            let unfolded = !unfolds || stats.state == MemberState::Unfolded;
            let more = if unfolded { 0 } else { stats.zero_pages.saturating_add(stats.broken_pages).min(others) };
            others -= more;
            let pages = place.mapped + place.sent + more;
            if pages > 0 {
                needs.push((member.id, member.identity.pid, pages));
            }
        }
        needs
    }

    /// Handles the supervisor's answer: passes promised memory on to members, or notes the refusal.
    pub(crate) fn answered(&mut self, room: Room, now: Instant) {
        let Asking::Asked { pages: asked, .. } = self.asking else { return };
        match room {
            Room::Promised { members, seconds } => {
                if !self.unfolds() {
                    if !self.renewal_is_due(now) {
                        return;
                    }
                    self.begin_renewal(now);
                }
                let pages = |room: &MemberRoom| room.bytes / page::PAGE_BYTES as u64;
                let left = asked.saturating_sub(members.iter().map(pages).sum());
                self.told_refusal = None;
                self.asking = Asking::Promised { asked, left, since: now, until: now + Duration::from_secs(seconds) };
                self.give_room(|pid| members.iter().find(|room| room.pid == pid).map_or(0, pages));
            }
            Room::Refused(why) => {
                self.give_room(|_| 0);
                let why = format!("{}: {why}", self.purpose());
                self.asking = Asking::Refused { why, again: now + REFUSED_TIME };
                self.tell_refusal();
            }
        }
    }

    /// Logs a refusal, once for each reason to unfold.
    fn tell_refusal(&mut self) {
        let purpose = Some(self.purpose());
        if self.told_refusal != purpose
            && let Some(why) = self.asking.refusal().map(|why| format!("waits for room: {why}"))
        {
            self.told_refusal = purpose;
            self.event(why);
        }
    }

    const fn purpose(&self) -> &'static str {
        match self.clearing {
            Some(Clearing::Separation) => "members are to share nothing, and nothing is folded meanwhile",
            None if matches!(self.settings.fold, Fold::Unfold) => "everything is to be unfolded",
            Some(Clearing::Renewal) | None => "too much of the pool cannot be used again, and it is to be made anew",
        }
    }

    /// Ends a promise of memory whose time is over. A renewal of the pool that was under way is given up.
    fn lapsed(&mut self, now: Instant) {
        self.asking = Asking::Idle;
        self.give_room(|_| 0);
        if self.clearing == Some(Clearing::Renewal) {
            self.clearing = None;
            self.event("the pool could not be made anew in the time for which there was room; folding goes on");
            self.apply(now);
        }
    }

    /// Tells members how many pages they may make private.
    fn give_room(&mut self, pages: impl Fn(u32) -> u64) {
        let unfolds = |member: &&mut Member| member.told.is_some_and(|pace| pace.fold == FoldMode::Unfold);
        for member in self.members.values_mut().filter(unfolds) {
            member.say(&ToAgent::Room(pages(member.identity.pid)), None);
        }
    }
}

/// Whether a member can make its pages private: an agent that has lost track of its mappings cannot.
const fn can_unfold(member: &Member) -> bool {
    !matches!(member.stats.state, MemberState::LostTrack)
}
