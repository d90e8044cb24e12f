//! The rig of a run: guests of the lab, the mergers, and the measures. Everything that it changes on the host is put back
//! by the guardian of the benches, however the run ends.

mod containers;
mod crowd;
mod fold;
mod frames;
mod ksmd;
mod merger;
mod payers;
mod process;
mod vms;

pub use containers::{Containers, footprint};
pub use crowd::Crowd;
pub use fold::Group;
pub use frames::{Places, Taken, frames_of};
pub use ksmd::{Rate, account};
pub use merger::{Merger, SETTLED_FOR};
pub use payers::Payer;
pub use process::Asked;
pub use vms::{Speed, System, Vms, VmsWanted, finishers, run, tell};

use act::KsmKnobs;
use anyhow::{Context, bail};
use bench::{Guardian, Storms, WholeHost, may_use};
use cli::exit::Stop;
use lab::{Cache, Image};
use page::PAGE_BYTES;
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Interval between two looks of a wait.
const LOOK: Duration = Duration::from_millis(100);

/// Time limit for the guardian of an earlier run to end.
const GUARDIAN: Duration = Duration::from_secs(15);

/// A host on which a study runs.
pub struct Rig {
    guardian: Guardian,
    knobs: KsmKnobs,
    dir: PathBuf,
    cache: Cache,
    labs: u32,
    /// A template for guests that are started in several ways. One boot serves all turns.
    storms: Option<(Image, Storms)>,
}

impl Rig {
    /// Takes the host for a run.
    ///
    /// # Errors
    /// The host lacks something, or somebody else's pages are merged.
    pub fn start(whole_host: WholeHost) -> anyhow::Result<Self> {
        if !rustix::process::geteuid().is_root() {
            let why = "a study sees page frames and sets ksmd, which takes root: run this with sudo";
            return Err(Stop::HostLacks(why.to_owned()).into());
        }
        let knobs = may_use(whole_host)?;
        // Guests inherit this: their memory is in small pages, unless huge ones are the variable.
        rustix::thread::disable_transparent_huge_pages(true).context("cannot disable huge pages for the guests")?;
        let mut guardian = guardian()?;
        let dir = std::env::temp_dir().join(format!("pagefold-study-{}", std::process::id()));
        // Workers have users of their own, and reach the prover by way of it.
        DirBuilder::new().mode(0o711).create(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
        guardian.keep_dir(&dir)?;
        guardian.keep_ksm(&knobs)?;
        let cache = Cache::open(&lab::cache_dir()?)?;
        let rig = Self { guardian, knobs, dir, cache, labs: 0, storms: None };
        rig.stop_ksmd()?;
        Ok(rig)
    }

    /// A directory of the run's own.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// A file of so many MiB for guests to read, no two pages of which are equal.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn data(&self, mib: u64) -> anyhow::Result<PathBuf> {
        self.data_of(0, mib)
    }

    /// The same for a guest of its own: no page of it is equal to one of another number's file.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn data_of(&self, number: u64, mib: u64) -> anyhow::Result<PathBuf> {
        let path = self.dir.join(format!("data-{number}-{mib}"));
        if !path.exists() {
            bench::write_pages(&path, (1..=mib << 8).map(|page| bench::filled(number << 32 | page)))?;
        }
        Ok(path)
    }

    /// The template of an image, which is made by the first turn that asks for it, with the directory of the run and the guardian.
    ///
    /// # Errors
    /// The image's guest does not come up.
    pub fn storms(&mut self, image: Image) -> anyhow::Result<(&Storms, &Path, &mut Guardian)> {
        if self.storms.as_ref().is_none_or(|(of, _)| *of != image) {
            // Another image's template has the same names for its guests' directories.
            self.storms = None;
            self.storms = Some((image, Storms::prepare(image, &self.dir, &mut self.guardian)?));
        }
        let (_, storms) = self.storms.as_ref().context("a template was just made")?;
        Ok((storms, self.dir.as_path(), &mut self.guardian))
    }

    /// The guardian, for what a bench changes on the host.
    pub fn guardian(&mut self) -> &mut Guardian {
        &mut self.guardian
    }

    /// Puts ksmd back between turns. Guests and services end with their values.
    ///
    /// # Errors
    /// KSM cannot be set.
    pub fn end_turn(&mut self) -> anyhow::Result<()> {
        self.knobs.put_back().context("cannot set KSM as it was")?;
        self.stop_ksmd()
    }

    fn stop_ksmd(&self) -> anyhow::Result<()> {
        act::set_ksm("run", "0").context("cannot stop ksmd")
    }

    /// Has everything put back.
    ///
    /// # Errors
    /// Something could not be put back; the guardian has said what.
    pub fn finish(self) -> anyhow::Result<()> {
        let Self { guardian, storms, .. } = self;
        // Its guests end before their directory is removed.
        drop(storms);
        guardian.finish()
    }
}

/// The guardian. That of a run that was just cut off may still be putting things back.
fn guardian() -> anyhow::Result<Guardian> {
    let begin = Instant::now();
    loop {
        match Guardian::start() {
            Err(_) if begin.elapsed() < GUARDIAN => pause(LOOK)?,
            started => return started,
        }
    }
}

/// This program, for its own commands.
pub fn program() -> anyhow::Result<PathBuf> {
    std::env::current_exe().context("cannot find this program to start it again")
}

/// Sleeps.
///
/// # Errors
/// The run was told to end.
pub fn pause(time: Duration) -> anyhow::Result<()> {
    let begin = Instant::now();
    while begin.elapsed() < time {
        check_interrupt()?;
        std::thread::sleep(LOOK.min(time.saturating_sub(begin.elapsed())));
    }
    Ok(())
}

/// Repeats a look until it is satisfied. `false` if that takes longer than `patience`.
///
/// # Errors
/// A look fails, or the run was told to end.
pub fn wait(patience: Duration, mut look: impl FnMut() -> anyhow::Result<bool>) -> anyhow::Result<bool> {
    let begin = Instant::now();
    while !look()? {
        if begin.elapsed() > patience {
            return Ok(false);
        }
        pause(LOOK)?;
    }
    Ok(true)
}

fn check_interrupt() -> anyhow::Result<()> {
    if host::interrupted().is_some() {
        bail!("interrupted");
    }
    Ok(())
}

/// Pages as MB (10^6 bytes), the unit of the papers.
pub fn mb(pages: f64) -> f64 {
    pages * PAGE_BYTES as f64 / 1e6
}
