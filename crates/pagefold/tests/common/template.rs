//! A template with known pages, for members that map it.

use super::service::Service;
use api::place::Place;
use api::template::{Question, Reply, ask, file_name};
use rustix::fd::{AsFd, AsRawFd, OwnedFd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::fs::File;
use std::os::unix::fs::FileExt;

const PAGE: usize = 4096;

/// A page as `fill` of `known_pages` writes it.
pub fn known_page(seed: u64) -> [u8; PAGE] {
    let mut page = [0; PAGE];
    let mut x = (seed << 1 | 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    for word in page.as_chunks_mut::<8>().0 {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        *word = x.to_ne_bytes();
    }
    page
}

/// A memory file that may become a template.
pub struct Template(OwnedFd);

impl Template {
    /// An empty one of a group with this full name.
    pub fn empty(group: &str, pages: usize) -> Self {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = memfd_create(file_name(group), flags).expect("a memory file");
        ftruncate(&file, (pages * PAGE) as u64).expect("its size");
        Self(file)
    }

    /// One whose first `filled` pages are known, beginning with this seed. The others are empty.
    pub fn known(group: &str, pages: usize, filled: usize, seed: u64) -> Self {
        let template = Self::empty(group, pages);
        let file = File::from(template.0.try_clone().expect("a descriptor"));
        for page in 0..filled {
            file.write_all_at(&known_page(seed + page as u64), (page * PAGE) as u64).expect("fill it");
        }
        template
    }

    /// Its path, for other processes.
    pub fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.0.as_raw_fd())
    }

    /// Has the service load it for a group with this full name.
    pub fn load(&self, service: &Service, group: &str, name: &str) -> Result<(), String> {
        let question = Question::Load { group: group.to_owned(), name: name.to_owned() };
        match ask(&Place::at(&service.place()), &question, Some(self.0.as_fd())).expect("an answer") {
            (Reply::Loaded(_), Some(_)) => Ok(()),
            (Reply::Refused(why), None) => Err(why),
            other => panic!("{other:?}"),
        }
    }
}

/// The templates that a group has loaded, and whether its answer is that.
pub fn loaded(service: &Service, group: &str) -> Vec<String> {
    match ask(&Place::at(&service.place()), &Question::List { group: group.to_owned() }, None).expect("an answer").0 {
        Reply::Templates(all) => all.into_iter().map(|template| template.name).collect(),
        other => panic!("{other:?}"),
    }
}

/// Has a template unloaded.
pub fn unload(service: &Service, group: &str, name: &str) -> Reply {
    let question = Question::Unload { group: group.to_owned(), name: name.to_owned() };
    ask(&Place::at(&service.place()), &question, None).expect("an answer").0
}
