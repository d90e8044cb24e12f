//! Reading tables. A host may send a file as it likes, so everything in it is bounded before memory is taken for it:
//!
//! | of a file | bound |
//! |---|---|
//! | its description at the end | 16 MiB |
//! | a row group | as many rows as [`super::write`] puts into one, and a column's bytes by its kind |
//! | a page | plain values, no dictionary, no compression, no more values than the group has rows |
//! | a value | a text, a sketch and a number each have a greatest one |
//! | all files together | a number of rows |
//!
//! A file in a directory has a name, which says of which host and epoch it is. It has rows of no other.

use super::{GROUP_ROWS, Source};
use crate::row::{MOST_BYTES, MOST_PAGES, MOST_TEXT_BYTES, Row, VERSION};
use crate::theta;
use anyhow::{Context, bail, ensure};
use cli::exit::Stop;
use parquet::basic::{Encoding, Type};
use parquet::column::page::{Page, PageMetadata, PageReader};
use parquet::column::reader::ColumnReaderImpl;
use parquet::data_type::{ByteArrayType, DataType, Int32Type, Int64Type};
use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, RowGroupReader, SerializedFileReader};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Most rows of all files together.
pub const MOST_ROWS: usize = 1_000_000;
/// Greatest length of a file's description, in bytes.
const MOST_DESCRIPTION_BYTES: u32 = 16 << 20;
/// Room for headers and levels of a column's pages, in bytes.
const HEADER_BYTES: usize = 64 << 10;
/// Latest epoch: the year 10889.
const MOST_SECONDS: u64 = 1 << 48;

/// A column by name, its greatest value, and how a value gets into a row.
type Numbers = (&'static str, u64, fn(&mut Row, u64));
/// A column by name, and how a value gets into a row.
type Texts = (&'static str, fn(&mut Row, String));

const NUMBERS: [Numbers; 8] = [
    ("epoch_s", MOST_SECONDS, |r, n| r.epoch_s = n),
    ("resident_pages", MOST_PAGES, |r, n| r.resident_pages = n),
    ("zero_pages", MOST_PAGES, |r, n| r.zero_pages = n),
    ("distinct_pages", MOST_PAGES, |r, n| r.distinct_pages = n),
    ("folded_pages", MOST_PAGES, |r, n| r.folded_pages = n),
    ("other_pages", MOST_PAGES, |r, n| r.other_pages = n),
    ("memory_bytes", MOST_BYTES, |r, n| r.memory_bytes = Some(n)),
    ("guaranteed_bytes", MOST_BYTES, |r, n| r.guaranteed_bytes = Some(n)),
];

const TEXTS: [Texts; 5] = [
    ("host", |r, text| r.host = text),
    ("group", |r, text| r.group = Some(text)),
    ("guest", |r, text| r.guest = Some(text)),
    ("template", |r, text| r.template = Some(text)),
    ("key", |r, text| r.key = Some(text)),
];

/// Calls `each` with every row of the files, one file after the other.
///
/// # Errors
/// A file cannot be read, or is no table of sketches.
pub fn read(files: &[Source], each: &mut dyn FnMut(Row) -> anyhow::Result<()>) -> anyhow::Result<()> {
    for file in files {
        of_file(file, |reader| {
            for n in 0..reader.num_row_groups() {
                let rows = guarded(|| group(&*reader.get_row_group(n)?))?;
                for row in rows {
                    file.check(&row)?;
                    each(row)?;
                }
            }
            Ok(())
        })?;
    }
    Ok(())
}

/// Number of rows of the files.
///
/// # Errors
/// A file cannot be read, or they have too many.
pub fn count(files: &[Source]) -> anyhow::Result<usize> {
    let mut rows = 0_usize;
    for file in files {
        rows = of_file(file, |reader| {
            let more = usize::try_from(reader.metadata().file_metadata().num_rows())?;
            rows.checked_add(more).filter(|rows| *rows <= MOST_ROWS).with_context(|| {
                format!("there are more than {MOST_ROWS} rows in all files: plan a part of the hosts at a time")
            })
        })?;
    }
    Ok(rows)
}

/// Opens a file, and names it in errors.
fn of_file<T>(
    source: &Source,
    with: impl FnOnce(&SerializedFileReader<File>) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let path = &source.path;
    let opened = || {
        let (file, meta) = host::open_plain_file(path)?;
        check_description(&file, meta.len())?;
        with(&guarded(|| Ok(SerializedFileReader::new(file)?))?)
    };
    opened().map_err(|e| Stop::usage(e.context(format!("cannot read {}", path.display()))).into())
}

/// Calls `read`, and makes an error of a panic: the Parquet library panics at some damaged files.
fn guarded<T>(read: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<T> {
    catch_unwind(AssertUnwindSafe(read)).unwrap_or_else(|_| bail!("it is damaged"))
}

/// Checks the length of the description before it is read: the last eight bytes are that length and `PAR1`.
fn check_description(file: &File, length: u64) -> anyhow::Result<()> {
    let mut end = [0; 8];
    let begin = length.checked_sub(end.len() as u64).context("it is no Parquet file")?;
    file.read_exact_at(&mut end, begin)?;
    let [a, b, c, d, magic @ ..] = end;
    ensure!(magic == *b"PAR1", "it is no Parquet file");
    let description = u32::from_le_bytes([a, b, c, d]);
    ensure!(description <= MOST_DESCRIPTION_BYTES, "its description has {description} bytes");
    Ok(())
}

/// All rows of a group.
fn group(group: &dyn RowGroupReader) -> anyhow::Result<Vec<Row>> {
    let rows = group.metadata().num_rows();
    let count = usize::try_from(rows).ok().filter(|rows| *rows <= GROUP_ROWS).with_context(|| {
        format!("a row group has {rows} rows: pagefold sketch writes {GROUP_ROWS} at most, and no other files are read")
    })?;
    let version = column::<Int32Type>(group, "version", 4)?;
    if let Some(later) = version.iter().flatten().find(|version| **version > VERSION) {
        bail!("it is of version {later}, and this pagefold-place knows {VERSION}");
    }
    let mut rows = vec![Row::default(); count];
    for (name, most, set) in NUMBERS {
        for (row, value) in rows.iter_mut().zip(column::<Int64Type>(group, name, 8)?) {
            let Some(value) = value else { continue };
            let number = u64::try_from(value).ok().filter(|number| *number <= most);
            set(row, number.with_context(|| format!("{name} is {value}"))?);
        }
    }
    for (name, set) in TEXTS {
        for (row, value) in rows.iter_mut().zip(column::<ByteArrayType>(group, name, MOST_TEXT_BYTES)?) {
            let Some(value) = value else { continue };
            ensure!(value.len() <= MOST_TEXT_BYTES, "{name} has {} bytes", value.len());
            set(row, std::str::from_utf8(value.data()).with_context(|| format!("{name} is no text"))?.to_owned());
        }
    }
    for (row, value) in rows.iter_mut().zip(column::<ByteArrayType>(group, "sketch", theta::MOST_BYTES)?) {
        let Some(value) = value else { continue };
        ensure!(value.len() <= theta::MOST_BYTES, "a sketch has {} bytes", value.len());
        row.sketch = Some(value.data().to_vec());
    }
    Ok(rows)
}

/// All values of a column, each of at most `most` bytes; `None` for a row without a value.
fn column<T: DataType>(group: &dyn RowGroupReader, name: &str, most: usize) -> anyhow::Result<Vec<Option<T::T>>> {
    let (meta, kind) = (group.metadata(), T::get_physical_type());
    let rows = usize::try_from(meta.num_rows())?;
    let schema = meta.schema_descr();
    let is_meant = |column: &&usize| schema.column(**column).name() == name;
    let columns: Vec<usize> = (0..schema.num_columns()).collect();
    let at = columns.iter().find(is_meant).copied().filter(|at| is_flat(&schema.column(*at), kind));
    let Some(at) = at else { bail!("it is no table of sketches: it has no column {name} ({kind})") };
    let (chunk, bound) = (meta.column(at), rows * (most + 16) + HEADER_BYTES);
    let is_bounded = |bytes: i64| usize::try_from(bytes).is_ok_and(|bytes| bytes <= bound);
    ensure!(is_bounded(chunk.compressed_size()), "column {name} has {} bytes", chunk.compressed_size());
    let may_miss = schema.column(at).max_def_level() > 0;
    let pages = Plain { pages: group.get_column_page_reader(at)?, left: rows };
    let mut reader = ColumnReaderImpl::<T>::new(schema.column(at), Box::new(pages));
    let (mut values, mut levels, mut read) = (Vec::with_capacity(rows), Vec::new(), 0);
    while read < rows {
        let (records, ..) = reader.read_records(rows - read, may_miss.then_some(&mut levels), None, &mut values)?;
        ensure!(records > 0, "column {name} is short");
        read += records;
    }
    let mut values = values.into_iter();
    Ok((0..rows).map(|n| if may_miss && levels.get(n) == Some(&0) { None } else { values.next() }).collect())
}

/// Whether a column has values of this type, at most one a row.
fn is_flat(column: &parquet::schema::types::ColumnDescriptor, kind: Type) -> bool {
    column.physical_type() == kind && column.max_rep_level() == 0 && column.max_def_level() <= 1
}

/// Pages of a column as [`super::write`] makes them. Others are refused, as they may take far more memory than they
/// have bytes.
struct Plain {
    pages: Box<dyn PageReader>,
    /// Number of rows whose values are in pages that have not been read.
    left: usize,
}

impl PageReader for Plain {
    fn get_next_page(&mut self) -> Result<Option<Page>, ParquetError> {
        let refused = |why: &str| Err(ParquetError::General(format!("a page {why}: pagefold sketch writes no such")));
        let Some(page) = self.pages.get_next_page()? else { return Ok(None) };
        match &page {
            Page::DataPage { num_values, encoding: Encoding::PLAIN, .. } => {
                match self.left.checked_sub(*num_values as usize) {
                    Some(left) if *num_values > 0 => self.left = left,
                    _ => return refused("has not as many values as there are rows"),
                }
            }
            _ => return refused("has no plain values"),
        }
        Ok(Some(page))
    }

    fn peek_next_page(&mut self) -> Result<Option<PageMetadata>, ParquetError> {
        self.pages.peek_next_page()
    }

    fn skip_next_page(&mut self) -> Result<(), ParquetError> {
        self.pages.skip_next_page()
    }
}

impl Iterator for Plain {
    type Item = Result<Page, ParquetError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.get_next_page().transpose()
    }
}
