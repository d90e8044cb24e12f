//! The broken pages of a member: fingerprinted now and then, the more seldom the less they rest.

use crate::turnover::Worth;
use page::{Fingerprint, HostVirt, PageRange};

/// When a broken page is looked at again, in seconds: at first, and at most.
pub const AGAIN: (u32, u32) = (2, 128);
/// At most so long, while it depends on the moment what is folded.
const BUSY: u32 = 4;

/// A broken page, as it was seen last.
#[derive(Clone, Copy)]
struct BrokenPage {
    page: u64,
    fingerprint: u64,
    /// Since when it is as it is, and when it is to be looked at; in seconds since the first round.
    since: u32,
    due: u32,
    wait: u16,
    /// Whether the worker was told.
    told: bool,
}

/// Those that there were at the last look, in order.
#[derive(Default)]
pub struct BrokenPageList(Vec<BrokenPage>);

impl BrokenPageList {
    /// Takes in which there are now, as ranges in order, and finds those whose time has come; for new ones it comes after `wait`
    /// seconds. Where not all that rests is folded at once, they are looked at more often.
    pub fn look(&mut self, ranges: &[PageRange], now: u32, (wait, is_quiet): (u32, bool)) -> Vec<PageRange> {
        let longest = if is_quiet { AGAIN.1 } else { BUSY };
        let pages: u64 = ranges.iter().map(|range| range.pages).sum();
        let mut known = std::mem::replace(&mut self.0, Vec::with_capacity(pages as usize)).into_iter().peekable();
        let mut due: Vec<PageRange> = Vec::new();
        for page in ranges.iter().flat_map(|range| range.start.page()..range.end().page()) {
            while known.next_if(|known| known.page < page).is_some() {}
            let new = BrokenPage { page, fingerprint: 0, since: now, due: now + wait, wait: wait as u16, told: false };
            let mut entry = known.next_if(|known| known.page == page).unwrap_or(new);
            entry.due = entry.due.min(now + longest);
            if entry.due <= now {
                // Until it is fingerprinted, which sets it anew.
                entry.due = now + AGAIN.1;
                let start = HostVirt(page << page::PAGE_SHIFT);
                match due.last_mut() {
                    Some(last) if last.end() == start => last.pages += 1,
                    _ => due.push(PageRange { start, pages: 1 }),
                }
            }
            self.0.push(entry);
        }
        due
    }

    /// Says which of these pages have rested and were not said to have: those that are the same as when they were seen before, and
    /// worth folding; and which were written since. They are seen again after `wait` seconds, doubling.
    pub fn have_rested(
        &mut self,
        start: HostVirt,
        fingerprints: &[Fingerprint],
        now: u32,
        (wait, worth): (u32, Worth),
    ) -> (Vec<bool>, Vec<PageRange>) {
        let (mut tell, mut written) = (Vec::with_capacity(fingerprints.len()), Vec::new());
        for (page, fingerprint) in (start.page()..).zip(fingerprints) {
            let Ok(at) = self.0.binary_search_by_key(&page, |known| known.page) else {
                tell.push(false);
                continue;
            };
            let entry = &mut self.0[at];
            let (is_new, is_same) = (entry.fingerprint == 0, entry.fingerprint == fingerprint.0);
            if !is_same {
                (entry.since, entry.fingerprint) = (now, fingerprint.0);
            }
            let rested = is_same && worth.allows(page, now - entry.since);
            tell.push(rested && !entry.told);
            entry.told = rested;
            if !is_new && !is_same {
                written.push(PageRange { start: HostVirt(page << page::PAGE_SHIFT), pages: 1 });
            }
            if !is_new {
                // What changes is likely to change again, and what does not is known.
                entry.wait = (u32::from(entry.wait) * 2).clamp(wait, if wait == 0 { 0 } else { AGAIN.1 }) as u16;
            }
            entry.due = now + u32::from(entry.wait);
        }
        (tell, written)
    }

    /// What rests of these pages is to be told again.
    pub fn tell_again(&mut self, range: PageRange) {
        let first = self.0.partition_point(|known| known.page < range.start.page());
        let behind = self.0[first..].iter_mut();
        behind.take_while(|known| known.page < range.end().page()).for_each(|known| known.told = false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_rests_is_told_once_and_again_when_it_was_not_taken() {
        let mut list = BrokenPageList::default();
        let pages = |first: u64, pages| PageRange { start: HostVirt(first << page::PAGE_SHIFT), pages };
        let mut now = 0;
        let mut tell = |list: &mut BrokenPageList, contents: [u64; 3]| {
            now += 4;
            assert_eq!(list.look(&[pages(7, 3)], now, (0, false)), [pages(7, 3)]);
            list.have_rested(pages(7, 1).start, &contents.map(Fingerprint), now, (0, Worth::All)).0
        };
        assert_eq!(tell(&mut list, [1, 2, 3]), [false; 3]);
        assert_eq!(tell(&mut list, [1, 2, 30]), [true, true, false]);
        assert_eq!(tell(&mut list, [1, 2, 30]), [false, false, true]);
        list.tell_again(pages(8, 5));
        assert_eq!(tell(&mut list, [1, 2, 30]), [false, true, true]);
    }
}
