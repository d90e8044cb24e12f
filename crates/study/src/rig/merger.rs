//! The mergers that a study compares, as recipes see them.

use super::fold::{Folding, Group};
use super::ksmd::{self, Ksmd, Rate};
use super::payers::{Cpu, Payer, Payers};
use super::{Rig, Taken, program, wait};
use crate::record::Timeline;
use anyhow::{Context, bail};
use host::ProcessId;
use std::process::Command;
use std::time::{Duration, Instant};

/// Merging counts as settled when the saved pages have grown by less than this share: 1%.
const SETTLED: f64 = 0.01;
/// Time for which they must not grow. It is extended until ksmd has made its full rounds, or Pagefold has fingerprinted
/// all pages at its scan rate.
pub const SETTLED_FOR: Duration = Duration::from_secs(8);
/// Full rounds of ksmd that must lie in this time, so that it has looked at each page.
const ROUNDS: u64 = 2;
/// The same with `smart_scan`, by which ksmd leaves a page out of up to eight rounds if it often found no duplicate.
const SMART_ROUNDS: u64 = 10;
/// Time limit for merging to settle: 3 min.
const LONGEST: Duration = Duration::from_secs(180);

/// A merger and its members. Dropping it ends it.
pub enum Merger {
    /// Nobody merges.
    Off,
    /// ksmd.
    Ksm(Ksmd, Vec<(u32, String)>),
    /// Pagefold.
    Fold(Folding),
}

impl Rig {
    /// The merger that the name of an arm begins with: `off`, `fold`, `ksm` or `ksm-RATE`. Nothing is merged before
    /// [`Merger::on`].
    ///
    /// # Errors
    /// The merger cannot be started.
    pub fn merger(&mut self, arm: &str, groups: &[Group]) -> anyhow::Result<Merger> {
        if arm.starts_with("fold") {
            let dir = self.dir().to_owned();
            return Ok(Merger::Fold(Folding::start(&dir, groups, &mut self.guardian)?));
        }
        match Rate::of(arm) {
            Some(rate) => Ok(Merger::Ksm(Ksmd::find(rate, true)?, Vec::new())),
            None if arm.starts_with("off") => Ok(Merger::Off),
            None => bail!("there is no merger {arm:?}"),
        }
    }
}

impl Merger {
    /// The setting by which the lab starts guests for this merger.
    pub fn lab(&self) -> anyhow::Result<Option<lab::Fold>> {
        if let Self::Fold(folding) = self { folding.lab().map(Some) } else { Ok(None) }
    }

    /// The beginning of a command that starts a program whose memory can be merged.
    pub fn command(&self, group: &str, name: &str) -> anyhow::Result<Command> {
        if let Self::Fold(folding) = self { folding.command(group, name) } else { Ok(Command::new(program()?)) }
    }

    /// Tells the merger its members: processes with the names of their groups. Waits until their memory can be merged.
    pub fn meet(&mut self, members: &[(u32, String)]) -> anyhow::Result<()> {
        match self {
            Self::Off => Ok(()),
            Self::Ksm(_, known) => {
                known.extend(members.iter().cloned());
                Ok(())
            }
            Self::Fold(folding) => folding.meet(members),
        }
    }

    /// Switches merging on.
    pub fn on(&self) -> anyhow::Result<()> {
        match self {
            Self::Off => Ok(()),
            Self::Ksm(ksmd, _) => ksmd.on(),
            Self::Fold(folding) => folding.on(),
        }
    }

    /// Switches merging off. Merged pages stay merged.
    pub fn hold(&self) -> anyhow::Result<()> {
        match self {
            Self::Off => Ok(()),
            Self::Ksm(..) => Ksmd::hold(),
            Self::Fold(folding) => folding.hold(),
        }
    }

    /// Makes all merged pages private, and switches merging off.
    pub fn undo(&self) -> anyhow::Result<()> {
        match self {
            Self::Off => Ok(()),
            Self::Ksm(..) => Ksmd::undo(),
            Self::Fold(folding) => folding.undo(),
        }
    }

    /// Sets whether Pagefold gives pages of zeros back from here on.
    pub fn share_zeros(&self, share: bool) -> anyhow::Result<()> {
        match self {
            Self::Fold(folding) => folding.share_zeros(share),
            _ => bail!("only Pagefold can leave pages of zeros alone"),
        }
    }

    /// Merged pages that were written since merging began. ksmd's are those of the whole host, without pages of zeros.
    pub fn broken_pages(&self) -> anyhow::Result<u64> {
        match self {
            Self::Off => Ok(0),
            Self::Ksm(..) => ksmd::broken_pages(),
            Self::Fold(folding) => folding.broken_pages(),
        }
    }

    /// Switches merging on for guests that are there and for those that come later. ksmd then scans each page in each
    /// round: with `smart_scan`, it may never compare pages of later guests with those of earlier ones
    /// (docs/notebook/2026-11-28-smart-scan.md).
    pub fn on_for_later_guests(&self) -> anyhow::Result<()> {
        if let Self::Ksm(ksmd, _) = self {
            ksmd.scan_every_page()?;
        }
        self.on()
    }

    /// Saved pages by the merger's own account.
    pub fn saved_pages(&self) -> anyhow::Result<u64> {
        match self {
            Self::Off => Ok(0),
            Self::Ksm(..) => Ok(ksmd::account()?.pages_sharing + self.zero_pages()?),
            Self::Fold(folding) => folding.saved_pages(),
        }
    }

    /// Pages of zeros whose frames the merger has freed, and that were not written since, by the merger's own account.
    pub fn zero_pages(&self) -> anyhow::Result<u64> {
        match self {
            Self::Off => Ok(0),
            Self::Ksm(_, members) => {
                let zeros = members.iter().filter_map(|(pid, _)| host::KsmStat::of(*pid).ok()?.ksm_zero_pages);
                Ok(zeros.sum())
            }
            Self::Fold(folding) => folding.zero_pages(),
        }
    }

    /// Processor time since it started, by the control groups in which it was spent.
    pub fn cpu(&self) -> anyhow::Result<Cpu> {
        match self {
            Self::Off => Ok(Cpu::default()),
            Self::Ksm(ksmd, members) => {
                let members = members.iter().map(|(pid, group)| (*pid, Payer::Group(group.clone())));
                let payer = Payers::of(&members.collect::<Vec<_>>()).payer(ksmd.pid())?;
                Ok(Cpu([(payer, ksmd.cpu_s()?)].into()))
            }
            Self::Fold(folding) => folding.cpu(),
        }
    }

    /// Memory that these guests take by page frames, pools included.
    pub fn taken(&self, pids: &[u32]) -> anyhow::Result<Taken> {
        let owners = if let Self::Fold(folding) = self { folding.workers()? } else { Vec::new() };
        Taken::by(pids, &owners)
    }

    /// Waits until the saved pages grow no more; returns at once if nobody merges. Adds points to the timeline, whose
    /// seconds begin at `begin`. After three minutes it returns nevertheless, and the timeline gets an event that says
    /// so.
    pub fn settle(&self, begin: Instant, timeline: &mut Timeline) -> anyhow::Result<()> {
        if let Self::Off = self {
            return Ok(());
        }
        let since = Instant::now();
        let mut seen: Vec<(f64, u64, Option<u64>)> = Vec::new();
        let smart = host::Ksm::read().and_then(|ksm| ksm.smart_scan).is_some_and(|on| on > 0);
        let wanted_rounds = if smart { SMART_ROUNDS } else { ROUNDS };
        let pass = if let Self::Fold(folding) = self { folding.pass()? } else { Duration::ZERO };
        let span_s = SETTLED_FOR.max(pass).as_secs_f64();
        let is_settled = wait(LONGEST, || {
            let now = since.elapsed().as_secs_f64();
            let rounds = if let Self::Ksm(..) = self { ksmd::account()?.full_scans } else { None };
            seen.push((now, self.saved_pages()?, rounds));
            if timeline.points.last().is_none_or(|(at, _)| begin.elapsed().as_secs_f64() - at >= 1.0) {
                timeline.points.push((begin.elapsed().as_secs_f64(), super::mb(seen[seen.len() - 1].1 as f64)));
            }
            Ok(is_settled(&seen, span_s, wanted_rounds))
        })?;
        if !is_settled {
            timeline.events.push((begin.elapsed().as_secs_f64(), "still merging after three minutes".into()));
        }
        Ok(())
    }

    /// Number of frames that members of two groups map at this moment.
    pub fn cross_group_frames(&self) -> anyhow::Result<u64> {
        let engine = match self {
            Self::Off => bail!("nobody merges: there is nothing to audit"),
            Self::Fold(folding) => folding.engine()?,
            Self::Ksm(_, members) => {
                let member = |(pid, group): &(u32, String)| -> anyhow::Result<audit::Member> {
                    Ok(audit::Member { group: group.clone(), process: ProcessId::of(*pid)? })
                };
                let members: Vec<_> = members.iter().map(member).collect::<anyhow::Result<_>>()?;
                let groups = members.iter().map(|m| m.group.clone()).collect();
                audit::Engine { members, groups, ..audit::Engine::default() }
            }
        };
        Ok(audit::take(&[engine]).context("cannot audit page frames")?.cross_group_frames)
    }

    /// Process id of the worker, which holds the pool of a group; `None` if it does not run or Pagefold is not the
    /// merger.
    pub fn worker_of(&self, group: &str) -> anyhow::Result<Option<u32>> {
        if let Self::Fold(folding) = self { folding.worker_of(group) } else { Ok(None) }
    }

    /// Sets how many pages a group may fingerprint a second. Pagefold must be the merger.
    pub fn set_scan_rate(&self, group: &str, pages_per_s: u32) -> anyhow::Result<()> {
        match self {
            Self::Fold(folding) => folding.set_scan_rate(group, pages_per_s),
            _ => bail!("only Pagefold has rates of groups"),
        }
    }

    /// Pages that the members of a group have fingerprinted so far. Pagefold must be the merger.
    pub fn hashed_pages(&self, group: &str) -> anyhow::Result<u64> {
        match self {
            Self::Fold(folding) => folding.hashed_pages(group),
            _ => bail!("only Pagefold counts the fingerprints of groups"),
        }
    }

    /// ksmd, if it is the merger.
    pub fn ksmd(&self) -> Option<&Ksmd> {
        if let Self::Ksm(ksmd, _) = self { Some(ksmd) } else { None }
    }
}

/// Whether the saved pages have not grown for `span_s` seconds. If ksmd is the merger, it must also have made
/// `wanted_rounds` full rounds in that time. Each look has the seconds, the saved pages, and ksmd's full rounds.
fn is_settled(looks: &[(f64, u64, Option<u64>)], span_s: f64, wanted_rounds: u64) -> bool {
    let Some(last) = looks.last() else { return false };
    let span_ago = |l: &&(f64, u64, Option<u64>)| l.0 <= last.0 - span_s;
    // The latest look that lies far enough back, in seconds and in rounds.
    let rounds_ago =
        |l: &&(f64, u64, Option<u64>)| last.2.zip(l.2).is_none_or(|(now, then)| now >= then + wanted_rounds);
    let Some(before) = looks.iter().rev().filter(span_ago).find(rounds_ago) else { return false };
    last.1 > 0 && (last.1 as f64) <= before.1 as f64 * (1.0 + SETTLED)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merging_is_settled_without_growth_for_a_span_and_its_rounds() {
        let settled = |looks: &[(f64, u64, Option<u64>)]| is_settled(looks, 8.0, 2);
        assert!(!settled(&[]));
        assert!(!settled(&[(0.0, 100, None), (7.0, 100, None)]));
        assert!(settled(&[(0.0, 100, None), (9.0, 100, None)]));
        assert!(!settled(&[(0.0, 0, None), (9.0, 0, None)]), "nothing merged");
        assert!(!settled(&[(0.0, 100, None), (9.0, 102, None)]));
        assert!(!settled(&[(0.0, 100, Some(4)), (9.0, 100, Some(5))]));
        assert!(settled(&[(0.0, 100, Some(4)), (9.0, 100, Some(6))]));
        let slow = [(0.0, 100, Some(1)), (9.0, 100, Some(4)), (18.0, 100, Some(9))];
        assert!(is_settled(&slow, 8.0, 8) && !is_settled(&slow, 8.0, 10), "rounds that take longer than the span");
        assert!(!is_settled(&[(0.0, 90, Some(1)), (9.0, 100, Some(4)), (18.0, 100, Some(9))], 8.0, 8));
        assert!(!is_settled(&[(0.0, 100, None), (9.0, 100, None)], 60.0, 2), "a pass at a low rate takes longer");
    }
}
