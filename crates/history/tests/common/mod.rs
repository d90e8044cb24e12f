//! A file in a directory, and figures for it.

#![allow(dead_code, reason = "each test uses a part")]

use api::history::{History, Wanted};
use history::fields::{OF_GROUP, OF_MEMBER};
use history::read::answer;
use history::record::Recorder;
use history::sample::Sampled;
use history::store::Store;
use std::path::Path;

/// Bytes of the file, at most.
pub const MOST_BYTES: u64 = 64 << 20;
/// A moment at which a day, and a window, begin: 2027-01-15.
pub const BEGIN: i64 = 1_800_000_000 / 86_400 * 86_400;

/// Numbers from 0 up to a bound, always the same.
pub fn random(state: &mut u64, below: u64) -> i64 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    ((*state >> 33) % below).cast_signed()
}

/// Figures of one group and its members, all of them of this value.
pub fn same(group: &str, members: &[&str], value: i64) -> Sampled {
    let of = |member: &str, fields: usize| (group.to_owned(), member.to_owned(), vec![Some(value); fields]);
    let members = members.iter().map(|member| of(member, OF_MEMBER.len()));
    members.chain([of("", OF_GROUP.len())]).collect()
}

pub fn open(path: &Path, now: i64) -> Recorder {
    Recorder::open(path, MOST_BYTES, now).expect("open the file")
}

/// All that a file has of one figure of a group, or of a member.
pub fn read(path: &Path, member: &str, figure: &str, step: i64) -> History {
    let store = Store::read(path).expect("read the file");
    let wanted = Wanted {
        member: Some(member.to_owned()),
        figure: Some(figure.to_owned()),
        since: Some(BEGIN - (1 << 30)),
        until: Some(BEGIN + (1 << 30)),
        step: Some(step),
        ..Wanted::default()
    };
    answer(&store, &wanted, BEGIN, None).expect("an answer")
}

/// The points of the only series.
pub fn points(history: &History) -> Vec<[i64; 2]> {
    history.series.first().map_or_else(Vec::new, |series| series.points.clone())
}
