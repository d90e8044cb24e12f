//! The frames of one pass, as one entry of 8 bytes for every place that maps a frame; and what is counted once they are
//! sorted.

use host::{FrameTable, kpf};
use page::Pfn;

/// A frame that was seen in a page table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seen {
    /// The frame's number.
    pub pfn: Pfn,
    /// The group of the process that maps it.
    pub group: u16,
    /// The group whose pool the mapping maps, for a page of the pool.
    pub pool: Option<u16>,
}

/// Entries of one pass, each packed into 64 bits: frame number, group, and whether the group maps the frame, or only
/// its pool holds it.
#[derive(Default)]
pub struct Frames(Vec<u64>);

/// What was counted in one pass.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Counted {
    /// Distinct frames.
    pub frames: u64,
    /// Frames that one group maps more than once.
    pub shared_within_group: u64,
    /// Frames of several groups, in ascending order.
    pub crossing: Vec<Pfn>,
}

const GROUP_SHIFT: u32 = 1;
const PFN_SHIFT: u32 = 17;

impl Frames {
    /// Adds a frame that was seen; `false` if there are too many entries even after equal ones were dropped.
    pub fn push(&mut self, seen: Seen, most: usize) -> bool {
        let entry =
            |group: u16, mapping: bool| seen.pfn.0 << PFN_SHIFT | u64::from(group) << GROUP_SHIFT | u64::from(mapping);
        self.0.push(entry(seen.group, true));
        if let Some(pool) = seen.pool.filter(|pool| *pool != seen.group) {
            self.0.push(entry(pool, false));
        }
        if self.0.len() <= most {
            return true;
        }
        // A page of a pool may be mapped any number of times. Two equal entries are enough to know that it is shared.
        self.compact();
        self.0.len() <= most / 4 * 3
    }

    /// Of each set of equal entries, keeps two and drops the others.
    fn compact(&mut self) {
        self.0.sort_unstable();
        let mut kept = 0;
        for n in 0..self.0.len() {
            if kept < 2 || self.0[n] != self.0[kept - 2] {
                self.0[kept] = self.0[n];
                kept += 1;
            }
        }
        self.0.truncate(kept);
    }

    /// Counts the frames. Adds to `by_group`, for each group, the number of frames that it maps, and of those that it
    /// maps more than once.
    pub fn count(mut self, flags: &FrameTable, by_group: &mut [(u64, u64)]) -> host::Result<Counted> {
        self.0.sort_unstable();
        let pfn = |entry: &u64| Pfn(entry >> PFN_SHIFT);
        // The kernel's zero page belongs to everybody and is no memory. It matters only if it is mapped more than
        // once.
        let several: Vec<Pfn> = self.chunks().filter(|c| c.len() > 1).map(|c| pfn(&c[0])).collect();
        let mut zero = Vec::new();
        flags.read(&several, |pfn, word| {
            if word & kpf::ZERO_PAGE != 0 {
                zero.push(pfn);
            }
        })?;
        Ok(self.count_but(&zero, by_group))
    }

    fn chunks(&self) -> impl Iterator<Item = &[u64]> {
        self.0.chunk_by(|a, b| a >> PFN_SHIFT == b >> PFN_SHIFT)
    }

    fn count_but(&self, zero: &[Pfn], by_group: &mut [(u64, u64)]) -> Counted {
        let group = |entry: &u64| (entry >> GROUP_SHIFT) as u16;
        let mut counted = Counted::default();
        for frame in self.chunks() {
            let pfn = Pfn(frame[0] >> PFN_SHIFT);
            if zero.binary_search(&pfn).is_ok() {
                continue;
            }
            counted.frames += 1;
            let mut shared = false;
            let mut groups = 0;
            for of_group in frame.chunk_by(|a, b| group(a) == group(b)) {
                groups += 1;
                let mappings = of_group.iter().filter(|entry| *entry & 1 == 1).count();
                let (frames, shared_frames) = &mut by_group[usize::from(group(&of_group[0]))];
                *frames += u64::from(mappings > 0);
                *shared_frames += u64::from(mappings > 1);
                shared |= mappings > 1;
            }
            counted.shared_within_group += u64::from(shared);
            if groups > 1 {
                counted.crossing.push(pfn);
            }
        }
        counted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(pfn: u64, group: u16, pool: Option<u16>) -> Seen {
        Seen { pfn: Pfn(pfn), group, pool }
    }

    #[test]
    fn frames_of_several_groups_are_crossing() {
        let mut frames = Frames::default();
        let last = (1 << 40) - 1;
        for s in [
            seen(9, 0, None),
            seen(7, 0, Some(0)),
            seen(7, 0, Some(0)),
            seen(7, 0, None),
            // Private memory that two groups map.
            seen(last, 1, None),
            seen(last, 0, None),
            // A group maps a page of another one's pool, and the other one no longer does.
            seen(3, 1, Some(0)),
            // The zero page.
            seen(5, 0, None),
            seen(5, 1, None),
            seen(8, u16::MAX - 1, None),
        ] {
            assert!(frames.push(s, 100));
        }
        frames.0.sort_unstable();
        let mut by_group = vec![(0, 0); usize::from(u16::MAX)];
        let counted = frames.count_but(&[Pfn(5)], &mut by_group);
        let expected = Counted { frames: 5, shared_within_group: 1, crossing: vec![Pfn(3), Pfn(last)] };
        assert_eq!(counted, expected);
        assert_eq!((by_group[0], by_group[1], by_group[usize::from(u16::MAX) - 1]), ((3, 1), (2, 0), (1, 0)));
    }

    #[test]
    fn push_beyond_limit_is_refused() {
        let mut frames = Frames::default();
        assert!((0..100).all(|pfn| frames.push(seen(pfn, 0, None), 100)));
        assert!(!frames.push(seen(100, 0, None), 100));
    }

    #[test]
    fn repeated_mappings_are_compacted() {
        let mut frames = Frames::default();
        assert!((0..10_000).all(|n| frames.push(seen(n % 7, (n % 2) as u16, Some(0)), 100)));
        let mut by_group = [(0, 0); 2];
        frames.0.sort_unstable();
        let counted = frames.count_but(&[], &mut by_group);
        assert_eq!((counted.frames, counted.shared_within_group, counted.crossing.len()), (7, 7, 7));
        assert_eq!(by_group, [(7, 7); 2]);
    }
}
