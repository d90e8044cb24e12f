//! Answers questions about figures in a range of time: reads ticks and blocks, and makes points with the wanted step of
//! them.

use crate::block;
use crate::fields::{About, Kind, about};
use crate::roll::LEVELS;
use crate::store::{Owner, Store, is_damage};
use crate::window::STEP_S;
use anyhow::bail;
use api::history::{History, Note, Series, Wanted};
use std::collections::{BTreeMap, HashMap};

/// Seconds of a day.
const DAY_S: i64 = 86_400;
/// Longest step of an answer, in seconds: a week.
const MOST_STEP_S: i64 = 7 * DAY_S;

/// Bounds of one answer. A question whose answer might exceed them is refused.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Longest range of time, in seconds.
    pub range_s: i64,
    /// Most points of all series together.
    pub points: i64,
    /// Most samples that are read for these points.
    pub samples: i64,
}

/// Bounds of answers over HTTP: some 2 MB, and some tenths of a second.
pub const OVER_HTTP: Bounds = Bounds { range_s: 732 * DAY_S, points: 100_000, samples: 4_000_000 };

/// A sample: its time, the seconds from there on that it covers (its step), and its value.
type Point = (i64, i64, i64);

/// The shortest step in which figures are still kept for the whole time from `since` to `now`.
fn step_of(since: i64, now: i64) -> i64 {
    let level = LEVELS.iter().find(|(_, days, _)| now - since <= days * DAY_S);
    level.map_or(LEVELS[2].0, |(step, ..)| *step)
}

/// Answers a question. `bounds` limits the answer; `None`: nothing does.
///
/// # Errors
/// The question's times or step are not valid, its answer would exceed the bounds, or the file cannot be read.
pub fn answer(store: &Store, wanted: &Wanted, now: i64, bounds: Option<Bounds>) -> anyhow::Result<History> {
    let until = wanted.until.unwrap_or(now.saturating_add(STEP_S));
    let since = wanted.since.unwrap_or(until.saturating_sub(DAY_S));
    if since >= until {
        bail!("the time ends at {until}, before it begins at {since}");
    }
    let owners: Vec<Owner> = store.owners()?.into_iter().filter(|owner| is_wanted(wanted, owner)).collect();
    let series = owners.iter().map(|owner| figures(wanted, owner).len() as i64).sum::<i64>();
    let (native, range) = (step_of(since, now), until.saturating_sub(since));
    let step = wanted.step.unwrap_or_else(|| usual_step(bounds.as_ref(), range, series, native));
    if step % STEP_S != 0 || !(STEP_S..=MOST_STEP_S).contains(&step) {
        bail!("a step of {step} s cannot be had: multiples of {STEP_S} up to {MOST_STEP_S} can");
    }
    if let Some(bounds) = bounds {
        check(bounds, range, series, (native, step))?;
    }
    let mut history = History { since_unix_s: since, until_unix_s: until, step_s: step, ..History::default() };
    let mut latest = latest(store, &owners, since, until, &mut history.damaged_blocks)?;
    for owner in owners {
        let (figures, mut points) = (figures(wanted, &owner), Points::new());
        add_blocks(store, &owner, &figures, (since, until), &mut points, &mut history.damaged_blocks)?;
        let mut latest = latest.remove(&owner.id).unwrap_or_default();
        for (field, about) in figures {
            // Blocks come before ticks: points stay in the order in which they were recorded.
            let points = points.remove(&field).into_iter().chain(latest.remove(&field)).flatten().collect();
            let points = stepped(points, about.kind(), step);
            if !points.is_empty() {
                let member = Some(owner.member.clone()).filter(|name| !name.is_empty());
                history.series.push(Series { group: owner.group.clone(), member, figure: about.name.into(), points });
            }
        }
    }
    if wanted.groups.is_none() {
        // Notes may name any group, so only callers that see all groups get them.
        let notes = store.notes(since, until)?.into_iter();
        history.notes = notes.map(|(unix_s, text)| Note { unix_s, text }).collect();
    }
    Ok(history)
}

/// The step of an answer whose question names none: the shortest multiple of `native` with which all series together have
/// no more points than they may.
fn usual_step(bounds: Option<&Bounds>, range: i64, series: i64, native: i64) -> i64 {
    let least = bounds.map_or(0, |bounds| range.saturating_mul(series) / bounds.points.max(1));
    if least < native { native } else { (least / native + 1).saturating_mul(native).min(MOST_STEP_S) }
}

fn check(bounds: Bounds, range: i64, series: i64, (native, step): (i64, i64)) -> anyhow::Result<()> {
    if range > bounds.range_s {
        bail!("the time is longer than {} days", bounds.range_s / DAY_S);
    }
    let (points, samples) = (range / step.max(native) * series, range / native * series);
    if points > bounds.points {
        let most = bounds.points;
        bail!(
            "{series} series have up to {points} points, more than {most}: name fewer, a shorter time or a longer step"
        );
    }
    if samples > bounds.samples {
        bail!(
            "{series} series have up to {samples} samples, more than {}: name fewer, or a shorter time",
            bounds.samples
        );
    }
    Ok(())
}

/// Whether a question asks for figures of an owner that its caller may see ([`Wanted::groups`]).
fn is_wanted(wanted: &Wanted, owner: &Owner) -> bool {
    wanted.groups.as_ref().is_none_or(|groups| groups.contains(&owner.group))
        && wanted.group.as_ref().is_none_or(|group| *group == owner.group)
        && wanted.member.as_ref().is_none_or(|member| *member == owner.member)
}

/// The figures of an owner that a question asks for and its caller may see, with their numbers.
fn figures(wanted: &Wanted, owner: &Owner) -> Vec<(u8, About)> {
    let is_wanted = |about: &About| {
        wanted.figure.as_ref().is_none_or(|figure| figure == about.name)
            && (!about.is_of_host || wanted.groups.is_none())
    };
    (0..).zip(about(owner.member.is_empty())).filter(|(_, about)| is_wanted(about)).collect()
}

type Points = BTreeMap<u8, Vec<Point>>;

/// The points of ticks, whose moments are in no block yet, by owner. Ticks that cannot be read are counted in
/// `damaged`.
fn latest(
    store: &Store,
    owners: &[Owner],
    since: i64,
    until: i64,
    damaged: &mut u64,
) -> anyhow::Result<HashMap<i64, Points>> {
    let mut latest: HashMap<i64, Points> = owners.iter().map(|owner| (owner.id, Points::new())).collect();
    let (ticks, lost) = store.ticks(since, until)?;
    *damaged += lost;
    for (at, moment) in ticks {
        for (owner, values) in moment {
            let Some(points) = latest.get_mut(&owner) else { continue };
            for (field, value) in (0..).zip(values) {
                points.entry(field).or_default().extend(value.map(|value| (at, STEP_S, value)));
            }
        }
    }
    Ok(latest)
}

/// Adds the points of an owner's blocks. Blocks that cannot be read are counted in `damaged`.
fn add_blocks(
    store: &Store,
    owner: &Owner,
    figures: &[(u8, About)],
    (since, until): (i64, i64),
    points: &mut Points,
    damaged: &mut u64,
) -> anyhow::Result<()> {
    // The index alone answers this query. So a damaged block does not hide others.
    let sql = "SELECT id FROM block WHERE owner = ?1 AND step = ?2 AND start > ?3 AND start < ?4 ORDER BY id";
    let mut find = store.db.prepare(sql)?;
    let mut read = store.db.prepare("SELECT start, count, data FROM block WHERE id = ?1")?;
    for (step, ..) in LEVELS.into_iter().rev() {
        let first = since.saturating_sub(step * block::MOST_SAMPLES as i64);
        let mut ids = find.query([owner.id, step, first, until])?;
        while let Some(row) = ids.next()? {
            let block = read.query_row([row.get::<_, i64>(0)?], |row| {
                let data = row.get_ref(2)?.as_blob()?;
                Ok(read_block((step, row.get(0)?, row.get(1)?, data), figures, (since, until), points))
            });
            match block.map_err(anyhow::Error::from) {
                Ok(Ok(())) => {}
                Err(e) if !is_damage(&e) => return Err(e),
                Ok(Err(_)) | Err(_) => *damaged += 1,
            }
        }
    }
    Ok(())
}

fn read_block(
    (step, start, count, data): (i64, i64, i64, &[u8]),
    figures: &[(u8, About)],
    (since, until): (i64, i64),
    points: &mut Points,
) -> anyhow::Result<()> {
    for (field, bytes) in block::series(data)? {
        if !figures.iter().any(|(wanted, _)| *wanted == field) {
            continue;
        }
        let samples = block::decode(bytes, usize::try_from(count)?)?;
        let at = (0..).map(|place| start.saturating_add(place * step));
        let samples = at.zip(samples).filter(|(at, _)| (since..until).contains(at));
        points.entry(field).or_default().extend(samples.filter_map(|(at, value)| Some((at, step, value?))));
    }
    Ok(())
}

/// Combines points into points of this step. Of several points with the same time, the last one counts, which was
/// recorded later.
fn stepped(mut points: Vec<Point>, kind: Kind, step: i64) -> Vec<[i64; 2]> {
    points.sort_by_key(|(at, ..)| *at);
    points.dedup_by(|later, earlier| {
        let is_same = later.0 == earlier.0;
        if is_same {
            *earlier = *later;
        }
        is_same
    });
    let bucket = |at: i64| at.div_euclid(step) * step;
    let steps = points.chunk_by(|one, two| bucket(one.0) == bucket(two.0));
    let value = |points: &[Point]| match kind {
        Kind::Counter => points.last().map_or(0, |(_, _, value)| *value),
        Kind::Gauge => {
            let length = points.iter().map(|(_, length, _)| i128::from(*length)).sum::<i128>().max(1);
            let sum = points.iter().map(|(_, length, value)| i128::from(*length) * i128::from(*value)).sum::<i128>();
            i64::try_from(sum / length).unwrap_or(i64::MAX)
        }
    };
    steps.map(|points| [bucket(points[0].0), value(points)]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_have_the_mean_or_the_last_value_and_the_later_recording() {
        let points = vec![(900, 900, 40), (0, 60, 10), (60, 60, 70), (60, 60, 20), (120, 10, 90)];
        assert_eq!(stepped(points.clone(), Kind::Gauge, 60), [[0, 10], [60, 20], [120, 90], [900, 40]]);
        assert_eq!(stepped(points.clone(), Kind::Gauge, 900), [[0, (60 * 10 + 60 * 20 + 10 * 90) / 130], [900, 40]]);
        assert_eq!(stepped(points, Kind::Counter, 1800), [[0, 40]]);
    }

    #[test]
    fn answers_are_bounded() {
        let ok = |range, series, steps| check(OVER_HTTP, range, series, steps).is_ok();
        assert!(ok(366 * DAY_S, 2, (900, 900)) && ok(366 * DAY_S, 100, (900, DAY_S)) && ok(DAY_S, 11, (10, 10)));
        assert!(
            !ok(733 * DAY_S, 1, (900, DAY_S)) && !ok(366 * DAY_S, 3, (900, 900)) && !ok(366 * DAY_S, 200, (900, DAY_S))
        );
    }
}
