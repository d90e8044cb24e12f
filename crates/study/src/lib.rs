//! `pagefold study`: experiments of papers, repeated on this host with real guests, and a verdict for each prediction.
//!
//! ```text
//!   data/PAPER.toml    the study: arms, metrics, predictions, the paper's numbers        data
//!   recipe             measures one turn of one arm                                      recipes, on a rig
//!   turns              arms alternate; each turn is kept on disk                         plan, store, runner, series
//!   samples            one a repetition                                                  record
//!   verdicts           holds, fails, undecided with the n that would decide              check, stats
//!   table, JSON, page  the paper's numbers beside ours                                   table, result, page
//! ```
#![forbid(unsafe_code)]

mod args;
mod check;
mod data;
mod dose;
mod figure;
mod guest;
mod ksm;
mod list;
mod losses;
mod page;
mod plan;
mod recipes;
mod record;
mod register;
mod result;
mod rig;
mod runner;
mod selftest;
mod series;
mod standing;
mod state;
mod stats;
mod store;
mod table;
mod words;

pub use args::{Args, run};
pub use guest::{GuestArgs, run as run_guest};
