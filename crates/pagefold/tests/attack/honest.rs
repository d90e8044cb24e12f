//! Members of two groups that hold the same pages, and how a service treats them.

use crate::common::service::{Member, Service};
use api::ask::GroupState;
use api::place::Place;
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

pub const GROUPS: [&str; 2] = ["acme", "beta"];
/// Pages of a member.
const PAGES: u64 = 2048;
/// Part of them that counts as all: 9/10. The last ones may wait for a round of their own.
const MOST: (u64, u64) = (9, 10);
/// Longest time for an answer: 5 s. An honest user waits no longer, whatever others do.
const SOON: Duration = Duration::from_secs(5);
/// Longest time to fold: 60 s, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);
/// Time between two questions: 10 ms.
const LOOK: Duration = Duration::from_millis(10);

/// Two members of each group. Members of a group have the same pages.
pub struct Honest {
    name: String,
    seed: usize,
    members: Vec<(&'static str, Member)>,
}

impl Honest {
    pub fn join(service: &Service, name: &str) -> Self {
        static SEED: AtomicUsize = AtomicUsize::new(1);
        let seed = SEED.fetch_add(PAGES as usize, Ordering::Relaxed);
        let program = Path::new(env!("CARGO_BIN_EXE_pagefold")).with_file_name("known_pages");
        let program = program.to_str().expect("a plain path");
        let mut members = Vec::new();
        for group in GROUPS {
            for each in ["a", "b"] {
                members.push((group, service.run(group, &format!("{name}-{each}"), &[], &[program])));
            }
        }
        let mut honest = Self { name: name.to_owned(), seed, members };
        honest.tell(&format!("alloc x {PAGES}"));
        honest.tell(&format!("fill x 0 {PAGES} {seed}"));
        honest.tell("mergeable x");
        honest
    }

    fn tell(&mut self, command: &str) -> Vec<String> {
        self.members.iter_mut().map(|(_, member)| member.tell(command)).collect()
    }

    fn is_folded(&self, shown: &GroupState) -> bool {
        let ours = shown.report.members.iter().filter(|member| {
            member.name.strip_prefix(&self.name).is_some_and(|rest| rest == "-a" || rest == "-b") && member.connected
        });
        ours.filter(|member| member.folded_pages >= PAGES * MOST.0 / MOST.1).count() == 2
    }

    /// Waits until they are folded. Returns the times of all answers meanwhile, in seconds, and those of other programs.
    pub fn until_folded(&mut self, service: &Service) -> [Vec<f64>; 2] {
        let began = Instant::now();
        let (mut times, mut folded, mut echo) = ([Vec::new(), Vec::new()], [false; 2], Echo::start());
        while folded != [true; 2] {
            assert!(began.elapsed() < PATIENCE, "not folded in {PATIENCE:?}: {}", service.log());
            for (group, folded) in GROUPS.into_iter().zip(&mut folded) {
                let (shown, time) = show(service, group);
                times[0].push(time.as_secs_f64());
                times[1].push(echo.time());
                *folded |= self.is_folded(&shown);
            }
            std::thread::sleep(LOOK);
        }
        times
    }

    /// Asserts that no write was lost, and that nobody has ended.
    pub fn check(&mut self) {
        self.tell(&format!("check x 0 {PAGES} {}", self.seed));
    }
}

/// Asks the supervisor and a group's worker, as `group list` and `group show` do.
fn show(service: &Service, group: &str) -> (GroupState, Duration) {
    let began = Instant::now();
    let client = api::client::Service::connect_soon(&Place::at(&service.place())).expect("the service answers");
    let groups = client.groups().expect("it tells its groups");
    let shown = client.show(&service.group(group)).expect("it tells of a group");
    let time = began.elapsed();
    assert!(groups.len() >= GROUPS.len() && time < SOON, "{} groups after {time:?}", groups.len());
    (shown, time)
}

/// Three programs of others. Each hands on what it gets to the next: about as many take part in an answer.
struct Echo(Child);

impl Echo {
    fn start() -> Self {
        let mut cats = Command::new("sh");
        cats.args(["-c", "cat | cat | cat"]).stdin(Stdio::piped()).stdout(Stdio::piped());
        Self(cats.spawn().expect("run cat"))
    }

    /// The time that a byte takes, in seconds.
    fn time(&mut self) -> f64 {
        let began = Instant::now();
        self.0.stdin.as_mut().expect("a pipe").write_all(b".").expect("say something");
        self.0.stdout.as_mut().expect("a pipe").read_exact(&mut [0]).expect("hear it");
        began.elapsed().as_secs_f64()
    }
}

impl Drop for Echo {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

/// How a service treated members that came, folded, wrote and went.
#[derive(Debug)]
pub struct Turn {
    pub fold_s: f64,
    /// 99th percentile of the times of a write to a folded page, in nanoseconds: the median of members.
    pub stall_ns: f64,
    /// Median of the times of answers.
    pub answer_s: f64,
    /// Median of the times that other programs took to hand a byte on, between these.
    pub echo_s: f64,
    /// Processor time that the supervisor and both workers took until all was folded.
    pub cpu_s: f64,
}

impl Turn {
    pub fn take(service: &Service) -> Self {
        let mut honest = Honest::join(service, "comes");
        let workers = GROUPS.into_iter().filter_map(|group| service.worker_pid(group));
        let pids: Vec<u32> = std::iter::once(service.supervisor_pid()).chain(workers).collect();
        let (began, cpu_before) = (Instant::now(), cpu_s(&pids));
        let [answers, echoes] = honest.until_folded(service);
        let (fold_s, cpu_s) = (began.elapsed().as_secs_f64(), cpu_s(&pids) - cpu_before);
        let stalls = honest.tell(&format!("write x 0 {PAGES}"));
        honest.check();
        let stalls = stalls.iter().map(|time| time.parse().expect("a number of nanoseconds")).collect();
        Self { fold_s, stall_ns: median(stalls), answer_s: median(answers), echo_s: median(echoes), cpu_s }
    }
}

/// Processor time of all threads of these processes, in seconds.
fn cpu_s(pids: &[u32]) -> f64 {
    let threads = pids.iter().flat_map(|pid| std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten());
    let ns = threads.filter_map(|thread| {
        let told = std::fs::read_to_string(thread.ok()?.path().join("schedstat")).ok()?;
        told.split_whitespace().next()?.parse::<f64>().ok()
    });
    ns.sum::<f64>() / 1e9
}

pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
