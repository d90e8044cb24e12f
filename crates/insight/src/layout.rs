//! The layout of `struct page` in a guest's kernel: offsets of its members and the meaning of their bits.
//!
//! There are two sources (see `docs/insight.md`): the VMCOREINFO note (`note.rs`), and BTF for values that the note
//! lacks. Kernels differ in
//!
//! - the bits of `flags`,
//! - the mark of frames of the slab allocator and others: a bit of `flags`, or a *type*,
//! - the way in which a tail of a compound page finds its head.
//!
//! The type is in the same word as the map count (`_mapcount`), which frames that no process maps do not need.

use crate::btf::Btf;
use crate::note::Note;

/// How one type of frames that no process maps is encoded in `struct page`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TypeCode {
    /// Until Linux 6.11: all bits of the base are set, and the bit of the type is cleared.
    ClearedBit { base: u32, bit: u32 },
    /// Since Linux 6.12: the type is the highest byte.
    Byte(u8),
}

impl TypeCode {
    /// The code of a type. `value` is the note's: the whole word of a frame that has this type.
    fn of_value(value: i64) -> Self {
        let value = value as u32;
        if value & 0x00ff_ffff == 0 {
            return Self::Byte((value >> 24) as u8);
        }
        Self::of_bit(!value)
    }

    const fn of_bit(bit: u32) -> Self {
        // Linux 6.11 has its types in the topmost bits.
        let base = if bit < 1 << 24 { 0xf000_0000 } else { 0x8000_0000 };
        Self::ClearedBit { base, bit }
    }

    const fn is(self, mapcount: u32) -> bool {
        match self {
            Self::ClearedBit { base, bit } => mapcount & (base | bit) == base,
            Self::Byte(byte) => mapcount >> 24 == byte as u32,
        }
    }
}

/// The codes of the types that a kernel has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Types {
    buddy: TypeCode,
    offline: Option<TypeCode>,
    table: TypeCode,
    slab: Option<TypeCode>,
    hugetlb: Option<TypeCode>,
}

/// The type of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameType {
    /// First frame of a free block.
    Buddy,
    /// Taken away from the guest, as by a balloon.
    Offline,
    /// Page table.
    Table,
    /// Frame of the slab allocator.
    Slab,
    /// A huge page of hugetlbfs.
    Hugetlb,
    /// None of these.
    None,
}

impl Types {
    fn new(note: &Note, btf: Option<&Btf>) -> Option<Self> {
        let code = |name: &str| note.number(name).map(TypeCode::of_value);
        let buddy = code("PAGE_BUDDY_MAPCOUNT_VALUE")?;
        let table = match buddy {
            TypeCode::Byte(_) => {
                TypeCode::Byte(btf.and_then(|btf| btf.value("pagetype", "PGTY_table")).unwrap_or(0xf2) as u8)
            }
            TypeCode::ClearedBit { base: 0x8000_0000, .. } => TypeCode::of_bit(0x1000_0000),
            // Before Linux 5.11, frames charged to a control group had a type of their own.
            TypeCode::ClearedBit { .. } => TypeCode::of_bit(if note.version() < (5, 11) { 0x400 } else { 0x200 }),
        };
        Some(Self {
            buddy,
            table,
            offline: code("PAGE_OFFLINE_MAPCOUNT_VALUE"),
            slab: code("PAGE_SLAB_MAPCOUNT_VALUE"),
            hugetlb: code("PAGE_HUGETLB_MAPCOUNT_VALUE"),
        })
    }

    /// The type of a frame, by the word that holds either its map count or its type.
    pub fn of(&self, mapcount: u32) -> FrameType {
        // The map count of a frame without mappings is -1. Types are other negative numbers.
        if mapcount < 0x8000_0000 || mapcount == u32::MAX {
            return FrameType::None;
        }
        let is = |code: Option<TypeCode>| code.is_some_and(|code| code.is(mapcount));
        match () {
            () if self.buddy.is(mapcount) => FrameType::Buddy,
            () if is(self.slab) => FrameType::Slab,
            () if self.table.is(mapcount) => FrameType::Table,
            () if is(self.offline) => FrameType::Offline,
            () if is(self.hugetlb) => FrameType::Hugetlb,
            () => FrameType::None,
        }
    }
}

/// Masks of bits of `flags`; 0 for a flag that a kernel does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flags {
    pub lru: u64,
    pub active: u64,
    pub referenced: u64,
    pub unevictable: u64,
    pub swapbacked: u64,
    pub reserved: u64,
    pub slab: u64,
    pub head: u64,
}

impl Flags {
    fn new(note: &Note, btf: Option<&Btf>) -> Option<Self> {
        let bit = |n: i64| u32::try_from(n).ok().and_then(|n| 1_u64.checked_shl(n));
        let noted = |name: &str| note.number(name).and_then(bit);
        let typed = |name: &str| btf.and_then(|btf| btf.value("pageflags", name)).and_then(|n| bit(n as i64));
        let lru = noted("PG_lru")?;
        let swapbacked = noted("PG_swapbacked")?;
        // Without BTF, the places beside the known flags are taken, in the two orders that kernels since 5.10 have.
        let (active, referenced) = if lru == 1 << 4 { (1 << 5, 1 << 1) } else { (1 << 8, 1 << 2) };
        Some(Self {
            lru,
            swapbacked,
            active: typed("PG_active").unwrap_or(active),
            referenced: typed("PG_referenced").unwrap_or(referenced),
            unevictable: typed("PG_unevictable").unwrap_or(swapbacked << 1),
            reserved: typed("PG_reserved").or_else(|| Some(noted("PG_private")? >> 1))?,
            slab: noted("PG_slab").unwrap_or(0),
            head: note.number("PG_head_mask")? as u64,
        })
    }
}

/// Generations of the multi-generational LRU: the place of a frame's generation in `flags`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Generations {
    shift: u32,
}

impl Generations {
    const BITS: u32 = 3;
    /// Bits of a thread's number that are kept with the last CPU.
    const THREAD_BITS: u32 = 8;
    /// Number of generations in every kernel.
    pub const COUNT: u64 = 4;

    /// The place of the generation. From the top, `flags` has the node, the zone, the last user of the frame (CPU and
    /// thread), and then the generation; see `include/linux/page-flags-layout.h`.
    ///
    /// `flags` has no section number if the frames' descriptions are virtually contiguous. It has no last user if
    /// `struct page` has a member of its own for that.
    fn new(note: &Note, btf: &Btf) -> Option<Self> {
        btf.offset("lruvec.lrugen")?;
        let bits = |n: u64| n.next_power_of_two().trailing_zeros();
        let node_bits = bits(note.length("node_data")?);
        let zone_bits = bits(btf.value("zone_type", "__MAX_NR_ZONES")?);
        // With NUMA balancing: the CPU, and the low bits of the number of the thread, that used a frame last.
        let balanced = btf.offset("task_struct.numa_faults").is_some() && btf.offset("page._last_cpupid").is_none();
        let last_bits = if balanced { Self::THREAD_BITS + bits(btf.size("cpumask")?.checked_mul(8)?) } else { 0 };
        Some(Self { shift: 64_u32.checked_sub(node_bits + zone_bits + last_bits + Self::BITS)? })
    }

    /// The generation of a frame, 0 to 3; `None` if it is in none.
    pub const fn of(self, flags: u64) -> Option<u64> {
        (flags >> self.shift & ((1 << Self::BITS) - 1)).checked_sub(1)
    }
}

/// Offsets of the members of `struct page`, in bytes, and the meaning of their bits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageLayout {
    pub bytes: usize,
    pub flags_at: usize,
    pub mapcount_at: usize,
    pub refcount_at: usize,
    pub mapping_at: usize,
    pub lru_at: usize,
    pub private_at: usize,
    pub head_at: usize,
    /// Offset of the control group that the frame is charged to; `None` if it is not known.
    pub memcg_at: Option<usize>,
    pub flags: Flags,
    pub types: Types,
    pub generations: Option<Generations>,
    /// Number of orders of free blocks: a block has less than 2^`orders` frames.
    pub orders: u64,
}

impl PageLayout {
    /// Sizes of `struct page` that are accepted, in bytes.
    const SIZES: std::ops::RangeInclusive<u64> = 56..=256;

    /// The layout by a kernel's note and BTF; `None` if a value is missing or makes no sense.
    pub fn new(note: &Note, btf: Option<&Btf>) -> Option<Self> {
        let bytes = note.size("page").filter(|n| Self::SIZES.contains(n) && n % 8 == 0)? as usize;
        let place = |name: &str, size: usize| {
            let at = usize::try_from(note.offset(name)?).ok()?;
            (at % size == 0 && at + size <= bytes).then_some(at)
        };
        let memcg = btf.and_then(|btf| btf.offset("page.memcg_data").or_else(|| btf.offset("page.mem_cgroup")));
        Some(Self {
            bytes,
            flags_at: place("page.flags", 8)?,
            mapcount_at: place("page._mapcount", 4)?,
            refcount_at: place("page._refcount", 4)?,
            mapping_at: place("page.mapping", 8)?,
            lru_at: place("page.lru", 8).filter(|at| at + 16 <= bytes)?,
            private_at: place("page.private", 8)?,
            head_at: place("page.compound_head", 8).or_else(|| place("page.compound_info", 8))?,
            memcg_at: memcg.and_then(|at| usize::try_from(at).ok()).filter(|at| at % 8 == 0 && at + 8 <= bytes),
            flags: Flags::new(note, btf)?,
            types: Types::new(note, btf)?,
            generations: btf.and_then(|btf| Generations::new(note, btf)),
            orders: note.length("zone.free_area").filter(|n| *n <= 20).unwrap_or(11),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn types(buddy: i64, slab: Option<i64>, release: &str) -> Types {
        let slab = slab.map_or_else(String::new, |n| format!("NUMBER(PAGE_SLAB_MAPCOUNT_VALUE)={n}\n"));
        let offline = if buddy == -129 { -257 } else { 0xf1 << 24 };
        let text = format!(
            "OSRELEASE={release}\nNUMBER(PAGE_BUDDY_MAPCOUNT_VALUE)={buddy}\n\
             NUMBER(PAGE_OFFLINE_MAPCOUNT_VALUE)={offline}\n{slab}"
        );
        let frame = crate::note::tests::frame(&text);
        Types::new(&Note::parse(&frame).unwrap(), None).unwrap()
    }

    #[test]
    fn types_are_told_in_kernels_of_all_codings() {
        let old = types(-129, None, "5.10.0-32");
        assert_eq!(old.of(!0x80), FrameType::Buddy);
        assert_eq!(old.of(!0x100), FrameType::Offline);
        assert_eq!(old.of(!0x400), FrameType::Table);
        assert_eq!(old.of(!0x200), FrameType::None, "charged to a control group");
        assert_eq!(types(-129, None, "6.1.0").of(!0x200), FrameType::Table);
        let new = types(-268_435_456, Some(-184_549_376), "6.12.1");
        for (word, what) in [
            (0xf000_0000, FrameType::Buddy),
            (0xf100_0000, FrameType::Offline),
            (0xf200_0000, FrameType::Table),
            (0xf500_0012, FrameType::Slab),
            (0xf600_0000, FrameType::None),
            (u32::MAX, FrameType::None),
            (0, FrameType::None),
            (7, FrameType::None),
        ] {
            assert_eq!(new.of(word), what, "{word:#x}");
        }
    }
}
