//! A VM explained: the use that its kernel has for every page, the other holders of the same contents, the idle
//! memory, and advice.

mod advice;
mod devices;
mod things;

use crate::{Inside, KernelFacts};
use census::{Duplicates, GuestFindings};
use guest::Guest;
use page::GuestPageKind;
use serde::Serialize;

pub use advice::{Advice, Bloat};
pub use devices::{Device, DeviceRegion};
pub use things::{SHOWN, Thing, Things};

/// The explanation of a guest, in the shape that `--json` prints.
#[derive(Serialize)]
pub struct Explained {
    /// The guest's id.
    pub guest: String,
    /// The guest's kernel; absent if none was found in its memory.
    pub kernel: Option<KernelFacts>,
    /// The reason why no kernel was found.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// The guest's memory by kind inside the guest.
    pub kinds: Vec<Kind>,
    /// Contents held more than once, by name, the largest first.
    pub things: Vec<Thing>,
    /// Emulated devices that can be left out, or have memory that is known; `None` where no QEMU tells.
    pub devices: Option<Vec<Device>>,
    /// Idle memory.
    pub bloat: Bloat,
    /// Advice, in order of yield.
    pub advice: Vec<Advice>,
}

/// Memory of one kind.
#[derive(Serialize)]
pub struct Kind {
    /// The kind.
    pub kind: GuestPageKind,
    /// Pages of this kind in the guest.
    pub pages: u64,
    /// Pages of those that the host backs.
    pub backed_pages: u64,
    /// Pages of zeros among them.
    pub zero_pages: u64,
    /// Pages that are held once more, by the place of the other holder.
    pub duplicates: Duplicates,
    /// Folded pages among them.
    pub folded_pages: u64,
    /// Pages among them that the kernel's merger has merged.
    pub ksm_pages: u64,
}

/// Explains a guest from the findings of a census. `fold_in` is the group that the guest is folded in, or could be.
pub fn explain(
    guest: &Guest,
    inside: Option<&Inside>,
    found: &GuestFindings,
    things: Vec<Thing>,
    devices: Option<Vec<Device>>,
    fold_in: &str,
) -> Explained {
    let kinds = found.kinds.iter().map(|k| Kind {
        kind: k.kind,
        pages: k.pages,
        backed_pages: k.backed_pages,
        zero_pages: k.zero_pages,
        duplicates: k.duplicates,
        folded_pages: k.folded_pages,
        ksm_pages: k.ksm_pages,
    });
    let bloat = Bloat::of(guest, found);
    let no_memory = || "where its memory lies could not be found out: name its QMP socket with --qmp".to_owned();
    Explained {
        guest: guest.id.clone(),
        kernel: inside.and_then(|i| i.kernel.clone()),
        problem: inside.map_or_else(|| Some(no_memory()), |i| i.problem.clone()),
        kinds: kinds.collect(),
        things,
        devices,
        advice: advice::advise(guest, found, &bloat, fold_in),
        bloat,
    }
}
