//! A template in a directory of its own, and each way to start its guest.

use super::Times;
use host::ProcessStat;
use lab::{Accelerator, Cache, Image, Recipe, Spec};
use start::measure::{Machine, Stock};
use start::{Cloned, Clones, Source, Store, Template, Wanted};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The group that the template belongs to.
const GROUP: &str = "bench";
/// Name of the template.
const NAME: &str = "bench";
/// Word of the kernel's command line that has the helper started.
const HELPER: &str = "pagefold.identity=/dev/ttyS2";
/// Longest time until a guest answers: 300 s.
const PATIENCE: Duration = Duration::from_secs(300);

/// A template and its clones.
pub struct Scene {
    image: Image,
    clones: Clones,
    source: Source,
    template: Template,
    template_dir: PathBuf,
    stock_dir: PathBuf,
    saved: PathBuf,
}

/// Guests that were started together.
pub struct Guests<'a> {
    pub all_answered_s: f64,
    scene: &'a Scene,
    clones: Vec<Cloned>,
    stock: Vec<(Machine, PathBuf)>,
}

impl Drop for Guests<'_> {
    fn drop(&mut self) {
        self.clones.iter().for_each(|clone| _ = self.scene.end(&clone.name));
    }
}

impl Guests<'_> {
    /// Pids of their QEMUs.
    pub fn pids(&self) -> Vec<u32> {
        let stock = self.stock.iter().map(|(machine, _)| machine.process.pid);
        self.clones.iter().map(|clone| clone.pid).chain(stock).collect()
    }

    /// Their directories, with QEMU's sockets.
    pub fn dirs(&self) -> Vec<PathBuf> {
        let clones = self.clones.iter().map(|clone| self.scene.clones.dir_of(&clone.name));
        clones.chain(self.stock.iter().map(|(_, dir)| dir.clone())).collect()
    }

    /// Processor time of each until now, in seconds.
    pub fn cpu_s_each(&self) -> f64 {
        let pids = self.pids();
        let ticks: u64 = pids.iter().filter_map(|pid| Some(ProcessStat::read(*pid).ok()?.cpu_ticks)).sum();
        ticks as f64 / rustix::param::clock_ticks_per_second() as f64 / pids.len().max(1) as f64
    }
}

impl Scene {
    /// Makes the template.
    pub fn prepare(image: Image, dir: &Path) -> anyhow::Result<Self> {
        let dir = dir.join(if image == Image::Tiny { "t" } else { "d" });
        let cache = Cache::open(&lab::cache_dir()?)?;
        let memory_bytes = (image == Image::Tiny).then_some(128 << 20);
        let spec = Spec { memory_bytes, append: HELPER.to_owned(), ..Spec::new(image) };
        let recipe = Recipe::prepare(&spec, &cache, &dir.join("recipe"), &|_| {})?;
        let place = |word: &String| {
            word.replace(lab::DIR, start::DIR).replace(lab::NAME, start::NAME).replace(lab::DISK, start::DISK)
        };
        let source = Source {
            words: recipe.words.iter().map(place).collect(),
            disk: recipe.disk,
            memory_bytes: recipe.memory_bytes,
            sees_cpu: recipe.accelerator == Accelerator::Kvm,
            patience: PATIENCE,
            allow_unconfirmed: false,
        };
        let (store, clones) = (Store::open(&dir.join("templates")), Clones::open(&dir.join("c")));
        let template = store.create(GROUP, NAME, &source)?;
        let (template_dir, saved) = (store.dir_of(GROUP, NAME), dir.join("saved"));
        let scene = Self { image, clones, source, template, template_dir, stock_dir: dir, saved };
        scene.save()?;
        Ok(scene)
    }

    pub const fn name(&self) -> &'static str {
        if matches!(self.image, Image::Tiny) { "tiny" } else { "debian" }
    }

    /// Writes the template's state to a file with its memory, to be restored by copying.
    fn save(&self) -> anyhow::Result<()> {
        // It lives on, so that the template's memory stays loaded, as on a host that has clones.
        self.make("first", 1, 0)?;
        self.clones.save_template(&self.wanted("saved", 1, 0), &self.saved)
    }

    fn wanted<'a>(&'a self, names: &'a str, count: usize, warm: usize) -> Wanted<'a> {
        Wanted {
            template: &self.template,
            dir: &self.template_dir,
            count,
            names,
            warm,
            allow_unconfirmed: false,
            patience: PATIENCE,
        }
    }

    fn make(&self, names: &str, count: usize, warm: usize) -> anyhow::Result<Vec<Cloned>> {
        self.clones.make(&self.wanted(names, count, warm))
    }

    fn end(&self, name: &str) -> anyhow::Result<()> {
        self.clones.end(&self.clones.find(name)?)
    }

    fn stock(&self) -> Stock<'_> {
        Stock { source: &self.source, template: &self.template, template_dir: &self.template_dir, dir: &self.stock_dir }
    }

    /// Starts one guest in each way, one after the other.
    pub fn round(&self) -> anyhow::Result<Times> {
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        let boot = ms(self.stock().boot()?);
        let restore = self.timed(|| self.clones.restore(&self.saved, Some("restored"), (false, PATIENCE)).map(drop))?;
        self.end("restored")?;
        let stock = ms(self.stock().clone(1)?.1);
        let clone = self.timed(|| self.make("one", 1, 0).map(drop))?;
        let record = self.clones.find("one")?;
        let wanted = self.wanted("one", 1, 0);
        let rollback = self.timed(|| self.clones.roll_back(&record, &wanted).map(drop))?;
        self.end("one")?;
        // One that waits is there beforehand.
        self.make("other", 1, 1)?;
        let warm = self.timed(|| self.make("warm", 1, 0).map(drop))?;
        self.end("warm")?;
        self.end("other")?;
        Ok(Times { boot, restore, stock, clone, warm, rollback })
    }

    /// Milliseconds that something takes.
    fn timed(&self, what: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<f64> {
        let begin = Instant::now();
        what()?;
        Ok(begin.elapsed().as_secs_f64() * 1e3)
    }

    /// Starts many guests by `clone`, or by `stock` QEMU.
    pub fn many(&self, arm: &str, count: u32) -> anyhow::Result<Guests<'_>> {
        let begin = Instant::now();
        let mut guests = Guests { all_answered_s: 0.0, scene: self, clones: Vec::new(), stock: Vec::new() };
        if arm == "clone" {
            guests.clones = self.make("many-%d", count as usize, 0)?;
            guests.all_answered_s = begin.elapsed().as_secs_f64();
        } else {
            let (machines, time) = self.stock().clone(count as usize)?;
            let dirs = (0..count).map(|number| self.stock_dir.join(format!("stock-{number}")));
            guests.stock = machines.into_iter().zip(dirs).collect();
            guests.all_answered_s = time.as_secs_f64();
        }
        Ok(guests)
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        let living = self.clones.list().unwrap_or_default();
        living.iter().for_each(|clone| _ = self.clones.end(clone));
    }
}
