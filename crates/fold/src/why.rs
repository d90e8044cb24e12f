//! Why pages are not folded: answers to an operator's question, which no decision depends on.
//!
//! The member is asked first, because it knows why it has not reported a page. If the member has no reason, the plan
//! may have one.

use crate::group::Group;
use crate::member::Cut;
use crate::plan::Planner;
use crate::table::{Mark, MemberId, PageRef};
use api::control::News;
use page::{HostVirt, PageRange};
use std::collections::BTreeSet;
use std::time::Instant;
use wire::{RUNS, ToAgent, WHY_PAGES, Why};

/// A question that a member has not answered.
#[derive(Debug)]
pub struct Question {
    number: u64,
    member: MemberId,
    request: u32,
    pages: Vec<HostVirt>,
}

impl Group {
    /// Passes an operator's question on to the member of this process. An earlier question that has no answer yet is
    /// dropped.
    pub(crate) fn ask_why(&mut self, number: u64, pid: u32, pages: &[(u64, u16)]) {
        let count: usize = pages.iter().map(|(_, pages)| usize::from(*pages)).sum();
        let fits = pages.len() <= RUNS && count <= WHY_PAGES && pages.iter().all(|(_, pages)| *pages > 0);
        let member = self.members.values_mut().find(|m| m.identity.pid == pid && m.is_serving && !m.is_stuck());
        let Some(member) = member.filter(|_| fits) else {
            return self.tell(News::Because(number, Vec::new()), Vec::new());
        };
        let ranges: Vec<PageRange> = pages
            .iter()
            .map(|(start, pages)| PageRange { start: HostVirt(*start), pages: u64::from(*pages) })
            .collect();
        let pages = ranges.iter().flat_map(|range| (0..range.pages).map(|n| range.start.add_pages(n))).collect();
        let request = member.request();
        member.say(&ToAgent::Why(request, ranges), None);
        self.question = Some(Question { number, member: member.id, request, pages });
    }

    /// Handles a member's answer: where the agent has no reason, takes the planner's, and sends the reasons to the
    /// supervisor.
    pub(crate) fn because(&mut self, id: MemberId, request: u32, reasons: &[Why], now: Instant) -> Result<(), Cut> {
        let is_it = |question: &mut Question| (question.member, question.request) == (id, request);
        let Some(question) = self.question.take_if(is_it) else { return Ok(()) };
        if question.pages.len() != reasons.len() {
            return Err(Cut::NotAsked);
        }
        let retries: BTreeSet<PageRef> = self.planner.place(id).retries.iter().copied().collect();
        let is_full = self.clock.no_room(now).is_some();
        let answer = question.pages.iter().zip(reasons).map(|(at, why)| match why {
            Why::Other => self.planner.why(id, *at, &retries, is_full),
            why => *why,
        });
        let answer = answer.map(|why| why as u8).collect();
        self.tell(News::Because(question.number, answer), Vec::new());
        Ok(())
    }
}

impl Planner {
    /// Why the plan does not fold a page. `retries` are the pages of this member that are tried again later.
    fn why(&mut self, member: MemberId, at: HostVirt, retries: &BTreeSet<PageRef>, is_full: bool) -> Why {
        let Some(page) = self.page_at(member, at) else { return Why::Other };
        let fingerprint = self.table.fingerprint(page);
        if self.table.is_any(page, &[Mark::Wanted, Mark::Sent]) {
            Why::UnderWay
        } else if retries.contains(&page) {
            if self.fleeting.waits(fingerprint, self.now) { Why::BackedOff } else { Why::Busy }
        } else if self.table.is(page, Mark::Huge) && fingerprint != 0 {
            Why::Huge
        } else if is_full && fingerprint != 0 && !self.table.is(page, Mark::Indexed) {
            Why::NoRoom
        } else {
            Why::Other
        }
    }
}
