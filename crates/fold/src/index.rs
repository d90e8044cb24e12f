//! The content index: for each content, the slot that holds it, or else one page that was seen with it.
//!
//! One page for each content is enough. As soon as a second page with the content is seen, a slot is taken for both,
//! and the index has the slot in place of the page. So the index is a hash table of page and slot numbers, 4 bytes
//! each. The fingerprints by which they are found are in the table of pages and in the pool ([`Keys`]). Where members
//! share nothing, a content's owner is part of its key.
//!
//! The table is kept in 256 shards by the fingerprint's leading bits. A hash table that grows moves all of its entries.
//! Only one small shard grows at a time, so this takes no long time. When the index is full, it covers a part of the
//! hash space at a time, in *passes*:
//!
//! ```text
//!   covers [first ................................ last]
//!   full:  [first .............. last]                     the rest is dropped, and members told to keep it to themselves
//!   nothing new for a while:      [first ........ last]    and so on, until the end; then from the beginning again
//! ```
//!
//! Slots stay in the index in all passes.
//!
//! Members send the fingerprints, and may lie. A fingerprint is mixed with a secret before it selects a place, so that
//! no member can make all of its entries collide.

use crate::table::PageRef;
use hashbrown::HashTable;
use hashbrown::hash_table::Entry as Place;
use page::PoolSlot;
use std::hash::{BuildHasher, RandomState};

const SHARDS: usize = 256;
const SHARD_SHIFT: u32 = 56;
/// Bit of an entry that marks a slot's number.
const SLOT: u32 = 1 << 31;
/// A pass covers at least this part of the hash space: 2^48 fingerprints, 1/65536 of all. All pages that real members
/// can report from such a part fit into the index.
const LEAST_INTERVAL: u64 = 1 << 48;

/// The page or slot that stands in the index for a content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// A page that was seen with the content.
    Page(PageRef),
    /// The slot that holds the content.
    Slot(PoolSlot),
}

impl Entry {
    const fn pack(self) -> u32 {
        match self {
            Self::Page(page) => page.bits(),
            Self::Slot(slot) => slot.bits() | SLOT,
        }
    }

    const fn unpack(bits: u32) -> Self {
        if bits & SLOT == 0 {
            Self::Page(PageRef::from_bits(bits))
        } else {
            Self::Slot(PoolSlot::from_bits(bits & !SLOT))
        }
    }
}

/// A content: its fingerprint, and its owner where members share nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key {
    /// Its fingerprint.
    pub fingerprint: u64,
    /// Its owner where members share nothing, otherwise 0.
    pub owner: u32,
}

/// Looks up the content that an entry of the index stands for.
pub trait Keys {
    /// The content of an entry that is in the index.
    fn key(&self, entry: Entry) -> Key;
}

/// The content index of a group.
#[derive(Debug)]
pub struct Index {
    shards: Vec<HashTable<u32>>,
    pages: usize,
    secret: [u64; 2],
    first: u64,
    last: u64,
}

impl Default for Index {
    fn default() -> Self {
        let random = RandomState::new();
        let secret = [random.hash_one(0), random.hash_one(1) | 1];
        Self { shards: vec![HashTable::new(); SHARDS], pages: 0, secret, first: 0, last: u64::MAX }
    }
}

impl Index {
    fn hash(secret: [u64; 2], key: Key) -> u64 {
        let mixed = key.fingerprint ^ secret[0] ^ u64::from(key.owner).rotate_left(32);
        let product = u128::from(mixed) * u128::from(secret[1]);
        (product >> 64) as u64 ^ product as u64
    }

    const fn shard(key: Key) -> usize {
        (key.fingerprint >> SHARD_SHIFT) as usize
    }

    /// The entry of a content; `None` if it has none.
    pub fn find(&self, key: Key, keys: &impl Keys) -> Option<Entry> {
        let hash = Self::hash(self.secret, key);
        let found = self.shards[Self::shard(key)].find(hash, |bits| keys.key(Entry::unpack(*bits)) == key);
        found.map(|bits| Entry::unpack(*bits))
    }

    /// Adds an entry for a content, unless it has one already, which is returned then.
    pub fn insert(&mut self, key: Key, entry: Entry, keys: &impl Keys) -> Option<Entry> {
        let (secret, hash) = (self.secret, Self::hash(self.secret, key));
        let place = self.shards[Self::shard(key)].entry(
            hash,
            |bits| keys.key(Entry::unpack(*bits)) == key,
            |bits| Self::hash(secret, keys.key(Entry::unpack(*bits))),
        );
        match place {
            Place::Occupied(known) => Some(Entry::unpack(*known.get())),
            Place::Vacant(place) => {
                place.insert(entry.pack());
                self.pages += usize::from(matches!(entry, Entry::Page(_)));
                None
            }
        }
    }

    /// Replaces the entry `old` of a content by `new`.
    pub fn replace(&mut self, key: Key, old: Entry, new: Entry) {
        let hash = Self::hash(self.secret, key);
        let Some(place) = self.shards[Self::shard(key)].find_mut(hash, |bits| *bits == old.pack()) else {
            debug_assert!(false, "{old:?} is not in the index");
            return;
        };
        *place = new.pack();
        self.pages -= usize::from(matches!(old, Entry::Page(_)));
        self.pages += usize::from(matches!(new, Entry::Page(_)));
    }

    /// Removes an entry of a content; returns whether it was there.
    pub fn remove(&mut self, key: Key, entry: Entry) -> bool {
        let hash = Self::hash(self.secret, key);
        let Ok(place) = self.shards[Self::shard(key)].find_entry(hash, |bits| *bits == entry.pack()) else {
            return false;
        };
        place.remove();
        self.pages -= usize::from(matches!(entry, Entry::Page(_)));
        true
    }

    /// Removes every page, and also every slot unless `keep_slots`; calls `forgotten` for each page.
    pub fn clear(&mut self, keep_slots: bool, mut forgotten: impl FnMut(PageRef)) {
        for shard in &mut self.shards {
            Self::drop_pages(shard, &mut forgotten, |_| true);
            if !keep_slots {
                *shard = HashTable::new();
            }
        }
        self.pages = 0;
    }

    fn drop_pages(shard: &mut HashTable<u32>, forgotten: &mut impl FnMut(PageRef), goes: impl Fn(Entry) -> bool) {
        shard.retain(|bits| match Entry::unpack(*bits) {
            Entry::Page(page) if goes(Entry::Page(page)) => {
                forgotten(page);
                false
            }
            _ => true,
        });
    }

    /// Whether a fingerprint lies in the part of the hash space that this pass covers, so that a page with it is to be
    /// indexed.
    pub const fn covers(&self, fingerprint: u64) -> bool {
        self.first <= fingerprint && fingerprint <= self.last
    }

    /// The part of the hash space that this pass covers.
    pub const fn interval(&self) -> (u64, u64) {
        (self.first, self.last)
    }

    /// Halves the part of the hash space that the index covers, and forgets the pages beyond. Returns `false` if the
    /// part is too small to be halved.
    pub fn narrow(&mut self, keys: &impl Keys, mut forgotten: impl FnMut(PageRef)) -> bool {
        if self.last - self.first < LEAST_INTERVAL {
            return false;
        }
        self.last = self.first + (self.last - self.first) / 2;
        let (last, mut gone) = (self.last, 0);
        for shard in &mut self.shards[(last >> SHARD_SHIFT) as usize..] {
            let mut count = |page| {
                gone += 1;
                forgotten(page);
            };
            Self::drop_pages(shard, &mut count, |entry| keys.key(entry).fingerprint > last);
            shard.shrink_to_fit(|bits| Self::hash(self.secret, keys.key(Entry::unpack(*bits))));
        }
        self.pages -= gone;
        true
    }

    /// Goes on to the next part of the hash space, twice as wide if `wider`. Before, the pages of the part that was
    /// covered until now must have been removed.
    pub const fn advance(&mut self, wider: bool) {
        let width = (self.last - self.first).saturating_mul(if wider { 2 } else { 1 });
        self.first = self.last.wrapping_add(1);
        self.last = self.first.saturating_add(width);
    }

    /// Covers the whole hash space again.
    pub const fn widen(&mut self) {
        (self.first, self.last) = (0, u64::MAX);
    }

    /// Number of pages that the index remembers.
    pub const fn pages(&self) -> usize {
        self.pages
    }

    /// Bytes of memory that the index takes.
    pub fn bytes(&self) -> u64 {
        self.shards.iter().map(|shard| shard.allocation_size() as u64).sum()
    }
}
