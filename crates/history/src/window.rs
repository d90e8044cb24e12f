//! A window: the samples of 16 minutes, which are kept in memory until they are written as blocks.
//!
//! Windows begin at multiples of their length, so that blocks of 10 s steps overlap only if the clock was set back.

use crate::block::{Moment, Samples};
use std::collections::BTreeMap;

/// Seconds between two samples.
pub const STEP_S: i64 = 10;
/// Number of samples of a series in a window: 96, which are 16 minutes.
pub const SAMPLES: usize = 96;
/// Length of a window, in seconds.
pub const WINDOW_S: i64 = STEP_S * SAMPLES as i64;
/// Stands for a sample whose value is not known. No figure has this value.
const ABSENT: i64 = i64::MIN;

/// The samples of one window, 8 bytes each.
#[derive(Debug)]
pub struct Window {
    /// The time at which the window begins, in seconds since 1970.
    pub start: i64,
    /// The values of each owner by its number: [`SAMPLES`] values for each field, one field after the other.
    values: BTreeMap<i64, Vec<i64>>,
}

/// The content of a block: its owner, the time of its first sample, and its series.
pub type Series = (i64, i64, Vec<(u8, Samples)>);

/// The time at which the window of a moment begins.
pub const fn start_of(at: i64) -> i64 {
    at.div_euclid(WINDOW_S) * WINDOW_S
}

impl Window {
    /// An empty window for a moment and those around it.
    pub const fn of(at: i64) -> Self {
        Self { start: start_of(at), values: BTreeMap::new() }
    }

    /// Adds the figures of a moment in this window. They replace figures of the same ten seconds.
    pub fn add(&mut self, at: i64, moment: &Moment) {
        let Some(place) = usize::try_from((at - self.start) / STEP_S).ok().filter(|place| *place < SAMPLES) else {
            return;
        };
        for (owner, figures) in moment {
            let values = self.values.entry(*owner).or_default();
            if values.len() < figures.len() * SAMPLES {
                values.reserve_exact(figures.len() * SAMPLES - values.len());
                values.resize(figures.len() * SAMPLES, ABSENT);
            }
            for (sample, value) in values.iter_mut().skip(place).step_by(SAMPLES).zip(figures) {
                *sample = value.unwrap_or(ABSENT);
            }
        }
    }

    /// The owners that have samples.
    pub fn owners(&self) -> impl Iterator<Item = i64> {
        self.values.keys().copied()
    }

    /// The content of a block for each owner, from its first known sample to its last.
    pub fn blocks(&self) -> impl Iterator<Item = Series> {
        self.values.iter().filter_map(|(owner, values)| {
            let fields = || values.chunks(SAMPLES);
            let first = fields().filter_map(|field| field.iter().position(|value| *value != ABSENT)).min()?;
            let last = fields().filter_map(|field| field.iter().rposition(|value| *value != ABSENT)).max()?;
            let samples = |field: &[i64]| {
                field[first..=last]
                    .iter()
                    .map(|value| Some(*value).filter(|value| *value != ABSENT))
                    .collect::<Samples>()
            };
            let series = (0..).zip(fields().map(samples)).filter(|(_, samples)| samples.iter().any(Option::is_some));
            Some((*owner, self.start + first as i64 * STEP_S, series.collect()))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_have_the_samples_at_their_times_and_gaps_between() {
        let start = 7 * WINDOW_S;
        let mut window = Window::of(start + 100);
        assert_eq!(window.start, start);
        window.add(start + 20, &vec![(4, vec![Some(1), None]), (9, vec![None, None])]);
        window.add(start + 40, &vec![(4, vec![Some(3), Some(-8), Some(5)])]);
        window.add(start + 40, &vec![(4, vec![Some(2), Some(-8), Some(5)])]);
        window.add(start + WINDOW_S, &vec![(4, vec![Some(77)])]);
        let blocks: Vec<Series> = window.blocks().collect();
        let series =
            vec![(0, vec![Some(1), None, Some(2)]), (1, vec![None, None, Some(-8)]), (2, vec![None, None, Some(5)])];
        assert_eq!(blocks, [(4, start + 20, series)]);
    }
}
