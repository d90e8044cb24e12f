//! `pagefold bench`: compares Pagefold with ksmd, with plain hashing, reading and copying of the same bytes, and with
//! not using it. Each bench measures both sides in one run.
#![forbid(unsafe_code)]

use clap::Subcommand;
use cli::exit::Outcome;
use std::ffi::OsString;

mod admit;
mod attach;
mod balance;
mod census;
mod compiled;
mod containers;
mod guardian;
mod insight;
mod ksm;
mod latency;
mod median;
mod overhead;
mod park;
mod place;
mod policy;
mod ratio;
mod serve;
mod serving;
mod side;
mod start;
mod swap;
mod synthetic;
pub mod workload;
mod zram;

pub use balance::{SmallHost, Storm, make_storm};
pub use guardian::Guardian;
pub use ksm::ksmd::{WholeHost, may_use};
pub use serving::{Serving, prover_of};
pub use start::{Storms, private_ram_bytes};
pub use swap::Swap;
pub use synthetic::{AlignedPage, filled, write_pages};

/// Arguments of `pagefold bench`.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Admission of guests on a simulated host, with departures and storms, and the time that an answer takes
    Admit(admit::Args),
    /// Attaching to a running program that checks itself, and detaching again: what is stopped, interrupted, and left
    Attach(attach::Args),
    /// Memory between guests, when drivers, QEMU and guests fail
    Balance(balance::Args),
    /// The census against plain hashing and copying of the same bytes
    Census(census::Args),
    /// Containers whose programs are attached, against the kernel's own merger (ksmd) with all of them opted in
    Containers(containers::Args),
    /// Cost of split huge pages for a program bound by memory, and how many come back
    Huge(ksm::HugeArgs),
    /// Looking into running VMs, against a plain read of what describes their frames
    Insight(insight::Args),
    /// Folding against the kernel's own merger (ksmd), with the same guests
    Ksm(ksm::Args),
    /// How long requests and ticks take while their programs are folded, against unfolded, on an idle and on a busy host
    Latency(latency::Args),
    /// Storms, servers, builds and guests as members against not: how much longer they take
    Overhead(overhead::Args),
    /// Plans for a simulated fleet: hosts that each policy needs, and how long a plan takes
    Place(place::Args),
    /// Guests that are parked and woken
    Park(park::Args),
    /// Rules that say which pages are folded, replayed over what programs wrote
    Policy(policy::Args),
    /// A service with many members: answers, costs, and whether the savings that it shows are so
    Serve(serve::Args),
    /// Guests that are cloned, beside the same guests booted, restored, and cloned by stock QEMU
    Start(start::Args),
}

/// Arguments of the hidden command by which a bench starts its processes.
#[derive(clap::Args)]
pub struct GuestArgs {
    #[command(subcommand)]
    what: GuestOf,
}

#[derive(Subcommand)]
enum GuestOf {
    /// Hold pages until input closes
    Hold(synthetic::HoldArgs),
    /// Compute for a part of the time on one processor, until input closes
    Burn(latency::BurnArgs),
    /// Hold pages that may be merged
    Mergeable(ksm::MergeableArgs),
    /// Measure from inside how merging affects a guest
    Probe,
    /// Walk in memory, each step waiting for the one before
    Walk(ksm::WalkArgs),
    /// Put the host back as it was when the bench has ended
    Guard,
}

/// Runs the chosen bench. `place` is run with the arguments of `pagefold bench place`.
pub fn run(args: Args, place: impl FnOnce(&[OsString]) -> anyhow::Result<Outcome>) -> anyhow::Result<Outcome> {
    match args.what {
        What::Admit(args) => admit::run(&args),
        What::Attach(args) => attach::run(&args),
        What::Balance(args) => balance::run(&args),
        What::Census(args) => census::run(&args),
        What::Containers(args) => containers::run(&args),
        What::Huge(args) => ksm::run_huge(&args),
        What::Insight(args) => insight::run(&args),
        What::Ksm(args) => ksm::run(&args),
        What::Latency(args) => latency::run(&args),
        What::Overhead(args) => overhead::run(&args),
        What::Place(args) => place::run(&args, place),
        What::Park(args) => park::run(&args),
        What::Policy(args) => policy::run(&args),
        What::Serve(args) => serve::run(&args),
        What::Start(args) => start::run(&args),
    }
}

/// Runs one of the processes that benches start: a guest, a load, or the guardian.
pub fn run_guest(args: &GuestArgs) -> anyhow::Result<Outcome> {
    match &args.what {
        GuestOf::Burn(args) => latency::burn(args),
        GuestOf::Hold(args) => synthetic::hold(args),
        GuestOf::Mergeable(args) => ksm::hold(args),
        GuestOf::Probe => ksm::probe(),
        GuestOf::Walk(args) => ksm::walk(args),
        GuestOf::Guard => guardian::guard(),
    }
}
