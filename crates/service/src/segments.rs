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
use page::PoolSlot;
use rustix::fd::{AsFd, OwnedFd};
use std::collections::BTreeMap;
use std::io;
use std::rc::Rc;

/// First part of the names under which the service manager's store keeps segments.
const PREFIX: &str = "pool.";
/// Separates a template's name from the rest of the name in the store. No name of a group or template has this
/// character.
const NAMED: char = '+';

/// A segment, and its file.
type Kept = (SegmentInfo, Rc<ForeignFile>);

/// The segments of one group's pool, and their files.
#[derive(Default)]
pub struct Segments {
    group: String,
    store: Rc<FileStore>,
    kept: BTreeMap<u8, Kept>,
    /// The names of loaded templates, by segment number. A worker cannot change them.
    templates: BTreeMap<u8, String>,
}

/// The name under which the store keeps a segment. It has all that the next supervisor must know of the segment.
fn name_of(group: &str, info: &SegmentInfo, template: Option<&String>) -> String {
    let named = template.map_or(String::new(), |template| format!("{NAMED}{template}"));
    format!("{PREFIX}{group}.{}.{}{named}", info.number, info.slots)
}

/// Reads a name in the store: the group, the segment, and the template's name if the segment is a loaded template.
/// `None` if the name is not valid.
pub fn parse(name: &str) -> Option<(&str, SegmentInfo, Option<&str>)> {
    let (name, template) = name.split_once(NAMED).map_or((name, None), |(name, template)| (name, Some(template)));
    if template.is_some_and(|template| name::check("template", template).is_err()) {
        return None;
    }
    let mut parts = name.strip_prefix(PREFIX)?.rsplitn(3, '.');
    let (slots, number) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
    let group = parts.next().filter(|group| name::check("group", group).is_ok())?;
    Some((group, SegmentInfo { number, slots }, template))
}

impl Segments {
    /// The segments of a group that has none yet, with this store.
    pub fn new(group: &str, store: &Rc<FileStore>) -> Self {
        let (kept, templates) = (BTreeMap::new(), BTreeMap::new());
        Self { group: group.to_owned(), store: Rc::clone(store), kept, templates }
    }

    /// Adds a segment that the store has already. `template` is its name if it is a loaded template.
    pub fn restore(&mut self, info: SegmentInfo, template: Option<&str>, file: OwnedFd) {
        self.kept.insert(info.number, (info, Rc::new(ForeignFile::from(file))));
        self.templates.extend(template.map(|template| (info.number, template.to_owned())));
    }

    /// Adds a segment of the worker's, in place of a segment with the same number. A loaded template is not replaced.
    pub fn insert(&mut self, info: SegmentInfo, file: ForeignFile) {
        if self.templates.contains_key(&info.number) {
            return;
        }
        self.remove(info.number);
        // The worker may be compromised. Only a memory file is passed on, so that the service manager never waits when
        // it closes the file.
        if act::check(&file, Role::Segment).is_ok() {
            self.tell(self.store.keep(&name_of(&self.group, &info, None), file.as_fd()));
        }
        self.kept.insert(info.number, (info, Rc::new(file)));
    }

    /// Forgets a segment that the worker has dropped. Loaded templates stay.
    pub fn remove(&mut self, number: u8) {
        if !self.templates.contains_key(&number)
            && let Some((info, _)) = self.kept.remove(&number)
        {
            self.tell(self.store.forget(&name_of(&self.group, &info, None)));
        }
    }

    /// Replaces all segments, except for loaded templates, by these.
    pub fn replace(&mut self, all: impl Iterator<Item = (SegmentInfo, ForeignFile)>) {
        let mut gone: Vec<u8> = self.kept.keys().copied().collect();
        for (info, file) in all {
            gone.retain(|number| *number != info.number);
            self.insert(info, file);
        }
        gone.into_iter().for_each(|number| self.remove(number));
    }

    /// Forgets all segments except for loaded templates.
    pub fn clear(&mut self) {
        self.replace(std::iter::empty());
    }

    /// Adds a template whose file is sealed, so that nobody can write it.
    ///
    /// # Errors
    /// The group has as many templates as it may have.
    pub fn load(&mut self, name: &str, slots: u32, file: OwnedFd) -> Result<SegmentInfo, String> {
        let mut numbers = PoolSlot::FIRST_TEMPLATE..PoolSlot::SEGMENTS;
        let free = numbers.find(|number| !self.kept.contains_key(number));
        let number = free.ok_or("the group has as many templates as it may: unload one that no member maps")?;
        let info = SegmentInfo { number, slots };
        let name = name.to_owned();
        self.tell(self.store.keep(&name_of(&self.group, &info, Some(&name)), file.as_fd()));
        self.templates.insert(number, name);
        self.kept.insert(number, (info, Rc::new(ForeignFile::from(file))));
        Ok(info)
    }

    /// Makes the segment with this file a loaded template again, if it was one and was unloaded. Returns the segment.
    /// `None`: no unloaded template has this file.
    pub fn load_again(&mut self, name: &str, file: (u64, u64)) -> Option<SegmentInfo> {
        let number =
            self.unloaded().find(|number| self.kept.get(number).is_some_and(|(_, kept)| is_file(kept, file)))?;
        let (info, file) = self.kept.get(&number)?;
        let (info, name) = (*info, name.to_owned());
        self.tell(self.store.forget(&name_of(&self.group, &info, None)));
        self.tell(self.store.keep(&name_of(&self.group, &info, Some(&name)), file.as_fd()));
        self.templates.insert(number, name);
        Some(info)
    }

    /// Unloads a template: from here on the worker may drop it as any other segment. Returns the number of its segment;
    /// `None` if no template has this name.
    pub fn unload(&mut self, name: &str) -> Option<u8> {
        let number = *self.templates.iter().find(|(_, known)| *known == name)?.0;
        let name = self.templates.remove(&number);
        let (info, file) = self.kept.get(&number)?;
        self.tell(self.store.forget(&name_of(&self.group, info, name.as_ref())));
        self.tell(self.store.keep(&name_of(&self.group, info, None), file.as_fd()));
        Some(number)
    }

    /// The templates that are loaded, with their names.
    pub fn templates(&self) -> impl Iterator<Item = (&str, &Kept)> {
        self.templates.iter().filter_map(|(number, name)| Some((name.as_str(), self.kept.get(number)?)))
    }

    /// Segment numbers of templates that were unloaded, which the worker may not have dropped yet.
    pub fn unloaded(&self) -> impl Iterator<Item = u8> {
        let of_templates = self.kept.keys().copied().filter(|number| *number >= PoolSlot::FIRST_TEMPLATE);
        of_templates.filter(|number| !self.templates.contains_key(number))
    }

    /// Whether the group has a segment whose file has this device and inode.
    pub fn has_file(&self, device: u64, inode: u64) -> bool {
        self.kept.values().any(|(_, file)| is_file(file, (device, inode)))
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

/// Whether a file has this device and inode.
fn is_file(file: &ForeignFile, wanted: (u64, u64)) -> bool {
    rustix::fs::fstat(file).is_ok_and(|found| (found.st_dev, found.st_ino) == wanted)
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
            assert_eq!(parse(&name_of(group, &info, None)), Some((group, info, None)));
            let name = "debian.12".to_owned();
            assert_eq!(parse(&name_of(group, &info, Some(&name))), Some((group, info, Some(&name[..]))));
        }
        for other in [
            "",
            "pool.",
            "pool.acme",
            "pool.acme.7",
            "pool.acme.256.1",
            "pool.acme.1.x",
            "pool..1.2",
            "pool.a b.1.2",
            "pool.a.1.2+",
        ] {
            assert_eq!(parse(other), None, "{other}");
        }
    }
}
