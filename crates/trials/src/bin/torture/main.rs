//! Programs that verify themselves while they are folded. Each knows the value of every byte of its memory, and
//! changes its memory all the time, in every way that a program can. It ends with exit code 1 as soon as a byte is
//! wrong.
//!
//! ```text
//! memory   pages of few different contents, written, checked, discarded, protected, moved, forked, ...
//! born     memory that maps a template, written, restored, discarded and checked
//! heap     the same through the allocator, for a member of which everything anonymous is folded
//! stable   duplicates that rest and are checked until the program is killed; prints a count every second
//! direct   reads of a known file, past the page cache and by io_uring, into pages that are just being folded
//! vcpu     a KVM vCPU that counts in pages of its guest while they are duplicates by turns
//! refs     does as standard input says: holds pages in ways that a fold cannot see
//! escape   tries to write what it may only read, and to get at the pages of others
//! hostile  is an agent that lies
//! yielding registers its own memory with a userfaultfd, as a migration does
//! ```
//! The contents come from a small set that is the same in every process, so that most pages have duplicates here and
//! elsewhere. A success prints one line of JSON.

mod area;
mod born;
mod chaos;
mod children;
mod content;
mod direct;
mod escape;
mod heap;
mod hostile;
mod owners;
mod plot;
mod refs;
mod ring;
mod stable;
mod tally;
mod vcpu;
mod yielding;

use clap::{Parser, Subcommand};

#[derive(Parser)]
struct Cli {
    #[command(subcommand)]
    mode: Mode,
}

#[derive(Subcommand)]
enum Mode {
    Memory(owners::Args),
    Born(born::Args),
    Heap(heap::Args),
    Stable(stable::Args),
    Direct(direct::Args),
    Vcpu(vcpu::Args),
    Refs(refs::Args),
    Escape(escape::Args),
    Hostile(hostile::Args),
    Yielding(yielding::Args),
}

fn main() {
    match Cli::parse().mode {
        Mode::Memory(args) => owners::run(&args),
        Mode::Born(args) => born::run(&args),
        Mode::Heap(args) => heap::run(&args),
        Mode::Stable(args) => stable::run(&args),
        Mode::Direct(args) => direct::run(&args),
        Mode::Vcpu(args) => vcpu::run(&args),
        Mode::Refs(args) => refs::run(&args),
        Mode::Escape(args) => escape::run(&args),
        Mode::Hostile(args) => hostile::run(&args),
        Mode::Yielding(args) => yielding::run(&args),
    }
}
