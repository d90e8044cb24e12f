//! `/proc/kpageflags` and `/proc/kpagecount`: flags and number of mappings of each page frame. Root only.
//!
//! Both files hold one 64-bit word for each frame. A word costs about 50 ns in a long read and 250 ns in a read of its
//! own. Frames are therefore read in ascending order, and neighbours in one call.

use crate::{Error, Result};
use page::Pfn;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

/// Bits of `/proc/kpageflags` (`include/uapi/linux/kernel-page-flags.h`).
pub mod kpf {
    /// A page merged by KSM.
    pub const KSM: u64 = 1 << 21;
    /// The kernel's zero page, small or huge.
    pub const ZERO_PAGE: u64 = 1 << 24;
}

/// Two frames that are no further apart than this are read by one call: the words between them cost less than another
/// call.
const GAP_FRAMES: u64 = 5;
/// Most words in one read, one for each frame.
const MOST_FRAMES: u64 = 512;

/// `/proc/kpageflags` or `/proc/kpagecount`, open.
#[derive(Debug)]
pub struct FrameTable {
    file: File,
    path: PathBuf,
}

impl FrameTable {
    /// Opens `/proc/kpageflags`.
    ///
    /// # Errors
    /// Not root, or the kernel was built without `CONFIG_PROC_PAGE_MONITOR`.
    pub fn flags() -> Result<Self> {
        Self::open("/proc/kpageflags")
    }

    /// Opens `/proc/kpagecount`.
    ///
    /// # Errors
    /// As for [`FrameTable::flags`].
    pub fn counts() -> Result<Self> {
        Self::open("/proc/kpagecount")
    }

    fn open(path: &str) -> Result<Self> {
        let path = PathBuf::from(path);
        let file = File::open(&path).map_err(|e| Error::file("open", &path, e))?;
        Ok(Self { file, path })
    }

    /// Calls `each` with every frame of `sorted` and its word, in order. The word of a frame beyond the end of memory
    /// is 0.
    ///
    /// # Errors
    /// The kernel refused.
    pub fn read(&self, sorted: &[Pfn], mut each: impl FnMut(Pfn, u64)) -> Result<()> {
        let mut words = [0; MOST_FRAMES as usize * 8];
        let mut rest = sorted;
        while let Some(&first) = rest.first() {
            let taken = run_length(rest);
            let (run, behind) = rest.split_at(taken);
            let frames = run[taken - 1].0 - first.0 + 1;
            let bytes = &mut words[..usize::try_from(frames * 8).expect("a run is at most MOST_FRAMES")];
            let got = self.file.read_at(bytes, first.0 * 8).map_err(|e| Error::file("read", &self.path, e))?;
            bytes[got..].fill(0);
            let words = bytes.as_chunks::<8>().0;
            for &pfn in run {
                let at = usize::try_from(pfn.0 - first.0).expect("within the run");
                each(pfn, u64::from_ne_bytes(words[at]));
            }
            rest = behind;
        }
        Ok(())
    }
}

/// Number of frames at the beginning of `sorted` that are close enough to each other to be read in one call.
fn run_length(sorted: &[Pfn]) -> usize {
    let first = sorted[0].0;
    let mut taken = 1;
    while taken < sorted.len()
        && sorted[taken].0 - sorted[taken - 1].0 <= GAP_FRAMES
        && sorted[taken].0 - first < MOST_FRAMES
    {
        taken += 1;
    }
    taken
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Part of a transparent huge page.
    const THP: u64 = 1 << 22;

    #[test]
    fn near_frames_are_read_in_one_call_and_far_ones_apart() {
        let pfns = |v: &[u64]| v.iter().map(|&n| Pfn(n)).collect::<Vec<_>>();
        assert_eq!(run_length(&pfns(&[10])), 1);
        assert_eq!(run_length(&pfns(&[10, 11, 11, 16, 22])), 4);
        let long: Vec<_> = (0..2000).map(Pfn).collect();
        assert_eq!(run_length(&long), 512);
    }

    #[test]
    fn frame_reads_the_same_alone_and_in_a_run() {
        let Ok(table) = FrameTable::flags() else {
            eprintln!("skipped: /proc/kpageflags is for root");
            return;
        };
        let wanted: Vec<_> = [0, 1, 3, 900, 901, 70_000].map(Pfn).to_vec();
        let mut together = Vec::new();
        table.read(&wanted, |pfn, word| together.push((pfn, word & THP))).unwrap();
        assert_eq!(together.iter().map(|p| p.0).collect::<Vec<_>>(), wanted);
        for (pfn, word) in together {
            table.read(&[pfn], |_, alone| assert_eq!(alone & THP, word)).unwrap();
        }
    }
}
