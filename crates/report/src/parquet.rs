//! Samples as a Parquet file, one row a page, for people with questions of their own.
//!
//! Rows are buffered and written in groups of bounded size, so memory does not grow with the census. There is no
//! compression but by encodings that suit the columns. Names are dictionaries; addresses and frames are differences,
//! since neighbours follow each other. Fingerprints cannot be compressed.
//!
//! | column | type | |
//! |---|---|---|
//! | `guest` | string | id of the guest; `host` for the host's own memory |
//! | `group` | string, may be null | group of the guest; null for the host's own memory |
//! | `pid` | u32 | process it was found in; 0 for page cache that no process maps |
//! | `address` | u64 | virtual address in that process; for page cache the offset in the file |
//! | `frame` | u64 | page frame number, or what stands for it where the kernel hid it |
//! | `kpageflags` | u64, may be null | `/proc/kpageflags` of the frame, where it was read |
//! | `kind` | string | `anon`, `file`, `shmem`, `folded` (a page of a group's pool in a member) |
//! | `region` | string | `guest_ram`, `heap`, ... |
//! | `mapped_elsewhere` | bool | somebody other than the guest maps the frame too |
//! | `ksm` | bool | the kernel's merger holds it |
//! | `fingerprint` | u64 | XXH3-64 of its content |

use ::parquet::basic::Encoding;
use ::parquet::data_type::{BoolType, ByteArray, ByteArrayType, DataType, Int32Type, Int64Type};
use ::parquet::errors::ParquetError;
use ::parquet::file::properties::WriterProperties;
use ::parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
use ::parquet::schema::parser::parse_message_type;
use ::parquet::schema::types::ColumnPath;
use guest::Guest;
use page::{GuestIndex, PageKind, PageSample, Region};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Number of rows in a row group: 8 MiB of samples in memory.
const GROUP_ROWS: usize = 128 << 10;

const SCHEMA: &str = "message page_sample {
    required binary guest (STRING);
    optional binary group (STRING);
    required int32 pid (INTEGER(32, false));
    required int64 address (INTEGER(64, false));
    required int64 frame (INTEGER(64, false));
    optional int64 kpageflags (INTEGER(64, false));
    required binary kind (STRING);
    required binary region (STRING);
    required boolean mapped_elsewhere;
    required boolean ksm;
    required int64 fingerprint (INTEGER(64, false));
}";

/// Writes samples to one file. A file whose writer was not closed is not a Parquet file.
pub struct SampleWriter {
    path: PathBuf,
    file: SerializedFileWriter<File>,
    /// Id and group of each guest, by its index.
    guests: Vec<(ByteArray, ByteArray)>,
    /// Rows that do not fill a group yet.
    rows: Vec<PageSample>,
}

impl SampleWriter {
    /// Writes to `file`, which is empty; messages call it `path`. The owners of samples are indices into `guests`.
    pub fn new(path: &Path, file: File, guests: &[Guest]) -> io::Result<Self> {
        let failed = |e: &dyn std::fmt::Display| failure("create", path, e);
        let schema = parse_message_type(SCHEMA).map_err(|e| failed(&e))?;
        let file = SerializedFileWriter::new(file, Arc::new(schema), Arc::new(properties())).map_err(|e| failed(&e))?;
        let guests = guests.iter().map(|g| (g.id.as_str().into(), g.group.as_str().into())).collect();
        Ok(Self { path: path.to_owned(), file, guests, rows: Vec::with_capacity(GROUP_ROWS) })
    }

    /// Adds `samples`, each of one of the guests or of the host.
    pub fn write(&mut self, mut samples: &[PageSample]) -> io::Result<()> {
        if let Some(stranger) = samples.iter().find(|s| self.names(s.owner).is_none()) {
            let what =
                format!("a page belongs to guest {}, of which there are {}", stranger.owner.0, self.guests.len());
            return Err(failure("write", &self.path, &what));
        }
        while !samples.is_empty() {
            let (now, later) = samples.split_at(samples.len().min(GROUP_ROWS - self.rows.len()));
            self.rows.extend_from_slice(now);
            if self.rows.len() == GROUP_ROWS {
                self.write_group()?;
            }
            samples = later;
        }
        Ok(())
    }

    /// Writes the remaining rows, and the index without which the file cannot be read.
    pub fn close(mut self) -> io::Result<()> {
        if !self.rows.is_empty() {
            self.write_group()?;
        }
        self.file.close().map(drop).map_err(|e| failure("write", &self.path, &e))
    }

    fn names(&self, owner: GuestIndex) -> Option<(ByteArray, Option<ByteArray>)> {
        if owner == GuestIndex::HOST {
            return Some(("host".into(), None));
        }
        self.guests.get(usize::from(owner.0)).map(|(id, group)| (id.clone(), Some(group.clone())))
    }

    fn write_group(&mut self) -> io::Result<()> {
        let rows = std::mem::take(&mut self.rows);
        let names: Vec<_> = rows.iter().filter_map(|s| self.names(s.owner)).collect();
        let written = self.file.next_row_group().and_then(|mut group| {
            write_columns(&mut group, &rows, names)?;
            group.close().map(drop)
        });
        self.rows = rows;
        self.rows.clear();
        written.map_err(|e| failure("write", &self.path, &e))
    }
}

/// Writes all columns of one row group, in the order of the schema.
fn write_columns(
    group: &mut SerializedRowGroupWriter<'_, File>,
    rows: &[PageSample],
    names: Vec<(ByteArray, Option<ByteArray>)>,
) -> Result<(), ParquetError> {
    let kinds = PageKind::ALL.map(|k| ByteArray::from(k.name()));
    let regions = Region::ALL.map(|r| ByteArray::from(r.name()));
    let (guests, groups): (Vec<_>, Vec<_>) = names.into_iter().unzip();
    required::<ByteArrayType>(group, guests)?;
    optional::<ByteArrayType>(group, groups)?;
    required::<Int32Type>(group, rows.iter().map(|s| s.pid.cast_signed()))?;
    required::<Int64Type>(group, rows.iter().map(|s| s.address.0.cast_signed()))?;
    required::<Int64Type>(group, rows.iter().map(|s| s.frame.0.cast_signed()))?;
    optional::<Int64Type>(group, rows.iter().map(|s| s.kpageflags.map(u64::cast_signed)))?;
    required::<ByteArrayType>(group, rows.iter().map(|s| kinds[s.kind as usize].clone()))?;
    required::<ByteArrayType>(group, rows.iter().map(|s| regions[s.region as usize].clone()))?;
    required::<BoolType>(group, rows.iter().map(|s| s.mapped_elsewhere))?;
    required::<BoolType>(group, rows.iter().map(|s| s.ksm))?;
    required::<Int64Type>(group, rows.iter().map(|s| s.fingerprint.0.cast_signed()))
}

/// Writes the next column, in which every row has a value.
///
/// # Errors
/// The schema has no such column there, or it cannot be written.
pub fn required<T: DataType>(
    group: &mut SerializedRowGroupWriter<'_, File>,
    values: impl IntoIterator<Item = T::T>,
) -> Result<(), ParquetError> {
    column::<T>(group, &values.into_iter().collect::<Vec<_>>(), None)
}

/// Writes the next column, in which a row may have no value.
///
/// # Errors
/// The schema has no such column there, or it cannot be written.
pub fn optional<T: DataType>(
    group: &mut SerializedRowGroupWriter<'_, File>,
    values: impl IntoIterator<Item = Option<T::T>>,
) -> Result<(), ParquetError> {
    let values: Vec<_> = values.into_iter().collect();
    let levels: Vec<_> = values.iter().map(|value| i16::from(value.is_some())).collect();
    column::<T>(group, &values.into_iter().flatten().collect::<Vec<_>>(), Some(&levels))
}

fn column<T: DataType>(
    group: &mut SerializedRowGroupWriter<'_, File>,
    values: &[T::T],
    levels: Option<&[i16]>,
) -> Result<(), ParquetError> {
    let Some(mut column) = group.next_column()? else {
        return Err(ParquetError::General("the schema has fewer columns than a sample".into()));
    };
    column.typed::<T>().write_batch(values, levels, None)?;
    column.close()
}

fn properties() -> WriterProperties {
    let mut properties =
        WriterProperties::builder().set_created_by(concat!("pagefold ", env!("CARGO_PKG_VERSION")).into());
    for (name, encoding) in [
        ("address", Encoding::DELTA_BINARY_PACKED),
        ("frame", Encoding::DELTA_BINARY_PACKED),
        ("fingerprint", Encoding::PLAIN),
    ] {
        let column = ColumnPath::from(name);
        properties =
            properties.set_column_dictionary_enabled(column.clone(), false).set_column_encoding(column, encoding);
    }
    properties.build()
}

fn failure(attempted: &str, path: &Path, why: &dyn std::fmt::Display) -> io::Error {
    io::Error::other(format!("cannot {attempted} {}: {why}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ::parquet::file::reader::{FileReader, SerializedFileReader};
    use ::parquet::record::{Field, Row};
    use guest::{Facts, GuestKind};
    use page::{Fingerprint, FrameId, HostVirt};

    fn guests() -> Vec<Guest> {
        let guest = |name: &str| Guest {
            id: format!("qemu:{name}"),
            name: name.into(),
            kind: GuestKind::Qemu,
            pids: vec![7],
            group: "acme".into(),
            ram_bytes: None,
            facts: Facts::default(),
        };
        vec![guest("a"), guest("b<\u{e9}>")]
    }

    fn sample(n: u32) -> PageSample {
        PageSample {
            owner: if n.is_multiple_of(3) { GuestIndex::HOST } else { GuestIndex((n % 2) as u16) },
            position: n,
            pid: n,
            address: HostVirt(u64::MAX - u64::from(n)),
            frame: FrameId(FrameId::MAX - u64::from(n)),
            kind: PageKind::ALL[n as usize % 4],
            region: Region::ALL[n as usize % 8],
            mapped_elsewhere: n.is_multiple_of(2),
            ksm: n.is_multiple_of(5),
            kpageflags: (!n.is_multiple_of(4)).then_some(u64::MAX - u64::from(n)),
            fingerprint: Fingerprint(u64::from(n).wrapping_mul(0x9e37_79b9_7f4a_7c15)),
        }
    }

    /// The row expected for `sample`.
    fn row_of(sample: &PageSample, guests: &[Guest]) -> Vec<(String, Field)> {
        let guest = guests.get(usize::from(sample.owner.0));
        let text = |s: &str| Field::Str(s.into());
        [
            ("guest", text(guest.map_or("host", |g| &g.id))),
            ("group", guest.map_or(Field::Null, |g| text(&g.group))),
            ("pid", Field::UInt(sample.pid)),
            ("address", Field::ULong(sample.address.0)),
            ("frame", Field::ULong(sample.frame.0)),
            ("kpageflags", sample.kpageflags.map_or(Field::Null, Field::ULong)),
            ("kind", text(sample.kind.name())),
            ("region", text(sample.region.name())),
            ("mapped_elsewhere", Field::Bool(sample.mapped_elsewhere)),
            ("ksm", Field::Bool(sample.ksm)),
            ("fingerprint", Field::ULong(sample.fingerprint.0)),
        ]
        .map(|(name, field)| (name.to_owned(), field))
        .into()
    }

    fn rows_of(path: &Path) -> (usize, Vec<Row>) {
        let reader = SerializedFileReader::new(File::open(path).unwrap()).unwrap();
        (reader.num_row_groups(), reader.get_row_iter(None).unwrap().map(Result::unwrap).collect())
    }

    #[test]
    fn written_samples_can_be_read_back_in_bounded_groups() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("samples.parquet");
        let samples: Vec<_> = (0..GROUP_ROWS as u32 + 1000).map(sample).collect();
        let mut writer = SampleWriter::new(&path, File::create(&path).unwrap(), &guests()).unwrap();
        for some in samples.chunks(1777) {
            writer.write(some).unwrap();
            assert!(writer.rows.len() < GROUP_ROWS && writer.rows.capacity() == GROUP_ROWS);
        }
        writer.close().unwrap();
        let (groups, rows) = rows_of(&path);
        assert_eq!((groups, rows.len()), (2, samples.len()));
        for (row, sample) in rows.iter().zip(&samples) {
            let found: Vec<_> = row.get_column_iter().map(|(name, field)| (name.clone(), field.clone())).collect();
            assert_eq!(found, row_of(sample, &guests()));
        }
    }

    #[test]
    fn a_census_without_pages_is_a_file_without_rows() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("samples.parquet");
        SampleWriter::new(&path, File::create(&path).unwrap(), &[]).unwrap().close().unwrap();
        assert_eq!(rows_of(&path), (0, Vec::new()));
    }

    #[test]
    fn errors_name_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        let full = File::options().write(true).open("/dev/full").unwrap();
        let error = SampleWriter::new(&path, full, &[]).and_then(SampleWriter::close).unwrap_err();
        assert!(error.to_string().starts_with(&format!("cannot write {}: ", path.display())), "{error}");
        let mut writer = SampleWriter::new(&path, File::create(&path).unwrap(), &[]).unwrap();
        let error = writer.write(&[sample(1)]).unwrap_err();
        assert!(error.to_string().contains("a page belongs to guest 1, of which there are 0"), "{error}");
    }
}
