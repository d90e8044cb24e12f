//! Guests that are parked: they are stopped, folded, and their other memory is written to swap. Then they are woken.
//!
//! ```text
//!   25 guests start, answer, stand still, are folded -> the next 25 ... -> memory of all is counted
//!     -> the host gets a limit of which 5% are to spare -> some are woken at once -> they end
//!     -> each of the others is woken alone, answers, and ends
//! ```
//!
//! The host is a control group with the service, its pool and all guests. An answer of `tiny` is a shell's, of `debian` MariaDB's.

use super::shell::{Shell, ms};
use crate::balance::{Rig, SmallHost, group};
use crate::guardian::Guardian;
use crate::ksm::folding::GROUP;
use crate::median::median;
use crate::serving::Serving;
use crate::start::{Guests, Scene};
use crate::zram::Zram;
use anyhow::{Context, ensure};
use api::place::Place;
use cli::say;
use guest::{Guest, Survey};
use host::ProcessId;
use lab::Image;
use lend::{Held, Ledger, NOTES_WITHIN, Parked, Parking};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// RAM of each guest that is booted: 128 MiB.
const RAM: u64 = 128 << 20;
/// Swap space for each guest: 1 GiB. A zram device takes no frames for swap space that is not in use.
const MOST_SWAPPED: u64 = 1 << 30;
/// Number of guests that are started and parked together: 25. All guests that run share two processors.
const TOGETHER: usize = 25;
/// Time limit for the guests' equal pages to be folded: 2 min.
const FOLDED_WITHIN: Duration = Duration::from_secs(120);
/// Memory of the host that is left when guests are woken at once, in percent: 5%.
const SPARE: u64 = 5;
/// A shell command that asks MariaDB, and the right answer.
const QUESTION: (&str, &str) = ("mariadb -NBe 'select 6 * 7'", "42");
/// Reason that is noted in the journal with each guest that is parked or woken.
const WHY: &str = "it is measured";
/// Bytes of a mebibyte.
const MIB: f64 = 1048576.0;

/// Guests that are to be parked.
pub struct Herd {
    /// Their image.
    pub image: Image,
    /// Their number.
    pub count: usize,
    /// Number of these guests that are woken at the same time.
    pub at_once: usize,
    /// Whether each is booted; else they are clones.
    pub boot: bool,
    /// Whether the host gets swap in zram.
    pub zram: bool,
}

/// Guests of one image.
#[derive(Serialize)]
pub struct Figures {
    /// Image of the guests.
    image: Image,
    /// Number of guests.
    n: usize,
    /// Whether they are clones of one, or each was booted (`--boot`).
    cloned: bool,
    /// Seconds until all had started and were parked.
    parked_s: f64,
    /// RAM that each guest holds alone in frames, before it is parked.
    before_mib_each: f64,
    /// The same while it is parked.
    mib_each: f64,
    /// The part of the pool's frames that falls to each guest when all are parked. The template of clones is in the pool.
    pool_mib_each: f64,
    /// Private memory of each guest's VMM in frames beside the RAM, when all are parked.
    vmm_mib_each: f64,
    /// Memory of each guest in swap.
    swapped_mib_each: f64,
    /// Frames that zram takes for them.
    zram_mib_each: f64,
    /// Longest time of folding what is equal, in seconds, of 25 guests together.
    folded_s: f64,
    /// Why folding was not over when the wait for it ended, of the first guest with which it was not.
    not_folded: Option<String>,
    /// Why private memory stays in frames.
    problem: Option<String>,
    /// Time of an answer before any guest was parked: by a shell at the console of `tiny`, by MariaDB in `debian`.
    awake_p50_ms: f64,
    /// Time from the beginning of the wake until the VMM has been told to go on.
    resume_p50_ms: f64,
    /// Time from the beginning of a wake to an answer, of guests that are woken alone.
    wake_p50_ms: f64,
    /// 99th percentile of these times.
    wake_p99_ms: f64,
    /// Guests that are woken at once.
    at_once: Option<AtOnce>,
}

/// Guests that were woken at once.
#[derive(Serialize)]
struct AtOnce {
    /// Number of guests.
    n: usize,
    /// Guests that have answered.
    answered: usize,
    /// Time from the common beginning to the answers.
    p50_ms: f64,
    /// 99th percentile of these times.
    p99_ms: f64,
    /// The latter over the p50 of guests that were woken alone.
    p99_to_lone_p50: f64,
    /// Memory of the host, and the part of it that was left before.
    host_mib: f64,
    /// Memory of the host that was free before.
    spare_mib: f64,
    /// Processes of the host that were killed for want of memory.
    kills: u64,
    /// Why a guest has not answered.
    problem: Option<String>,
}

impl Figures {
    /// The figures as text.
    pub fn text(&self) -> String {
        let Self { n, image, before_mib_each, mib_each, pool_mib_each, vmm_mib_each, swapped_mib_each, .. } = self;
        let Self { folded_s, awake_p50_ms, resume_p50_ms, wake_p50_ms, wake_p99_ms, zram_mib_each, parked_s, .. } =
            self;
        let why: String =
            [&self.not_folded, &self.problem].into_iter().flatten().map(|why| format!("\n{why}")).collect();
        let way = if self.cloned { "cloned" } else { "booted" };
        format!(
            "{n} {way} {image:?} guests, parked in {parked_s:.0} s: RAM of {before_mib_each:.1} MiB each, {mib_each:.1} parked, and \
             {pool_mib_each:.1} in the pool; {vmm_mib_each:.1} of the VMM; {swapped_mib_each:.1} in swap, for which zram takes \
             {zram_mib_each:.1}; folded in {folded_s:.0} s\n\
             an answer takes {awake_p50_ms:.0} ms; after a wake {wake_p50_ms:.0} (p50) and {wake_p99_ms:.0} (p99), of which the VMM's own \
             {resume_p50_ms:.0}{}{why}",
            self.at_once.as_ref().map_or_else(String::new, AtOnce::text)
        )
    }
}

impl AtOnce {
    fn text(&self) -> String {
        let Self { n, answered, p50_ms, p99_ms, p99_to_lone_p50, host_mib, spare_mib, kills, problem } = self;
        let why = problem.as_ref().map_or_else(String::new, |why| format!(": {why}"));
        format!(
            "\n{n} woken at once with {spare_mib:.0} MiB of {host_mib:.0} to spare: {answered} answer, {p50_ms:.0} ms (p50) and \
             {p99_ms:.0} (p99, {p99_to_lone_p50:.1} times the p50 of one); {kills} killed{why}"
        )
    }
}

/// How the bench finds out that a guest works.
enum Asked {
    Shell(Shell),
    /// Has MariaDB answer a query, by the agent in the guest. The path is the directory with the agent's socket.
    Database(PathBuf),
}

impl Asked {
    /// Prepares to ask a guest whose sockets are in this directory.
    fn of(image: Image, dir: PathBuf) -> anyhow::Result<Self> {
        if image == Image::Tiny {
            return Ok(Self::Shell(Shell::at(&dir.join("console"))?));
        }
        start::measure::run(&dir, "systemctl start mariadb").context("MariaDB does not start")?;
        Ok(Self::Database(dir))
    }

    fn answer(&mut self) -> anyhow::Result<()> {
        match self {
            Self::Shell(shell) => shell.answer(),
            Self::Database(dir) => {
                let answer = start::measure::run(dir, QUESTION.0)?;
                ensure!(answer.trim() == QUESTION.1, "MariaDB answers {}", cli::printable(answer.trim()));
                Ok(())
            }
        }
    }

    fn answer_ms(&mut self) -> anyhow::Result<f64> {
        let began = Instant::now();
        self.answer()?;
        Ok(ms(began))
    }
}

/// Guests that have started: each one's name and how it is asked; and the clones' processes, which end with the second
/// value.
type Up<'a> = (Vec<(String, Asked)>, Option<Guests<'a>>);

/// What guests are started from: a template that is cloned, or a lab that boots them.
enum Source {
    Template(Box<Scene>, Option<start::Folding>),
    Lab(Rig),
}

/// A guest that is parked.
struct Sleeper {
    vm: Guest,
    asked: Asked,
    parked: Parked,
    before: Held,
    not_folded: Option<String>,
    problem: Option<String>,
}

impl Sleeper {
    /// Kills the guest's processes: it has answered, and is not needed any more.
    fn end(self) {
        self.vm.pids.iter().filter_map(|pid| ProcessId::of(*pid).ok()).for_each(|process| {
            process.kill();
        });
    }
}

impl Herd {
    /// Starts and parks guests, and measures how they are woken.
    ///
    /// # Errors
    /// A guest does not come up, or cannot be parked.
    pub fn measure(&self, dir: &Path, guardian: &mut Guardian) -> anyhow::Result<Figures> {
        let zram = if self.zram { Some(Zram::on(MOST_SWAPPED * self.count as u64, guardian)?) } else { None };
        let host = SmallHost::make("park", guardian)?;
        host.limit(host::ram_bytes() - host::ram_bytes() / 8)?;
        let group = if self.boot { group() } else { GROUP.to_owned() };
        let mut serving = host.inside(|| Serving::start(dir, &format!("[[group]]\nname = '{group}'\n"), guardian))?;
        let source = self.source(&host, &serving, dir, guardian)?;
        let began = Instant::now();
        let (mut asleep, mut awake, mut folded_s, mut clones) = (Vec::new(), Vec::new(), 0.0_f64, Vec::new());
        while asleep.len() < self.count {
            let n = TOGETHER.min(self.count - asleep.len());
            let (mut asked, guests) = host.inside(|| self.up(&source, n))?;
            let pids = guests.iter().flat_map(Guests::pids);
            pids.filter_map(|pid| ProcessId::of(pid).ok()).try_for_each(|process| guardian.keep_process(process))?;
            clones.extend(guests);
            let some: Vec<f64> = asked.iter_mut().map(|(_, asked)| asked.answer_ms()).collect::<anyhow::Result<_>>()?;
            awake.extend(some);
            folded_s = folded_s.max(park(&serving, &group, asked, &mut asleep)?);
            say!("pagefold: park: {} of {} stand still", asleep.len(), self.count);
        }
        let mut figures = self.count_all(&serving, &group, &asleep)?;
        (figures.folded_s, figures.parked_s) = (folded_s, began.elapsed().as_secs_f64());
        figures.awake_p50_ms = median(&awake);
        figures.zram_mib_each = zram.as_ref().map_or(Ok(0), Zram::used_bytes)? as f64 / MIB / self.count as f64;
        let lone = asleep.split_off(self.at_once);
        figures.at_once = wake_at_once(&host, serving.dir(), asleep)?;
        figures.wake_each(serving.dir(), lone)?;
        drop(clones);
        if let Source::Lab(rig) = &source {
            rig.down()?;
        }
        drop(source);
        serving.end()?;
        drop(zram);
        Ok(figures)
    }

    fn source(
        &self,
        host: &SmallHost,
        serving: &Serving,
        dir: &Path,
        guardian: &mut Guardian,
    ) -> anyhow::Result<Source> {
        if self.boot {
            let mut rig = Rig::folded(dir, serving, (RAM, RAM), guardian)?;
            rig.set_image(self.image);
            return Ok(Source::Lab(rig));
        }
        say!("pagefold: park: a template is made");
        let scene = host.inside(|| Scene::of(self.image, dir))?;
        let folding = scene.folding(serving.dir())?;
        Ok(Source::Template(Box::new(scene), folding))
    }

    /// Starts `n` guests.
    fn up<'a>(&self, source: &'a Source, n: usize) -> anyhow::Result<Up<'a>> {
        match source {
            Source::Template(scene, folding) => {
                let guests = scene.cloned("p%d", n as u32, folding.as_ref())?;
                let of = |dir: PathBuf| {
                    let name = dir.file_name().map(|name| name.to_string_lossy().into_owned());
                    Ok((name.context("a clone without a name")?, Asked::of(self.image, dir)?))
                };
                let asked = guests.dirs().into_iter().map(of).collect::<anyhow::Result<_>>()?;
                Ok((asked, Some(guests)))
            }
            Source::Lab(rig) => {
                let of = |guest: lab::Guest| {
                    let console = guest.console.as_ref().context("a guest without a console")?;
                    let asked = match self.image {
                        Image::Tiny => Asked::Shell(Shell::at(console)?),
                        _ => Asked::of(self.image, console.with_file_name(""))?,
                    };
                    Ok((guest.name, asked))
                };
                Ok((rig.up(n, &[])?.into_iter().map(of).collect::<anyhow::Result<_>>()?, None))
            }
        }
    }

    fn count_all(&self, serving: &Serving, group: &str, asleep: &[Sleeper]) -> anyhow::Result<Figures> {
        let held: Vec<Held> = asleep.iter().map(|one| Held::of(&one.vm)).collect();
        let each = |sum: u64| sum as f64 / asleep.len().max(1) as f64 / MIB;
        let sum = |of: fn(&Held) -> u64| each(held.iter().map(of).sum());
        Ok(Figures {
            image: self.image,
            n: asleep.len(),
            cloned: !self.boot,
            parked_s: 0.0,
            before_mib_each: each(asleep.iter().map(|one| one.before.ram_bytes).sum()),
            mib_each: sum(|held| held.ram_bytes),
            pool_mib_each: each(serving.show(group)?.report.savings.pool_bytes),
            vmm_mib_each: sum(|held| held.private_bytes.saturating_sub(held.ram_bytes)),
            swapped_mib_each: sum(|held| held.swapped_bytes),
            zram_mib_each: 0.0,
            folded_s: 0.0,
            not_folded: asleep.iter().find_map(|one| one.not_folded.clone()),
            problem: asleep.iter().find_map(|one| one.problem.clone()),
            awake_p50_ms: f64::NAN,
            resume_p50_ms: f64::NAN,
            wake_p50_ms: f64::NAN,
            wake_p99_ms: f64::NAN,
            at_once: None,
        })
    }
}

impl Figures {
    /// Wakes one guest after the other, and measures the time to its answer. Each is killed then, so that it takes no
    /// processor time from the next one.
    fn wake_each(&mut self, service: &Path, asleep: Vec<Sleeper>) -> anyhow::Result<()> {
        let (mut resumed, mut woken) = (Vec::new(), Vec::new());
        for mut one in asleep {
            let began = Instant::now();
            wake(service, &one.parked)?;
            resumed.push(ms(began));
            one.asked.answer()?;
            woken.push(ms(began));
            one.end();
        }
        self.resume_p50_ms = median(&resumed);
        self.wake_p50_ms = median(&woken);
        self.wake_p99_ms = p99(&mut woken);
        if let Some(at_once) = &mut self.at_once {
            at_once.p99_to_lone_p50 = at_once.p99_ms / self.wake_p50_ms;
        }
        Ok(())
    }
}

/// Stops the guests, waits until they are folded, and has their other memory written to swap. Adds them to `asleep`,
/// and returns the seconds that folding took.
fn park(serving: &Serving, group: &str, asked: Vec<(String, Asked)>, asleep: &mut Vec<Sleeper>) -> anyhow::Result<f64> {
    let mut vms = Survey::take().context("cannot look for guests")?.guests(&[], &[]);
    vms.retain(|vm| vm.kind.is_vm() && asked.iter().any(|(name, _)| *name == vm.name));
    let mut ledger = Ledger::open(serving.dir())?;
    let first = asleep.len();
    for (name, asked) in asked {
        let vm = vms.iter().find(|vm| vm.name == name).with_context(|| format!("{name} is not found"))?;
        let mut vm = vm.clone();
        vm.facts.folded_in = Some(group.to_owned());
        let before = Held::of(&vm);
        let turn = ledger.take_turn()?;
        let parked = Parking::lock(serving.dir(), NOTES_WITHIN)?.park(&vm, &ledger, &turn, WHY)?;
        asleep.push(Sleeper { vm, asked, parked, before, not_folded: None, problem: None });
    }
    let new = &mut asleep[first..];
    let (vms, began) = (new.iter().map(|one| one.vm.clone()).collect::<Vec<_>>(), Instant::now());
    let not_folded = lend::until_folded(&Place::at(serving.dir()), &vms, FOLDED_WITHIN);
    let folded_s = began.elapsed().as_secs_f64();
    for (one, not_folded) in new.iter_mut().zip(not_folded) {
        let shrunk = lend::shrink(&one.vm, one.before, not_folded);
        (one.not_folded, one.problem) = (shrunk.not_folded, shrunk.problem);
        Parking::lock(serving.dir(), NOTES_WITHIN)?.keep(&one.parked)?;
    }
    Ok(folded_s)
}

fn wake(service: &Path, parked: &Parked) -> anyhow::Result<()> {
    Parking::lock(service, NOTES_WITHIN)?.wake(parked, WHY)
}

/// Wakes all these guests at the same time, on a host that has `SPARE` percent of its memory left. `None` if there
/// are no guests.
fn wake_at_once(host: &SmallHost, service: &Path, mut asleep: Vec<Sleeper>) -> anyhow::Result<Option<AtOnce>> {
    if asleep.is_empty() {
        return Ok(None);
    }
    let (usual, held) = (host.limit_bytes()?, host.held_bytes()?);
    let limit = held / (100 - SPARE) * 100;
    host.limit(limit)?;
    let (killed, began) = (host.kills(), Instant::now());
    let wake_one = |one: &mut Sleeper| -> anyhow::Result<f64> {
        wake(service, &one.parked)?;
        one.asked.answer()?;
        Ok(ms(began))
    };
    let answers: Vec<anyhow::Result<f64>> = std::thread::scope(|scope| {
        let woken: Vec<_> = asleep.iter_mut().map(|one| scope.spawn(move || wake_one(one))).collect();
        let join = |one: std::thread::ScopedJoinHandle<'_, anyhow::Result<f64>>| {
            one.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        woken.into_iter().map(join).collect()
    });
    let kills = host.kills() - killed;
    host.limit(usual)?;
    let n = asleep.len();
    asleep.into_iter().for_each(Sleeper::end);
    let problem = answers.iter().find_map(|answer| answer.as_ref().err().map(|why| format!("{why:#}")));
    let mut times: Vec<f64> = answers.into_iter().filter_map(Result::ok).collect();
    Ok(Some(AtOnce {
        n,
        answered: times.len(),
        p50_ms: median(&times),
        p99_ms: p99(&mut times),
        p99_to_lone_p50: f64::NAN,
        host_mib: limit as f64 / MIB,
        spare_mib: (limit - held) as f64 / MIB,
        kills,
        problem,
    }))
}

/// The 99th percentile; the greatest of fewer than 100 values.
fn p99(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times.get(times.len() * 99 / 100).copied().unwrap_or(f64::NAN)
}
