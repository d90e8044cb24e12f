//! The follower: the agent's second thread. It reads the kernel's messages about memory that maps the pool, or is in
//! the middle of a fold ([`act::Follower`]).
//!
//! **Locks.** The follower takes neither the table's lock nor a lock of the program's. So a thread that waits for the
//! follower, even with the table's lock held, never waits for long. The follower's own lock ([`Following::hold`]) is
//! held while messages are read. While the agent's thread holds that lock, no discard and no fork is acknowledged: the
//! discarding thread has not begun to discard, and the forking thread has not gone on.
//!
//! ```text
//!   a thread of the program      kernel                 follower                     agent's thread
//!      | discards (any way) ----> waits                    |                            |
//!      |                            | ------ message ----> reads it, with its lock held |
//!      |                          zaps                     | notes "discarded"          |
//!      | touches ---------------> sleeps -- message -----> maps zeros                   |
//!      |                                                   |           puts anonymous memory there when it next looks
//! ```
//!
//! **Changes of mappings** by system calls that bypass the hooks are not reported before they happen. So right before
//! the agent replaces anything, it asks the kernel whether the mapping is still as the table says
//! ([`Following::may_replace`]). Moves are reported before the moving thread goes on. After the first such change,
//! nothing of this process is replaced or released any more ([`Following::lost_track`]). Folded pages stay folded and
//! followed, and the worker may give their slots to no one else until the process ends.
//!
//! **End.** The follower never ends while anything is registered: discarded memory that nobody follows would show the
//! pool's bytes again. A bug that stops the follower ends the process.

use crate::arena;
use crate::cpu_time::cpu_time;
use crate::keeper::{self, Keeper};
use crate::lock::{Guard, Lock};
use crate::map::Traits;
use crate::maps::{self, Kind, Mapping, Maps};
use crate::spawn;
use crate::world;
use act::{Expected, Follower, Told, Userfault, Watch};
use page::{HostVirt, PageRange, PageSet};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::time::ClockId;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Interval at which the follower reads the messages of children that it follows itself, because no keeper does: 20 ms.
const CHILDREN_EVERY: Duration = Duration::from_millis(20);
/// Longest time that an ending process waits until the keeper has all of its children, in milliseconds.
const HAND_OVER_MS: u32 = 1000;
/// Number of forks after which the agent's thread is woken, to see how much time forks cost.
const BIRTHS_TOLD: u64 = 4;
/// Interval between two checks whether the keeper, which follows children of this process, is still there.
const KEPT_EVERY: Duration = Duration::from_millis(500);

/// The follower, as the agent's thread knows it.
pub struct Following {
    watch: Arc<Userfault>,
    shared: Lock<Shared>,
    /// Whether the program may discard memory in ways that no hook sees.
    expects_discards: AtomicBool,
    follows_forks: bool,
    /// The kernel's list of mappings, for the agent's thread.
    maps: Maps,
    /// How the program was seen to change mappings in a way that bypasses the hooks; empty if it was not.
    lost_track: OnceLock<&'static str>,
    /// Whether mappings may have changed since the table was last compared with the kernel's list, in a process without
    /// hooks.
    is_stale: AtomicBool,
    /// Whether the program was seen to move memory that was folded: slots may be mapped where the table knows of none.
    has_moved: AtomicBool,
    /// Whether another follower has taken this one's place.
    is_retired: AtomicBool,
    /// File that becomes readable when another follower has taken this one's place.
    retirement: OwnedFd,
    /// Whether the follower's thread reads no message any more.
    has_ended: AtomicBool,
    /// Processor time of the follower's thread, in microseconds.
    cpu_us: AtomicU64,
    /// Number of forks since the follower started.
    births: AtomicU64,
    /// Whether the program has as many live children as can be followed, so that its memory must become private.
    are_too_many: AtomicBool,
    /// File that becomes readable with every [`BIRTHS_TOLD`]th fork, and with the first change while the agent's thread
    /// rests.
    alarm: OwnedFd,
    /// Whether the agent's thread rests: it sleeps for long, so changes of memory by the program wake it.
    is_resting: AtomicBool,
}

/// State that the follower's thread and the agent's thread use, under one lock.
pub struct Shared {
    own: Follower,
    /// Children that have not been handed to the keeper.
    born: Vec<Follower>,
    /// Whether the keeper has answered for all children that were handed to it.
    is_answered: bool,
    /// Children that may lack pages, because they were forked while pages were out on the stage.
    lacking: Vec<Follower>,
    /// Whether pages of the process may be moved out to the stage of a section, where no thread can reach them.
    are_pages_out: bool,
    /// Whether a section is under way. Children are not handed to the keeper meanwhile, unless descriptors are short.
    is_in_section: bool,
    /// Moves that the program made during the section, in a way that bypasses the hooks: which pages, and where to.
    moved: Vec<(PageRange, HostVirt)>,
}

/// A guard of the follower's lock. While it lives, every thread that discards or forks waits.
pub type Held<'a> = Guard<'a, Shared>;

/// The follower of this process, for hooks on the program's threads.
static CURRENT: AtomicPtr<Following> = AtomicPtr::new(std::ptr::null_mut());

/// While this lives, a hook moves the mapping at this address, so the follower does not take the move for one that
/// bypassed the hooks.
pub struct Moving(Option<&'static Following>);

impl Moving {
    /// To be called before the mapping at `from` is moved.
    pub fn announce(from: HostVirt) -> Self {
        let following = current();
        following.inspect(|following| following.hold().own.expect(Some(Expected::Moving(from))));
        Self(following)
    }
}

impl Drop for Moving {
    fn drop(&mut self) {
        self.0.inspect(|following| following.hold().own.expect(None));
    }
}

/// The follower of this process, if it has one.
pub fn current() -> Option<&'static Following> {
    // SAFETY: the pointer is null, or points to what `publish` has leaked.
    unsafe { CURRENT.load(Ordering::Acquire).as_ref() }
}

/// Waits until all children of this process are handed to the keeper, but at most [`HAND_OVER_MS`]. Returns whether
/// they are. To be called when the process, or the agent in it, is about to end, after which nobody here would follow
/// the children.
pub fn wait_for_keeper() -> bool {
    let Some(following) = current() else { return true };
    for _ in 0..HAND_OVER_MS {
        let shared = following.hold();
        if shared.born.is_empty() && shared.is_answered {
            return true;
        }
        drop(shared);
        std::thread::sleep(Duration::from_millis(1));
    }
    false
}

/// Whether the program was seen to change mappings in a way that bypasses the hooks.
pub fn has_lost_track() -> bool {
    current().is_some_and(|following| following.lost_track().is_some())
}

/// Wakes the agent's thread if it sleeps for long: the program has changed memory that the table knows.
pub fn wake_resting() {
    current().into_iter().for_each(Following::wake);
}

/// Forgets the parent's follower. For a forked child, before it has threads.
pub(crate) fn begin_anew() {
    CURRENT.store(std::ptr::null_mut(), Ordering::Release);
}

impl Following {
    /// Starts the follower's thread. Memory that is registered with `watch` is followed from here on.
    ///
    /// # Errors
    /// Memory is short, or no thread or file descriptor can be had.
    pub fn start(watch: Userfault, follows_forks: bool, keeper: PathBuf) -> Result<Arc<Self>, Errno> {
        let watch = Arc::new(watch);
        let own = Follower::own(Arc::clone(&watch));
        let shared = Lock::new(Shared::new(own));
        let (maps, lost_track) = (Maps::open()?, OnceLock::new());
        let (expects_discards, is_retired) = (AtomicBool::new(false), AtomicBool::new(false));
        let (is_stale, has_moved, has_ended) = (AtomicBool::new(false), AtomicBool::new(false), AtomicBool::new(false));
        let (cpu_us, births, are_too_many) = (AtomicU64::new(0), AtomicU64::new(0), AtomicBool::new(false));
        let alarm = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?;
        let retirement = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?;
        let is_resting = AtomicBool::new(false);
        let this = Arc::new(Self {
            watch,
            shared,
            expects_discards,
            follows_forks,
            maps,
            lost_track,
            is_stale,
            has_moved,
            is_retired,
            retirement,
            has_ended,
            cpu_us,
            births,
            are_too_many,
            alarm,
            is_resting,
        });
        let follower = Arc::clone(&this);
        spawn::thread(c"pagefold-follow", spawn::SMALL_STACK_BYTES, move || follower.run(Keeper::new(keeper)))?;
        Ok(this)
    }

    /// The userfaultfd.
    pub fn watch(&self) -> &Userfault {
        &self.watch
    }

    /// Makes this the follower of the process, which [`current`] returns.
    pub fn publish(self: &Arc<Self>) {
        // The reference is leaked, because threads of the program may be using it at any time. A process has two
        // followers at most.
        CURRENT.store(Arc::into_raw(Arc::clone(self)).cast_mut(), Ordering::Release);
    }

    /// Processor time that the follower's thread has used.
    pub fn cpu_time(&self) -> Duration {
        Duration::from_micros(self.cpu_us.load(Ordering::Relaxed))
    }

    /// Number of forks since this follower started, while memory was followed.
    pub fn births(&self) -> u64 {
        self.births.load(Ordering::Relaxed)
    }

    /// Whether, since the last call, the program was found to have as many children as can be followed.
    pub fn found_too_many(&self) -> bool {
        self.are_too_many.swap(false, Ordering::SeqCst)
    }

    fn tell_too_many(&self) {
        if !self.are_too_many.swap(true, Ordering::SeqCst) {
            ring(&self.alarm);
        }
    }

    /// A file that becomes readable when there were many forks, or when memory changes while the agent's thread rests.
    /// Reading it makes it unreadable again.
    pub fn alarm(&self) -> BorrowedFd<'_> {
        self.alarm.as_fd()
    }

    /// Says that the agent's thread begins to sleep for long, or has ended that (`begins` is false). Returns `false` if
    /// it must not sleep, because there is discarded memory to be handled.
    pub fn rest(&self, begins: bool) -> bool {
        self.is_resting.store(begins, Ordering::SeqCst);
        // Discards are looked up after the state was set: a discard that comes later finds the state set, and wakes the
        // thread.
        !begins || self.hold().all_discarded().is_empty()
    }

    /// Wakes the agent's thread if it sleeps for long.
    fn wake(&self) {
        // The program's threads have another table of files, in which the alarm's number may be a file of the
        // program's. Their changes are seen within `give_way::CHANGES_EVERY`.
        if arena::is_own_thread()
            && self.is_resting.load(Ordering::Relaxed)
            && self.is_resting.swap(false, Ordering::SeqCst)
        {
            ring(&self.alarm);
        }
    }

    fn count_birth(&self) {
        if (self.births.fetch_add(1, Ordering::Relaxed) + 1).is_multiple_of(BIRTHS_TOLD) {
            ring(&self.alarm);
        }
    }

    /// Has the follower's thread end soon. Nothing is registered with its userfaultfd any more, and nothing will be.
    pub fn retire(&self) {
        self.is_retired.store(true, Ordering::Relaxed);
        ring(&self.retirement);
    }

    /// Waits until the thread of a [retired](Following::retire) follower reads no message any more.
    pub fn wait_for_end(&self) {
        while !self.has_ended.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Whether memory may be discarded in ways that no hook sees: this was expected, or was seen.
    pub fn expects_discards(&self) -> bool {
        self.expects_discards.load(Ordering::Relaxed)
    }

    /// Notes that memory may be discarded in ways that no hook sees.
    pub fn expect_discards(&self) {
        self.expects_discards.store(true, Ordering::Relaxed);
    }

    /// How the program was seen to change mappings in a way that bypasses the hooks; `None` if it was not. Every move
    /// that was finished before this call is known.
    pub fn lost_track(&self) -> Option<&'static str> {
        self.lost_track.get().copied()
    }

    /// Waits until all messages about what happened to followed memory before this call are read.
    pub fn catch_up(&self) {
        drop(self.hold_caught_up());
    }

    /// Waits as [`Following::catch_up`] does, and from then on holds back every thread that discards or forks.
    pub fn hold_caught_up(&self) -> Held<'_> {
        // No memory is mapped at this page. While a message is unread, the kernel refuses the call with `EAGAIN`; after
        // that, for another reason.
        let nowhere = PageRange { start: HostVirt(1 << 16), pages: 1 };
        self.until_read(|_| self.watch.protect(nowhere, false)).0
    }

    /// To be called before a section moves its first page out to the stage, when all absent pages of its run are kept
    /// absent. Children that are forked from here on may lack pages; children that were forked before have them.
    pub fn take_out_of_reach(&self) {
        self.hold_caught_up().are_pages_out = true;
    }

    /// Whether a range is memory of this kind and with these traits, as the table says. To be asked right before the
    /// range is replaced, with the table's lock held. If the kernel's list differs, for a reason other than locked
    /// memory, no memory of this process is ever replaced again.
    ///
    /// The program can change the range between the answer and the replacement. This takes a microsecond or two, and
    /// the kernel offers no means against it. Once the program was seen to make such a change, nothing is replaced any
    /// more.
    pub fn may_replace(&self, range: PageRange, traits: Traits, kind: Kind) -> bool {
        if self.lost_track().is_some() || !world::is_held() {
            return false;
        }
        let is_known = self.maps.shows(range, traits, kind);
        // After `mlockall(MCL_FUTURE)` the agent's own mappings are locked too; the range is left as it is.
        if !is_known && !traits.is_locked() && !maps::locks_future() {
            self.lose_track("unmapped or replaced memory that was folded, or changed its protection, or locked it");
        }
        is_known
    }

    /// Whether, by the kernel's list, all of a range is a private mapping of this file, from this offset in bytes on.
    pub fn shows_file(&self, range: PageRange, file: (u64, u64), offset: u64) -> bool {
        self.maps.shows_file(range, file, offset)
    }

    /// The mapping that holds a page, by the kernel's list.
    pub fn mapping_of(&self, page: HostVirt) -> Option<Mapping> {
        self.maps.ask(page)
    }

    /// As [`Following::may_replace`], for memory that is registered with the follower's userfaultfd. Also fails if that
    /// registration is gone, because the program has unmapped the memory.
    pub fn may_replace_followed(&self, range: PageRange, traits: Traits, kind: Kind) -> bool {
        // This call changes nothing: writers are kept out already, or no page lies there that they could write.
        let (held, followed) = self.until_read(|_| self.watch.protect(range, true));
        drop(held);
        if followed == Err(Errno::NOENT) {
            self.lose_track("unmapped memory that was folded");
        }
        followed.is_ok() && self.may_replace(range, traits, kind)
    }

    /// Notes that the program changed mappings in a way that bypasses the hooks. In a process without hooks, mappings
    /// are replaced only while the program's threads are stopped, so there it is enough to read the kernel's list
    /// again.
    fn lose_track(&self, how: &'static str) {
        if world::is_hooked() {
            let _ = self.lost_track.set(how);
        }
        self.is_stale.store(true, Ordering::Relaxed);
    }

    /// Whether mappings were found to differ from the table since the last call.
    pub fn was_stale(&self) -> bool {
        self.is_stale.swap(false, Ordering::Relaxed)
    }

    /// Whether the program has moved slots to addresses where the table knows of none.
    pub fn has_moved(&self) -> bool {
        self.has_moved.load(Ordering::Relaxed)
    }

    /// Whether this page, which lies in a mapping of the pool, is registered with the follower's userfaultfd, and so
    /// with no other.
    pub fn follows(&self, page: HostVirt) -> bool {
        // This call fails if another userfaultfd has the mapping, and changes nothing where this one has it already.
        // Calls that protect or place pages would show nothing: they go through any userfaultfd of the process.
        self.watch.register(PageRange { start: page, pages: 1 }, Watch::AbsentAndWrites).is_ok()
    }

    /// Whether all of a range is memory of this kind and with these traits, by the kernel's list.
    pub fn shows(&self, range: PageRange, traits: Traits, kind: Kind) -> bool {
        self.maps.shows(range, traits, kind)
    }

    /// Holds back every thread that discards or forks, as long as the guard lives, which must be a moment. A caller
    /// that needs the table's lock, too, takes that lock first.
    pub fn hold(&self) -> Held<'_> {
        self.shared.lock()
    }

    /// Repeats a call until the kernel does not refuse it because of an unread message (`EAGAIN`). While the returned
    /// guard lives, no thread that discards or forks goes on. Everything that the kernel reported before the call is
    /// known.
    pub fn until_read<T>(&self, mut call: impl FnMut(&mut Shared) -> Result<T, Errno>) -> (Held<'_>, Result<T, Errno>) {
        loop {
            let mut held = self.hold();
            match call(&mut held) {
                Err(Errno::AGAIN) => drop(held),
                result => return (held, result),
            }
            std::thread::yield_now();
        }
    }

    /// Lifts the write protection of a range, and wakes the threads that wait to write. If the memory is not followed
    /// any more, no thread waits.
    pub fn let_writers_in(&self, range: PageRange) {
        drop(self.until_read(|_| self.watch.protect(range, false)));
        let _ = self.watch.wake(range);
    }

    /// Ends the section that [`Shared::begin_section`] began, also where the program has moved memory meanwhile.
    /// `private` is memory that was registered only for the section; parts of it that were moved are unregistered at
    /// their new addresses. The write protection of all moved memory is lifted.
    pub fn end_section(&self, private: &[PageRange]) {
        let mut private = private.to_vec();
        let moved = self.hold().end_section();
        for (from, to) in moved {
            let there = |part: PageRange| to.add_pages(part.start.page() - from.start.page());
            let mut known = PageSet::new();
            private.iter().for_each(|part| known.insert(*part));
            let moved = known.within(from).into_iter().map(|part| PageRange { start: there(part), ..part });
            for part in moved.collect::<Vec<_>>() {
                let _ = self.watch.unregister(part);
                private.push(part);
            }
            self.let_writers_in(PageRange { start: to, ..from });
        }
    }

    fn run(&self, mut keeper: Keeper) {
        let mut known = 0;
        while !self.is_retired.load(Ordering::Relaxed) {
            let (is_well, has_children) = {
                let is_well = self.hold().read(self).is_ok();
                // The lock is released in between, so that the agent's thread gets it before the next fork is read.
                // During a section, children are handed to the keeper only if descriptors are short.
                let mut shared = self.hold();
                if !shared.is_in_section || !is_well || shared.born.len() >= keeper::descriptors() / 4 {
                    look_after(&mut shared.born, &mut keeper);
                }
                shared.is_answered = keeper.has_answered();
                let here = shared.born.len() + shared.lacking.len();
                let births = self.births();
                let are_new = births != std::mem::replace(&mut known, births);
                if keeper.is_to_give_way(here, are_new) || !is_well {
                    self.tell_too_many();
                }
                (is_well, here > 0)
            };
            if !is_well {
                // For example, no file descriptor is left: the message is still unread, and `poll` would return at
                // once.
                keeper.leave();
                std::thread::sleep(CHILDREN_EVERY);
            }
            let time = match (has_children, keeper.is_idle() && self.follows_forks) {
                (true, _) => Some(CHILDREN_EVERY),
                // Nothing wakes this thread when the keeper is gone, so it checks from time to time.
                (false, false) => Some(KEPT_EVERY),
                (false, true) => None,
            };
            let time = time.and_then(|time| Timespec::try_from(time).ok());
            let used = u64::try_from(cpu_time(ClockId::ThreadCPUTime).as_micros()).unwrap_or(u64::MAX);
            self.cpu_us.store(used, Ordering::Relaxed);
            let mut files = [self.watch.as_fd(), self.retirement.as_fd(), self.retirement.as_fd()];
            if let Some(answers) = keeper.answers() {
                files[2] = answers;
            }
            let _ = poll(&mut files.map(|file| PollFd::from_borrowed_fd(file, PollFlags::IN)), time.as_ref());
        }
        self.has_ended.store(true, Ordering::Release);
    }
}

fn ring(file: &OwnedFd) {
    // The write fails only if the counter of the eventfd would overflow.
    let _ = rustix::io::write(file, &1_u64.to_ne_bytes());
}

impl Shared {
    const fn new(own: Follower) -> Self {
        Self {
            own,
            born: Vec::new(),
            is_answered: true,
            lacking: Vec::new(),
            are_pages_out: false,
            is_in_section: false,
            moved: Vec::new(),
        }
    }

    fn read(&mut self, following: &Following) -> io::Result<()> {
        loop {
            match self.own.read()? {
                Told::Nothing => return Ok(()),
                Told::Touch => {}
                Told::Discard => {
                    following.expect_discards();
                    following.wake();
                }
                Told::Move(from, to) => {
                    following.wake();
                    following.lose_track("moved memory that was folded");
                    following.has_moved.store(true, Ordering::Relaxed);
                    // The old place must read as zeros, and so must the pages by which the moved mapping has grown. A
                    // mapping of the pool would show the pool's bytes there.
                    let behind = following.maps.behind(PageRange { start: to, ..from });
                    [from, behind].into_iter().for_each(|range| self.own.note_discard(range));
                    if self.is_in_section {
                        self.moved.push((from, to));
                    }
                }
                Told::Birth(child) => {
                    let mut child = *child;
                    following.count_birth();
                    if self.are_pages_out {
                        child.put_off_missing();
                        self.lacking.push(child);
                    } else {
                        self.born.push(child);
                    }
                    // This child is handed to the keeper before the next message is read, because each child takes a
                    // descriptor.
                    return Ok(());
                }
            }
        }
    }

    /// Pages of a range that were not discarded. See [`Follower::kept`].
    pub fn kept(&self, range: PageRange) -> Vec<PageRange> {
        self.own.kept(range)
    }

    /// Pages of a range of which no discard is known. If one of them has no page-table entry, it still has the bytes of
    /// its slot.
    pub fn never_discarded(&self, range: PageRange) -> Vec<PageRange> {
        self.own.never_discarded(range)
    }

    /// All pages that were discarded, also those that became zeros since.
    pub fn all_discarded(&self) -> PageSet {
        let mut all = self.own.discarded().clone();
        self.own.given().ranges().for_each(|range| all.insert(range));
        all
    }

    /// Maps zeros in discarded pages at once.
    pub fn settle(&mut self) {
        // If the address space is gone, so is the caller.
        let _ = self.own.settle();
    }

    /// Drops all records of these pages, because other memory lies there now.
    pub fn forget(&mut self, range: PageRange) {
        self.own.forget(range);
    }

    /// See [`Follower::set_home`].
    pub fn set_home(&mut self, range: PageRange, content: HostVirt) {
        self.own.set_home(range, content);
    }

    /// See [`Follower::homes`].
    pub fn homes(&self) -> &[(PageRange, HostVirt)] {
        self.own.homes()
    }

    /// See [`Follower::home_of`].
    pub fn home_of(&self, page: HostVirt) -> Option<HostVirt> {
        self.own.home_of(page)
    }

    /// Announces that the agent is about to drop its private pages from this address on; `None`: it has done so. See
    /// [`Expected::Dropping`].
    pub fn expect_dropping(&mut self, from: Option<HostVirt>) {
        self.own.expect(from.map(Expected::Dropping));
    }

    /// See [`Follower::expect_placing`].
    pub const fn expect_placing(&mut self, from: HostVirt, place: PageRange) {
        self.own.expect_placing(from, place);
    }

    /// See [`Follower::expect_no_placing`].
    pub const fn expect_no_placing(&mut self) {
        self.own.expect_no_placing();
    }

    /// The address range to which the program has moved these pages since the section began; `None` if it has not moved
    /// the first one. The answer has fewer pages if the last ones were not moved together with the first.
    pub fn moved_to(&self, range: PageRange) -> Option<PageRange> {
        let (from, to) =
            self.moved.iter().rev().find(|(from, _)| from.start <= range.start && range.start < from.end())?;
        let skipped = range.start.page() - from.start.page();
        Some(PageRange { start: to.add_pages(skipped), pages: range.pages.min(from.pages - skipped) })
    }

    /// Notes that slots have just been mapped over this range, and have no page-table entries yet.
    pub fn placed(&mut self, range: PageRange) {
        self.own.lost_entries(range);
    }

    /// From here on until the section ends, pages may be out on the stage, and every discard is remembered.
    pub fn begin_section(&mut self) {
        self.is_in_section = true;
        self.own.keep_in_mind(true);
    }

    /// Ends the section. Returns the moves that the program has made during it.
    fn end_section(&mut self) -> Vec<(PageRange, HostVirt)> {
        self.is_in_section = false;
        self.are_pages_out = false;
        self.lacking.iter_mut().for_each(Follower::answer_missing);
        self.born.append(&mut self.lacking);
        self.own.keep_in_mind(false);
        std::mem::take(&mut self.moved)
    }

    /// Copies a range's pages, which lie at `copy` at the moment, to the children that lack them because they were
    /// forked while the pages were out on the stage. Pages that were discarded before such a child was forked, or by
    /// the child, read as zeros in the child.
    pub fn give_to_born(&mut self, range: PageRange, copy: HostVirt) {
        let mut at = 0;
        while let Some(child) = self.lacking.get_mut(at) {
            let mut born = Vec::new();
            give(child, range, copy, &mut born);
            // The children of this child were forked before it had all of its pages, so they lack pages, too.
            self.lacking.append(&mut born);
            at += 1;
        }
    }
}

fn give(child: &mut Follower, range: PageRange, copy: HostVirt, born: &mut Vec<Follower>) {
    let mut rest = range;
    // The discarded pages are looked up again after each step: the child runs already, and may have discarded more.
    while let Some(part) = child.discarded().missing(rest).first().copied() {
        let from = copy.add_pages(part.start.page() - range.start.page());
        let done = match child.watch().copy_pages(from, part) {
            Ok(pages) => pages,
            // The child has discarded something or forked.
            Err(Errno::AGAIN) => {
                let known = born.len();
                read_child(child, born);
                born.iter_mut().skip(known).for_each(Follower::put_off_missing);
                0
            }
            // The child has this page.
            Err(Errno::EXIST) => 1,
            // The kernel refuses a range that spans more than one mapping.
            Err(_) if part.pages > 1 => {
                let one = child.watch().copy_pages(from, PageRange { pages: 1, ..part });
                u64::from(one != Err(Errno::AGAIN))
            }
            // The child is gone, or has mapped something else there.
            Err(_) => 1,
        };
        let next = part.start.add_pages(done);
        rest = PageRange { start: next, pages: range.end().page() - next.page() };
    }
}

/// Hands children to the keeper; this thread follows those that the keeper does not take.
fn look_after(children: &mut Vec<Follower>, keeper: &mut Keeper) {
    let mut left = keeper.hear();
    left.append(&mut keeper.look());
    for mut child in std::mem::take(children) {
        if child.settle().is_err() {
            continue;
        }
        // With the userfaultfd, the keeper gets no list of discards that are not settled here. So only a child without
        // any is handed over.
        if child.is_at_rest() {
            match keeper.take(child) {
                Some(back) => child = back,
                None => continue,
            }
        }
        read_child(&mut child, &mut left);
        if child.is_alive() {
            left.push(child);
        }
    }
    *children = left;
}

fn read_child(child: &mut Follower, born: &mut Vec<Follower>) {
    loop {
        match child.read() {
            Ok(Told::Nothing) | Err(_) => return,
            Ok(Told::Touch | Told::Discard | Told::Move(..)) => {}
            Ok(Told::Birth(child)) => born.push(*child),
        }
    }
}

#[cfg(test)]
#[path = "follow_tests.rs"]
mod tests;
