//! One class - all frames that hold the same content - counted by who holds it.
//!
//! A frame that several guests map is one frame. Its *home* is the first guest that maps it. Its group is the group of
//! all these guests, or none ("common") if they belong to several. Merging a class of n frames down to one frees n -
//! 1. These n - 1 are counted in three places:
//!
//! ```text
//!   within    every home keeps one frame, the others are superfluous within that guest
//!   between   of the frames kept, one remains; the others are superfluous between guests
//!   host      the one that remains is superfluous if the host holds the content too
//! ```

use crate::{ByKinds, Entry, zeros::ZeroCount};
use page::{GuestIndex, PageKind};

/// The group (trust domain) of each guest, by number.
#[derive(Clone, Debug, Default)]
pub struct Groups {
    /// Group of each guest.
    pub of_guest: Vec<u16>,
    /// Number of groups. The bucket of frames common to several groups has this number.
    pub count: u16,
}

impl Groups {
    /// The group of a guest.
    pub fn of(&self, owner: GuestIndex) -> u16 {
        self.of_guest[usize::from(owner.0)]
    }

    /// Number of the bucket for frames that guests of several groups map.
    pub const fn common(&self) -> u16 {
        self.count
    }
}

/// Numbers of anonymous frames and of page-cache frames.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AnonFile {
    anon: u64,
    file: u64,
}

impl AnonFile {
    fn add(&mut self, kind: PageKind, frames: u64) {
        match kind {
            PageKind::Anon => self.anon += frames,
            PageKind::File | PageKind::Shmem | PageKind::Folded => self.file += frames,
        }
    }

    const fn any(self) -> bool {
        self.anon + self.file > 0
    }

    /// Number of frames freed by merging these frames into one, by pair of kinds.
    const fn superfluous(self) -> ByKinds {
        let anon_anon = self.anon.saturating_sub(1);
        let file_file = self.file.saturating_sub(1);
        let anon_file = (self.anon > 0 && self.file > 0) as u64;
        ByKinds { anon_anon, file_file, anon_file, total: anon_anon + file_file + anon_file }
    }

    /// The kind of the frame that is left after merging: anonymous if there is one, for a merger can replace only
    /// anonymous pages.
    fn left(self) -> Self {
        if self.anon > 0 { Self { anon: 1, file: 0 } } else { Self { anon: 0, file: u64::from(self.file > 0) } }
    }
}

/// Counts of one class. Reused from class to class: only what was touched is reset.
#[derive(Debug, Default)]
pub struct ClassCounts {
    per_guest: Vec<PerGuest>,
    per_group: Vec<PerGroup>,
    /// Guests with frames of this class, in the order in which they were first seen.
    pub guests: Vec<GuestIndex>,
    /// Groups with frames of this class, the common bucket included.
    pub buckets: Vec<u16>,
    touched_groups: Vec<u16>,
    /// Frames of this class that guests map.
    pub guest_frames: u64,
    /// Frames of this class that the host holds and no guest maps.
    host: AnonFile,
    /// Frames of this class that several guests map.
    pub shared_frames: u64,
    /// Guests that map the frames of `shared_frames`, less one guest for each of them.
    pub shared_mappings: u64,
    /// Frames of this class that KSM holds.
    pub ksm_frames: u64,
    /// Whether some frame of this class is mapped by a process that is not its owner's, too.
    pub mapped_elsewhere: bool,
    frames_seen: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct PerGuest {
    frames: u64,
    home: AnonFile,
}

#[derive(Clone, Copy, Debug, Default)]
struct PerGroup {
    /// Frames that at least one guest of this group maps.
    frames: u64,
    /// Frames that only guests of this group map. In the common bucket: frames that guests of several groups map.
    bucket_frames: u64,
    /// Serial number of the last frame counted in `frames`, so that a frame that two guests of the group map is counted
    /// once.
    last_frame: u64,
}

impl ClassCounts {
    /// Empty counts, with room for these guests and groups.
    pub fn new(groups: &Groups) -> Self {
        Self {
            per_guest: vec![PerGuest::default(); groups.of_guest.len()],
            per_group: vec![PerGroup::default(); usize::from(groups.count) + 1],
            ..Self::default()
        }
    }

    /// Counts a class. The counts of the class before are dropped.
    pub fn count(&mut self, groups: &Groups, class: &[Entry], zeros: impl Iterator<Item = ZeroCount>) {
        self.reset();
        for frame in class.chunk_by(|a, b| a.frame() == b.frame()) {
            self.add_frame(groups, frame);
        }
        for zero in zeros {
            self.add_zeros(groups, zero);
        }
    }

    fn reset(&mut self) {
        for guest in self.guests.drain(..) {
            self.per_guest[usize::from(guest.0)] = PerGuest::default();
        }
        for group in self.touched_groups.drain(..).chain(self.buckets.drain(..)) {
            self.per_group[usize::from(group)] = PerGroup::default();
        }
        (self.guest_frames, self.shared_frames, self.shared_mappings, self.ksm_frames) = (0, 0, 0, 0);
        (self.frames_seen, self.mapped_elsewhere, self.host) = (0, false, AnonFile::default());
    }

    /// Counts one frame, whose entries are `mappings`, in order of owners.
    fn add_frame(&mut self, groups: &Groups, mappings: &[Entry]) {
        self.frames_seen += 1;
        let first = mappings[0];
        self.mapped_elsewhere |= mappings.iter().any(|m| m.mapped_elsewhere());
        if first.owner() == GuestIndex::HOST {
            // The host sorts after all guests, so no guest maps this frame.
            self.host.add(first.kind(), 1);
            return;
        }
        self.guest_frames += 1;
        self.ksm_frames += u64::from(mappings.iter().any(|m| m.ksm()));
        let owners = mappings.chunk_by(|a, b| a.owner() == b.owner()).map(|m| m[0].owner());
        let (mut count, mut bucket) = (0, groups.of(first.owner()));
        for owner in owners.filter(|&o| o != GuestIndex::HOST) {
            count += 1;
            if groups.of(owner) != bucket {
                bucket = groups.common();
            }
            self.guest(owner).frames += 1;
            let serial = self.frames_seen;
            let group = self.group(groups.of(owner));
            if group.last_frame != serial {
                group.last_frame = serial;
                group.frames += 1;
            }
        }
        if count > 1 {
            self.shared_frames += 1;
            self.shared_mappings += count - 1;
        }
        self.guest(first.owner()).home.add(first.kind(), 1);
        self.bucket(bucket).bucket_frames += 1;
    }

    fn add_zeros(&mut self, groups: &Groups, zero: ZeroCount) {
        if zero.owner == GuestIndex::HOST {
            self.host.add(zero.kind, zero.pages);
            return;
        }
        self.guest_frames += zero.pages;
        let guest = self.guest(zero.owner);
        guest.frames += zero.pages;
        guest.home.add(zero.kind, zero.pages);
        self.group(groups.of(zero.owner)).frames += zero.pages;
        self.bucket(groups.of(zero.owner)).bucket_frames += zero.pages;
    }

    fn guest(&mut self, owner: GuestIndex) -> &mut PerGuest {
        let guest = &mut self.per_guest[usize::from(owner.0)];
        if guest.frames == 0 {
            self.guests.push(owner);
        }
        guest
    }

    fn group(&mut self, group: u16) -> &mut PerGroup {
        let counts = &mut self.per_group[usize::from(group)];
        if counts.frames == 0 {
            self.touched_groups.push(group);
        }
        counts
    }

    fn bucket(&mut self, bucket: u16) -> &mut PerGroup {
        let counts = &mut self.per_group[usize::from(bucket)];
        if counts.bucket_frames == 0 {
            self.buckets.push(bucket);
        }
        counts
    }

    /// Frames of the class that this guest maps.
    pub fn frames_of(&self, guest: GuestIndex) -> u64 {
        self.per_guest[usize::from(guest.0)].frames
    }

    /// Frames of the class in this bucket.
    pub fn bucket_frames(&self, bucket: u16) -> u64 {
        self.per_group[usize::from(bucket)].bucket_frames
    }

    /// Whether another guest of this guest's group holds the content in a frame of its own.
    pub fn duplicate_in_group(&self, groups: &Groups, guest: GuestIndex) -> bool {
        self.per_group[usize::from(groups.of(guest))].frames > self.frames_of(guest)
    }

    /// Whether a guest of another group holds the content in a frame that this guest's group does not map.
    pub fn duplicate_in_other_groups(&self, groups: &Groups, guest: GuestIndex) -> bool {
        self.guest_frames > self.per_group[usize::from(groups.of(guest))].frames
    }

    /// Whether the host holds the content in a frame of its own.
    pub const fn duplicate_in_host(&self) -> bool {
        self.host.any()
    }

    /// Superfluous frames of this class: within guests, between guests, and with the host.
    pub fn opportunity(&self) -> (ByKinds, ByKinds, ByKinds) {
        let (mut within, mut kept) = (ByKinds::default(), AnonFile::default());
        for guest in &self.guests {
            let home = self.per_guest[usize::from(guest.0)].home;
            within += home.superfluous();
            let left = home.left();
            kept = AnonFile { anon: kept.anon + left.anon, file: kept.file + left.file };
        }
        (within, kept.superfluous(), self.with_host(kept.left()))
    }

    fn with_host(&self, last: AnonFile) -> ByKinds {
        if !self.host.any() || !last.any() {
            return ByKinds::default();
        }
        let same_kind = if last.anon > 0 { self.host.anon > 0 } else { self.host.file > 0 };
        match (same_kind, last.anon > 0) {
            (true, true) => ByKinds { anon_anon: 1, total: 1, ..ByKinds::default() },
            (true, false) => ByKinds { file_file: 1, total: 1, ..ByKinds::default() },
            (false, _) => ByKinds { anon_file: 1, total: 1, ..ByKinds::default() },
        }
    }
}
