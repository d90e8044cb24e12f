//! `born`: memory that maps a template's file privately, written, restored, discarded and checked by its owners.
//!
//! Page `p` of the template holds the content of class `p % classes`; of class 0 it holds zeros. A page of this process
//! holds the same until its owner writes it. When the owner discards the page, it holds the template's content again.

use crate::area::{Area, WORDS};
use crate::content::{Random, mark, place, word};
use crate::tally::{CHECKED, must};
use serde_json::json;
use std::fs::File;
use std::io::BufRead;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

/// Write and check memory that maps a template
#[derive(clap::Args)]
pub struct Args {
    /// The template's file
    #[arg(long)]
    template: PathBuf,
    /// Pages
    #[arg(long, default_value_t = 2048)]
    pages: usize,
    /// Different contents of the template's pages
    #[arg(long, default_value_t = 100)]
    classes: usize,
    /// Fill the file with the contents of a template, and end
    #[arg(long)]
    fill: bool,
    /// Threads that own the pages
    #[arg(long, default_value_t = 2)]
    threads: usize,
    /// Let children inherit the memory
    #[arg(long)]
    inherited: bool,
}

/// The content that a page must hold: a class, and how often its owner has written its own word since.
#[derive(Clone, Copy)]
struct State {
    class: u32,
    sequence: u32,
}

/// Runs the mode, until its input ends.
pub fn run(args: &Args) {
    let class_of = |page: usize| (page % args.classes) as u32;
    if args.fill {
        let file = File::options().write(true).open(&args.template).expect("open the template");
        for page in (0..args.pages).filter(|page| class_of(*page) != 0) {
            let bytes: Vec<u8> = (0..WORDS).flat_map(|n| word(class_of(page), n).to_ne_bytes()).collect();
            file.write_all_at(&bytes, page as u64 * 4096).expect("write the template");
        }
        return;
    }
    let file = File::open(&args.template).expect("open the template");
    let area = Arc::new(Area::of_file(&file, args.pages));
    if !args.inherited {
        area.advise(0, args.pages, libc::MADV_DONTFORK).expect("MADV_DONTFORK");
    }
    area.mergeable_again(0, args.pages);
    let over = Arc::new(AtomicBool::new(false));
    let owners: Vec<_> = (0..args.threads)
        .map(|owner| {
            let pages: Vec<usize> = (0..args.pages).filter(|page| page / 16 % args.threads == owner).collect();
            let states = pages.iter().map(|page| State { class: class_of(*page), sequence: 0 }).collect();
            let owner = Owner { area: Arc::clone(&area), pages, states, classes: args.classes };
            let over = Arc::clone(&over);
            std::thread::spawn(move || owner.run(&over))
        })
        .collect();
    std::io::stdin().lock().lines().map_while(Result::ok).for_each(drop);
    over.store(true, SeqCst);
    let done: u64 = owners.into_iter().map(|owner| owner.join().expect("an owner")).sum();
    println!("{}", json!({"mode": "born", "steps": done, "checked": CHECKED.load(Relaxed)}));
}

struct Owner {
    area: Arc<Area>,
    pages: Vec<usize>,
    states: Vec<State>,
    classes: usize,
}

impl Owner {
    fn run(mut self, over: &AtomicBool) -> u64 {
        let (mut random, mut steps) = (Random::unforeseen(), 0);
        while !over.load(Relaxed) {
            for _ in 0..8 {
                let i = random.below(self.pages.len());
                self.check(i);
                self.step(i, &mut random);
                self.check(i);
                steps += 1;
            }
            // Without pauses no page would stay unwritten long enough to be folded.
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        (0..self.pages.len()).for_each(|i| self.check(i));
        steps
    }

    fn step(&mut self, i: usize, random: &mut Random) {
        let (page, home) = (self.pages[i], (self.pages[i] % self.classes) as u32);
        match random.below(8) {
            0..3 => {
                self.states[i].sequence += 1;
                self.area.word(page, place(page)).store(mark(page, self.states[i].sequence), SeqCst);
            }
            3..5 => self.fill(i, home),
            5 => self.fill(i, random.below(self.classes) as u32),
            6 => self.discard(i, home, |area| area.advise(page, 1, libc::MADV_DONTNEED)),
            _ => self.discard(i, home, |area| area.discard_past_hooks(page, 1)),
        }
    }

    fn fill(&mut self, i: usize, class: u32) {
        for n in 0..WORDS {
            self.area.word(self.pages[i], n).store(word(class, n), Relaxed);
        }
        self.states[i] = State { class, sequence: 0 };
    }

    fn discard(&mut self, i: usize, home: u32, how: impl Fn(&Area) -> std::io::Result<()>) {
        how(&self.area).expect("MADV_DONTNEED");
        self.states[i] = State { class: home, sequence: 0 };
    }

    fn check(&self, i: usize) {
        let (page, State { class, sequence }) = (self.pages[i], self.states[i]);
        for n in 0..WORDS {
            let expected = if sequence > 0 && n == place(page) { mark(page, sequence) } else { word(class, n) };
            let found = self.area.word(page, n).load(Relaxed);
            let address = self.area.address(page);
            let wrong = || crate::tally::Mismatch { address, page, offset: n * 8, expected, found };
            must("born", if found == expected { Ok(()) } else { Err(wrong()) });
        }
        CHECKED.fetch_add(1, Relaxed);
    }
}
