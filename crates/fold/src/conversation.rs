//! The messages of members, and the requests to them.

use crate::group::Group;
use crate::lease::DepartedMember;
use crate::member::{Asked, Booking, Cut, FOLDS_IN_FLIGHT, Member};
use crate::table::MemberId;
use api::control::{News, SegmentInfo};
use page::Fingerprint;
use rustix::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::time::{Duration, Instant};
use wire::{Hello, MemberState, MemberStats, Outcome, RestedRun, ToAgent, ToWorker, VERSION};

/// Once a member's message has had this many pages booked, other work goes on: 512. Reports are cut into steps of at
/// most so many pages; runs of claimed or released pages are booked whole. One frame may name a hundred million pages.
const STEP_PAGES: u16 = 512;
/// Time for which a member is asked nothing after it could not fold for a reason that holds for all of its pages: 1 s.
const REST: Duration = Duration::from_secs(1);
/// Longest time for which requests to fold wait until more slots are filled ([`Group::is_gathering`]): 500 ms.
const GATHER_TIME: Duration = Duration::from_millis(500);
/// Largest part of the pool that slots may take which a member has released and which its forked children may still map
/// (`lease.rs`): 1/8. Beyond it, the member is not asked to fold.
const DEFERRED_PART: u64 = 8;

impl Group {
    /// Books a part of a frame that was read before, or reads the member's next frame and acts on it. Cuts the member
    /// off if the frame cannot be true. Returns whether there was anything to book or to read.
    pub fn hear(&mut self, id: MemberId, buffer: &mut [u8], now: Instant) -> bool {
        self.step(id, buffer, now).unwrap_or_else(|why| {
            self.cut(id, &why);
            false
        })
    }

    fn step(&mut self, id: MemberId, buffer: &mut [u8], now: Instant) -> Result<bool, Cut> {
        let Some(member) = self.members.get(&id) else { return Ok(false) };
        if !member.backlog.is_empty() {
            return self.work_off(id, now).map(|()| true);
        }
        match member.hear(buffer)? {
            Some(message) => self.act(id, message, now).map(|()| true),
            None => Ok(false),
        }
    }

    fn act(&mut self, id: MemberId, message: ToWorker, now: Instant) -> Result<(), Cut> {
        let Some(member) = self.members.get_mut(&id) else { return Ok(()) };
        if matches!(message, ToWorker::Hello(_)) == member.is_serving {
            return Err(Cut::Greeting);
        }
        match message {
            ToWorker::Hello(hello) => self.greet(id, hello),
            ToWorker::Rested(runs, fingerprints) => {
                let pages = fingerprints.len() as u64;
                member.reported += pages;
                member.backlog.extend(steps(&runs, fingerprints));
                if self.planner.would_have_too_many_chunks(id, pages) {
                    self.count_frames(id);
                }
                Ok(())
            }
            ToWorker::Donated(request, given) => self.donated(id, request, &given, now),
            ToWorker::Folded(request, outcomes) => self.folded(id, request, &outcomes, now),
            ToWorker::Released(runs) => {
                member.backlog.extend(runs.into_iter().map(Booking::Released));
                Ok(())
            }
            ToWorker::Held(runs) => {
                member.backlog.extend(runs.into_iter().map(Booking::Held));
                Ok(())
            }
            ToWorker::Home(runs) => {
                member.backlog.extend(runs.into_iter().map(Booking::Home));
                Ok(())
            }
            ToWorker::LeaseTaken(epoch) => Ok(member.leases.take(epoch)?),
            ToWorker::Stats(stats) => {
                self.heard_stats(id, *stats, now);
                Ok(())
            }
            ToWorker::Because(request, reasons) => self.because(id, request, &reasons, now),
            ToWorker::Bye(why) => Err(Cut::Left(why)),
        }
    }

    fn greet(&mut self, id: MemberId, hello: Hello) -> Result<(), Cut> {
        let Some(member) = self.members.get_mut(&id) else { return Ok(()) };
        let window = member.window.as_fd().try_clone_to_owned()?;
        member.say(&ToAgent::Welcome(VERSION), Some(Rc::new(window)));
        if hello.version != VERSION {
            member.flush(Instant::now())?;
            return Err(Cut::Version(hello.version));
        }
        member.is_serving = true;
        let place = self.planner.place(id);
        (place.eager, place.frames) = (hello.eager, 0);
        for (number, segment) in self.planner.pool.segments() {
            member.say(&ToAgent::Segment(number, segment.slots()), Some(Rc::clone(&segment.file)));
        }
        let offered = member.leases.offered().map(|(epoch, lease)| (epoch, lease.as_fd().try_clone_to_owned()));
        if let Some((epoch, lease)) = offered {
            member.say(&ToAgent::Lease(epoch), Some(Rc::new(lease?)));
        }
        self.count_frames(id);
        self.look_at_headroom(id, Instant::now());
        self.tell_paces();
        Ok(())
    }

    fn donated(&mut self, id: MemberId, request: u32, given: &[bool], now: Instant) -> Result<(), Cut> {
        let Some(member) = self.members.get_mut(&id) else { return Ok(()) };
        let asked = member.asked.take_if(|asked| asked.id == request && asked.donation.pages() == given.len());
        let Asked { donation, .. } = asked.ok_or(Cut::NotAsked)?;
        let place = self.planner.place(id);
        place.may_donate = place.may_fold;
        if let Err(e) = self.planner.donated(donation, given, &member.window) {
            self.clock.out_of_memory(now);
            self.event(format!("the pool cannot take more: {e}; nothing new is folded for a while"));
        }
        Ok(())
    }

    fn folded(&mut self, id: MemberId, request: u32, outcomes: &[Outcome], now: Instant) -> Result<(), Cut> {
        let Some(member) = self.members.get_mut(&id) else { return Ok(()) };
        let pages = |runs: &[wire::FoldRun]| runs.iter().map(|run| usize::from(run.pages)).sum::<usize>();
        let (asked, runs) = member.folds.pop_front().ok_or(Cut::NotAsked)?;
        let answers = asked == request && pages(&runs) == outcomes.len();
        // If the answer does not fit the request, all pages of the request count as folded: the member may map their
        // slots.
        let done = if answers { outcomes } else { &[Outcome::Folded; wire::FOLD_PAGES][..pages(&runs)] };
        let sum = self.planner.folded(id, &runs, done);
        if sum.is_stuck {
            member.rests_until = Some(now + REST);
        }
        self.hand_over_deferred(id, now);
        if answers { Ok(()) } else { Err(Cut::NotAsked) }
    }

    /// Books about [`STEP_PAGES`] pages of the reports, claims and releases that the member has sent.
    fn work_off(&mut self, id: MemberId, now: Instant) -> Result<(), Cut> {
        let mut pages = 0;
        while pages < u64::from(STEP_PAGES) {
            let Some(booking) = self.members.get_mut(&id).and_then(|member| member.backlog.pop_front()) else { break };
            match booking {
                Booking::Rested(runs, fingerprints) => {
                    self.planner.rested(id, &runs, &fingerprints);
                    pages += fingerprints.len() as u64;
                }
                Booking::Held(run) => {
                    self.held(id, run, now)?;
                    pages += u64::from(run.pages);
                }
                Booking::Home(run) => {
                    let crosses = self.planner.at_home(id, run)?;
                    self.mind_crossing(crosses, now);
                    pages += u64::from(run.pages);
                }
                Booking::Released(run) => {
                    let released = self.planner.released(id, &[run]);
                    self.hand_over_deferred(id, now);
                    released?;
                    pages += u64::from(run.pages);
                }
            }
        }
        Ok(())
    }

    fn held(&mut self, id: MemberId, run: wire::SlotRun, now: Instant) -> Result<(), Cut> {
        let Some(member) = self.members.get(&id) else { return Ok(()) };
        let departed: Vec<&DepartedMember> =
            self.departed.iter().filter(|departed| departed.is_of(&member.identity)).collect();
        let crosses = self.planner.held(id, &[run], |slot| departed.iter().any(|departed| departed.holds(slot)))?;
        self.mind_crossing(crosses, now);
        Ok(())
    }

    /// If `crosses`, begins to make all folded pages private: a member maps a slot of another member, although members
    /// are to share nothing.
    fn mind_crossing(&mut self, crosses: bool, now: Instant) {
        if crosses {
            self.clear(crate::group::Clearing::Separation);
            self.apply(now);
        }
    }

    /// Hands the holds of slots that a member has released over to its leases, which keep them as long as forked
    /// children may map the slots.
    fn hand_over_deferred(&mut self, id: MemberId, now: Instant) {
        let Some(member) = self.members.get_mut(&id) else { return };
        for slot in std::mem::take(&mut self.planner.place(id).deferred) {
            member.leases.released(slot, now);
        }
    }

    /// Reads from the kernel how many page frames a member's process has. If the kernel does not tell, `u64::MAX` is
    /// noted: what the member reports is not bounded by it.
    fn count_frames(&mut self, id: MemberId) {
        let Some(member) = self.members.get_mut(&id) else { return };
        let counters = host::MemoryCounters::of(member.identity.pid);
        member.resident_pages = counters.map_or(u64::MAX, |counters| counters.resident_pages);
        let place = self.planner.place(id);
        place.frames = place.frames.max(member.resident_pages);
    }

    fn heard_stats(&mut self, id: MemberId, stats: MemberStats, now: Instant) {
        let Some(member) = self.members.get_mut(&id) else { return };
        member.stats = stats;
        self.count_frames(id);
        if self.look_at_headroom(id, now) {
            self.tell_paces();
        }
        let Some(member) = self.members.get_mut(&id) else { return };
        let folds = stats_say_it_folds(member.stats.state);
        let place = self.planner.place(id);
        if folds && !place.may_fold {
            (place.may_fold, place.may_donate) = (true, true);
            member.again.later(now);
        } else if !folds && place.may_fold {
            place.may_fold = false;
            let none = crate::dispatch::Donation::default();
            self.planner.gives_nothing(id, member.asked.as_ref().map_or(&none, |asked| &asked.donation));
        }
    }

    /// Sends members the files of new segments, and the requests to fold and to show pages that the planner wants.
    pub fn speak(&mut self, now: Instant) {
        for number in std::mem::take(&mut self.planner.pool.made) {
            if let Some((slots, file)) = self.hand_out(number) {
                self.tell(News::Segment(SegmentInfo { number, slots }), vec![file]);
            }
        }
        let is_gathering = self.is_gathering(now);
        let most_deferred =
            usize::try_from(u64::from(self.settings.pool_slots) / DEFERRED_PART).unwrap_or(usize::MAX).max(1);
        for (id, member) in &mut self.members {
            if !member.is_serving
                || !self.planner.policy.folds
                || !self.planner.place(*id).may_fold
                || !member.headroom.is_left()
                || member.rests(now)
            {
                continue;
            }
            if !is_gathering && member.leases.is_taken() && member.leases.deferred() <= most_deferred {
                ask_to_fold(&mut self.planner, *id, member);
            }
            if member.asked.is_none() && !self.clock.is_out_of_memory(now) {
                let donation = self.planner.next_donation(*id);
                if donation.pages() > 0 {
                    let request = member.request();
                    member.say(&ToAgent::Donate(request, donation.ranges.clone()), None);
                    member.asked = Some(Asked { id: request, donation, since: now });
                }
            }
        }
        self.flush(now);
    }

    /// Whether requests to fold wait. While reports are booked and members show page contents for new slots, more and
    /// more neighbours of a page can be folded in one run with it. Folding a run costs a member less than folding its
    /// pages one by one.
    fn is_gathering(&mut self, now: Instant) -> bool {
        let planner = &mut self.planner;
        let mut brings_more = |(id, member): (&MemberId, &Member)| {
            !member.backlog.is_empty() || member.asked.is_some() || !planner.place(*id).donations.is_empty()
        };
        if !self.members.iter().any(&mut brings_more) {
            self.gathers_since = None;
            return false;
        }
        now.saturating_duration_since(*self.gathers_since.get_or_insert(now)) < GATHER_TIME
    }

    /// Sends all members the file of this segment, and returns its number of slots and file; `None` if there is no such
    /// segment.
    pub(crate) fn hand_out(&mut self, number: u8) -> Option<(u32, Rc<OwnedFd>)> {
        let (slots, file) = self.planner.pool.handout(number)?;
        for member in self.members.values_mut().filter(|member| member.is_serving) {
            member.say(&ToAgent::Segment(number, slots), Some(Rc::clone(&file)));
        }
        Some((slots, file))
    }

    fn flush(&mut self, now: Instant) {
        let stuck = |(id, member): (&MemberId, &mut Member)| {
            if !member.is_stuck() {
                return None;
            }
            Some((*id, member.flush(now).err()?))
        };
        let gone: Vec<_> = self.members.iter_mut().filter_map(stuck).collect();
        gone.into_iter().for_each(|(id, why)| self.cut(id, &why));
    }
}

/// Cuts a report into steps of at most [`STEP_PAGES`] pages. A huge page, of 512 pages, is a step of its own.
fn steps(runs: &[RestedRun], fingerprints: Vec<Fingerprint>) -> Vec<Booking> {
    let most = usize::from(STEP_PAGES);
    if fingerprints.len() <= most {
        return vec![Booking::Rested(runs.to_vec(), fingerprints)];
    }
    let (mut steps, mut fingerprints) = (Vec::new(), fingerprints.into_iter());
    let (mut of_step, mut prints) = (Vec::new(), Vec::new());
    for run in runs {
        for first in (0..run.pages).step_by(most) {
            let pages = (run.pages - first).min(STEP_PAGES);
            if prints.len() + usize::from(pages) > most {
                steps.push(Booking::Rested(std::mem::take(&mut of_step), std::mem::take(&mut prints)));
            }
            of_step.push(RestedRun { start: run.start.add_pages(first.into()), pages, huge: run.huge });
            prints.extend(fingerprints.by_ref().take(pages.into()));
        }
    }
    steps.push(Booking::Rested(of_step, prints));
    steps
}

/// Whether a member in this state carries out requests to fold.
const fn stats_say_it_folds(state: MemberState) -> bool {
    match state {
        MemberState::NothingEnrolled
        | MemberState::NothingMapped
        | MemberState::NotFoldable
        | MemberState::Folding
        | MemberState::Off
        | MemberState::Unfolded => true,
        MemberState::NoMove
        | MemberState::Unpinned
        | MemberState::Yielded
        | MemberState::NoVma
        | MemberState::LostTrack => false,
    }
}

fn ask_to_fold(planner: &mut crate::plan::Planner, id: MemberId, member: &mut Member) {
    while member.folds.len() < FOLDS_IN_FLIGHT && member.headroom.is_left() {
        let runs = planner.next_folds(id);
        if runs.is_empty() {
            return;
        }
        member.headroom.spend(&runs);
        let request = member.request();
        member.say(&ToAgent::Fold(request, runs.clone()), None);
        member.folds.push_back((request, runs));
    }
}
