//! Start storms: several guests are wanted at the same time, and are started in one way until the last has answered.

use super::added::{self, Added};
use super::scene::{Guests, Scene};
use crate::guardian::Guardian;
use crate::ksm::folding::{self, Folding as Service};
use crate::ksm::merger::Merger;
use crate::median::median;
use anyhow::Context;
use audit::contents::Places;
use cli::say;
use host::ProcessStat;
use lab::{Cache, Image, Lab, Spec};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// The arm of containers. They are not made of a VM's image.
const CONTAINER: &str = "container";
/// All arms.
const ARMS: [&str; 4] = ["boot", "restore", "clone", CONTAINER];

/// The times of one start storm.
#[derive(Serialize)]
pub struct Storm {
    /// Image of the guests.
    pub image: Image,
    /// `boot`, `restore`, `clone` or `container` (on a directory that all share).
    pub arm: &'static str,
    /// Number of guests.
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
        storms.push(one(scene, arm, n, &lab, |_| Ok(()))?.0);
    }
    Ok(storms)
}

/// Starts `n` guests in one way. `look` gets the pids of the VMs while they run; of containers it gets none, because
/// they have ended by then.
fn one<T>(
    scene: &Scene,
    arm: &str,
    n: u32,
    lab: &Path,
    look: impl FnOnce(&[u32]) -> anyhow::Result<T>,
) -> anyhow::Result<(Storm, T)> {
    let arm = ARMS.into_iter().find(|known| *known == arm).with_context(|| format!("no guest is started by {arm}"))?;
    let guests = match arm {
        CONTAINER => return Ok((containers(n, lab)?, look(&[])?)),
        "boot" => scene.booted_at_once(n)?,
        "restore" => scene.restored_at_once(n)?,
        _ => scene.cloned("storm-%d", n, None)?,
    };
    let storm = storm(scene.image(), arm, n, &guests);
    let seen = look(&guests.pids())?;
    Ok((storm, seen))
}

/// A template, for callers outside this bench that measure storms.
pub struct Storms {
    scene: Scene,
    lab: PathBuf,
}

impl Storms {
    /// Makes the template, in a directory that is kept by the guardian.
    ///
    /// # Errors
    /// The guest does not come up.
    pub fn prepare(image: Image, dir: &Path, guardian: &mut Guardian) -> anyhow::Result<Self> {
        let lab = dir.join("lab");
        guardian.keep_lab(&lab)?;
        guardian.keep_machines(dir)?;
        Ok(Self { scene: Scene::prepare(image, dir)?, lab })
    }

    /// Starts so many guests at the same time in one way: boot, restore, clone or container. `look` is told the pids of VMs.
    ///
    /// # Errors
    /// A guest does not come up.
    pub fn run<T>(
        &self,
        way: &str,
        n: u32,
        look: impl FnOnce(&[u32]) -> anyhow::Result<T>,
    ) -> anyhow::Result<(Storm, T)> {
        one(&self.scene, way, n, &self.lab, look)
    }

    /// Starts so many clones at the same time that a service folds meanwhile. Its processor time is in the storm's. Returns also the
    /// pages that map slots when all have answered.
    ///
    /// # Errors
    /// A guest does not come up, or the service does not start.
    pub fn run_folded(&self, n: u32, dir: &Path, guardian: &mut Guardian) -> anyhow::Result<(Storm, u64)> {
        let mut service = Service::start(dir, true, guardian)?;
        service.set(folding::folds())?;
        let folding = self.scene.folding(service.dir())?;
        // The template's memory is loaded before, as for clones that are not folded.
        let first = self.scene.cloned("first-folded", 1, folding.as_ref())?;
        let cpu = service.cpu_s()?;
        let guests = self.scene.cloned("storm-%d", n, folding.as_ref())?;
        let mut storm = storm(self.scene.image(), super::FOLDED, n, &guests);
        storm.cpu_s += service.cpu_s()? - cpu;
        let own = [service.own_pids()?, first.pids()].concat();
        let folded = Places::of(&guests.pids(), &own)?.taken().folded_places;
        drop((guests, first));
        service.off()?;
        Ok((storm, folded))
    }

    /// Memory that `more` further guests add to a first one, in an arm of `bench start --work`.
    ///
    /// # Errors
    /// There is no such arm, or a guest ends.
    pub fn added(&self, arm: &str, more: u32, dir: &Path, guardian: &mut Guardian) -> anyhow::Result<Added> {
        anyhow::ensure!(super::memory::ARMS.contains(&arm), "there is no arm {arm}");
        added::run(&self.scene, arm, more, (dir, guardian))
    }

    /// RAM of a guest.
    pub const fn memory_bytes(&self) -> u64 {
        self.scene.memory_bytes()
    }
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
