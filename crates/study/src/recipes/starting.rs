//! `agarwal-t5.1`, `sonone-fig13`, `kloster-clone`: guests that are booted, restored, cloned, or containers. The template and each way to
//! start its guest are those of `pagefold bench start`.

use crate::data::Length;
use crate::plan::Planned;
use crate::record::{MERGED, Measured};
use crate::rig::{Rig, mb, pause};
use bench::private_ram_bytes;
use lab::Image;
use page::PAGE_BYTES;
use std::time::{Duration, Instant};

/// The arm of clones that a service folds.
const FOLDED: &str = "clone-fold";
/// Numbers of guests that are started at once.
const STORMS: [u32; 4] = [1, 2, 5, 10];
/// Seconds since a clone's answer at which the memory is counted that the clone has written: of the short form.
const SHORT_WATCH: [u64; 2] = [0, 10];
/// Seconds since a clone's answer at which that memory is counted, in the full form.
const FULL_WATCH: [u64; 4] = [0, 10, 60, 300];
/// Number of guests that are started in addition to a first one, in the short form and in the full one.
const MORE: [u32; 2] = [2, 7];

/// The recipe of `agarwal-t5.1`: the time until one guest has answered; of a clone, also the memory that it has written
/// by then and later.
pub fn one(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    let watch = if planned.length == Length::Full { &FULL_WATCH[..] } else { &SHORT_WATCH[..] };
    let (storms, ..) = rig.storms(Image::Debian)?;
    let ram_bytes = storms.memory_bytes() as f64;
    let (storm, written) = storms.run(&planned.arm, 1, |pids| {
        let (begin, mut written) = (Instant::now(), Vec::new());
        for seconds in watch.iter().filter(|_| planned.arm == "clone") {
            pause(Duration::from_secs(*seconds).saturating_sub(begin.elapsed()))?;
            written.push((*seconds, pids.iter().map(|pid| private_ram_bytes(*pid)).sum::<u64>() as f64));
        }
        Ok(written)
    })?;
    let mut measured = Measured::default();
    measured.put("answer_s", storm.all_answered_s);
    measured.put_at("answer_by_way_s", &planned.arm, storm.all_answered_s);
    measured.put("cpu_s", storm.cpu_s);
    for (seconds, bytes) in written {
        measured.put_at("written_mb", seconds, mb(bytes / PAGE_BYTES as f64));
        measured.put_at("written_share", seconds, bytes / ram_bytes);
    }
    Ok(measured)
}

/// The recipe of `sonone-fig13`: the time until several guests that are started at once have all answered.
pub fn storm(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    let (storms, dir, guardian) = rig.storms(Image::Tiny)?;
    let (mut measured, mut times, mut merged) = (Measured::default(), Vec::new(), 0);
    for n in STORMS {
        let storm = if planned.arm == FOLDED {
            let (storm, folded) = storms.run_folded(n, dir, guardian)?;
            merged = folded;
            storm
        } else {
            storms.run(&planned.arm, n, |_| Ok(()))?.0
        };
        measured.put_at("all_s", n, storm.all_answered_s);
        measured.put_at("each_s", n, storm.each_p50_s);
        measured.put_at("cpu_s", n, storm.cpu_s);
        measured.put_at("cpu_s_each", n, storm.cpu_s / f64::from(n));
        times.push(storm.all_answered_s);
    }
    if planned.arm == FOLDED {
        measured.put(MERGED, merged as f64);
    }
    measured.put("two_over_one", times[1] / times[0]);
    measured.put("ten_over_two", times[3] / times[1]);
    Ok(measured)
}

/// The recipe of `kloster-clone`: the memory that further guests take in addition to a first one.
pub fn added(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    let more = MORE[usize::from(planned.length == Length::Full)];
    let (storms, dir, guardian) = rig.storms(Image::Debian)?;
    let added = storms.added(&planned.arm.replace('-', "+"), more, dir, guardian)?;
    let mut measured = Measured::default();
    measured.put("at_first_mb", mb(added.at_first));
    measured.put("after_work_mb", mb(added.after_work));
    for (when, pages) in [("at first", added.at_first), ("after a build", added.after_work)] {
        measured.put_at("added_mb", when, mb(pages));
    }
    measured.put(MERGED, added.merged_pages as f64);
    Ok(measured)
}
