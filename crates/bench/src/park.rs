//! `pagefold bench park`: guests of a lab that a service folds are parked, and woken one after the other.

use crate::balance::{Rig, group};
use crate::guardian::Guardian;
use crate::median::median;
use crate::serving::Serving;
use anyhow::Context;
use api::place::Place;
use cli::exit::Outcome;
use cli::{output, say};
use guest::Survey;
use lend::{Held, Ledger, NOTES_WITHIN, Parked, Parking, Shrunk};
use serde::Serialize;
use std::fs::DirBuilder;
use std::io::{Read, Write};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// RAM of each guest: 128 MiB.
const RAM: u64 = 128 << 20;
/// Longest time for folding what is equal: 2 min.
const FOLDED_WITHIN: Duration = Duration::from_secs(120);
/// Longest time for a woken guest to answer: 1 min.
const ANSWERED_WITHIN: Duration = Duration::from_secs(60);
/// Reason for the journal.
const WHY: &str = "it is measured";
/// Bytes of a mebibyte.
const MIB: f64 = 1048576.0;

/// Arguments of `pagefold bench park`.
#[derive(clap::Args)]
pub struct Args {
    /// Guests
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=200))]
    guests: u16,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Guests of one image.
#[derive(Serialize)]
struct Figures {
    image: &'static str,
    n: usize,
    /// RAM of each guest that it holds alone in frames: before, and parked.
    before_mib_each: f64,
    mib_each: f64,
    /// The part of the pool's frames that falls to each guest when all are parked.
    pool_mib_each: f64,
    /// Private memory of each guest's VMM in frames beside the RAM, when all are parked.
    vmm_mib_each: f64,
    swapped_mib_each: f64,
    /// Seconds until folding was over, from the moment at which all stood still.
    folded_s: f64,
    /// Why folding was not over, of the first guest with which it was not.
    not_folded: Option<String>,
    /// Why private memory stays in frames.
    problem: Option<String>,
    /// Time of an answer from inside before any guest was parked.
    awake_p50_ms: f64,
    /// Time from the beginning of the wake until the VMM has been told to go on.
    resume_p50_ms: f64,
    /// Time from the beginning of the wake to an answer from inside.
    wake_p50_ms: f64,
    wake_p99_ms: f64,
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<Outcome> {
    let mut guardian = Guardian::start()?;
    let dir = std::env::temp_dir().join(format!("pagefold-bench-{}", std::process::id()));
    DirBuilder::new().mode(0o711).create(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    guardian.keep_dir(&dir)?;
    let found = measure(&dir, args.guests.into(), &mut guardian);
    let put_back = guardian.finish();
    let found = found?;
    put_back?;
    if args.json {
        output::line(serde_json::to_string_pretty(&serde_json::json!({"guests": [found]}))?)?;
    } else {
        output::line(found.text())?;
    }
    Ok(Outcome::Done)
}

impl Figures {
    fn text(&self) -> String {
        let Self { n, image, before_mib_each, mib_each, pool_mib_each, vmm_mib_each, swapped_mib_each, .. } = self;
        let Self { folded_s, awake_p50_ms, resume_p50_ms, wake_p50_ms, wake_p99_ms, .. } = self;
        let why: String =
            [&self.not_folded, &self.problem].into_iter().flatten().map(|why| format!("\n{why}")).collect();
        format!(
            "{n} {image} guests: RAM of {before_mib_each:.1} MiB each, {mib_each:.1} parked, and {pool_mib_each:.1} in the pool; \
             {vmm_mib_each:.1} of the VMM; {swapped_mib_each:.1} in swap; folded in {folded_s:.0} s\n\
             an answer takes {awake_p50_ms:.0} ms; after a wake {wake_p50_ms:.0} (p50) and {wake_p99_ms:.0} (p99), of which the VMM's own \
             {resume_p50_ms:.0}{why}"
        )
    }
}

/// A shell inside a guest, at its console. It starts no process for an answer.
struct Shell {
    console: UnixStream,
    answers: u32,
}

impl Shell {
    fn of(guest: &lab::Guest) -> anyhow::Result<Self> {
        let path = guest.console.as_ref().context("a guest without a console")?;
        let console = UnixStream::connect(path).with_context(|| format!("cannot connect to {}", path.display()))?;
        console.set_read_timeout(Some(ANSWERED_WITHIN))?;
        let mut shell = Self { console, answers: 0 };
        // The first line starts it.
        shell.console.write_all(b"\n")?;
        shell.answer().context("no shell answers at the console")?;
        Ok(shell)
    }

    /// Asks for a sum, and waits for it. The console repeats the question, without the sum.
    fn answer(&mut self) -> anyhow::Result<()> {
        self.answers += 1;
        self.console.write_all(format!("echo s$((1000000+{}))s\n", self.answers).as_bytes())?;
        let wanted = format!("s{}s", 1_000_000 + self.answers);
        let (mut heard, mut chunk) = (Vec::new(), [0_u8; 4096]);
        while !String::from_utf8_lossy(&heard).contains(&wanted) {
            let n = self.console.read(&mut chunk).context("no answer from inside")?;
            anyhow::ensure!(n > 0, "the guest has ended");
            heard.extend_from_slice(&chunk[..n]);
        }
        Ok(())
    }

    fn answer_ms(&mut self) -> anyhow::Result<f64> {
        let began = Instant::now();
        self.answer()?;
        Ok(ms(began))
    }
}

fn ms(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1000.0
}

/// Guests that stand still, are folded and written to swap.
struct AllParked {
    parked: Vec<Parked>,
    before: Vec<Held>,
    shrunk: Vec<Shrunk>,
    folded_s: f64,
}

impl AllParked {
    fn park(serving: &Serving, vms: &[guest::Guest]) -> anyhow::Result<Self> {
        let before: Vec<Held> = vms.iter().map(Held::of).collect();
        let mut ledger = Ledger::open(serving.dir())?;
        let mut parked = Vec::new();
        for vm in vms {
            let turn = ledger.take_turn()?;
            parked.push(Parking::lock(serving.dir(), NOTES_WITHIN)?.park(vm, &ledger, &turn, WHY)?);
        }
        say!("pagefold: park: what is equal is folded");
        let began = Instant::now();
        let not_folded = lend::until_folded(&Place::at(serving.dir()), vms, FOLDED_WITHIN);
        let folded_s = began.elapsed().as_secs_f64();
        let each = vms.iter().zip(&before).zip(not_folded);
        let shrunk = each.map(|((vm, before), why)| lend::shrink(vm, *before, why)).collect();
        for one in &parked {
            Parking::lock(serving.dir(), NOTES_WITHIN)?.keep(one)?;
        }
        Ok(Self { parked, before, shrunk, folded_s })
    }
}

fn measure(dir: &Path, n: usize, guardian: &mut Guardian) -> anyhow::Result<Figures> {
    let serving = Serving::start(dir, &format!("[[group]]\nname = '{}'\n", group()), guardian)?;
    let rig = Rig::folded(dir, &serving, (RAM, RAM), guardian)?;
    say!("pagefold: park: {n} guests boot");
    let guests = rig.up(n, &[])?;
    let mut shells = guests.iter().map(Shell::of).collect::<anyhow::Result<Vec<_>>>()?;
    let awake = shells.iter_mut().map(Shell::answer_ms).collect::<anyhow::Result<Vec<f64>>>()?;
    let pids: Vec<u32> = guests.iter().flat_map(lab::Guest::pids).collect();
    let mut vms = Survey::take().context("cannot look for guests")?.guests(&pids, &[]);
    vms.retain(|vm| vm.kind.is_vm() && vm.pids.iter().any(|pid| pids.contains(pid)));
    vms.iter_mut().for_each(|vm| vm.facts.folded_in = Some(group()));
    let all = AllParked::park(&serving, &vms)?;
    let pool_bytes = serving.show(&group())?.report.savings.pool_bytes;
    let (mut resumed, mut woken) = (Vec::new(), Vec::new());
    for one in &all.parked {
        let at = guests.iter().position(|guest| one.name == guest.name).context("a guest has another name")?;
        let began = Instant::now();
        Parking::lock(serving.dir(), NOTES_WITHIN)?.wake(one, WHY)?;
        resumed.push(ms(began));
        shells[at].answer()?;
        woken.push(ms(began));
    }
    woken.sort_by(f64::total_cmp);
    let each = |sum: u64| sum as f64 / n as f64 / MIB;
    let sum = |of: fn(&Held) -> u64| each(all.shrunk.iter().map(|one| of(&one.held)).sum());
    Ok(Figures {
        image: "tiny",
        n,
        before_mib_each: each(all.before.iter().map(|held| held.ram_bytes).sum()),
        mib_each: sum(|held| held.ram_bytes),
        pool_mib_each: each(pool_bytes),
        vmm_mib_each: sum(|held| held.private_bytes.saturating_sub(held.ram_bytes)),
        swapped_mib_each: sum(|held| held.swapped_bytes),
        folded_s: all.folded_s,
        not_folded: all.shrunk.iter().find_map(|one| one.not_folded.clone()),
        problem: all.shrunk.iter().find_map(|one| one.problem.clone()),
        awake_p50_ms: median(&awake),
        resume_p50_ms: median(&resumed),
        wake_p50_ms: median(&woken),
        wake_p99_ms: woken.get(woken.len() * 99 / 100).copied().unwrap_or(f64::NAN),
    })
}
