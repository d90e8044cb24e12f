//! `refs`: holds pages in ways that moving a page to a slot does not notice. Few programs do so.
//!
//! It carries out commands from standard input, one a line, and answers each with `ok` or with the error.
//!
//! ```text
//! fill PAGES          memory that asks to be merged, full of duplicates
//! more PAGES          the same once more
//! again               every page is written, and holds the same as another one again
//! check               all of it is as it must be
//! vmsplice            lends pages to a pipe that nobody reads
//! direct PATH         opens a file with O_DIRECT
//! read PATH           opens a file for reading
//! close               closes what these opened
//! folded              answers with the number of pages that are folded
//! exec                executes another program, which lives as long
//! ```

use crate::area::{KEPT_FROM_CHILDREN, folded, pipe};
use crate::content::Random;
use crate::plot::Plot;
use crate::tally::must;
use std::fs::File;
use std::io::{self, BufRead, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::sync::atomic::Ordering::Relaxed;

/// Hold pages as standard input says
#[derive(clap::Args)]
pub struct Args {
    /// Different contents
    #[arg(long, default_value_t = 20)]
    classes: usize,
    /// Memory that children do not get
    #[arg(long)]
    dont_fork: bool,
}

/// Runs the mode.
pub fn run(args: &Args) {
    KEPT_FROM_CHILDREN.store(args.dont_fork, Relaxed);
    let mut state = State { plots: Vec::new(), files: Vec::new(), classes: args.classes };
    for line in io::stdin().lock().lines() {
        let Ok(line) = line else { return };
        let words: Vec<_> = line.split(' ').collect();
        let answer = state.obey(&words).unwrap_or_else(|e| e.to_string());
        let mut out = io::stdout().lock();
        if writeln!(out, "{answer}").and_then(|()| out.flush()).is_err() {
            return;
        }
    }
}

struct State {
    plots: Vec<Plot>,
    files: Vec<File>,
    classes: usize,
}

impl State {
    fn obey(&mut self, words: &[&str]) -> io::Result<String> {
        match *words {
            ["fill" | "more", pages] => {
                let mut plot = Plot::whole(pages.parse().expect("a number"), self.classes);
                must("while it was filled", plot.fill_all(&mut Random::unforeseen()));
                self.plots.push(plot);
            }
            ["again"] => self.plots.iter_mut().for_each(|plot| {
                must("while it was written", plot.fill_all(&mut Random::unforeseen()));
            }),
            ["check"] => self.plots.iter().for_each(|plot| must("when asked", plot.check_all())),
            ["vmsplice"] => {
                let (from, to) = pipe();
                self.plots[0].area().lend_to(0, 8, &to)?;
                self.files.extend([from, to]);
            }
            ["direct", path] => {
                self.files.push(File::options().read(true).custom_flags(libc::O_DIRECT).open(path)?);
            }
            ["read", path] => self.files.push(File::open(path)?),
            ["close"] => self.files.clear(),
            ["folded"] => return Ok(self.folded().to_string()),
            ["exec"] => return Err(std::process::Command::new("cat").exec()),
            _ => panic!("not understood: {words:?}"),
        }
        Ok("ok".to_owned())
    }

    fn folded(&self) -> usize {
        self.plots.iter().map(|plot| folded(plot.area(), 0, plot.area().pages())).sum()
    }
}

impl crate::area::Area {
    /// Puts references to pages into a pipe (`vmsplice`).
    fn lend_to(&self, from: usize, pages: usize, pipe: &impl AsRawFd) -> io::Result<()> {
        let part = libc::iovec { iov_base: self.address(from) as *mut _, iov_len: pages * crate::area::PAGE };
        // SAFETY: within an area that is kept; the pipe only reads it.
        let count = unsafe { libc::vmsplice(pipe.as_raw_fd(), &raw const part, 1, 0) };
        if count < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}
