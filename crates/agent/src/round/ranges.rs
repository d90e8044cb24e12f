//! Functions on ordered lists of ranges.

use page::{HostVirt, PageRange};

/// The range from one address to another.
pub fn between(start: HostVirt, end: HostVirt) -> PageRange {
    PageRange { start, pages: end.page() - start.page() }
}

/// The common parts of two ordered lists of ranges.
pub fn common(one: &[PageRange], other: &[PageRange]) -> Vec<PageRange> {
    let (mut found, mut a, mut b) = (Vec::new(), one.iter().peekable(), other.iter().peekable());
    while let (Some(x), Some(y)) = (a.peek(), b.peek()) {
        let (start, end) = (x.start.max(y.start), x.end().min(y.end()));
        if start < end {
            found.push(between(start, end));
        }
        if x.end() <= y.end() {
            a.next()
        } else {
            b.next()
        };
    }
    found
}

/// Joins those of these ordered ranges that have at most `gap` pages between them; the pages between are included.
pub fn joined(ranges: &[PageRange], gap: u64) -> Vec<PageRange> {
    let mut all: Vec<PageRange> = Vec::new();
    for range in ranges {
        match all.last_mut().filter(|last| range.start <= last.end().add_pages(gap)) {
            Some(last) => *last = between(last.start, range.end()),
            None => all.push(*range),
        }
    }
    all
}

/// Those ranges of an ordered list that overlap a range of another ordered list.
pub fn overlapping(ranges: &[PageRange], others: &[PageRange]) -> Vec<PageRange> {
    let mut others = others.iter().peekable();
    let mut found = Vec::new();
    for range in ranges {
        while others.next_if(|other| other.end() <= range.start).is_some() {}
        if others.peek().is_some_and(|other| other.start < range.end()) {
            found.push(*range);
        }
    }
    found
}

/// The gaps before, between and behind these ordered ranges, up to `end`.
pub fn gaps(ranges: &[PageRange], end: HostVirt) -> Vec<PageRange> {
    let (mut found, mut at) = (Vec::new(), HostVirt(0));
    for range in ranges {
        found.push(between(at, range.start));
        at = range.end();
    }
    found.push(between(at, end));
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranges(list: &[(u64, u64)]) -> Vec<PageRange> {
        list.iter().map(|&(page, pages)| PageRange { start: HostVirt(page << 12), pages }).collect()
    }

    #[test]
    fn ranges_are_cut_and_chosen() {
        let open = ranges(&[(0, 10), (20, 5), (30, 1)]);
        assert_eq!(common(&open, &ranges(&[(5, 10), (18, 4), (24, 10)])), ranges(&[(5, 5), (20, 2), (24, 1), (30, 1)]));
        assert_eq!(overlapping(&open, &ranges(&[(9, 2), (29, 2)])), ranges(&[(0, 10), (30, 1)]));
        assert_eq!(common(&open, &[]), []);
        assert_eq!(joined(&open, 5), ranges(&[(0, 10), (20, 11)]));
        assert_eq!([9, 10].map(|gap| joined(&open, gap).len()), [2, 1]);
        assert_eq!(gaps(&open, HostVirt(40 << 12)), ranges(&[(0, 0), (10, 10), (25, 5), (31, 9)]));
    }
}
