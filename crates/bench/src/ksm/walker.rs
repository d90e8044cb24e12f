//! A program bound by memory: it walks in huge pages, and each step must wait for the one before. In some of them, a
//! part of the small pages is equal to another program's.

use super::probe::{Answer, answer_to};
use crate::synthetic::{AlignedPage, filled};
use anyhow::bail;
use cli::exit::Outcome;
use page::PAGE_BYTES;
use std::hint::black_box;
use std::time::Instant;

/// Number of pages in every four runs that the other program has too, for each quarter of the memory.
const SHARED: [usize; 4] = [0, 1, 3, 4];
/// Length in pages of a run that is equal, or not, as a whole, like those of files.
const RUN: usize = 16;
/// Number of walks; their median counts.
const WALKS: usize = 60;
/// Number of steps of a walk.
const STEPS: u64 = 200_000;

/// Arguments of the hidden command that runs a walker.
#[derive(clap::Args)]
pub struct WalkArgs {
    /// Number of this walker
    #[arg(long)]
    number: u64,
    /// Pages to hold
    #[arg(long)]
    pages: usize,
}

/// Runs a program that holds memory and walks it (reads a word of each page) when standard input says so. It ends when
/// standard input closes.
pub fn walk(args: &WalkArgs) -> anyhow::Result<Outcome> {
    let mut memory: Vec<AlignedPage> = Vec::with_capacity(args.pages);
    act::prefer_huge_pages(memory.spare_capacity_mut())?;
    act::ask_to_merge(memory.spare_capacity_mut())?;
    memory.extend((0..args.pages).map(|n| filled(seed(n, args))));
    answer_to(|what| match what {
        "walk" => Ok(Answer::Walk { step_ns: step_ns(&memory) }),
        // From here on, no page is equal to another one.
        "differ" => {
            for (n, page) in (0..).zip(&mut memory) {
                page.0[..8].copy_from_slice(&((args.number + 1) << 40 | n).to_ne_bytes());
            }
            Ok(Answer::Ready)
        }
        other => bail!("a walker cannot do {other:?}"),
    })
}

fn seed(n: usize, args: &WalkArgs) -> u64 {
    let shared = n / RUN % 4 < SHARED[n * SHARED.len() / args.pages];
    if shared { 1 << 61 | n as u64 } else { (args.number + 1) << 40 | n as u64 }
}

/// Median of nanoseconds per step.
fn step_ns(memory: &[AlignedPage]) -> f64 {
    let mut walks: Vec<f64> = (0..WALKS)
        .map(|n| {
            let begin = Instant::now();
            black_box(steps(memory, n as u64));
            begin.elapsed().as_nanos() as f64 / STEPS as f64
        })
        .collect();
    walks.sort_by(f64::total_cmp);
    walks[WALKS / 2]
}

/// Walks `STEPS` steps. The place of each follows from the byte read in the one before.
fn steps(memory: &[AlignedPage], seed: u64) -> u64 {
    let mut state = seed;
    for _ in 0..STEPS {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        let page = ((state >> 32) * memory.len() as u64) >> 32;
        let byte = (state >> 16) as usize % PAGE_BYTES;
        state = state.wrapping_add(memory[page as usize].0[byte].into());
    }
    state
}
