//! The VMCOREINFO note, in which Linux describes itself at boot so that crash-dump tools can read its memory.
//!
//! It is an ELF note with the name `VMCOREINFO`, at the beginning of a page frame that holds nothing else. Its text has
//! lines such as
//!
//! ```text
//!   SIZE(page)=64
//!   OFFSET(page.flags)=0
//!   SYMBOL(swapper_pg_dir)=ffffffff97c10000
//!   NUMBER(PG_lru)=4
//!   KERNELOFFSET=34200000
//! ```
//!
//! See `Documentation/admin-guide/kdump/vmcoreinfo.rst` and `kernel/vmcore_info.c` of the Linux source. Any process
//! of the guest can write a page that looks like a note, so [`crate::kernel`] checks a note's values before it uses
//! them.

use std::collections::HashMap;

/// Longest text that is parsed, in bytes: the kernel's note fits into one page.
const MOST_BYTES: usize = 4096;
/// Bytes of the ELF note's header, in front of its name.
const HEADER_BYTES: usize = 12;
const NAME: &[u8; 12] = b"VMCOREINFO\0\0";
const NAME_LENGTH: u32 = 11;

/// The lines of a note.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Note {
    /// `uname -r` of the kernel.
    pub release: String,
    values: HashMap<String, String>,
}

impl Note {
    /// Whether a frame with this beginning may hold a note.
    pub fn may_begin(head: &[u8]) -> bool {
        head.len() >= 36
            && head[0..4] == NAME_LENGTH.to_le_bytes()
            && head[8..12] == [0; 4]
            && head[12..24] == *NAME
            && head[24..].starts_with(b"OSRELEASE=")
    }

    /// Parses the note at the beginning of a frame. `None` if there is none, or it is not text.
    pub fn parse(frame: &[u8]) -> Option<Self> {
        if !Self::may_begin(frame) {
            return None;
        }
        let length = u32::from_le_bytes(frame[4..8].try_into().ok()?) as usize;
        let text = frame.get(HEADER_BYTES + NAME.len()..)?;
        let text = &text[..length.min(text.len()).min(MOST_BYTES)];
        let text = std::str::from_utf8(text.split(|byte| *byte == 0).next()?).ok()?;
        let pairs = text.lines().filter_map(|line| line.split_once('='));
        let values: HashMap<String, String> = pairs.map(|(key, value)| (key.to_owned(), value.to_owned())).collect();
        let release = values.get("OSRELEASE")?.clone();
        let harmless = |c: char| c.is_ascii_alphanumeric() || "+-._~".contains(c);
        (!release.is_empty() && release.len() < 65 && release.chars().all(harmless)).then_some(Self { release, values })
    }

    /// The value of `SYMBOL(name)`: an address.
    pub fn symbol(&self, name: &str) -> Option<u64> {
        u64::from_str_radix(self.values.get(&format!("SYMBOL({name})"))?, 16).ok()
    }

    /// The value of `OFFSET(structure.member)`, in bytes.
    pub fn offset(&self, member: &str) -> Option<u64> {
        self.values.get(&format!("OFFSET({member})"))?.parse().ok()
    }

    /// The value of `SIZE(structure)`, in bytes.
    pub fn size(&self, name: &str) -> Option<u64> {
        self.values.get(&format!("SIZE({name})"))?.parse().ok()
    }

    /// The value of `LENGTH(array)`: its number of elements.
    pub fn length(&self, name: &str) -> Option<u64> {
        self.values.get(&format!("LENGTH({name})"))?.parse().ok()
    }

    /// The value of `NUMBER(name)`, which is decimal and signed, or hexadecimal.
    pub fn number(&self, name: &str) -> Option<i64> {
        let text = self.values.get(&format!("NUMBER({name})"))?;
        match text.strip_prefix("0x") {
            Some(digits) => u64::from_str_radix(digits, 16).ok().map(|n| n as i64),
            None => text.parse().ok(),
        }
    }

    /// The value of `KERNELOFFSET`: the distance by which address randomisation moved the kernel.
    pub fn kaslr_offset(&self) -> Option<u64> {
        u64::from_str_radix(self.values.get("KERNELOFFSET")?, 16).ok()
    }

    /// Major and minor version of the kernel.
    pub fn version(&self) -> (u32, u32) {
        let mut numbers = self.release.split(|c: char| !c.is_ascii_digit()).map(|n| n.parse().unwrap_or(0));
        (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn frame(text: &str) -> Vec<u8> {
        let mut frame = NAME_LENGTH.to_le_bytes().to_vec();
        frame.extend((text.len() as u32).to_le_bytes());
        frame.extend([0; 4]);
        frame.extend(NAME);
        frame.extend(text.as_bytes());
        frame.resize(4096, 0);
        frame
    }

    const TEXT: &str = "OSRELEASE=6.1.0-56-cloud-amd64\nSIZE(page)=64\nOFFSET(page.flags)=0\nLENGTH(mem_section)=2048\n\
        SYMBOL(swapper_pg_dir)=ffffffff97c10000\nNUMBER(phys_base)=-811597824\nNUMBER(VMALLOC_START)=0xffffd017c0000000\n\
        KERNELOFFSET=34200000\n";

    #[test]
    fn lines_of_every_kind_are_parsed() {
        let note = Note::parse(&frame(TEXT)).unwrap();
        assert_eq!((note.release.as_str(), note.version()), ("6.1.0-56-cloud-amd64", (6, 1)));
        assert_eq!(
            (note.size("page"), note.offset("page.flags"), note.length("mem_section")),
            (Some(64), Some(0), Some(2048))
        );
        assert_eq!(note.symbol("swapper_pg_dir"), Some(0xffff_ffff_97c1_0000));
        assert_eq!(note.number("phys_base"), Some(-811_597_824));
        assert_eq!(note.number("VMALLOC_START"), Some(0xffff_d017_c000_0000_u64 as i64));
        assert_eq!(note.kaslr_offset(), Some(0x3420_0000));
        assert_eq!(note.symbol("nothing"), None);
    }

    #[test]
    fn malformed_note_is_none() {
        let good = frame(TEXT);
        for (at, byte) in [(0, 12), (8, 1), (12, b'X'), (24, b'X'), (34, b'\x1b'), (40, 0xff)] {
            let mut bad = good.clone();
            bad[at] = byte;
            assert_eq!(Note::parse(&bad), None, "byte {at}");
        }
        assert_eq!(Note::parse(&[]), None);
        assert_eq!(Note::parse(&good[..30]), None);
        let mut long = good.clone();
        long[4..8].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(Note::parse(&long).is_some(), "the text ends where its frame does");
    }
}
