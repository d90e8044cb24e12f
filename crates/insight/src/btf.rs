//! BTF: the kernel's own description of its types, from which the offsets of this very kernel's structures are read. It
//! lies among the read-only data of kernels built with `CONFIG_DEBUG_INFO_BTF`, as kernels of distributions are.
//!
//! The format is described in `Documentation/bpf/btf.rst` of the Linux source. A header is followed by types and by
//! strings. Each type has a fixed part and a part that depends on its kind. Types are numbered from 1 in their order.

use std::collections::HashMap;

/// First bytes of a BTF section: magic, version 1, no flags.
pub const BEGINNING: [u8; 4] = [0x9f, 0xeb, 1, 0];
/// Most levels of unnamed structures inside structures in which a member is looked for, and most links in a chain of
/// typedefs and qualifiers that are followed.
const MOST_DEPTH: u32 = 16;
/// Most members looked at for one name: in a hostile section each structure may contain itself many times.
const MOST_MEMBERS: u32 = 100_000;

/// A section's header, with the places of types and strings behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Length of the header in bytes.
    pub length: usize,
    types: (usize, usize),
    strings: (usize, usize),
}

impl Header {
    /// Number of bytes of a header that are read.
    pub const BYTES: usize = 24;

    /// Parses a header; `None` if it is malformed, or the section is too large.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        if !bytes.starts_with(&BEGINNING) {
            return None;
        }
        let word = |at: usize| Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?) as usize);
        let (length, types, strings) = (word(4)?, (word(8)?, word(12)?), (word(16)?, word(20)?));
        let header = Self { length, types, strings };
        let ordered = types.1 > 0 && strings.1 > 0 && types.0.checked_add(types.1)? <= strings.0;
        ((Self::BYTES..=256).contains(&length) && ordered && header.whole()? <= Btf::MOST_BYTES).then_some(header)
    }

    /// Length of header, types and strings together, in bytes.
    pub fn whole(&self) -> Option<usize> {
        self.strings.0.checked_add(self.strings.1)?.checked_add(self.length)
    }
}

/// Kinds of types that are used here.
mod kind {
    pub const ARRAY: u32 = 3;
    pub const STRUCT: u32 = 4;
    pub const UNION: u32 = 5;
    pub const ENUM: u32 = 6;
    pub const ENUM64: u32 = 19;
}

/// Length of a type's part behind its first twelve bytes; `None` for an unknown kind.
const fn more_bytes(kind: u32, count: usize) -> Option<usize> {
    Some(match kind {
        2 | 7..=12 | 16 | 18 => 0,
        1 | 14 | 17 => 4,
        kind::ARRAY => 12,
        kind::STRUCT | kind::UNION | 15 | kind::ENUM64 => 12 * count,
        kind::ENUM | 13 => 8 * count,
        _ => return None,
    })
}

/// A member of a structure.
#[derive(Clone, Copy)]
struct Member {
    name: u32,
    kind: u32,
    offset_bits: u32,
}

/// A kernel's types.
pub struct Btf {
    types: Vec<u8>,
    strings: Vec<u8>,
    /// Offset of each type, by number; type 0 does not exist.
    starts: Vec<u32>,
    /// Structures and enumerations by name; of several with one name, the first.
    named: HashMap<Vec<u8>, u32>,
}

impl Btf {
    /// Most bytes of types and strings together; kernels have 3 to 10 MB.
    pub const MOST_BYTES: usize = 64 << 20;

    /// Parses a whole section. Types behind the first one of an unknown kind are left out.
    pub fn parse(section: &[u8]) -> Option<Self> {
        let header = Header::parse(section)?;
        let part = |(offset, bytes): (usize, usize)| {
            let start = header.length.checked_add(offset)?;
            Some(section.get(start..start.checked_add(bytes)?)?.to_vec())
        };
        let mut btf =
            Self { types: part(header.types)?, strings: part(header.strings)?, starts: vec![0], named: HashMap::new() };
        let mut at = 0;
        while let Some((name, kind, count)) = btf.fixed_part(at) {
            let Some(more) = more_bytes(kind, count) else { break };
            let id = btf.starts.len() as u32;
            btf.starts.push(at as u32);
            if matches!(kind, kind::STRUCT | kind::UNION | kind::ENUM | kind::ENUM64) && name != 0 {
                let name = btf.string(name).to_vec();
                btf.named.entry(name).or_insert(id);
            }
            at += 12 + more;
        }
        Some(btf)
    }

    fn word(&self, at: usize) -> Option<u32> {
        Some(u32::from_le_bytes(self.types.get(at..at.checked_add(4)?)?.try_into().ok()?))
    }

    /// Name, kind and number of members of the type at this offset.
    fn fixed_part(&self, at: usize) -> Option<(u32, u32, usize)> {
        let info = self.word(at + 4)?;
        Some((self.word(at)?, info >> 24 & 0x1f, info as usize & 0xffff))
    }

    fn string(&self, at: u32) -> &[u8] {
        let rest = self.strings.get(at as usize..).unwrap_or_default();
        rest.split(|byte| *byte == 0).next().unwrap_or_default()
    }

    fn start(&self, id: u32) -> Option<usize> {
        if id == 0 { None } else { self.starts.get(id as usize).map(|start| *start as usize) }
    }

    /// The type behind typedefs and qualifiers.
    fn resolve(&self, mut id: u32) -> Option<(usize, u32, usize)> {
        for _ in 0..MOST_DEPTH {
            let at = self.start(id)?;
            let (_, kind, count) = self.fixed_part(at)?;
            match kind {
                // typedef, volatile, const, restrict, type tag
                8..=11 | 18 => id = self.word(at + 8)?,
                _ => return Some((at, kind, count)),
            }
        }
        None
    }

    fn members(&self, at: usize, count: usize) -> impl Iterator<Item = Member> {
        // With this flag the offset shares its word with the width of a bit field.
        let with_width = self.word(at + 4).is_some_and(|info| info >> 31 == 1);
        (0..count).map_while(move |n| {
            let member = at + 12 + n * 12;
            let offset = self.word(member + 8)?;
            let offset_bits = if with_width { offset & 0xff_ffff } else { offset };
            Some(Member { name: self.word(member)?, kind: self.word(member + 4)?, offset_bits })
        })
    }

    /// Offset in bytes of a member, and the member's type. Members of unnamed structures and unions inside count as
    /// members.
    fn member(&self, id: u32, name: &[u8]) -> Option<(u64, u32)> {
        self.member_within(id, name, MOST_DEPTH, &mut { MOST_MEMBERS })
    }

    fn member_within(&self, id: u32, name: &[u8], depth: u32, left: &mut u32) -> Option<(u64, u32)> {
        let (at, kind, count) = self.resolve(id)?;
        if depth == 0 || !matches!(kind, kind::STRUCT | kind::UNION) {
            return None;
        }
        for member in self.members(at, count) {
            *left = left.checked_sub(1)?;
            let offset = u64::from(member.offset_bits / 8);
            if member.name == 0 {
                if let Some((inner, kind)) = self.member_within(member.kind, name, depth - 1, left) {
                    return Some((offset + inner, kind));
                }
            } else if self.string(member.name) == name {
                return Some((offset, member.kind));
            }
        }
        None
    }

    /// Offset in bytes of `structure.member`, or of `structure.member.of_member`.
    pub fn offset(&self, path: &str) -> Option<u64> {
        let mut names = path.split('.');
        let mut id = *self.named.get(names.next()?.as_bytes())?;
        let mut offset = 0;
        for name in names {
            let (inner, kind) = self.member(id, name.as_bytes())?;
            offset += inner;
            id = kind;
        }
        Some(offset)
    }

    /// Size of a structure or union in bytes.
    pub fn size(&self, name: &str) -> Option<u64> {
        let (at, kind, _) = self.resolve(*self.named.get(name.as_bytes())?)?;
        if !matches!(kind, kind::STRUCT | kind::UNION) {
            return None;
        }
        self.word(at + 8).map(u64::from)
    }

    /// Value of a constant in an enumeration.
    pub fn value(&self, enumeration: &str, name: &str) -> Option<u64> {
        let at = self.start(*self.named.get(enumeration.as_bytes())?)?;
        let (_, kind, count) = self.fixed_part(at)?;
        let bytes = match kind {
            kind::ENUM => 8,
            kind::ENUM64 => 12,
            _ => return None,
        };
        (0..count).map(|n| at + 12 + n * bytes).find_map(|at| {
            let same = self.string(self.word(at)?) == name.as_bytes();
            let high = if bytes == 12 { self.word(at + 8)? } else { 0 };
            same.then_some(u64::from(self.word(at + 4)?) | u64::from(high) << 32)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// `struct a { int x; union { int y; struct b z; }; }`, `struct b { int p; int q[7]; }`,
    /// `enum e { ONE = 1, SIX = 6 }`
    fn section() -> Vec<u8> {
        let strings = b"\0a\0x\0y\0z\0b\0p\0q\0e\0ONE\0SIX\0";
        let at = |name: &[u8]| {
            strings
                .windows(name.len() + 2)
                .position(|w| w[0] == 0 && &w[1..=name.len()] == name && w[name.len() + 1] == 0)
                .unwrap() as u32
                + 1
        };
        let info = |kind: u32, count: u32| kind << 24 | count;
        let words: Vec<u32> = [
            vec![0, info(1, 0), 4, 32],                                      // 1 int
            vec![at(b"a"), info(4, 2), 40, at(b"x"), 1, 0, 0, 3, 32],        // 2 struct a
            vec![0, info(5, 2), 36, at(b"y"), 1, 0, at(b"z"), 4, 0],         // 3 union
            vec![0, info(8, 0), 5],                                          // 4 typedef
            vec![at(b"b"), info(4, 2), 32, at(b"p"), 1, 0, at(b"q"), 6, 32], // 5 struct b
            vec![0, info(3, 0), 0, 1, 1, 7],                                 // 6 array
            vec![at(b"e"), info(6, 2), 4, at(b"ONE"), 1, at(b"SIX"), 6],     // 7 enum
        ]
        .concat();
        let mut section = vec![0x9f, 0xeb, 1, 0];
        let types = (words.len() * 4) as u32;
        for word in [24, 0, types, types, strings.len() as u32].into_iter().chain(words) {
            section.extend(u32::to_le_bytes(word));
        }
        section.extend(strings);
        section
    }

    #[test]
    fn offsets_sizes_and_values_are_found() {
        let btf = Btf::parse(&section()).unwrap();
        assert_eq!((btf.offset("a.x"), btf.offset("a.y"), btf.offset("a.z.q")), (Some(0), Some(4), Some(8)));
        assert_eq!((btf.size("a"), btf.size("b")), (Some(40), Some(32)));
        assert_eq!(
            (btf.value("e", "SIX"), btf.value("e", "TWO"), btf.offset("a.q"), btf.size("c")),
            (Some(6), None, None, None)
        );
    }

    #[test]
    fn search_in_structure_inside_itself_ends() {
        let mut section = section();
        // Type 3, the unnamed union, consists of itself twice.
        let union = section.windows(4).position(|w| w == (5_u32 << 24 | 2).to_le_bytes()).unwrap() - 4;
        for member in [union + 12, union + 24] {
            section[member..member + 4].copy_from_slice(&0_u32.to_le_bytes());
            section[member + 4..member + 8].copy_from_slice(&3_u32.to_le_bytes());
        }
        assert_eq!(Btf::parse(&section).unwrap().offset("a.nothing"), None);
    }

    proptest! {
        #[test]
        fn reading_ends_on_any_content(
            changes in prop::collection::vec((0..400usize, any::<u8>()), 0..40), cut in 0..400usize,
        ) {
            let mut section = section();
            for (at, byte) in changes {
                if let Some(place) = section.get_mut(at) {
                    *place = byte;
                }
            }
            section.truncate(section.len().saturating_sub(cut));
            if let Some(btf) = Btf::parse(&section) {
                for path in ["a.x", "a.z.q", "b.q.p"] {
                    let _ = (btf.offset(path), btf.size(path), btf.value("e", "SIX"));
                }
            }
        }
    }
}
