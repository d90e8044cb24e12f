//! Renames a damaged file, and copies all that can be read of it into a new file.

use crate::block;
use crate::store::{Note, Owner, Store, note};
use anyhow::Context;
use rusqlite::{Connection, OpenFlags, Row, params};
use std::path::{Path, PathBuf};

/// The rows that were found in a damaged file.
#[derive(Debug, Default)]
struct Found {
    owners: u64,
    blocks: u64,
    damaged: u64,
    is_whole: bool,
}

/// Owner, step, start, count and data of a block.
type Block = (i64, i64, i64, i64, Vec<u8>);

fn beside(path: &Path, end: &str) -> PathBuf {
    PathBuf::from(format!("{}{end}", path.display()))
}

/// Gives a damaged file and its log the name `FILE.damaged`, in place of an earlier one. All that can be read of it is
/// copied into a new file, with a note that says how much that was.
///
/// # Errors
/// Files cannot be renamed, or the new one not be written.
pub fn salvage(path: &Path, most_bytes: u64, now: i64, why: &str) -> anyhow::Result<Store> {
    for end in ["", "-wal", "-shm"] {
        let (from, to) = (beside(path, end), beside(path, &format!(".damaged{end}")));
        let moved = if from.exists() { std::fs::rename(&from, &to) } else { Ok(_ = std::fs::remove_file(&to)) };
        moved.with_context(|| format!("cannot rename {}", from.display()))?;
    }
    let aside = beside(path, ".damaged");
    let mut store = Store::open(path, most_bytes)?;
    // If copying fails half-way, it is rolled back, and the new file begins empty.
    let found = take_over(&mut store, &aside).unwrap_or_default();
    let Found { owners, blocks, damaged, is_whole } = found;
    let rest = if is_whole { "" } else { "; an unknown number behind the damage is lost" };
    let text = format!(
        "the file was damaged ({why}) and is {}: {blocks} blocks and {owners} names could be read, {damaged} could not{rest}",
        aside.display()
    );
    cli::note!("{}", cli::printable(&text));
    let change = store.db.transaction()?;
    note(&change, now, &text)?;
    change.commit()?;
    Ok(store)
}

/// Calls `take` for each row of a query, until a row cannot be read. Returns whether all rows could be read.
fn rows<T>(
    db: &Connection,
    sql: &str,
    row: impl Fn(&Row<'_>) -> rusqlite::Result<T>,
    mut take: impl FnMut(T) -> anyhow::Result<()>,
) -> anyhow::Result<bool> {
    let Ok(mut find) = db.prepare(sql) else { return Ok(false) };
    let Ok(mut rows) = find.query([]) else { return Ok(false) };
    loop {
        match rows.next() {
            Ok(Some(found)) => match row(found) {
                Ok(found) => take(found)?,
                Err(_) => return Ok(false),
            },
            Ok(None) => return Ok(true),
            Err(_) => return Ok(false),
        }
    }
}

fn take_over(store: &mut Store, aside: &Path) -> anyhow::Result<Found> {
    // The write-ahead log was renamed with the file. SQLite ignores what is not complete in it.
    let old = Connection::open_with_flags(aside, OpenFlags::SQLITE_OPEN_READ_WRITE)?;
    old.pragma_update(None, "cell_size_check", true)?;
    let change = store.db.transaction()?;
    let mut found = Found::default();
    let owner = |row: &Row<'_>| -> rusqlite::Result<Owner> {
        Ok(Owner { id: row.get(0)?, group: row.get(1)?, member: row.get(2)? })
    };
    let names = rows(&old, "SELECT id, grp, member FROM owner", owner, |Owner { id, group, member }| {
        found.owners += 1;
        change
            .execute("INSERT OR IGNORE INTO owner (id, grp, member) VALUES (?1, ?2, ?3)", params![id, group, member])?;
        Ok(())
    })?;
    let block = |row: &Row<'_>| -> rusqlite::Result<Block> {
        Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?, row.get(4)?))
    };
    let (mut blocks, mut damaged) = (0, 0);
    let mut take = |(owner, step, start, count, data): Block| -> anyhow::Result<()> {
        if block::series(&data).is_err() {
            damaged += 1;
            return Ok(());
        }
        // The table is read from both ends if it is damaged, so the same block may be found twice.
        let sql = "INSERT INTO block (owner, step, start, count, data) SELECT ?1, ?2, ?3, ?4, ?5 \
                   WHERE NOT EXISTS (SELECT 1 FROM block WHERE owner = ?1 AND step = ?2 AND start = ?3 AND data = ?5)";
        blocks += change.execute(sql, params![owner, step, start, count, data])? as u64;
        Ok(())
    };
    let columns = "SELECT owner, step, start, count, data FROM block NOT INDEXED";
    let mut is_whole = rows(&old, &format!("{columns} ORDER BY id"), block, &mut take)?;
    if !is_whole {
        rows(&old, &format!("{columns} ORDER BY id DESC"), block, &mut take)?;
    }
    (found.blocks, found.damaged) = (blocks, damaged);
    let tick = |row: &Row<'_>| -> rusqlite::Result<(i64, Vec<u8>)> { Ok((row.get(0)?, row.get(1)?)) };
    is_whole &= rows(&old, "SELECT at, data FROM tick ORDER BY id", tick, |(at, data)| {
        change.execute("INSERT INTO tick (at, data) VALUES (?1, ?2)", params![at, data])?;
        Ok(())
    })?;
    let old_note = |row: &Row<'_>| -> rusqlite::Result<Note> { Ok((row.get(0)?, row.get(1)?)) };
    rows(&old, "SELECT at, text FROM note ORDER BY id", old_note, |(at, text)| note(&change, at, &text))?;
    change.commit()?;
    Ok(Found { is_whole: is_whole && names, ..found })
}
