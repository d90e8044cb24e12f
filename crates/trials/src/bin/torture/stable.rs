//! `stable`: duplicates that stay unwritten, and are checked until the program is killed. A few pages are written, so
//! that a fault of folding could lose data.

use crate::children::Children;
use crate::content::Random;
use crate::plot::Plot;
use crate::tally::must;
use serde_json::json;
use std::io::Write;
use std::time::{Duration, Instant};

/// Hold duplicates and check them for ever
#[derive(clap::Args)]
pub struct Args {
    /// Pages
    #[arg(long, default_value_t = 4096)]
    pages: usize,
    /// Different contents
    #[arg(long, default_value_t = 100)]
    classes: usize,
    /// Pages written a second
    #[arg(long, default_value_t = 200)]
    writes: usize,
    /// Share of the pages that are never written, in percent
    #[arg(long, default_value_t = 50)]
    untouched: usize,
    /// Fork children that check what they inherited
    #[arg(long)]
    children: bool,
}

/// Runs the mode.
pub fn run(args: &Args) {
    const TICK: Duration = Duration::from_millis(10);
    let mut random = Random::unforeseen();
    let mut plot = Plot::whole(args.pages, args.classes);
    must("while it was filled", plot.fill_all(&mut random));
    let mut children = Children::default();
    // Pages that are shared with a child are not folded, so the first child is forked some seconds late.
    let (mut checked, mut line, mut birth) = (0_u64, Instant::now(), Instant::now() + Duration::from_secs(4));
    let untouched = args.pages * args.untouched / 100;
    loop {
        for _ in 0..args.pages / 50 {
            must("at rest", plot.check(random.below(args.pages)));
            checked += 1;
        }
        for _ in 0..args.writes / 100 {
            let i = untouched + random.below(args.pages - untouched);
            must("visited", plot.poke(i, 1, &mut random));
        }
        if args.children && Instant::now() > birth {
            birth = Instant::now() + Duration::from_millis(1500);
            children.born(&mut plot, &mut random);
        }
        if line.elapsed() > Duration::from_secs(1) {
            line = Instant::now();
            let mut out = std::io::stdout().lock();
            let said = writeln!(out, "{}", json!({"checked": checked})).and_then(|()| out.flush());
            // The reader of the output has gone.
            if said.is_err() {
                return;
            }
        }
        std::thread::sleep(TICK);
    }
}
