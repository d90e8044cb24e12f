//! A program bound by memory: it walks about in huge pages, where each step waits for the one before. Of some of them, a
//! part is equal to another program's.

use super::super::synthetic::{AlignedPage, filled};
use super::probe::{Answer, answer_to};
use crate::exit::Outcome;
use anyhow::bail;
use page::PAGE_BYTES;
use std::hint::black_box;
use std::time::Instant;

/// Of a quarter of the memory each: how many of four pages the other program has, too.
const SHARED: [usize; 4] = [0, 1, 3, 4];
/// Pages that belong together, as those of a file do.
const RUN: usize = 16;
/// The median is taken of so many walks ...
const WALKS: usize = 60;
/// ... of so many steps.
const STEPS: u64 = 200_000;

/// Arguments of the hidden command that is such a program.
#[derive(clap::Args)]
pub struct WalkArgs {
    /// Which one
    #[arg(long)]
    number: u64,
    /// Its pages
    #[arg(long)]
    pages: usize,
}

/// Is one until its input closes.
pub fn walk(args: &WalkArgs) -> anyhow::Result<Outcome> {
    let mut memory: Vec<AlignedPage> = Vec::with_capacity(args.pages);
    host::prefer_huge_pages(memory.spare_capacity_mut())?;
    host::ask_to_merge(memory.spare_capacity_mut())?;
    memory.extend((0..args.pages).map(|n| filled(seed(n, args))));
    answer_to(|what| match what {
        "walk" => Ok(Answer::Walk { step_ns: step_ns(&memory) }),
        // Nothing is equal to anything any more.
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

/// Nanoseconds a step, at the median.
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

/// Where each step goes depends on what was read in the one before.
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
