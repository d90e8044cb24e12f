//! Where the guests' frames are at one moment: every frame that they and the pool take is counted once.
//!
//! ```text
//!   resident = contents                  one frame for each content but zeros
//!            + pool_idle                 slots that take memory and are not in use
//!            + slots_by_sharers[0]       slots in use that no page maps
//!            + slots_alike               slots whose content another slot has, too
//!            + broken_equal_to_a_slot    private pages in mappings of the pool whose content a slot has
//!            + duplicates_not_folded     private pages whose content a slot or another private page has
//!            + zero_resident             private pages of zeros
//! ```
//!
//! `resident` is counted from page tables, and contents from frames (`audit::contents`). The merger tells of its slots,
//! and why pages are not folded. So the sum shows whether the merger's account is that of the kernel: the rest is
//! `unaccounted`.

use super::equal::Guest;
use super::merger::Merger;
use audit::contents::{Class, Contents, Places, Taken};
use page::{HostVirt, Savings};
use serde::Serialize;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use wire::Why;

/// The part of the account that only the merger knows.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Slots {
    /// Slots in use.
    pub pool_in_use: u64,
    /// Slots that take memory and are not in use.
    pub pool_idle: u64,
    /// Slots in use, by the number of pages that map them: 0, 1, 2, 3 to 7, 8 and more.
    pub slots_by_sharers: [u64; 5],
    /// Slots in use that no page maps, because some process may still map them unseen, in bytes.
    pub deferred_bytes: u64,
}

/// Most pages that the merger is asked about at once: more would keep it from its work.
const MOST_ASKED: usize = 8192;

/// Numbers of pages by the reason why they are not folded.
pub type ByReason = BTreeMap<&'static str, u64>;

/// The account of all frames of guests and pool at one moment. Numbers are of frames, unless the name says bytes.
#[derive(Clone, Debug, Serialize)]
pub struct Frames {
    /// Frames that the guests and the pool take.
    resident: u64,
    /// Net savings, by page tables where these tell ([`Savings`]).
    pub saved: i64,
    /// Different contents, zeros aside: each needs one frame.
    contents: u64,
    /// The merger's slots; absent for ksmd, which has none.
    #[serde(flatten)]
    slots: Option<Slots>,
    /// Mapped slots with the content of another one.
    slots_alike: u64,
    /// Private pages in mappings of the pool whose content a slot has.
    broken_equal_to_a_slot: u64,
    /// Of those, by reason.
    broken_by_reason: ByReason,
    /// Other private pages whose content a slot has, or another private page, by the reason why they are not folded.
    duplicates_not_folded: ByReason,
    /// Private pages of zeros.
    zero_resident: u64,
    /// Frames that the sum lacks, or has too many.
    unaccounted: i64,
    /// Tables of the merger.
    tables: u64,
    /// The kernel's account of the guests' mappings.
    mappings: u64,
    /// Page tables of the guests, and of the merger's own processes.
    page_tables: u64,
}

impl Frames {
    /// Counts the frames of the guests at this moment.
    ///
    /// # Errors
    /// A guest has ended, or frames cannot be read.
    pub fn of(merger: &dyn Merger, guests: &[Guest]) -> anyhow::Result<Self> {
        let (pids, own): (Vec<u32>, _) = (guests.iter().map(|(pid, _)| *pid).collect(), merger.own_pids()?);
        let found = Places::of(&pids, &own)?.read()?;
        let (slots, savings) = (merger.slots()?, merger.savings(&found.taken)?);
        let (broken_by_reason, duplicates_not_folded) = by_reason(merger, &found)?;
        let page_tables = pids.iter().chain(&own).map(|pid| host::page_table_bytes(*pid)).sum::<host::Result<u64>>()?;
        let pages = |bytes: u64| bytes >> page::PAGE_SHIFT;
        let mut frames = Self {
            resident: found.taken.frames,
            saved: savings.saved_bytes() >> page::PAGE_SHIFT,
            contents: found.contents,
            slots,
            slots_alike: found.alike,
            broken_equal_to_a_slot: broken_by_reason.values().sum(),
            broken_by_reason,
            duplicates_not_folded,
            zero_resident: found.zeros,
            unaccounted: 0,
            tables: pages(savings.tables_bytes),
            mappings: pages(savings.mappings_bytes),
            page_tables: pages(page_tables),
        };
        frames.unaccounted = frames.resident.cast_signed() - frames.sum().cast_signed();
        Ok(frames)
    }

    /// The right side of the equation in the module's documentation.
    fn sum(&self) -> u64 {
        let slots = self.slots.unwrap_or_default();
        let duplicates: u64 = self.duplicates_not_folded.values().sum();
        let of_pool = slots.pool_idle + slots.slots_by_sharers[0] + self.slots_alike;
        self.contents + of_pool + self.broken_equal_to_a_slot + duplicates + self.zero_resident
    }
}

/// Numbers of private pages that are superfluous, by the reason why they are not folded: first of broken pages whose
/// content a slot has, then of all others.
fn by_reason(merger: &dyn Merger, found: &Contents) -> anyhow::Result<(ByReason, ByReason)> {
    let none: ByReason = Why::ALL.iter().map(|why| (why.name(), 0)).collect();
    let (mut broken, mut others) = (none.clone(), none);
    let pages: Vec<_> =
        found.duplicates.iter().flat_map(|class| &class.pages).map(|page| (page.pid, page.at)).collect();
    let reasons = ask(merger, &pages)?;
    let mut reasons = reasons.into_iter();
    for Class { has_slot, pages } in &found.duplicates {
        let mut class: Vec<(Why, bool)> =
            pages.iter().map(|page| (reasons.next().unwrap_or(Why::Other), *has_slot && page.is_broken)).collect();
        if !has_slot {
            // One of them has to be there. The merger waits for the others as long as it has a reason to.
            let one = class.iter().position(|(why, _)| *why == Why::Other).unwrap_or(0);
            class.remove(one);
        }
        for (why, is_broken) in class {
            let into = if is_broken { &mut broken } else { &mut others };
            *into.entry(why.name()).or_default() += 1;
        }
    }
    Ok((broken, others))
}

/// Private pages whose content a slot has, by the reason why they are not folded.
///
/// # Errors
/// The merger does not answer.
pub fn open_by_reason(merger: &dyn Merger, found: &Contents) -> anyhow::Result<ByReason> {
    let open = found.duplicates.iter().filter(|class| class.has_slot).flat_map(|class| &class.pages);
    let pages: Vec<_> = open.map(|page| (page.pid, page.at)).collect();
    let mut by_reason: ByReason = Why::ALL.iter().map(|why| (why.name(), 0)).collect();
    for why in ask(merger, &pages)? {
        *by_reason.entry(why.name()).or_default() += 1;
    }
    Ok(by_reason)
}

/// Asks the merger why pages are not folded. If there are too many, it asks about every nth page, in the order of their
/// addresses, and the answer is taken for the pages up to the next one.
fn ask(merger: &dyn Merger, pages: &[(u32, HostVirt)]) -> anyhow::Result<Vec<Why>> {
    let mut sorted: Vec<(u32, HostVirt, usize)> = pages.iter().zip(0..).map(|((pid, at), n)| (*pid, *at, n)).collect();
    sorted.sort_unstable();
    let each = sorted.len().div_ceil(MOST_ASKED).max(1);
    let asked: Vec<(u32, HostVirt)> = sorted.iter().step_by(each).map(|(pid, at, _)| (*pid, *at)).collect();
    let answer = merger.why(&asked)?;
    let mut reasons = vec![Why::Other; pages.len()];
    for (same, why) in sorted.chunks(each).zip(answer) {
        same.iter().for_each(|(.., n)| reasons[*n] = why);
    }
    Ok(reasons)
}

/// The mean of JSON values of the same structure, number by number.
pub fn mean(values: &[Value]) -> Value {
    match values.first() {
        Some(Value::Object(first)) => {
            let at = |key: &str| values.iter().map(|v| v.get(key).cloned().unwrap_or(Value::Null)).collect::<Vec<_>>();
            Value::Object(first.keys().map(|key| (key.clone(), mean(&at(key)))).collect::<Map<_, _>>())
        }
        Some(Value::Array(first)) => {
            let at = |n: usize| values.iter().map(|v| v.get(n).cloned().unwrap_or(Value::Null)).collect::<Vec<_>>();
            Value::Array((0..first.len()).map(|n| mean(&at(n))).collect())
        }
        _ => {
            let numbers: Option<Vec<f64>> = values.iter().map(Value::as_f64).collect();
            numbers
                .filter(|n| !n.is_empty())
                .map_or(Value::Null, |n| Value::from((n.iter().sum::<f64>() / n.len() as f64).round() as i64))
        }
    }
}

/// Net savings. Page tables tell how many pages are merged and how much the pool holds; pages of zeros and the merger's
/// tables are as the merger itself counts them.
pub fn savings(taken: &Taken, zero_pages: u64, tables_bytes: u64) -> Savings {
    Savings::of(taken.shared_places + taken.folded_places, zero_pages, taken.pool, tables_bytes, taken.vmas)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn mean_keeps_the_shape() {
        let values = [json!({"a": 1, "b": {"c": [2, 4]}}), json!({"a": 4, "b": {"c": [4, 8]}})];
        assert_eq!(mean(&values), json!({"a": 3, "b": {"c": [3, 6]}}));
        assert_eq!(mean(&[json!(null), json!(1)]), Value::Null);
    }
}
