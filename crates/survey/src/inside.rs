//! VMs from inside: the kernel that runs in one, and its use of each frame. Joins the findings of `insight` in guest
//! memory with the positions of a census.

use census::KindFindings;
use guest::{Guest, GuestRam, Plan, Qmp, open_ram};
use insight::{File, Frames, GuestMemory, Kernel};
use page::{FrameUse, GuestPageKind};
use serde::Serialize;

/// The kernel of a guest.
#[derive(Clone, Debug, Serialize)]
pub struct KernelFacts {
    /// Release (`uname -r`).
    pub release: String,
    /// Offset by which address randomisation moved it.
    pub kaslr_offset: Option<u64>,
    /// Levels of its page tables.
    pub paging_levels: u32,
}

/// The inside of one VM.
pub struct Inside {
    /// Kernel of the guest, if one was found.
    pub kernel: Option<KernelFacts>,
    /// The reason why no kernel was found.
    pub problem: Option<String>,
    /// Memory of the guest, and where it lies in the VMM.
    pub ram: GuestRam,
    /// Use of each frame of the guest's memory.
    pub frames: Frames,
    /// The files of [`Frames::files`], in the same order; empty if they were not asked for.
    pub files: Vec<Option<File>>,
}

impl Inside {
    /// Looks into a VM. `None` if the guest is no VM, or if its memory cannot be found. `qmp` is a conversation with
    /// it, if the user named its socket.
    ///
    /// # Errors
    /// Its process has gone, or may not be read.
    pub fn of(guest: &Guest, qmp: Option<Qmp>, with_files: bool) -> host::Result<Option<Self>> {
        if !guest.kind.is_vm() {
            return Ok(None);
        }
        let mut last = None;
        for ram in open_ram(guest, qmp)? {
            let found = match Kernel::find(&ram) {
                Ok(kernel) => {
                    let frames = kernel.classify();
                    let files = frames.files.iter().filter(|_| with_files).map(|file| kernel.file(*file)).collect();
                    let facts = KernelFacts {
                        release: kernel.release().to_owned(),
                        kaslr_offset: kernel.kaslr_offset(),
                        paging_levels: kernel.paging_levels(),
                    };
                    Ok((facts, frames, files))
                }
                Err(problem) => Err(problem.to_string()),
            };
            match found {
                Ok((facts, frames, files)) => {
                    return Ok(Some(Self { kernel: Some(facts), problem: None, ram, frames, files }));
                }
                Err(problem) => {
                    // If no possible layout of guest memory shows a kernel, the problem with the likeliest layout is
                    // reported: the first.
                    let frames = Frames::unknown(ram.ranges());
                    last.get_or_insert(Self { kernel: None, problem: Some(problem), ram, frames, files: Vec::new() });
                }
            }
        }
        Ok(last)
    }

    /// Fills in the number of frames of each kind, including frames that the host does not back, which a census cannot
    /// see. Kinds of which the guest has no frames are left out.
    pub fn complete(&self, kinds: &mut Vec<KindFindings>, with_host: bool) {
        if kinds.is_empty() {
            *kinds = GuestPageKind::ALL.map(|kind| KindFindings::empty(kind, with_host)).into();
        }
        for (kind, pages) in kinds.iter_mut().zip(insight::count(&self.frames.uses)) {
            kind.pages = pages;
        }
        kinds.retain(|kind| kind.pages + kind.backed_pages > 0);
    }

    /// The file of which the frame with index `place` holds a page; `None` if it holds none, or if files were not asked
    /// for.
    pub fn file_at(&self, place: usize) -> Option<&File> {
        let number = self.frames.file(place).checked_sub(1)?;
        self.files.get(number as usize)?.as_ref()
    }
}

/// The use of each page of a plan inside its guest, by guest and position.
pub fn uses(plan: &Plan, inside: &[Option<Inside>]) -> Vec<Vec<Option<FrameUse>>> {
    if inside.iter().all(Option::is_none) {
        return Vec::new();
    }
    let positions = plan.positions();
    let mut uses: Vec<Vec<Option<FrameUse>>> = vec![Vec::new(); positions.len()];
    for (n, range) in positions.iter().enumerate().filter(|(n, _)| matches!(inside.get(*n), Some(Some(_)))) {
        uses[n] = vec![None; (range.end - range.start) as usize];
    }
    for place in plan.places() {
        // Guests' positions ascend; the positions after the last guest's belong to the host.
        let n = positions.partition_point(|range| range.end <= place.position);
        let Some(Some(inside)) = inside.get(n) else { continue };
        if place.pid != inside.ram.pid || n >= positions.len() {
            continue;
        }
        let first = (place.position - positions[n].start) as usize;
        for (page, slot) in uses[n].iter_mut().skip(first).take(place.pages as usize).enumerate() {
            let at = inside.ram.map.guest_of(place.first.add_pages(page as u64));
            *slot = at.and_then(|at| inside.frames.index.of(at.frame())).map(|at| inside.frames.uses[at]);
        }
    }
    uses
}
