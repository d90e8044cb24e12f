//! Tables of measured figures, made from raw output of benches: `./x figures`.
//!
//! ```text
//!  docs/figures/NAME.json --> record --> ksm, churn, containers: rows --> table --.
//!                                                                                 v
//!  docs/performance.md:                    <!-- figures: NAME --> caption and table <!-- end -->
//! ```
//!
//! `--check` writes nothing and fails where a table differs from its record. A record is a bench's output with its
//! date, its command and its machine; docs/method.md tells how one is made.

mod churn;
mod containers;
mod ksm;
mod record;
mod table;

use std::fmt;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};

use crate::{files, markers};
use record::Record;

/// The document with the tables.
const DOCUMENT: &str = "docs/performance.md";
/// Directory of the records.
const RECORDS: &str = "docs/figures";
/// Largest size of a record, in bytes.
const MOST_BYTES: usize = 60_000;

/// The tables that differed, and whether they were written.
pub struct Report {
    /// Names of tables that differed from their records.
    pub stale: Vec<String>,
    is_written: bool,
}

/// Makes every table of the document anew, and writes it unless it is only to be checked.
pub fn update(root: &Path, only_check: bool) -> Result<Report> {
    let text = files::read(root, DOCUMENT)?;
    let rendered = markers::fill(&text, "figures", |name| table_of(root, name))
        .with_context(|| format!("cannot use {DOCUMENT}"))?;
    let is_written = !only_check && !rendered.stale.is_empty();
    if is_written {
        fs::write(root.join(DOCUMENT), &rendered.text).with_context(|| format!("cannot write {DOCUMENT}"))?;
    }
    Ok(Report { stale: rendered.stale, is_written })
}

/// The caption and the table of the record with this name.
fn table_of(root: &Path, name: &str) -> Result<String> {
    let file = format!("{RECORDS}/{name}.json");
    let json = files::read(root, &file)?;
    ensure!(json.len() <= MOST_BYTES, "{file} has {} bytes, more than {MOST_BYTES}: thin its curves", json.len());
    let record: Record = serde_json::from_str(&json).with_context(|| format!("cannot read {file}"))?;
    let rows = if record.has_containers() {
        containers::rows(&record)
    } else if record.has_minutes() {
        churn::rows(&record)
    } else {
        ksm::rows(&record)
    };
    let rows = rows.with_context(|| format!("{file} is no output of a bench that has a table"))?;
    Ok(format!("{}\n\n{}", record.caption(), table::markdown(&rows)))
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        for name in &self.stale {
            match self.is_written {
                true => writeln!(f, "{DOCUMENT}: table {name} is written")?,
                false => writeln!(f, "{DOCUMENT}: table {name} differs from {RECORDS}/{name}.json: run ./x figures")?,
            }
        }
        if self.stale.is_empty() {
            writeln!(f, "All tables are as their records say.")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A root with one record and a document that names it.
    fn root() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join(RECORDS)).unwrap();
        fs::write(root.path().join(RECORDS).join("a.json"), churn::EXAMPLE).unwrap();
        fs::write(root.path().join(DOCUMENT), "# A\n\n<!-- figures: a -->\n<!-- end -->\n\nB.\n").unwrap();
        root
    }

    #[test]
    fn tables_are_written_once() {
        let root = root();
        assert_eq!(update(root.path(), false).unwrap().stale, ["a"]);
        let text = fs::read_to_string(root.path().join(DOCUMENT)).unwrap();
        assert!(
            text.contains("| short-lived folds | at most 5%: met |") && text.ends_with("<!-- end -->\n\nB.\n"),
            "{text}"
        );
        assert!(update(root.path(), true).unwrap().stale.is_empty());
    }

    #[test]
    fn a_changed_figure_fails_the_check() {
        let root = root();
        update(root.path(), false).unwrap();
        let path = root.path().join(DOCUMENT);
        let text = fs::read_to_string(&path).unwrap().replace("20.0 s", "19.0 s");
        fs::write(&path, &text).unwrap();
        let report = update(root.path(), true).unwrap();
        assert_eq!(report.stale, ["a"]);
        assert!(report.to_string().contains("run ./x figures"));
        assert_eq!(fs::read_to_string(&path).unwrap(), text);
    }

    #[test]
    fn large_and_missing_records_are_errors() {
        let root = root();
        let record = root.path().join(RECORDS).join("a.json");
        fs::write(&record, " ".repeat(MOST_BYTES + 1)).unwrap();
        assert!(format!("{:#}", update(root.path(), true).err().unwrap()).contains("thin its curves"));
        fs::remove_file(&record).unwrap();
        assert!(update(root.path(), true).is_err());
    }
}
