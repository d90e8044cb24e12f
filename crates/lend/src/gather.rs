//! Gathers the facts that a plan is made of. The host's come from `/proc`, those of guests from their processes and
//! QMP. The savings of folding come from the caller, who has asked the service.

use crate::balloon::{Balloon, Device, Statistics};
use crate::carry_out::Outcome;
use crate::ledger::Ledger;
use crate::many;
use crate::park;
use crate::ram_use::RamUse;
use crate::rules::Rules;
use balance::{Claims, Driver, DriverState, Facts, GroupFacts, GuestFacts, HostFacts, Rung, Sighting, Step};
use guest::Guest;
use host::{MemoryLimits, ProcessId};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Speed at which a balloon is taken to shrink its guest, until that was measured: 16 MiB a second.
const UNSEEN_BYTES_PER_S: u64 = 16 << 20;
/// Most sizes of one guest for which a rate of page faults is kept: 16.
const MOST_POINTS: usize = 16;
/// Distance between these sizes, as a part of the guest's RAM: 1/16.
const POINT_PART: u64 = 16;
/// Least time between two reminders of one guest: 10 s.
const REMINDED_EVERY: Duration = Duration::from_secs(10);
/// Time in which all guests of a round are asked for their sizes: 5 s. Guests that were not asked by then count as
/// silent.
const ASKED_WITHIN: Duration = Duration::from_secs(5);
/// Weight of the newest measured rate of page faults at a size, against the rate that is kept: 1/4.
const NEWEST: f64 = 0.25;

/// Savings of folding, as the service reports them.
#[derive(Clone, Debug, Default)]
pub struct Saved {
    /// Groups by name.
    pub groups: BTreeMap<String, GroupFacts>,
    /// Net savings by process.
    pub guests: BTreeMap<u32, i64>,
}

/// What is kept about one guest from round to round.
#[derive(Default)]
struct Watched {
    driver: Driver,
    /// The guest's process and balloon device, if QEMU answered at the last look with new statistics.
    device: Option<(u32, Device)>,
    /// Size of plugged-in DIMMs, by the last look that asked for it.
    plugged_bytes: u64,
    ram: Option<RamUse>,
    /// The guest's last statistics, and the process of its QEMU.
    statistics: Option<Statistics>,
    pid: u32,
    /// The guest's size at the last look; and the largest size that it can have had when it sent its statistics.
    size_bytes: u64,
    told_size_bytes: u64,
    faults_per_s: f64,
    faults_by_size: BTreeMap<u64, f64>,
    /// Whether it has a balloon whose size is not asked for: no rule guarantees the guest a size, or it has more RAM
    /// than is known.
    is_unused: bool,
    /// When it was last told its size again.
    reminded: Option<Duration>,
    /// When it was seen first.
    since: Option<Duration>,
}

/// Gathers facts round by round.
pub struct Gatherer {
    rules: Rules,
    began: Instant,
    /// Seconds of the gatherer's clock in one second of the host's.
    rate: u32,
    limits: Option<MemoryLimits>,
    watched: BTreeMap<String, Watched>,
    /// Processes of guests that are parked, at the last look.
    parked: Vec<ProcessId>,
}

impl Gatherer {
    /// A gatherer that has looked at no guest yet.
    pub fn new(rules: Rules) -> Self {
        Self {
            rules,
            began: Instant::now(),
            rate: 1,
            limits: MemoryLimits::find(),
            watched: BTreeMap::new(),
            parked: Vec::new(),
        }
    }

    /// Decisions of the operator.
    pub const fn rules(&self) -> &Rules {
        &self.rules
    }

    /// Makes `rate` seconds pass on the gatherer's clock in one second, so that drivers, pressure and groups are judged
    /// sooner. For tests, which then need not wait for minutes.
    pub const fn hurry(&mut self, rate: u32) {
        self.rate = rate;
    }

    /// Time since the gatherer was made, by its own clock.
    pub fn at(&self) -> Duration {
        self.began.elapsed() * self.rate
    }

    /// Seconds since the host started. After [`Gatherer::hurry`], they pass faster than on the host's clock.
    pub fn at_s(&self) -> u64 {
        let ahead = self.at().saturating_sub(self.began.elapsed());
        host::boot_clock_s().saturating_add(ahead.as_secs())
    }

    /// Memory that is available; `None` if the kernel does not tell.
    pub fn available_bytes(&self) -> Option<u64> {
        self.rules.total_and_available().ok().map(|(_, available)| available)
    }

    /// The facts of this moment, within their bounds ([`Facts::bounded`]). Guests that are no VMs, and guests that have
    /// ended, are left out. So are VMs of strangers ([`Rules::owners`]), which count as any other program: nothing is
    /// promised to them, and memory that they hold is not available.
    ///
    /// # Errors
    /// The kernel does not tell about the host.
    pub fn gather(&mut self, guests: &[Guest], ledger: &Ledger, saved: &Saved) -> anyhow::Result<Facts> {
        let counts = |guest: &&Guest| guest.kind.is_vm() && self.rules.counts(guest, self.limits.as_ref());
        let vms: Vec<&Guest> = guests.iter().filter(counts).collect();
        self.watched.retain(|id, _| vms.iter().any(|guest| guest.id == *id));
        self.parked = park::processes(ledger.dir());
        let asked = self.ask_all(&vms);
        let guest_facts = |(guest, asked): (&&Guest, Option<Answer>)| self.guest(guest, asked, ledger, saved);
        let guests: Vec<GuestFacts> = vms.iter().zip(asked).filter_map(guest_facts).collect();
        let reservations = ledger.reserved(|name| vms.iter().any(|guest| guest.name == name))?;
        let facts =
            Facts { host: self.host(ledger.rung(), &guests)?, groups: saved.groups.clone(), guests, reservations };
        Ok(facts.bounded())
    }

    /// Asks guests for their sizes; `None` for guests that are not to be asked. Guests that were silent at the last
    /// look are asked after the other guests of their owner. A guest that was not asked in time counts as silent.
    fn ask_all(&self, vms: &[&Guest]) -> Vec<Option<Answer>> {
        let watched = |guest: &Guest| self.watched.get(&guest.id);
        let is_silent = |guest: &Guest| watched(guest).is_some_and(|one| one.driver.state() == DriverState::Silent);
        let mut order: Vec<usize> = (0..vms.len()).collect();
        order.sort_by_key(|n| is_silent(vms[*n]));
        let asked = many::each_in_turn(order.iter().map(|n| (vms[*n].facts.uid, vms[*n])), ASKED_WITHIN, |guest| {
            let known = watched(guest).and_then(|watched| watched.device_of(guest));
            self.rules.guaranteed_bytes(guest).and_then(|_| ask(guest, known))
        });
        let mut answers: Vec<Option<Answer>> = vms.iter().map(|_| None).collect();
        for (n, answer) in order.into_iter().zip(asked) {
            let is_asked = self.rules.guaranteed_bytes(vms[n]).is_some();
            answers[n] = answer.unwrap_or(is_asked.then_some(None));
        }
        answers
    }

    /// Notes a step that a guest was told at time `at`, and its size at the end of the wait for it, so that the
    /// driver's progress can be judged.
    pub fn made(&mut self, facts: &Facts, outcome: &Outcome, at: Duration) {
        let (step, end) = (&outcome.step, self.at());
        let Some(guest) = facts.guests.iter().find(|guest| guest.id == step.guest) else { return };
        let Some(watched) = self.watched.get_mut(&step.guest) else { return };
        let sighting = |actual_bytes| Sighting {
            ram_bytes: guest.ram_bytes,
            target_bytes: Some(step.to_bytes),
            actual_bytes,
            // Frames as they were when the facts were gathered: frames that a balloon has freed since are counted in
            // the next round.
            resident_bytes: guest.resident_bytes,
            had_arrived: false,
        };
        watched.driver.see(at, sighting(Some(guest.actual_bytes)));
        let end = outcome.landed_s.map_or(end, |seconds| at + Duration::from_secs_f64(seconds) * self.rate);
        watched.driver.see(end, sighting(outcome.actual_bytes));
        if let Some(seconds) = outcome.landed_s {
            watched.driver.landed(step.from_bytes.saturating_sub(step.to_bytes), seconds);
        }
    }

    /// Sizes that guests are to be told again, because their drivers are not where they were told to be: each guest
    /// every 10 s at most.
    pub fn due_reminders(&mut self, facts: &Facts) -> Vec<Step> {
        let at = self.at();
        let mut steps = Vec::new();
        for guest in &facts.guests {
            let Some(watched) = self.watched.get_mut(&guest.id) else { continue };
            if watched.reminded.is_some_and(|last| at - last < REMINDED_EVERY) {
                continue;
            }
            if let Some(step) = balance::reminder(&facts.host, guest) {
                watched.reminded = Some(at);
                steps.push(step);
            }
        }
        steps
    }

    /// State of each guest's balloon driver, by the guest's id.
    pub fn drivers(&self) -> BTreeMap<&str, DriverState> {
        self.watched.iter().map(|(id, watched)| (id.as_str(), watched.state())).collect()
    }

    /// Whether no guest's balloon driver is on its way to a size, silent or flagged.
    pub fn is_settled(&self) -> bool {
        self.watched.values().all(|watched| watched.driver.is_settled())
    }

    fn host(&self, rung: Rung, guests: &[GuestFacts]) -> anyhow::Result<HostFacts> {
        let total_swap = host::total_swap_bytes();
        let (total_bytes, available_bytes) = self.rules.total_and_available()?;
        Ok(HostFacts {
            total_bytes,
            available_bytes,
            falling_bytes_per_s: 0,
            floor_bytes: self.rules.floor_bytes(total_bytes, guests),
            swap_used_bytes: total_swap.saturating_sub(host::free_swap_bytes()),
            swap_total_bytes: total_swap,
            stalled_percent: self.rules.stalled_percent(),
            rung,
        })
    }

    /// Page frames of a guest's RAM. They are counted anew if the size of plugged-in memory has changed. `None` if the
    /// guest has ended.
    fn ram_of(&mut self, guest: &Guest, started_with: u64, asked: Option<&Answer>, at: Duration) -> Option<RamUse> {
        let known = self.watched.get(&guest.id).and_then(|watched| watched.ram);
        let ram = RamUse::of(guest, started_with, known, at).ok()?;
        let watched = self.watched.entry(guest.id.clone()).or_default();
        let plugged = asked.and_then(|answer| answer.as_ref()?.plugged_bytes).unwrap_or(watched.plugged_bytes);
        let is_same = std::mem::replace(&mut watched.plugged_bytes, plugged) == plugged;
        if is_same { Some(ram) } else { RamUse::of(guest, started_with, None, at).ok() }
    }

    /// The facts of one guest; `None` if it has ended.
    fn guest(&mut self, guest: &Guest, asked: Option<Answer>, ledger: &Ledger, saved: &Saved) -> Option<GuestFacts> {
        let started_with = guest.ram_bytes?;
        let (target_bytes, guaranteed_bytes) = (ledger.target_bytes(guest), self.rules.guaranteed_bytes(guest));
        let at = self.at();
        let ram = self.ram_of(guest, started_with, asked.as_ref(), at)?;
        let watched = self.watched.entry(guest.id.clone()).or_default();
        // QEMU's figure for plugged-in memory is not trusted beyond the size of its process's mappings, since
        // plugged-in memory is mapped there.
        let ram_bytes = started_with.saturating_add(watched.plugged_bytes).min(started_with.max(ram.mapped_bytes));
        let RamUse { resident_bytes, folded_bytes, swapped_bytes, peak_bytes, beside_bytes, .. } = ram;
        let pid = guest.pids.first().copied().unwrap_or(0);
        let cgroup_left_bytes = self.limits.as_ref().and_then(|limits| left(limits, pid));
        let ram_bytes = within_limits(ram_bytes, cgroup_left_bytes.filter(|_| guaranteed_bytes.is_none()), &ram);
        watched.ram = Some(ram);
        let seen_s = watched.seen_s(at);
        let asked = asked.filter(|answer| can_be_told(answer, ram_bytes));
        let actual_bytes = asked.as_ref().and_then(|answer| answer.as_ref().map(|told| told.size_bytes));
        // Nothing inside a parked guest runs: its balloon does not move, and the driver is not to be flagged for that.
        let is_parked = self.parked.iter().any(|parked| parked.pid == pid && parked.is_alive());
        if asked.is_some() && !is_parked {
            let had_arrived = ledger.has_arrived(guest);
            watched.driver.see(at, Sighting { ram_bytes, target_bytes, actual_bytes, resident_bytes, had_arrived });
        }
        watched.is_unused = asked.is_none() && guest.facts.qemu.as_ref().is_some_and(|qemu| qemu.balloon);
        watched.take(pid, asked.flatten(), ram_bytes);
        Some(GuestFacts {
            id: guest.id.clone(),
            name: guest.name.clone(),
            pid,
            age_s: ProcessId { pid, start_ticks: guest.facts.start_ticks }.age_seconds().min(seen_s),
            group: guest.group.clone(),
            ram_bytes,
            guaranteed_bytes: guaranteed_bytes.unwrap_or(ram_bytes),
            // A guest that does not answer may have all its RAM.
            actual_bytes: actual_bytes.unwrap_or(ram_bytes),
            target_bytes,
            cgroup_left_bytes,
            resident_bytes,
            folded_bytes,
            peak_bytes,
            beside_bytes,
            swapped_bytes,
            saved_bytes: saved.guests.get(&pid).copied().unwrap_or(0),
            reports_free_pages: guest.facts.qemu.as_ref().is_some_and(|qemu| qemu.free_page_reporting),
            driver: watched.state_if(is_parked),
            withdrawal_bytes_per_s: watched.driver.withdrawal_bytes_per_s().unwrap_or(UNSEEN_BYTES_PER_S),
            claims: watched.claims(),
            faults_by_size: watched.faults_by_size.iter().map(|(size, rate)| (*size, *rate)).collect(),
        })
    }
}

/// The RAM of a guest to which no rule guarantees a size: no more than the limits of its control groups let it take.
fn within_limits(ram_bytes: u64, left: Option<u64>, ram: &RamUse) -> u64 {
    let taken = ram.resident_bytes.saturating_add(ram.swapped_bytes);
    ram_bytes.min(left.map_or(u64::MAX, |left| left.saturating_add(taken)))
}

/// Whether a guest can be told a size. A size for the balloon refers to all RAM of the guest: if the guest has more RAM
/// than is known, no size can be told.
fn can_be_told(answer: &Answer, ram_bytes: u64) -> bool {
    answer.as_ref().is_none_or(|told| told.size_bytes <= ram_bytes)
}

/// What a guest's QEMU tells about its balloon.
struct Told {
    size_bytes: u64,
    /// Size of plugged-in DIMMs; `None` if it was not asked for.
    plugged_bytes: Option<u64>,
    statistics: Option<Statistics>,
    device: Device,
}

/// The answer of a guest's QEMU; `None` if QEMU does not answer.
type Answer = Option<Told>;

/// Asks a guest's QEMU about its balloon; `None` if the guest has no balloon.
fn ask(guest: &Guest, known: Option<Device>) -> Option<Answer> {
    let told = |mut balloon: Balloon| {
        let size_bytes = balloon.size_bytes().ok()?;
        let is_new = known.is_none() || guest.ram_bytes.is_some_and(|ram| size_bytes > ram);
        let plugged_bytes = is_new.then(|| balloon.plugged_bytes());
        Some(Told { size_bytes, plugged_bytes, statistics: balloon.statistics(), device: balloon.device() })
    };
    match Balloon::open_known(guest, known.clone()) {
        Ok(None) => None,
        Ok(Some(balloon)) => Some(told(balloon)),
        Err(_) => Some(None),
    }
}

/// Memory that the limits of a process's control groups leave it; `None` if there is no such limit below the host's
/// RAM.
fn left(limits: &MemoryLimits, pid: u32) -> Option<u64> {
    let group = limits.group_of(pid)?;
    let left = limits.left().take(&group, u64::MAX);
    (left < host::ram_bytes()).then_some(left)
}

impl Watched {
    fn state(&self) -> DriverState {
        if self.is_unused { DriverState::Unused } else { self.driver.state() }
    }

    /// The state of a driver, inside a guest that may be parked.
    fn state_if(&self, is_parked: bool) -> DriverState {
        let state = self.state();
        if is_parked && state == DriverState::Works { DriverState::Stuck } else { state }
    }

    /// Seconds since the guest was first seen. The most memory that the guest held before that is not known.
    fn seen_s(&mut self, at: Duration) -> u64 {
        at.saturating_sub(*self.since.get_or_insert(at)).as_secs()
    }

    /// The balloon device of a guest whose QEMU answered at the last look; `None` if the guest has another process now.
    fn device_of(&self, guest: &Guest) -> Option<Device> {
        let (pid, device) = self.device.as_ref()?;
        (guest.pids.first() == Some(pid)).then(|| device.clone())
    }

    /// The guest's own statistics, if they are recent, less memory that its balloon has taken since.
    fn claims(&self) -> Option<Claims> {
        let Statistics { claims, .. } = self.statistics.filter(Statistics::is_fresh)?;
        let taken = self.told_size_bytes.saturating_sub(self.size_bytes);
        let (free_bytes, available_bytes) =
            (claims.free_bytes.saturating_sub(taken), claims.available_bytes.saturating_sub(taken));
        let cache_bytes = claims.cache_bytes.min(available_bytes.saturating_sub(free_bytes));
        Some(Claims { free_bytes, available_bytes, cache_bytes, faults_per_s: self.faults_per_s, ..claims })
    }

    /// Takes an answer of the guest's QEMU into account: its size, its statistics, and its rate of page faults at that
    /// size.
    fn take(&mut self, pid: u32, answer: Answer, ram_bytes: u64) {
        self.device = None;
        if std::mem::replace(&mut self.pid, pid) != pid {
            // The guest has another QEMU process: it was started again.
            self.statistics = None;
        }
        let Some(Told { size_bytes: size, statistics, device, .. }) = answer else { return };
        let size_before = std::mem::replace(&mut self.size_bytes, size);
        let Some(told) = statistics else { return };
        if self.statistics.is_none_or(|before| before.told_at_s != told.told_at_s) {
            self.told_size_bytes = size_before.max(size);
        }
        // The host's clock may have been set back.
        if let Some(before) = self.statistics.filter(|before| before.told_at_s <= told.told_at_s) {
            let seconds = told.told_at_s.saturating_sub(before.told_at_s);
            if seconds == 0 {
                // Another client may have switched the statistics off. The next look switches them on again.
                return;
            }
            self.faults_per_s = told.faults.saturating_sub(before.faults) as f64 / seconds as f64;
            let point = (ram_bytes / POINT_PART).max(1);
            let rate = self
                .faults_by_size
                .entry(size.checked_div(point).unwrap_or(0).saturating_mul(point))
                .or_insert(self.faults_per_s);
            *rate += (self.faults_per_s - *rate) * NEWEST;
            while self.faults_by_size.len() > MOST_POINTS {
                self.faults_by_size.pop_first();
            }
        }
        self.statistics = Some(told);
        self.device = Some((pid, device));
    }
}

#[cfg(test)]
#[path = "gather_extreme_tests.rs"]
mod extreme_tests;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake_qemu::FakeQemu;
    use balance::Reservation;
    use std::path::Path;

    #[test]
    fn rate_of_faults_is_between_two_tellings_and_has_a_point_by_size() {
        let mut watched = Watched::default();
        for (at, faults, size) in [(10, 100, 256), (10, 900, 256), (12, 140, 256), (14, 140, 250), (16, 540, 100)] {
            watched.take(1, told(at, faults, size), 256);
        }
        assert!((watched.faults_per_s - 200.0).abs() < 1e-9);
        let points: Vec<_> = watched.faults_by_size.into_iter().collect();
        assert_eq!(points, [(96, 200.0), (240, 0.0), (256, 20.0)]);
    }

    #[test]
    fn memory_that_a_balloon_took_after_the_guest_told_of_it_is_no_more_there() {
        let now = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs();
        let mut watched = Watched::default();
        let mut look = |told_at_s, size_bytes| {
            let claims = Claims { free_bytes: 20, available_bytes: 50, cache_bytes: 25, ..Claims::default() };
            let statistics = Some(Statistics { told_at_s, claims, ..Statistics::default() });
            watched.take(1, Some(Told { size_bytes, plugged_bytes: None, statistics, device: None }), 256);
            watched.claims().map(|claims| (claims.free_bytes, claims.available_bytes, claims.cache_bytes))
        };
        assert_eq!(look(now - 60, 200), None, "too long ago");
        assert_eq!(look(now - 4, 200), Some((20, 50, 25)));
        assert_eq!(look(now - 4, 170), Some((0, 20, 20)));
        assert_eq!(look(now - 2, 170), Some((20, 50, 25)), "told after that");
        assert_eq!(look(now, 160), Some((10, 40, 25)), "told before or after that");
    }

    fn told(told_at_s: u64, faults: u64, size_bytes: u64) -> Answer {
        let statistics = Some(Statistics { told_at_s, faults, ..Statistics::default() });
        Some(Told { size_bytes, plugged_bytes: None, statistics, device: Some("/machine/balloon".into()) })
    }

    #[test]
    fn statistics_that_stand_still_or_a_silent_qemu_are_asked_for_anew() {
        let mut watched = Watched::default();
        let mut known = |answer| {
            watched.take(1, answer, 256);
            watched.device.is_some()
        };
        let silent = || None;
        let never_told = || told(0, 0, 256).map(|told| Told { statistics: None, ..told });
        let answers = [told(10, 0, 256), told(12, 0, 256), told(12, 0, 256), told(14, 0, 256), silent(), never_told()];
        assert_eq!(answers.map(&mut known), [true, true, false, true, false, false]);
    }

    const M: u64 = 1 << 20;

    /// Facts of two guests. The first of them is guaranteed 64 MiB, and no rule is about the second.
    fn gathered(one: &FakeQemu, gatherer: &mut Gatherer, ledger: &Ledger) -> Facts {
        let other = FakeQemu::start("other", 256 * M, Path::new("/nonexistent"));
        other.state().size_bytes = 128 * M;
        let guests = [one.guest.clone(), other.guest.clone()];
        gatherer.gather(&guests, ledger, &Saved::default()).unwrap()
    }

    fn scene() -> (FakeQemu, Gatherer, Ledger, tempfile::TempDir) {
        let dir = tempfile::tempdir().unwrap();
        let one = FakeQemu::start("one", 256 * M, dir.path());
        one.state().size_bytes = 128 * M;
        let rules = Rules { guaranteed: vec![("one".parse().unwrap(), 64 * M)], ..Rules::default() };
        (one, Gatherer::new(rules), Ledger::open(dir.path()).unwrap(), dir)
    }

    #[test]
    fn guest_without_a_guarantee_keeps_all_its_ram_and_is_not_asked() {
        let (one, mut gatherer, ledger, _dir) = scene();
        let facts = gathered(&one, &mut gatherer, &ledger);
        let seen = |guest: &GuestFacts| (guest.guaranteed_bytes / M, guest.actual_bytes / M, guest.driver);
        let [one, other] = [0, 1].map(|n| seen(&facts.guests[n]));
        assert_eq!((one, other), ((64, 128, DriverState::Works), (256, 256, DriverState::Unused)));
    }

    #[test]
    fn strangers_guest_is_neither_asked_nor_promised_anything_unless_its_owner_is_named() {
        let (mut one, mut gatherer, ledger, _dir) = scene();
        (one.guest.facts.is_strangers, one.guest.facts.uid) = (true, 1006);
        assert_eq!(gathered(&one, &mut gatherer, &ledger).guests.len(), 1);
        gatherer.rules.owners = vec![1006];
        assert_eq!(gathered(&one, &mut gatherer, &ledger).guests[0].actual_bytes, 128 * M);
    }

    #[test]
    fn guest_that_does_not_answer_counts_with_all_its_ram() {
        let (mut one, mut gatherer, ledger, _dir) = scene();
        one.guest.facts.qemu.as_mut().unwrap().qmp_socket = Some("/nonexistent".into());
        let facts = gathered(&one, &mut gatherer, &ledger);
        assert_eq!((facts.guests[0].actual_bytes, facts.guests[0].claims), (256 * M, None));
    }

    /// QEMU counts memory that was plugged in. Cut to the RAM of the command line, such a size once had a guest shrunk
    /// by all of that.
    #[test]
    fn guest_with_more_memory_than_is_known_is_left_alone() {
        let (one, mut gatherer, ledger, _dir) = scene();
        one.state().size_bytes = 512 * M;
        let facts = gathered(&one, &mut gatherer, &ledger);
        assert_eq!((facts.guests[0].actual_bytes, facts.guests[0].can_balloon()), (256 * M, false));
    }

    #[test]
    fn reservation_of_a_guest_that_has_not_started_is_a_fact() {
        let (one, mut gatherer, ledger, _dir) = scene();
        let mut promises = ledger.promises().unwrap();
        promises.set("next", 9, 60).unwrap();
        promises.set("other", 7, 60).unwrap();
        let facts = gathered(&one, &mut gatherer, &ledger);
        assert_eq!(facts.reservations, [Reservation { name: "next".into(), bytes: 9 }], "the other one runs");
    }

    /// The balancer did not run for a while, and the guest has not reached the size that it was told.
    #[test]
    fn guest_is_told_again_every_10_s_at_most() {
        let (one, mut gatherer, ledger, _dir) = scene();
        let mut facts = gathered(&one, &mut gatherer, &ledger);
        (facts.guests[0].driver, facts.guests[0].target_bytes) = (DriverState::Stuck, Some(64 * M));
        let mut due = || gatherer.due_reminders(&facts).len();
        assert_eq!([due(), due()], [1, 0]);
    }

    #[test]
    fn driver_is_watched_from_the_time_when_it_was_told() {
        assert_eq!(state_after(10, 1), DriverState::Stuck);
    }

    #[test]
    fn seconds_of_a_gatherer_in_a_hurry_are_ahead_of_the_hosts() {
        let (_one, mut gatherer, ..) = scene();
        gatherer.began = Instant::now().checked_sub(Duration::from_secs(100)).unwrap();
        let mut ahead_s = |rate| {
            gatherer.hurry(rate);
            gatherer.at_s().saturating_sub(host::boot_clock_s())
        };
        assert_eq!(ahead_s(1), 0);
        assert!((300..400).contains(&ahead_s(4)), "{}", ahead_s(4));
    }

    #[test]
    fn own_clock_of_a_gatherer_runs_as_fast_as_it_is_told() {
        assert_eq!([state_after(4, 1), state_after(4, 4)], [DriverState::Works, DriverState::Stuck]);
    }

    /// State of a driver that was told its size so many seconds ago, and has done nothing since, by a clock of this
    /// rate.
    fn state_after(seconds: u64, rate: u32) -> DriverState {
        let (one, mut gatherer, mut ledger, _dir) = scene();
        gatherer.hurry(rate);
        let turn = ledger.take_turn().unwrap();
        let facts = gathered(&one, &mut gatherer, &ledger);
        ledger.note_targets(&turn, std::iter::once((&one.guest, 64 * M))).unwrap();
        let step = Step {
            guest: one.guest.id.clone(),
            from_bytes: 128 * M,
            to_bytes: 64 * M,
            expected_bytes: 0,
            is_owed: false,
            reason: "a test".into(),
        };
        let (is_told, landed_s, actual_bytes) = (true, None, Some(128 * M));
        let outcome = Outcome { step, is_told, at_s: 0, actual_bytes, host_freed_bytes: 0, landed_s, problem: None };
        gatherer.began = Instant::now().checked_sub(Duration::from_secs(seconds)).unwrap();
        gatherer.made(&facts, &outcome, Duration::ZERO);
        gatherer.drivers()["qemu:one"]
    }

    #[test]
    fn word_of_an_earlier_process_of_the_same_name_does_not_count() {
        let now = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs();
        let mut watched = Watched::default();
        watched.take(1, told(now, 0, 256), 256);
        let device = |watched: &Watched, pid| {
            let guest = Guest { pids: vec![pid], ..FakeQemu::start("a", 256, Path::new("/nonexistent")).guest };
            watched.device_of(&guest).is_some()
        };
        assert!(watched.claims().is_some());
        assert_eq!([1, 2].map(|pid| device(&watched, pid)), [true, false]);
        watched.take(2, told(0, 0, 256).map(|told| Told { statistics: None, ..told }), 256);
        assert_eq!(watched.claims(), None);
    }

    #[test]
    fn statistics_count_again_after_the_clock_was_set_back() {
        let now = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs();
        let mut watched = Watched::default();
        watched.take(1, told(now + 3600, 0, 256), 256);
        assert_eq!(watched.claims(), None, "nobody knows how old they are");
        watched.take(1, told(now, 0, 256), 256);
        assert!(watched.claims().is_some());
    }
}
