//! Frames that guests need for the same work, under each way to save memory.
//!
//! ```text
//!   guests under a load, in a control group that stands for the host -> merging comes to rest
//!     -> their work in a second, and their frames            (the first arm's work is what all arms are held to)
//!     -> the kernel takes a tenth of the frames back -> work and frames again -> ...
//!     -> the least frames with nine tenths of that work
//! ```
//!
//! | arm | merger | swap |
//! |---|---|---|
//! | `zram` | none | zram |
//! | `fold+zram` | Pagefold | zram |
//! | `ksmd+zram` | ksmd: at its highest rate until it rests, then at the kernel's usual one | zram |
//! | `reclaim` | none | none: files' pages alone are taken back |
//!
//! Frames are those of the control group, service and pool included, those that zram takes, and those that ksmd takes for its items.

use super::load::{Load, Rates};
use crate::balance::{Rig, SmallHost, group};
use crate::guardian::Guardian;
use crate::ksm::ksmd::Ksmd;
use crate::ksm::merger::Merger;
use crate::serving::Serving;
use crate::zram::{self, Zram};
use anyhow::Context;
use cli::say;
use lab::{Guest, Image};
use page::PAGE_BYTES;
use serde::Serialize;
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// The arms, in the order in which they run.
pub const ARMS: [&str; 4] = ["zram", "fold+zram", KSMD, "reclaim"];
/// The arm of ksmd.
pub const KSMD: &str = "ksmd+zram";
/// RAM of each guest: 512 MiB.
const RAM: u64 = 512 << 20;
/// Least size of a mapping that is a guest's RAM.
const LEAST_RAM: u64 = 256 << 20;
/// Part of the guests' page frames that the kernel is asked to reclaim at a time: 1/10.
const STEP_PART: u64 = 10;
/// Share of the first arm's work that guests must still do: 9/10.
const SAME_WORK: f64 = 0.9;
/// Time under load before anything is measured: 20 s.
const WARM: Duration = Duration::from_secs(20);
/// Merging has settled when it has not grown for 10 s. It is waited for at most 2 min.
const REST: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(120));
/// Growth of the merged pages, or reclaimed frames, of less than this part count as none: 1/100.
const NO_GROWTH: u64 = 100;
/// Pause between reclaiming memory and the next measurement: 3 s.
const SETTLE: Duration = Duration::from_secs(3);
/// ksmd's knobs for the kernel's default rate.
const USUAL_RATE: [(&str, &str); 2] = [("pages_to_scan", "100"), ("sleep_millisecs", "20")];

/// Number of guests, and length of measurements.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Guests.
    pub guests: usize,
    /// Length of a measurement.
    pub during: Duration,
}

/// Work and page frames in one measurement.
#[derive(Clone, Debug, Serialize)]
struct Point {
    /// Frames of all guests together, in pages.
    frames: u64,
    /// Work in a second: see `load.rs`.
    rate: f64,
    /// Pages of the host that are in swap.
    swapped: u64,
    #[serde(skip)]
    rates: Rates,
}

/// Figures of an arm under a load.
#[derive(Clone, Debug, Serialize)]
pub struct Figures {
    /// `zram`, `fold+zram`, `ksmd+zram` or `reclaim` (no swap).
    name: &'static str,
    /// `idle`, `oltp`, `web` or `mixed`.
    load: &'static str,
    /// Least frames with which all guests together do nine tenths of the work, in pages.
    frames: u64,
    /// Their work in a second then.
    rate: f64,
    /// Whether that is nine tenths of the first arm's work. Without that, frames are not to be compared.
    is_same_work: bool,
    /// Processes of the control group that were killed for want of memory.
    kills: u64,
    /// Each measurement, from all frames to those with which the work was less.
    points: Vec<Point>,
}

impl Figures {
    /// The figures as a line of text.
    pub fn text(&self) -> String {
        let Self { name, load, frames, rate, kills, is_same_work, .. } = self;
        let less = if *is_same_work { "" } else { ", which is less than the first arm's" };
        let first = self.points.first().map_or(0, |point| point.frames);
        let [frames, first] = [frames, &first].map(|frames| page::pages_to_bytes(*frames) >> 20);
        format!("{load:<6} {name:<10} {frames:>5} MiB of {first:>5} with {rate:.1} a second{less}; {kills} killed")
    }
}

/// Measures these arms under these loads, one after the other.
///
/// # Errors
/// The host lacks what an arm needs, or a guest ends.
pub fn run(
    (arms, loads): (&[&'static str], &[Load]),
    sizes: Sizes,
    dir: &Path,
    guardian: &mut Guardian,
) -> anyhow::Result<Vec<Figures>> {
    if arms.iter().any(|arm| arm.contains("zram")) {
        zram::check()?;
    }
    let mut all = Vec::new();
    for load in loads {
        let mut wanted = None;
        for arm in ARMS.into_iter().filter(|arm| arms.contains(arm)) {
            say!("pagefold: park: {} guests, {}: {arm}", sizes.guests, load.name());
            let dir = dir.join(format!("{}-{arm}", load.name()));
            DirBuilder::new().mode(0o711).create(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
            let figures = Arm::start(arm, *load, sizes, &dir, guardian)?.measure(&mut wanted)?;
            say!("pagefold: park: {}", figures.text());
            all.push(figures);
        }
    }
    Ok(all)
}

/// Guests under a load, in one arm: a way to save their memory.
struct Arm {
    name: &'static str,
    load: Load,
    during: Duration,
    guests: Vec<Guest>,
    rig: Rig,
    serving: Option<Serving>,
    ksmd: Option<Ksmd>,
    zram: Option<Zram>,
    host: SmallHost,
}

impl Arm {
    fn start(
        name: &'static str,
        load: Load,
        sizes: Sizes,
        dir: &Path,
        guardian: &mut Guardian,
    ) -> anyhow::Result<Self> {
        let bytes = RAM * (sizes.guests as u64 + 1);
        let zram = if name.contains("zram") { Some(Zram::on(bytes, guardian)?) } else { None };
        let host = SmallHost::make(&format!("{}-{name}", load.name()), guardian)?;
        host.swap(zram.is_some())?;
        let (serving, rig, guests) = host.inside(|| {
            let config = format!("[[group]]\nname = '{}'\n", group());
            let folds = name.starts_with("fold");
            let serving = if folds { Some(Serving::start(dir, &config, guardian)?) } else { None };
            let mut rig = match &serving {
                Some(serving) => Rig::folded(dir, serving, (RAM, RAM), guardian)?,
                None => Rig::new(dir, guardian)?,
            };
            rig.set_ram(RAM);
            rig.set_image(Image::Debian);
            let guests = rig.up(sizes.guests, &[])?;
            Ok((serving, rig, guests))
        })?;
        load.begin(&guests)?;
        let mut arm = Self { name, load, during: sizes.during, host, guests, rig, serving, ksmd: None, zram };
        std::thread::sleep(WARM);
        if name == KSMD {
            let mut ksmd = Ksmd::new(false)?;
            let found: Vec<(u32, u64)> = arm.guests.iter().filter_map(|guest| Some((guest.pid?, LEAST_RAM))).collect();
            ksmd.meet(&found)?;
            ksmd.on()?;
            arm.ksmd = Some(ksmd);
        }
        arm.wait_for_rest()?;
        Ok(arm)
    }

    /// Number of pages that the arm's merger saves; 0 in arms without a merger.
    fn merged(&self) -> anyhow::Result<u64> {
        if let Some(serving) = &self.serving {
            let saved = serving.show(&group())?.report.savings.saved_bytes();
            return Ok(u64::try_from(saved).unwrap_or(0) / PAGE_BYTES as u64);
        }
        self.ksmd.as_ref().map_or(Ok(0), |ksmd| Ok(ksmd.progress()?.merged_pages))
    }

    fn wait_for_rest(&self) -> anyhow::Result<()> {
        if self.serving.is_none() && self.ksmd.is_none() {
            return Ok(());
        }
        let (begin, mut since, mut most) = (Instant::now(), Instant::now(), 0);
        while since.elapsed() < REST.0 && begin.elapsed() < REST.1 {
            let merged = self.merged()?;
            if merged > most + most / NO_GROWTH {
                (most, since) = (merged, Instant::now());
            }
            std::thread::sleep(Duration::from_secs(1));
        }
        say!(
            "pagefold: park: {} MiB are merged after {} s",
            page::pages_to_bytes(most) >> 20,
            begin.elapsed().as_secs()
        );
        if self.ksmd.is_some() {
            USUAL_RATE.into_iter().try_for_each(|(knob, value)| act::set_ksm(knob, value))?;
        }
        Ok(())
    }

    /// Measures the guests' work in a second, and then counts the page frames that they need for it.
    fn point(&self) -> anyhow::Result<Point> {
        let rates = self.load.rates(&self.guests, self.during)?;
        let zram = self.zram.as_ref().map_or(Ok(0), Zram::used_bytes)?;
        let items = self.ksmd.as_ref().map_or(Ok(0), |ksmd| ksmd.account().map(|account| account.metadata_bytes))?;
        let frames = (self.host.held_bytes()? + zram + items) / PAGE_BYTES as u64;
        let swapped = host::total_swap_bytes().saturating_sub(host::free_swap_bytes()) / PAGE_BYTES as u64;
        let point = Point { frames, rate: rates.iter().sum(), swapped, rates };
        let Point { rate, .. } = point;
        say!("pagefold: park: {}: {frames} frames, {swapped} pages in swap, {rate:.1} a second", self.name);
        Ok(point)
    }

    /// Has the kernel reclaim memory, step by step, until guests no longer do nine tenths of the work that is `wanted`,
    /// or reclaiming frees nothing more. If `wanted` is empty, it is set: this is the first arm.
    fn measure(mut self, wanted: &mut Option<Rates>) -> anyhow::Result<Figures> {
        let first = self.point()?;
        let wanted = *wanted.get_or_insert(first.rates);
        let is_same = |point: &Point| point.rates.iter().zip(wanted).all(|(rate, wanted)| *rate >= wanted * SAME_WORK);
        let step = page::pages_to_bytes(first.frames / STEP_PART);
        let is_same_work = is_same(&first);
        let (mut best, mut points) = (first.clone(), vec![first]);
        loop {
            self.host.reclaim(step)?;
            std::thread::sleep(SETTLE);
            let mut point = self.point()?;
            if !is_same(&point) {
                // The work may be less for a moment only, while guests read back what was reclaimed: it is measured
                // once more.
                point = self.point()?;
            }
            let (keeps_up, gives) = (is_same(&point), point.frames + point.frames / NO_GROWTH < best.frames);
            if keeps_up && gives {
                best = point.clone();
            }
            points.push(point);
            if !keeps_up || !gives {
                break;
            }
        }
        let kills = self.host.kills();
        self.end()?;
        let (name, load, Point { frames, rate, .. }) = (self.name, self.load.name(), best);
        Ok(Figures { name, load, frames, rate, is_same_work, kills, points })
    }

    fn end(&mut self) -> anyhow::Result<()> {
        self.rig.down()?;
        if let Some(mut ksmd) = self.ksmd.take() {
            ksmd.off()?;
        }
        self.serving.as_mut().map_or(Ok(()), Serving::end)?;
        self.zram = None;
        Ok(())
    }
}
