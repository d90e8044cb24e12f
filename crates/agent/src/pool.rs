//! The group's pool, as a member sees it: segments that it can read and map.

use crate::maps;
use act::{PoolView, Role};
use page::PoolSlot;
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use std::collections::BTreeMap;

/// A segment, the identity of its file (device and inode number), and whether the worker of the present connection has
/// offered it.
struct Segment {
    view: PoolView,
    file: (u64, u64),
    offered: bool,
}

/// All segments that this member maps or may map, by number, and how often any segment was offered.
#[derive(Default)]
pub struct Pool(BTreeMap<u8, Segment>, u64);

impl Pool {
    /// Begins a new connection: segments count as part of the pool only after the new worker has offered them again.
    pub fn withdraw(&mut self) {
        self.0.values_mut().for_each(|segment| segment.offered = false);
    }

    /// Takes a segment that the worker offers. Returns `true` if this number stood for another file until now.
    ///
    /// # Errors
    /// The file is not a segment's, does not have the length that the worker said, or address space is short.
    pub fn offer(&mut self, number: u8, slots: u32, file: OwnedFd) -> Result<bool, Errno> {
        act::check(&file, Role::Segment)?;
        let stat = rustix::fs::fstat(&file)?;
        maps::know_pool(&stat);
        let identity = (stat.st_dev, stat.st_ino);
        self.1 += 1;
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

    /// Number of times that a segment was offered.
    pub const fn offers(&self) -> u64 {
        self.1
    }

    /// The number and the length in slots of the template in this file; `None` if the worker of this connection has
    /// offered no such template.
    pub fn template(&self, file: (u64, u64)) -> Option<(u8, u64)> {
        let mut templates = self.0.range(PoolSlot::FIRST_TEMPLATE..);
        let (number, segment) = templates.find(|(_, segment)| segment.offered && segment.file == file)?;
        Some((*number, segment.view.pages()))
    }

    /// The segment that a slot lies in; `None` if the worker of this connection has not offered it.
    pub fn of(&self, slot: PoolSlot) -> Option<&PoolView> {
        self.0.get(&slot.segment()).filter(|segment| segment.offered).map(|segment| &segment.view)
    }

    /// Forgets segments that were not offered again.
    pub fn forget_withdrawn(&mut self) {
        self.0.retain(|_, segment| segment.offered);
    }

    /// Waits, for each segment, until the kernel's lock that unmapping takes is free ([`PoolView::wait_for_lock`]).
    pub fn wait_for_locks(&self) {
        self.0.values().for_each(|segment| segment.view.wait_for_lock());
    }

    /// Drops the page-table entries of slots that were read for comparisons.
    pub fn rest(&self) {
        self.0.values().for_each(|segment| segment.view.rest());
    }
}
