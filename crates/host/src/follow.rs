//! Following memory that maps a pool's file: what a program discards there has to read as zeros, and the kernel alone would
//! bring the file's bytes back.
//!
//! ```text
//!   present: the file's page, or the program's own
//!      | a discard is about to happen: the kernel tells, and waits until the message is read
//!      v
//!   discarded, known here
//!      | the kernel takes the page table's entry away; from here on, whoever touches the page sleeps
//!      v touched, or found here
//!   zeros
//! ```
//!
//! An entry that the kernel takes away for reasons of its own makes a touch sleep, too; the file's page is mapped again then.
//! Which of the two it was is known, because every discard is told of before it happens, and no touch can come between: the
//! message of a discard is read before the message of any touch that follows it.
//!
//! A forked child's memory is followed in the same way, by whoever holds its userfaultfd. No discard may go unseen, so a
//! follower ends with the address space that it follows, and not before.

use crate::userfault::{Fault, Message, Userfault};
use page::{HostVirt, PageRange, PageSet};
use rustix::io::Errno;
use std::io;
use std::sync::Arc;

/// Follows one address space.
#[derive(Debug)]
pub struct Follower {
    watch: Arc<Userfault>,
    /// Pages that were discarded, and are not known to be zeros yet.
    discarded: PageSet,
    /// Whether this process's own agent has pages out of reach and writers kept out, and wakes who sleeps on that by itself.
    is_own: bool,
    /// Whether it follows a child of which nothing was read yet: what is noted as discarded is what its parent discarded.
    is_new: bool,
    /// A move that is about to be made by who knows what it means.
    expected: Option<Expected>,
    /// Pages that were discarded and have become zeros since, while such are to be kept in mind.
    served: Option<PageSet>,
}

/// A move that the kernel is going to tell of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expected {
    /// The mapping that lies there is moved over followed memory, with slots for just that: what is known of the place stays known.
    Placing(HostVirt),
    /// The mapping that lies there is moved for the program, which is no news.
    Moving(HostVirt),
}

/// What was read.
#[derive(Debug)]
pub enum Told {
    /// Nothing is left to be read.
    Nothing,
    /// Somebody touched a page.
    Touch,
    /// Something was discarded.
    Discard,
    /// These pages were moved there, and nobody had said before that they would be.
    Move(PageRange, HostVirt),
    /// A child was born: it has to be followed from here on.
    Birth(Follower),
}

impl Follower {
    /// Follows what is registered with `watch`, which was opened by this process.
    pub const fn own(watch: Arc<Userfault>) -> Self {
        Self { watch, discarded: PageSet::new(), is_own: true, is_new: false, served: None, expected: None }
    }

    /// Follows another process's memory, whose userfaultfd this is.
    pub fn of_child(watch: Userfault, discarded: PageSet) -> Self {
        Self { watch: Arc::new(watch), discarded, is_own: false, is_new: true, served: None, expected: None }
    }

    /// The userfaultfd.
    pub fn watch(&self) -> &Userfault {
        &self.watch
    }

    /// Pages that were discarded and not touched since.
    pub const fn discarded(&self) -> &PageSet {
        &self.discarded
    }

    /// From here on, what is discarded is kept in mind also when it has become zeros; or no longer.
    pub fn keep_in_mind(&mut self, keep: bool) {
        self.served = keep.then(PageSet::new);
    }

    /// Pages of a range that were not discarded, as far as that is kept in mind.
    pub fn kept(&self, range: PageRange) -> Vec<PageRange> {
        let kept = self.discarded.missing(range);
        let Some(served) = &self.served else { return kept };
        kept.into_iter().flat_map(|range| served.missing(range)).collect()
    }

    /// This move is about to be made, or none any more.
    pub const fn expect(&mut self, expected: Option<Expected>) {
        self.expected = expected;
    }

    /// These pages have no page table entries any more: what had become zeros has to do so again.
    pub fn lost_entries(&mut self, range: PageRange) {
        let served = self.served.as_ref().map(|served| served.within(range)).unwrap_or_default();
        served.into_iter().for_each(|range| self.discarded.insert(range));
    }

    /// What lies there was discarded in a way that the kernel does not tell of.
    pub fn note_discard(&mut self, range: PageRange) {
        self.discarded.insert(range);
    }

    /// These pages are something else now.
    pub fn forget(&mut self, range: PageRange) {
        self.discarded.remove(range);
    }

    /// Reads the next message and answers it.
    ///
    /// # Errors
    /// The kernel refuses, as for want of file descriptors.
    pub fn read(&mut self) -> io::Result<Told> {
        let Some(message) = self.watch.next_message()? else { return Ok(Told::Nothing) };
        match message {
            Message::Fault(page, fault) => {
                self.answer(PageRange { start: page, pages: 1 }, fault);
                Ok(Told::Touch)
            }
            Message::Discard(range) => {
                // It is its own, and may not have happened yet: what has an entry may be about to lose it.
                self.is_new = false;
                self.discarded.insert(range);
                Ok(Told::Discard)
            }
            // Slots are placed there, in memory of which is known what was discarded meanwhile.
            Message::Moved(from, _) if self.expected == Some(Expected::Placing(from.start)) => {
                self.expected = None;
                Ok(Told::Touch)
            }
            Message::Moved(from, to) => {
                let moved = self.discarded.within(from);
                self.discarded.remove(from);
                self.discarded.remove(PageRange { start: to, ..from });
                for range in moved {
                    let start = to.add_pages(range.start.page() - from.start.page());
                    self.discarded.insert(PageRange { start, ..range });
                }
                let is_news = self.expected != Some(Expected::Moving(from.start));
                Ok(if is_news { Told::Move(from, to) } else { Told::Touch })
            }
            Message::Forked(child) => Ok(Told::Birth(Self::of_child(child, self.discarded.clone()))),
            Message::Other => Ok(Told::Touch),
        }
    }

    fn answer(&mut self, page: PageRange, fault: Fault) {
        let done = match fault {
            Fault::Absent if self.discarded.contains(page.start) => self.give_zeros(page),
            Fault::Absent => self.watch.map_present(page).map(drop),
            Fault::Missing | Fault::Protected if self.is_own => return,
            Fault::Missing => self.watch.map_zeros(page).map(drop),
            Fault::Protected => self.watch.protect(page, false),
        };
        if done.is_err() {
            // Somebody else was faster, the place is another's by now, or another message has to be read first. Whoever
            // sleeps tries again, and asks again if need be.
            let _ = self.watch.wake(page);
        }
    }

    fn give_zeros(&mut self, page: PageRange) -> Result<(), Errno> {
        match self.watch.map_zeros(page) {
            Ok(_) => {
                self.discarded.remove(page);
                if let Some(served) = &mut self.served {
                    served.insert(page);
                }
                Ok(())
            }
            // A mark of its having been protected stands in its place; the next try finds that gone.
            Err(Errno::EXIST) if !self.is_own => self.watch.protect(page, false).and(Err(Errno::EXIST)),
            Err(e) => Err(e),
        }
    }

    /// Makes zeros of what was discarded and has lost its page table entries since; what has not is left for the next time.
    ///
    /// # Errors
    /// `ESRCH`: the address space is gone.
    pub fn settle(&mut self) -> Result<(), Errno> {
        for range in self.discarded.ranges().collect::<Vec<_>>() {
            let mut at = 0;
            while at < range.pages {
                let rest = PageRange { start: range.start.add_pages(at), pages: range.pages - at };
                let one = PageRange { pages: 1, ..rest };
                // More than one mapping at a time is refused.
                let mapped = self.watch.map_zeros(rest).or_else(|_| self.watch.map_zeros(one));
                at += match mapped {
                    Ok(pages) => {
                        self.discarded.remove(PageRange { pages, ..rest });
                        pages
                    }
                    Err(Errno::SRCH) => return Err(Errno::SRCH),
                    Err(Errno::AGAIN) => return Ok(()),
                    // Not memory that is followed any more: unmapped, or mapped anew.
                    Err(Errno::NOENT | Errno::INVAL) => {
                        self.discarded.remove(one);
                        1
                    }
                    // A child that was given a page has it, whatever its parent's thread was about to do.
                    Err(Errno::EXIST) if self.is_new => {
                        self.discarded.remove(one);
                        1
                    }
                    // It has not lost its entry yet.
                    Err(_) => 1,
                };
            }
        }
        self.is_new = false;
        Ok(())
    }

    /// Whether the address space is still there.
    pub fn is_alive(&self) -> bool {
        // Lets writers in to a page that nobody keeps them out of: what counts is whether there is anybody to be asked about.
        self.watch.protect(PageRange { start: HostVirt(1 << 16), pages: 1 }, false) != Err(Errno::SRCH)
    }
}
