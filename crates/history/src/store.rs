//! The file with figures: an SQLite database. A row holds a whole block, and not a single sample.
//!
//! ```text
//!   owner   the group, and the member ('' for the group itself), that have a number
//!   tick    all figures of one moment: a row every ten seconds, until their window is over
//!   block   figures of one owner at equal distances
//!   note    what was lost, and why
//! ```
//!
//! Each tick is a transaction of its own in the write-ahead log, so it is on disk before the next one is due. One
//! transaction replaces the ticks of a window by blocks.

use crate::block::{self, Moment, Samples};
use crate::window::{STEP_S, WINDOW_S, Window, start_of};
use anyhow::bail;
use rusqlite::{Connection, OpenFlags, OptionalExtension, Transaction, params};
use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::time::Duration;

/// Statements that bring a file's schema from each version to the next one. A file has the number of its version as
/// `user_version`.
const MIGRATIONS: [&str; 1] = ["
    CREATE TABLE owner (id INTEGER PRIMARY KEY, grp TEXT NOT NULL, member TEXT NOT NULL, UNIQUE (grp, member));
    CREATE TABLE block (id INTEGER PRIMARY KEY, owner INTEGER NOT NULL, step INTEGER NOT NULL, start INTEGER NOT NULL,
                        count INTEGER NOT NULL, data BLOB NOT NULL);
    CREATE INDEX block_of ON block (owner, step, start);
    CREATE INDEX block_age ON block (step, start);
    CREATE TABLE tick (id INTEGER PRIMARY KEY, at INTEGER NOT NULL, data BLOB NOT NULL);
    CREATE TABLE note (id INTEGER PRIMARY KEY, at INTEGER NOT NULL, text TEXT NOT NULL);"];
/// Longest wait for another process's lock of the file: 5 s.
const PATIENCE: Duration = Duration::from_secs(5);
/// Size of the database's pages in bytes.
const PAGE_BYTES: u64 = 4096;
/// Size to which the write-ahead log is truncated after a checkpoint: 4 MiB.
const LOG_BYTES: u64 = 4 << 20;
/// Number of pages in the log from which on they are written into the file (checkpoint): 256, which are 1 MiB.
const CHECKPOINT_PAGES: i64 = 256;
/// Most notes that are kept.
const MOST_NOTES: i64 = 1000;

/// The open file with figures.
pub struct Store {
    pub(crate) db: Connection,
}

/// A group or a member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    /// Its number in the file.
    pub id: i64,
    /// The group.
    pub group: String,
    /// The member; empty: the group itself.
    pub member: String,
}

/// Something that was lost, and why, with its time in seconds since 1970.
pub type Note = (i64, String);

/// Error: the file's schema is of a later version than this program knows.
#[derive(Debug)]
pub struct Later;

impl fmt::Display for Later {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a later version of pagefold-history has written it")
    }
}

/// Whether an error says that the file is damaged, or no database.
pub fn is_damage(error: &anyhow::Error) -> bool {
    use rusqlite::ErrorCode::{DatabaseCorrupt, NotADatabase};
    let of_file = error.chain().find_map(|cause| cause.downcast_ref::<rusqlite::Error>());
    match of_file {
        // A value of another type than its column's comes from a damaged row.
        Some(rusqlite::Error::InvalidColumnType(..) | rusqlite::Error::FromSqlConversionFailure(..)) => true,
        Some(other) => matches!(other.sqlite_error_code(), Some(DatabaseCorrupt | NotADatabase)),
        None => false,
    }
}

/// Brings a file's schema to the last version of `migrations`, in one transaction.
fn migrate(db: &mut Connection, migrations: &[&str]) -> anyhow::Result<()> {
    let change = db.transaction()?;
    let done: i64 = change.query_row("PRAGMA user_version", [], |row| row.get(0))?;
    let Some(left) = usize::try_from(done).ok().and_then(|done| migrations.get(done..)) else { bail!(Later) };
    if left.is_empty() {
        return Ok(());
    }
    left.iter().try_for_each(|statements| change.execute_batch(statements))?;
    change.pragma_update(None, "user_version", migrations.len() as i64)?;
    Ok(change.commit()?)
}

impl Store {
    /// Opens a file to write it, or makes it. Without its log, the file never has more than `most_bytes`.
    ///
    /// # Errors
    /// It cannot be read or written, is damaged ([`is_damage`]), or is of a later version.
    pub fn open(path: &Path, most_bytes: u64) -> anyhow::Result<Self> {
        let mut db = Connection::open(path)?;
        db.busy_timeout(PATIENCE)?;
        db.pragma_update(None, "page_size", PAGE_BYTES.cast_signed())?;
        db.pragma_update(None, "journal_mode", "WAL")?;
        db.pragma_update(None, "synchronous", "FULL")?;
        db.pragma_update(None, "wal_autocheckpoint", CHECKPOINT_PAGES)?;
        db.pragma_update(None, "journal_size_limit", LOG_BYTES.cast_signed())?;
        db.pragma_update(None, "max_page_count", (most_bytes / PAGE_BYTES).cast_signed())?;
        migrate(&mut db, &MIGRATIONS)?;
        Ok(Self { db })
    }

    /// Opens a file to read it.
    ///
    /// # Errors
    /// There is none, or it is of another version.
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let db = Connection::open_with_flags(path, OpenFlags::SQLITE_OPEN_READ_ONLY)?;
        db.busy_timeout(PATIENCE)?;
        let version: i64 = db.query_row("PRAGMA user_version", [], |row| row.get(0))?;
        match version - MIGRATIONS.len() as i64 {
            0 => Ok(Self { db }),
            1.. => bail!(Later),
            _ => bail!("it has version {version} of its schema: the process that records brings it up to date"),
        }
    }

    /// All groups and members.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn owners(&self) -> anyhow::Result<Vec<Owner>> {
        let mut find = self.db.prepare("SELECT id, grp, member FROM owner ORDER BY grp, member")?;
        let owner = |row: &rusqlite::Row<'_>| Ok(Owner { id: row.get(0)?, group: row.get(1)?, member: row.get(2)? });
        Ok(find.query_map([], owner)?.collect::<Result<_, _>>()?)
    }

    /// The number of a group or a member; `None` if the file does not have it.
    pub(crate) fn owner(&self, group: &str, member: &str) -> anyhow::Result<Option<i64>> {
        let mut find = self.db.prepare("SELECT id FROM owner WHERE grp = ?1 AND member = ?2")?;
        Ok(find.query_row([group, member], |row| row.get(0)).optional()?)
    }

    /// The number for the next new owner. Blocks are considered, too, because their owner's row may be lost.
    pub(crate) fn next_owner(&self) -> anyhow::Result<i64> {
        let next = "SELECT 1 + max((SELECT ifnull(max(id), 0) FROM owner), (SELECT ifnull(max(owner), 0) FROM block))";
        Ok(self.db.query_row(next, [], |row| row.get(0))?)
    }

    /// Writes the figures of a moment as a tick and, in the same transaction, new owners, the blocks of windows that
    /// are over in place of their ticks, and notes.
    ///
    /// # Errors
    /// The file cannot be written. Then nothing of this was.
    pub fn keep(
        &mut self,
        at: i64,
        moment: &Moment,
        new: &[Owner],
        over: &[Window],
        notes: &[Note],
    ) -> anyhow::Result<()> {
        let change = self.db.transaction()?;
        for Owner { id, group, member } in new {
            change
                .prepare("INSERT OR IGNORE INTO owner (id, grp, member) VALUES (?1, ?2, ?3)")?
                .execute(params![id, group, member])?;
        }
        for window in over {
            for (owner, start, series) in window.blocks() {
                insert(&change, owner, STEP_S, start, &series)?;
            }
            change.execute("DELETE FROM tick WHERE at >= ?1 AND at < ?2", [window.start, window.start + WINDOW_S])?;
        }
        for (at, text) in notes {
            note(&change, *at, text)?;
        }
        change.execute("INSERT INTO tick (at, data) VALUES (?1, ?2)", params![at, block::encode_tick(moment)])?;
        Ok(change.commit()?)
    }

    /// Reads the ticks that an earlier process has left. Returns their windows, the oldest first, and the number of
    /// ticks that cannot be read.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn left(&self) -> anyhow::Result<(Vec<Window>, u64)> {
        let mut windows: BTreeMap<i64, Window> = BTreeMap::new();
        let (ticks, damaged) = self.ticks(i64::MIN, i64::MAX)?;
        for (at, moment) in ticks {
            windows.entry(start_of(at)).or_insert_with(|| Window::of(at)).add(at, &moment);
        }
        Ok((windows.into_values().collect(), damaged))
    }

    /// The time of the last tick that was written.
    pub(crate) fn last_at(&self) -> anyhow::Result<Option<i64>> {
        let last = self.db.query_row("SELECT at FROM tick ORDER BY id DESC LIMIT 1", [], |row| row.get(0));
        Ok(last.optional()?)
    }

    /// The ticks of a range of time, in the order in which they were written, and the number of ticks that cannot be
    /// read.
    pub(crate) fn ticks(&self, since: i64, until: i64) -> anyhow::Result<(Vec<(i64, Moment)>, u64)> {
        let mut find = self.db.prepare("SELECT at, data FROM tick WHERE at >= ?1 AND at < ?2 ORDER BY id")?;
        let rows = find.query_map([since, until], |row| Ok((row.get(0)?, row.get::<_, Vec<u8>>(1)?)))?;
        let (mut ticks, mut damaged) = (Vec::new(), 0);
        for row in rows {
            let (at, data) = row?;
            match block::decode_tick(&data) {
                Ok(moment) => ticks.push((at, moment)),
                Err(_) => damaged += 1,
            }
        }
        Ok((ticks, damaged))
    }

    /// The notes of a range of time, in the order in which they were written.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn notes(&self, since: i64, until: i64) -> anyhow::Result<Vec<Note>> {
        let mut find = self.db.prepare("SELECT at, text FROM note WHERE at >= ?1 AND at < ?2 ORDER BY id")?;
        Ok(find.query_map([since, until], |row| Ok((row.get(0)?, row.get(1)?)))?.collect::<Result<_, _>>()?)
    }

    /// Writes the log into the file, so that the log is overwritten from its beginning and does not grow. On a full
    /// disk, writing may fail only because the log cannot grow.
    pub(crate) fn use_log_again(&self) {
        // If this fails, the log grows with the next write.
        let _ = self.db.execute_batch("PRAGMA wal_checkpoint(RESTART)");
    }

    /// Bytes of the file that hold data: those of its pages that are not free.
    pub(crate) fn used_bytes(&self) -> anyhow::Result<u64> {
        let pages = |pragma: &str| self.db.query_row(pragma, [], |row| row.get::<_, i64>(0));
        let used = pages("PRAGMA page_count")? - pages("PRAGMA freelist_count")?;
        Ok(u64::try_from(used)? * PAGE_BYTES)
    }
}

/// Adds a block of an owner to the file; nothing if there are no series.
pub(crate) fn insert(
    change: &Transaction<'_>,
    owner: i64,
    step: i64,
    start: i64,
    series: &[(u8, Samples)],
) -> anyhow::Result<()> {
    let Some((_, samples)) = series.first() else { return Ok(()) };
    change
        .prepare("INSERT INTO block (owner, step, start, count, data) VALUES (?1, ?2, ?3, ?4, ?5)")?
        .execute(params![owner, step, start, samples.len() as i64, block::encode_block(series)])?;
    Ok(())
}

/// Adds a note, and drops the oldest ones if there are more than [`MOST_NOTES`].
pub(crate) fn note(change: &Transaction<'_>, at: i64, text: &str) -> anyhow::Result<()> {
    change.execute("INSERT INTO note (at, text) VALUES (?1, ?2)", params![at, text])?;
    change.execute("DELETE FROM note WHERE id <= (SELECT max(id) FROM note) - ?1", [MOST_NOTES])?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn older_file_is_brought_up_to_date_whole_or_not_at_all() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("h.db");
        let mut store = Store::open(&path, 64 << 20).unwrap();
        let owner = Owner { id: 1, group: "acme".into(), member: String::new() };
        store.keep(1000, &vec![(1, vec![Some(5)])], std::slice::from_ref(&owner), &[], &[]).unwrap();
        drop(store);
        let mut db = Connection::open(&path).unwrap();
        let version = |db: &Connection| db.query_row("PRAGMA user_version", [], |row| row.get::<_, i64>(0)).unwrap();
        let wrong = [MIGRATIONS[0], "ALTER TABLE owner ADD COLUMN kind TEXT; DROP TABLE nothing"];
        assert!(migrate(&mut db, &wrong).is_err());
        assert_eq!((version(&db), db.prepare("SELECT kind FROM owner").is_err()), (1, true));
        migrate(&mut db, &[MIGRATIONS[0], "ALTER TABLE owner ADD COLUMN kind TEXT DEFAULT 'x'"]).unwrap();
        let kind: String = db.query_row("SELECT kind FROM owner", [], |row| row.get(0)).unwrap();
        assert_eq!((version(&db), kind.as_str()), (2, "x"));
        // A program that knows only the older schema does not change the file.
        assert!(migrate(&mut db, &MIGRATIONS).unwrap_err().is::<Later>());
        assert!(Store::open(&path, 64 << 20).is_err_and(|e| e.is::<Later>()) && Store::read(&path).is_err());
    }

    #[test]
    fn file_of_version_1_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("h.db");
        Connection::open(&path).unwrap().execute_batch(include_str!("../tests/version_1.sql")).unwrap();
        let store = Store::open(&path, 64 << 20).unwrap();
        let names: Vec<(String, String)> = store.owners().unwrap().into_iter().map(|o| (o.group, o.member)).collect();
        assert_eq!(names, [("acme".into(), String::new()), ("acme".into(), "web1".into())]);
        let wanted =
            api::history::Wanted { since: Some(0), until: Some(1 << 40), step: Some(10), ..Default::default() };
        let shown = crate::read::answer(&store, &wanted, 1 << 40, None).unwrap();
        let found: Vec<_> =
            shown.series.iter().map(|s| (s.member.as_deref(), s.figure.as_str(), &s.points[..])).collect();
        let saved = [[1_800_000_000, 4096], [1_800_000_010, 8192], [1_800_000_030, -4096], [1_800_000_960, 12288]];
        assert_eq!(found, [(None, "saved_bytes", &saved[..]), (Some("web1"), "saved_bytes", &saved[3..])]);
        assert_eq!((shown.notes.len(), shown.damaged_blocks), (1, 0));
        assert_eq!(store.next_owner().unwrap(), 3);
    }

    #[test]
    fn notes_are_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let mut store = Store::open(&dir.path().join("h.db"), 64 << 20).unwrap();
        let notes: Vec<Note> = (0..MOST_NOTES + 9).map(|n| (n, n.to_string())).collect();
        store.keep(0, &Moment::new(), &[], &[], &notes).unwrap();
        let kept = store.notes(0, i64::MAX).unwrap();
        assert_eq!((kept.len() as i64, kept[0].0), (MOST_NOTES, 9));
    }
}
