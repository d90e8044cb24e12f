//! Timed work of the worker, every [`TICK`], or every [`REST_TICK`] while nothing waits for it.
//!
//! | step | the worker |
//! |---|---|
//! | leases | begins epochs and frees slots of epochs that have ended (`lease.rs`) |
//! | departed members | forgets those whose leases are all over |
//! | members | cuts off silent ones, stops waiting for late donations, asks for full reports |
//! | turns | halves the times that members' messages have taken (`turns.rs`) |
//! | plan | retries pages, reports a full pool, ends a clearing |
//! | passes | goes on to the next part of the hash space (`index.rs`) |
//! | segments | drops idle ones |
//! | rate | judges a scan rate that follows its yield (`adapt.rs`) |
//! | room | asks for memory for pages that are to become private, also to renew a pool that is spread over too many segments, or has too much waste |

use crate::group::{Clearing, Group};
use crate::lease::DepartedMember;
use crate::member::{Cut, DONATION_TIME, Member};
use crate::pool::{Full, MOST_SEGMENTS};
use crate::room::Asking;
use crate::table::MemberId;
use act::PoolSegment;
use api::control::{Fold, Identity, News};
use rustix::fd::OwnedFd;
use std::rc::Rc;
use std::time::{Duration, Instant};
use wire::ToAgent;

/// Least time between two rounds of timed work: 250 ms.
pub const TICK: Duration = Duration::from_millis(250);
/// Least time between two rounds of timed work while nothing waits for it: 1 s.
const REST_TICK: Duration = Duration::from_secs(1);
/// Time between two attempts to fold pages that are to be tried again: those that the kernel would not move, and those
/// of short-lived contents: 30 s.
const RETRY_TIME: Duration = Duration::from_secs(30);
/// Time for which no new slots are filled after the kernel had no memory for one: 10 s.
const MEMORY_TIME: Duration = Duration::from_secs(10);
/// Least time between two events about a full pool: 60 s.
const TELL_TIME: Duration = Duration::from_secs(60);
/// A segment is dropped when none of its slots has had a hold for this time: 30 s.
const IDLE_TIME: Duration = Duration::from_secs(30);
/// Least length of a pass over a part of the hash space: 30 s.
const PASS_TIME: Duration = Duration::from_secs(30);
/// A pass ends after hardly any pages were reported for this time: 10 s. [`QUIET_PART`] says how many are hardly any.
const QUIET_TIME: Duration = Duration::from_secs(10);
/// If no more pages are reported than this part of the pages that the index may remember, a pass counts as quiet:
/// 1/256.
const QUIET_PART: u64 = 256;
/// Number of segments from which on the pool is to be replaced by a new one: 3/4 of the most that it may have.
const MANY_SEGMENTS: usize = MOST_SEGMENTS * 3 / 4;
/// Least time between two renewals of the pool: 600 s.
const RENEWAL_TIME: Duration = Duration::from_secs(600);

/// When each kind of timed work was last done.
#[derive(Debug)]
pub struct Clock {
    began: Instant,
    last_tick: Instant,
    last_retry: Instant,
    last_renewal: Option<Instant>,
    pass_began: Instant,
    quiet_since: Instant,
    quiet_reported: u64,
    short_until: Option<Instant>,
    told_full: Option<Instant>,
    /// Why no slot could be taken from the pool; `None` if one can be.
    full: Option<Full>,
    /// When the rate of reported pages was last measured, the pages reported until then, and that rate a second.
    pub(crate) rate: (Instant, u64, u64),
}

impl Clock {
    pub(crate) const fn new(now: Instant) -> Self {
        Self {
            began: now,
            last_tick: now,
            last_retry: now,
            last_renewal: None,
            pass_began: now,
            quiet_since: now,
            quiet_reported: 0,
            short_until: None,
            told_full: None,
            full: None,
            rate: (now, 0, 0),
        }
    }

    pub(crate) fn out_of_memory(&mut self, now: Instant) {
        self.short_until = Some(now + MEMORY_TIME);
    }

    pub(crate) fn is_out_of_memory(&self, now: Instant) -> bool {
        self.short_until.is_some_and(|until| now < until)
    }

    /// Whether the pool was full when it was last asked for a slot.
    pub(crate) const fn is_full(&self) -> bool {
        self.full.is_some()
    }

    /// Why no content gets a new slot at the moment; `None` if it can.
    pub(crate) fn no_room(&self, now: Instant) -> Option<String> {
        let short = self.is_out_of_memory(now).then(|| "the host has no memory for the pool".to_owned());
        self.full.as_ref().map(ToString::to_string).or(short)
    }
}

impl Group {
    /// Does the timed work that is due. Does nothing if less than [`TICK`] has passed since a call last did timed work.
    pub fn tick(&mut self, now: Instant) {
        if now.saturating_duration_since(self.clock.last_tick) < TICK {
            return;
        }
        self.clock.last_tick = now;
        self.planner.now = now.saturating_duration_since(self.clock.began).as_secs() as u32;
        self.tick_leases(now);
        self.tick_departed();
        self.tick_members(now);
        self.tick_turns(now);
        self.tick_plan(now);
        self.tick_passes(now);
        self.tick_segments(now);
        self.tick_rate(now);
        self.tell_paces();
        self.tick_room(now);
    }

    /// The time until [`Self::tick`] is to be called again.
    pub fn until_tick(&self, now: Instant) -> Duration {
        let waits = |member: &Member| {
            let is_answering = member.asked.is_some() || !member.folds.is_empty() || member.rests(now);
            !member.is_serving
                || is_answering
                || member.again.due.is_some_and(|due| due <= now)
                || member.leases.is_waiting()
        };
        let is_idle = self.departed.is_empty() && self.clearing.is_none() && matches!(self.asking, Asking::Idle);
        if is_idle && !self.members.values().any(waits) { REST_TICK } else { TICK }
    }

    fn tick_leases(&mut self, now: Instant) {
        let mut trouble = None;
        for member in self.members.values_mut() {
            let rotated = member.leases.rotate(now).and_then(|rotated| {
                let offered = member.leases.offered().filter(|_| rotated);
                let lease =
                    offered.map(|(epoch, lease)| Ok((epoch, rustix::fd::AsFd::as_fd(lease).try_clone_to_owned()?)));
                if let Some((epoch, lease)) = lease.transpose().map_err(|e: std::io::Error| e)? {
                    member.say(&ToAgent::Lease(epoch), Some(Rc::new(lease)));
                }
                member.leases.ended()
            });
            match rotated {
                Ok(slots) => self.planner.give_back(slots),
                Err(e) => trouble = Some(format!("leases of member {}: {e}", member.identity.name)),
            }
        }
        if let Some(trouble) = trouble {
            self.event(trouble);
        }
    }

    fn tick_departed(&mut self) {
        let mut slots = Vec::new();
        // Processes that may still map slots, or whose forked children may.
        let mut alive: Vec<Identity> = Vec::new();
        for departed in &mut self.departed {
            let is_asked = alive.iter().any(|identity| departed.is_of(identity));
            let claims =
                self.members.values().any(|member| departed.is_of(&member.identity) && !member.leases.is_taken());
            if is_asked || claims || !departed.is_over(&mut slots).unwrap_or(false) {
                alive.push(departed.identity.clone());
            }
        }
        let is_over = |departed: &mut DepartedMember| !alive.iter().any(|identity| departed.is_of(identity));
        slots.extend(self.departed.extract_if(.., is_over).flat_map(DepartedMember::into_slots));
        self.planner.give_back(slots);
    }

    fn tick_members(&mut self, now: Instant) {
        let silent: Vec<MemberId> = self.members.values().filter(|m| m.is_silent(now)).map(|m| m.id).collect();
        silent.into_iter().for_each(|id| self.cut(id, &Cut::Silent));
        for member in self.members.values_mut() {
            let late =
                |m: &Member| m.asked.as_ref().is_some_and(|a| now.saturating_duration_since(a.since) > DONATION_TIME);
            let place = self.planner.place(member.id);
            if place.missed {
                member.again.later(now);
            }
            if let Some(asked) = member.asked.as_ref().filter(|_| place.may_donate && late(member)) {
                self.planner.gives_nothing(member.id, &asked.donation);
            }
        }
        self.ask_again(now);
    }

    /// Asks every member that is due for a full report to send one.
    pub(crate) fn ask_again(&mut self, now: Instant) {
        for member in self.members.values_mut() {
            let due = member.again.due.is_some_and(|due| due <= now);
            let may_fold = self.planner.place(member.id).may_fold && self.planner.policy.folds;
            if due && may_fold && member.is_serving && !member.is_stuck() {
                member.again.due = None;
                self.planner.forget_reports(member.id);
                member.say(&ToAgent::Again, None);
            }
        }
    }

    fn tick_plan(&mut self, now: Instant) {
        if now.saturating_duration_since(self.clock.last_retry) >= RETRY_TIME {
            self.clock.last_retry = now;
            self.members.keys().for_each(|id| self.planner.retry_all(*id));
        }
        self.note_full(now);
        let clear = self.members.keys().all(|id| {
            let place = self.planner.place(*id);
            place.mapped + place.sent == 0
        });
        if self.clearing.is_some() && clear {
            self.clearing = None;
            self.event("everything is private; folding begins again");
            self.apply(now);
            self.report_again(now);
        }
    }

    /// Notes that the pool is full, and says so in an event; or that it has room again.
    fn note_full(&mut self, now: Instant) {
        let Some(full) = self.planner.full.take() else {
            self.clock.full.take_if(|full| self.planner.pool.has_room(full));
            return;
        };
        if self.clock.told_full.is_none_or(|told| now.saturating_duration_since(told) >= TELL_TIME) {
            self.clock.told_full = Some(now);
            self.event(format!("nothing new is folded: {full}; see pagefold group show"));
        }
        self.clock.full = Some(full);
    }

    fn reported(&self) -> u64 {
        self.former.reported + self.members.values().map(|member| member.reported).sum::<u64>()
    }

    fn tick_passes(&mut self, now: Instant) {
        let reported = self.reported();
        if now.saturating_duration_since(self.clock.rate.0) >= QUIET_TIME {
            self.clock.rate = (now, reported, reported.saturating_sub(self.clock.rate.1) / QUIET_TIME.as_secs());
        }
        if std::mem::take(&mut self.planner.narrowed) {
            self.event(
                "the index is full: it goes over the hash space in passes; raise index-memory to find duplicates sooner",
            );
        }
        if reported.saturating_sub(self.clock.quiet_reported) > u64::from(self.settings.index_pages) / QUIET_PART {
            (self.clock.quiet_since, self.clock.quiet_reported) = (now, reported);
        }
        let quiet = now.saturating_duration_since(self.clock.quiet_since) >= QUIET_TIME;
        let old = now.saturating_duration_since(self.clock.pass_began) >= PASS_TIME;
        if self.planner.interval() != (0, u64::MAX) && quiet && old && self.planner.policy.folds {
            self.planner.next_pass();
            (self.clock.pass_began, self.clock.quiet_since) = (now, now);
            self.report_again(now);
        }
    }

    fn tick_segments(&mut self, now: Instant) {
        while let Some(number) = self.planner.drop_idle_segment(now, IDLE_TIME) {
            self.proofs.forget(number);
            self.tell(News::Dropped(number), Vec::new());
            // When a member receives another segment with the same number, it closes the dropped segment's file, whose
            // memory is freed then.
            match empty_segment() {
                Ok(file) => {
                    let serving = self.members.values_mut().filter(|member| member.is_serving);
                    serving.for_each(|member| member.say(&ToAgent::Segment(number, 1), Some(Rc::clone(&file))));
                }
                Err(e) => self.event(format!("members keep segment {number}, which nobody needs: {e}")),
            }
        }
    }

    /// Whether the pool is to be replaced by a new one, because it has too many segments or too much waste.
    pub(crate) fn renewal_is_due(&self, now: Instant) -> bool {
        let recent = |last: Instant| now.saturating_duration_since(last) < RENEWAL_TIME;
        let is_spent = self.planner.pool.count() >= MANY_SEGMENTS || self.planner.pool.is_wasteful();
        is_spent && self.settings.fold == Fold::On && !self.clock.last_renewal.is_some_and(recent)
    }

    /// Begins to replace the pool: all members are told to make their folded pages private.
    pub(crate) fn begin_renewal(&mut self, now: Instant) {
        self.clock.last_renewal = Some(now);
        self.clear(Clearing::Renewal);
        self.apply(now);
    }
}

/// A segment's file with one empty slot.
fn empty_segment() -> std::io::Result<Rc<OwnedFd>> {
    Ok(Rc::new(PoolSegment::create("none", 1)?.read_only()?))
}

#[cfg(test)]
mod tests {
    #[test]
    fn empty_segment_is_one_that_agents_take() {
        assert_eq!(act::check(super::empty_segment().unwrap(), act::Role::Segment), Ok(()));
    }
}
