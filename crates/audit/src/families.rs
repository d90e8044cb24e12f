//! Families of forks: processes that run one execution of a program, because one was forked from the other.
//!
//! A forked child inherits its parent's folded pages. Without folding, both would share private frames. So a place that
//! several processes of a family map stands for one frame, and is counted once. A place is an address, and a page of a
//! file.
//!
//! [`Execution`] tells which processes belong together, also when their parent has ended.

use host::Execution;
use page::HostVirt;
use std::collections::HashSet;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};

/// A place that maps a page of a file: its address, device and inode of the file, and the offset.
pub type Place = (HostVirt, (u64, u64), u64);

/// Places of one family, as 64-bit hashes. Among 2^32 places, two may be taken for one. Each place takes 9 to 18 bytes.
#[derive(Default)]
pub struct Places {
    family: Option<Execution>,
    seen: HashSet<u64>,
}

impl Places {
    /// Notes a place, and says whether an earlier process of this family has it too. The caller passes processes of one
    /// family one after the other.
    pub fn is_inherited(&mut self, family: Option<Execution>, place: Place) -> bool {
        if family.is_none() {
            return false;
        }
        if self.family != family {
            *self = Self { family, seen: HashSet::new() };
        }
        !self.seen.insert(BuildHasherDefault::<DefaultHasher>::default().hash_one(place))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn place_of_one_family_is_counted_once() {
        let mut places = Places::default();
        let place = |address, inode, offset| (HostVirt(address), (1, inode), offset);
        let own = Execution::of(std::process::id());
        assert!(!places.is_inherited(own, place(0x1000, 7, 0)));
        assert!(places.is_inherited(own, place(0x1000, 7, 0)));
        for different in [place(0x2000, 7, 0), place(0x1000, 8, 0), place(0x1000, 7, 0x1000)] {
            assert!(!places.is_inherited(own, different));
        }
        assert!(!places.is_inherited(None, place(0x1000, 7, 0)) && !places.is_inherited(None, place(0x1000, 7, 0)));
    }
}
