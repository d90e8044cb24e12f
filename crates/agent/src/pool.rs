//! The group's pool, as a member sees it: segments that it can read and map.

use crate::maps;
use host::PoolView;
use page::PoolSlot;
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use std::collections::BTreeMap;

/// A segment and which file it is.
struct Segment {
    view: PoolView,
    file: (u64, u64),
    offered: bool,
}

/// All segments that this member maps or may map.
#[derive(Default)]
pub struct Pool(BTreeMap<u8, Segment>);

impl Pool {
    /// A new connection: what the worker does not offer again is not its pool's.
    pub fn withdraw(&mut self) {
        self.0.values_mut().for_each(|segment| segment.offered = false);
    }

    /// A segment that the worker offers. Where the number stood for another file before, it no longer does: returns `true`.
    ///
    /// # Errors
    /// The file is not as long as said, or address space is short.
    pub fn offer(&mut self, number: u8, slots: u32, file: OwnedFd) -> Result<bool, Errno> {
        let stat = rustix::fs::fstat(&file)?;
        maps::know_pool(&stat);
        let identity = (stat.st_dev, stat.st_ino);
        match self.0.get_mut(&number) {
            Some(segment) if segment.file == identity => {
                segment.offered = true;
                Ok(false)
            }
            known => {
                let replaces = known.is_some();
                let segment = Segment { view: PoolView::new(file, slots)?, file: identity, offered: true };
                self.0.insert(number, segment);
                Ok(replaces)
            }
        }
    }

    /// The segment that a slot lies in, if the worker of this connection offered it.
    pub fn of(&self, slot: PoolSlot) -> Option<&PoolView> {
        self.0.get(&slot.segment()).filter(|segment| segment.offered).map(|segment| &segment.view)
    }

    /// Forgets segments that were not offered again.
    pub fn forget_withdrawn(&mut self) {
        self.0.retain(|_, segment| segment.offered);
    }

    /// Waits for whoever holds a lock that unmapping takes, of any segment ([`PoolView::wait_for_lock`]).
    pub fn wait_for_locks(&self) {
        self.0.values().for_each(|segment| segment.view.wait_for_lock());
    }

    /// Unmaps what was read for comparisons.
    pub fn rest(&self) {
        self.0.values().for_each(|segment| segment.view.rest());
    }
}
