//! Members that name figures that no host has, or come back again and again. Others of their group do not notice.

mod world;

use api::control::Settings;
use page::{Fingerprint, HostVirt};
use wire::{MemberState, MemberStats, RestedRun, ToWorker};
use world::{Agent, PATIENCE, World, serve_until};

/// Pages of the honest member.
const PAGES: u64 = 100;

/// Numbers at which sums and products go wrong.
const EXTREMES: [u64; 5] = [0, 1, (1 << 52) - 1, 1 << 52, u64::MAX];

/// An honest member with pages that are folded, in a group with this rate.
fn scene(scan_rate: Option<u32>) -> (World, Agent) {
    let mut world = World::new(Settings { scan_rate, ..Settings::default() });
    let mut honest = world.member("honest", std::process::id());
    honest.rest(1, (0..PAGES).map(|n| 1 + n / 2));
    honest.wait_until("folds", |agent| agent.mapped.len() as u64 == PAGES);
    (world, honest)
}

fn stats(change: impl FnOnce(&mut MemberStats)) -> ToWorker {
    let mut stats = MemberStats { state: MemberState::Folding, ..MemberStats::default() };
    change(&mut stats);
    ToWorker::Stats(Box::new(stats))
}

/// The places of the numbers of a report that are counted over members.
const FIELDS: [fn(&mut MemberStats) -> &mut u64; 14] = [
    |s| &mut s.enrolled_pages,
    |s| &mut s.folded_pages,
    |s| &mut s.zero_pages,
    |s| &mut s.broken_pages,
    |s| &mut s.vmas,
    |s| &mut s.agent_bytes,
    |s| &mut s.done.folds,
    |s| &mut s.done.refolds,
    |s| &mut s.done.short_folds,
    |s| &mut s.done.pages_scanned,
    |s| &mut s.done.pages_hashed,
    |s| &mut s.done.agent_cpu_us,
    |s| &mut s.stalls.buckets[7],
    |s| &mut s.stalls.longest_us,
];

#[test]
fn figures_that_no_host_has_change_nothing_for_others() {
    let (mut world, mut honest) = scene(Some(1000));
    let mut liars: Vec<Agent> = (0..3).map(|n| world.member(&format!("liar-{n}"), 900_000 + n)).collect();
    for field in FIELDS {
        for extreme in EXTREMES {
            // Two that say the same: a sum of both must fit.
            for (n, liar) in liars.iter_mut().enumerate() {
                if liar.closed || n == 2 {
                    *liar = world.member(&format!("liar-{n}"), 900_000 + n as u32);
                }
                liar.say(&stats(|stats| *field(stats) = extreme));
                let _ = liar.hear();
            }
            let report = world.report();
            let of = report.members.iter().find(|member| member.name == "honest").expect("a member");
            assert!(of.connected && report.sharing_pages == PAGES, "{report:?}");
            let most = report.members.iter().map(|member| member.folded_pages).max();
            assert!(most <= Some(PAGES), "a member names {most:?} folded pages, and the worker counts {PAGES}");
        }
    }
    honest.rest(1000, [901, 902, 901, 902]);
    honest.wait_until("further folds", |agent| agent.mapped.len() as u64 == PAGES + 4);
    honest.check();
}

/// The rate of a group is divided by what the kernel shows of its members.
#[test]
fn member_that_names_all_pages_leaves_others_their_share_of_the_rate() {
    let (mut world, mut honest) = scene(Some(1_000_000));
    let mut small = std::process::Command::new("sleep").arg("120").spawn().expect("run sleep");
    let mut liar = world.member("liar", small.id());
    let named = (1 << 52) - 1;
    honest.say(&stats(|stats| stats.enrolled_pages = 1 << 18));
    liar.say(&stats(|stats| stats.enrolled_pages = named));
    world.wait_for_report("both figures", &mut [&mut honest, &mut liar], |report| {
        report.members.iter().filter(|member| member.enrolled_pages > 0).count() == 2
    });
    // Shares are told anew with the settings.
    world.set(Settings { scan_rate: Some(2_000_000), ..Settings::default() });
    let share = |agent: &Agent| agent.pace.and_then(|pace| pace.pages_per_s).unwrap_or(0);
    serve_until("shares", &mut [&mut honest, &mut liar], |a| share(a[0]) + share(a[1]) > 1_900_000);
    assert!(share(&honest) > 600_000, "{} and {}", share(&honest), share(&liar));
    small.kill().expect("end sleep");
    small.wait().expect("wait for sleep");
}

/// Another rate is one of the operator's, or of the host under pressure.
#[test]
fn adaptive_rate_is_told_to_members_and_gives_way_to_another() {
    let (mut world, mut honest) = scene(None);
    let rate = |agent: &Agent| agent.pace.and_then(|pace| pace.pages_per_s);
    assert_eq!(rate(&honest), None);
    let adaptive = Settings { scan_budget_percent: Some(10), ..Settings::default() };
    world.set(adaptive);
    serve_until("the first rate", &mut [&mut honest], |agents| rate(agents[0]) == Some(4096));
    assert_eq!(world.report().adaptive_rate.map(|now| now.pages_per_s), Some(4096));
    world.set(Settings { scan_rate: Some(7), ..adaptive });
    serve_until("another rate", &mut [&mut honest], |agents| rate(agents[0]) == Some(7));
    assert_eq!(world.report().adaptive_rate, None);
    world.set(Settings::default());
    serve_until("no rate", &mut [&mut honest], |agents| rate(agents[0]).is_none());
}

/// The table of pages is for all members. One that reports a page here and there, which it does not have, had all of it.
#[test]
fn member_that_reports_more_pages_than_it_has_frames_leaves_room_to_others() {
    let mut world = World::new(Settings { index_pages: 1 << 16, ..Settings::default() });
    let mut small = std::process::Command::new("sleep").arg("120").spawn().expect("run sleep");
    let mut liar = world.member("liar", small.id());
    for frame in 0..100_u64 {
        let run = |n: u64| RestedRun { start: HostVirt((frame * 100 + n) << 20), pages: 1, huge: false };
        let prints = (0..100).map(|n| Fingerprint(1_000_000 + frame * 100 + n)).collect();
        liar.say(&ToWorker::Rested((0..100).map(run).collect(), prints));
        let _ = liar.hear();
    }
    liar.say(&stats(|stats| stats.vmas = 7));
    world.wait_for_report("all that it says", &mut [&mut liar], |report| report.vmas == 7);
    let mut honest = world.member("honest", std::process::id());
    honest.rest(1, (0..PAGES).map(|n| 1 + n / 2));
    honest.wait_until("folds", |agent| agent.mapped.len() as u64 == PAGES);
    honest.check();
    small.kill().expect("end sleep");
    small.wait().expect("wait for sleep");
}

/// A process keeps the leases of all its connections mapped.
#[test]
fn process_that_comes_back_with_its_leases_is_admitted_a_few_times() {
    let (mut world, mut honest) = scene(None);
    let mut liar = world.member("liar", 2);
    liar.rest(1, [1]);
    serve_until("a fold", &mut [&mut honest, &mut liar], |a| a[1].mapped.len() == 1);
    let mut all = vec![liar];
    while all.len() < 30 {
        let Some(next) = comes_back(&mut world) else { break };
        all.push(next);
    }
    assert!(all.len() < 30, "it has {} connections with a lease each", all.len());
    world.wait_until("the reason", |world| world.has_event("16 earlier connections of its process"));
    let mut other = world.member("other", 3);
    other.rest(1, [1, 2]);
    serve_until("another's folds", &mut [&mut honest, &mut other], |a| a[1].mapped.len() == 2);
    // It may come back when the leases are over.
    drop(all);
    let start = std::time::Instant::now();
    while comes_back(&mut world).is_none() {
        assert!(start.elapsed() < PATIENCE, "it is never admitted again");
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    honest.check();
}

/// Another connection of the liar's process, if it is admitted.
fn comes_back(world: &mut World) -> Option<Agent> {
    let mut liar = world.admit("liar", 2);
    liar.hello();
    liar.wait_until("an answer", |liar| liar.lease.is_some() || liar.closed);
    (!liar.closed).then_some(liar)
}
