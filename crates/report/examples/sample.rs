//! Prints the tables of a made-up census, and writes its report to look at:
//! `cargo run -p report --example sample [FILE]`.

#[path = "../tests/report/sample.rs"]
mod sample;

use report::html::{self, Report};
use std::fs::File;
use std::io::{self, BufWriter, Write};

fn main() -> io::Result<()> {
    let findings = sample::with_change_and_partial(sample::findings(2));
    let footprints = sample::footprints(&findings);
    report::census_table::write(&mut io::stdout().lock(), &findings)?;
    let Some(path) = std::env::args_os().nth(1) else { return Ok(()) };
    let mut out = BufWriter::new(File::create(path)?);
    let made_at = "on a made-up host";
    html::write(&mut out, &Report { findings: &findings, footprints: &footprints, title: "A sample census", made_at })?;
    out.flush()
}
