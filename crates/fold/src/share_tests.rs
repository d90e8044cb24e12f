//! All members of a group share the table of pages. A member that reports pages scattered over its address space gets
//! no more chunks of the table than its process has page frames, and a small share beyond.

use crate::plan::{Planner, Policy};
use crate::pool::Pool;
use crate::table::{CHUNK_PAGES, MemberId};
use page::{Fingerprint, HostVirt};
use wire::RestedRun;

/// Reports one page of each of these chunks, with a content of its own, and returns the number of chunks that the
/// member has then.
fn report(planner: &mut Planner, member: MemberId, chunks: std::ops::Range<u64>) -> usize {
    for chunk in chunks {
        let run = RestedRun { start: HostVirt((chunk * CHUNK_PAGES) << 12), pages: 1, huge: false };
        planner.rested(member, &[run], &[Fingerprint(1_000_000 * (u64::from(member.0) + 1) + chunk)]);
    }
    planner.place(member).chunks.len()
}

#[test]
fn member_has_as_many_chunks_as_frames_and_leaves_room_to_others() {
    let policy =
        Policy { folds: true, intra_member_only: false, zeros: true, split_huge_at: None, index_pages: 1 << 16 };
    let mut planner = Planner::new(Pool::new("acme", 1 << 10), policy);
    let (liar, honest) = (planner.join(), planner.join());
    planner.place(liar).frames = 100;
    planner.place(honest).frames = 2000;
    // 3072 chunks are for all, of which a 64th is for each.
    assert_eq!(report(&mut planner, liar, 0..10_000), 100 + 48);
    assert!(planner.place(liar).missed, "it is to report all again later");
    assert_eq!(report(&mut planner, honest, 0..2000), 2000);
    assert!(!planner.place(honest).missed);
    planner.place(liar).mapped = 50;
    assert_eq!(report(&mut planner, liar, 0..10_000), 100 + 48 + 50, "pages that it shares have no frames of its own");
}
