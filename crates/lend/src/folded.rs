//! Waits until members' memory is folded, by the answers of their agents and of their group's worker.
//!
//! ```text
//!   private pages in frames --> question `Why` --> young, or under way: folding is not over --> asked again
//!                                                  few or none of these, three times in a row: it is over
//! ```
//!
//! An agent answers for the moment: pages that were written since its last round count as young. The question has it
//! begin its next round sooner.

use anyhow::Context;
use api::client::Service;
use api::place::Place;
use cli::bytes;
use guest::Guest;
use host::Pagemap;
use page::{HostVirt, PageRange};
use std::time::{Duration, Instant};
use wire::{RUNS, WHY_PAGES, Why};

/// Pause between two questions to a member: 1 s. A round of its agent takes that long while many pages change.
const ASK_EVERY: Duration = Duration::from_secs(1);
/// Number of answers in a row by which folding is over, and number of failed questions in a row after which the wait
/// ends: 3.
const IN_A_ROW: u32 = 3;
/// Pages that may still be young or under way when folding is over, as a part of the pages that the guest holds alone:
/// 1/64. A program that runs writes some all the time.
const FEW_PART: u64 = 64;
/// Number of pages that may be young or under way in any case.
const FEW: u64 = 64;
/// Most pages of one range in a question: 64.
const PIECE_PAGES: u64 = 64;
/// Most pages of one process that are asked about: 512 MiB. Of a process with more, a sample is asked about that stands
/// for all.
const MOST_PAGES: u64 = 1 << 17;
/// End of the addresses that the kernel lets be scanned: a page below 128 TiB.
const ADDRESSES_END: HostVirt = HostVirt((1 << 47) - (1 << page::PAGE_SHIFT));

/// Pages that a guest holds alone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Left {
    /// Number of all pages that the guest holds alone.
    pages: u64,
    /// Pages that were written too recently to be folded, or that the agent has not looked at since.
    young: u64,
    /// Pages that are about to be folded.
    under_way: u64,
}

/// The wait for one guest.
#[derive(Clone, Debug, Default)]
struct Wait {
    over: u32,
    failed: u32,
    /// Why folding is not over.
    why: Option<String>,
}

impl Wait {
    const fn goes_on(&self) -> bool {
        self.over < IN_A_ROW && self.failed < IN_A_ROW
    }

    fn hear(&mut self, answer: anyhow::Result<Left>) {
        match answer {
            Ok(left) if left.is_little() => (self.over, self.failed, self.why) = (self.over.saturating_add(1), 0, None),
            Ok(left) => (self.over, self.failed, self.why) = (0, 0, Some(left.to_string())),
            Err(e) => {
                (self.over, self.failed) = (0, self.failed.saturating_add(1));
                self.why = Some(format!("how far folding is cannot be told: {e:#}"));
            }
        }
    }
}

impl Left {
    fn is_little(&self) -> bool {
        self.young.saturating_add(self.under_way) <= (self.pages / FEW_PART).max(FEW)
    }

    fn add(&mut self, why: Why, pages: u64) {
        self.pages = self.pages.saturating_add(pages);
        match why {
            Why::Young => self.young = self.young.saturating_add(pages),
            Why::UnderWay => self.under_way = self.under_way.saturating_add(pages),
            _ => {}
        }
    }
}

impl std::fmt::Display for Left {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [pages, young, under_way] =
            [self.pages, self.young, self.under_way].map(|n| bytes(page::pages_to_bytes(n)));
        write!(
            f,
            "of {pages} that it held alone, {young} were written too lately to be folded, and {under_way} were about to be"
        )
    }
}

/// Waits until folding is over for all these guests, for `patience` at most, or until this process is interrupted.
/// Returns for each guest why folding is not over; `None` if it is.
pub fn until_folded(place: &Place, guests: &[Guest], patience: Duration) -> Vec<Option<String>> {
    let (end, mut waits) = (Instant::now() + patience, vec![Wait::default(); guests.len()]);
    let mut service = None;
    loop {
        for (guest, wait) in guests.iter().zip(&mut waits).filter(|(_, wait)| wait.goes_on()) {
            wait.hear(left(place, &mut service, guest));
        }
        let is_over = waits.iter().all(|wait| !wait.goes_on());
        if is_over || Instant::now() >= end || host::interrupted().is_some() {
            break;
        }
        std::thread::sleep(ASK_EVERY.min(end.saturating_duration_since(Instant::now())));
    }
    let late = |why| format!("folding was not over after {} s: {why}", patience.as_secs());
    waits.into_iter().map(|wait| if wait.goes_on() { wait.why.map(late) } else { wait.why }).collect()
}

/// Asks the service how many pages of a guest are young or under way. After an error, the next call connects anew,
/// because the service may have restarted.
fn left(place: &Place, service: &mut Option<Service>, guest: &Guest) -> anyhow::Result<Left> {
    let group = guest.facts.folded_in.as_deref().context("it is no member of a service")?;
    let connected = match service.take() {
        Some(connected) => connected,
        None => Service::connect_soon(place)?,
    };
    let mut left = Left::default();
    for pid in &guest.pids {
        let (pieces, each) = pieces(*pid)?;
        for asked in questions(&pieces) {
            let pages = asked.iter().map(|piece| (piece.start.0, u16::try_from(piece.pages).unwrap_or(0))).collect();
            for why in connected.why(group, *pid, pages)? {
                left.add(why, each);
            }
        }
    }
    *service = Some(connected);
    Ok(left)
}

/// Ranges of pages that a process holds alone, of [`PIECE_PAGES`] at most; and the number of pages for which each page
/// stands: more than one if the ranges are only a sample.
fn pieces(pid: u32) -> anyhow::Result<(Vec<PageRange>, u64)> {
    let ranges = Pagemap::open(pid)?.private_ranges(HostVirt(0), ADDRESSES_END)?;
    let mut pieces = Vec::new();
    for range in &ranges {
        let mut at = 0_u64;
        while at < range.pages {
            let pages = PIECE_PAGES.min(range.pages.saturating_sub(at));
            pieces.push(PageRange { start: range.start.add_pages(at), pages });
            at = at.saturating_add(pages);
        }
    }
    let all = ranges.iter().fold(0_u64, |sum, range| sum.saturating_add(range.pages));
    let each = all.div_ceil(MOST_PAGES).max(1);
    let step = usize::try_from(each).unwrap_or(usize::MAX);
    Ok((pieces.into_iter().step_by(step).collect(), each))
}

/// The ranges, divided into questions: each has no more ranges and pages than a question may have.
fn questions(pieces: &[PageRange]) -> Vec<&[PageRange]> {
    let (mut all, mut rest) = (Vec::new(), pieces);
    while !rest.is_empty() {
        let mut pages = 0_u64;
        let fits = |piece: &&PageRange| {
            pages = pages.saturating_add(piece.pages);
            pages <= WHY_PAGES as u64
        };
        let number = rest.iter().take(RUNS).take_while(fits).count().max(1);
        let (asked, behind) = rest.split_at(number);
        all.push(asked);
        rest = behind;
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(page: u64, pages: u64) -> PageRange {
        PageRange { start: HostVirt(page << page::PAGE_SHIFT), pages }
    }

    #[test]
    fn questions_have_all_pieces_and_keep_to_their_bounds() {
        let pieces: Vec<PageRange> =
            (0..300).map(|n| range(n * 100, 64)).chain((0..5000).map(|n| range(n, 1))).collect();
        let asked = questions(&pieces);
        assert_eq!(asked.concat(), pieces);
        let pages = |question: &[PageRange]| question.iter().map(|piece| piece.pages).sum::<u64>();
        assert!(asked.iter().all(|one| one.len() <= RUNS && pages(one) <= WHY_PAGES as u64));
        assert_eq!(asked.len(), 7, "{:?}", asked.iter().map(|one| one.len()).collect::<Vec<_>>());
        assert!(questions(&[]).is_empty());
    }

    #[test]
    fn folding_is_over_after_three_answers_in_a_row_that_leave_little() {
        let answer = |young, under_way| Ok(Left { pages: 64_000, young, under_way });
        let mut wait = Wait::default();
        for (young, under_way, goes_on) in [
            (0, 1001, true),
            (500, 500, true),
            (0, 0, true),
            (1001, 0, true),
            (0, 0, true),
            (0, 0, true),
            (0, 9, false),
        ] {
            wait.hear(answer(young, under_way));
            assert_eq!(
                (wait.goes_on(), wait.why.is_some()),
                (goes_on, young + under_way > 1000),
                "{young} {under_way}"
            );
        }
        assert!(Left { pages: 100, young: 64, under_way: 0 }.is_little(), "of few, 64 are little");
        assert!(!Left { pages: 100, young: 64, under_way: 1 }.is_little());
    }

    #[test]
    fn service_that_does_not_tell_is_asked_three_times_and_the_reason_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let own = std::process::id();
        let all = guest::Survey::take().unwrap().guests(&[own], &[]);
        let mut guest = all.into_iter().find(|guest| guest.pids.contains(&own)).unwrap();
        guest.pids = vec![own];
        guest.facts.folded_in = Some("g".into());
        let begin = Instant::now();
        let why = until_folded(&Place::at(dir.path()), &[guest.clone()], Duration::from_secs(600)).remove(0).unwrap();
        assert!(
            why.contains("how far folding is cannot be told") && begin.elapsed() < Duration::from_secs(300),
            "{why}"
        );
        guest.facts.folded_in = None;
        let why = until_folded(&Place::at(dir.path()), &[guest], Duration::ZERO).remove(0).unwrap();
        assert!(why.contains("after 0 s") && why.contains("it is no member"), "{why}");
    }

    /// Pages that were written are there, each once.
    #[test]
    fn pieces_are_what_a_process_holds_alone() {
        let own = vec![1_u8; 1 << 20];
        let (pieces, each) = pieces(std::process::id()).unwrap();
        let pages: u64 = pieces.iter().map(|piece| piece.pages).sum();
        assert!(pages >= 256 && each >= 1 && pieces.iter().all(|piece| piece.pages <= PIECE_PAGES), "{pages}");
        let inside = HostVirt(own.as_ptr() as u64 + (1 << 19));
        assert!(each > 1 || pieces.iter().any(|piece| piece.start <= inside && inside < piece.end()));
        assert!(pieces.windows(2).all(|two| two[0].end() <= two[1].start));
    }
}
