//! Findings in sentences, for all formats that people read.

use census::{Change, CostPart, Findings};
use cli::size::{bytes, count, percent};
use page::{GuestPageKind, Region, pages_to_bytes};

/// Explanation for a census that could not see page frames.
pub const FRAMES_INFERRED: &str = "The kernel hid the frame numbers, so frames are told apart by file and address: \
    frames shared by fork or merged by KSM count apart. Root sees exact figures.";

/// A sentence on the price of isolation.
pub fn price_of_isolation(findings: &Findings) -> String {
    let all = findings.all_saved_pages;
    let price = findings.isolation_price_pages;
    if !findings.partial.is_empty() && findings.guests.iter().all(|g| g.resident_pages == 0) {
        return "Nothing could be read of these guests, so nothing can be said about them.".into();
    }
    if all == 0 {
        return "No guest holds anything that it or another guest holds too: there is nothing to merge.".into();
    }
    let kept = bytes(pages_to_bytes(all.saturating_sub(price)));
    let all_bytes = bytes(pages_to_bytes(all));
    if price == 0 {
        return format!(
            "Keeping the groups apart costs nothing: all of the {all_bytes} can be saved without crossing groups."
        );
    }
    format!(
        "The price of isolation is {}: merging everybody with everybody would save {all_bytes}, keeping the \
         groups apart still saves {kept} ({}).",
        bytes(pages_to_bytes(price)),
        percent(all.saturating_sub(price), all),
    )
}

/// A sentence on frames that are shared already.
pub fn already_shared(findings: &Findings) -> String {
    let a = &findings.already_shared;
    let saved = bytes(pages_to_bytes(a.saved_pages));
    let mut text =
        format!("Shared already: {} mapped by several guests, which saves {saved}", plural(a.frames, "frame"));
    if a.ksm_frames > 0 {
        let saved = bytes(pages_to_bytes(a.ksm_saved_pages));
        text += &format!("; {} merged by KSM, which saves {saved}", plural(a.ksm_frames, "frame"));
    }
    text + "."
}

/// A sentence on the lengths of runs; `None` if no page matches a page of another guest.
pub fn run_lengths(findings: &Findings) -> Option<String> {
    let r = &findings.runs;
    let sampled =
        if r.one_stretch_in > 1 { format!(" (in one of {} stretches)", r.one_stretch_in) } else { String::new() };
    (r.runs > 0).then(|| {
        format!(
            "Matches between guests{sampled}: {} in {}, mean {:.1}, median {}; {:.0}% of them in runs of 8 or more.",
            plural(r.matched_pages, "page"),
            plural(r.runs, "run"),
            r.mean,
            r.median,
            r.share_in_runs_of_8 * 100.0,
        )
    })
}

/// A sentence on the change since the previous round.
pub fn change(c: &Change) -> String {
    let before = c.unchanged_pages + c.changed_pages + c.gone_pages;
    format!(
        "Round {}, {:.1} s after the last: {} of the pages unchanged, {} changed, {} gone; {} new. {} of {} \
         duplicates were that in the last round too; they have been for {:.1} s on average.",
        c.round,
        c.seconds,
        percent(c.unchanged_pages, before),
        percent(c.changed_pages, before),
        percent(c.gone_pages, before),
        count(c.new_pages),
        count(c.still_duplicate_pages),
        count(c.duplicate_pages),
        c.mean_duplicate_seconds,
    )
}

/// The name of a region for people.
pub const fn region(region: Region) -> &'static str {
    match region {
        Region::GuestRam => "guest RAM",
        Region::Heap => "heap",
        Region::Stack => "stack",
        Region::TranslationCache => "translated code",
        Region::Files => "files",
        Region::Shared => "shared memory",
        Region::Other => "other",
        Region::PageCache => "page cache",
    }
}

pub use cli::size::plural;

/// The name of a kind of guest memory.
pub const fn guest_kind(kind: GuestPageKind) -> &'static str {
    match kind {
        GuestPageKind::KernelText => "kernel text",
        GuestPageKind::KernelRodata => "kernel, read-only data",
        GuestPageKind::KernelData => "kernel, data",
        GuestPageKind::PageTables => "page tables",
        GuestPageKind::Slab => "slab",
        GuestPageKind::KernelStack => "kernel stacks",
        GuestPageKind::PageCache => "page cache",
        GuestPageKind::Shmem => "tmpfs and shared memory",
        GuestPageKind::Anonymous => "processes, anonymous",
        GuestPageKind::Free => "free inside",
        GuestPageKind::Balloon => "in the balloon",
        GuestPageKind::Reserved => "reserved",
        GuestPageKind::Unknown => "unknown",
    }
}

/// The name of a part of a VM's cost, for the heading of a column.
pub const fn cost_part(part: CostPart) -> &'static str {
    match part {
        CostPart::Vmm => "VMM",
        CostPart::GuestKernel => "kernel",
        CostPart::GuestPageCache => "files and tmpfs",
        CostPart::GuestAnonymous => "processes",
        CostPart::GuestUnused => "unused",
        CostPart::GuestUnknown => "unknown",
    }
}
