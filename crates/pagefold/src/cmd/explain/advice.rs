//! What lies idle in a guest, and what to do about what it costs.

use census::{CostPart, GuestFindings};
use guest::{Guest, GuestKind};
use page::{GuestPageKind, pages_to_bytes};
use serde::Serialize;

/// Devices that guests on a server rarely need; Agarwal, "A Study of Virtualization Overheads" (2015), table 6.5, has what
/// they cost.
const DISPENSABLE: [&str; 10] = ["VGA", "vga", "qxl", "virtio-gpu", "cirrus", "hda", "AC97", "xhci", "ehci", "usb"];

/// What a guest could give back.
#[derive(Clone, Debug, Serialize)]
pub struct Bloat {
    /// Backed, on an inactive list of the guest's, not referenced, and of a content that nobody else holds.
    pub inactive_unique_pages: u64,
    /// Those of them that would be free on the host.
    pub inactive_unique_incremental_pages: u64,
    /// Free inside, and backed by the host all the same.
    pub free_backed_pages: u64,
    /// The guest has a balloon; `null` where its VMM does not tell.
    pub balloon: Option<bool>,
    /// The balloon reports free pages.
    pub free_page_reporting: Option<bool>,
}

impl Bloat {
    /// Of a guest.
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

    /// A sentence or two.
    pub fn in_words(&self) -> String {
        let bytes = |pages| report::bytes(pages_to_bytes(pages));
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

/// Something to do.
#[derive(Clone, Debug, Serialize)]
pub struct Advice {
    /// `fold`, `free_page_reporting`, `balloon`, `drop_devices`, `share_root` or `template`.
    pub action: &'static str,
    /// The most that it would give back.
    pub bytes: u64,
    /// How.
    pub how: String,
}

impl Advice {
    /// As a line.
    pub fn in_words(&self) -> String {
        format!("up to {}: {}", report::bytes(self.bytes), self.how)
    }
}

/// What can be done, the largest yield first. Yields overlap: a page that is given back need not be folded.
pub fn advise(guest: &Guest, found: &GuestFindings, bloat: &Bloat) -> Vec<Advice> {
    let sum = |of: fn(&census::KindFindings) -> u64, wanted: &dyn Fn(GuestPageKind) -> bool| -> u64 {
        found.kinds.iter().filter(|k| wanted(k.kind)).map(of).sum()
    };
    let all = |_: GuestPageKind| true;
    let twins = sum(|k| k.duplicates.within + k.duplicates.group, &all);
    let cached = |kind: GuestPageKind| CostPart::of(kind) == CostPart::GuestPageCache;
    let common_files = sum(|k| k.duplicates.group + k.duplicates.host, &cached);
    let mut list = vec![
        advice(
            "fold",
            twins,
            match found.folded_pages {
                0 => format!("fold it: start it with 'pagefold run --group {} -- ...'", guest.group),
                _ => "more of it can be folded: 'pagefold group show' says what keeps it".to_owned(),
            },
        ),
        advice(
            "share_root",
            common_files,
            "let guests map one root file system (virtiofs with DAX, or a shared \
            read-only pmem device) in place of caching a copy each"
                .to_owned(),
        ),
        advice(
            "template",
            sum(|k| k.duplicates.group, &all),
            "start guests like it from one template: what they do not \
            write stays one frame"
                .to_owned(),
        ),
        advice(
            "balloon",
            bloat.inactive_unique_incremental_pages,
            match bloat.balloon {
                Some(true) => "inflate its balloon: it would give up what it uses least".to_owned(),
                _ => {
                    "give it a balloon (-device virtio-balloon-pci) and inflate it: it would give up what it uses least"
                        .to_owned()
                }
            },
        ),
    ];
    list.push(advice(
        "free_page_reporting",
        bloat.free_backed_pages,
        match bloat.free_page_reporting {
            Some(true) => {
                "free pages are reported already, in blocks of 2 MiB and more: what is left lies in smaller ones, \
            or will be reported within seconds"
                    .to_owned()
            }
            _ => "have it report free pages: -device virtio-balloon-pci,free-page-reporting=on".to_owned(),
        },
    ));
    let devices: Vec<&str> = guest
        .facts
        .qemu
        .iter()
        .flat_map(|q| &q.devices)
        .map(String::as_str)
        .filter(|device| DISPENSABLE.iter().any(|part| device.contains(part)))
        .collect();
    if guest.kind == GuestKind::Qemu && !devices.is_empty() {
        let vmm = found.cost().iter().find(|c| c.part == CostPart::Vmm).map_or(0, |c| c.incremental_pages);
        let how =
            format!("a part of what QEMU itself takes: drop devices that it may not need: {}", devices.join(", "));
        list.push(advice("drop_devices", vmm, how));
    }
    list.retain(|a| a.bytes > 0);
    list.sort_by_key(|a| std::cmp::Reverse(a.bytes));
    list
}

fn advice(action: &'static str, pages: u64, how: String) -> Advice {
    Advice { action, bytes: pages_to_bytes(pages), how }
}
