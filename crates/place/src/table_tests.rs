//! Tables as they are written, and as somebody else may have made them.

use super::*;
use crate::theta::{begin, finish};
use parquet::basic::Compression;
use std::os::unix::fs::FileExt;

fn row(n: u64) -> Row {
    Row {
        epoch_s: n,
        host: "h<\u{e9}>".into(),
        group: n.is_multiple_of(2).then(|| "acme".into()),
        guest: (!n.is_multiple_of(3)).then(|| format!("qemu:{n}")),
        template: None,
        key: Some("k".into()),
        memory_bytes: (!n.is_multiple_of(5)).then_some((1 << 50) - n),
        guaranteed_bytes: None,
        resident_pages: n + 1,
        zero_pages: n + 2,
        distinct_pages: n + 3,
        folded_pages: n + 4,
        other_pages: n + 5,
        sketch: (!n.is_multiple_of(7)).then(|| n.to_le_bytes().repeat(n as usize % 9)),
    }
}

fn read_all(paths: &[PathBuf]) -> anyhow::Result<Vec<Row>> {
    let (files, mut rows) = (files(paths)?, Vec::new());
    let counted = count(&files)?;
    read(&files, &mut |row| {
        rows.push(row);
        Ok(())
    })?;
    assert_eq!(rows.len(), counted);
    Ok(rows)
}

/// Words of the error of reading a file.
fn refusal(path: &Path) -> String {
    read_all(&[path.to_owned()]).expect_err("it is refused").to_string()
}

const KEEP: Keep = Keep { files: 2, bytes: u64::MAX };

#[test]
fn rows_are_read_as_they_were_written() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("rows.parquet");
    let rows: Vec<_> = (0..GROUP_ROWS as u64 * 2 + 3).map(row).collect();
    write(&path, &rows).unwrap();
    assert_eq!(read_all(&[path]).unwrap(), rows);
}

#[test]
fn directory_keeps_newest_files_of_host() {
    let dir = tempfile::tempdir().unwrap();
    let names = || {
        let mut names: Vec<_> = epochs(dir.path()).unwrap().into_iter().map(|(host, epoch, _)| (host, epoch)).collect();
        names.sort();
        names
    };
    let written = |host: &str, epoch, keep| {
        let row = Row { host: host.into(), ..row(epoch) };
        write_epoch(dir.path(), host, epoch, &[row], keep).unwrap();
    };
    for epoch in [7, 30, 100] {
        ["a.example", "b"].iter().for_each(|host| written(host, epoch, KEEP));
    }
    let pair = |host: &str| [(host.to_owned(), 30), (host.to_owned(), 100)];
    assert_eq!(names(), [pair("a.example"), pair("b")].concat());
    let found: Vec<_> = read_all(&[dir.path().to_owned()]).unwrap().into_iter().map(|row| row.epoch_s).collect();
    assert_eq!(found, [100, 100]);
    // The clock was set back: what it wrote before is no longer the newest.
    written("b", 50, KEEP);
    assert_eq!(names()[2..], [("b".to_owned(), 30), ("b".to_owned(), 50)]);
    // One file alone is larger than this.
    written("b", 60, Keep { bytes: 1, ..KEEP });
    assert_eq!(names()[2..], [("b".to_owned(), 60)]);
}

#[test]
fn file_in_directory_speaks_for_its_host_alone() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("evil.1000.parquet");
    for other in [Row { host: "good".into(), ..row(1000) }, Row { host: "evil".into(), ..row(2000) }] {
        write(&path, &[other]).unwrap();
        let error = read_all(&[dir.path().to_owned()]).unwrap_err().to_string();
        assert!(error.contains("not what its name says"), "{error}");
    }
    write(&path, &[Row { host: "evil".into(), ..row(1000) }]).unwrap();
    assert_eq!(read_all(&[dir.path().to_owned()]).unwrap().len(), 1);
}

#[test]
fn other_files_are_refused_with_their_name() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x");
    for text in ["no table", "", "\0\0\0\x7fPAR1"] {
        fs::write(&path, text).unwrap();
        assert!(refusal(&path).starts_with(&format!("cannot read {}: ", path.display())), "{}", refusal(&path));
    }
    assert!(read_all(&[dir.path().to_owned()]).unwrap_err().to_string().contains("HOST.EPOCH.parquet"));
}

#[test]
fn values_that_no_host_has_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x");
    let long = "x".repeat(1025);
    for (other, words) in [
        (Row { resident_pages: u64::MAX, ..row(1) }, "resident_pages is -1"),
        (Row { memory_bytes: Some(1 << 51), ..row(1) }, "memory_bytes is "),
        (Row { group: Some(long), ..row(1) }, "group has 1025 bytes"),
        (Row { sketch: Some(vec![0; (64 << 10) + 25]), ..row(1) }, "a sketch has 65561 bytes"),
    ] {
        write(&path, &[other]).unwrap();
        assert!(refusal(&path).contains(words), "{}", refusal(&path));
    }
}

#[test]
fn absurd_guest_is_cut_to_what_readers_take() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x");
    let absurd =
        Row { guest: Some("\u{e9}".repeat(1000)), memory_bytes: Some(u64::MAX), folded_pages: u64::MAX, ..row(1) };
    write(&path, &[absurd.bounded()]).unwrap();
    let read = &read_all(&[path]).unwrap()[0];
    assert_eq!(read.guest, Some("\u{e9}".repeat(512)));
    assert_eq!((read.memory_bytes, read.folded_pages), (Some(1 << 50), 1 << 32));
}

/// The same rows in files that may take more memory than they have bytes: with dictionaries, and with large row groups.
#[test]
fn dictionaries_and_large_groups_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x");
    let written = |properties: WriterProperties, rows: &[Row]| {
        let schema = Arc::new(parse_message_type(SCHEMA).unwrap());
        let file = File::create(&path).unwrap();
        let mut file = SerializedFileWriter::new(file, schema, Arc::new(properties)).unwrap();
        let mut group = file.next_row_group().unwrap();
        write_columns(&mut group, rows).unwrap();
        group.close().unwrap();
        file.close().unwrap();
        refusal(&path)
    };
    let plain = || WriterProperties::builder().set_dictionary_enabled(false);
    let rows: Vec<_> = (0..=GROUP_ROWS as u64).map(row).collect();
    assert!(written(plain().build(), &rows).contains("a row group has 1025 rows"));
    let said = written(WriterProperties::builder().build(), &rows[..9]);
    assert!(said.contains("a page has no plain values"), "{said}");
    let second = plain().set_writer_version(parquet::file::properties::WriterVersion::PARQUET_2_0);
    assert!(written(second.set_compression(Compression::UNCOMPRESSED).build(), &rows[..9]).contains("no plain values"));
}

/// Bytes of a small table are changed one by one, and the table is cut off at each. Reading it may fail, and never
/// panics.
#[test]
fn damaged_tables_are_refused_or_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x");
    let mut sketch = begin(5);
    (0..100).for_each(|n| sketch.update(n));
    let sketch = finish(sketch);
    write(&path, &[row(1), Row { sketch: Some(sketch), ..row(2) }, row(3)]).unwrap();
    let whole = fs::read(&path).unwrap();
    let file = File::options().write(true).open(&path).unwrap();
    let try_it = || {
        let sources = [Source::named(&path)];
        let _ = count(&sources);
        let _ = super::read(&sources, &mut |row| {
            let _ = row.sketch.as_deref().map(|bytes| crate::theta::Sketch::read(bytes, 100));
            Ok(())
        });
    };
    for at in 0..whole.len() {
        for other in [0, 0x7f, 0xff, whole[at] ^ 1, whole[at] ^ 0x80] {
            file.write_all_at(&[other], at as u64).unwrap();
            try_it();
        }
        file.write_all_at(&whole[at..=at], at as u64).unwrap();
    }
    for length in (0..whole.len()).rev() {
        file.set_len(length as u64).unwrap();
        try_it();
    }
}
