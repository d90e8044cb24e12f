//! Idle memory of a guest, and advice on lowering its cost.

use super::devices::is_dispensable;
use census::{CostPart, GuestFindings};
use guest::{Guest, GuestKind};
use page::{GuestPageKind, pages_to_bytes};
use serde::Serialize;

/// Memory that a guest could give back.
#[derive(Clone, Debug, Serialize)]
pub struct Bloat {
    /// Pages that the host backs, on an inactive list of the guest's, not referenced, and of a content that nobody
    /// else holds.
    pub inactive_unique_pages: u64,
    /// Pages of `inactive_unique_pages` that would become free on the host.
    pub inactive_unique_incremental_pages: u64,
    /// Pages that are free inside the guest, but backed by the host.
    pub free_backed_pages: u64,
    /// Whether the guest has a balloon; `null` where its VMM does not tell.
    pub balloon: Option<bool>,
    /// Whether the balloon reports free pages.
    pub free_page_reporting: Option<bool>,
}

impl Bloat {
    /// The idle memory of a guest.
    pub fn of(guest: &Guest, found: &GuestFindings) -> Self {
        let free = found.kinds.iter().find(|k| k.kind == GuestPageKind::Free);
        Self {
            inactive_unique_pages: found.idle_pages.inactive_unique,
            inactive_unique_incremental_pages: found.idle_pages.incremental,
            free_backed_pages: free.map_or(0, |k| k.backed_pages),
            balloon: guest.facts.qemu.as_ref().map(|q| q.balloon),
            free_page_reporting: guest.facts.qemu.as_ref().map(|q| q.free_page_reporting),
        }
    }

    /// The idle memory in one or two sentences.
    pub fn in_words(&self) -> String {
        let bytes = |pages| cli::bytes(pages_to_bytes(pages));
        let device = match (self.balloon, self.free_page_reporting) {
            (_, Some(true)) => "It reports free pages through its balloon.",
            (Some(true), _) => "It has a balloon, which does not report free pages.",
            (Some(false), _) => "It has no balloon.",
            _ => "Whether it has a balloon is not known.",
        };
        format!(
            "{} are free inside and backed all the same; {} are inactive, not referenced, and held by nobody else. {device}",
            bytes(self.free_backed_pages),
            bytes(self.inactive_unique_pages),
        )
    }
}

/// An advised action.
#[derive(Clone, Debug, Serialize)]
pub struct Advice {
    /// `fold`, `free_page_reporting`, `balloon`, `drop_devices`, `share_root` or `template`.
    pub action: &'static str,
    /// Upper bound of the memory that it would give back, in bytes.
    pub bytes: u64,
    /// Instructions.
    pub how: String,
}

impl Advice {
    /// The advice as one line.
    pub fn in_words(&self) -> String {
        format!("up to {}: {}", cli::bytes(self.bytes), self.how)
    }
}

/// Possible actions, the largest yield first. No yield exceeds the frames that only this guest maps. Yields overlap: a
/// page that is given back need not be folded. `fold_in` is the group that the guest is folded in, or could be.
pub fn advise(guest: &Guest, found: &GuestFindings, bloat: &Bloat, fold_in: &str) -> Vec<Advice> {
    let mut list = vec![fold(guest, found, fold_in), share_root(found), template(found), balloon(bloat)];
    list.push(report_free_pages(bloat, found));
    list.extend(drop_devices(guest, found));
    list.retain(|a| a.bytes > 0);
    list.sort_by_key(|a| std::cmp::Reverse(a.bytes));
    list
}

fn fold(guest: &Guest, found: &GuestFindings, group: &str) -> Advice {
    let duplicates =
        found.kinds.iter().map(|k| (k.duplicates.within + k.duplicates.group).min(k.incremental_pages)).sum();
    let how = match (found.folded_pages, guest.pids.first()) {
        (0, Some(pid)) => format!(
            "fold it: 'pagefold attach {pid} --group {group}' while it runs, or start it with 'pagefold run --group {group} -- ...', \
             its command line behind the --"
        ),
        _ => format!(
            "it is folded, and holds more that could be: 'pagefold group show {group}' has its state and limits"
        ),
    };
    advice("fold", duplicates, how)
}

fn share_root(found: &GuestFindings) -> Advice {
    let cached = found.kinds.iter().filter(|k| CostPart::of(k.kind) == CostPart::GuestPageCache);
    let how = "let guests map one root file system (virtiofs with DAX, or a shared \
        read-only pmem device) in place of caching a copy each";
    let pages = cached.map(|k| (k.duplicates.group + k.duplicates.host.unwrap_or(0)).min(k.incremental_pages));
    advice("share_root", pages.sum(), how.to_owned())
}

fn template(found: &GuestFindings) -> Advice {
    let how = "start guests like it from one template: what they do not write stays one frame";
    let pages = found.kinds.iter().map(|k| k.duplicates.group.min(k.incremental_pages));
    advice("template", pages.sum(), how.to_owned())
}

fn balloon(bloat: &Bloat) -> Advice {
    let how = match bloat.balloon {
        Some(true) => "inflate its balloon: it would give up what it uses least",
        _ => "give it a balloon (-device virtio-balloon-pci) and inflate it: it would give up what it uses least",
    };
    advice("balloon", bloat.inactive_unique_incremental_pages, how.to_owned())
}

fn report_free_pages(bloat: &Bloat, found: &GuestFindings) -> Advice {
    let free = found.kinds.iter().filter(|k| k.kind == GuestPageKind::Free);
    let pages = free.map(|k| k.backed_pages.min(k.incremental_pages)).sum();
    let how = match bloat.free_page_reporting {
        Some(true) => {
            "free pages are reported already, in blocks of 2 MiB and more: what is left lies in smaller ones, \
            or will be reported within seconds"
        }
        _ => "have it report free pages: -device virtio-balloon-pci,free-page-reporting=on",
    };
    advice("free_page_reporting", pages, how.to_owned())
}

fn drop_devices(guest: &Guest, found: &GuestFindings) -> Option<Advice> {
    let devices = guest.facts.qemu.iter().flat_map(|q| &q.devices).map(String::as_str);
    let devices: Vec<&str> = devices.filter(|device| is_dispensable(device)).collect();
    if guest.kind != GuestKind::Qemu || devices.is_empty() {
        return None;
    }
    let vmm = found.cost().iter().find(|c| c.part == CostPart::Vmm).map_or(0, |c| c.incremental_pages);
    let how = format!("a part of what QEMU itself takes: drop devices that it may not need: {}", devices.join(", "));
    Some(advice("drop_devices", vmm, how))
}

fn advice(action: &'static str, pages: u64, how: String) -> Advice {
    Advice { action, bytes: pages_to_bytes(pages), how }
}
