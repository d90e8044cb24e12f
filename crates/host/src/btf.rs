//! Where the running kernel keeps the fields of its structures, by its own type information (BTF).
//!
//! ```text
//!   /sys/kernel/btf/vmlinux:  header | types ............................... | strings
//!                                      name, info (kind, count), size or type
//!                                      then what the kind adds: members, values, parameters ...
//! ```
//!
//! Types are numbered in their order, from 1. Members of unnamed structures and unions within a structure count as its
//! own. The file comes from the kernel; it is read as if it came from anybody: every place is checked against its end, and
//! what does not fit is an error.
//!
//! See `Documentation/bpf/btf.rst` in the Linux source.

use crate::{Error, Result};
use std::fs::File;
use std::io::Read;
use std::path::Path;

const KERNEL: &str = "/sys/kernel/btf/vmlinux";
/// No kernel's is nearly as long.
const MOST_BYTES: u64 = 64 << 20;
const MAGIC: u32 = 0xeb9f;
/// Unnamed structures lie no deeper within each other.
const MOST_DEPTH: u32 = 8;

const KIND_ARRAY: u32 = 3;
const KIND_STRUCT: u32 = 4;
const KIND_UNION: u32 = 5;
const KIND_ENUM: u32 = 6;

/// Types of the running kernel.
#[derive(Debug)]
pub(crate) struct Btf {
    types: Vec<u8>,
    strings: Vec<u8>,
    /// Where each type begins; type n is at n - 1.
    begins: Vec<u32>,
}

/// One type's fixed part, and where what its kind adds begins.
#[derive(Clone, Copy)]
struct Type {
    name: u32,
    kind: u32,
    count: u32,
    /// Whether members' offsets share their word with the size of a bit field.
    has_bit_fields: bool,
    size: u32,
    rest: usize,
}

impl Btf {
    /// Those of this kernel.
    ///
    /// # Errors
    /// It has none (`CONFIG_DEBUG_INFO_BTF`), or they are not of the documented form.
    pub fn of_kernel() -> Result<Self> {
        let failed = |e| Error::file("read the types of the kernel from", KERNEL, e);
        let mut bytes = Vec::new();
        let file = File::open(Path::new(KERNEL)).map_err(failed)?;
        file.take(MOST_BYTES).read_to_end(&mut bytes).map_err(failed)?;
        Self::parse(&bytes).ok_or_else(|| failed(std::io::Error::other("not the form that is documented")))
    }

    fn parse(bytes: &[u8]) -> Option<Self> {
        let word = |at| word(bytes, at);
        // Magic (16 bits), version and flags; the length of the header; then places counted from its end.
        if word(0)? & 0xffff != MAGIC {
            return None;
        }
        let header = usize::try_from(word(4)?).ok()?;
        let part = |at, length| {
            let begin = header.checked_add(usize::try_from(word(at)?).ok()?)?;
            bytes.get(begin..begin.checked_add(usize::try_from(word(length)?).ok()?)?)
        };
        let mut btf = Self { types: part(8, 12)?.to_vec(), strings: part(16, 20)?.to_vec(), begins: Vec::new() };
        let mut at = 0;
        while at < btf.types.len() {
            btf.begins.push(u32::try_from(at).ok()?);
            let found = btf.type_at(at)?;
            let more = match found.kind {
                // int, variable, declaration tag
                1 | 14 | 17 => 4,
                KIND_ARRAY => 12,
                // structures and unions; 64-bit enumerations; the sections of variables
                KIND_STRUCT | KIND_UNION | 15 | 19 => 12 * found.count as usize,
                // enumerations and the parameters of functions
                KIND_ENUM | 13 => 8 * found.count as usize,
                // pointers, forward declarations, typedefs, qualifiers, functions, floats, type tags
                2 | 7..=12 | 16 | 18 => 0,
                _ => return None,
            };
            at = found.rest.checked_add(more)?;
        }
        (at == btf.types.len()).then_some(btf)
    }

    fn type_at(&self, at: usize) -> Option<Type> {
        let info = word(&self.types, at + 4)?;
        Some(Type {
            name: word(&self.types, at)?,
            kind: info >> 24 & 0x1f,
            count: info & 0xffff,
            has_bit_fields: info >> 31 == 1,
            size: word(&self.types, at + 8)?,
            rest: at + 12,
        })
    }

    fn is_called(&self, place: u32, name: &str) -> bool {
        let text = usize::try_from(place).ok().and_then(|at| self.strings.get(at..));
        text.and_then(|text| text.strip_prefix(name.as_bytes())).is_some_and(|rest| rest.first() == Some(&0))
    }

    fn find(&self, kind: u32, name: &str) -> Option<Type> {
        let mut types = self.begins.iter().filter_map(|&at| self.type_at(at as usize));
        types.find(|t| t.kind == kind && self.is_called(t.name, name))
    }

    /// The size of a structure.
    pub fn size_of(&self, structure: &str) -> Option<usize> {
        self.find(KIND_STRUCT, structure).map(|t| t.size as usize)
    }

    /// Where a member of a structure begins, in bytes.
    pub fn offset_of(&self, structure: &str, member: &str) -> Option<usize> {
        let bits = self.member(self.find(KIND_STRUCT, structure)?, member, MOST_DEPTH)?;
        (bits % 8 == 0).then_some(bits as usize / 8)
    }

    fn member(&self, within: Type, name: &str, depth: u32) -> Option<u32> {
        if !matches!(within.kind, KIND_STRUCT | KIND_UNION) {
            return None;
        }
        (0..within.count as usize).find_map(|n| {
            let at = within.rest + 12 * n;
            let (called, member, offset) =
                (word(&self.types, at)?, word(&self.types, at + 4)?, word(&self.types, at + 8)?);
            let offset = if within.has_bit_fields { offset & 0xff_ffff } else { offset };
            if self.is_called(called, name) {
                return Some(offset);
            }
            let unnamed = self.is_called(called, "") && depth > 0;
            let inner = *self.begins.get((member as usize).checked_sub(1)?)?;
            let found = if unnamed { self.member(self.type_at(inner as usize)?, name, depth - 1) } else { None };
            offset.checked_add(found?)
        })
    }

    /// The value of a name in an enumeration.
    pub fn value_of(&self, enumeration: &str, name: &str) -> Option<u32> {
        let found = self.find(KIND_ENUM, enumeration)?;
        (0..found.count as usize).find_map(|n| {
            let at = found.rest + 8 * n;
            self.is_called(word(&self.types, at)?, name).then(|| word(&self.types, at + 4))?
        })
    }
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().map(|word| u32::from_ne_bytes(*word))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `struct outer { long a; union { int b; struct { short c; short d; }; }; } ; enum e { X = 3, Y = 9 };`
    fn small() -> Vec<u8> {
        let strings = b"\0outer\0a\0b\0c\0d\0e\0X\0Y\0long\0";
        let place = |name: &str| {
            let name = [b"\0", name.as_bytes(), b"\0"].concat();
            strings.windows(name.len()).position(|w| w == name).unwrap() as u32 + 1
        };
        let info = |kind: u32, count: u32| kind << 24 | count;
        let types = [
            vec![place("long"), info(1, 0), 8, 64],
            vec![0, info(KIND_STRUCT, 2), 4, place("c"), 1, 0, place("d"), 1, 16],
            vec![0, info(KIND_UNION, 2), 4, place("b"), 1, 0, 0, 2, 0],
            vec![place("outer"), info(KIND_STRUCT, 2), 16, place("a"), 1, 0, 0, 3, 64],
            vec![place("e"), info(KIND_ENUM, 2), 4, place("X"), 3, place("Y"), 9],
        ]
        .concat();
        let types: Vec<u8> = types.iter().flat_map(|w| w.to_ne_bytes()).collect();
        let header = [MAGIC | 1 << 16, 24, 0, types.len() as u32, types.len() as u32, strings.len() as u32];
        [header.iter().flat_map(|w| w.to_ne_bytes()).collect(), types, strings.to_vec()].concat()
    }

    #[test]
    fn members_of_unnamed_structures_are_found() {
        let btf = Btf::parse(&small()).unwrap();
        assert_eq!(btf.size_of("outer"), Some(16));
        let offsets = ["a", "b", "c", "d", "e", ""].map(|name| btf.offset_of("outer", name));
        assert_eq!(offsets[..5], [Some(0), Some(8), Some(8), Some(10), None]);
        assert_eq!(btf.offset_of("out", "a"), None);
        assert_eq!((btf.value_of("e", "Y"), btf.value_of("e", "Z"), btf.value_of("outer", "Y")), (Some(9), None, None));
    }

    #[test]
    fn what_is_cut_or_broken_is_refused_or_read_in_bounds() {
        let whole = small();
        for end in 0..whole.len() {
            assert!(Btf::parse(&whole[..end]).is_none(), "cut at {end}");
        }
        for at in 0..whole.len() {
            for flip in [0x01, 0x80, 0xff] {
                let mut bytes = whole.clone();
                bytes[at] ^= flip;
                if let Some(btf) = Btf::parse(&bytes) {
                    let _ = (btf.offset_of("outer", "d"), btf.value_of("e", "Y"), btf.size_of("outer"));
                }
            }
        }
    }

    #[test]
    fn this_kernel_tells_of_its_pages() {
        let Ok(btf) = Btf::of_kernel() else {
            eprintln!("skipped: this kernel has no BTF");
            return;
        };
        assert!(btf.size_of("page").is_some_and(|bytes| (32..=96).contains(&bytes)));
        assert_eq!(btf.offset_of("page", "flags"), Some(0));
        assert!(btf.offset_of("page", "_refcount").is_some() && btf.value_of("pageflags", "PG_locked") == Some(0));
    }
}
