//! The follower: a second thread of ours, which reads what the kernel tells of memory that maps the pool, or is in the
//! middle of a fold ([`host::Follower`]).
//!
//! It takes no lock of the table and none of the program, so that whoever waits for it never waits for long, and may
//! hold the table's lock. Its own lock says when messages may be read. While the agent's thread holds that, no discard and
//! no fork is acknowledged: whoever discards has not begun to, and whoever forks has not gone on.
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
//! **Changes of mappings** by system calls of the program's own, past the doors, are not told of before they happen. So right before
//! anything is replaced, the kernel is asked whether it is still what the table says ([`Following::may_replace`]), and moves are told
//! of before whoever made them goes on. From the first such change on, nothing of this process is replaced or released any more
//! ([`Following::lost_track`]): what is folded stays folded and followed, and slots are held until the process ends.
//!
//! It never ends while anything is registered: what nobody follows would bring the pool's bytes back. A fault of ours in it ends the
//! process.

use crate::cpu_time::cpu_time;
use crate::doors;
use crate::keeper::Keeper;
use crate::lock::{Guard, Lock};
use crate::maps::{Kind, Maps};
use crate::spawn;
use crate::table::Traits;
use host::{Expected, Follower, Told, Userfault};
use page::{HostVirt, PageRange, PageSet};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::time::ClockId;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// How often children that nobody else follows are looked after.
const CHILDREN_EVERY: Duration = Duration::from_millis(20);
/// Milliseconds that a process which ends waits for its keeper, at most.
const HAND_OVER_MS: u32 = 1000;
/// How often it is looked whether their keeper and the others are still there.
const KEPT_EVERY: Duration = Duration::from_millis(500);

/// What the agent's thread knows of the follower.
pub struct Following {
    watch: Arc<Userfault>,
    shared: Lock<Shared>,
    /// Whether the program may discard memory in ways that no hook sees.
    expects_discards: AtomicBool,
    follows_forks: bool,
    /// The kernel's list of mappings, for the agent's thread.
    maps: Maps,
    /// How the program was seen to change mappings past the doors, if it was.
    lost_track: OnceLock<&'static str>,
    /// Another one has taken its place.
    is_retired: AtomicBool,
    /// Processor time of the thread, in microseconds.
    cpu_us: AtomicU64,
}

/// What both threads use.
pub struct Shared {
    own: Follower,
    /// Children that have not been handed to the keeper yet.
    born: Vec<Follower>,
    /// While pages are out of reach, children may lack them: they are not handed on.
    is_in_section: bool,
    /// What was moved meanwhile by the program, past the doors, and where to.
    moved: Vec<(PageRange, HostVirt)>,
}

/// Holds back whoever discards or forks.
pub type Held<'a> = Guard<'a, Shared>;

/// The one of this process, for threads of the program that end it.
static CURRENT: AtomicPtr<Following> = AtomicPtr::new(std::ptr::null_mut());

/// The mapping at this place is moved by a door, until the answer is dropped: no news to the follower.
pub struct Moving(Option<&'static Following>);

impl Moving {
    /// Before the move.
    pub fn announce(from: HostVirt) -> Self {
        // SAFETY: null, or what `publish` has leaked.
        let following = unsafe { CURRENT.load(Ordering::Acquire).as_ref() };
        following.inspect(|following| following.hold().own.expect(Some(Expected::Moving(from))));
        Self(following)
    }
}

impl Drop for Moving {
    fn drop(&mut self) {
        self.0.inspect(|following| following.hold().own.expect(None));
    }
}

/// Waits, though not for ever, until children that have been born are handed to the keeper: the process is about to end, and
/// they would be followed no more.
pub fn wait_for_keeper() {
    // SAFETY: null, or what `publish` has leaked.
    let Some(following) = (unsafe { CURRENT.load(Ordering::Acquire).as_ref() }) else { return };
    for _ in 0..HAND_OVER_MS {
        if following.hold().born.is_empty() {
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

impl Following {
    /// Starts the thread. What is registered with `watch` is followed from here on.
    ///
    /// # Errors
    /// There is no memory or no thread to be had.
    pub fn start(watch: Userfault, follows_forks: bool, keeper: PathBuf) -> Result<Arc<Self>, Errno> {
        let watch = Arc::new(watch);
        let own = Follower::own(Arc::clone(&watch));
        let shared = Lock::new(Shared { own, born: Vec::new(), is_in_section: false, moved: Vec::new() });
        let (maps, lost_track) = (Maps::open()?, OnceLock::new());
        let (expects_discards, is_retired) = (AtomicBool::new(false), AtomicBool::new(false));
        let cpu_us = AtomicU64::new(0);
        let this =
            Arc::new(Self { watch, shared, expects_discards, follows_forks, maps, lost_track, is_retired, cpu_us });
        let follower = Arc::clone(&this);
        spawn::thread(c"pagefold-follow", spawn::SMALL_STACK_BYTES, move || follower.run(Keeper::new(keeper)))?;
        Ok(this)
    }

    /// The userfaultfd.
    pub fn watch(&self) -> &Userfault {
        &self.watch
    }

    /// From here on, it is the one of this process.
    pub fn publish(self: &Arc<Self>) {
        // Leaked, since threads of the program may be looking at it at any time. There are two at most.
        CURRENT.store(Arc::into_raw(Arc::clone(self)).cast_mut(), Ordering::Release);
    }

    /// Processor time that the thread has used.
    pub fn cpu_time(&self) -> Duration {
        Duration::from_micros(self.cpu_us.load(Ordering::Relaxed))
    }

    /// Ends the thread soon: nothing is registered any more, and nothing will be.
    pub fn retire(&self) {
        self.is_retired.store(true, Ordering::Relaxed);
    }

    /// Whether memory may be discarded in ways that no hook sees: as is expected, or was seen.
    pub fn expects_discards(&self) -> bool {
        self.expects_discards.load(Ordering::Relaxed)
    }

    /// Memory may be discarded in ways that no hook sees.
    pub fn expect_discards(&self) {
        self.expects_discards.store(true, Ordering::Relaxed);
    }

    /// How the program was seen to change mappings past the doors, if it was. What had happened before the call is known.
    pub fn lost_track(&self) -> Option<&'static str> {
        self.lost_track.get().copied()
    }

    /// Waits until all that happened to followed memory before is known.
    pub fn catch_up(&self) {
        // Not memory of anybody's: what counts is that the kernel refuses for another reason than a message that is unread.
        let nowhere = PageRange { start: HostVirt(1 << 16), pages: 1 };
        drop(self.until_read(|_| self.watch.protect(nowhere, false)));
    }

    /// Whether a range is memory of this kind and with these traits, as the table says. To be asked right before it is replaced, with the
    /// table's lock held; if it is not, nothing is replaced ever after.
    ///
    /// The program can change it between the answer and the replacing, which is a microsecond or two, and for which the kernel has
    /// no means; and never again after it was seen to once.
    pub fn may_replace(&self, range: PageRange, traits: Traits, kind: Kind) -> bool {
        if self.lost_track().is_some() {
            return false;
        }
        let is_known = self.maps.shows(range, traits, kind);
        // Where all that is mapped from now on is locked, so is what we map: it is left as it is. And no door sees the heap shrink.
        if !is_known && !traits.is_locked() && !doors::locks_future() && !doors::is_heap(range) {
            self.lose_track("unmapped or replaced memory that was folded, or changed its protection, or locked it");
        }
        is_known
    }

    /// The same of memory that is registered here, so that nothing else can lie there.
    pub fn may_replace_followed(&self, range: PageRange, traits: Traits, kind: Kind) -> bool {
        // Changes nothing where writers are kept out, or nothing is.
        let (held, followed) = self.until_read(|_| self.watch.protect(range, true));
        drop(held);
        if followed == Err(Errno::NOENT) {
            self.lose_track("unmapped memory that was folded");
        }
        // What was moved out of anonymous memory was writable and not locked, or it would not have been moved.
        followed.is_ok()
            && (kind == Kind::Anonymous && self.lost_track().is_none() || self.may_replace(range, traits, kind))
    }

    fn lose_track(&self, how: &'static str) {
        let _ = self.lost_track.set(how);
    }

    /// Holds back whoever discards or forks, for as long as the answer lives: a moment. The table's lock is taken before, if at all.
    pub fn hold(&self) -> Held<'_> {
        self.shared.lock()
    }

    /// Repeats a call of the kernel that a message which is unread may prevent, until it does not. With the answer nobody goes on:
    /// what was done before the call and told of is known.
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

    /// Lets writers in again to a range, and wakes them. What is not followed any more has nobody who waits.
    pub fn let_writers_in(&self, range: PageRange) {
        drop(self.until_read(|_| self.watch.protect(range, false)));
        let _ = self.watch.wake(range);
    }

    /// Ends what [`Shared::begin_section`] began, also where the program has moved memory meanwhile. `private` is what was registered
    /// for the section only: where that lies now, it is let go. Nobody is to be kept out of anything else any more.
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
        while !self.is_retired.load(Ordering::Relaxed) {
            let (is_well, has_children) = {
                let mut shared = self.hold();
                let is_well = shared.read(self).is_ok();
                if !shared.is_in_section {
                    look_after(&mut shared.born, &mut keeper);
                }
                (is_well, !shared.born.is_empty())
            };
            if !is_well {
                // As for want of descriptors: the message is still there, and would have `poll` return at once.
                std::thread::sleep(CHILDREN_EVERY);
            }
            let time = match (has_children, keeper.is_idle() && self.follows_forks) {
                (true, _) => Some(CHILDREN_EVERY),
                // Of a keeper that is gone, or of having been retired, nothing else tells.
                (false, false) => Some(KEPT_EVERY),
                (false, true) => None,
            };
            let time = time.and_then(|time| Timespec::try_from(time).ok());
            let used = u64::try_from(cpu_time(ClockId::ThreadCPUTime).as_micros()).unwrap_or(u64::MAX);
            self.cpu_us.store(used, Ordering::Relaxed);
            let _ = poll(&mut [PollFd::new(&*self.watch, PollFlags::IN)], time.as_ref());
        }
    }
}

impl Shared {
    fn read(&mut self, following: &Following) -> io::Result<()> {
        loop {
            match self.own.read()? {
                Told::Nothing => return Ok(()),
                Told::Touch => {}
                Told::Discard => following.expect_discards(),
                Told::Move(from, to) => {
                    following.lose_track("moved memory that was folded");
                    // Whatever the pool would show in the place that was left, and behind what has grown, is zeros.
                    let behind = following.maps.behind(PageRange { start: to, ..from });
                    [from, behind].into_iter().for_each(|range| self.own.note_discard(range));
                    if self.is_in_section {
                        self.moved.push((from, to));
                    }
                }
                Told::Birth(child) => self.born.push(child),
            }
        }
    }

    /// Pages of a range that were not discarded.
    pub fn kept(&self, range: PageRange) -> Vec<PageRange> {
        self.own.kept(range)
    }

    /// Pages that were discarded and not touched since.
    pub const fn discarded(&self) -> &PageSet {
        self.own.discarded()
    }

    /// These pages are something else now.
    pub fn forget(&mut self, range: PageRange) {
        self.own.forget(range);
    }

    /// The mapping at `from`, if any, is about to be moved to where slots are to be placed.
    pub fn expect_placing(&mut self, from: Option<HostVirt>) {
        self.own.expect(from.map(Expected::Placing));
    }

    /// Where pages lie that the program has moved since the section began, as far as they were moved together.
    pub fn moved_to(&self, range: PageRange) -> Option<PageRange> {
        let (from, to) =
            self.moved.iter().rev().find(|(from, _)| from.start <= range.start && range.start < from.end())?;
        let skipped = range.start.page() - from.start.page();
        Some(PageRange { start: to.add_pages(skipped), pages: range.pages.min(from.pages - skipped) })
    }

    /// Slots have just been placed there, and have no page table entries yet.
    pub fn placed(&mut self, range: PageRange) {
        self.own.lost_entries(range);
    }

    /// From here on until [`Shared::end_section`], pages may be out of reach, and what is discarded is kept in mind.
    pub fn begin_section(&mut self) {
        self.is_in_section = true;
        self.own.keep_in_mind(true);
    }

    /// See [`Shared::begin_section`].
    fn end_section(&mut self) -> Vec<(PageRange, HostVirt)> {
        self.is_in_section = false;
        self.own.keep_in_mind(false);
        std::mem::take(&mut self.moved)
    }

    /// Gives children that were born meanwhile what they lack of a range: copies that lie at `copy`. What was discarded before
    /// they were born reads as zeros there, too.
    pub fn give_to_born(&mut self, range: PageRange, copy: HostVirt) {
        let mut born = Vec::new();
        for child in &mut self.born {
            for part in child.discarded().missing(range) {
                give(child, part, copy.add_pages(part.start.page() - range.start.page()), &mut born);
            }
        }
        // Born of children that had what they lacked.
        self.born.append(&mut born);
    }
}

fn give(child: &mut Follower, range: PageRange, copy: HostVirt, born: &mut Vec<Follower>) {
    let mut at = 0;
    while at < range.pages {
        let to = PageRange { start: range.start.add_pages(at), pages: range.pages - at };
        match child.watch().copy_pages(copy.add_pages(at), to) {
            Ok(pages) => at += pages,
            // It has this one.
            Err(Errno::EXIST) => at += 1,
            // It runs already, and has discarded something or forked.
            Err(Errno::AGAIN) => read_child(child, born),
            // More than one mapping at a time is refused.
            Err(_) if to.pages > 1 => at += give_one(child, to, copy.add_pages(at)),
            // It is gone, or has mapped something else there.
            Err(_) => at += 1,
        }
    }
}

/// Gives the first page of a range, if it is lacked, and says that it was one.
fn give_one(child: &Follower, range: PageRange, copy: HostVirt) -> u64 {
    let _ = child.watch().copy_pages(copy, PageRange { pages: 1, ..range });
    1
}

/// Hands children to the keeper; those that it does not take are followed here.
fn look_after(children: &mut Vec<Follower>, keeper: &mut Keeper) {
    let mut left = keeper.look();
    for mut child in std::mem::take(children) {
        if child.settle().is_err() {
            continue;
        }
        // It is handed over as its userfaultfd, and nothing that is known here.
        if child.discarded().is_empty() {
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
            Ok(Told::Birth(child)) => born.push(child),
        }
    }
}
