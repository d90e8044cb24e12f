//! Combines old blocks into blocks with longer steps, and drops the oldest ones.
//!
//! | step | kept |
//! |---|---|
//! | 10 s | a day, and until the day of UTC that it began in has ended a day ago |
//! | 1 min | 31 days |
//! | 15 min | 731 days |
//!
//! A longer step has the mean of a gauge, and the last value of a counter. When the file is nearly full, the group that
//! has most blocks loses its oldest: no group can drive out what others have.

use crate::block::{self, MOST_SAMPLES, Samples};
use crate::fields::{Kind, about};
use crate::store::{Store, insert, note};
use crate::window::STEP_S;
use rusqlite::{OptionalExtension, Transaction, params};
use std::collections::{BTreeMap, BTreeSet, HashSet};

/// Steps in seconds, the days for which they are kept, and the step that follows.
pub(crate) const LEVELS: [(i64, i64, Option<i64>); 3] = [(STEP_S, 1, Some(60)), (60, 31, Some(900)), (900, 731, None)];
/// Seconds of a day.
const DAY_S: i64 = 86_400;
/// Most combinations (one day of one owner) in a transaction.
const MOST_AT_ONCE: i64 = 20;
/// Most blocks that are dropped in a transaction when the file is nearly full.
const MOST_DROPPED: i64 = 100;

impl Store {
    /// Combines some old blocks of each step, and drops all that are too old. Returns whether none is left to be
    /// combined.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn roll_up(&mut self, now: i64) -> anyhow::Result<bool> {
        let change = self.db.transaction()?;
        let mut is_done = true;
        for (step, days, next) in LEVELS {
            // Days begin at multiples of all steps and windows.
            let end = (now - days * DAY_S).div_euclid(DAY_S) * DAY_S;
            let Some(next) = next else {
                change.execute("DELETE FROM block WHERE step = ?1 AND start < ?2", [step, end])?;
                continue;
            };
            let old: Vec<(i64, i64)> = change
                .prepare("SELECT DISTINCT owner, start / 86400 FROM block WHERE step = ?1 AND start < ?2 LIMIT ?3")?
                .query_map([step, end, MOST_AT_ONCE], |row| Ok((row.get(0)?, row.get(1)?)))?
                .collect::<Result<_, _>>()?;
            is_done &= old.len() < MOST_AT_ONCE as usize;
            for (owner, day) in old {
                put_together(&change, owner, (step, next), (day * DAY_S, (day + 1) * DAY_S))?;
            }
        }
        change.commit()?;
        Ok(is_done)
    }

    /// Removes owners that have no blocks from the file, except those `in_use`, which have samples in no block yet.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn forget_owners(&mut self, in_use: &HashSet<i64>) -> anyhow::Result<()> {
        let change = self.db.transaction()?;
        let unused: Vec<i64> = change
            .prepare("SELECT id FROM owner WHERE NOT EXISTS (SELECT 1 FROM block WHERE block.owner = owner.id)")?
            .query_map([], |row| row.get(0))?
            .collect::<Result<_, _>>()?;
        for id in unused.iter().filter(|id| !in_use.contains(id)) {
            change.execute("DELETE FROM owner WHERE id = ?1", [id])?;
        }
        Ok(change.commit()?)
    }

    /// Drops some of the oldest blocks of the group that has most, if the file has more than `most_bytes`.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn make_room(&mut self, most_bytes: u64, now: i64) -> anyhow::Result<()> {
        if self.used_bytes()? <= most_bytes {
            return Ok(());
        }
        let change = self.db.transaction()?;
        let largest = "SELECT ifnull(grp, '') FROM (SELECT owner AS holder, count(*) AS blocks FROM block GROUP BY owner) \
                       LEFT JOIN owner ON owner.id = holder GROUP BY 1 ORDER BY sum(blocks) DESC LIMIT 1";
        let Some(group) = change.query_row(largest, [], |row| row.get::<_, String>(0)).optional()? else {
            return Ok(());
        };
        let oldest = "DELETE FROM block WHERE id IN (SELECT block.id FROM block LEFT JOIN owner ON owner.id = block.owner \
                      WHERE ifnull(grp, '') = ?1 ORDER BY start LIMIT ?2) RETURNING start";
        let dropped: Vec<i64> = change
            .prepare(oldest)?
            .query_map(params![group, MOST_DROPPED], |row| row.get(0))?
            .collect::<Result<_, _>>()?;
        let until = dropped.iter().max().copied().unwrap_or(0);
        let same = "DELETE FROM note WHERE text LIKE ?1 || '%' AND id = (SELECT max(id) FROM note)";
        let text = format!("the file reached its bound: the oldest blocks of group {group} were dropped, up to ");
        change.execute(same, [&text])?;
        note(&change, now, &format!("{text}{until}"))?;
        Ok(change.commit()?)
    }
}

/// Combines the blocks of one owner that begin in one day into blocks of the next step. Blocks that cannot be read are
/// dropped, with a note.
fn put_together(
    change: &Transaction<'_>,
    owner: i64,
    (step, next): (i64, i64),
    (since, until): (i64, i64),
) -> anyhow::Result<()> {
    let rows: Vec<(i64, i64, Vec<u8>)> = change
        .prepare("SELECT start, count, data FROM block WHERE owner = ?1 AND step = ?2 AND start >= ?3 AND start < ?4 ORDER BY id")?
        .query_map([owner, step, since, until], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))?
        .collect::<Result<_, _>>()?;
    let name = change.query_row("SELECT grp, member FROM owner WHERE id = ?1", [owner], |row| {
        Ok((row.get::<_, String>(0)?, row.get::<_, String>(1)?))
    });
    if let Some((group, member)) = name.optional()? {
        let (mut points, mut damaged): (BTreeMap<u8, BTreeMap<i64, i64>>, u64) = Default::default();
        for (start, count, data) in &rows {
            damaged += u64::from(collect(&mut points, step, *start, *count, data).is_err());
        }
        let about = about(member.is_empty());
        let fields: BTreeMap<u8, BTreeMap<i64, i64>> = points
            .into_iter()
            .filter_map(|(field, points)| Some((field, means(&points, about.get(usize::from(field))?.kind(), next))))
            .collect();
        write(change, owner, next, &fields)?;
        if damaged > 0 {
            let of =
                if member.is_empty() { format!("group {group}") } else { format!("member {member} of group {group}") };
            note(change, since, &format!("{damaged} blocks of {of} could not be read, and were dropped"))?;
        }
    }
    change.execute(
        "DELETE FROM block WHERE owner = ?1 AND step = ?2 AND start >= ?3 AND start < ?4",
        [owner, step, since, until],
    )?;
    Ok(())
}

fn collect(
    points: &mut BTreeMap<u8, BTreeMap<i64, i64>>,
    step: i64,
    start: i64,
    count: i64,
    data: &[u8],
) -> anyhow::Result<()> {
    for (field, bytes) in block::series(data)? {
        let samples = block::decode(bytes, usize::try_from(count)?)?;
        let at = (0..).map(|place| start + place * step);
        points.entry(field).or_default().extend(at.zip(samples).filter_map(|(at, value)| Some((at, value?))));
    }
    Ok(())
}

/// Combines points into values of a longer step, by the time at which each step begins.
fn means(points: &BTreeMap<i64, i64>, kind: Kind, step: i64) -> BTreeMap<i64, i64> {
    let mut sums: BTreeMap<i64, (i128, i128)> = BTreeMap::new();
    for (at, value) in points {
        let sum = sums.entry(at.div_euclid(step) * step).or_default();
        *sum = match kind {
            Kind::Counter => (i128::from(*value), 1),
            Kind::Gauge => (sum.0 + i128::from(*value), sum.1 + 1),
        };
    }
    sums.into_iter().map(|(at, (sum, count))| (at, i64::try_from(sum / count).unwrap_or(i64::MAX))).collect()
}

/// Writes the fields of an owner as blocks, from the first step of any of them to the last.
fn write(
    change: &Transaction<'_>,
    owner: i64,
    step: i64,
    fields: &BTreeMap<u8, BTreeMap<i64, i64>>,
) -> anyhow::Result<()> {
    let times: BTreeSet<i64> = fields.values().flat_map(|points| points.keys().copied()).collect();
    let (Some(first), Some(last)) = (times.first(), times.last()) else { return Ok(()) };
    let all: Vec<i64> = (0..=(last - first) / step).map(|place| first + place * step).collect();
    for times in all.chunks(MOST_SAMPLES) {
        let samples = |points: &BTreeMap<i64, i64>| times.iter().map(|at| points.get(at).copied()).collect::<Samples>();
        let series: Vec<(u8, Samples)> = fields.iter().map(|(field, points)| (*field, samples(points))).collect();
        insert(change, owner, step, times[0], &series)?;
    }
    Ok(())
}
