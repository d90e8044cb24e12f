//! A program whose speed depends on memory: it reads places all over its memory, each of which follows from what was
//! read before. Its memory lies in huge pages. In some of these, a part of the small pages is equal to another
//! walker's.

use super::probe::{Answer, answer_to};
use crate::synthetic::{AlignedPage, filled};
use anyhow::bail;
use cli::exit::Outcome;
use page::PAGE_BYTES;
use std::hint::black_box;
use std::time::Instant;

/// For each quarter of the memory: how many in every four runs of pages are equal to another walker's.
const SHARED: [usize; 4] = [0, 1, 3, 4];
/// Length of a run in pages. All of a run is equal to another walker's, or nothing, as with pages of files.
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
        // After this request, no page is equal to another one, in this walker or another.
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

/// Nanoseconds per step: the median over `WALKS` walks.
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

/// One walk of `STEPS` steps. Each step reads a byte, from which the place of the next step follows.
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
