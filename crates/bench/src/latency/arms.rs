//! Arms: states of the group and of ksmd in which requests are timed, and how each is reached.

use crate::ksm::ksmd::set_to_work;
use crate::serving::Serving;
use crate::side::GROUP;
use act::set_ksm;
use anyhow::{Context, ensure};
use api::change::{Change, ScanRate};
use api::control::Fold;
use host::Ksm;
use serde::Serialize;
use std::time::{Duration, Instant};

/// ksmd's knobs for 50,000 pages a second: a thousand, and a sleep of 20 ms.
const KSMD: [(&str, &str); 2] = [("pages_to_scan", "1000"), ("sleep_millisecs", "20")];
/// Interval between two queries of how much is folded: 100 ms.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Folding counts as settled when it has not grown by 1% for this time: 2 s.
const NO_MORE: Duration = Duration::from_secs(2);
/// Time limit for enough to be folded, or for nothing to be folded any more: 2 minutes.
const PATIENCE: Duration = Duration::from_secs(120);
/// Pause after an arm's state is reached: 1 s.
const REST: Duration = Duration::from_secs(1);

/// An arm: what is folded while requests are timed, and whether folding goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Arm {
    /// Nothing is folded.
    Off,
    /// Pages that rest are folded.
    On,
    /// Pages that rested are folded, and the agents' rounds go on.
    Rounds,
    /// Pages that rested are folded, and agents rest.
    Still,
    /// ksmd merges at 50,000 pages a second.
    Ksmd,
}

impl Arm {
    /// Name of the arm, as in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::On => "on",
            Self::Rounds => "rounds",
            Self::Still => "still",
            Self::Ksmd => "ksmd",
        }
    }

    /// Whether pages of the group are folded in this arm.
    const fn is_folded(self) -> bool {
        matches!(self, Self::On | Self::Rounds | Self::Still)
    }
}

/// Changes the state of the group, and of ksmd, from arm to arm.
pub struct Arms<'a> {
    serving: &'a Serving,
    arm: Option<Arm>,
    /// Least number of folded pages in an arm with folded pages.
    floor: u64,
    /// Most time for folding to settle, once `Self::floor` pages are folded.
    settle: Duration,
    /// The group's scan rate in all arms but `rounds`.
    scan_rate: ScanRate,
}

impl<'a> Arms<'a> {
    /// No arm has begun yet.
    pub const fn new(serving: &'a Serving, floor: u64, settle: Duration, scan_rate: ScanRate) -> Self {
        Self { serving, arm: None, floor, settle, scan_rate }
    }

    /// Whether the beginning of this arm folds pages: it has folded pages, and the arm before has none.
    pub fn folds_in(&self, arm: Arm) -> bool {
        arm.is_folded() && !self.arm.is_some_and(Arm::is_folded)
    }

    /// Begins this arm. Returns when enough pages are folded, or none are, as the arm needs.
    ///
    /// # Errors
    /// The state is not reached in time, or the service does not answer.
    pub fn begin(&mut self, arm: Arm) -> anyhow::Result<()> {
        if self.arm == Some(arm) {
            return Ok(());
        }
        if self.arm == Some(Arm::Ksmd) {
            self.end_ksmd()?;
        }
        match arm {
            Arm::Off => self.unfold()?,
            Arm::Ksmd => {
                self.unfold()?;
                set_to_work(KSMD)?;
                self.settle(|| Ok(Ksm::read().context("KSM cannot be read")?.pages_sharing))?;
            }
            Arm::On | Arm::Rounds | Arm::Still => {
                self.set(Fold::On, self.scan_rate)?;
                self.settle(|| self.folded_pages())?;
                match arm {
                    Arm::Rounds => self.set(Fold::On, ScanRate::Pages(1))?,
                    Arm::Still => self.set(Fold::Off, self.scan_rate)?,
                    _ => {}
                }
                std::thread::sleep(REST);
            }
        }
        self.arm = Some(arm);
        Ok(())
    }

    /// Ends the last arm. If ksmd merged in it, all is unmerged and ksmd stopped.
    ///
    /// # Errors
    /// KSM's knobs cannot be set any more.
    pub fn end(&mut self) -> anyhow::Result<()> {
        if self.arm.take() == Some(Arm::Ksmd) { self.end_ksmd() } else { Ok(()) }
    }

    fn set(&self, fold: Fold, scan_rate: ScanRate) -> anyhow::Result<()> {
        self.serving.set(GROUP, Change { fold: Some(fold), scan_rate: Some(scan_rate), ..Change::default() })
    }

    fn folded_pages(&self) -> anyhow::Result<u64> {
        Ok(self.serving.show(GROUP)?.report.sharing_pages)
    }

    fn unfold(&self) -> anyhow::Result<()> {
        self.set(Fold::Unfold, self.scan_rate)?;
        until_none(|| self.folded_pages())
    }

    fn end_ksmd(&self) -> anyhow::Result<()> {
        set_ksm("run", "2")?;
        until_none(|| Ok(Ksm::read().context("KSM cannot be read")?.pages_shared))?;
        Ok(set_ksm("run", "0")?)
    }

    /// Waits until enough pages are folded, and no more are added or the time to settle is over.
    fn settle(&self, folded: impl Fn() -> anyhow::Result<u64>) -> anyhow::Result<()> {
        let (begin, mut most, mut grown) = (Instant::now(), 0, Instant::now());
        loop {
            let pages = folded()?;
            if pages > most + most / 100 {
                (most, grown) = (pages, Instant::now());
            }
            if pages >= self.floor && (grown.elapsed() >= NO_MORE || begin.elapsed() >= self.settle) {
                return Ok(());
            }
            ensure!(begin.elapsed() < PATIENCE, "only {most} pages are folded, of at least {}", self.floor);
            std::thread::sleep(LOOK_EVERY);
        }
    }
}

/// Waits until no page is folded any more, and pauses.
fn until_none(folded: impl Fn() -> anyhow::Result<u64>) -> anyhow::Result<()> {
    let begin = Instant::now();
    loop {
        let pages = folded()?;
        if pages == 0 {
            break;
        }
        ensure!(begin.elapsed() < PATIENCE, "{pages} pages stay folded");
        std::thread::sleep(LOOK_EVERY);
    }
    std::thread::sleep(REST);
    Ok(())
}
