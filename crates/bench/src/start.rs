//! `pagefold bench start`: guests that are cloned, beside the same guests booted, restored by copying, and cloned by stock QEMU.
//!
//! ```text
//!   image -> template -> rounds: boot, restore, stock clone, clone, warm clone, rollback     one
//!                     -> N clones in one request, folded and not; N by stock QEMU            many
//!                     -> the same N, idle, some of them called: what MemAvailable lost       density
//!                     -> guests that work, merged and not: their frames                      memory
//!                     -> guests restored by copying, onto their template                     restored
//!                     -> some guests at the same time: boot, restore, clone, container       storm
//!   warmed-up program -> containers that a zygote forks, copies of these, containers of LXC  containers
//! ```
//!
//! The clock runs from the command's beginning to an answer from inside. A clone's answer has a nonce and a new machine-id; a
//! stock clone's is that a command has run.

mod added;
mod contained;
mod density;
mod memory;
mod picture;
mod restored;
mod scene;
mod storm;

pub use density::private_ram_bytes;
pub(crate) use scene::{Guests, Scene};
pub use storm::Storms;

use crate::guardian::Guardian;
use crate::ksm::folding::{self, Folding as Service};
use crate::ksm::ksmd::{WholeHost, may_use};
use crate::ksm::make_dir;
use crate::ksm::merger::Merger;
use crate::median::median;
use anyhow::Context;
use cli::exit::Outcome;
use cli::say;
use contained::{Attached, Contained};
use density::{Before, Density};
use lab::Image;
use memory::Memory;
use picture::Figures;
use restored::{Folded, Restored};
use serde::Serialize;
use std::io::Write;
use std::path::{Path, PathBuf};
use storm::Storm;

/// The arm of clones that a service folds.
const FOLDED: &str = "clone+fold";

/// Arguments of `pagefold bench start`.
#[derive(clap::Args)]
#[command(after_help = "\
Example:
  pagefold bench start --image tiny --rounds 5 --many 100 --json
  pagefold bench start --rounds 0 --many 0 --work 600 --restored 20 --json
  pagefold bench start --from tiny.json,debian.json --report start.html")]
pub struct Args {
    /// Images, separated by commas: tiny, debian
    #[arg(long, value_delimiter = ',', default_value = "tiny", value_name = "IMAGE,...", value_parser = parse_image)]
    image: Vec<Image>,
    /// Turns of each way to start one guest; 0 for none
    #[arg(long, value_name = "R", default_value_t = 5, value_parser = clap::value_parser!(u32).range(0..=1000))]
    rounds: u32,
    /// Guests that are started at once; 0 for none
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(0..=1000))]
    many: u32,
    /// Seconds of idleness before memory is counted
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(0..=3600))]
    idle: u64,
    /// Seconds of work in guests whose memory is counted, in each of four arms; 0 for none
    #[arg(long, value_name = "SECONDS", default_value_t = 0, value_parser = clap::value_parser!(u64).range(0..=86_400))]
    work: u64,
    /// Arms of that work, separated by commas: clone, merge, clone+ksmd, clone+fold
    #[arg(long, value_delimiter = ',', default_values = memory::ARMS, value_name = "ARM,...", value_parser = parse_arm)]
    arms: Vec<&'static str>,
    /// Guests that work
    #[arg(long, value_name = "N", default_value_t = 12, value_parser = clap::value_parser!(u32).range(2..=1000))]
    workers: u32,
    /// Guests that are restored by copying, and folded onto their template; 0 for none
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=1000))]
    restored: u32,
    /// Numbers of guests that are wanted at the same time, separated by commas: 1,2,5,10, for example
    #[arg(long, value_delimiter = ',', value_name = "N,...", value_parser = clap::value_parser!(u32).range(1..=1000))]
    storm: Vec<u32>,
    /// Containers of a warmed-up program: forked by it, as a restored process tree leaves them, and started by LXC; 0 for none
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=1000))]
    containers: u32,
    #[command(flatten)]
    whole_host: WholeHost,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Write pictures of times and memory to FILE.html or FILE.svg
    #[arg(long, value_name = "FILE", value_parser = picture::parse_report)]
    report: Option<PathBuf>,
    /// Start nothing: draw what --json has printed to these files
    #[arg(long, value_delimiter = ',', value_name = "FILE,...", requires = "report", conflicts_with = "json")]
    from: Vec<PathBuf>,
}

fn parse_image(text: &str) -> Result<Image, String> {
    match text {
        "tiny" => Ok(Image::Tiny),
        "debian" => Ok(Image::Debian),
        _ => Err("only VMs have templates: tiny, debian".into()),
    }
}

fn parse_arm(text: &str) -> Result<&'static str, String> {
    let found = memory::ARMS.into_iter().find(|arm| *arm == text);
    found.ok_or_else(|| format!("the arms are {}", memory::ARMS.join(", ")))
}

/// Times of one guest, in ms: medians of the rounds.
#[derive(Serialize)]
struct One {
    /// Image of the guest.
    image: Image,
    /// Median time to an answer from inside a clone.
    clone_p50_ms: f64,
    /// The same of a clone whose machine waited.
    warm_p50_ms: f64,
    /// The same of the guest booted.
    boot_p50_ms: f64,
    /// The same of the guest restored by copying its memory from a file.
    restore_p50_ms: f64,
    /// The same of a clone that is put back.
    rollback_p50_ms: f64,
    /// The same of the guest cloned by QEMU alone, which keeps the kernel it booted.
    stock_p50_ms: f64,
    /// Ratio of the two times.
    clone_to_boot: f64,
    /// Ratio of the two times.
    clone_to_restore: f64,
    /// Ratio of the two times.
    clone_to_stock: f64,
    /// Ratio of the two times.
    warm_to_clone: f64,
    /// Each round's times, in ms.
    rounds: Vec<Times>,
}

/// One round, in ms.
#[derive(Clone, Copy, Serialize)]
pub struct Times {
    /// Booted.
    boot: f64,
    /// Restored by copying.
    restore: f64,
    /// Cloned by QEMU alone.
    stock: f64,
    /// Cloned.
    clone: f64,
    /// A machine that waited became a clone.
    warm: f64,
    /// A clone was put back.
    rollback: f64,
}

/// Many guests at once.
#[derive(Serialize)]
struct Many {
    /// Image of the guests.
    image: Image,
    /// `clone`, `clone+fold` or `stock`. In `copy`, the memory of the template is copied as often, and nobody answers.
    arm: &'static str,
    /// Number of guests.
    n: u32,
    /// Seconds until all have answered.
    all_answered_s: f64,
    /// Processor time of each.
    cpu_s_each: f64,
}

/// The result.
#[derive(Default, Serialize)]
struct Bench {
    /// One guest at a time, by image.
    one: Vec<One>,
    /// Many guests of one request.
    many: Vec<Many>,
    /// The same guests some time after their start.
    density: Vec<Density>,
    /// Guests at work, with `--work`.
    memory: Vec<Memory>,
    /// Guests that were restored in a group that has their template, with `--restored`.
    restored: Vec<Restored>,
    /// Guests that are wanted at the same time, with `--storm`.
    storm: Vec<Storm>,
    /// Containers of a warmed-up program, with `--containers`.
    containers: Vec<Contained>,
}

/// Runs the bench, prints its result and draws it.
pub fn run(args: &Args) -> anyhow::Result<Outcome> {
    if let (Some(report), false) = (&args.report, args.from.is_empty()) {
        Figures::read(&args.from)?.write(report)?;
        return Ok(Outcome::Done);
    }
    let bench = measure(args)?;
    let mut out = std::io::stdout().lock();
    if args.json { report::json::write(&mut out, &bench) } else { print(&mut out, &bench) }
        .and_then(|()| out.flush())
        .context("cannot write to stdout")?;
    args.report.as_ref().map_or(Ok(()), |report| Figures::of(&bench)?.write(report))?;
    Ok(Outcome::Done)
}

fn measure(args: &Args) -> anyhow::Result<Bench> {
    let mut guardian = Guardian::start()?;
    if args.work > 0 && args.arms.contains(&memory::KSMD) {
        guardian.keep_ksm(&may_use(args.whole_host)?)?;
    }
    let dir = make_dir(&mut guardian)?;
    guardian.keep_machines(&dir)?;
    let mut bench = Bench::default();
    if args.containers > 0 {
        say!("pagefold: {} containers of a warmed-up program", args.containers);
        bench.containers = contained::run(args.containers, &dir, &mut guardian)?;
    }
    let wants_guests = args.rounds + args.many + args.restored > 0 || args.work > 0 || !args.storm.is_empty();
    for image in args.image.iter().filter(|_| wants_guests) {
        let scene = Scene::prepare(*image, &dir)?;
        let mut rounds = Vec::new();
        for round in 1..=args.rounds {
            say!("pagefold: {}: round {round} of {}", scene.name(), args.rounds);
            rounds.push(scene.round()?);
        }
        if !rounds.is_empty() {
            bench.one.push(one(*image, rounds));
        }
        if args.many > 0 {
            say!("pagefold: {}: {} at once", scene.name(), args.many);
            many(args, &scene, &mut bench, (&dir, &mut guardian))?;
        }
        if args.work > 0 {
            let what = (args.workers, args.work);
            bench.memory.append(&mut memory::run(&scene, &args.arms, what, (&dir, &mut guardian))?);
        }
        bench.storm.append(&mut storm::run(&scene, &args.storm, &dir, &mut guardian)?);
        if args.restored > 0 {
            say!("pagefold: {}: {} restored by copying", scene.name(), args.restored);
            bench.restored.push(restored::run(&scene, args.restored, &dir, &mut guardian)?);
        }
    }
    guardian.finish()?;
    Ok(bench)
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

/// Starts many guests in each way, and counts the memory and processor time that they take.
fn many(args: &Args, scene: &Scene, bench: &mut Bench, (dir, guardian): (&Path, &mut Guardian)) -> anyhow::Result<()> {
    let (n, image, cpu) = (args.many, scene.image(), host::own_cpu_time());
    let all_answered_s = scene.copied(n)?;
    let cpu_s_each = (host::own_cpu_time() - cpu).as_secs_f64() / f64::from(n);
    bench.many.push(Many { image, arm: "copy", n, all_answered_s, cpu_s_each });
    for arm in ["stock", "clone"] {
        let before = Before::new(0);
        let guests =
            if arm == "stock" { scene.stock_cloned(args.many) } else { scene.cloned("many-%d", args.many, None) };
        let guests = guests?;
        bench.many.push(answered(scene, arm, &guests));
        bench.density.push(density::of(scene.image(), arm, args.idle, &before, &guests, || Ok(0))?);
    }
    let mut service = Service::start(dir, true, guardian)?;
    service.set(folding::folds())?;
    let folding = scene.folding(service.dir())?;
    // A first clone loads the template's memory before the clock runs, as in the other arms.
    let first = scene.cloned("first-folded", 1, folding.as_ref())?;
    let before = Before::new(service.pool_bytes()?);
    let guests = scene.cloned("folded-%d", args.many, folding.as_ref())?;
    bench.many.push(answered(scene, FOLDED, &guests));
    let pool = || service.pool_bytes();
    bench.density.push(density::of(scene.image(), FOLDED, args.idle, &before, &guests, pool)?);
    drop((guests, first));
    service.off()
}

fn answered(scene: &Scene, arm: &'static str, guests: &Guests) -> Many {
    let n = guests.pids().len() as u32;
    Many { image: scene.image(), arm, n, all_answered_s: guests.all_answered_s, cpu_s_each: guests.cpu_s_each() }
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
    print_memory(out, bench)
}

fn print_memory(out: &mut impl Write, bench: &Bench) -> std::io::Result<()> {
    for memory in &bench.memory {
        let Memory { arm, n, seconds, bytes_each, folded_of_possible, merger_cpu_s, mappings_each, .. } = memory;
        let turns = memory.turns_each.map_or_else(String::new, |turns| format!(", {turns:.1} turns in all"));
        let folded = folded_of_possible.map_or_else(String::new, |share| format!(", {:.0}% folded", share * 100.0));
        let mib = bytes_each / f64::from(1 << 20);
        writeln!(
            out,
            "{n} by {arm} after {seconds} s of work: {mib:.1} MiB and {mappings_each:.0} mappings each, merger {merger_cpu_s:.1} CPU-s{folded}{turns}"
        )?;
    }
    for Storm { arm, n, all_answered_s, each_p50_s, cpu_s, .. } in &bench.storm {
        writeln!(
            out,
            "storm of {n} by {arm}: all answered in {all_answered_s:.2} s, each in {each_p50_s:.2} s, {cpu_s:.2} CPU-s"
        )?;
    }
    print_containers(out, &bench.containers)?;
    for restored in &bench.restored {
        for Folded { seconds, share, share_of_last, .. } in &restored.folded {
            let [all, last] = [share, share_of_last].map(|share| share * 100.0);
            let n = restored.n;
            writeln!(out, "{n} restored by copying, {seconds} s later: {all:.1}% folded, of the last one {last:.1}%")?;
        }
    }
    Ok(())
}

fn print_containers(out: &mut impl Write, containers: &[Contained]) -> std::io::Result<()> {
    let mib = |bytes: f64| bytes / f64::from(1 << 20);
    for Contained { arm, n, all_answered_s, bytes_each, attached, .. } in containers {
        let answered = all_answered_s.map_or_else(String::new, |seconds| format!(", all ready in {seconds:.2} s"));
        writeln!(out, "{n} containers by {arm}: {:.1} MiB each{answered}", mib(*bytes_each))?;
        for Attached { seconds, bytes_each, shared_again } in attached {
            let shared_again =
                shared_again.map_or_else(String::new, |part| format!(", {:.1}% shared again", part * 100.0));
            writeln!(out, "  attached for {seconds} s: {:.1} MiB each{shared_again}", mib(*bytes_each))?;
        }
    }
    Ok(())
}
