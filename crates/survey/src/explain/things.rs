//! Contents held more than once, by name. The name is the file that a page belongs to, in a guest or on the host, or
//! else its kind in the guest.

use crate::Inside;
use crate::{HOST, See};
use census::Entry;
use guest::{Guest, Plan};
use page::{GuestIndex, HostVirt, pages_to_bytes};
use serde::Serialize;
use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};

/// Most things that are printed for people.
pub const SHOWN: usize = 12;
/// Most things that are kept, and printed as JSON.
const KEPT: usize = 100;

/// A file or kind whose contents are held more than once.
#[derive(Clone, Debug, Serialize)]
pub struct Thing {
    /// Path inside a guest, or on the host; or a kind.
    pub name: String,
    /// Number of its contents that the guest holds and that are held more than once.
    pub contents: u64,
    /// Frames of these contents, by guest that maps them.
    pub holders: Vec<Holder>,
    /// Frames beyond the first of each content.
    pub superfluous_pages: u64,
}

/// A holder of a thing.
#[derive(Clone, Debug, Serialize)]
pub struct Holder {
    /// Id of a guest, or `host`.
    pub guest: String,
    /// The name of that guest.
    #[serde(skip)]
    pub name: String,
    /// Number of frames.
    pub pages: u64,
    /// The file that these frames belong to there, if it is known and not the thing's own name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
}

impl Thing {
    /// The thing in words, such as `libc.so.6 of web1, web2 and the host: 3 x 1.4 MiB`.
    pub fn in_words(&self) -> String {
        let mut names: Vec<&str> = self.holders.iter().take(5).map(|h| h.name.as_str()).collect();
        let others = format!("{} others", self.holders.len() - names.len());
        if self.holders.len() > names.len() {
            names.push(&others);
        }
        let of = match names.split_last() {
            Some((last, [])) => (*last).to_owned(),
            Some((last, rest)) => format!("{} and {last}", rest.join(", ")),
            None => String::new(),
        };
        let frames: u64 = self.holders.iter().map(|h| h.pages).sum();
        let each = cli::bytes(pages_to_bytes(self.contents));
        let amount = if frames == self.contents * self.holders.len() as u64 {
            format!("{} x {each}", self.holders.len())
        } else {
            format!("{each}, in {} altogether", cli::bytes(pages_to_bytes(frames)))
        };
        let on_host = self.holders.iter().find_map(|h| h.file.as_ref().filter(|_| h.guest == HOST));
        let on_host = on_host.map_or_else(String::new, |file| format!(" (there {file})"));
        format!("{} of {of}{on_host}: {amount}", self.name)
    }
}

/// A stretch of pages, and the file they are mapped from.
struct Stretch {
    position: u32,
    pages: u32,
    pid: u32,
    first: HostVirt,
    /// Index into the list of names, plus one.
    file: u32,
}

/// Counts of things, filled while a census is taken.
pub struct Things<'a> {
    guests: &'a [Guest],
    inside: &'a [Option<Inside>],
    target: GuestIndex,
    state: RefCell<State>,
}

#[derive(Default)]
struct State {
    stretches: Vec<Stretch>,
    names: Vec<String>,
    found: HashMap<String, Counts>,
}

#[derive(Default)]
struct Counts {
    contents: u64,
    superfluous: u64,
    holders: BTreeMap<u16, (u64, BTreeMap<String, u64>)>,
}

impl<'a> Things<'a> {
    /// Counts the contents that the guest with index `target` holds.
    pub fn new(guests: &'a [Guest], inside: &'a [Option<Inside>], target: usize) -> Self {
        Self { guests, inside, target: GuestIndex(target as u16), state: RefCell::default() }
    }

    /// The things found, the largest first.
    pub fn largest(&self) -> Vec<Thing> {
        let state = self.state.borrow();
        let holder = |(owner, (pages, files)): (&u16, &(u64, BTreeMap<String, u64>))| {
            let (guest, name) = match self.guests.get(usize::from(*owner)) {
                Some(guest) => (guest.id.clone(), guest.shown_name()),
                None => (HOST.to_owned(), "the host".to_owned()),
            };
            let file = files.iter().max_by_key(|(_, pages)| **pages).map(|(file, _)| file.clone());
            Holder { guest, name, pages: *pages, file }
        };
        let mut things: Vec<Thing> = state
            .found
            .iter()
            .map(|(name, counts)| Thing {
                name: name.clone(),
                contents: counts.contents,
                superfluous_pages: counts.superfluous,
                holders: counts.holders.iter().map(holder).collect(),
            })
            .collect();
        things.sort_by(|a, b| (b.superfluous_pages, &a.name).cmp(&(a.superfluous_pages, &b.name)));
        things.truncate(KEPT);
        for thing in &mut things {
            let name = thing.name.clone();
            thing.holders.iter_mut().for_each(|h| h.file = h.file.take().filter(|file| *file != name));
        }
        things
    }
}

impl State {
    fn stretch(&self, position: u32) -> Option<(&Stretch, HostVirt)> {
        let n = self.stretches.partition_point(|s| s.position <= position).checked_sub(1)?;
        let stretch = &self.stretches[n];
        let offset = position - stretch.position;
        (offset < stretch.pages).then(|| (stretch, stretch.first.add_pages(offset.into())))
    }
}

impl Things<'_> {
    /// Names for an entry's page: the path of the file that it belongs to, and its kind inside the guest if it is RAM
    /// of a VM that was looked into.
    fn names<'s>(&'s self, state: &'s State, entry: Entry) -> (Option<&'s str>, Option<&'static str>) {
        let Some((stretch, at)) = state.stretch(entry.position()) else { return (None, None) };
        let inside = self.inside.get(usize::from(entry.owner().0)).and_then(Option::as_ref);
        let inside = inside.filter(|inside| inside.ram.pid == stretch.pid);
        if let Some(inside) = inside
            && let Some(place) = inside.ram.map.guest_of(at).and_then(|at| inside.frames.index.of(at.frame()))
        {
            let file = inside.file_at(place).and_then(|file| file.path.as_deref());
            return (file, Some(inside.frames.uses[place].kind().name()));
        }
        let is_file = entry.kind() != page::PageKind::Anon;
        let number = stretch.file.checked_sub(1).filter(|_| is_file);
        // A slot belongs to the group, not to the process that maps it. So its pool's file name is not used.
        let name = number.map(|n| state.names[n as usize].as_str()).filter(|name| guest::pool_name(name).is_none());
        (name, None)
    }
}

impl See for Things<'_> {
    fn plan(&self, plan: &Plan) {
        let mut state = self.state.borrow_mut();
        let mut numbers: HashMap<String, u32> = HashMap::new();
        for place in plan.places() {
            let State { stretches, names, .. } = &mut *state;
            let file = place.file.map_or(0, |file| {
                *numbers.entry(file.to_owned()).or_insert_with(|| {
                    names.push(file.to_owned());
                    names.len() as u32
                })
            });
            stretches.push(Stretch {
                position: place.position,
                pages: place.pages,
                pid: place.pid,
                first: place.first,
                file,
            });
        }
    }

    fn class(&self, class: &[Entry]) {
        if class.len() < 2 || class[0].fingerprint() == page::Fingerprint::ZERO_PAGE {
            return;
        }
        let Some(mine) = class.iter().find(|e| e.owner() == self.target) else { return };
        let frames = class.chunk_by(|a, b| a.frame() == b.frame()).count() as u64;
        if frames < 2 {
            return;
        }
        let state = self.state.borrow();
        // The name is the guest's own file, else the file of another guest or the host, else the page's kind.
        let (own, kind) = self.names(&state, *mine);
        let others = || class.iter().find_map(|e| self.names(&state, *e).0);
        let name = own.or_else(others).map(str::to_owned);
        let name = name.unwrap_or_else(|| kind.unwrap_or("memory of the VMM").replace('_', " "));
        let mut by_holder: BTreeMap<u16, (u64, Option<String>)> = BTreeMap::new();
        for entry in class {
            let holder = by_holder.entry(entry.owner().0).or_default();
            holder.0 += 1;
            if holder.1.is_none() {
                holder.1 = self.names(&state, *entry).0.map(str::to_owned);
            }
        }
        drop(state);
        let mut state = self.state.borrow_mut();
        let counts = state.found.entry(name).or_default();
        counts.contents += 1;
        counts.superfluous += frames - 1;
        for (owner, (pages, file)) in by_holder {
            let holder = counts.holders.entry(owner).or_default();
            holder.0 += pages;
            if let Some(file) = file {
                *holder.1.entry(file).or_default() += pages;
            }
        }
    }
}
