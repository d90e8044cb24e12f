//! Runs the studies of one command, one after the other. Their turns stay on disk until all results are written.

use crate::result::{HostFacts, Outcome};
use crate::runner::{Ended, Job, in_words_of};
use crate::store::Stores;
use anyhow::Context;
use cli::exit::Stop;
use cli::say;
use std::path::Path;

/// The studies that were run so far.
pub struct Series {
    host: HostFacts,
    stores: Stores,
    results: Vec<Outcome>,
    /// Whether each study has a result with all its arms.
    is_whole: bool,
    /// Whether a study failed, for a reason other than that the host lacks something.
    has_failed: bool,
}

impl Series {
    /// No study has been run yet. Turns are kept below `state`.
    ///
    /// # Errors
    /// This program cannot be read, whose hash tells its turns from those of other builds.
    pub fn new(state: &Path) -> anyhow::Result<Self> {
        let host = HostFacts::read();
        let stores = Stores::new(state, identity(&host)?);
        Ok(Self { host, stores, results: Vec::new(), is_whole: true, has_failed: false })
    }

    /// Runs a study. If it has no result, prints why.
    ///
    /// # Errors
    /// See [`Job::run`].
    pub fn run(&mut self, job: &Job<'_>) -> anyhow::Result<Option<&Outcome>> {
        let ended = match self.stores.of(&job.turns_name()) {
            Ok(store) => job.run(store, &self.host)?,
            Err(why) => Ended::Failed(why),
        };
        Ok(self.note(&job.study.id, ended))
    }

    fn note(&mut self, id: &str, ended: Ended) -> Option<&Outcome> {
        self.is_whole &= matches!(ended, Ended::Measured { is_whole: true, .. });
        match ended {
            Ended::Measured { outcome, .. } => {
                self.results.push(*outcome);
                self.results.last()
            }
            Ended::Lacks => None,
            Ended::Failed(why) => {
                say!("pagefold: {id} has no result: {}", in_words_of(&why));
                self.has_failed = true;
                None
            }
        }
    }

    /// The results of the studies that have one.
    ///
    /// # Errors
    /// The host lacks something for every study.
    pub fn results(&self) -> Result<&[Outcome], Stop> {
        if self.results.is_empty() && !self.has_failed {
            return Err(Stop::HostLacks("no study was run: this host lacks something for each of them".to_owned()));
        }
        Ok(&self.results)
    }

    /// Removes the turns, after the results were written. If a study failed, the turns stay: the same command then
    /// tries that study again, and finds the turns of all others. Returns whether all studies have all arms.
    ///
    /// # Errors
    /// Turns cannot be removed.
    pub fn finish(self) -> anyhow::Result<bool> {
        if self.has_failed {
            say!("pagefold: turns that were done are kept: the same command goes on with the next");
        } else {
            self.stores.clear()?;
        }
        Ok(self.is_whole)
    }
}

/// Names the program, the kernel and the host: turns of others must not be mixed with these.
fn identity(host: &HostFacts) -> anyhow::Result<String> {
    let HostFacts { kernel, cpus, ram_bytes, build, .. } = host;
    let name = host::Kernel::this().host_name;
    let build = build.as_ref().context("cannot read this program to tell it from others")?;
    Ok(format!("build {build}, Linux {kernel}, {cpus} processors, {}, host {name}", cli::bytes(*ram_bytes)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{self, Length};
    use crate::plan::Planned;
    use crate::result::tests::empty;
    use crate::runner::tests::{turn, with_job};
    use anyhow::anyhow;

    fn measured(is_whole: bool) -> Ended {
        Ended::Measured { outcome: Box::new(empty(&data::all()[0])), is_whole }
    }

    /// The number of results, and whether all was done, after such ends.
    fn after(ends: Vec<Ended>) -> (Result<usize, String>, bool) {
        let state = tempfile::tempdir().unwrap();
        let mut series = Series::new(state.path()).unwrap();
        for ended in ends {
            series.note("x", ended);
        }
        (series.results().map(<[_]>::len).map_err(|why| why.to_string()), series.finish().unwrap())
    }

    #[test]
    fn study_that_fails_or_lacks_something_leaves_the_others_their_results() {
        assert_eq!(after(vec![measured(true), measured(true)]), (Ok(2), true));
        assert_eq!(after(vec![measured(false)]), (Ok(1), false));
        assert_eq!(after(vec![Ended::Failed(anyhow!("full")), measured(true)]), (Ok(1), false));
        assert_eq!(after(vec![Ended::Lacks, measured(true)]), (Ok(1), false));
        assert_eq!(after(vec![Ended::Lacks, Ended::Failed(anyhow!("full"))]), (Ok(0), false));
        let (none, is_whole) = after(vec![Ended::Lacks]);
        assert!(none.is_err_and(|why| why.contains("lacks something")) && !is_whole);
    }

    #[test]
    fn finished_study_has_its_result_from_kept_turns_until_the_series_is_finished() {
        let state = tempfile::tempdir().unwrap();
        with_job(1, |job| {
            let mut first = Series::new(state.path()).unwrap();
            for arm in ["ksm", "fold"] {
                let planned = Planned { arm: arm.into(), rep: Some(0), length: Length::Short };
                first.stores.of(&job.turns_name()).unwrap().keep(&planned, &turn(&planned)).unwrap();
            }
            let whole = first.run(job).unwrap().cloned().expect("a result without a rig");
            assert_eq!(whole.measured.len(), 2);
            // The next study fails.
            first.note("y", Ended::Failed(anyhow!("full")));
            assert!(!first.finish().unwrap());
            let mut second = Series::new(state.path()).unwrap();
            assert_eq!(second.run(job).unwrap().map(|again| &again.measured), Some(&whole.measured));
            // The command is interrupted before its results are written.
            drop(second);
            let mut third = Series::new(state.path()).unwrap();
            assert_eq!(third.run(job).unwrap().map(|again| &again.measured), Some(&whole.measured));
            assert!(third.finish().unwrap());
            assert!(!state.path().join(job.turns_name()).exists());
        });
    }

    #[test]
    fn turns_are_of_a_build_and_a_host() {
        let host = HostFacts { build: Some("0123".into()), cpus: 2, ram_bytes: 8 << 30, ..HostFacts::default() };
        let of = |host: &HostFacts| identity(host).unwrap();
        assert!(of(&host).contains(&::host::Kernel::this().host_name));
        for other in [
            HostFacts { build: Some("0124".into()), ..host.clone() },
            HostFacts { cpus: 4, ..host.clone() },
            HostFacts { ram_bytes: 16 << 30, ..host.clone() },
            HostFacts { kernel: "x".into(), ..host.clone() },
        ] {
            assert_ne!(of(&other), of(&host));
        }
    }
}
