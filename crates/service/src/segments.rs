//! The pool's files of a group, kept for its next worker: in this process, and in the service manager's store for the next
//! supervisor ([`FileStore`]).
//!
//! ```text
//!   worker --a segment--> here --Order::Take--> the next worker                     the worker has died
//!                          |
//!                          +--> service manager --> the next supervisor --> here    both have died
//! ```

use act::{FileStore, Role};
use api::control::SegmentInfo;
use api::name;
use cli::note;
use host::ForeignFile;
use rustix::fd::{AsFd, OwnedFd};
use std::collections::BTreeMap;
use std::io;
use std::rc::Rc;

/// First part of the names in the store.
const PREFIX: &str = "pool.";

/// A segment, and its file.
type Kept = (SegmentInfo, Rc<ForeignFile>);

/// The segments of one group.
#[derive(Default)]
pub struct Segments {
    group: String,
    store: Rc<FileStore>,
    kept: BTreeMap<u8, Kept>,
}

/// The name of a segment in the store: all that the next supervisor must know of it.
fn name_of(group: &str, info: &SegmentInfo) -> String {
    format!("{PREFIX}{group}.{}.{}", info.number, info.slots)
}

/// The group and the segment that a name in the store tells.
pub fn parse(name: &str) -> Option<(&str, SegmentInfo)> {
    let mut parts = name.strip_prefix(PREFIX)?.rsplitn(3, '.');
    let (slots, number) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
    let group = parts.next().filter(|group| name::check("group", group).is_ok())?;
    Some((group, SegmentInfo { number, slots }))
}

impl Segments {
    /// None of this group, with this store.
    pub fn new(group: &str, store: &Rc<FileStore>) -> Self {
        Self { group: group.to_owned(), store: Rc::clone(store), kept: BTreeMap::new() }
    }

    /// Adds one that the store has already.
    pub fn restore(&mut self, info: SegmentInfo, file: OwnedFd) {
        self.kept.insert(info.number, (info, Rc::new(ForeignFile::from(file))));
    }

    /// Adds one of the worker's, in the place of another of that number.
    pub fn insert(&mut self, info: SegmentInfo, file: ForeignFile) {
        self.remove(info.number);
        // The worker may be compromised. The service manager must not wait when it closes the file.
        if act::check(&file, Role::Segment).is_ok() {
            self.tell(self.store.keep(&name_of(&self.group, &info), file.as_fd()));
        }
        self.kept.insert(info.number, (info, Rc::new(file)));
    }

    /// Forgets one.
    pub fn remove(&mut self, number: u8) {
        if let Some((info, _)) = self.kept.remove(&number) {
            self.tell(self.store.forget(&name_of(&self.group, &info)));
        }
    }

    /// Takes these for all that there are.
    pub fn replace(&mut self, all: impl Iterator<Item = (SegmentInfo, ForeignFile)>) {
        let mut gone: Vec<u8> = self.kept.keys().copied().collect();
        for (info, file) in all {
            gone.retain(|number| *number != info.number);
            self.insert(info, file);
        }
        gone.into_iter().for_each(|number| self.remove(number));
    }

    /// Forgets all.
    pub fn clear(&mut self) {
        self.replace(std::iter::empty());
    }

    /// Number of segments.
    pub fn len(&self) -> usize {
        self.kept.len()
    }

    /// The segments, in the order of their numbers.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = &Kept> {
        self.kept.values()
    }

    fn tell(&self, told: io::Result<()>) {
        if let Err(e) = told {
            note!("group {}: the service manager cannot be told which files to keep: {e}", self.group);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, SealFlags};
    use std::os::unix::net::UnixDatagram;

    #[test]
    fn only_sealed_memory_reaches_the_service_manager() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let manager = UnixDatagram::bind(&path).unwrap();
        manager.set_nonblocking(true).unwrap();
        let mut segments = Segments::new("acme", &Rc::new(FileStore::at(path)));
        let told = || {
            let mut bytes = [0; 100];
            manager.recv(&mut bytes).ok().map(|n| String::from_utf8_lossy(&bytes[..n]).replace('\n', " "))
        };
        let sealed = |seals| {
            let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
            let file = rustix::fs::memfd_create("x", flags).unwrap();
            rustix::fs::ftruncate(&file, 16 << 12).unwrap();
            rustix::fs::fcntl_add_seals(&file, seals).unwrap();
            file
        };
        let of = |number| SegmentInfo { number, slots: 16 };
        segments.insert(of(1), rustix::pipe::pipe().unwrap().0.into());
        segments.insert(of(2), sealed(SealFlags::SHRINK).into());
        assert_eq!(told(), None, "kept here alone");
        let all = SealFlags::FUTURE_WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        segments.insert(of(3), sealed(all).into());
        assert_eq!(told().unwrap(), "FDSTORE=1 FDNAME=pool.acme.3.16 FDPOLL=0");
        segments.insert(of(3), sealed(all).into());
        assert_eq!(told().unwrap(), "FDSTOREREMOVE=1 FDNAME=pool.acme.3.16", "another one has its number");
        assert_eq!((told().unwrap().len(), segments.len()), ("FDSTORE=1 FDNAME=pool.acme.3.16 FDPOLL=0".len(), 3));
        segments.clear();
        let gone: Vec<String> = std::iter::from_fn(told).collect();
        assert!(gone.contains(&"FDSTOREREMOVE=1 FDNAME=pool.acme.3.16".to_owned()), "{gone:?}");
        assert_eq!(segments.len(), 0);
    }

    #[test]
    fn name_in_the_store_tells_group_and_segment() {
        let info = SegmentInfo { number: 7, slots: 4096 };
        for group in ["acme", "a.b.3.4", "x-1_2"] {
            assert_eq!(parse(&name_of(group, &info)), Some((group, info)));
        }
        for other in
            ["", "pool.", "pool.acme", "pool.acme.7", "pool.acme.256.1", "pool.acme.1.x", "pool..1.2", "pool.a b.1.2"]
        {
            assert_eq!(parse(other), None, "{other}");
        }
    }
}
