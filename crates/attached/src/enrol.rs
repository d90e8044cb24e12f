//! Which memory is enrolled in a process without hooks. The kernel's list of mappings is read from time to time, and
//! the table is made to agree with it.
//!
//! ```text
//!   private, anonymous, and asked for ---> enrolled, with the traits that the list shows
//!   private, of the pool --------------->  stays as the table knows it
//!   known to the table, and not listed --> forgotten; its slots are released
//! ```
//!
//! The list is read while the program runs, and may be out of date when it has been read. But a mapping that exists all
//! the while is listed. Before a mapping is replaced, the kernel is asked about it once more ([`agent::world`]). Before
//! a slot is released, the kernel is asked whether the pool is still mapped there. After the program has moved slots,
//! no slot is released until it ends, because slots may be mapped where the table knows of none.

use crate::gate;
use crate::policies::Policies;
use agent::arena;
use agent::follow::Following;
use agent::maps::{self, Mapping};
use agent::section::Section;
use agent::table::{self, Guard, Shut, Traits};
use page::{HostVirt, PageRange, PageSet};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Shortest time between two reads of the list, and the share of a processor's time that they may take: 2 s, 1/400.
const EVERY: (Duration, u32) = (Duration::from_secs(2), 400);
/// Longest time between two reads of the list while they find nothing new: 32 s.
const SELDOM: Duration = Duration::from_secs(32);

/// Which memory is to be enrolled.
struct Scope {
    /// Whether all private anonymous memory is enrolled, and not only memory with `MADV_MERGEABLE`.
    all: bool,
    /// Addresses of the agent's object.
    object: PageRange,
}

static SCOPE: OnceLock<Scope> = OnceLock::new();

impl Scope {
    fn wants(&self, mapping: &Mapping) -> bool {
        let own = [Some(self.object), Some(arena::range()), gate::range()];
        mapping.anonymous
            && (self.all || mapping.advice.mergeable)
            && !own.into_iter().flatten().any(|own| overlap(own, mapping.range))
    }
}

fn overlap(one: PageRange, other: PageRange) -> bool {
    one.start < other.end() && other.start < one.end()
}

/// The enrolment of memory in a process without hooks, and when its list of mappings is read next.
pub struct Enrolment {
    due: Instant,
    /// When the list was last read, the pause after that, and a hash of what it showed.
    looked: Instant,
    pause: Duration,
    found: u64,
}

impl Enrolment {
    /// The state before the list is first read. The agent's object lies at `object`.
    pub fn new(all: bool, object: PageRange) -> Self {
        let now = Instant::now();
        let _ = SCOPE.set(Scope { all, object });
        Self { due: now, looked: now, pause: EVERY.0, found: 0 }
    }

    /// Makes the table agree with the kernel's list, if it is time for that.
    pub fn look(&mut self, section: &Section) {
        let (now, following) = (Instant::now(), &**section.following());
        if now < self.due && !following.was_stale() {
            return;
        }
        if let Some(listed) = maps::mappings(table::everything(), true) {
            let found = listed.iter().fold(0, hash);
            self.pause = if found == self.found { (self.pause * 2).min(SELDOM) } else { EVERY.0 };
            self.found = found;
            let stage = section.stage();
            let listed: Vec<Mapping> = listed.into_iter().filter(|mapping| !overlap(stage, mapping.range)).collect();
            take_in(&mut table::lock(), &listed, following, table::everything());
        }
        self.looked = now;
        self.due = now + self.pause.max(now.elapsed() * EVERY.1);
    }

    /// Reads the list before a fold, unless it was just read, because slots get the advice that the table has for the
    /// memory.
    pub fn look_before_fold(&mut self, section: &Section) {
        if self.looked.elapsed() > EVERY.0 {
            self.due = self.looked;
            self.look(section);
        }
    }
}

/// Makes the table agree with the kernel's list in one range.
pub fn agree(table: &mut Guard, following: &Following, range: PageRange) {
    if let Some(listed) = maps::mappings(range, true) {
        take_in(table, &listed, following, range);
    }
}

/// Makes the table agree with these mappings of the kernel's list, within a range.
fn take_in(table: &mut Guard, listed: &[Mapping], following: &Following, within: PageRange) {
    let Some(scope) = SCOPE.get() else { return };
    let mut policies = Policies::default();
    let mut there = PageSet::new();
    for mapping in listed.iter().filter(|mapping| scope.wants(mapping)) {
        there.insert(mapping.range);
        table.ask_anew(mapping.range, traits_of(mapping, &mut policies));
    }
    let pooled = |mapping: &&Mapping| mapping.private && maps::is_pool_file(mapping.file);
    listed.iter().filter(pooled).for_each(|mapping| there.insert(mapping.range));
    let known: Vec<PageRange> = table.known(within).into_iter().map(|(range, _)| range).collect();
    for gone in known.into_iter().flat_map(|range| there.missing(range)) {
        if is_unmapped(table, following, gone) {
            table.forget(gone);
        }
    }
}

/// Adds a mapping to a hash (FNV-1a, by words).
fn hash(before: u64, mapping: &Mapping) -> u64 {
    let Mapping { range, access, anonymous, locked, special, advice, file, .. } = mapping;
    let flags = [*anonymous, *locked, *special, advice.dont_fork, advice.dont_dump, advice.mergeable];
    let flags = flags.into_iter().fold(u64::from(*access), |all, flag| all << 1 | u64::from(flag));
    let huge = advice.huge.map_or(0, |huge| 1 + u64::from(huge));
    let words = [range.start.0, range.pages, flags << 2 | huge, file.1];
    words.into_iter().fold(before, |all, word| (all ^ word).wrapping_mul(0x100_0000_01b3))
}

/// Whether no page of the range that the table has in mappings of the pool is still mapped to the pool, by the kernel's
/// list.
fn is_unmapped(table: &table::Guard, following: &Following, range: PageRange) -> bool {
    let is_pooled = |page: HostVirt| {
        following.mapping_of(page).is_some_and(|mapping| mapping.private && maps::is_pool_file(mapping.file))
    };
    let mut pages =
        table.pooled_pages(range).into_iter().flat_map(|part| (0..part.pages).map(move |n| part.start.add_pages(n)));
    !pages.any(is_pooled)
}

fn traits_of(mapping: &Mapping, policies: &mut Policies) -> Traits {
    let has_policy = policies.has_own(mapping.range.start);
    let reasons = [(mapping.locked, Shut::Locked), (mapping.special, Shut::Special), (has_policy, Shut::Policy)];
    let shut = reasons.into_iter().filter(|(is_so, _)| *is_so).fold(0, |shut, (_, why)| shut | why as u8);
    Traits { asked: true, access: mapping.access, shut, advice: mapping.advice, home: None }
}
