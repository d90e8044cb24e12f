//! A guest made by hand, with a known use of every frame; and the same guest with random damage.

use insight::{GuestMemory, Kernel, NoKernel, Saved};
use page::{GuestPageKind as Kind, GuestPhys, Lru};
use proptest::prelude::*;
use std::time::{Duration, Instant};

const FRAMES: usize = 2048;
const DIRECT: u64 = 0xffff_8880_0000_0000;
const PAGES: u64 = 0xffff_ea00_0000_0000;
/// Frame of the note.
const NOTE: usize = 1;
/// Frame of the root of the page table.
const ROOT: usize = 2;
/// First frame of the frames' descriptions (`struct page`).
const DESCRIPTIONS: usize = 16;
/// Frame of the kernel's names (`uts_namespace`).
const NAMES: usize = 0x120;

const PRESENT: u64 = 1;
const WRITABLE: u64 = 2;
const LARGE: u64 = 1 << 7;
const NO_EXECUTE: u64 = 1 << 63;

struct Maker(Saved);

impl Maker {
    fn bytes(&mut self, frame: usize, at: usize, bytes: &[u8]) {
        self.0.bytes_mut()[frame * 4096 + at..][..bytes.len()].copy_from_slice(bytes);
    }

    fn entry(&mut self, table: usize, index: usize, entry: u64) {
        self.bytes(table, index * 8, &entry.to_le_bytes());
    }

    /// Writes a member of the description of a frame.
    fn describe(&mut self, frame: usize, at: usize, bytes: &[u8]) {
        self.bytes(DESCRIPTIONS, frame * 64 + at, bytes);
    }

    fn flags(&mut self, frame: usize, flags: u64) {
        self.describe(frame, 0, &flags.to_le_bytes());
    }

    fn references(&mut self, frame: usize, count: u32) {
        self.describe(frame, 52, &count.to_le_bytes());
    }

    fn mapping(&mut self, frame: usize, mapping: u64) {
        self.describe(frame, 24, &mapping.to_le_bytes());
    }

    fn kind_of(&mut self, frame: usize, kind: i32) {
        self.describe(frame, 48, &kind.to_le_bytes());
    }
}

const TEXT: &str = "OSRELEASE=5.10.0-32-made\nPAGESIZE=4096\nSYMBOL(init_uts_ns)=ffffffff80120000\n\
SYMBOL(swapper_pg_dir)=ffffffff80002000\nSYMBOL(mem_section)=ffff888000007000\nLENGTH(mem_section)=2048\nSIZE(mem_section)=16\n\
OFFSET(mem_section.section_mem_map)=0\nNUMBER(SECTION_SIZE_BITS)=27\nSIZE(page)=64\nOFFSET(page.flags)=0\n\
OFFSET(page._refcount)=52\nOFFSET(page.mapping)=24\nOFFSET(page.lru)=8\nOFFSET(page._mapcount)=48\nOFFSET(page.private)=40\n\
OFFSET(page.compound_head)=8\nLENGTH(zone.free_area)=11\nNUMBER(PG_lru)=4\nNUMBER(PG_private)=13\nNUMBER(PG_swapbacked)=19\n\
NUMBER(PG_slab)=9\nNUMBER(PG_head_mask)=65536\nNUMBER(PAGE_BUDDY_MAPCOUNT_VALUE)=-129\nNUMBER(PAGE_OFFLINE_MAPCOUNT_VALUE)=-257\n\
NUMBER(phys_base)=0\nNUMBER(pgtable_l5_enabled)=0\nKERNELOFFSET=0\nNUMBER(KERNEL_IMAGE_SIZE)=1073741824\n";

const LRU: u64 = 1 << 4;
const ACTIVE: u64 = 1 << 5;
const REFERENCED: u64 = 1 << 1;
const RESERVED: u64 = 1 << 12;

fn guest() -> Saved {
    let mut maker = Maker(Saved::new(vec![0; FRAMES * 4096]));
    write_note(&mut maker);
    map_image_and_memory(&mut maker);
    map_descriptions(&mut maker);
    maker.bytes(NAMES, 4, b"Linux");
    maker.bytes(NAMES, 4 + 130, b"5.10.0-32-made");
    describe_frames(&mut maker);
    maker.0
}

fn write_note(maker: &mut Maker) {
    let mut note = 11_u32.to_le_bytes().to_vec();
    note.extend((TEXT.len() as u32).to_le_bytes());
    note.extend([0; 4]);
    note.extend(b"VMCOREINFO\0\0");
    note.extend(TEXT.as_bytes());
    maker.bytes(NOTE, 0, &note);
}

/// An entry that points to the table in this frame.
const fn table(frame: u64) -> u64 {
    frame << 12 | PRESENT | WRITABLE
}

/// Maps the image (the first 2 MiB: text, read-only data and data by page) and the direct map.
fn map_image_and_memory(maker: &mut Maker) {
    maker.entry(ROOT, 511, table(3));
    maker.entry(3, 510, table(4));
    maker.entry(4, 0, table(5));
    for frame in 0..512 {
        let rights = match frame {
            0x100..0x110 => 0,
            0x110..0x118 => NO_EXECUTE,
            _ => NO_EXECUTE | WRITABLE,
        };
        maker.entry(5, frame, (frame as u64) << 12 | PRESENT | rights);
    }
    maker.entry(ROOT, 273, table(6));
    maker.entry(6, 0, PRESENT | WRITABLE | LARGE | NO_EXECUTE);
}

/// Writes the array of sections, and maps the array of descriptions.
fn map_descriptions(maker: &mut Maker) {
    maker.entry(7, 0, DIRECT + 0x8000);
    maker.entry(8, 0, PAGES | 3);
    maker.entry(ROOT, 468, table(9));
    maker.entry(9, 0, table(10));
    maker.entry(10, 0, table(11));
    for page in 0..FRAMES * 64 / 4096 {
        maker.entry(11, page, ((DESCRIPTIONS + page) as u64) << 12 | PRESENT | WRITABLE | NO_EXECUTE);
    }
}

/// Gives some frames a use of every kind, and the others to the kernel.
fn describe_frames(maker: &mut Maker) {
    for frame in 0..FRAMES {
        maker.references(frame, 1);
        maker.kind_of(frame, -1);
        maker.flags(frame, if frame < 0x200 { RESERVED } else { 0 });
    }
    maker.kind_of(0x300, -129);
    maker.describe(0x300, 40, &3_u64.to_le_bytes());
    (0x300..0x308).for_each(|frame| maker.references(frame, 0));
    maker.flags(0x320, 1 << 9);
    maker.flags(0x330, LRU | 1 << 19);
    maker.mapping(0x330, DIRECT + 0x1000 + 1);
    maker.flags(0x340, LRU | ACTIVE | 1 << 16);
    maker.mapping(0x340, DIRECT + 0x2000);
    for tail in 0x341..0x344 {
        maker.describe(tail, 8, &(PAGES + 0x340 * 64 + 1).to_le_bytes());
    }
    maker.flags(0x348, LRU | REFERENCED | 1 << 19);
    maker.mapping(0x348, DIRECT + 0x3000);
    maker.kind_of(0x350, !0x400);
    maker.kind_of(0x360, -257);
    // Two free frames in a list that a processor keeps, and one whose list is empty.
    for (frame, other) in [(0x370, 0x371), (0x371, 0x370), (0x378, 0x378)] {
        maker.references(frame, 0);
        let link = PAGES + other * 64 + 8;
        maker.describe(frame, 8, &link.to_le_bytes());
        maker.describe(frame, 16, &link.to_le_bytes());
    }
}

#[test]
fn frames_have_the_uses_they_were_given() {
    let guest = guest();
    let kernel = Kernel::find(&guest).unwrap();
    assert_eq!((kernel.release(), kernel.paging_levels(), kernel.kaslr_offset()), ("5.10.0-32-made", 4, Some(0)));
    let frames = kernel.classify();
    for (frame, kind, lru) in [
        (0x100, Kind::KernelText, Lru::None),
        (0x110, Kind::KernelRodata, Lru::None),
        (0x118, Kind::KernelData, Lru::None),
        (0x300, Kind::Free, Lru::None),
        (0x307, Kind::Free, Lru::None),
        (0x308, Kind::KernelData, Lru::None),
        (0x320, Kind::Slab, Lru::None),
        (0x330, Kind::Anonymous, Lru::Inactive),
        (0x340, Kind::PageCache, Lru::Active),
        (0x343, Kind::PageCache, Lru::Active),
        (0x344, Kind::KernelData, Lru::None),
        (0x348, Kind::Shmem, Lru::InactiveReferenced),
        (0x350, Kind::PageTables, Lru::None),
        (0x360, Kind::Balloon, Lru::None),
        (0x370, Kind::Free, Lru::None),
        (0x371, Kind::Free, Lru::None),
        (0x378, Kind::KernelData, Lru::None),
    ] {
        let found = frames.uses[frames.index.of(frame).unwrap()];
        assert_eq!((found.kind(), found.lru()), (kind, lru), "frame {frame:#x}");
    }
    assert_eq!(frames.files.len(), 2);
    assert_eq!(kernel.file(frames.files[0]), None, "without types there are no names");
}

#[test]
fn note_that_leads_to_no_kernel_is_rejected() {
    let nothing = Saved::new(vec![0; FRAMES * 4096]);
    assert_eq!(Kernel::find(&nothing).err(), Some(NoKernel::NoNote));
    let mut other = guest();
    other.bytes_mut()[NAMES * 4096 + 4 + 130] = b'6';
    let problem = Kernel::find(&other).err().unwrap().to_string();
    assert!(problem.contains("5.10.0-32-made") && problem.contains("another name"), "{problem}");
    // A second note, made up by a process, is in front of the right one.
    let mut two = guest();
    let mut note = [0; 4096];
    assert!(two.read(GuestPhys(NOTE as u64 * 4096), &mut note));
    let wrong = note.windows(8).position(|w| w == b"80002000").unwrap();
    note[wrong] = b'9';
    two.bytes_mut()[..4096].copy_from_slice(&note);
    assert!(Kernel::find(&two).is_ok());
}

#[test]
fn descriptions_claimed_at_address_zero_are_survived() {
    let mut guest = guest();
    guest.bytes_mut()[8 * 4096..][..8].copy_from_slice(&3_u64.to_le_bytes());
    assert_eq!(Kernel::find(&guest).unwrap().classify().uses.len(), FRAMES);
}

/// Random places in the structures, and values to be written there.
fn damage() -> impl Strategy<Value = Vec<(usize, usize, u64)>> {
    let frame = prop_oneof![1 => Just(NOTE), 2 => 2..12_usize, 4 => DESCRIPTIONS..DESCRIPTIONS + 32, 1 => Just(NAMES)];
    let value = prop_oneof![
        any::<u64>(),
        Just(0),
        Just(u64::MAX),
        // Links of tables and lists to each other.
        (0..64_u64).prop_map(|frame| frame << 12 | PRESENT | WRITABLE),
        (0..FRAMES as u64).prop_map(|frame| PAGES + frame * 64 + 8),
        (0..FRAMES as u64).prop_map(|frame| PAGES + frame * 64 + 1),
        (0..64_u64).prop_map(|bit| 1 << bit),
        Just(DIRECT + 0x2000),
    ];
    prop::collection::vec((frame, 0..512_usize, value), 1..200)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn classification_ends_after_any_damage(damage in damage(), flip: bool) {
        let mut guest = guest();
        for (frame, word, value) in damage {
            let place = &mut guest.bytes_mut()[frame * 4096 + word * 8..][..8];
            let old = u64::from_le_bytes((&*place).try_into().unwrap());
            place.copy_from_slice(&(if flip { old ^ value } else { value }).to_le_bytes());
        }
        let begin = Instant::now();
        if let Ok(kernel) = Kernel::find(&guest) {
            let frames = kernel.classify();
            prop_assert_eq!(frames.uses.len(), FRAMES);
            for file in &frames.files {
                let _ = kernel.file(*file);
            }
        }
        prop_assert!(begin.elapsed() < Duration::from_secs(5));
    }
}
