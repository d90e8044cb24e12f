//! The guests' frames over time, while they work.

use super::account::{Frames, mean};
use super::curve::Curve;
use super::measure::Scene;
use serde::Serialize;
use serde_json::Value;
use std::time::{Duration, Instant};

/// Interval between two points of the curve of merged pages.
const EVERY: Duration = Duration::from_secs(1);
/// Interval between two readings of all page tables.
const TABLES_EVERY: Duration = Duration::from_secs(2);
/// Interval between two counts of all frames by content: 15 s. A count takes the better part of a second of processor
/// time.
const CONTENTS_EVERY: Duration = Duration::from_secs(15);

/// Frames over time. Means are over the second half.
#[derive(Clone, Debug, Serialize)]
pub struct FramesOverTime {
    /// Mean of the net savings, in frames, by page tables.
    pub mean_saved: f64,
    /// Mean of the frames that guests and pool take.
    pub mean_resident: f64,
    /// Frames and net savings by page tables.
    saved_over_time: Vec<Saved>,
    /// Where the frames are: the mean of the counts, with their fields but for `seconds`.
    pub frames: Value,
    /// The counts of the second half; the last one is at the end.
    frames_over_time: Vec<Counted>,
}

impl FramesOverTime {
    fn of(saved_over_time: Vec<Saved>, frames_over_time: Vec<Counted>, half: f64) -> Self {
        let later: Vec<&Saved> = saved_over_time.iter().filter(|saved| saved.seconds >= half).collect();
        let mean_of =
            |of: fn(&Saved) -> f64| later.iter().map(|saved| of(saved)).sum::<f64>() / later.len().max(1) as f64;
        let counts = frames_over_time.iter().map(|counted| serde_json::to_value(&counted.frames).unwrap_or_default());
        Self {
            mean_saved: mean_of(|saved| saved.saved as f64),
            mean_resident: mean_of(|saved| saved.resident as f64),
            frames: mean(&counts.collect::<Vec<_>>()),
            saved_over_time,
            frames_over_time,
        }
    }
}

/// Frames and savings by page tables.
#[derive(Clone, Copy, Debug, Serialize)]
struct Saved {
    /// Time since the work began.
    seconds: f64,
    /// Frames that guests and pool take.
    resident: u64,
    /// Net savings in frames.
    saved: i64,
}

/// A count of all frames.
#[derive(Clone, Debug, Serialize)]
struct Counted {
    /// Time since the work began.
    seconds: f64,
    #[serde(flatten)]
    frames: Frames,
}

impl Counted {
    fn now(scene: &Scene, begin: Instant) -> anyhow::Result<Self> {
        let seconds = begin.elapsed().as_secs_f64();
        Ok(Self { seconds, frames: Frames::of(scene.merger.as_ref(), &scene.processes)? })
    }
}

/// Follows the merger for `time`: its progress and the page tables all the time, and the contents of all frames in the
/// second half.
///
/// # Errors
/// A guest has ended, or the merger does not answer.
pub fn follow(
    scene: &Scene,
    begin: Instant,
    cpu_before: f64,
    time: Duration,
) -> anyhow::Result<(Curve, FramesOverTime)> {
    let (mut curve, mut saved, mut frames) = (Curve::default(), Vec::new(), Vec::new());
    let (mut look_at, mut count_at) = (Duration::ZERO, time / 2);
    while begin.elapsed() < time {
        curve.add(begin, cpu_before, scene.merger.progress()?);
        if begin.elapsed() >= look_at {
            look_at += TABLES_EVERY;
            let (seconds, taken) = (begin.elapsed().as_secs_f64(), scene.taken()?);
            let net = scene.merger.savings(&taken)?.saved_bytes() >> page::PAGE_SHIFT;
            saved.push(Saved { seconds, resident: taken.frames, saved: net });
        }
        if begin.elapsed() >= count_at {
            count_at += CONTENTS_EVERY;
            frames.push(Counted::now(scene, begin)?);
        }
        std::thread::sleep(EVERY);
    }
    curve.add(begin, cpu_before, scene.merger.progress()?);
    frames.push(Counted::now(scene, begin)?);
    Ok((curve, FramesOverTime::of(saved, frames, time.as_secs_f64() / 2.0)))
}
