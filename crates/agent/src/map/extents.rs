//! Known memory, and what the program said about it: ranges of pages with their traits, as the kernel keeps mappings
//! with their flags. Neighbouring ranges with equal traits are joined.

use page::{HostVirt, PAGE_SHIFT, PageRange, PoolSlot};
use std::collections::BTreeMap;

/// A reason why pages are not to be folded for the moment. Each reason is taken back by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Shut {
    /// The pages are locked into memory.
    Locked = 1,
    /// The program uses a userfaultfd of its own on them.
    Yielded = 2,
    /// They have a property that a mapping of the pool cannot have.
    Special = 4,
    /// A thread that touches them is killed.
    Guarded = 8,
    /// Forked children find them cleared.
    Wiped = 16,
    /// They have a NUMA policy of their own.
    Policy = 32,
    /// A device holds them, or may.
    Pinned = 64,
}

/// Advice given about pages. A mapping that takes their place must be given the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Advice {
    /// `MADV_DONTFORK`
    pub dont_fork: bool,
    /// `MADV_DONTDUMP`
    pub dont_dump: bool,
    /// `MADV_HUGEPAGE` or `MADV_NOHUGEPAGE`
    pub huge: Option<bool>,
    /// `MADV_MERGEABLE`, where the kernel was told
    pub mergeable: bool,
    /// Mapped with `MAP_NORESERVE`, where that is known
    pub no_reserve: bool,
}

/// Everything that is known about a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Traits {
    /// Whether it is enrolled.
    pub asked: bool,
    /// Its protection, as `PROT_` bits. Any other than reading and writing is a reason not to fold.
    pub access: u8,
    /// Reasons ([`Shut`]) not to fold it for the moment.
    pub shut: u8,
    /// Advice given about it.
    pub advice: Advice,
    /// Where its pages have their homes ([`crate::home`]); `None`: it is anonymous memory.
    pub home: Option<Home>,
}

/// The place of memory in a template, as a difference: slot number of a page's home less the page's own number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Home(u32);

impl Home {
    /// The place of memory whose page `first` has its home in `slot`.
    pub const fn new(first: u64, slot: PoolSlot) -> Self {
        Self(slot.bits().wrapping_sub(first as u32))
    }

    /// The home of a page.
    pub const fn of(self, page: u64) -> PoolSlot {
        PoolSlot::from_bits(self.0.wrapping_add(page as u32))
    }

    /// The place of the same memory after a move from page `from` to page `to`.
    pub const fn moved(self, from: u64, to: u64) -> Self {
        Self(self.0.wrapping_add(from as u32).wrapping_sub(to as u32))
    }
}

/// Protection that allows reading and writing.
pub const READ_WRITE: u8 = (libc::PROT_READ | libc::PROT_WRITE) as u8;

impl Default for Traits {
    fn default() -> Self {
        Self { asked: false, access: READ_WRITE, shut: 0, advice: Advice::default(), home: None }
    }
}

impl Traits {
    const fn is_free(self) -> bool {
        self.asked && self.shut == 0 && self.access == READ_WRITE
    }

    /// Whether its private pages may be folded, as far as traits tell. Memory that children inherit may be folded only if they
    /// are followed.
    pub const fn open(self, follows_forks: bool) -> bool {
        self.home.is_none() && self.is_free() && (follows_forks || self.advice.dont_fork)
    }

    /// Whether its broken pages may be folded again. A child is followed without templates.
    pub const fn open_again(self, follows_forks: bool) -> bool {
        self.is_free() && (follows_forks && self.home.is_none() || self.advice.dont_fork)
    }

    /// Whether the program's threads may write it.
    pub const fn may_be_written(self) -> bool {
        self.access & libc::PROT_WRITE as u8 != 0
    }

    /// Whether nobody may touch it (`PROT_NONE`). Memory of this kind is mostly a reservation, and may be larger than
    /// the host's RAM.
    pub const fn is_only_reserved(self) -> bool {
        self.access == 0
    }

    /// Whether the program has locked it.
    pub const fn is_locked(self) -> bool {
        self.shut & Shut::Locked as u8 != 0
    }

    /// Whether the program has a userfaultfd of its own on it.
    pub const fn is_yielded(self) -> bool {
        self.shut & Shut::Yielded as u8 != 0
    }

    /// Whether the program has given it a NUMA policy.
    pub const fn has_policy(self) -> bool {
        self.shut & Shut::Policy as u8 != 0
    }

    /// Advice that anonymous memory in its place must be given.
    pub const fn inherited(self) -> act::Inherit {
        let Advice { dont_fork, dont_dump, huge, .. } = self.advice;
        act::Inherit { dont_fork, dont_dump, huge }
    }

    /// Advice that a mapping of the pool in its place must be given. Its huge pages would be those of the pool's file.
    pub const fn inherited_by_pool(self) -> act::Inherit {
        act::Inherit { huge: None, ..self.inherited() }
    }
}

/// The range from one page number to another.
pub const fn pages(first: u64, end: u64) -> PageRange {
    PageRange { start: HostVirt(first << PAGE_SHIFT), pages: end.saturating_sub(first) }
}

/// Ranges by their first page. No range touches another one with equal traits.
#[derive(Clone, Debug, Default)]
pub struct Extents(BTreeMap<u64, (u64, Traits)>);

impl Extents {
    pub const fn new() -> Self {
        Self(BTreeMap::new())
    }

    /// Splits the range that reaches across `page`, if one does.
    fn split(&mut self, page: u64) {
        if let Some((_, extent)) = self.0.range_mut(..page).next_back()
            && extent.0 > page
        {
            let tail = *extent;
            extent.0 = page;
            self.0.insert(page, tail);
        }
    }

    /// Joins the ranges that meet at `page`, if they have equal traits.
    fn join(&mut self, page: u64) {
        let Some(&tail) = self.0.get(&page) else { return };
        if let Some((_, extent)) = self.0.range_mut(..page).next_back()
            && extent.0 == page
            && extent.1 == tail.1
        {
            extent.0 = tail.0;
            self.0.remove(&page);
        }
    }

    /// Gives `first..end` these traits, in place of all that is known of it.
    pub fn insert(&mut self, first: u64, end: u64, traits: Traits) {
        self.remove(first, end);
        if first < end {
            self.0.insert(first, (end, traits));
            self.join(first);
            self.join(end);
        }
    }

    /// Forgets `first..end`. Returns whether anything was known of it.
    pub fn remove(&mut self, first: u64, end: u64) -> bool {
        if !self.touches(first, end) {
            return false;
        }
        self.split(first);
        self.split(end);
        while let Some((&start, _)) = self.0.range(first..end).next() {
            self.0.remove(&start);
        }
        true
    }

    /// Changes the traits of what is known of `first..end`; unknown ranges stay so. Returns whether anything was known.
    pub fn change(&mut self, first: u64, end: u64, change: impl Fn(&mut Traits)) -> bool {
        if !self.touches(first, end) {
            return false;
        }
        self.split(first);
        self.split(end);
        let mut at = first;
        while let Some((&start, extent)) = self.0.range_mut(at..end).next() {
            change(&mut extent.1);
            at = extent.0;
            self.join(start);
        }
        self.join(end);
        true
    }

    /// Whether anything in `first..end` is known.
    pub fn touches(&self, first: u64, end: u64) -> bool {
        self.within(first, end).next().is_some()
    }

    /// Known ranges within `first..end`: first page, end and traits, in order.
    pub fn within(&self, first: u64, end: u64) -> impl Iterator<Item = (u64, u64, Traits)> {
        let before = self.0.range(..first).next_back().filter(|(_, extent)| extent.0 > first);
        let rest = self.0.range(first..end.max(first));
        before
            .into_iter()
            .chain(rest)
            .map(move |(&start, &(stop, traits))| (start.max(first), stop.min(end), traits))
            .filter(|(a, b, _)| a < b)
    }

    /// All known ranges.
    pub fn all(&self) -> impl Iterator<Item = (u64, u64, Traits)> {
        self.0.iter().map(|(&start, &(end, traits))| (start, end, traits))
    }
}
