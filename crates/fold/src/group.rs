//! The group: its members, its departed members, and its settings.
//!
//! `api::control` lists the orders of a supervisor. Most settings take effect at once. Before members cease to share
//! with each other, and before the pool is replaced by a new one, members make all folded pages private again, as far
//! as there is memory for them (`room.rs`):
//!
//! ```text
//!   sharing --- intra-member-only set, or too many segments, or too much waste ----> clearing: everybody unfolds
//!      ^                                                                               |
//!      +------------- nobody maps a slot any more; everybody reports anew <------------+
//! ```
//!
//! `turns.rs` says whose messages are heard next, `conversation.rs` acts on them, `tick.rs` does the timed work.

use crate::adapt::Adaptive;
use crate::dispatch::Donation;
use crate::lease::DepartedMember;
use crate::member::{Cut, Member};
use crate::pace;
use crate::plan::{Planner, Policy};
use crate::pool::Pool;
use crate::proof::Proofs;
use crate::report::Former;
use crate::room::Asking;
use crate::table::MemberId;
use crate::turns::Turns;
use crate::upkeep::Inheritance;
use crate::why::Question;
use api::control::{Fold, Identity, Latency, News, Order, SegmentInfo, Settings, ZeroPolicy};
use host::{MemoryLimits, ProcessId, Seqpacket};
use rustix::fd::OwnedFd;
use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;
use std::rc::Rc;
use std::time::{Duration, Instant};
use wire::{FoldMode, ToAgent};

/// Most members of a group.
pub const MOST_MEMBERS: usize = 1024;
/// No member is admitted while there are so many departed members: 4096 of all processes, or 16 of the process that
/// wants to connect. Each departed member keeps a lease and slots.
const MOST_DEPARTED: (usize, usize) = (4096, 16);
/// Most messages that may wait for the supervisor; beyond them the oldest event is dropped.
const MOST_NEWS: usize = 4096;

/// A message to the supervisor, and the files that go with it.
pub type Message = (News, Vec<Rc<OwnedFd>>);

/// Why all members are told to make their folded pages private.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clearing {
    /// The setting `intra_member_only` was switched on: members are to share no page with each other.
    Separation,
    /// The pool is to be replaced by a new one, because it has too many segments, most of them made by earlier workers,
    /// or too many slots that cannot be used again.
    Renewal,
}

/// A group in its worker.
#[derive(Debug)]
pub struct Group {
    /// What the worker knows of members' pages, and the plan to fold them.
    pub planner: Planner,
    /// Members that are connected.
    pub members: BTreeMap<MemberId, Member>,
    pub(crate) turns: Turns,
    /// Former members whose processes may still map slots, in the order in which they departed.
    pub departed: Vec<DepartedMember>,
    pub(crate) former: Former,
    pub(crate) settings: Settings,
    /// The group's scan rate, if it follows its yield (`adapt.rs`).
    pub(crate) adaptive: Option<Adaptive>,
    /// Whether a supervisor has sent the order `Take`, with which a worker begins to serve.
    pub begun: bool,
    /// Slots filled by an earlier worker that are still to be fingerprinted. Messages of members are not read
    /// meanwhile.
    pub inheritance: Inheritance,
    /// The questions to the prover about free slots: which of them nobody reads, so that they may be filled again.
    pub proofs: Proofs,
    pub(crate) clearing: Option<Clearing>,
    pub(crate) asking: Asking,
    /// The reason to unfold that was named when a refusal of memory was logged last; `None` if none was logged since
    /// memory was promised.
    pub(crate) told_refusal: Option<&'static str>,
    pub(crate) clock: crate::tick::Clock,
    /// Since when requests to fold wait until more slots are filled ([`Group::is_gathering`]); `None` if they do not
    /// wait.
    pub(crate) gathers_since: Option<Instant>,
    /// An operator's question why pages are not folded, passed on to a member that has not answered yet.
    pub(crate) question: Option<Question>,
    /// Reads the memory limits of members' control groups; `None` where the kernel shows none.
    pub(crate) limits: Option<MemoryLimits>,
    news: VecDeque<Message>,
}

pub(crate) const fn policy(settings: &Settings, clearing: bool, intra_member_only: bool) -> Policy {
    let split_huge_at = match settings.split_huge_at_percent {
        Some(percent) => Some((512 * percent as u32).div_ceil(100)),
        None => None,
    };
    Policy {
        folds: matches!(settings.fold, Fold::On) && !clearing,
        intra_member_only,
        zeros: !matches!(settings.zero_pages, ZeroPolicy::Ignore),
        split_huge_at,
        index_pages: settings.index_pages,
    }
}

impl Group {
    /// A group without members, which admits none before the supervisor's order `Take`. `prover` is the socket of the
    /// service's prover.
    pub fn new(name: &str, prover: PathBuf, now: Instant) -> Self {
        let settings = Settings::default();
        Self {
            planner: Planner::new(Pool::new(name, settings.pool_slots), policy(&settings, false, false)),
            members: BTreeMap::new(),
            turns: Turns::new(now),
            departed: Vec::new(),
            former: Former::default(),
            settings,
            adaptive: None,
            begun: false,
            inheritance: Inheritance::default(),
            proofs: Proofs::new(prover, now),
            clearing: None,
            asking: Asking::Idle,
            told_refusal: None,
            clock: crate::tick::Clock::new(now),
            gathers_since: None,
            question: None,
            limits: MemoryLimits::find(),
            news: VecDeque::new(),
        }
    }

    /// Queues a message for the supervisor. If [`MOST_NEWS`] wait already, the oldest event among them is dropped.
    pub fn tell(&mut self, news: News, files: Vec<Rc<OwnedFd>>) {
        if self.news.len() >= MOST_NEWS {
            let event = self.news.iter().position(|(news, _)| matches!(news, News::Event(_)));
            self.news.remove(event.unwrap_or(0));
        }
        self.news.push_back((news, files));
    }

    pub(crate) fn event(&mut self, text: impl Into<String>) {
        self.tell(News::Event(text.into()), Vec::new());
    }

    /// Takes all messages that wait for the supervisor.
    pub fn take_news(&mut self) -> VecDeque<Message> {
        std::mem::take(&mut self.news)
    }

    /// The first messages to a new supervisor: all members and segments, and how much memory members need to make pages
    /// private. Messages that waited for the earlier supervisor are dropped.
    pub fn adopted(&mut self, now: Instant) -> Vec<Message> {
        self.news.clear();
        let handouts: Vec<_> =
            self.planner.pool.segments().map(|(number, s)| (number, s.slots(), Rc::clone(&s.file))).collect();
        let segments =
            handouts.iter().map(|(number, slots, _)| SegmentInfo { number: *number, slots: *slots }).collect();
        let files = handouts.into_iter().map(|(.., file)| file).collect();
        self.planner.pool.made.clear();
        let identities: Vec<Identity> = self.members.values().map(|member| member.identity.clone()).collect();
        let mut messages = vec![(News::Adopted { members: Vec::new(), segments, begun: self.begun }, files)];
        // 64 members fit into one message even with the longest names.
        for (n, members) in identities.chunks(64).enumerate() {
            if n > 0 {
                messages
                    .push((News::Adopted { members: Vec::new(), segments: Vec::new(), begun: self.begun }, Vec::new()));
            }
            if let Some((News::Adopted { members: into, .. }, _)) = messages.last_mut() {
                into.extend_from_slice(members);
            }
        }
        messages.extend(self.ask_anew(now).map(|needs| (News::Needs(needs), Vec::new())));
        messages
    }

    /// Carries out an order of the supervisor.
    pub fn obey(&mut self, order: Order, mut files: Vec<OwnedFd>, now: Instant) {
        match order {
            Order::Take { settings, .. } if self.begun => self.set(settings, now),
            Order::Take { settings, segments } => {
                self.set(settings, now);
                self.begun = true;
                segments.into_iter().zip(files).for_each(|(info, file)| self.take_over(info, file));
            }
            Order::Load(info) if !self.planner.pool.has(info.number) => {
                files.pop().into_iter().for_each(|file| self.take_over(info, file));
                self.hand_out(info.number);
            }
            Order::Load(info) => self.planner.pool.set_loaded(info.number, true),
            Order::Unload(number) => self.planner.pool.set_loaded(number, false),
            Order::Admit(identity) => match files.pop() {
                Some(socket) => self.admit(identity, Seqpacket::from_stranger(socket), now),
                None => self.event(format!("member {} came without its socket", identity.name)),
            },
            Order::Dismiss(identity) => self.cut_process(&identity, &Cut::Dismissed),
            Order::Leave(identity) => {
                let id = self.of_process(&identity).map(|member| member.id);
                let member = id.and_then(|id| self.members.get_mut(&id));
                member.into_iter().for_each(|member| member.say(&ToAgent::Leave, None));
            }
            Order::Set(settings) => self.set(settings, now),
            Order::Why { question, pid, pages } => self.ask_why(question, pid, &pages),
            Order::Report => {
                let report = self.report(now);
                self.tell(News::Report(Box::new(report)), Vec::new());
            }
            Order::Room(room) => self.answered(room, now),
        }
    }

    /// Takes over a segment whose slots are filled: one that an earlier worker made, or a template.
    fn take_over(&mut self, info: SegmentInfo, file: OwnedFd) {
        let taken = self.planner.pool.inherit(info.number, info.slots, file);
        if let Err(e) = taken.and_then(|()| self.inheritance.add(&mut self.planner, info.number)) {
            self.event(format!("cannot take over segment {} of the pool: {e}", info.number));
        }
    }

    fn admit(&mut self, identity: Identity, socket: Seqpacket, now: Instant) {
        if !self.begun || self.members.len() >= MOST_MEMBERS {
            let why = if self.begun { "the group has as many as it may" } else { "the group has not begun" };
            return self.event(format!("member {} is not admitted: {why}", identity.name));
        }
        let uid = socket.peer().map_or(u32::MAX, |peer| peer.uid);
        if let Some(why) = too_many_departed(&self.departed, &identity, uid, host::one_user) {
            return self.event(format!("member {} is not admitted: {why}", identity.name));
        }
        let before =
            self.of_process(&identity).map(|member| (member.id, member.last_word().map(Box::new), member.taken));
        let taken = before.as_ref().map_or(Duration::ZERO, |(.., taken)| *taken);
        before.into_iter().for_each(|(id, word, _)| self.cut(id, &Cut::Replaced(word)));
        let id = self.planner.join();
        match Member::new(id, identity.clone(), uid, socket, now) {
            Ok(mut member) => {
                member.taken = taken;
                self.members.insert(id, member);
            }
            Err(e) => {
                self.planner.leave(id, Donation::default());
                self.event(format!("cannot serve member {}: {e}", identity.name));
            }
        }
    }

    /// Ends the connection of this process, if it has one.
    fn cut_process(&mut self, identity: &Identity, why: &Cut) {
        if let Some(member) = self.of_process(identity).map(|member| member.id) {
            self.cut(member, why);
        }
    }

    fn of_process(&self, identity: &Identity) -> Option<&Member> {
        let same = |m: &&Member| (m.identity.pid, m.identity.started) == (identity.pid, identity.started);
        self.members.values().find(same)
    }

    /// Ends a member's connection. A [`DepartedMember`] then keeps the slots that the member's process may still map.
    pub fn cut(&mut self, id: MemberId, why: &Cut) {
        let Some(mut member) = self.members.remove(&id) else { return };
        let donation = member.asked.take().map(|asked| asked.donation).unwrap_or_default();
        let left = self.planner.leave(id, donation);
        self.former.done.add(&member.stats.done);
        self.former.reported += member.reported;
        let word = if matches!(why, Cut::Closed | Cut::Io(_)) { member.last_word() } else { None };
        let why = word.as_ref().filter(|word| matches!(word, Cut::Left(_))).unwrap_or(why);
        let process = ProcessId { pid: member.identity.pid, start_ticks: member.identity.started };
        let lives = if matches!(why, Cut::Closed) && process.is_alive() {
            ": its process lives on, and has executed another program, or its agent has ended"
        } else {
            ""
        };
        self.event(format!("member {} (pid {}) {why}{lives}", member.identity.name, member.identity.pid));
        let has_departed = self.departed.iter().any(|departed| departed.is_of(&member.identity));
        if has_departed || !left.is_empty() || member.leases.is_waiting() {
            self.departed.push(DepartedMember::new(member.identity, member.uid, member.leases, left));
        }
    }

    /// Puts new settings of the supervisor into effect.
    fn set(&mut self, settings: Settings, now: Instant) {
        let before = std::mem::replace(&mut self.settings, settings);
        // `None` means the calling thread, the worker's only one. If the kernel refuses, this thread preempts others
        // only as usual.
        let _ = act::set_preempting(None, settings.latency == Latency::Eager);
        self.begin_to_adapt(now);
        self.planner.pool.set_most_slots(settings.pool_slots);
        if settings.intra_member_only && !self.planner.policy.intra_member_only {
            self.clear(Clearing::Separation);
        } else if !settings.intra_member_only && self.clearing == Some(Clearing::Separation) {
            self.clearing = None;
        }
        self.apply(now);
        // If the pool was not full before, no page was left out because of its old limit.
        let is_wanted = settings.pool_slots > before.pool_slots && self.clock.is_full();
        let grows = is_wanted || settings.index_pages > before.index_pages;
        let zeros = settings.zero_pages != before.zero_pages;
        if grows || zeros || settings.split_huge_at_percent != before.split_huge_at_percent {
            self.report_again(now);
        }
    }

    /// Begins a clearing: all members are to unfold ([`Self::apply`] tells them). A clearing for
    /// [`Clearing::Separation`] replaces one for a renewal that is under way.
    pub(crate) fn clear(&mut self, why: Clearing) {
        if self.clearing.is_none() || why == Clearing::Separation && self.clearing != Some(why) {
            self.event(match why {
                Clearing::Separation => "members are to share nothing: everything is made private first",
                Clearing::Renewal => "too much of the pool cannot be used again: it is made anew",
            });
            self.clearing = Some(why);
        }
    }

    /// Brings the planner's policy in line with the settings and a clearing under way, and sends members their new
    /// settings.
    pub(crate) fn apply(&mut self, now: Instant) {
        // Switched on, `intra_member_only` takes effect when the clearing is over; switched off, at once.
        let intra = self.settings.intra_member_only
            && (self.planner.policy.intra_member_only || self.clearing != Some(Clearing::Separation));
        let folded = self.planner.policy.folds;
        if self.planner.set_policy(policy(&self.settings, self.clearing.is_some(), intra)) {
            self.planner.start_over();
            self.report_again(now);
            // Members are asked for full reports before they are told to fold. Otherwise they would report all pages
            // twice.
            self.ask_again(now);
        }
        if !folded {
            self.look_before_folding(now);
        }
        self.tell_paces();
    }

    /// Plans a request for a full report to every member, at once.
    pub(crate) fn report_again(&mut self, now: Instant) {
        self.members.values_mut().for_each(|member| member.again.now(now));
    }

    /// Sends each member its settings ([`wire::Pace`]), where they have changed.
    pub(crate) fn tell_paces(&mut self) {
        let rate = self.settings.scan_rate.or(self.adaptive.as_ref().map(|adaptive| adaptive.rate));
        let shares = pace::shares(rate, &self.pages_in_frames());
        for (member, share) in self.members.values_mut().zip(shares) {
            let mut pace = pace::pace(&self.settings, self.clearing.is_some(), self.planner.interval(), share);
            // The agent's search for pages takes memory, which this member's control group does not have.
            if pace.fold == FoldMode::On && member.headroom.rests {
                pace.fold = FoldMode::Off;
            }
            let is_told = member.told.as_ref().is_some_and(|told| pace::is_close(told, &pace));
            // A member that has not yet read earlier frames is sent a changed share of the scan rate later.
            let can_wait = member.told.as_ref().is_some_and(|told| told.fold == pace.fold);
            if member.is_serving && !is_told && !(can_wait && member.is_stuck()) {
                member.say(&ToAgent::Pace(pace), None);
                member.told = Some(pace);
            }
        }
    }

    /// Pages of each member that are enrolled and have a frame. Folded pages are added to the kernel's count (RSS): a
    /// page that maps a slot and was not touched since is in no page table.
    fn pages_in_frames(&mut self) -> Vec<u64> {
        let of_member = |member: &Member| {
            let mapped = self.planner.place(member.id).mapped;
            member.stats.enrolled_pages.min(member.resident_pages.saturating_add(mapped))
        };
        self.members.values().map(of_member).collect()
    }

    /// Whether no member and no departed member needs this worker.
    pub fn is_idle(&self) -> bool {
        self.members.is_empty() && self.departed.is_empty()
    }
}

/// Why another connection of a process is refused; `None` if it is served. The process or its user has too many earlier
/// connections whose leases are still mapped. A user may have as many departed members as there are places left, so
/// that no user takes all places. Users for whom `one` gives the same number count as one user.
fn too_many_departed(
    departed: &[DepartedMember],
    identity: &Identity,
    uid: u32,
    one: impl Fn(u32) -> u32,
) -> Option<String> {
    let left = MOST_DEPARTED.0.saturating_sub(departed.len());
    let of_user = departed.iter().filter(|departed| one(departed.uid) == one(uid)).count();
    let of_process = departed.iter().filter(|departed| departed.is_of(identity)).count();
    let (count, whose) = match () {
        () if of_process >= MOST_DEPARTED.1 => (of_process, "process"),
        () if of_user >= left => (of_user, "user"),
        () => return None,
    };
    Some(format!(
        "{count} earlier connections of its {whose} have leases that are still mapped: end processes that it forked"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lease::Leases;

    /// The supervisor is gone, or does not read. Messages about the pool must not be dropped; events are only for
    /// people.
    #[test]
    fn news_that_nobody_reads_lose_the_oldest_events_alone() {
        let mut group = Group::new("acme", PathBuf::new(), Instant::now());
        group.tell(News::Dropped(7), Vec::new());
        (0..2 * MOST_NEWS).for_each(|n| group.event(n.to_string()));
        assert_eq!(group.news.len(), MOST_NEWS);
        assert!(matches!(group.news[0].0, News::Dropped(7)), "{:?}", group.news[0].0);
        let event = |n: usize| matches!(&group.news[n].0, News::Event(text) if *text == (MOST_NEWS + n).to_string());
        assert!(event(1) && event(MOST_NEWS - 1), "{:?}", group.news[1].0);
    }

    #[test]
    fn member_beyond_those_that_a_group_may_have_is_not_admitted() {
        let (now, all) = (Instant::now(), u32::try_from(MOST_MEMBERS).unwrap());
        let mut group = Group::new("acme", PathBuf::new(), now);
        group.begun = true;
        let mut admit = |number: u32| {
            let (socket, _) = Seqpacket::pair().unwrap();
            let identity = Identity { name: number.to_string(), pid: number, started: 1 };
            group.admit(identity, socket, now);
            (group.members.len(), format!("{:?}", group.news.back()))
        };
        let counts: Vec<usize> = (0..all).map(|number| admit(number).0).collect();
        assert_eq!(counts, (1..=MOST_MEMBERS).collect::<Vec<_>>());
        let (members, news) = admit(all);
        assert!(members == MOST_MEMBERS && news.contains("the group has as many as it may"), "{members}: {news}");
    }

    #[test]
    fn departed_members_have_a_share_for_each_process_and_user() {
        let identity = |pid| Identity { name: String::new(), pid, started: 1 };
        let mut departed = Vec::new();
        let mut fill = |uid, first: u32, per_process: u32| {
            let before = departed.len();
            for n in 0.. {
                let identity = identity(first + n / per_process);
                // The users 500 to 599 are one person's.
                if too_many_departed(&departed, &identity, uid, |uid| if uid < 600 { 500 } else { uid }).is_some() {
                    break;
                }
                departed.push(DepartedMember::new(identity, uid, Leases::none(), Vec::new()));
            }
            departed.len() - before
        };
        assert_eq!(fill(1000, 1, u32::MAX), 16, "one process");
        assert_eq!(fill(1000, 100, 1), 2048 - 16, "one user");
        assert_eq!([fill(1001, 10_000, 1), fill(1002, 20_000, 1)], [1024, 512], "others have places");
        assert_eq!([fill(500, 30_000, 1), fill(599, 40_000, 1)], [256, 0], "one person under two users");
    }
}
