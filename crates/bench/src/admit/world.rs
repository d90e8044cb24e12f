//! Events of a simulated host, and the decisions about them, which are the balancer's own.

use super::host::{KEPT, M, RAM, STEPS, TOTAL, Vm, facts, frames};
use balance::{
    Assurance, Facts, Held, History, Ladder, Params, Reservation, Rung, Standing, Step, Wanted, admit, make_room,
    pauses, plan, policy,
};
use serde::Serialize;
use std::time::Duration;

/// Steps between two rounds of the balancer: 5 s.
const ROUND: u64 = 5 * STEPS;
/// Steps after which a promise of memory lapses if its guests have not started: 60 s.
const HOLD: u64 = 60 * STEPS;
/// Most steps for which a guest is paused (10 s), and least steps from one pause of a guest to its next (60 s).
const PAUSED: (u64, u64) = (10 * STEPS, 60 * STEPS);
/// Number of groups, to which new guests are dealt at random.
const GROUPS: u64 = 4;
/// Mean time between two requests, in steps: 4 s; between two ends of guests: 20 s; between two storms of a group: 120 s.
const MEANS: [u64; 3] = [4 * STEPS, 20 * STEPS, 120 * STEPS];
/// Mean time after which a guest uses another amount of memory, in steps: 30 s.
const DIVERGES: u64 = 30 * STEPS;

/// Figures of a run.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Seen {
    /// Most guests that ran at once.
    pub admitted: usize,
    /// Guests whose RAM is all of the host's above its least floor.
    pub by_limits: u64,
    /// Requests for one to three guests.
    pub asked: u32,
    /// Requests that were refused.
    pub refused: u32,
    /// Requests for which loans were withdrawn.
    pub after_withdrawal: u32,
    /// Promises that nobody used.
    pub lapsed: u32,
    /// Guests that were killed for want of memory.
    pub kills: u32,
    /// Memory beyond the host's.
    pub swap_bytes: u64,
    /// Steps of 0.25 s in which a guest had less than its guarantee, for each such guest.
    pub below_guarantee: u64,
    /// Times at which a group wrote all its folded pages.
    pub storms: u32,
    /// Pauses of guests.
    pub pauses: u32,
    /// Least memory that was available.
    pub least_available_bytes: u64,
}

struct Promise {
    bytes: u64,
    guests: u64,
    /// The step at which the promised guests start; `None` if they never start, or have started.
    starts: Option<u64>,
    until: u64,
    group: usize,
}

/// The simulated host with its guests, and the promises of memory that were made.
pub struct World {
    policy: Assurance,
    random: u64,
    now: u64,
    vms: Vec<Vm>,
    promises: Vec<Promise>,
    standing: Standing,
    looked: u64,
    ladder: Ladder,
    history: History,
    params: Params,
    named: u64,
    available: u64,
    seen: Seen,
}

impl World {
    pub fn new(policy: Assurance, seed: u64) -> Self {
        let by_limits = (TOTAL - TOTAL / 20) / RAM;
        let mut world = Self {
            policy,
            random: seed << 1 | 1,
            now: 0,
            vms: Vec::new(),
            promises: Vec::new(),
            standing: Standing::default(),
            looked: 0,
            ladder: Ladder::default(),
            history: History::default(),
            params: Params::default(),
            named: 0,
            available: TOTAL,
            seen: Seen { by_limits, least_available_bytes: TOTAL, ..Seen::default() },
        };
        world.round();
        world
    }

    /// Simulates until this many requests were decided, then has every group storm at once, and simulates a minute
    /// more.
    pub fn run(mut self, asked: u32) -> Seen {
        while self.seen.asked < asked {
            self.step();
            if self.one_in(MEANS[0]) {
                self.request();
            }
            if self.one_in(MEANS[1]) && !self.vms.is_empty() {
                let gone = self.below(self.vms.len() as u64) as usize;
                self.vms.swap_remove(gone);
            }
            if self.one_in(MEANS[2]) {
                let group = self.below(GROUPS + 1) as usize;
                self.storm(group);
            }
        }
        // At last, everybody writes all that is folded.
        self.storm(GROUPS as usize);
        (0..60 * STEPS).for_each(|_| self.step());
        self.seen
    }

    /// A random number from 0 to `most - 1` (xorshift).
    fn below(&mut self, most: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 11) % most.max(1)
    }

    fn one_in(&mut self, mean: u64) -> bool {
        self.below(mean) == 0
    }

    /// All guests of a group write what is folded; those of all groups, where there is no such group.
    fn storm(&mut self, group: usize) {
        self.seen.storms += 1;
        let all = group as u64 == GROUPS;
        self.vms.iter_mut().filter(|vm| all || vm.group == group).for_each(|vm| vm.in_storm = true);
    }

    fn step(&mut self) {
        self.now += 1;
        self.start_promised();
        for n in 0..self.vms.len() {
            if self.one_in(DIVERGES) {
                self.vms[n].wants = (60 + self.below(300)) * M;
            }
        }
        let now = self.now;
        self.vms.iter_mut().for_each(|vm| vm.step(now));
        let held = frames(&self.vms);
        if held > TOTAL {
            self.seen.swap_bytes += held - TOTAL;
            self.seen.kills += 1;
            self.vms.pop();
        }
        self.seen.below_guarantee += self.vms.iter().filter(|vm| vm.size < KEPT).count() as u64;
        self.seen.admitted = self.seen.admitted.max(self.vms.len());
        self.watch();
    }

    /// After each step, looks at the available memory, and pauses guests and has them go on. A round of the balancer
    /// follows every 5 s, and when the host is short of memory and less is available than at the last round.
    fn watch(&mut self) {
        let available = TOTAL.saturating_sub(frames(&self.vms));
        self.seen.least_available_bytes = self.seen.least_available_bytes.min(available);
        let fell_per_s = self.available.saturating_sub(available) * STEPS;
        self.available = available;
        let facts = facts(&self.vms, self.now, fell_per_s);
        let is_short = available < facts.host.floor_bytes;
        let (now, params) = (self.now, self.params);
        let has_run = |id: &str| {
            let vm = self.vms.iter().find(|vm| vm.name == id);
            vm.is_some_and(|vm| vm.last_pause.is_none_or(|last| last + PAUSED.1 < now))
        };
        let paused = pauses(&facts, &params, has_run);
        for vm in &mut self.vms {
            if paused.iter().any(|pause| pause.guest == vm.name) {
                (vm.paused, vm.last_pause) = (Some(now), Some(now));
                self.seen.pauses += 1;
            }
            // A guest that was told to shrink goes on at once: paused, it could not shrink.
            let is_over = vm.paused.is_some_and(|since| since + PAUSED.0 < now || !is_short || vm.size > vm.target);
            if is_over && vm.last_pause != Some(now) {
                vm.paused = None;
            }
        }
        if is_short && available < self.standing.available_bytes || self.now.is_multiple_of(ROUND) {
            self.round();
        }
    }

    /// A round of the balancer: the host and guests are looked at, and guests are told the sizes of the plan.
    fn round(&mut self) {
        let mut facts = facts(&self.vms, self.now, 0);
        let at = Duration::from_millis(self.now * 1000 / STEPS);
        self.ladder.see(at, &facts);
        facts.host.rung = self.ladder.rung();
        let now = self.now;
        let lapsed = |promise: &Promise| promise.until < now;
        self.seen.lapsed += self.promises.iter().filter(|promise| lapsed(promise) && promise.guests > 0).count() as u32;
        self.promises.retain(|promise| !lapsed(promise));
        facts.reservations = self.reservations();
        let policy = policy::named(policy::NAMES[0]).expect("a policy");
        let plan = plan(&facts, policy, &self.history, at, &self.params);
        for step in plan.frees.iter().chain(&plan.grows) {
            self.history.note(step, at);
            self.tell(step);
        }
        (self.standing, self.looked) = (Standing::of(&facts, &plan.grows, &self.params), self.now);
    }

    fn tell(&mut self, step: &Step) {
        if let Some(vm) = self.vms.iter_mut().find(|vm| vm.name == step.guest) {
            vm.target = step.to_bytes;
        }
    }

    fn reservations(&self) -> Vec<Reservation> {
        let of = |promise: &Promise| Reservation { name: "next".into(), bytes: promise.bytes };
        self.promises.iter().map(of).collect()
    }

    /// Starts the guests of promises whose time has come. Their promise still counts until the next round, which sees
    /// the guests.
    fn start_promised(&mut self) {
        for n in 0..self.promises.len() {
            if self.promises[n].starts != Some(self.now) {
                continue;
            }
            (self.promises[n].starts, self.promises[n].until) = (None, self.now);
            for _ in 0..std::mem::take(&mut self.promises[n].guests) {
                self.named += 1;
                let wants = (100 + self.below(150)) * M;
                self.vms.push(Vm::new(format!("vm{}", self.named), self.promises[n].group, self.now, wants));
            }
        }
    }

    fn request(&mut self) {
        self.seen.asked += 1;
        let (guests, group) = (1 + self.below(3), self.below(GROUPS) as usize);
        let wanted = Wanted {
            memory_bytes: Some(RAM),
            group: Some(group.to_string()),
            guests,
            assurance: self.policy,
            ..Wanted::default()
        };
        let (now, left) = (self.now, |promise: &Promise| promise.until.saturating_sub(self.now) / STEPS);
        let held: Vec<Held> =
            self.promises.iter().map(|promise| Held { bytes: promise.bytes, left_s: left(promise) }).collect();
        let answer = admit(&self.standing, &held, self.available, &wanted).expect("a request with a size");
        let is_made = answer.admitted || (answer.loans_would_do && self.withdraw(answer.bytes));
        if !is_made {
            self.seen.refused += 1;
            return;
        }
        // One request of ten never starts its guests. Where loans have to be withdrawn first, guests start 10 s later.
        let wait = if answer.admitted { 0 } else { 10 * STEPS };
        let starts = (self.below(10) > 0).then(|| now + 1 + wait + self.below(HOLD / 2));
        self.promises.push(Promise { bytes: answer.bytes, guests, starts, until: now + HOLD, group });
    }

    /// Has guests told to give up what they were lent beyond their guarantee, until a promise of `bytes` can be kept,
    /// as `pagefold balance reserve` does. `false` if that cannot be done, or the balancer withdraws memory already
    /// because the host is short.
    fn withdraw(&mut self, bytes: u64) -> bool {
        let mut facts: Facts = facts(&self.vms, self.now, 0);
        facts.host.rung = self.ladder.rung();
        facts.reservations = self.reservations();
        if facts.host.rung > Rung::Idle {
            return false;
        }
        let Ok(steps) = make_room(&facts, "next", bytes, &self.params) else { return false };
        steps.iter().for_each(|step| self.tell(step));
        self.seen.after_withdrawal += 1;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strict_admissions_end_in_no_kill_and_more_guests_than_limits_allow() {
        for seed in [1, 2, 3] {
            let seen = World::new(Assurance::Strict, seed).run(1000);
            assert_eq!((seen.kills, seen.swap_bytes, seen.below_guarantee), (0, 0, 0), "seed {seed}: {seen:?}");
            assert!(seen.admitted as u64 * 10 >= seen.by_limits * 13, "seed {seed}: {seen:?}");
            assert!(seen.refused > 0 && seen.lapsed > 0 && seen.storms > 10, "seed {seed}: {seen:?}");
        }
    }
}
