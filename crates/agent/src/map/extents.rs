//! The memory that the map knows: ranges of pages with their traits, as the kernel keeps mappings with their flags.
//! Neighbouring ranges with equal traits are joined.

use page::{HostVirt, PAGE_SHIFT, PageRange, PoolSlot};
use std::collections::BTreeMap;

/// A reason why pages must not be folded for the moment. Each reason is taken back separately.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Shut {
    /// The pages are locked into memory.
    Locked = 1,
    /// The program has registered the pages with a userfaultfd of its own.
    Yielded = 2,
    /// The pages have a property that a mapping of the pool cannot have.
    Special = 4,
    /// A thread that touches the pages gets `SIGSEGV` (`MADV_GUARD_INSTALL`).
    Guarded = 8,
    /// Forked children find the pages cleared (`MADV_WIPEONFORK`).
    Wiped = 16,
    /// The pages have a NUMA policy of their own.
    Policy = 32,
    /// A device has the pages pinned, or may have.
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
    /// `MADV_MERGEABLE`, if the kernel was told.
    pub mergeable: bool,
    /// Mapped with `MAP_NORESERVE`, if that is known.
    pub no_reserve: bool,
}

/// What is known about a range of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Traits {
    /// Whether the memory is enrolled.
    pub asked: bool,
    /// Its protection, as `PROT_` bits. It may be folded only while it can be read and written, and not executed.
    pub access: u8,
    /// Reasons ([`Shut`]) not to fold the memory for the moment, as bits.
    pub shut: u8,
    /// Advice given about it.
    pub advice: Advice,
    /// Where its pages have their homes ([`crate::home`]); `None` for anonymous memory.
    pub home: Option<Home>,
}

/// Where memory lies in a template, as a difference: the slot number of a page's home minus the page's own number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Home(u32);

impl Home {
    /// Where memory lies in a template, if its page `first` has its home in `slot`.
    pub const fn new(first: u64, slot: PoolSlot) -> Self {
        Self(slot.bits().wrapping_sub(first as u32))
    }

    /// The home of a page.
    pub const fn of(self, page: u64) -> PoolSlot {
        PoolSlot::from_bits(self.0.wrapping_add(page as u32))
    }

    /// As this, for the same memory after it was moved from page `from` to page `to`.
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

    /// Whether private pages of this memory may be folded, as far as its traits tell. Memory that children inherit may
    /// be folded only if children are followed.
    pub const fn open(self, follows_forks: bool) -> bool {
        self.home.is_none() && self.is_free() && (follows_forks || self.advice.dont_fork)
    }

    /// Whether broken pages of this memory may be folded again. Children are followed without templates, so they must
    /// not inherit memory with homes.
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

    /// Whether the program has registered it with a userfaultfd of its own.
    pub const fn is_yielded(self) -> bool {
        self.shut & Shut::Yielded as u8 != 0
    }

    /// Whether the program has given it a NUMA policy.
    pub const fn has_policy(self) -> bool {
        self.shut & Shut::Policy as u8 != 0
    }

    /// Advice that anonymous memory which takes its place must be given.
    pub const fn inherited(self) -> act::Inherit {
        let Advice { dont_fork, dont_dump, huge, .. } = self.advice;
        act::Inherit { dont_fork, dont_dump, huge }
    }

    /// Advice that a mapping of the pool which takes its place must be given. Advice about huge pages is left out,
    /// because it would concern the pool's file.
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

    /// Gives `first..end` these traits, in place of all that is known of the range.
    pub fn insert(&mut self, first: u64, end: u64, traits: Traits) {
        self.remove(first, end);
        if first < end {
            self.0.insert(first, (end, traits));
            self.join(first);
            self.join(end);
        }
    }

    /// Forgets all that is known of `first..end`. Returns whether anything was known.
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

    /// Changes the traits of the known ranges within `first..end`. Returns whether there are any.
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
