//! A template in a directory of its own, and the ways to start a guest like it.

use super::Times;
use crate::ksm::folding::GROUP;
use api::place::{Meant, Place};
use host::ProcessStat;
use lab::{Accelerator, Cache, Image, Recipe, Spec};
use start::measure::{Machine, Stock};
use start::{Cloned, Clones, Folding, Source, Store, Template, Wanted};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// Name of the template.
const NAME: &str = "bench";
/// Word on the kernel's command line that makes the guest start the helper which answers clones' questions.
const HELPER: &str = "pagefold.identity=/dev/ttyS2";
/// Longest time until a guest answers: 300 s.
const PATIENCE: Duration = Duration::from_secs(300);

/// A template and its clones.
pub struct Scene {
    image: Image,
    clones: Clones,
    store: Store,
    source: Source,
    template: Template,
    template_dir: PathBuf,
    dir: PathBuf,
}

/// Guests that were started together.
pub struct Guests<'a> {
    /// From the beginning of the first start to the last answer.
    pub all_answered_s: f64,
    /// From the beginning of its start to each one's answer; of stock clones, whose steps are made in turn, none.
    pub each_s: Vec<f64>,
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
    /// Process ids of the guests' QEMUs.
    pub fn pids(&self) -> Vec<u32> {
        let stock = self.stock.iter().map(|(machine, _)| machine.process.pid);
        self.clones.iter().map(|clone| clone.pid).chain(stock).collect()
    }

    /// Directories of the guests, with QEMU's sockets.
    pub fn dirs(&self) -> Vec<PathBuf> {
        let clones = self.clones.iter().map(|clone| self.scene.clones.dir_of(&clone.name));
        clones.chain(self.stock.iter().map(|(_, dir)| dir.clone())).collect()
    }

    /// Mean processor time that a guest's QEMU has used so far, in seconds.
    pub fn cpu_s_each(&self) -> f64 {
        let pids = self.pids();
        let ticks: u64 = pids.iter().filter_map(|pid| Some(ProcessStat::read(*pid).ok()?.cpu_ticks)).sum();
        ticks as f64 / rustix::param::clock_ticks_per_second() as f64 / pids.len().max(1) as f64
    }
}

impl Scene {
    /// Makes the template, its first clone, and the file to restore from.
    pub fn prepare(image: Image, dir: &Path) -> anyhow::Result<Self> {
        let scene = Self::of(image, dir)?;
        // The first clone goes on running, so that the template's memory stays loaded, as on a host that has clones.
        scene.make("first", 1, 0, None)?;
        scene.save(None)?;
        Ok(scene)
    }

    /// Makes the template.
    ///
    /// # Errors
    /// The guest does not come up.
    pub fn of(image: Image, dir: &Path) -> anyhow::Result<Self> {
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
        let template_dir = store.dir_of(GROUP, NAME);
        Ok(Self { image, clones, store, source, template, template_dir, dir })
    }

    pub const fn name(&self) -> &'static str {
        if matches!(self.image, Image::Tiny) { "tiny" } else { "debian" }
    }

    pub const fn image(&self) -> Image {
        self.image
    }

    /// RAM of a guest.
    pub const fn memory_bytes(&self) -> u64 {
        self.source.memory_bytes
    }

    /// The file from which guests are restored. In the one for `is_folded`, guests are members of a service.
    fn saved(&self, is_folded: bool) -> PathBuf {
        self.dir.join(if is_folded { "saved-folded" } else { "saved" })
    }

    /// Writes the template's state to a file with its memory, to be restored by copying.
    pub fn save(&self, folding: Option<&Folding>) -> anyhow::Result<()> {
        let file = self.saved(folding.is_some());
        if file.exists() {
            return Ok(());
        }
        self.clones.save_template(&self.wanted("saved", 1, 0, folding), &file)
    }

    fn wanted<'a>(&'a self, names: &'a str, count: usize, warm: usize, folding: Option<&'a Folding>) -> Wanted<'a> {
        Wanted {
            template: &self.template,
            dir: &self.template_dir,
            count,
            names,
            warm,
            allow_unconfirmed: false,
            patience: PATIENCE,
            folding,
        }
    }

    fn make(&self, names: &str, count: usize, warm: usize, folding: Option<&Folding>) -> anyhow::Result<Vec<Cloned>> {
        self.clones.make(&self.wanted(names, count, warm, folding))
    }

    fn end(&self, name: &str) -> anyhow::Result<()> {
        self.clones.end(&self.clones.find(name)?)
    }

    fn stock(&self) -> Stock<'_> {
        Stock { source: &self.source, template: &self.template, template_dir: &self.template_dir, dir: &self.dir }
    }

    fn restore(&self, name: &str, is_folded: bool, store: &Store) -> anyhow::Result<Cloned> {
        self.clones.restore(&self.saved(is_folded), Some(name), (false, PATIENCE), store)
    }

    /// Starts one guest in each way, one after the other, and takes the times.
    pub fn round(&self) -> anyhow::Result<Times> {
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        let boot = ms(self.stock().boot("boot")?.1);
        let restore = self.timed(|| self.restore("restored", false, &self.store).map(drop))?;
        self.end("restored")?;
        let stock = ms(self.stock().clone(1)?.1);
        let clone = self.timed(|| self.make("one", 1, 0, None).map(drop))?;
        let record = self.clones.find("one")?;
        let wanted = self.wanted("one", 1, 0, None);
        let rollback = self.timed(|| self.clones.roll_back(&record, &wanted).map(drop))?;
        self.end("one")?;
        // The machine that becomes the warm clone is started before the clock runs.
        self.make("other", 1, 1, None)?;
        let warm = self.timed(|| self.make("warm", 1, 0, None).map(drop))?;
        self.end("warm")?;
        self.end("other")?;
        Ok(Times { boot, restore, stock, clone, warm, rollback })
    }

    /// Milliseconds that `what` takes.
    fn timed(&self, what: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<f64> {
        let begin = Instant::now();
        what()?;
        Ok(begin.elapsed().as_secs_f64() * 1e3)
    }

    /// What clones need to be folded by the service in this directory.
    pub fn folding(&self, service: &Path) -> anyhow::Result<Option<Folding>> {
        Folding::find(&Meant::Named(Place::at(service)), GROUP)
    }

    /// Starts clones, folded or not, and waits until each has answered.
    pub fn cloned(&self, names: &str, count: u32, folding: Option<&Folding>) -> anyhow::Result<Guests<'_>> {
        let begin = Instant::now();
        let mut guests = self.none();
        guests.clones = self.make(names, count as usize, 0, folding)?;
        guests.all_answered_s = begin.elapsed().as_secs_f64();
        guests.each_s = guests.clones.iter().filter_map(|clone| Some(clone.answered_ms? / 1e3)).collect();
        Ok(guests)
    }

    /// Clones guests by QEMU alone, and waits until each has answered.
    pub fn stock_cloned(&self, count: u32) -> anyhow::Result<Guests<'_>> {
        let (machines, time) = self.stock().clone(count as usize)?;
        let dirs = (0..count).map(|number| self.dir.join(format!("stock-{number}")));
        let mut guests = self.none();
        guests.stock = machines.into_iter().zip(dirs).collect();
        guests.all_answered_s = time.as_secs_f64();
        Ok(guests)
    }

    /// Restores guests with these numbers by copying, one after the other, as members of the service that [`Self::save`] was told of.
    /// `onto_template` says whether it is to know their template.
    pub fn restored(&self, numbers: RangeInclusive<u32>, onto_template: bool) -> anyhow::Result<Guests<'_>> {
        let begin = Instant::now();
        let none = Store::open(&self.dir.join("none"));
        let mut guests = self.none();
        for number in numbers {
            let store = if onto_template { &self.store } else { &none };
            guests.clones.push(self.restore(&format!("restored-{number}"), true, store)?);
        }
        guests.all_answered_s = begin.elapsed().as_secs_f64();
        Ok(guests)
    }

    /// Copies the memory of `count` guests, one after the other, and does nothing else. Returns the seconds that this
    /// took.
    pub fn copied(&self, count: u32) -> anyhow::Result<f64> {
        Ok(self.stock().copy_memory(count as usize)?.as_secs_f64())
    }

    /// Boots guests, all at the same time.
    pub fn booted_at_once(&self, count: u32) -> anyhow::Result<Guests<'_>> {
        let (begin, mut guests) = (Instant::now(), self.none());
        let names = (1..=count).map(|number| format!("boot-{number}")).collect::<Vec<_>>();
        for (name, (machine, time)) in names.iter().zip(at_once(&names, |name| self.stock().boot(name))?) {
            guests.each_s.push(time.as_secs_f64());
            guests.stock.push((machine, self.dir.join(name)));
        }
        guests.all_answered_s = begin.elapsed().as_secs_f64();
        Ok(guests)
    }

    /// Restores guests by copying, all at the same time. Nobody folds them.
    pub fn restored_at_once(&self, count: u32) -> anyhow::Result<Guests<'_>> {
        let (begin, mut guests) = (Instant::now(), self.none());
        let names = (1..=count).map(|number| format!("restored-{number}")).collect::<Vec<_>>();
        guests.clones = at_once(&names, |name| self.restore(name, false, &self.store))?;
        guests.all_answered_s = begin.elapsed().as_secs_f64();
        guests.each_s = guests.clones.iter().filter_map(|clone| Some(clone.answered_ms? / 1e3)).collect();
        Ok(guests)
    }

    const fn none(&self) -> Guests<'_> {
        Guests { all_answered_s: 0.0, each_s: Vec::new(), scene: self, clones: Vec::new(), stock: Vec::new() }
    }

    /// The memory file that a service keeps for a folded clone: its device and inode.
    pub fn memory_of(guests: &Guests) -> (u64, u64) {
        let file = guests.clones.first().and_then(|clone| {
            let record = guests.scene.clones.find(&clone.name).ok()?;
            record.memory.map(|file| (file.device, file.inode))
        });
        file.unwrap_or_default()
    }
}

/// Calls `what` for each name, all at the same time.
fn at_once<T: Send>(names: &[String], what: impl Fn(&str) -> anyhow::Result<T> + Sync) -> anyhow::Result<Vec<T>> {
    let what = &what;
    thread::scope(|scope| {
        let doing: Vec<_> = names.iter().map(|name| scope.spawn(move || what(name))).collect();
        let done = doing.into_iter().map(|one| one.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        // All are collected before the first error is returned, so that the guests that did start are ended.
        done.collect::<Vec<_>>().into_iter().collect()
    })
}

impl Drop for Scene {
    fn drop(&mut self) {
        let living = self.clones.list().unwrap_or_default();
        living.iter().for_each(|clone| _ = self.clones.end(clone));
    }
}
