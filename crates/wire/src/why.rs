//! Why pages are not folded.

use crate::codec::{Malformed, Reader, Result};

/// Most pages that one frame may ask about.
pub const WHY_PAGES: usize = 4096;

/// Why a page is not folded. If several reasons apply, the first one in this list is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Why {
    /// The page was written so recently that it is likely to be written again soon, or was not checked since it was
    /// written.
    Young = 0,
    /// The page was written soon after it was folded last, or the pages with its content were.
    BackedOff = 1,
    /// It is part of a huge page that stays whole.
    Huge = 2,
    /// The worker plans to fold it, and the fold is not done yet.
    UnderWay = 3,
    /// The kernel would not move it, and it is tried again later.
    Busy = 4,
    /// The pool has no slot for it.
    NoRoom = 5,
    /// The page's memory may not be folded: it is not enrolled, or something forbids folding for now.
    NotEnrolled = 6,
    /// None of these. In an agent's answer: the agent has no reason.
    Other = 7,
}

impl Why {
    /// All of them, in the order of their numbers.
    pub const ALL: [Self; 8] = [
        Self::Young,
        Self::BackedOff,
        Self::Huge,
        Self::UnderWay,
        Self::Busy,
        Self::NoRoom,
        Self::NotEnrolled,
        Self::Other,
    ];

    /// Its name in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Young => "young",
            Self::BackedOff => "backed_off",
            Self::Huge => "huge",
            Self::UnderWay => "under_way",
            Self::Busy => "busy",
            Self::NoRoom => "no_room",
            Self::NotEnrolled => "not_enrolled",
            Self::Other => "other",
        }
    }

    /// The reason with this number.
    pub fn of(number: u8) -> Option<Self> {
        Self::ALL.get(usize::from(number)).copied()
    }

    pub(crate) fn decode(r: &mut Reader<'_>) -> Result<Self> {
        Self::of(r.u8()?).ok_or(Malformed::OutOfRange("reason"))
    }
}
