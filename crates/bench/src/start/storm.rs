//! Guests that are wanted at the same time: some of them in each way, until the last has answered.

use super::scene::{Guests, Scene};
use crate::guardian::Guardian;
use crate::median::median;
use cli::say;
use host::ProcessStat;
use lab::{Cache, Image, Lab, Spec};
use serde::Serialize;
use std::path::Path;
use std::time::Instant;

/// The arm of containers, which are of no image of a VM's.
const CONTAINER: &str = "container";
/// All arms.
const ARMS: [&str; 4] = ["boot", "restore", "clone", CONTAINER];

/// A storm.
#[derive(Serialize)]
pub struct Storm {
    pub image: Image,
    pub arm: &'static str,
    pub n: u32,
    /// Until the last has answered.
    pub all_answered_s: f64,
    /// Median time of one, from the beginning of its start to its answer.
    pub each_p50_s: f64,
    /// Processor time of all their processes until then.
    pub cpu_s: f64,
}

/// Runs a storm of each size in each way.
///
/// # Errors
/// A guest does not come up.
pub fn run(scene: &Scene, sizes: &[u32], dir: &Path, guardian: &mut Guardian) -> anyhow::Result<Vec<Storm>> {
    let lab = dir.join("lab");
    guardian.keep_lab(&lab)?;
    let mut storms = Vec::new();
    for (n, arm) in sizes.iter().flat_map(|n| ARMS.map(|arm| (*n, arm))) {
        say!("pagefold: {}: storm of {n}: {arm}", scene.name());
        let guests = match arm {
            CONTAINER => {
                storms.push(containers(n, &lab)?);
                continue;
            }
            "boot" => scene.booted_at_once(n)?,
            "restore" => scene.restored_at_once(n)?,
            _ => scene.cloned("storm-%d", n, None)?,
        };
        storms.push(storm(scene.image(), arm, n, &guests));
    }
    Ok(storms)
}

fn storm(image: Image, arm: &'static str, n: u32, guests: &Guests) -> Storm {
    let (all_answered_s, each_p50_s) = (guests.all_answered_s, median(&guests.each_s));
    Storm { image, arm, n, all_answered_s, each_p50_s, cpu_s: guests.cpu_s_each() * f64::from(n) }
}

/// Starts containers, all at the same time. Their first program is busybox's, on a directory that they share.
fn containers(n: u32, dir: &Path) -> anyhow::Result<Storm> {
    let (cache, image) = (Cache::open(&lab::cache_dir()?)?, Image::LxcShared);
    let lab = Lab::open(dir)?;
    let begin = Instant::now();
    let guests = lab.up(&Spec { guests: n as usize, ..Spec::new(image) }, &cache, &|_| {})?;
    let all_answered_s = begin.elapsed().as_secs_f64();
    let ready: Vec<f64> = guests.iter().filter_map(|guest| guest.ready_seconds).collect();
    let ticks = guests.iter().flat_map(lab::Guest::pids).filter_map(|pid| Some(ProcessStat::read(pid).ok()?.cpu_ticks));
    let cpu_s = ticks.sum::<u64>() as f64 / rustix::param::clock_ticks_per_second() as f64;
    lab.down()?;
    Ok(Storm { image, arm: CONTAINER, n, all_answered_s, each_p50_s: median(&ready), cpu_s })
}
