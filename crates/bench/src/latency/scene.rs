//! A scene: the loads' programs as members of one kind, and the slices in which they are measured.

use super::Args;
use super::arms::{Arm, Arms};
use super::burners::{Burners, Host};
use super::loads::{Kind, Load, Member};
use super::samples::now_ns;
use super::slice::{Look, Measured, Own, Slice};
use crate::attach::attach;
use crate::guardian::Guardian;
use crate::overhead::SHORT_FLOOR;
use crate::serving::{Serving, own_threads_of, wait_for};
use crate::side::{GROUP, Place, Running, Side};
use anyhow::{Context, ensure};
use api::change::ScanRate;
use api::control::Latency;
use cli::say;
use host::ProcessStat;
use std::cell::RefCell;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::{Duration, Instant};

/// Pause after a change of the host's load, in which nothing is measured: 0.5 s.
const HOST_REST: Duration = Duration::from_millis(500);
/// Time limit for a helper process to end after the program beside which it runs: 20 s.
const PATIENCE: Duration = Duration::from_secs(20);

/// Where loads run.
pub struct Scene<'a> {
    /// The service, and the programs that were started.
    pub side: Side<'a>,
    /// How programs become members.
    pub member: Member,
    /// Directory for the scene's files.
    pub dir: &'a Path,
    args: &'a Args,
    kinds: &'a [&'static Kind],
    /// Processes of the members; in `helpers`, the processes that stay beside attached members.
    members: RefCell<Vec<u32>>,
    helpers: RefCell<Vec<u32>>,
}

/// A program that is a member. Dropping this ends the program, and then its helper process if it was attached.
pub struct Server {
    running: Running,
    _helper: Option<Helper>,
}

impl Server {
    /// Process id of the program.
    pub fn pid(&self) -> u32 {
        self.running.pid()
    }
}

/// The process of `pagefold-attach` that stays beside an attached program.
struct Helper(Child);

impl Drop for Helper {
    fn drop(&mut self) {
        let end = Instant::now() + PATIENCE;
        while matches!(self.0.try_wait(), Ok(None)) && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(20));
        }
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Totals of these processes. One that has ended counts 0.
fn own_of(pids: &[u32]) -> Own {
    let threads: Vec<_> = pids.iter().flat_map(|pid| own_threads_of(*pid)).collect();
    let faults = |pid: &u32| ProcessStat::read(*pid).map_or(0, |stat| stat.minor_faults);
    Own {
        cpu_s: threads.iter().map(|thread| thread.used.as_secs_f64()).sum(),
        waited_s: threads.iter().map(|thread| thread.waited.as_secs_f64()).sum(),
        minor_faults: pids.iter().map(faults).sum(),
    }
}

/// Settings of the group, for the service's configuration file.
pub fn settings(scan_rate: ScanRate, latency: Latency) -> String {
    let rate = match scan_rate {
        ScanRate::Auto => "\"auto\"".to_owned(),
        ScanRate::Adaptive(percent) => format!("\"adaptive:{percent}%\""),
        ScanRate::Pages(pages) => pages.to_string(),
    };
    format!("fold = \"off\"\nscan-rate = {rate}\nlatency = \"{}\"", latency.name())
}

impl<'a> Scene<'a> {
    /// Starts the service of the scene.
    ///
    /// # Errors
    /// The service does not start.
    pub fn new(
        args: &'a Args,
        kinds: &'a [&'static Kind],
        (member, dir): (Member, &'a Path),
        settings: &'a str,
        guardian: &'a mut Guardian,
    ) -> anyhow::Result<Self> {
        let floor = kinds.iter().map(|kind| kind.floor).sum();
        let place = Place { dir, is_member: true, is_eager: args.eager, is_short: args.short, floor, settings };
        let side = Side::new(place, guardian)?;
        Ok(Self { side, member, dir, args, kinds, members: RefCell::default(), helpers: RefCell::default() })
    }

    /// Ends the service, after the loads have ended.
    ///
    /// # Errors
    /// Something of it cannot be removed.
    pub fn finish(self) -> anyhow::Result<()> {
        self.side.finish().map(drop)
    }

    /// Requests a second that this load gets.
    pub fn rate(&self, kind: &Kind) -> u32 {
        self.args.rate.unwrap_or(kind.rate)
    }

    /// Starts a program as the given user, makes it a member, and waits until it answers.
    ///
    /// # Errors
    /// The program ends, does not answer, or cannot be attached.
    pub fn start(
        &self,
        name: &str,
        user: Option<&str>,
        words: &[&str],
        answers: impl Fn() -> bool,
    ) -> anyhow::Result<Server> {
        let server = match self.member {
            Member::Started | Member::Guest => {
                Server { running: self.side.serve(name, user, words, answers)?, _helper: None }
            }
            Member::Attached => {
                let as_user = user.map(|user| ["setpriv", "--init-groups", "--reuid", user, "--regid", user, "--"]);
                let words: Vec<&str> = as_user.into_iter().flatten().chain(words.iter().copied()).collect();
                let running = self.side.serve_aside(name, &words, answers)?;
                let helper = attach(running.pid(), self.serving()?.dir(), &self.stops(), true, self.args.eager)?;
                self.helpers.borrow_mut().push(helper.id());
                Server { running, _helper: Some(Helper(helper)) }
            }
        };
        self.note_members(&[server.pid()]);
        Ok(server)
    }

    /// Adds processes to those that `Self::run` expects to be members.
    pub fn note_members(&self, pids: &[u32]) {
        self.members.borrow_mut().extend(pids);
    }

    /// The file to which helpers add how long they stopped threads.
    fn stops(&self) -> PathBuf {
        self.dir.join("stops")
    }

    fn serving(&self) -> anyhow::Result<&Serving> {
        self.side.serving().context("a scene has a service")
    }

    /// Runs the loads, and measures them in all slices.
    ///
    /// # Errors
    /// A load does not run, or the state of an arm is not reached.
    pub fn run(&self) -> anyhow::Result<Vec<Measured>> {
        let is_mergeable = self.args.arms.contains(&Arm::Ksmd);
        if is_mergeable {
            act::set_memory_merge(true).context("this kernel merges no whole process")?;
        }
        let loads = self.kinds.iter().map(|kind| (kind.begin)(self)).collect::<anyhow::Result<Vec<_>>>();
        if is_mergeable {
            act::set_memory_merge(false)?;
        }
        let loads = loads?;
        self.meet()?;
        let measured = self.rounds(&loads);
        drop(loads);
        self.tell_stops();
        measured
    }

    /// Waits until all programs are members and have memory that can be folded.
    fn meet(&self) -> anyhow::Result<()> {
        let serving = self.serving()?;
        let are_members = || {
            let members = serving.show(GROUP)?.report.members;
            for pid in &*self.members.borrow() {
                let member = members.iter().find(|member| member.pid == *pid && member.connected);
                let member = member.with_context(|| format!("process {pid} is no member"))?;
                ensure!(member.enrolled_pages > 0, "{} has nothing to fold: {}", member.name, member.state);
            }
            Ok(())
        };
        wait_for(are_members, "not every program became a member")
    }

    fn rounds(&self, loads: &[Load]) -> anyhow::Result<Vec<Measured>> {
        let (rounds, seconds) = self.args.lengths();
        let floor = self.side.floor() / if self.args.short { SHORT_FLOOR } else { 1 };
        let settle = Duration::from_secs(self.args.settle.into());
        let mut arms = Arms::new(self.serving()?, floor, settle, self.args.scan_rate);
        let (mut order, mut hosts, mut all) = (self.args.arms.clone(), self.args.hosts.clone(), Vec::new());
        for round in 1..=rounds {
            say!("pagefold: {}, round {round} of {rounds}", self.member.name());
            for arm in &order {
                if arms.folds_in(*arm) {
                    let host = *hosts.first().context("no load of the host")?;
                    let _burners = Burners::start(host)?;
                    all.extend(self.slice(loads, ("folding", host, round), || arms.begin(Arm::On))?);
                }
                arms.begin(*arm)?;
                self.args.priority.give(self.serving()?, &self.members.borrow())?;
                for host in &hosts {
                    let _burners = Burners::start(*host)?;
                    std::thread::sleep(HOST_REST);
                    let whole = || {
                        std::thread::sleep(Duration::from_secs(seconds.into()));
                        Ok(())
                    };
                    all.extend(self.slice(loads, (arm.name(), *host, round), whole)?);
                }
            }
            // The next round goes through the arms backwards, so that slow changes of the machine fall on all arms
            // alike.
            order.reverse();
            hosts.rotate_left(1);
        }
        arms.end()?;
        Ok(all)
    }

    /// Measures all loads from before until after `act`.
    fn slice(
        &self,
        loads: &[Load],
        (arm, host, round): (&'static str, Host, u32),
        act: impl FnOnce() -> anyhow::Result<()>,
    ) -> anyhow::Result<Vec<Measured>> {
        let before = self.look(loads, arm)?;
        act()?;
        let after = self.look(loads, arm)?;
        let of_load = |(n, (load, kind)): (usize, (&Load, &&'static Kind))| -> anyhow::Result<Measured> {
            let window = load.client.samples.take(before.at_ns, after.at_ns).with_context(|| kind.name.to_owned())?;
            let slice = Slice::of(round, [&before, &after], n, &window);
            Ok(Measured { load: kind.name, member: self.member, host, arm, slice })
        };
        loads.iter().zip(self.kinds).enumerate().map(of_load).collect()
    }

    fn look(&self, loads: &[Load], arm: &str) -> anyhow::Result<Look> {
        let (serving, is_ksmd) = (self.serving()?, arm == Arm::Ksmd.name());
        let engine: f64 = serving.cpu_by_part(GROUP, &self.members.borrow())?.values().sum();
        let helpers = own_of(&self.helpers.borrow()).cpu_s;
        let ksmd = is_ksmd.then(host::ksmd_cpu_time).flatten().unwrap_or_default();
        let report = serving.show(GROUP)?.report;
        let mut look = Look {
            at_ns: now_ns(),
            own: loads.iter().map(|load| own_of(&[vec![load.pid], host::children(load.pid)].concat())).collect(),
            folding_cpu_s: engine + helpers + ksmd.as_secs_f64(),
            folded_pages: report.sharing_pages,
            broken_pages: report.broken_pages,
            folds: report.bill.folds,
            saved_bytes: report.savings.saved_bytes(),
        };
        if is_ksmd {
            let ksm = host::Ksm::read().context("KSM cannot be read")?;
            look.folded_pages = ksm.pages_sharing;
            look.saved_bytes = ksm.general_profit.unwrap_or(i64::try_from(page::pages_to_bytes(ksm.pages_sharing))?);
        }
        Ok(look)
    }

    /// Prints how long threads of attached programs were stopped.
    fn tell_stops(&self) {
        let text = fs::read_to_string(self.stops()).unwrap_or_default();
        let mut stops: Vec<u64> = text.lines().filter_map(|line| line.parse().ok()).collect();
        stops.sort_unstable();
        if let (Some(middle), Some(longest)) = (stops.get(stops.len() / 2), stops.last()) {
            let times = stops.len();
            say!(
                "pagefold: threads of attached programs were stopped {times} times, for {middle} us (median), {longest} us at most"
            );
        }
    }
}
