use crate::index::{Entry, Index, Key, Keys};
use crate::table::PageRef;
use page::PoolSlot;
use proptest::prelude::*;
use std::collections::HashMap;

/// The model's contents of entries.
#[derive(Default)]
struct Contents(HashMap<u32, Key>);

const fn number(entry: Entry) -> u32 {
    match entry {
        Entry::Page(page) => page.bits(),
        Entry::Slot(slot) => slot.bits() | 1 << 31,
    }
}

impl Keys for Contents {
    fn key(&self, entry: Entry) -> Key {
        self.0[&number(entry)]
    }
}

/// Few contents, spread over all shards, some of which differ in their last bits only.
fn key() -> impl Strategy<Value = Key> {
    (0..8_u64, 0..40_u64, 0..2_u32).prop_map(|(high, low, owner)| Key { fingerprint: high << 61 | low, owner })
}

proptest! {
    #[test]
    fn index_behaves_like_a_map(steps in prop::collection::vec((key(), any::<bool>(), 0..4_u8), 1..300)) {
        let (mut index, mut contents, mut model) = (Index::default(), Contents::default(), HashMap::new());
        for (n, (key, slot, what)) in (0_u32..).zip(steps) {
            let entry = if slot { Entry::Slot(PoolSlot::from_bits(n)) } else { Entry::Page(PageRef::from_bits(n)) };
            let known: Option<Entry> = model.get(&(key.fingerprint, key.owner)).copied();
            prop_assert_eq!(index.find(key, &contents), known);
            match (what, known) {
                (0 | 1, _) => {
                    contents.0.insert(number(entry), key);
                    prop_assert_eq!(index.insert(key, entry, &contents), known);
                    model.entry((key.fingerprint, key.owner)).or_insert(entry);
                }
                (2, Some(known)) => {
                    contents.0.insert(number(entry), key);
                    index.replace(key, known, entry);
                    model.insert((key.fingerprint, key.owner), entry);
                }
                (_, Some(known)) => {
                    prop_assert!(index.remove(key, known));
                    prop_assert!(!index.remove(key, known));
                    model.remove(&(key.fingerprint, key.owner));
                }
                _ => prop_assert!(!index.remove(key, entry)),
            }
            let pages = model.values().filter(|entry| matches!(entry, Entry::Page(_))).count();
            prop_assert_eq!(index.pages(), pages);
        }
        let mut forgotten = Vec::new();
        prop_assert!(index.narrow(&contents, |page| forgotten.push(page)));
        let last = index.interval().1;
        for ((fingerprint, owner), entry) in model {
            let kept = matches!(entry, Entry::Slot(_)) || fingerprint <= last;
            prop_assert_eq!(index.find(Key { fingerprint, owner }, &contents), kept.then_some(entry));
            if let Entry::Page(page) = entry {
                prop_assert_eq!(forgotten.contains(&page), !kept);
            }
        }
    }
}

#[test]
fn passes_cover_hash_space_once() {
    let mut index = Index::default();
    let nobody = Contents::default();
    assert!(index.covers(0) && index.covers(u64::MAX));
    (0..3).for_each(|_| assert!(index.narrow(&nobody, |_| {})));
    let (mut next, mut passes) = (0, 0);
    loop {
        let (first, last) = index.interval();
        assert_eq!(first, next);
        assert!(!index.covers(last.wrapping_add(1)));
        passes += 1;
        index.advance(false);
        if last == u64::MAX {
            break;
        }
        next = last + 1;
    }
    assert_eq!((passes, index.interval().0), (8, 0));
    while index.narrow(&nobody, |_| {}) {}
    assert!(index.interval().1 > 0, "a pass always covers something");
}

/// Without a secret in the hash, a member could choose fingerprints that all fall into one place.
#[test]
fn similar_fingerprints_do_not_pile_up() {
    let (mut index, mut contents) = (Index::default(), Contents::default());
    let start = std::time::Instant::now();
    for n in 0..200_000_u32 {
        let key = Key { fingerprint: u64::from(n) << 38, owner: 0 };
        contents.0.insert(n, key);
        index.insert(key, Entry::Page(PageRef::from_bits(n)), &contents);
    }
    assert!(start.elapsed() < std::time::Duration::from_secs(5), "{:?}", start.elapsed());
}
