//! The agent's object file: an ELF program that relocates itself, so that it runs wherever it is put.

use anyhow::Context;
use api::hand;
use api::place::Place;
use host::ForeignFile;
use object::LittleEndian;
use object::elf::{EM_X86_64, ET_DYN, FileHeader64, PF_R, PF_W, PF_X, PT_LOAD, PT_TLS, ProgramHeader64};
use object::read::elf::{FileHeader, ProgramHeader};
use page::PAGE_BYTES;
use rustix::fd::{AsFd, OwnedFd};

/// Most thread-local data, with its alignment, for which musl has room in the object: 120 bytes. For more, musl maps
/// memory. The kernel may merge that mapping with one of the program's, so that nobody can tell them apart when the
/// agent leaves.
const LOCAL_BYTES: u64 = 120;

/// A loadable part of the object (`PT_LOAD`), with its addresses rounded to whole pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Where it begins, in bytes from the object's first byte on.
    pub offset: u64,
    /// Its size in memory, in bytes.
    pub bytes: u64,
    /// `PROT_` bits.
    pub access: i32,
}

/// The agent's object, ready to be mapped into processes.
#[derive(Debug)]
pub struct Object {
    /// A sealed file of the object's bytes as they lie in memory, from its first byte on.
    pub file: OwnedFd,
    /// Number of these bytes.
    pub bytes: u64,
    /// Its parts.
    pub segments: Vec<Segment>,
    /// Where its code begins.
    pub entry: u64,
    /// Where its program headers lie, and their number.
    pub headers: (u64, u64),
}

/// A parsed object file.
struct Parsed {
    /// Its bytes as they lie in memory, from its first byte on.
    image: Vec<u8>,
    segments: Vec<Segment>,
    entry: u64,
    headers: (u64, u64),
}

impl Parsed {
    /// `None` if it is no object for this processor, or has too much thread-local data.
    fn parse(file: &[u8]) -> Option<Self> {
        let header = FileHeader64::<LittleEndian>::parse(file).ok()?;
        let endian = header.endian().ok()?;
        if (header.e_type(endian), header.e_machine(endian)) != (ET_DYN, EM_X86_64) {
            return None;
        }
        let headers = header.program_headers(endian, file).ok()?;
        let local_bytes = |part: &ProgramHeader64<_>| part.p_memsz(endian).checked_add(part.p_align(endian));
        let mut local = headers.iter().filter(|part| part.p_type(endian) == PT_TLS);
        if local.any(|part| local_bytes(part).is_none_or(|bytes| bytes > LOCAL_BYTES)) {
            return None;
        }
        let (mut image, mut segments) = (Vec::new(), Vec::new());
        for part in headers.iter().filter(|part| part.p_type(endian) == PT_LOAD) {
            let (filed, whole) = (part.data(endian, file).ok()?, part.p_memsz(endian));
            let to = part.p_vaddr(endian);
            let end = usize::try_from(to.checked_add(whole)?).ok()?.checked_next_multiple_of(PAGE_BYTES)?;
            // Large enough for any agent, and small enough to be allocated.
            if end > 1 << 30 || filed.len() as u64 > whole {
                return None;
            }
            image.resize(end.max(image.len()), 0);
            let place = usize::try_from(to).ok()?;
            image.get_mut(place..place.checked_add(filed.len())?)?.copy_from_slice(filed);
            let start = to / PAGE_BYTES as u64 * PAGE_BYTES as u64;
            let bit = |flag, bit| if part.p_flags(endian) & flag == flag { bit } else { 0 };
            let access = bit(PF_R, libc::PROT_READ) | bit(PF_W, libc::PROT_WRITE) | bit(PF_X, libc::PROT_EXEC);
            segments.push(Segment { offset: start, bytes: end as u64 - start, access });
        }
        let headers = (header.e_phoff(endian), headers.len() as u64);
        (!segments.is_empty()).then_some(Self { image, segments, entry: header.e_entry(endian), headers })
    }
}

impl Object {
    /// Parses an object file. Returns it with a sealed file of its bytes as they lie in memory: the one that the
    /// service at `place` keeps, or a new one.
    ///
    /// # Errors
    /// The file is no object for this processor, or has too much thread-local data. Or memory or descriptors are short.
    pub fn read(file: &[u8], place: &Place) -> anyhow::Result<Self> {
        let Parsed { image, segments, entry, headers } = Parsed::parse(file).context("it is no such object")?;
        let kept = hand::kept_object(place).ok().flatten();
        let is_it = |kept: &ForeignFile| act::is_sealed_object(kept, &image).unwrap_or(false);
        let make = || {
            let file = act::seal_object(&image).context("cannot make a memory file of it")?;
            // A service of root's keeps the file for further processes. Otherwise each process has a copy.
            let _ = hand::keep_object(place, file.as_fd());
            anyhow::Ok(file)
        };
        let file = kept.filter(is_it).map_or_else(make, |kept| Ok(kept.into_inner()))?;
        Ok(Self { file, bytes: image.len() as u64, segments, entry, headers })
    }

    /// The initial stack of the object, which is to end at address `top`, when the object lies at `base`. It has
    /// arguments, environment and auxiliary vector as the kernel gives them to a new program. `clock` is the address of
    /// the vdso. Returns the bytes; the stack pointer is to point to the first of them.
    pub fn stack(&self, base: u64, top: u64, environment: &[String], clock: u64, random: [u8; 16]) -> Vec<u8> {
        let mut texts = Vec::from(random);
        let mut places = Vec::new();
        for text in std::iter::once("pagefold").chain(environment.iter().map(String::as_str)) {
            places.push(texts.len() as u64);
            texts.extend(text.bytes().chain([0]));
        }
        let facts = [
            (linux_raw_sys::auxvec::AT_PHDR, base + self.headers.0),
            (linux_raw_sys::auxvec::AT_PHENT, size_of::<ProgramHeader64<LittleEndian>>() as u64),
            (linux_raw_sys::auxvec::AT_PHNUM, self.headers.1),
            (linux_raw_sys::auxvec::AT_PAGESZ, PAGE_BYTES as u64),
            (linux_raw_sys::auxvec::AT_ENTRY, base + self.entry),
            (linux_raw_sys::auxvec::AT_SYSINFO_EHDR, clock),
        ];
        let words = 1 + places.len() + 2 + 2 * (facts.len() + 2);
        let bytes = (words * 8 + texts.len()).next_multiple_of(16);
        let texts_at = top - bytes as u64 + words as u64 * 8;
        let mut all = vec![1, texts_at + places[0], 0];
        all.extend(places[1..].iter().map(|place| texts_at + place));
        all.push(0);
        all.extend(facts.iter().flat_map(|(name, value)| [u64::from(*name), *value]));
        all.extend([u64::from(linux_raw_sys::auxvec::AT_RANDOM), texts_at, 0, 0]);
        debug_assert_eq!(all.len(), words);
        let mut stack: Vec<u8> = all.into_iter().flat_map(u64::to_le_bytes).collect();
        stack.extend(texts);
        stack.resize(bytes, 0);
        stack
    }
}
