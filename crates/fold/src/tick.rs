//! What time brings: leases that end, eras that begin, ghosts that are over, members that keep us waiting, passes that
//! are done, segments that nobody needs.

use crate::control::{Identity, News};
use crate::group::{Clearing, Group};
use crate::lease::Ghost;
use crate::member::{Cut, DONATION_TIME, Member};
use crate::pool::MOST_SEGMENTS;
use crate::table::MemberId;
use rustix::fd::OwnedFd;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::rc::Rc;
use std::time::{Duration, Instant};
use wire::ToAgent;

/// How often.
pub const TICK: Duration = Duration::from_millis(250);
/// Pages that the kernel would not move are tried again so often.
const RETRY_TIME: Duration = Duration::from_secs(30);
/// When the pool could not grow, it is tried again after so long.
const MEMORY_TIME: Duration = Duration::from_secs(10);
/// The same trouble is told again after so long.
const TELL_TIME: Duration = Duration::from_secs(60);
/// Segments of which no slot was held for so long are dropped.
const IDLE_TIME: Duration = Duration::from_secs(30);
/// A pass over a part of the hash space takes at least so long.
const PASS_TIME: Duration = Duration::from_secs(30);
/// It is done when hardly any pages were reported for so long.
const QUIET_TIME: Duration = Duration::from_secs(10);
/// "Hardly any": this part of those that the index may remember.
const QUIET_PART: u64 = 256;
/// The pool is made anew when it has so many segments; not more often than after [`RENEWAL_TIME`].
const MANY_SEGMENTS: usize = MOST_SEGMENTS * 3 / 4;
/// See [`MANY_SEGMENTS`].
const RENEWAL_TIME: Duration = Duration::from_secs(600);

/// When things were done last.
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
    /// Rate of reports, for the report.
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
            rate: (now, 0, 0),
        }
    }

    pub(crate) fn out_of_memory(&mut self, now: Instant) {
        self.short_until = Some(now + MEMORY_TIME);
    }

    pub(crate) fn is_out_of_memory(&self, now: Instant) -> bool {
        self.short_until.is_some_and(|until| now < until)
    }
}

impl Group {
    /// Does what is due; nothing if it was called less than [`TICK`] ago.
    pub fn tick(&mut self, now: Instant) {
        if now.saturating_duration_since(self.clock.last_tick) < TICK {
            return;
        }
        self.clock.last_tick = now;
        self.planner.now = now.saturating_duration_since(self.clock.began).as_secs() as u32;
        self.tick_leases(now);
        self.tick_ghosts();
        self.tick_members(now);
        self.tick_plan(now);
        self.tick_passes(now);
        self.tick_segments(now);
        self.tell_paces();
    }

    fn tick_leases(&mut self, now: Instant) {
        let mut trouble = None;
        for member in self.members.values_mut() {
            let rotated = member.leases.rotate(now).and_then(|rotated| {
                let offered = member.leases.offered().filter(|_| rotated);
                let lease = offered.map(|(era, lease)| Ok((era, rustix::fd::AsFd::as_fd(lease).try_clone_to_owned()?)));
                if let Some((era, lease)) = lease.transpose().map_err(|e: std::io::Error| e)? {
                    member.say(&ToAgent::Lease(era), Some(Rc::new(lease)));
                }
                member.leases.ended()
            });
            match rotated {
                Ok(slots) => slots.into_iter().for_each(|slot| self.planner.unhold(slot)),
                Err(e) => trouble = Some(format!("leases of member {}: {e}", member.identity.name)),
            }
        }
        if let Some(trouble) = trouble {
            self.event(trouble);
        }
    }

    fn tick_ghosts(&mut self) {
        let mut slots = Vec::new();
        // Processes of which somebody may still map something.
        let mut alive: Vec<Identity> = Vec::new();
        for ghost in &mut self.ghosts {
            let is_asked = alive.iter().any(|identity| ghost.is_of(identity));
            let claims = self.members.values().any(|member| ghost.is_of(&member.identity) && !member.leases.is_taken());
            if is_asked || claims || !ghost.is_over(&mut slots).unwrap_or(false) {
                alive.push(ghost.identity.clone());
            }
        }
        let is_over = |ghost: &mut Ghost| !alive.iter().any(|identity| ghost.is_of(identity));
        slots.extend(self.ghosts.extract_if(.., is_over).flat_map(Ghost::into_slots));
        slots.into_iter().for_each(|slot| self.planner.unhold(slot));
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

    /// Asks members that are to report everything again to do so.
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
        if let Some(full) = self.planner.full.take()
            && self.clock.told_full.is_none_or(|told| now.saturating_duration_since(told) >= TELL_TIME)
        {
            self.clock.told_full = Some(now);
            self.event(format!("nothing new is folded: {full}"));
        }
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
                "the index is full: it goes over the hash space in passes; raise index-memory to find twins sooner",
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
            self.tell(News::Dropped(number), Vec::new());
            // Members let go of its file, and with it of its memory, when they are given another of that number.
            match empty_segment() {
                Ok(file) => {
                    let serving = self.members.values_mut().filter(|member| member.is_serving);
                    serving.for_each(|member| member.say(&ToAgent::Segment(number, 1), Some(Rc::clone(&file))));
                }
                Err(e) => self.event(format!("members keep segment {number}, which nobody needs: {e}")),
            }
        }
        let recent = |last: Instant| now.saturating_duration_since(last) < RENEWAL_TIME;
        if self.planner.pool.count() >= MANY_SEGMENTS && !self.clock.last_renewal.is_some_and(recent) {
            self.clock.last_renewal = Some(now);
            self.clear(Clearing::Renewal);
            self.apply(now);
        }
    }
}

/// A file of one empty slot.
fn empty_segment() -> std::io::Result<Rc<OwnedFd>> {
    let file = memfd_create("pagefold-none", MemfdFlags::CLOEXEC)?;
    ftruncate(&file, page::PAGE_BYTES as u64)?;
    Ok(Rc::new(file))
}
