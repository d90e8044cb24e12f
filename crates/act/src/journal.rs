//! A journal of discards. It is kept by a process that follows forked children of other processes
//! ([`crate::Follower`]). If that process is killed, the process that takes its place (the successor) reads it.
//!
//! A discarding thread goes on as soon as the kernel's message has been read, even if the reader is killed right then.
//! So the message is read right into the journal, which is a memory file. There is no instant at which the thread has
//! gone on and the journal lacks the message. The kernel finishes a read that it has begun, even if the process is
//! killed.
//!
//! ```text
//!   head of a child:  userfaultfd, socket of its member, layout       (numbers of descriptors)
//!   its log:          | message | message | message being read | 0    read again from the front by a successor
//! ```
//!
//! A log is emptied when nothing in it counts any more ([`Entry::clear`]). When it is full, the sum of its messages is
//! written to its other half. If that does not fit, the log is *partial* from then on: a successor does not know
//! whether an absent page was discarded, and a thread that touches one gets `SIGBUS`.
//!
//! The head of a child names descriptors by their numbers. A successor has them because it shares the table of files
//! ([`crate::Standby`]).

use crate::userfault::{Message, Record, Userfault};
use page::{HostVirt, PAGE_SHIFT, PageRange, PageSet};
use rustix::fd::{AsRawFd, OwnedFd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};

/// Most children that the journal has room for.
const HEADS: usize = 8192;
/// Number of messages in each half of a log. Pages of the log take memory only once they are written.
const RECORDS: usize = 8 << 10;
/// Event number of a record of pages that a child's parent had discarded. The child may have got some of these pages at
/// the fork.
const INHERITED: u64 = 0x80;

/// States of a child's head: free, being filled in, and in use.
const FREE: u32 = 0;
const TAKEN: u32 = 1;
const COUNTS: u32 = 2;

#[derive(Debug)]
struct Head {
    state: AtomicU32,
    watch: AtomicI32,
    /// Descriptor number of the member's socket; -1: none.
    socket: AtomicI32,
    is_born: AtomicU32,
    /// The half of the log (0 or 1) that a successor reads.
    half: AtomicU32,
    is_partial: AtomicU32,
    layout: [AtomicU64; 2],
}

#[derive(Debug)]
struct Log([[Record; RECORDS]; 2]);

#[derive(Debug)]
struct Memory {
    heads: [Head; HEADS],
    logs: [Log; HEADS],
}

const _: () = assert!(size_of::<[Head; HEADS]>().is_multiple_of(1 << PAGE_SHIFT));

/// A journal.
#[derive(Debug)]
pub struct Journal {
    file: OwnedFd,
    memory: &'static Memory,
}

/// Facts about a child that its log does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct About {
    /// Descriptor number of the socket of the member whose agent may take the child over.
    pub socket: Option<i32>,
    /// The layout of the member's address space; zeros if it is not known.
    pub layout: (u64, u64),
    /// Whether no member's agent will take the child over again: a child of the member has forked it, or the member has
    /// given it up.
    pub is_born: bool,
}

/// A message of a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logged {
    /// Pages were discarded, or are about to be.
    Discard(PageRange),
    /// The child's parent had discarded these pages.
    Inherited(PageRange),
    /// Pages were moved.
    Moved(PageRange, HostVirt),
    /// The process forked. The userfaultfd of its child has this descriptor number.
    Forked(i32),
}

/// A child, as the journal has it.
#[derive(Debug)]
pub struct Found {
    /// Descriptor number of the child's userfaultfd.
    pub watch: i32,
    /// The facts about the child.
    pub about: About,
    /// The messages of its log.
    pub log: Vec<Logged>,
    /// Whether the log is partial.
    pub is_partial: bool,
}

impl Journal {
    /// An empty journal.
    ///
    /// # Errors
    /// Memory or address space is short.
    pub fn new() -> io::Result<Arc<Self>> {
        let file = memfd_create("pagefold-journal", MemfdFlags::CLOEXEC)?;
        ftruncate(&file, size_of::<Memory>() as u64)?;
        Self::of(file)
    }

    /// The journal that another process has kept in this file.
    ///
    /// # Errors
    /// The file is no journal, or address space is short.
    pub fn of(file: OwnedFd) -> io::Result<Arc<Self>> {
        if rustix::fs::fstat(&file)?.st_size != size_of::<Memory>() as i64 {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let (bytes, flags) = (size_of::<Memory>(), MapFlags::SHARED | MapFlags::NORESERVE);
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let memory = unsafe { mmap(std::ptr::null_mut(), bytes, protection, flags, &file, 0) }?;
        // SAFETY: the mapping is as large as `Memory` and is never unmapped. All of it are atomic numbers, for which
        // any bytes are valid, and which other processes may change.
        let memory = unsafe { &*memory.cast::<Memory>() };
        Ok(Arc::new(Self { file, memory }))
    }

    /// The descriptor number of the journal's file.
    pub fn number(&self) -> i32 {
        self.file.as_raw_fd()
    }

    /// Records a child, with pages that the child itself has discarded, and pages that its parent had discarded.
    /// `None`: there is no room.
    pub fn enter(
        self: &Arc<Self>,
        watch: &Userfault,
        about: About,
        discarded: &PageSet,
        inherited: &PageSet,
    ) -> Option<Entry> {
        let take = |head: &Head| head.state.compare_exchange(FREE, TAKEN, Ordering::SeqCst, Ordering::SeqCst).is_ok();
        let at = self.memory.heads.iter().position(take)?;
        let (logged, half) = (PageSet::new(), 0);
        let mut entry = Entry { journal: Arc::clone(self), at, half, length: 0, logged, inherited: inherited.clone() };
        for range in discarded.ranges().flat_map(|range| inherited.missing(range)) {
            entry.logged.insert(range);
        }
        entry.head().is_partial.store(0, Ordering::SeqCst);
        entry.write_anew();
        let head = entry.head();
        head.watch.store(watch.number(), Ordering::SeqCst);
        head.socket.store(about.socket.unwrap_or(-1), Ordering::SeqCst);
        head.is_born.store(about.is_born.into(), Ordering::SeqCst);
        head.layout[0].store(about.layout.0, Ordering::SeqCst);
        head.layout[1].store(about.layout.1, Ordering::SeqCst);
        head.state.store(COUNTS, Ordering::SeqCst);
        Some(entry)
    }

    /// Says that the socket with this descriptor number is about to be closed.
    pub fn forget_socket(&self, number: i32) {
        for (head, _) in self.counting() {
            let _ = head.socket.compare_exchange(number, -1, Ordering::SeqCst, Ordering::SeqCst);
        }
    }

    /// Calls `keep` with the number of each descriptor that a successor needs, except the journal's. Allocates nothing.
    pub fn each_descriptor(&self, mut keep: impl FnMut(i32)) {
        for (head, log) in self.counting() {
            keep(head.watch.load(Ordering::SeqCst));
            Some(head.socket.load(Ordering::SeqCst)).filter(|socket| *socket >= 0).into_iter().for_each(&mut keep);
            log.read(head).for_each(|logged| {
                if let Logged::Forked(child) = logged {
                    keep(child);
                }
            });
        }
    }

    /// Whether the journal names no child. Allocates nothing.
    pub fn is_empty(&self) -> bool {
        self.counting().next().is_none()
    }

    /// All children. A child whose fork message was read, and which was not recorded yet, appears in its parent's log
    /// alone.
    pub fn found(&self) -> Vec<Found> {
        let found = |(head, log): (&Head, &Log)| Found {
            watch: head.watch.load(Ordering::SeqCst),
            about: head.about(),
            log: log.read(head).collect(),
            is_partial: head.is_partial.load(Ordering::SeqCst) != 0,
        };
        self.counting().map(found).collect()
    }

    fn counting(&self) -> impl Iterator<Item = (&Head, &Log)> {
        let all = self.memory.heads.iter().zip(&self.memory.logs);
        all.filter(|(head, _)| head.state.load(Ordering::SeqCst) == COUNTS)
    }
}

const EVENT_DISCARD: u64 = linux_raw_sys::general::UFFD_EVENT_REMOVE as u64;
const EVENT_MOVED: u64 = linux_raw_sys::general::UFFD_EVENT_REMAP as u64;
const EVENT_FORK: u64 = linux_raw_sys::general::UFFD_EVENT_FORK as u64;

impl Head {
    fn about(&self) -> About {
        About {
            socket: Some(self.socket.load(Ordering::SeqCst)).filter(|socket| *socket >= 0),
            layout: (self.layout[0].load(Ordering::SeqCst), self.layout[1].load(Ordering::SeqCst)),
            is_born: self.is_born.load(Ordering::SeqCst) != 0,
        }
    }
}

impl Log {
    fn read(&self, head: &Head) -> impl Iterator<Item = Logged> {
        let words = |record: &Record| [0, 1, 2, 3].map(|word: usize| record[word].load(Ordering::SeqCst));
        let half = &self.0[head.half.load(Ordering::SeqCst) as usize % 2];
        half.iter().map(words).take_while(|words| words[0] & 0xff != 0).filter_map(|[event, one, two, three]| {
            let range = PageRange { start: HostVirt(one), pages: two.saturating_sub(one) >> PAGE_SHIFT };
            match event & 0xff {
                EVENT_DISCARD => Some(Logged::Discard(range)),
                INHERITED => Some(Logged::Inherited(range)),
                EVENT_MOVED => Some(Logged::Moved(PageRange { pages: three >> PAGE_SHIFT, ..range }, HostVirt(two))),
                EVENT_FORK => Some(Logged::Forked(one as u32 as i32)),
                _ => None,
            }
        })
    }
}

/// A child's place in a journal. Dropping this removes the child from the journal, and must happen before its
/// userfaultfd is closed.
#[derive(Debug)]
pub struct Entry {
    journal: Arc<Journal>,
    at: usize,
    half: usize,
    /// Number of messages in this half of the log.
    length: usize,
    /// Pages of which the log has a discard by the child itself. `inherited` has those that its parent had discarded.
    logged: PageSet,
    inherited: PageSet,
}

impl Entry {
    fn head(&self) -> &Head {
        &self.journal.memory.heads[self.at]
    }

    fn record(&self, at: usize) -> &Record {
        &self.journal.memory.logs[self.at].0[self.half][at]
    }

    /// Index of the record that the next message is read into: the one behind the last message, or the last record of a
    /// full partial log. Writes the log's end mark behind it.
    fn place(&mut self) -> usize {
        let last = RECORDS - 2;
        if self.length > last && self.head().is_partial.load(Ordering::SeqCst) == 0 {
            self.write_anew();
        }
        let at = self.length.min(last);
        self.record(at + 1)[0].store(0, Ordering::SeqCst);
        at
    }

    /// Writes the sum of all messages to the other half of the log. If it does not fit, the log becomes partial.
    fn write_anew(&mut self) {
        let own = self.logged.ranges().map(|range| (EVENT_DISCARD, range));
        let all: Vec<_> = own.chain(self.inherited.ranges().map(|range| (INHERITED, range))).collect();
        if all.len() > RECORDS / 2 {
            return self.make_partial();
        }
        self.half = 1 - self.half;
        for (at, (event, range)) in all.iter().enumerate() {
            let record = self.record(at);
            record[1].store(range.start.0, Ordering::SeqCst);
            record[2].store(range.end().0, Ordering::SeqCst);
            record[0].store(*event, Ordering::SeqCst);
        }
        self.length = all.len();
        self.record(self.length)[0].store(0, Ordering::SeqCst);
        self.head().half.store(self.half as u32, Ordering::SeqCst);
    }

    /// Marks the log as partial: a successor does not know all discards.
    pub fn make_partial(&self) {
        self.head().is_partial.store(1, Ordering::SeqCst);
    }

    /// Says that no member's agent will take the child over again.
    pub fn leave_alone(&self) {
        self.head().is_born.store(1, Ordering::SeqCst);
    }

    /// Reads the next message of the kernel into the log.
    ///
    /// # Errors
    /// As [`Userfault::next_message`].
    pub fn next_message(&mut self, watch: &Userfault) -> io::Result<Option<Message>> {
        let place = self.place();
        let read = watch.next_message_into(self.record(place));
        match &read {
            Ok(Some(Message::Discard(range))) if !self.logged.missing(*range).is_empty() => {
                self.logged.insert(*range);
                self.inherited.remove(*range);
                self.length += 1;
            }
            Ok(Some(Message::Moved(from, to))) => {
                crate::follow::move_within(&mut self.logged, *from, *to);
                crate::follow::move_within(&mut self.inherited, *from, *to);
                self.length += 1;
            }
            // The message stays in the log until the child has an entry of its own.
            Ok(Some(Message::Forked(_))) => {}
            _ => self.record(place)[0].store(0, Ordering::SeqCst),
        }
        read
    }

    /// Records a child of this child, of whose fork the message read last (`UFFD_EVENT_FORK`) told, and removes that
    /// message from the log. `None`: the journal has no room.
    pub fn born(&mut self, watch: &Userfault, inherited: &PageSet) -> Option<Self> {
        let about = About { is_born: true, ..self.head().about() };
        let child = self.journal.enter(watch, about, &PageSet::new(), inherited);
        let place = self.place();
        self.record(place)[0].store(0, Ordering::SeqCst);
        child
    }

    /// Empties the log, when a successor needs nothing of what is in it.
    pub fn clear(&mut self) {
        if self.length > 0 {
            (self.logged, self.inherited) = (PageSet::new(), PageSet::new());
            self.write_anew();
            self.head().is_partial.store(0, Ordering::SeqCst);
        }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.head().state.store(FREE, Ordering::SeqCst);
    }
}

#[cfg(test)]
#[path = "journal_tests.rs"]
mod tests;
