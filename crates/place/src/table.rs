//! The table of sketches as Parquet files: see [`Row`] for its columns, which have the same names.
//!
//! In a directory, a file is named `HOST.EPOCH.parquet`. A writer keeps the newest few of its own host, and a reader
//! takes the newest of each host.

mod read;

pub use read::{MOST_ROWS, count, read};

use crate::row::{Row, VERSION};
use anyhow::{Context, ensure};
use cli::OutputFile;
use cli::exit::Stop;
use parquet::data_type::{ByteArray, ByteArrayType, Int32Type, Int64Type};
use parquet::errors::ParquetError;
use parquet::file::properties::WriterProperties;
use parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
use parquet::schema::parser::parse_message_type;
use report::parquet::{optional, required};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Rows of a row group: 8 MiB of the fleet's sketches.
const GROUP_ROWS: usize = 1024;

const SCHEMA: &str = "message pagefold_sketch {
    required int32 version;
    required int64 epoch_s;
    required binary host (STRING);
    optional binary group (STRING);
    optional binary guest (STRING);
    optional binary template (STRING);
    optional binary key (STRING);
    optional int64 memory_bytes;
    optional int64 guaranteed_bytes;
    required int64 resident_pages;
    required int64 zero_pages;
    required int64 distinct_pages;
    required int64 folded_pages;
    required int64 other_pages;
    optional binary sketch;
}";

/// Writes rows to a file. A file that is there stays until the new one is complete.
///
/// # Errors
/// It cannot be written.
pub fn write(path: &Path, rows: &[Row]) -> anyhow::Result<()> {
    let output = OutputFile::create(path)?;
    let handle = output.handle().with_context(|| format!("cannot write {}", path.display()))?;
    write_rows(handle, rows).with_context(|| format!("cannot write {}", path.display()))?;
    output.commit()
}

fn write_rows(file: File, rows: &[Row]) -> Result<(), ParquetError> {
    // The reader takes no dictionaries.
    let plain = WriterProperties::builder().set_dictionary_enabled(false);
    let schema = Arc::new(parse_message_type(SCHEMA)?);
    let mut file = SerializedFileWriter::new(file, schema, Arc::new(plain.build()))?;
    for rows in rows.chunks(GROUP_ROWS) {
        let mut group = file.next_row_group()?;
        write_columns(&mut group, rows)?;
        group.close()?;
    }
    file.close().map(drop)
}

/// Writes all columns of one row group, in the order of the schema.
fn write_columns(group: &mut SerializedRowGroupWriter<'_, File>, rows: &[Row]) -> Result<(), ParquetError> {
    let texts: [fn(&Row) -> &Option<String>; 4] = [|r| &r.group, |r| &r.guest, |r| &r.template, |r| &r.key];
    let sizes: [fn(&Row) -> Option<u64>; 2] = [|r| r.memory_bytes, |r| r.guaranteed_bytes];
    let counts: [fn(&Row) -> u64; 5] =
        [|r| r.resident_pages, |r| r.zero_pages, |r| r.distinct_pages, |r| r.folded_pages, |r| r.other_pages];
    required::<Int32Type>(group, rows.iter().map(|_| VERSION))?;
    required::<Int64Type>(group, rows.iter().map(|r| r.epoch_s.cast_signed()))?;
    required::<ByteArrayType>(group, rows.iter().map(|r| ByteArray::from(r.host.as_str())))?;
    for text in texts {
        optional::<ByteArrayType>(group, rows.iter().map(|r| text(r).as_deref().map(ByteArray::from)))?;
    }
    for size in sizes {
        optional::<Int64Type>(group, rows.iter().map(|r| size(r).map(u64::cast_signed)))?;
    }
    for count in counts {
        required::<Int64Type>(group, rows.iter().map(|r| count(r).cast_signed()))?;
    }
    optional::<ByteArrayType>(group, rows.iter().map(|r| r.sketch.clone().map(ByteArray::from)))
}

/// A file of a table.
#[derive(Clone, Debug)]
pub struct Source {
    /// Path of the file.
    pub path: PathBuf,
    /// The host and epoch that all of its rows must have, by its name; `None` if its name does not count.
    of: Option<(String, u64)>,
}

impl Source {
    /// A file that was named itself, not its directory. Its rows may be of any hosts and epochs.
    pub fn named(path: &Path) -> Self {
        Self { path: path.to_owned(), of: None }
    }

    /// Checks a row against the file's name: a user who may write one file of a directory must be able to state rows of
    /// one host only.
    fn check(&self, row: &Row) -> anyhow::Result<()> {
        let Some((host, epoch_s)) = &self.of else { return Ok(()) };
        ensure!(
            *host == in_name(&row.host) && *epoch_s == row.epoch_s,
            "it has a row of host {} and epoch {}, which is not what its name says",
            row.host,
            row.epoch_s
        );
        Ok(())
    }
}

/// The name of a host as it stands in names of files.
fn in_name(host: &str) -> String {
    host.replace('/', "_")
}

/// The files that are meant by `paths`: files, and the newest of each host in directories.
///
/// # Errors
/// A directory cannot be read, or has no file of a table.
pub fn files(paths: &[PathBuf]) -> anyhow::Result<Vec<Source>> {
    let mut files = Vec::new();
    for path in paths {
        if !path.is_dir() {
            files.push(Source::named(path));
            continue;
        }
        let mut newest: BTreeMap<String, (u64, PathBuf)> = BTreeMap::new();
        for (host, epoch, file) in epochs(path)? {
            let known = newest.entry(host).or_insert((epoch, file.clone()));
            if known.0 < epoch {
                *known = (epoch, file);
            }
        }
        if newest.is_empty() {
            let text =
                format!("{} has no file HOST.EPOCH.parquet: pagefold sketch --parquet writes them", path.display());
            return Err(Stop::Usage(text).into());
        }
        files.extend(newest.into_iter().map(|(host, (epoch, path))| Source { path, of: Some((host, epoch)) }));
    }
    Ok(files)
}

/// Files of a directory, with their host and epoch.
fn epochs(dir: &Path) -> anyhow::Result<Vec<(String, u64, PathBuf)>> {
    let named = |entry: fs::DirEntry| {
        let name = entry.file_name().into_string().ok()?;
        let (host, epoch) = name.strip_suffix(".parquet")?.rsplit_once('.')?;
        Some((host.to_owned(), epoch.parse().ok()?, entry.path()))
    };
    let entries = fs::read_dir(dir).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    Ok(entries.with_context(|| format!("cannot read {}", dir.display()))?.into_iter().filter_map(named).collect())
}

/// Bounds of the files of one host in a directory. The newest one is kept in any case.
#[derive(Clone, Copy, Debug)]
pub struct Keep {
    /// Most files that are kept.
    pub files: usize,
    /// Most bytes of all files that are kept.
    pub bytes: u64,
}

/// Writes the rows of one epoch into a directory, and removes the oldest files of this host beyond `keep`.
///
/// # Errors
/// It cannot be written.
pub fn write_epoch(dir: &Path, host: &str, epoch_s: u64, rows: &[Row], keep: Keep) -> anyhow::Result<PathBuf> {
    let path = dir.join(format!("{}.{epoch_s}.parquet", in_name(host)));
    write(&path, rows)?;
    let mut own: Vec<_> = epochs(dir)?.into_iter().filter(|(of, ..)| *of == in_name(host)).collect();
    own.sort_by_key(|(_, epoch, _)| std::cmp::Reverse(*epoch));
    let (mut files, mut bytes) = (0, 0_u64);
    for (_, epoch, file) in own {
        // A file with a later epoch was written before the clock was set back. It is removed, as readers would take it
        // for the newest.
        if epoch <= epoch_s {
            files += 1;
            bytes = bytes.saturating_add(fs::metadata(&file).map_or(0, |meta| meta.len()));
            if files == 1 || files <= keep.files && bytes <= keep.bytes {
                continue;
            }
        }
        fs::remove_file(&file).with_context(|| format!("cannot remove {}", file.display()))?;
    }
    Ok(path)
}

#[cfg(test)]
#[path = "table_tests.rs"]
mod tests;
