//! Following memory that maps a pool's file. Pages that a program discards there have to read as zeros; the kernel
//! alone would bring the file's bytes back.
//!
//! ```text
//!   present: the file's page, or the program's own
//!      | a discard is about to happen: the kernel sends a message, and waits until it is read
//!      v
//!   discarded, known to the follower
//!      | the kernel removes the page table entry; from here on, a thread that touches the page sleeps
//!      v the follower reads the message of a touch, or settles discards
//!   zeros, recorded as given
//!      | the kernel removes the entry only now: another thread touched the page before the discard was done
//!      v
//!   zeros again, at the next touch
//! ```
//!
//! The kernel may also remove an entry for reasons of its own. A touch then sleeps, too, and the follower maps the
//! file's page again. It can tell the two cases apart, because the kernel sends the message of a discard before the
//! discard happens. The follower reads this message before that of any touch that comes after the discard.
//!
//! The memory of a forked child is followed in the same way, by the process that holds the child's userfaultfd. No
//! discard may go unseen, so a follower lives until the address space that it follows has ended.
//!
//! An agent in the child may claim its userfaultfd. The agent then keeps writers out and moves pages away, and has to
//! read all messages of discards itself. So another process that follows the child neither reads messages nor maps
//! pages meanwhile.

use crate::journal::{About, Entry, Found, Journal, Logged};
use crate::userfault::{Fault, Message, Userfault};
use page::{HostVirt, PageRange, PageSet};
use rustix::io::Errno;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time that a thread of another process is given, from when the message of its discard was read, until it has removed
/// the page-table entries.
const ZAP_TIME: Duration = Duration::from_millis(500);
/// Most pages of a child in which one call maps zeros again, after their zeros may have been removed.
const LOOKED_AT_AGAIN: u64 = 1024;

/// Addresses that programs use, as far as the kernel accepts them in a userfaultfd call about a range.
pub const PROGRAMS: PageRange = PageRange { start: HostVirt(1 << 16), pages: (1 << 35) - (1 << 4) - 1 };

/// Follows the memory of one address space.
#[derive(Debug)]
pub struct Follower {
    /// The child's place in a journal. It is given up before the userfaultfd is closed.
    entry: Option<Entry>,
    watch: Arc<Userfault>,
    /// Pages that were discarded and have not been mapped as zeros yet, as far as is known.
    discarded: PageSet,
    /// Whether the memory is this process's own. Its agent moves pages away and keeps writers out, and wakes the
    /// threads that sleep on such pages by itself.
    is_own: bool,
    /// The pages in `discarded` that the parent of a followed child had discarded, until they are settled. The child
    /// may have got some of these pages at the fork, because a thread of its parent was only about to discard them.
    /// Pages that the child has stay.
    inherited: PageSet,
    /// The pages in `discarded` that a killed predecessor of this follower knew of. The predecessor may have made zeros
    /// of them, which the program has written since.
    resumed: PageSet,
    /// Whether a killed predecessor of this follower may have known of discards that this one does not know.
    is_partial: bool,
    /// A change that the agent has announced. The kernel's message of it is not taken for a change by the program.
    expected: Option<Expected>,
    /// Pages over which the agent is placing slots.
    being_placed: Option<PageRange>,
    /// Pages that were discarded and have become zeros since. The discarding thread may still be about to take the
    /// zeros away, so a page without an entry becomes zeros again.
    given: PageSet,
    /// Pages in `given` that became zeros lately: two sets, each of one [`ZAP_TIME`]. They count as lately until two
    /// [`ZAP_TIME`] after the second set was begun.
    lately: [PageSet; 2],
    /// Time at which the second set of `lately` was begun.
    lately_since: Option<Instant>,
    /// Pages in `given` that became zeros since [`Follower::keep_in_mind`] began a record; `None` if there is no
    /// record.
    served: Option<PageSet>,
    /// Pages that threads touched and found missing, while the answer is put off ([`Follower::put_off_missing`]);
    /// `None` while it is not.
    put_off: Option<PageSet>,
    /// Whether an agent in the child may have claimed the userfaultfd.
    may_be_claimed: bool,
    /// Memory of this process's own that shows a template's bytes again when it is discarded. Each range comes with the
    /// address of a copy of these bytes. No child inherits these ranges.
    homes: Vec<(PageRange, HostVirt)>,
}

/// A change that the agent makes, of which the kernel is going to send a message. The address is the first one of the
/// range that is moved or dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expected {
    /// The agent moves a mapping of slots over followed memory whose content the slots hold. The follower keeps its
    /// records of the destination.
    Placing(HostVirt),
    /// The agent moves a mapping on behalf of the program, so the caller need not be told of the move.
    Moving(HostVirt),
    /// The agent drops its private pages from this address on, because the file's pages behind them have the same
    /// bytes.
    Dropping(HostVirt),
}

/// What [`Follower::read`] has read.
#[derive(Debug)]
pub enum Told {
    /// There is no message to be read.
    Nothing,
    /// A thread touched a page, or an event happened that the caller need not know.
    Touch,
    /// Pages are about to be discarded.
    Discard,
    /// These pages were moved to that address, by a move that was not [expected](Follower::expect).
    Move(PageRange, HostVirt),
    /// The process forked. The caller has to read the messages of the child's follower, too.
    Birth(Box<Follower>),
}

/// Moves the records of a range to the address that the range was moved to.
pub fn move_within(pages: &mut PageSet, from: PageRange, to: HostVirt) {
    let moved = pages.within(from);
    pages.remove(from);
    pages.remove(PageRange { start: to, ..from });
    for range in moved {
        let start = to.add_pages(range.start.page() - from.start.page());
        pages.insert(PageRange { start, ..range });
    }
}

/// Pages of a range that are in none of these sets.
fn missing_in<'a>(sets: impl IntoIterator<Item = &'a PageSet>, range: PageRange) -> Vec<PageRange> {
    sets.into_iter().fold(vec![range], |left, set| left.into_iter().flat_map(|range| set.missing(range)).collect())
}

impl Follower {
    /// Follows this process's own memory that is registered with `watch`.
    pub const fn own(watch: Arc<Userfault>) -> Self {
        let discarded = PageSet::new();
        let given = PageSet::new();
        let lately = [PageSet::new(), PageSet::new()];
        let (lately_since, served, expected, being_placed, put_off) = (None, None, None, None, None);
        Self {
            entry: None,
            watch,
            discarded,
            is_own: true,
            inherited: PageSet::new(),
            resumed: PageSet::new(),
            is_partial: false,
            given,
            lately,
            lately_since,
            served,
            expected,
            being_placed,
            put_off,
            may_be_claimed: false,
            homes: Vec::new(),
        }
    }

    /// Says that this memory shows a template's bytes again when it is discarded. A copy of these bytes lies at
    /// `content`, for good.
    pub fn set_home(&mut self, range: PageRange, content: HostVirt) {
        self.homes.retain(|(known, _)| known.end() <= range.start || range.end() <= known.start);
        self.homes.push((range, content));
    }

    /// All memory that shows a template's bytes again when it is discarded, with the address of a copy of these bytes.
    pub fn homes(&self) -> &[(PageRange, HostVirt)] {
        &self.homes
    }

    /// The address of the bytes that a page shows when it is discarded; `None` if it shows zeros.
    pub fn home_of(&self, page: HostVirt) -> Option<HostVirt> {
        let (range, content) = self.homes.iter().find(|(range, _)| range.start <= page && page < range.end())?;
        Some(content.add_pages(page.page() - range.start.page()))
    }

    /// Copies the records of `homes` in the range `from` to where the memory was moved.
    fn move_homes(&mut self, from: PageRange, to: HostVirt) {
        for (range, content) in self.homes.clone() {
            let (start, end) = (range.start.max(from.start), range.end().min(from.end()));
            if start < end {
                let there = to.add_pages(start.page() - from.start.page());
                let pages = end.page() - start.page();
                self.homes
                    .push((PageRange { start: there, pages }, content.add_pages(start.page() - range.start.page())));
            }
        }
    }

    /// Follows a forked child's memory through the child's userfaultfd. `discarded` are the pages that its parent had
    /// discarded, including those that had become zeros since: some of them may have lost their page-table entries
    /// again.
    pub fn of_child(watch: Userfault, discarded: PageSet) -> Self {
        let may_be_claimed = true;
        Self { inherited: discarded.clone(), discarded, is_own: false, may_be_claimed, ..Self::own(Arc::new(watch)) }
    }

    /// Goes on following a child whose follower was killed, by the messages that the killed one had read. Also returns
    /// the descriptor numbers of the userfaultfds of this child's children, each with the pages that were discarded
    /// before its fork.
    pub(crate) fn resumed(watch: Userfault, found: &Found) -> (Self, Vec<(i32, PageSet)>) {
        let (mut this, mut births) = (Self::of_child(watch, PageSet::new()), Vec::new());
        this.is_partial = found.is_partial;
        for logged in &found.log {
            match *logged {
                Logged::Discard(range) => this.resumed.insert(range),
                Logged::Inherited(range) => this.inherited.insert(range),
                Logged::Moved(from, to) => {
                    move_within(&mut this.resumed, from, to);
                    move_within(&mut this.inherited, from, to);
                }
                Logged::Forked(child) => births.push((child, this.known())),
            }
        }
        this.discarded = this.known();
        this.resumed.ranges().for_each(|range| this.inherited.remove(range));
        this.succeed();
        (this, births)
    }

    /// All pages that the killed predecessor of this follower knew to be discarded.
    fn known(&self) -> PageSet {
        let mut all = self.resumed.clone();
        self.inherited.ranges().for_each(|range| all.insert(range));
        all
    }

    /// Records this child in the journal, if there is room, so that another process can go on following it. A child
    /// whose parent was in the journal may be recorded already.
    pub fn keep_journal(&mut self, journal: &Arc<Journal>, about: About) {
        if self.entry.is_some() {
            return;
        }
        self.entry = journal.enter(&self.watch, about, &self.discarded, &self.inherited);
        self.entry.iter().filter(|_| self.is_partial).for_each(Entry::make_partial);
    }

    /// Notes in the journal that no member's agent will take over this child again.
    pub fn leave_alone(&self) {
        self.entry.iter().for_each(Entry::leave_alone);
    }

    /// Gives up this child's place in the journal.
    pub fn leave_journal(&mut self) {
        self.entry = None;
    }

    /// From here on, threads that touch missing pages are left asleep, until [`Follower::answer_missing`]: the parent's
    /// agent may be about to copy these pages to the child.
    pub fn put_off_missing(&mut self) {
        self.put_off.get_or_insert_with(PageSet::new);
    }

    /// Wakes the threads that were left asleep since [`Follower::put_off_missing`].
    pub fn answer_missing(&mut self) {
        // Threads that are woken try again; for pages that are still missing, the kernel sends another message.
        for range in self.put_off.take().iter().flat_map(PageSet::ranges) {
            let _ = self.watch.wake(range);
        }
    }

    /// The userfaultfd.
    pub fn watch(&self) -> &Userfault {
        &self.watch
    }

    /// The userfaultfd, to be kept longer than this borrow.
    pub fn shared_watch(&self) -> Arc<Userfault> {
        Arc::clone(&self.watch)
    }

    /// Pages that were discarded and have not become zeros since.
    pub const fn discarded(&self) -> &PageSet {
        &self.discarded
    }

    /// Begins a record of discarded pages that become zeros from here on; `false` drops the record.
    pub fn keep_in_mind(&mut self, keep: bool) {
        self.served = keep.then(PageSet::new);
    }

    /// Pages of a range that were not discarded, or that were discarded and became zeros some time ago. They keep their
    /// page-table entries, unless the kernel drops an entry for reasons of its own.
    pub fn kept(&self, range: PageRange) -> Vec<PageRange> {
        let lately = if self.was_given_lately() { &self.lately[..] } else { &[] };
        missing_in([&self.discarded].into_iter().chain(&self.served).chain(lately), range)
    }

    /// Pages of a range of which no discard is recorded.
    pub fn never_discarded(&self, range: PageRange) -> Vec<PageRange> {
        missing_in([&self.discarded, &self.given], range)
    }

    fn was_given_lately(&self) -> bool {
        self.lately_since.is_some_and(|then| then.elapsed() <= 2 * ZAP_TIME)
    }

    /// Announces a change that the agent is about to make; `None` withdraws the announcement.
    pub const fn expect(&mut self, expected: Option<Expected>) {
        self.expected = expected;
    }

    /// Announces that slots are about to be placed over `place`, by a move of the mapping at `from`. A thread that
    /// touches an absent page there sleeps until the agent has [said](Follower::lost_entries) that the slots are
    /// placed, and wakes the thread. The message of a touch is read before that of the move. Until both are read, an
    /// old page (discarded, and then zeros) cannot be told from a new page with its content.
    pub const fn expect_placing(&mut self, from: HostVirt, place: PageRange) {
        (self.expected, self.being_placed) = (Some(Expected::Placing(from)), Some(place));
    }

    /// Withdraws the announcement of [`Follower::expect_placing`].
    pub const fn expect_no_placing(&mut self) {
        (self.expected, self.being_placed) = (None, None);
    }

    /// Says that these pages have lost their page-table entries. Those that had become zeros count as discarded again.
    pub fn lost_entries(&mut self, range: PageRange) {
        let served = self.served.as_ref().map(|served| served.within(range)).unwrap_or_default();
        served.into_iter().for_each(|range| self.discarded.insert(range));
        self.forget_given(range);
        self.being_placed = None;
    }

    /// Whether no page is discarded and not yet zeros, and none became zeros lately. Then another process may follow
    /// the memory without these records.
    pub fn is_at_rest(&self) -> bool {
        self.discarded.is_empty() && self.lately_since.is_none() && !self.is_partial
    }

    /// Pages that were discarded and became zeros. The record lasts until they are [forgotten](Follower::forget).
    pub const fn given(&self) -> &PageSet {
        &self.given
    }

    /// Says that these pages were discarded in a way of which the kernel sends no message.
    pub fn note_discard(&mut self, range: PageRange) {
        self.discarded.insert(range);
    }

    /// Drops the record of discards in this range, because other memory has taken its place.
    pub fn forget(&mut self, range: PageRange) {
        self.discarded.remove(range);
        self.forget_given(range);
    }

    fn forget_given(&mut self, range: PageRange) {
        self.given.remove(range);
        self.lately.iter_mut().for_each(|lately| lately.remove(range));
    }

    /// Takes over from another process that read the child's messages and has ended. Meanwhile an agent in the child
    /// may have claimed the userfaultfd. The other process may not have answered all messages that it read, so sleeping
    /// threads are woken and try again.
    pub fn succeed(&mut self) {
        self.expect_claim();
        let _ = self.watch.wake(PROGRAMS);
    }

    /// Says that an agent in the child may claim the userfaultfd from here on.
    pub const fn expect_claim(&mut self) {
        self.may_be_claimed = true;
    }

    /// Whether an agent in the child has claimed the userfaultfd, and follows the child's memory itself. The agent
    /// begins only after the process that reads the messages has answered that it saw the claim.
    pub fn is_claimed(&mut self) -> bool {
        self.may_be_claimed = self.may_be_claimed && self.watch.is_claimed();
        self.may_be_claimed
    }

    /// Reads the next message and answers it. While an agent claims the child's userfaultfd, no message is read.
    ///
    /// # Errors
    /// The kernel refuses, for instance because no file descriptors are left.
    pub fn read(&mut self) -> io::Result<Told> {
        if self.is_claimed() {
            return Ok(Told::Nothing);
        }
        let message = match &mut self.entry {
            Some(entry) => entry.next_message(&self.watch)?,
            None => self.watch.next_message()?,
        };
        let Some(message) = message else { return Ok(Told::Nothing) };
        match message {
            Message::Fault(page, fault) => {
                self.answer(PageRange { start: page, pages: 1 }, fault);
                Ok(Told::Touch)
            }
            Message::Discard(range) => Ok(self.take_discard(range)),
            // The agent places slots there. Discards in the destination meanwhile are recorded, and the records stay.
            Message::Moved(from, _) if self.expected == Some(Expected::Placing(from.start)) => {
                self.expected = None;
                Ok(Told::Touch)
            }
            Message::Moved(from, to) => {
                move_within(&mut self.discarded, from, to);
                move_within(&mut self.given, from, to);
                move_within(&mut self.inherited, from, to);
                move_within(&mut self.resumed, from, to);
                self.lately.iter_mut().for_each(|lately| move_within(lately, from, to));
                self.move_homes(from, to);
                if self.expected != Some(Expected::Moving(from.start)) {
                    return Ok(Told::Move(from, to));
                }
                // A mapping may stay behind at the old place. Its pages read as zeros until the agent has put other
                // memory there.
                self.discarded.insert(from);
                Ok(Told::Touch)
            }
            Message::Forked(child) => {
                let mut discarded = self.discarded.clone();
                self.given.ranges().for_each(|range| discarded.insert(range));
                let entry = self.entry.as_mut().and_then(|entry| entry.born(&child, &discarded));
                let child = Self { entry, is_partial: self.is_partial, ..Self::of_child(child, discarded) };
                child.entry.iter().filter(|_| child.is_partial).for_each(Entry::make_partial);
                Ok(Told::Birth(Box::new(child)))
            }
            Message::Other => Ok(Told::Touch),
        }
    }

    fn take_discard(&mut self, range: PageRange) -> Told {
        if self.expected == Some(Expected::Dropping(range.start)) {
            self.expected = None;
            return Told::Touch;
        }
        // This discard may not have happened yet: pages that have an entry may be about to lose it.
        self.inherited.remove(range);
        self.resumed.remove(range);
        self.discarded.insert(range);
        Told::Discard
    }

    fn answer(&mut self, page: PageRange, fault: Fault) {
        let is_placed = |place: PageRange| place.start <= page.start && page.start < place.end();
        let done = match fault {
            Fault::Absent if self.being_placed.is_some_and(is_placed) => return,
            Fault::Absent if self.discarded.contains(page.start) || self.given.contains(page.start) => {
                self.give_zeros(page)
            }
            // It is not known whether the page was discarded. A wrong page would be worse than `SIGBUS`.
            Fault::Absent if self.is_partial => self.watch.poison(page).map(drop),
            Fault::Absent => self.watch.map_present(page).map(drop),
            Fault::Missing | Fault::Protected if self.is_own => return,
            Fault::Missing if self.put_off.is_some() => {
                self.put_off.iter_mut().for_each(|put_off| put_off.insert(page));
                return;
            }
            Fault::Missing => self.watch.map_zeros(page).map(drop),
            Fault::Protected => self.watch.protect(page, false),
        };
        if done.is_err() {
            // Another thread was faster, other memory has taken the place, or another message has to be read first. The
            // thread that sleeps is woken and tries again. If it faults again, the kernel sends another message.
            let _ = self.watch.wake(page);
        }
    }

    fn give_zeros(&mut self, page: PageRange) -> Result<(), Errno> {
        let given = match self.home_of(page.start) {
            Some(content) => self.watch.copy_pages(content, page),
            None => self.watch.map_zeros(page),
        };
        match given {
            Ok(_) => {
                self.became_zeros(page);
                if let Some(served) = &mut self.served {
                    served.insert(page);
                }
                Ok(())
            }
            // The entry is a marker that the page was write-protected. The marker is removed, and the next try
            // succeeds.
            Err(Errno::EXIST) if !self.is_own => self.watch.protect(page, false).and(Err(Errno::EXIST)),
            Err(e) => Err(e),
        }
    }

    /// Notes that these discarded pages have become zeros. The kernel sends the message of a discard first, and removes
    /// the page table entries when the discarding thread runs again. Zeros that another thread has got in between are
    /// removed, too.
    fn became_zeros(&mut self, range: PageRange) {
        self.discarded.remove(range);
        self.given.insert(range);
        if self.lately_since.is_none_or(|then| then.elapsed() > ZAP_TIME) {
            self.lately.swap(0, 1);
            self.lately[1] = PageSet::new();
            self.lately_since = Some(Instant::now());
        }
        self.lately[1].insert(range);
    }

    /// Maps zeros in discarded pages that have lost their page-table entries by now. Pages that still have an entry are
    /// left for the next call.
    ///
    /// # Errors
    /// `ESRCH`: the address space is gone.
    pub fn settle(&mut self) -> Result<(), Errno> {
        if !self.is_at_rest() && self.is_claimed() {
            return Ok(());
        }
        self.look_again();
        for range in self.discarded.ranges().collect::<Vec<_>>() {
            let mut at = 0;
            while at < range.pages {
                let rest = PageRange { start: range.start.add_pages(at), pages: range.pages - at };
                let one = PageRange { pages: 1, ..rest };
                let is_inherited = self.inherited.contains(one.start);
                if is_inherited {
                    // The parent may have write-protected a page that it had discarded, or was about to discard. The
                    // kernel leaves a marker then, which counts as an entry.
                    let _ = self.watch.protect(one, false);
                }
                // The kernel refuses a range of more than one mapping.
                let mapped = self.watch.map_zeros(rest).or_else(|_| self.watch.map_zeros(one));
                at += match mapped {
                    Ok(pages) => {
                        self.became_zeros(PageRange { pages, ..rest });
                        pages
                    }
                    Err(Errno::SRCH) => return Err(Errno::SRCH),
                    Err(Errno::AGAIN) => return Ok(()),
                    // This memory is not followed any more: it was unmapped, or mapped anew.
                    Err(Errno::NOENT | Errno::INVAL) => {
                        self.discarded.remove(one);
                        1
                    }
                    Err(Errno::EXIST) => {
                        self.has_entry(one);
                        1
                    }
                    // The page has not lost its entry yet, or memory is short.
                    Err(_) => 1,
                };
            }
        }
        self.have_settled();
        Ok(())
    }

    /// Notes that a discarded page has a page-table entry.
    fn has_entry(&mut self, one: PageRange) {
        if self.inherited.contains(one.start) {
            // The child has got this page at the fork.
            self.discarded.remove(one);
        } else if self.resumed.contains(one.start) {
            // The predecessor has made zeros of the page, or the page is about to lose its entry.
            self.became_zeros(one);
        }
        // Any other page is about to lose its entry.
    }

    /// Notes that zeros were tried in all discarded pages.
    fn have_settled(&mut self) {
        self.inherited = PageSet::new();
        self.resumed = PageSet::new();
        if self.is_at_rest()
            && let Some(entry) = &mut self.entry
        {
            entry.clear();
        }
    }

    /// Whether [`Follower::settle`] has anything to do.
    pub fn has_work(&self) -> bool {
        !self.discarded.is_empty() || self.is_to_look_again()
    }

    fn is_to_look_again(&self) -> bool {
        !self.is_own && self.lately_since.is_some() && !self.was_given_lately()
    }

    /// Maps zeros again in pages of a child whose zeros the discarding thread has removed, once that thread has had its
    /// time ([`ZAP_TIME`]). The record of each page is dropped after it was tried.
    fn look_again(&mut self) {
        if !self.is_to_look_again() {
            return;
        }
        for looked in 0.. {
            let Some(page) = self.given.ranges().next() else { break };
            let one = PageRange { pages: 1, ..page };
            if looked == LOOKED_AT_AGAIN || self.watch.map_zeros(one) == Err(Errno::AGAIN) {
                return;
            }
            self.given.remove(one);
        }
        self.lately = [PageSet::new(), PageSet::new()];
        self.lately_since = None;
    }

    /// Whether the address space is still there.
    pub fn is_alive(&self) -> bool {
        // Lifts the write protection of a page that has none. `ESRCH` means that the address space is gone, and
        // `EINVAL` that the userfaultfd was never initialised (`UFFDIO_API`).
        let page = PageRange { start: HostVirt(1 << 16), pages: 1 };
        !matches!(self.watch.protect(page, false), Err(Errno::SRCH | Errno::INVAL))
    }
}
