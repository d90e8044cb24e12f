//! A row of the table of sketches: a guest, or a host itself, at one epoch.

use serde::Serialize;

/// Version of the table. A reader refuses rows of a later one.
pub const VERSION: i32 = 1;
/// Greatest length of a name in a row, in bytes.
pub const MOST_TEXT_BYTES: usize = 1024;
/// Most pages of a guest: 16 TiB. Sums over a million guests stay below 2^64, in bytes too.
pub const MOST_PAGES: u64 = 1 << 32;
/// Greatest size of a host or a guest, in bytes: 1 PiB.
pub const MOST_BYTES: u64 = 1 << 50;

/// A guest at one epoch, or, without a guest, its host.
///
/// Pages are those that folding reaches: RAM of VMs, anonymous memory of containers and processes. Of a host, they are 0.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Row {
    /// When the pages were read, in seconds since 1970.
    pub epoch_s: u64,
    /// Name of the host.
    pub host: String,
    /// Group of the guest.
    pub group: Option<String>,
    /// Id of the guest, unique on its host.
    pub guest: Option<String>,
    /// The template that it was cloned from.
    pub template: Option<String>,
    /// Public name of the key of its sketch: sketches with the same one can be compared.
    pub key: Option<String>,
    /// RAM that a VM was given, where that is known; RAM of the host.
    pub memory_bytes: Option<u64>,
    /// Size that the guest keeps, whatever happens; `None`: all of it.
    pub guaranteed_bytes: Option<u64>,
    /// Pages that it holds, folded ones included.
    pub resident_pages: u64,
    /// Of those, pages of zeros.
    pub zero_pages: u64,
    /// Different contents of the others.
    pub distinct_pages: u64,
    /// Pages that are folded.
    pub folded_pages: u64,
    /// Pages that only this guest maps, and that folding leaves alone. Of a host, pages in use by others than its guests.
    pub other_pages: u64,
    /// Theta sketch of the contents.
    #[serde(skip)]
    pub sketch: Option<Vec<u8>>,
}

impl Row {
    /// This row, cut to the bounds that readers of a table check. A guest names itself, and may claim any size: without
    /// the cut, readers would refuse the whole table.
    pub fn bounded(mut self) -> Self {
        for text in [&mut self.group, &mut self.guest, &mut self.template].into_iter().flatten() {
            text.truncate(text.floor_char_boundary(MOST_TEXT_BYTES));
        }
        for bytes in [&mut self.memory_bytes, &mut self.guaranteed_bytes].into_iter().flatten() {
            *bytes = (*bytes).min(MOST_BYTES);
        }
        let counts = [
            &mut self.resident_pages,
            &mut self.zero_pages,
            &mut self.distinct_pages,
            &mut self.folded_pages,
            &mut self.other_pages,
        ];
        counts.into_iter().for_each(|pages| *pages = (*pages).min(MOST_PAGES));
        self
    }
}
