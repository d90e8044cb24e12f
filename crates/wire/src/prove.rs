//! The protocol between a member's agent, or a group's worker, and the prover. Both ask: *does anybody but me hold
//! these pages?*
//!
//! ```text
//!   agent, worker                                                          prover
//!     | id u32, then up to 64 ranges {start u64, pages u32}, 512 pages in all |
//!     | --------------------------------------------------------------------> |
//!     |                       the same id, one byte a page in that order      |
//!     | <-------------------------------------------------------------------- |
//! ```
//!
//! An agent asks about private pages. A question that ends with one more byte, [`SLOTS`], is a worker's: it is about
//! pages of memory files ([`Kind`]).
//!
//! Each message is one datagram (`SOCK_SEQPACKET`), with little-endian numbers. Neither side allocates: a question is
//! written into a buffer of the caller's, and an answer is read from one.
//!
//! The prover's process is also the *keeper*. It has the right to switch on fork events of a userfaultfd
//! (`UFFD_FEATURE_EVENT_FORK`). It also *follows* forked children of members, even after their parents have ended: it
//! reads the events of a child's userfaultfd, and resolves them. It does both only for members, and for users who have
//! members. The agent sends it a userfaultfd with a frame, which says what the userfaultfd is for:
//!
//! | frame | the keeper | answer |
//! |---|---|---|
//! | [`FOLLOW_FORKS`] | calls `UFFDIO_API` on the userfaultfd, with fork events | [`FOLLOWS_FORKS`] |
//! | a letter and a number ([`encode_keep`]) | follows the member's child whose userfaultfd it is | the number, and whether it does ([`Kept`]) |
//! | [`KEEP`] | the same; from agents of earlier versions, and from another keeper | none |
//! | [`ALONE`], without a file | alone follows its children; the member closes their userfaultfds | [`ALONE_TOO`] |
//!
//! An agent that leaves a forked child asks for the child's own userfaultfd, to make private what the child has
//! inherited. From then on no other process may read the userfaultfd, even if the keeper or the parent is killed. So
//! the agent claims it (`act::Userfault::claim`), and the keeper confirms that it was alive when the claim was made:
//!
//! ```text
//!   agent in the child                                      keeper
//!     | a letter, and the address of a page (encode_lend)      |
//!     | -----------------------------------------------------> | reads nothing of that child any more
//!     | <----------------- LENT and the userfaultfd, or NOT_KEPT
//!     | claims it; CLAIMED ----------------------------------> | sees the claim
//!     | <------------------------------------------ YOURS      |
//! ```
//!
//! The prover closes the connection of a peer that sends anything else.

use crate::codec::Malformed;
use page::{HostVirt, PAGE_BYTES, PageRange};

/// Ranges that one question may carry.
pub const PROVE_RANGES: usize = 64;
/// Pages that one question may ask about, in all its ranges.
pub const PROVE_PAGES: usize = 512;
/// Longest question, in bytes.
pub const QUESTION_BYTES: usize = ID_BYTES + PROVE_RANGES * RANGE_BYTES + 1;
/// Longest answer, in bytes.
pub const ANSWER_BYTES: usize = ID_BYTES + PROVE_PAGES;

/// Last byte of a question about slots.
pub const SLOTS: u8 = b's';

/// Request to call `UFFDIO_API` on a userfaultfd, with fork events.
pub const FOLLOW_FORKS: [u8; 1] = *b"f";
/// Answer to [`FOLLOW_FORKS`].
pub const FOLLOWS_FORKS: [u8; 1] = *b"y";
/// Request without a number to follow a member's child. It is not answered.
pub const KEEP: [u8; 1] = *b"k";
/// Message of an agent that from now on the keeper alone must follow all children that were handed over so far, because
/// the agent closes their userfaultfds.
pub const ALONE: [u8; 1] = *b"a";
/// Answer to [`ALONE`]. Until it comes, the agent keeps the userfaultfds open.
pub const ALONE_TOO: [u8; 1] = *b"A";

/// Letter of a numbered request to follow a member's child.
const NUMBERED_KEEP: u8 = b'K';
/// Length of a numbered request to follow a child, and of its answer, in bytes.
pub const KEEP_BYTES: usize = 1 + size_of::<u32>();

/// The answer to a numbered request to follow a child.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kept {
    /// The child is followed.
    Yes,
    /// The child is followed. Few places are left, so the member must make its folded memory private. Children that it
    /// forks afterwards inherit no mapping of the pool, and need not be followed.
    Last,
    /// The child is not followed, and no event of its userfaultfd was read.
    No,
}

/// A request of this number to follow a member's child.
pub fn encode_keep(number: u32) -> [u8; KEEP_BYTES] {
    with_letter(NUMBERED_KEEP, number)
}

/// The number of a numbered request to follow a child; `None` if the frame is no such request.
pub fn decode_keep(frame: &[u8]) -> Option<u32> {
    let [NUMBERED_KEEP, number @ ..] = frame else { return None };
    Some(u32::from_le_bytes(number.try_into().ok()?))
}

/// The answer to the request of this number.
pub fn encode_kept(number: u32, kept: Kept) -> [u8; KEEP_BYTES] {
    let letter = match kept {
        Kept::Yes => b'y',
        Kept::Last => b'f',
        Kept::No => b'n',
    };
    with_letter(letter, number)
}

/// The number and the meaning of an answer to a numbered request; `None` if the frame is no such answer.
pub fn decode_kept(frame: &[u8]) -> Option<(u32, Kept)> {
    let (letter, number) = frame.split_first()?;
    let kept = match letter {
        b'y' => Kept::Yes,
        b'f' => Kept::Last,
        b'n' => Kept::No,
        _ => return None,
    };
    Some((u32::from_le_bytes(number.try_into().ok()?), kept))
}

fn with_letter(letter: u8, number: u32) -> [u8; KEEP_BYTES] {
    let mut frame = [letter; KEEP_BYTES];
    frame[1..].copy_from_slice(&number.to_le_bytes());
    frame
}

/// Letter of a request to lend a userfaultfd.
const LEND: u8 = b'l';
/// Length of a request to lend a userfaultfd, in bytes.
pub const LEND_BYTES: usize = 1 + size_of::<u64>();
/// Answer to a request to lend a userfaultfd; it comes with the file.
pub const LENT: [u8; 1] = *b"t";
/// Message of an agent that it has claimed the userfaultfd that it was lent.
pub const CLAIMED: [u8; 1] = *b"c";
/// Answer to [`CLAIMED`]: no other process reads the userfaultfd as long as the claim lasts.
pub const YOURS: [u8; 1] = *b"o";
/// Answer if the keeper has no userfaultfd with which the page's memory in the asking process is registered.
pub const NOT_KEPT: [u8; 1] = *b"n";

const ID_BYTES: usize = size_of::<u32>();
const RANGE_BYTES: usize = size_of::<u64>() + size_of::<u32>();
/// End of the address space of user programs: larger addresses are refused. 2^57 is enough for every architecture we
/// know.
const ADDRESS_END: u64 = 1 << 57;

/// A request to lend the userfaultfd with which this page of the asking process is registered.
pub fn encode_lend(page: HostVirt) -> [u8; LEND_BYTES] {
    let mut frame = [LEND; LEND_BYTES];
    frame[1..].copy_from_slice(&page.0.to_le_bytes());
    frame
}

/// The page of a request to lend a userfaultfd; `None` if the frame is no such request.
pub fn decode_lend(frame: &[u8]) -> Option<HostVirt> {
    let [LEND, address @ ..] = frame else { return None };
    let address = u64::from_le_bytes(address.try_into().ok()?);
    (address < ADDRESS_END && address.is_multiple_of(PAGE_BYTES as u64)).then_some(HostVirt(address))
}

/// The pages that a question is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Private pages of the asker's, which it has write-protected.
    Private,
    /// Pages of memory files that the asker maps: slots of a pool.
    Slot,
}

/// The answer about a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Proof {
    /// The only reference to a private page's frame is from the asker's one page-table entry, which is write-protected.
    /// The only references to a slot's frame are from its file and from page tables.
    Free = 0,
    /// There are further references to the frame: somebody may write the private page, or read the slot.
    Referenced = 1,
    /// The prover cannot tell; the asker treats the page as held.
    Unknown = 2,
}

impl Proof {
    fn of(byte: u8) -> Result<Self, Malformed> {
        match byte {
            0 => Ok(Self::Free),
            1 => Ok(Self::Referenced),
            2 => Ok(Self::Unknown),
            _ => Err(Malformed::OutOfRange("proof")),
        }
    }
}

/// A decoded question.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Question<'a> {
    /// Its number, which the answer repeats.
    pub id: u32,
    /// The kind of its pages.
    pub kind: Kind,
    /// Number of pages in all ranges: at least one.
    pub pages: usize,
    ranges: &'a [[u8; RANGE_BYTES]],
}

impl<'a> Question<'a> {
    /// Writes a question into `frame` and returns its length. `None` if it names no page, an invalid range, or more
    /// pages or ranges than a question may.
    pub fn encode(kind: Kind, id: u32, ranges: &[PageRange], frame: &mut [u8; QUESTION_BYTES]) -> Option<usize> {
        if ranges.len() > PROVE_RANGES {
            return None;
        }
        let (head, rest) = frame.split_first_chunk_mut::<ID_BYTES>()?;
        *head = id.to_le_bytes();
        for (bytes, range) in rest.as_chunks_mut::<RANGE_BYTES>().0.iter_mut().zip(ranges) {
            let (start, pages) = bytes.split_at_mut(size_of::<u64>());
            start.copy_from_slice(&range.start.0.to_le_bytes());
            pages.copy_from_slice(&u32::try_from(range.pages).ok()?.to_le_bytes());
        }
        let mut bytes = ranges.len().saturating_mul(RANGE_BYTES).saturating_add(ID_BYTES);
        if kind == Kind::Slot {
            frame[bytes] = SLOTS;
            bytes = bytes.saturating_add(1);
        }
        Question::decode(&frame[..bytes]).is_ok().then_some(bytes)
    }

    /// Reads a question.
    ///
    /// # Errors
    /// No honest agent sends it.
    pub fn decode(frame: &'a [u8]) -> Result<Self, Malformed> {
        let (id, rest) = frame.split_first_chunk().ok_or(Malformed::Truncated)?;
        let (ranges, left) = rest.as_chunks();
        let kind = match left {
            [] => Kind::Private,
            [SLOTS] => Kind::Slot,
            _ => return Err(Malformed::Truncated),
        };
        if ranges.is_empty() {
            return Err(Malformed::Truncated);
        }
        if ranges.len() > PROVE_RANGES {
            return Err(Malformed::TooLong);
        }
        let question = Self { id: u32::from_le_bytes(*id), kind, pages: 0, ranges };
        let pages = question.ranges().try_fold(0, |sum: usize, range| {
            let (start, pages) = (range.start.0, usize::try_from(range.pages).unwrap_or(usize::MAX));
            let end =
                start.checked_add(range.pages.saturating_mul(PAGE_BYTES as u64)).filter(|end| *end <= ADDRESS_END);
            if pages == 0 || !start.is_multiple_of(PAGE_BYTES as u64) || end.is_none() {
                return Err(Malformed::OutOfRange("range"));
            }
            sum.checked_add(pages).filter(|sum| *sum <= PROVE_PAGES).ok_or(Malformed::OutOfRange("pages"))
        })?;
        Ok(Self { pages, ..question })
    }

    /// The pages that it asks about.
    pub fn ranges(&self) -> impl Iterator<Item = PageRange> + 'a {
        self.ranges.iter().map(|bytes| {
            let [a, b, c, d, e, f, g, h, i, j, k, l] = *bytes;
            let start = HostVirt(u64::from_le_bytes([a, b, c, d, e, f, g, h]));
            PageRange { start, pages: u32::from_le_bytes([i, j, k, l]).into() }
        })
    }
}

/// Writes an answer for at most [`PROVE_PAGES`] pages into `frame` and returns its length.
pub fn encode_answer(id: u32, proofs: impl Iterator<Item = Proof>, frame: &mut [u8; ANSWER_BYTES]) -> usize {
    frame[..ID_BYTES].copy_from_slice(&id.to_le_bytes());
    let places = frame[ID_BYTES..].iter_mut().zip(proofs);
    places.map(|(place, proof)| *place = proof as u8).count().saturating_add(ID_BYTES)
}

/// Reads the answer to the question with this id: `Ok(false)` if the frame answers another question.
///
/// # Errors
/// No honest prover sends it. The contents of `proofs` are meaningless then.
pub fn decode_answer(frame: &[u8], id: u32, proofs: &mut [Proof]) -> Result<bool, Malformed> {
    let (answered, rest) = frame.split_first_chunk().ok_or(Malformed::Truncated)?;
    if u32::from_le_bytes(*answered) != id {
        return Ok(false);
    }
    match rest.len().cmp(&proofs.len()) {
        std::cmp::Ordering::Less => return Err(Malformed::Truncated),
        std::cmp::Ordering::Greater => return Err(Malformed::TooLong),
        std::cmp::Ordering::Equal => {}
    }
    for (proof, byte) in proofs.iter_mut().zip(rest) {
        *proof = Proof::of(*byte)?;
    }
    Ok(true)
}
