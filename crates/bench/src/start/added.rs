//! Memory that further guests take in addition to that of a first one, by page frames: right after their start, and
//! after all guests have done the same work.
//!
//! ```text
//!   first guest -> works -> rest -> counted -> further guests -> rest -> counted -> they work -> rest -> counted
//!                                      `------- added at first --------'                            |
//!                                      `------- added after the work ------------------------------'
//! ```
//!
//! The arms are those of `bench start --work` ([`memory`]). The first guest has worked before the others come: what they
//! add after their work is not compared with an idle guest.

use super::memory::{self, Side};
use super::scene::{Guests, Scene};
use crate::guardian::Guardian;
use crate::workload::{BUILD_STEPS, COUNT_SCRIPT, SOURCES_SCRIPT, build_script, in_background};
use anyhow::ensure;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Pause before each count, in which mergers merge: 12 s.
const REST: Duration = Duration::from_secs(12);
/// Interval between two checks whether a guest has done its work.
const LOOK: Duration = Duration::from_millis(300);
/// Longest time of the work: 180 s.
const PATIENCE: Duration = Duration::from_secs(180);

/// Page frames that further guests take, and pages that are merged.
#[derive(Clone, Copy, Debug)]
pub struct Added {
    /// Frames that each of them adds before it has worked.
    pub at_first: f64,
    /// Frames that each of them adds after the same work in all.
    pub after_work: f64,
    /// Pages that the merger saves in the end. Those that clones share because they were never written do not count.
    pub merged_pages: u64,
}

/// Starts a first guest and `more` further ones in an arm, has each build a part of Perl's library, and counts.
///
/// # Errors
/// A guest does not come up, or does not do its work.
pub fn run(scene: &Scene, arm: &str, more: u32, (dir, guardian): (&Path, &mut Guardian)) -> anyhow::Result<Added> {
    let mut side = Side::start(arm, dir, guardian)?;
    let folding = side.folding(scene)?;
    let first = memory::started(scene, arm, 1..=1, folding.as_ref())?;
    let template = Scene::memory_of(&first);
    side.meet(&first.pids())?;
    work(&first)?;
    sleep(REST);
    let (alone, _) = side.taken(&first.pids(), template)?;
    let others = memory::started(scene, arm, 2..=more + 1, folding.as_ref())?;
    let pids = [first.pids(), others.pids()].concat();
    side.meet(&pids)?;
    sleep(REST);
    let (at_first, _) = side.taken(&pids, template)?;
    work(&others)?;
    sleep(REST);
    let (after_work, merged_pages) = side.taken(&pids, template)?;
    drop((first, others));
    side.off()?;
    let each = |frames: u64| (frames as f64 - alone as f64) / f64::from(more);
    Ok(Added { at_first: each(at_first), after_work: each(after_work), merged_pages })
}

/// Has all guests do the same build at the same time, and waits until all have done it.
fn work(guests: &Guests) -> anyhow::Result<()> {
    // A guest may run the same request twice.
    let build = in_background(&format!("{SOURCES_SCRIPT}; {}", build_script(BUILD_STEPS / 2)));
    let once = format!("if mkdir /run/built 2>/dev/null; then {build} fi");
    let dirs = guests.dirs();
    dirs.iter().try_for_each(|dir| start::measure::run(dir, &once).map(drop))?;
    let begin = Instant::now();
    for dir in &dirs {
        while start::measure::run(dir, COUNT_SCRIPT)?.trim().parse::<u32>().unwrap_or(0) < BUILD_STEPS / 2 {
            ensure!(begin.elapsed() < PATIENCE, "a guest has not done its build within {} s", PATIENCE.as_secs());
            sleep(LOOK);
        }
    }
    Ok(())
}
