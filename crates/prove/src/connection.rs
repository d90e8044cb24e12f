//! One connection: answers questions about the pages of the one process that connected.

use crate::drain::Drain;
use crate::{Held, ReferenceCounts};
use crate::{keep, lend};
use host::{Pagemap, PagemapEntry, PeerPages, Received, Seqpacket};
use page::Pfn;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::time::{ClockId, clock_gettime};
use std::io;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use wire::prove::{
    ANSWER_BYTES, FOLLOW_FORKS, FOLLOWS_FORKS, Kind, PROVE_PAGES, Proof, QUESTION_BYTES, Question, decode_lend,
    encode_answer,
};

/// The prover spends at most 1/`SHARE` of a processor on one asker: 1/2.
const SHARE: u32 = 2;
/// Processor time that an asker may use beyond its share before it has to wait: 50 ms.
const BURST: Duration = Duration::from_millis(50);
/// A frame number that no page has. It stands for pages that cannot be free, so that their counts are not read.
const NO_FRAME: Pfn = Pfn(u64::MAX);

/// The state that all connections share.
pub struct Shared {
    counts: Mutex<ReferenceCounts>,
    drain: Drain,
}

impl Shared {
    pub fn new(counts: ReferenceCounts) -> io::Result<Self> {
        Ok(Self { counts: Mutex::new(counts), drain: Drain::new()? })
    }

    fn check(&self, kind: Kind, frames: &[Pfn], held: &mut [Held]) -> io::Result<()> {
        // A thread that panicked while it held the lock has at worst left frame numbers, which this call overwrites.
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        counts.check(kind, frames, held).map_err(io::Error::other)
    }
}

/// Serves until the asker hangs up or ends. Children that it has handed over by then are followed. `pagemap` is the
/// asker's pagemap, if the supervisor has handed it on with the connection.
///
/// # Errors
/// The prover hangs up: the asker sent something that is no question, does not read, or may not ask.
pub fn serve(socket: Seqpacket, mut pagemap: Option<Pagemap>, shared: &Shared) -> io::Result<()> {
    let mut asker: Option<Asker> = None;
    let (mut pace, mut counted) = (Pace::new(Instant::now()), cpu_time());
    // One byte more than the longest question, so that a longer frame does not decode as one.
    let (mut question, mut answer, mut files) = ([0; QUESTION_BYTES + 1], [0; ANSWER_BYTES], Vec::new());
    loop {
        let bytes = match socket.receive(&mut question, &mut files)? {
            Received::Nothing if wait(&socket, asker.as_ref())? => continue,
            Received::Nothing | Received::Closed => return Ok(()),
            Received::Frame(bytes) => bytes,
        };
        match (files.pop(), &question[..bytes]) {
            (None, frame) if let Some(page) = decode_lend(frame) => {
                let pages = asker.map_or_else(|| PeerPages::of(&socket, pagemap), |asker| Ok(asker.pages))?;
                return lend::serve(&socket, page, &pages);
            }
            (None, _) => {}
            (Some(file), frame) if frame == FOLLOW_FORKS && files.is_empty() => {
                keep::follow_forks(socket.peer()?, file)?;
                socket.send(&FOLLOWS_FORKS, &[])?;
                continue;
            }
            (Some(file), frame) if keep::is_first(frame) && files.is_empty() => {
                return keep::serve(socket, frame, file);
            }
            _ => return Err(io::Error::new(io::ErrorKind::InvalidData, "it sent files")),
        }
        let asked = Question::decode(&question[..bytes]).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))?;
        let asker = match &mut asker {
            Some(asker) => asker,
            None => asker.insert(Asker::new(PeerPages::of(&socket, pagemap.take())?)),
        };
        let proofs = asker.prove(&asked, shared)?;
        let bytes = encode_answer(asked.id, proofs[..asked.pages].iter().copied(), &mut answer);
        if !socket.send(&answer[..bytes], &[])? {
            return Err(io::Error::other("it does not read what it asked for"));
        }
        // Processor time of everything that the thread has done since the last count, such as receiving the question.
        let until = cpu_time();
        let spent = until.saturating_sub(std::mem::replace(&mut counted, until));
        std::thread::sleep(pace.rest_after(spent, Instant::now()));
    }
}

/// Waits until there is something to receive; `false` if the asker has ended.
fn wait(socket: &Seqpacket, asker: Option<&Asker>) -> io::Result<bool> {
    match asker {
        Some(asker) => asker.pages.wait_for(socket),
        // Of an asker that has asked nothing, no pidfd is open. It counts as ended when its end of the connection is
        // closed.
        None => match poll(&mut [PollFd::new(socket, PollFlags::IN)], None) {
            Ok(_) | Err(Errno::INTR) => Ok(true),
            Err(e) => Err(e.into()),
        },
    }
}

/// The asking process, and the entries of its page table before and after the reference counts were read.
struct Asker {
    pages: PeerPages,
    before: Vec<PagemapEntry>,
    after: Vec<PagemapEntry>,
    buffer: Vec<PagemapEntry>,
}

impl Asker {
    const fn new(pages: PeerPages) -> Self {
        Self { pages, before: Vec::new(), after: Vec::new(), buffer: Vec::new() }
    }

    fn prove(&mut self, asked: &Question<'_>, shared: &Shared) -> io::Result<[Proof; PROVE_PAGES]> {
        let (mut proofs, mut again) = ([Proof::Unknown; PROVE_PAGES], false);
        again |= self.look(asked, shared, &mut proofs)?;
        // The second call replaces the results of the first one, for all pages.
        if again && shared.drain.empty_lists() {
            self.look(asked, shared, &mut proofs)?;
        }
        Ok(proofs)
    }

    /// Fills in `proofs`. Returns whether some pages have one reference too many, which may be because they are on a
    /// processor's list of new pages.
    fn look(&mut self, asked: &Question<'_>, shared: &Shared, proofs: &mut [Proof; PROVE_PAGES]) -> io::Result<bool> {
        let (mut frames, mut held) = ([NO_FRAME; PROVE_PAGES], [Held::Unknown; PROVE_PAGES]);
        let pages = asked.pages;
        read(&self.pages, asked, &mut self.before, &mut self.buffer)?;
        for (frame, entry) in frames.iter_mut().zip(&self.before) {
            *frame = may_be_free(asked.kind, *entry).unwrap_or(NO_FRAME);
        }
        shared.check(asked.kind, &frames[..pages], &mut held[..pages])?;
        read(&self.pages, asked, &mut self.after, &mut self.buffer)?;
        let mut listed = false;
        for n in 0..pages {
            let same = self.before[n] == self.after[n] && frames[n] != NO_FRAME;
            listed |= same && held[n] == Held::Referenced(1);
            proofs[n] = match held[n] {
                Held::Free if same => Proof::Free,
                Held::Referenced(_) if same => Proof::Referenced,
                // A private page that another page table maps, too, has a reference from there.
                _ if asked.kind == Kind::Private && self.before[n] == self.after[n] && is_shared(self.after[n]) => {
                    Proof::Referenced
                }
                _ => Proof::Unknown,
            };
        }
        Ok(listed)
    }
}

/// The frame of a page that may be free: a private page that is mapped once and write-protected by a userfaultfd, or
/// (for slots) a page of a file. `None` for any other page.
fn may_be_free(kind: Kind, entry: PagemapEntry) -> Option<Pfn> {
    let candidate = match kind {
        Kind::Private => entry.exclusive() && !entry.file_or_shared() && entry.write_protected(),
        Kind::Slot => entry.file_or_shared(),
    };
    entry.pfn().filter(|_| candidate)
}

/// Whether a page in a private mapping is mapped elsewhere too, as after a fork.
fn is_shared(entry: PagemapEntry) -> bool {
    entry.write_protected() && !entry.file_or_shared() && !entry.exclusive()
}

fn read(
    pages: &PeerPages,
    asked: &Question<'_>,
    entries: &mut Vec<PagemapEntry>,
    buffer: &mut Vec<PagemapEntry>,
) -> io::Result<()> {
    entries.clear();
    asked.ranges().try_for_each(|range| pages.append(range, entries, buffer)).map_err(io::Error::other)
}

/// Limits the processor time that an asker takes ([`SHARE`], [`BURST`]).
struct Pace {
    used: Duration,
    at: Instant,
}

impl Pace {
    const fn new(now: Instant) -> Self {
        Self { used: Duration::ZERO, at: now }
    }

    /// Time to wait before the next question, after `spent` processor time on the last one.
    fn rest_after(&mut self, spent: Duration, now: Instant) -> Duration {
        let earned = now.duration_since(self.at) / SHARE;
        self.at = now;
        self.used = self.used.saturating_sub(earned) + spent;
        self.used.saturating_sub(BURST) * SHARE
    }
}

fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.cast_unsigned(), u32::try_from(time.tv_nsec).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heavy_asker_is_delayed_and_light_asker_is_not() {
        let ms = Duration::from_millis;
        let begin = Instant::now();
        let mut pace = Pace::new(begin);
        assert_eq!(pace.rest_after(ms(50), begin), ms(0));
        assert_eq!(pace.rest_after(ms(10), begin), ms(20));
        assert_eq!(pace.rest_after(ms(0), begin + ms(20)), ms(0));
        assert_eq!(pace.rest_after(ms(10), begin + ms(2000)), ms(0));
    }

    #[test]
    fn only_protected_exclusive_private_pages_may_be_free() {
        const PRESENT: u64 = 1 << 63;
        const SHARED: u64 = 1 << 61;
        const PROTECTED: u64 = 1 << 57;
        const EXCLUSIVE: u64 = 1 << 56;
        let frame = |bits: u64| may_be_free(Kind::Private, PagemapEntry::from_bits(bits | 77));
        assert_eq!(frame(PRESENT | PROTECTED | EXCLUSIVE), Some(Pfn(77)));
        for bits in [PROTECTED | EXCLUSIVE, PRESENT | EXCLUSIVE, PRESENT | PROTECTED] {
            assert_eq!(frame(bits), None, "{bits:x}");
        }
        assert_eq!(frame(PRESENT | PROTECTED | EXCLUSIVE | SHARED), None);
        let slot = |bits: u64| may_be_free(Kind::Slot, PagemapEntry::from_bits(bits | 77));
        assert_eq!(slot(PRESENT | SHARED), Some(Pfn(77)));
        assert_eq!((slot(PRESENT | PROTECTED | EXCLUSIVE), slot(SHARED)), (None, None));
    }
}
