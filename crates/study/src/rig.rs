//! The host on which a study runs: guests of the lab, mergers, and measurements. All changes of the host are undone by
//! the guardian of `pagefold bench`, however the run ends.

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

/// Interval between two checks while something is waited for.
const LOOK: Duration = Duration::from_millis(100);

/// Time limit for the guardian of an earlier run to finish.
const GUARDIAN: Duration = Duration::from_secs(15);

/// A host on which a study runs.
pub struct Rig {
    guardian: Guardian,
    knobs: KsmKnobs,
    dir: PathBuf,
    cache: Cache,
    labs: u32,
    /// A template of guests, which is made once for all turns.
    storms: Option<(Image, Storms)>,
}

impl Rig {
    /// Prepares the host for a run.
    ///
    /// # Errors
    /// The host lacks something, or pages of other programs are merged.
    pub fn start(whole_host: WholeHost) -> anyhow::Result<Self> {
        if !rustix::process::geteuid().is_root() {
            let why = "a study sees page frames and sets ksmd, which takes root: run this with sudo";
            return Err(Stop::HostLacks(why.to_owned()).into());
        }
        let knobs = may_use(whole_host)?;
        // Guests inherit this setting: their memory is in small pages, unless the study is about huge ones.
        rustix::thread::disable_transparent_huge_pages(true).context("cannot disable huge pages for the guests")?;
        let mut guardian = guardian()?;
        let dir = std::env::temp_dir().join(format!("pagefold-study-{}", std::process::id()));
        // Workers run as users of their own, and must pass through this directory to the prover's socket.
        DirBuilder::new().mode(0o711).create(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
        guardian.keep_dir(&dir)?;
        guardian.keep_ksm(&knobs)?;
        let cache = Cache::open(&lab::cache_dir()?)?;
        let rig = Self { guardian, knobs, dir, cache, labs: 0, storms: None };
        rig.stop_ksmd()?;
        Ok(rig)
    }

    /// The directory of this run.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Path of a file of `mib` MiB for guests to read. No two of its pages are equal.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn data(&self, mib: u64) -> anyhow::Result<PathBuf> {
        self.data_of(0, mib)
    }

    /// Path of such a file for one guest: no page of it is equal to a page of a file of another number.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn data_of(&self, number: u64, mib: u64) -> anyhow::Result<PathBuf> {
        let path = self.dir.join(format!("data-{number}-{mib}"));
        if !path.exists() {
            bench::write_pages(&path, (1..=mib << 8).map(|page| bench::filled(number << 32 | page)))?;
        }
        Ok(path)
    }

    /// The template of an image, with the directory of the run and the guardian. The first turn that asks for a
    /// template makes it.
    ///
    /// # Errors
    /// The image's guest does not come up.
    pub fn storms(&mut self, image: Image) -> anyhow::Result<(&Storms, &Path, &mut Guardian)> {
        if self.storms.as_ref().is_none_or(|(of, _)| *of != image) {
            // Templates of two images would use the same names for their guests' directories.
            self.storms = None;
            self.storms = Some((image, Storms::prepare(image, &self.dir, &mut self.guardian)?));
        }
        let (_, storms) = self.storms.as_ref().context("a template was just made")?;
        Ok((storms, self.dir.as_path(), &mut self.guardian))
    }

    /// The guardian, which undoes what the run changes on the host.
    pub fn guardian(&mut self) -> &mut Guardian {
        &mut self.guardian
    }

    /// Sets ksmd's knobs back between turns. Guests and services end when their values are dropped.
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

    /// Has the guardian undo all changes of the host.
    ///
    /// # Errors
    /// Something could not be undone; the guardian has printed what.
    pub fn finish(self) -> anyhow::Result<()> {
        let Self { guardian, storms, .. } = self;
        // The template's guests end before their directory is removed.
        drop(storms);
        guardian.finish()
    }
}

/// Starts the guardian. If an earlier run was just cut off, waits until its guardian is done.
fn guardian() -> anyhow::Result<Guardian> {
    let begin = Instant::now();
    loop {
        match Guardian::start() {
            Err(_) if begin.elapsed() < GUARDIAN => pause(LOOK)?,
            started => return started,
        }
    }
}

/// Path of this program, to run its other commands.
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

/// Calls `look` until it returns `true`. Returns `false` if that takes longer than `patience`.
///
/// # Errors
/// `look` fails, or the run was told to end.
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
