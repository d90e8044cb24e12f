//! The journal of a service: who has done what. Lines of JSON are appended, and never changed.
//!
//! ```text
//!   DIR/journal     the newest lines; a file's first line says at which place of the whole journal the file begins
//!   DIR/journal.1   the lines before, and so on up to journal.4, which is dropped when the newest file is renamed
//! ```
//!
//! The *place* of a line is the number of bytes of the journal before it, since the journal was begun. It identifies
//! the line as long as the line is kept. A reader asks for the lines after the place up to which it has read.
//!
//! Several processes append lines: the supervisor, and those that balance memory. Each holds the lock of the newest
//! file meanwhile. If only a part of a line was written, because the process was killed or the disk was full, this part
//! becomes a line of its own, which readers skip.

use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};
use std::fs::{self, DirBuilder, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Name of the newest file.
const NAME: &str = "journal";
/// Size from which on the newest file becomes `journal.1`, and a new one is begun: 8 MiB.
const MOST_BYTES: u64 = 8 << 20;
/// Number of older files that are kept.
const OLDER: usize = 4;

/// Who has done what a line of the journal says: user, process, and caller of the web side.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct By {
    /// The user's uid; `None` for a caller by TCP.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<u32>,
    /// The pid of the process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// Whether the request came through the web side. Then `token` and `address` are what the web side says.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub web: bool,
    /// The name of the token with which the web side was asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token: Option<String>,
    /// The address from which the web side was asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
}

impl By {
    /// This process and its user.
    pub fn this_process() -> Self {
        let user = Some(rustix::process::geteuid().as_raw());
        Self { user, pid: Some(std::process::id()), ..Self::default() }
    }
}

/// A line of the journal.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Line<T> {
    /// Time of the action, in UTC, to the millisecond.
    pub time: String,
    /// The actor.
    pub by: By,
    /// The action, in one word.
    pub what: String,
    /// Further fields of the action.
    #[serde(flatten)]
    pub more: T,
}

impl<T> Line<T> {
    /// A line with the present time.
    #[expect(clippy::disallowed_methods, reason = "a date for people: lines stand in the order of events")]
    pub fn now(by: By, what: &str, more: T) -> Self {
        let time = humantime::format_rfc3339_millis(SystemTime::now()).to_string();
        Self { time, by, what: what.to_owned(), more }
    }
}

/// The first line of a file.
#[derive(Serialize, Deserialize)]
struct Header {
    /// The place of this first line in the whole journal.
    begins_at: u64,
}

/// The journal in a directory.
#[derive(Clone, Debug)]
pub struct Journal {
    dir: PathBuf,
}

/// Lines that were read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lines {
    /// The texts of the lines, each with the place at which the line ends.
    pub lines: Vec<(u64, String)>,
    /// The place from which to read on.
    pub next: u64,
}

impl Journal {
    /// The journal of the service with this directory. The journal's own directory is made when the first line is
    /// written.
    pub fn of_service(dir: &Path) -> Self {
        Self { dir: dir.join("journal") }
    }

    /// The newest file.
    pub fn path(&self) -> PathBuf {
        self.dir.join(NAME)
    }

    /// Appends lines with a single write.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn append(&self, lines: impl Iterator<Item: Serialize>) -> io::Result<()> {
        let mut text = Vec::new();
        for line in lines {
            serde_json::to_writer(&mut text, &line)?;
            text.push(b'\n');
        }
        let mut file = self.open()?;
        let (begins_at, bytes) = (begins_at(&file)?, file.metadata()?.len());
        let mut last = [b'\n'];
        file.read_exact_at(&mut last, bytes.saturating_sub(1))?;
        let begin: &[u8] = if last == *b"\n" { b"" } else { b"\n" };
        file.write_all(&[begin, &text].concat())?;
        let bytes = file.metadata()?.len();
        if bytes > MOST_BYTES { self.put_aside(begins_at + bytes) } else { Ok(()) }
    }

    /// Opens and locks the newest file. Makes it, and the directory, if missing.
    fn open(&self) -> io::Result<File> {
        match DirBuilder::new().mode(0o700).create(&self.dir) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
            _ => {}
        }
        let path = self.path();
        loop {
            let mut file = File::options().create(true).read(true).append(true).mode(0o600).open(&path)?;
            file.lock()?;
            // Another process may have renamed the file before the lock was taken.
            let inode = |found: fs::Metadata| (found.dev(), found.ino());
            if fs::metadata(&path).map(inode).ok() != Some(inode(file.metadata()?)) {
                continue;
            }
            if file.metadata()?.len() == 0 {
                let begins_at = self.older(1).ok().map_or(Ok(0), |older| end_of(&older))?;
                file.write_all(&header(begins_at))?;
            }
            return Ok(file);
        }
    }

    fn older(&self, number: usize) -> io::Result<File> {
        read_only(&self.dir.join(format!("{NAME}.{number}")))
    }

    /// Renames each file to the next number, and begins a new one, which begins at `place` in the whole journal.
    fn put_aside(&self, place: u64) -> io::Result<()> {
        let next = self.dir.join(format!("{NAME}.next"));
        fs::write(&next, header(place))?;
        for number in (1..OLDER).rev() {
            let [from, to] = [number, number + 1].map(|n| self.dir.join(format!("{NAME}.{n}")));
            if from.exists() {
                fs::rename(from, to)?;
            }
        }
        fs::rename(self.path(), self.dir.join(format!("{NAME}.1")))?;
        fs::rename(next, self.path())
    }

    /// Reads the lines after the place `after`, up to `most_bytes` of them. If these lines are not kept any more,
    /// reading begins with the oldest line that is.
    ///
    /// # Errors
    /// The files cannot be read. A journal that does not exist yet is no error.
    pub fn read(&self, after: u64, most_bytes: usize) -> io::Result<Lines> {
        let newest = match read_only(&self.path()) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Lines { lines: Vec::new(), next: 0 }),
            newest => newest?,
        };
        // Opened from the newest to the oldest: a file that is renamed meanwhile is read twice rather than not at all.
        let mut files = vec![newest];
        files.extend((1..=OLDER).map_while(|number| self.older(number).ok()));
        let mut next = after;
        while let Some(mut file) = files.pop() {
            let (begins_at, end) = (begins_at(&file)?, end_of(&file)?);
            if next >= end && !files.is_empty() {
                continue;
            }
            next = if (begins_at..=end).contains(&next) { next } else { begins_at };
            file.seek(SeekFrom::Start(next - begins_at))?;
            let mut text = Vec::new();
            file.take(most_bytes as u64).read_to_end(&mut text)?;
            let lines = whole_lines(&text, next, most_bytes);
            if !lines.lines.is_empty() || files.is_empty() {
                return Ok(lines);
            }
            next = end;
        }
        Ok(Lines { lines: Vec::new(), next })
    }
}

/// Opens a file that may be another user's. A pipe could keep its reader waiting, so only a plain file is accepted.
fn read_only(path: &Path) -> io::Result<File> {
    let flags = OFlags::NONBLOCK | OFlags::NOFOLLOW;
    let file = File::options().read(true).custom_flags(flags.bits().cast_signed()).open(path)?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(io::Error::other("it is no plain file")) }
}

fn header(begins_at: u64) -> Vec<u8> {
    let mut text = serde_json::to_vec(&Header { begins_at }).unwrap_or_default();
    text.push(b'\n');
    text
}

/// The place of the whole journal at which a file begins, from the file's first line.
fn begins_at(file: &File) -> io::Result<u64> {
    let mut text = [0; 64];
    let read = file.read_at(&mut text, 0)?;
    let line = text[..read].split(|byte| *byte == b'\n').next().unwrap_or_default();
    Ok(serde_json::from_slice::<Header>(line).map(|header| header.begins_at)?)
}

fn end_of(file: &File) -> io::Result<u64> {
    Ok(begins_at(file)?.saturating_add(file.metadata()?.len()))
}

/// The lines in a text that begins at `place` of the journal. Parts of lines, and headers of files, are left out.
fn whole_lines(text: &[u8], place: u64, most_bytes: usize) -> Lines {
    let mut lines = Lines { lines: Vec::new(), next: place };
    for line in text.split_inclusive(|byte| *byte == b'\n') {
        // The rest may be half a line that is still being written. A line longer than `most_bytes` is passed over.
        if line.last() != Some(&b'\n') && text.len() < most_bytes {
            break;
        }
        if line.last() != Some(&b'\n') && !lines.lines.is_empty() {
            break;
        }
        lines.next += line.len() as u64;
        let is_line = serde_json::from_slice::<Line<serde_json::Value>>(line).is_ok();
        if let Some(text) = is_line.then(|| std::str::from_utf8(line).ok()).flatten() {
            lines.lines.push((lines.next, text.trim_end().to_owned()));
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn append(journal: &Journal, numbers: std::ops::Range<u64>, filling: usize) {
        let line = |n| Line::now(By::this_process(), "counted", json!({ "n": n, "filling": "x".repeat(filling) }));
        journal.append(numbers.map(line)).unwrap();
    }

    fn numbers(lines: &Lines) -> Vec<u64> {
        let number = |line: &String| serde_json::from_str::<Value>(line).unwrap()["n"].as_u64().unwrap();
        lines.lines.iter().map(|(_, line)| number(line)).collect()
    }

    #[test]
    fn lines_behind_a_place_are_each_read_once() {
        let dir = tempfile::tempdir().unwrap();
        let journal = Journal::of_service(dir.path());
        assert_eq!(journal.read(7, 1 << 20).unwrap(), Lines::default());
        let (mut place, mut seen) = (0, Vec::new());
        // Lines of 36 MB: four full files, and a part of the fifth.
        for round in 0..36 {
            append(&journal, round * 10..round * 10 + 10, 100_000);
            loop {
                let lines = journal.read(place, 1 << 20).unwrap();
                place = lines.next;
                if lines.lines.is_empty() {
                    break;
                }
                seen.extend(numbers(&lines));
            }
        }
        assert_eq!(seen, (0..360).collect::<Vec<_>>());
        assert_eq!(numbers(&journal.read(0, 1 << 20).unwrap())[0], 0);
        (36..100).for_each(|round| append(&journal, round * 10..round * 10 + 10, 100_000));
        assert!(numbers(&journal.read(0, 1 << 20).unwrap())[0] > 300, "the oldest lines go");
        assert_eq!(fs::read_dir(journal.path().parent().unwrap()).unwrap().count(), 1 + OLDER);
    }

    #[test]
    fn halves_of_lines_are_no_lines() {
        let dir = tempfile::tempdir().unwrap();
        let journal = Journal::of_service(dir.path());
        append(&journal, 0..1, 1);
        let half = |text: &str| {
            File::options().append(true).open(journal.path()).unwrap().write_all(text.as_bytes()).unwrap();
        };
        half("{\"time\":\"");
        let lines = journal.read(0, 1 << 20).unwrap();
        assert_eq!(numbers(&lines), [0]);
        append(&journal, 1..2, 1);
        assert_eq!(numbers(&journal.read(lines.next, 1 << 20).unwrap()), [1]);
        // From the middle of a line, the next one counts.
        assert_eq!(numbers(&journal.read(lines.next - 5, 1 << 20).unwrap()), [1]);
        assert_eq!(numbers(&journal.read(u64::MAX, 1 << 20).unwrap()), [0, 1], "it was removed, and began anew");
    }

    #[test]
    fn processes_that_append_at_the_same_time_lose_no_line() {
        let dir = tempfile::tempdir().unwrap();
        let journal = Journal::of_service(dir.path());
        std::thread::scope(|scope| {
            for thread in 0..8 {
                let journal = &journal;
                scope
                    .spawn(move || (0..20).for_each(|n| append(journal, thread * 20 + n..thread * 20 + n + 1, 60_000)));
            }
        });
        let (mut place, mut seen) = (0, Vec::new());
        loop {
            let lines = journal.read(place, 1 << 20).unwrap();
            if lines.lines.is_empty() {
                break;
            }
            (place, seen) = (lines.next, [seen, numbers(&lines)].concat());
        }
        seen.sort_unstable();
        assert_eq!(seen, (0..160).collect::<Vec<_>>());
    }
}
