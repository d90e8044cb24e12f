//! `pagefold bench start`: guests that are cloned, beside the same guests booted, restored by copying, and cloned by stock QEMU.
//!
//! ```text
//!   image -> template -> rounds: boot, restore, stock clone, clone, warm clone, rollback     one
//!                     -> N clones in one request; N by stock QEMU                            many
//!                     -> the same N, idle, some of them called: what MemAvailable lost       density
//! ```
//!
//! The clock runs from the command's beginning to an answer from inside. A clone's answer has a nonce and a new machine-id; a
//! stock clone's is that a command has run.

mod density;
mod scene;

use crate::guardian::Guardian;
use crate::ksm::make_dir;
use crate::median::median;
use anyhow::Context;
use cli::exit::Outcome;
use cli::say;
use density::Density;
use lab::Image;
use scene::Scene;
use serde::Serialize;
use std::io::Write;

/// Arguments of `pagefold bench start`.
#[derive(clap::Args)]
#[command(after_help = "\
Example:
  pagefold bench start --image tiny --rounds 5 --many 100 --json")]
pub struct Args {
    /// Images, separated by commas: tiny, debian
    #[arg(long, value_delimiter = ',', default_value = "tiny", value_name = "IMAGE,...", value_parser = parse_image)]
    image: Vec<Image>,
    /// Turns of each way to start one guest
    #[arg(long, value_name = "R", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Guests that are started at once; 0 for none
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(0..=1000))]
    many: u32,
    /// Seconds of idleness before memory is counted
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(0..=3600))]
    idle: u64,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn parse_image(text: &str) -> Result<Image, String> {
    match text {
        "tiny" => Ok(Image::Tiny),
        "debian" => Ok(Image::Debian),
        _ => Err("only VMs have templates: tiny, debian".into()),
    }
}

/// Times of one guest, in ms: medians of the rounds.
#[derive(Serialize)]
struct One {
    image: Image,
    clone_p50_ms: f64,
    warm_p50_ms: f64,
    boot_p50_ms: f64,
    restore_p50_ms: f64,
    rollback_p50_ms: f64,
    stock_p50_ms: f64,
    clone_to_boot: f64,
    clone_to_restore: f64,
    clone_to_stock: f64,
    warm_to_clone: f64,
    /// Each round's times, in ms.
    rounds: Vec<Times>,
}

/// One round, in ms.
#[derive(Clone, Copy, Serialize)]
pub struct Times {
    boot: f64,
    restore: f64,
    stock: f64,
    clone: f64,
    warm: f64,
    rollback: f64,
}

/// Many guests at once.
#[derive(Serialize)]
struct Many {
    image: Image,
    arm: &'static str,
    n: u32,
    all_answered_s: f64,
    cpu_s_each: f64,
}

/// The result.
#[derive(Default, Serialize)]
struct Bench {
    one: Vec<One>,
    many: Vec<Many>,
    density: Vec<Density>,
}

/// Runs the bench and prints its result.
pub fn run(args: &Args) -> anyhow::Result<Outcome> {
    let mut guardian = Guardian::start()?;
    let dir = make_dir(&mut guardian)?;
    let mut bench = Bench::default();
    for image in &args.image {
        let scene = Scene::prepare(*image, &dir)?;
        let mut rounds = Vec::new();
        for round in 1..=args.rounds {
            say!("pagefold: {}: round {round} of {}", scene.name(), args.rounds);
            rounds.push(scene.round()?);
        }
        bench.one.push(one(*image, rounds));
        if args.many > 0 {
            say!("pagefold: {}: {} at once", scene.name(), args.many);
            many(args, &scene, *image, &mut bench)?;
        }
    }
    guardian.finish()?;
    let mut out = std::io::stdout().lock();
    if args.json { report::json::write(&mut out, &bench) } else { print(&mut out, &bench) }
        .and_then(|()| out.flush())
        .context("cannot write to stdout")?;
    Ok(Outcome::Done)
}

fn one(image: Image, rounds: Vec<Times>) -> One {
    let of = |figure: fn(&Times) -> f64| median(&rounds.iter().map(figure).collect::<Vec<_>>());
    let (clone, warm) = (of(|times| times.clone), of(|times| times.warm));
    let (boot, restore, stock) = (of(|times| times.boot), of(|times| times.restore), of(|times| times.stock));
    One {
        image,
        clone_p50_ms: clone,
        warm_p50_ms: warm,
        boot_p50_ms: boot,
        restore_p50_ms: restore,
        rollback_p50_ms: of(|times| times.rollback),
        stock_p50_ms: stock,
        clone_to_boot: clone / boot,
        clone_to_restore: clone / restore,
        clone_to_stock: clone / stock,
        warm_to_clone: warm / clone,
        rounds,
    }
}

/// Starts many guests by either way, and counts what they take.
fn many(args: &Args, scene: &Scene, image: Image, bench: &mut Bench) -> anyhow::Result<()> {
    for arm in ["stock", "clone"] {
        let before = density::available_bytes();
        let guests = scene.many(arm, args.many)?;
        bench.many.push(Many {
            image,
            arm,
            n: args.many,
            all_answered_s: guests.all_answered_s,
            cpu_s_each: guests.cpu_s_each(),
        });
        bench.density.push(density::of(image, arm, args.idle, before, &guests)?);
    }
    Ok(())
}

fn print(out: &mut impl Write, bench: &Bench) -> std::io::Result<()> {
    for one in &bench.one {
        writeln!(
            out,
            "{:?}, ms from the beginning to an answer from inside, median of {}",
            one.image,
            one.rounds.len()
        )?;
        for (name, ms) in [
            ("boot", one.boot_p50_ms),
            ("restore", one.restore_p50_ms),
            ("clone by stock QEMU", one.stock_p50_ms),
            ("clone", one.clone_p50_ms),
            ("clone, warm", one.warm_p50_ms),
            ("rollback", one.rollback_p50_ms),
        ] {
            writeln!(out, "  {name:<22} {ms:>8.0}")?;
        }
    }
    for many in &bench.many {
        let Many { arm, n, all_answered_s, cpu_s_each, .. } = many;
        writeln!(out, "{n} by {arm}: all answered in {all_answered_s:.1} s, {cpu_s_each:.2} CPU-s each")?;
    }
    for density in &bench.density {
        let Density { arm, n, seconds, guest_mib_each, vmm_mib_each, pss_mib_each, .. } = density;
        writeln!(
            out,
            "{n} by {arm} after {seconds} s, MiB each: guest {guest_mib_each:.1}, VMM {vmm_mib_each:.1}, PSS {pss_mib_each:.1}"
        )?;
    }
    Ok(())
}
