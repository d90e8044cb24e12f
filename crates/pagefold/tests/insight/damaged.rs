//! A guest that may have written anything anywhere: reading its memory ends.

use crate::rig::{Recipe, World, compare};
use insight::{GuestMemory, Kernel, Saved};
use page::{GuestPageKind as Kind, GuestPhys};
use rustix::time::{ClockId, clock_gettime};
use std::time::Duration;

/// Processor time of this thread: others may have the processors meanwhile.
fn worked() -> Duration {
    clock_gettime(ClockId::ThreadCPUTime).try_into().expect("not before its start")
}

/// Random numbers that are the same in every run.
struct Dice(u64);

impl Dice {
    fn throw(&mut self, sides: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % sides
    }
}

/// Address of the VMCOREINFO note in a saved guest.
fn note_of(saved: &Saved) -> usize {
    let mut note = None;
    saved.heads(&mut |at, head| {
        if head[12..].starts_with(b"VMCOREINFO\0") {
            note = Some(at.0 as usize);
        }
        note.is_none()
    });
    note.expect("the note")
}

/// Overwrites up to 400 words of a saved guest, in these frames and in the note. Returns the addresses and former
/// values.
fn damage(saved: &mut Saved, dice: &mut Dice, places: &[usize], note: Option<usize>) -> Vec<(usize, [u8; 8])> {
    let mut undo = Vec::new();
    for n in 0..1 + dice.throw(400) {
        let frame = match (note, n % 4) {
            (Some(note), 0) => note,
            _ => places[dice.throw(places.len())] << 12,
        };
        let at = frame + dice.throw(512) * 8;
        let other = places[dice.throw(places.len())] << 12;
        let old: [u8; 8] = saved.bytes_mut()[at..at + 8].try_into().expect("eight bytes");
        let copied: [u8; 8] = saved.bytes_mut()[other..other + 8].try_into().expect("eight bytes");
        let new = match dice.throw(6) {
            0 => [0; 8],
            1 => [0xff; 8],
            // A page table, or a list, that leads to itself.
            2 => (at as u64 & !0xfff | 0x67).to_le_bytes(),
            3 => copied,
            4 => (u64::from_le_bytes(old) ^ 1 << dice.throw(64)).to_le_bytes(),
            _ => (0xffff_8880_0000_0000 | at as u64).to_le_bytes(),
        };
        saved.bytes_mut()[at..at + 8].copy_from_slice(&new);
        undo.push((at, old));
    }
    undo
}

/// Looks for the kernel in a damaged guest and reads everything that leads from it. Returns whether there is a kernel.
fn read_to_an_end(saved: &Saved, count: usize) -> bool {
    let Ok(kernel) = Kernel::find(saved) else { return false };
    let frames = kernel.classify();
    assert_eq!(frames.uses.len(), count);
    frames.files.iter().for_each(|file| drop(kernel.file(*file)));
    true
}

/// A guest may write anything anywhere: reading its memory ends within bounds nevertheless.
#[test]
fn damaged_guest_is_read_to_an_end_in_bounded_time() {
    let recipe = Recipe { suite: None, memory_mib: 96, disk: false, append: "", qemu_args: &[] };
    let Some(world) = World::boot(&recipe) else { return };
    let (ram, frames) = compare(&world, "to be damaged");
    let bytes = ram.index().count() << 12;
    let mut saved = Saved::new(vec![0; bytes]);
    assert!(ram.read(GuestPhys(0), saved.bytes_mut()));
    drop(world);
    let begin = worked();
    let whole = insight::count(&Kernel::find(&saved).expect("a kernel").classify().uses);
    let usual = worked() - begin;
    assert_eq!(whole.iter().sum::<u64>(), ram.index().count() as u64);
    // Frames where damage matters: page tables, descriptions of frames, types and variables.
    let hurts = [Kind::PageTables, Kind::Reserved, Kind::KernelRodata, Kind::KernelData, Kind::Slab];
    let places: Vec<usize> =
        (0..frames.uses.len()).filter(|place| hurts.contains(&frames.uses[*place].kind())).collect();
    let note = note_of(&saved);
    let mut dice = Dice(7);
    let (mut lost, mut slowest) = (0, Duration::ZERO);
    for round in 0..150 {
        let undo = damage(&mut saved, &mut dice, &places, (round % 3 == 0).then_some(note));
        let begin = worked();
        lost += u32::from(!read_to_an_end(&saved, ram.index().count()));
        slowest = slowest.max(worked() - begin);
        for (at, old) in undo.into_iter().rev() {
            saved.bytes_mut()[at..at + 8].copy_from_slice(&old);
        }
    }
    eprintln!("usual {usual:?}, slowest {slowest:?}, {lost} of 150 without a kernel");
    assert!(lost < 150, "nothing was damaged that mattered, or everything");
    assert!(slowest < usual * 20 + Duration::from_secs(1), "{slowest:?}, usually {usual:?}");
    let again = insight::count(&Kernel::find(&saved).expect("a kernel").classify().uses);
    assert_eq!(again, whole, "the damage was undone");
}
