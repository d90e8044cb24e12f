//! Reference counts of pages of our own: free, lent to a pipe, and of frames that do not exist.

use super::*;
use std::time::{Duration, Instant};

fn open() -> Option<ReferenceCounts> {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: reference counts are shown to root only");
        return None;
    }
    Some(ReferenceCounts::open().unwrap())
}

fn check(counts: &mut ReferenceCounts, frames: &[Pfn]) -> Vec<Held> {
    let mut held = vec![Held::Unknown; frames.len()];
    counts.check(Kind::Private, frames, &mut held).unwrap();
    held
}

#[test]
fn page_lent_to_pipe_is_referenced_until_given_back() {
    let Some(mut counts) = open() else { return };
    let pages = OwnPages::new(ReferenceCounts::BATCH).unwrap();
    let frames = pages.frames().unwrap();
    let began = Instant::now();
    while check(&mut counts, &frames).iter().any(|held| *held != Held::Free) {
        // Fresh pages are on a list of this processor until it is full; these pages fill it.
        drop(OwnPages::new(64).unwrap());
        assert!(began.elapsed() < Duration::from_secs(10), "pages of our own stay referenced");
    }
    let pipe = Pipe::new().unwrap();
    let lent = [3, 8, 9, 200, 511];
    for page in lent {
        pages.lend(page, &pipe).unwrap();
    }
    let held = check(&mut counts, &frames);
    let found: Vec<usize> = (0..held.len()).filter(|&n| held[n] == Held::Referenced(1)).collect();
    assert_eq!(found, lent, "{held:?}");
    drop(pipe);
    assert!(check(&mut counts, &frames).iter().all(|held| *held == Held::Free));
}

#[test]
fn invalid_frames_are_unknown() {
    let Some(mut counts) = open() else { return };
    let frames = [Pfn(0), Pfn(1 << 33), Pfn(1 << 34), Pfn(u64::MAX)];
    assert_eq!(check(&mut counts, &frames), [Held::Unknown; 4]);
    assert_eq!(check(&mut counts, &[]), []);
}
