//! Members that lie, flood or never read. They are cut off or achieve nothing, and an honest member does not notice.

mod world;

use api::control::Settings;
use page::{Fingerprint, HostVirt, PoolSlot};
use rustix::fs::{FallocateFlags, fallocate, ftruncate};
use wire::{Hello, MemberStats, Outcome, RestedRun, SlotRun, ToAgent, ToWorker, VERSION};
use world::{Agent, World, content, serve_until, wait_for};

/// Has an honest member fold pages of its own, to show that the group goes on.
fn goes_on(agent: &mut Agent, first: u64) {
    let before = agent.mapped.len();
    agent.rest(first, [first, first + 1, first, first + 1]);
    agent.wait_until("an honest member's folds", |agent| agent.mapped.len() == before + 4);
    agent.check();
    assert!(!agent.closed);
}

/// An honest member with slots, and a liar whose page 1 maps a slot.
fn scene() -> (World, Agent, Agent) {
    let mut world = World::new(Settings::default());
    let (mut honest, mut liar) = (world.member("honest", 1), world.member("liar", 2));
    honest.rest(1, [3, 4]);
    liar.rest(1, [3]);
    serve_until("folds", &mut [&mut honest, &mut liar], |a| !a[0].mapped.is_empty() && a[1].mapped.len() == 1);
    (world, honest, liar)
}

fn is_cut_off(what: &str, lie: impl FnOnce(&mut Agent)) {
    let (mut world, mut honest, mut liar) = scene();
    lie(&mut liar);
    let start = std::time::Instant::now();
    while !liar.closed {
        assert!(start.elapsed() < world::PATIENCE, "{what}: not cut off");
        std::thread::sleep(std::time::Duration::from_millis(1));
        let _ = liar.hear();
    }
    world.wait_until(what, |w| w.has_event("cut off") || w.has_event("disconnected"));
    goes_on(&mut honest, 1000);
    assert_eq!(world.report().members.iter().filter(|member| member.connected).count(), 1);
}

fn run(page: u64, slot: PoolSlot, pages: u16) -> SlotRun {
    SlotRun { start: HostVirt(page << 12), slot, pages }
}

#[test]
fn false_claims_and_releases_are_cut_off() {
    is_cut_off("a slot at another place", |liar| {
        let slot = liar.mapped[&1];
        liar.say(&ToWorker::Released(vec![run(2, slot, 1)]));
    });
    is_cut_off("a slot next to its own", |liar| {
        let slot = liar.mapped[&1].add(1).unwrap();
        liar.say(&ToWorker::Released(vec![run(1, slot, 1)]));
    });
    is_cut_off("a slot released twice", |liar| {
        let slot = liar.mapped[&1];
        liar.say(&ToWorker::Released(vec![run(1, slot, 1)]));
        liar.say(&ToWorker::Released(vec![run(1, slot, 1)]));
    });
    is_cut_off("a claim of an honest member's slot", |liar| {
        let slot = liar.mapped[&1];
        liar.say(&ToWorker::Held(vec![run(9, slot, 1)]));
    });
    is_cut_off("a claim of a free slot", |liar| {
        let slot = PoolSlot::new(liar.mapped[&1].segment(), 5000).unwrap();
        liar.say(&ToWorker::Held(vec![run(9, slot, 1)]));
    });
    is_cut_off("a claim of a slot behind the segment's end", |liar| {
        let slot = PoolSlot::new(liar.mapped[&1].segment(), PoolSlot::PER_SEGMENT - 1).unwrap();
        liar.say(&ToWorker::Held(vec![run(9, slot, 1)]));
    });
    is_cut_off("a claim in a segment that is none", |liar| {
        liar.say(&ToWorker::Held(vec![run(9, PoolSlot::from_bits(u32::MAX), 1)]));
    });
}

#[test]
fn unasked_answers_are_cut_off() {
    is_cut_off("pages that were not asked for", |liar| liar.say(&ToWorker::Donated(77, vec![true])));
    is_cut_off("folds that were not asked for", |liar| liar.say(&ToWorker::Folded(77, vec![Outcome::Folded])));
    is_cut_off("a lease that was not offered", |liar| liar.say(&ToWorker::LeaseTaken(2)));
    is_cut_off("a lease that was taken", |liar| liar.say(&ToWorker::LeaseTaken(1)));
    is_cut_off("a second greeting", Agent::hello);
}

#[test]
fn malformed_frames_are_cut_off() {
    is_cut_off("an empty kind", |liar| liar.say_bytes(&[0, 0]));
    is_cut_off("one byte", |liar| liar.say_bytes(&[1]));
    is_cut_off("noise", |liar| liar.say_bytes(&[0xa5; 3000]));
    is_cut_off("a frame that is too long", |liar| liar.say_bytes(&vec![0; wire::FRAME_BYTES + 1]));
    is_cut_off("a frame that is far too long", |liar| liar.say_bytes(&vec![0; 2 * wire::FRAME_BYTES]));
    is_cut_off("a frame that ends too early", |liar| {
        let mut frame = Vec::new();
        ToWorker::Released(vec![run(1, PoolSlot::from_bits(0), 1)]).encode(&mut frame);
        liar.say_bytes(&frame[..frame.len() - 1]);
    });
    is_cut_off("a promise of many pages", |liar| {
        let mut frame = Vec::new();
        ToWorker::Rested(Vec::new(), Vec::new()).encode(&mut frame);
        frame[2..6].copy_from_slice(&u32::MAX.to_le_bytes());
        liar.say_bytes(&frame);
    });
}

#[test]
fn bad_greetings_are_cut_off() {
    let mut world = World::new(Settings::default());
    let mut honest = world.member("honest", 1);
    let mut early = world.admit("early", 2);
    early.say(&ToWorker::LeaseTaken(1));
    early.wait_until("the end", |agent| agent.closed);
    let mut old = world.admit("old", 3);
    old.say(&ToWorker::Hello(Hello { version: VERSION + 1, eager: false }));
    wait_for("our version", || matches!(old.hear(), Some((ToAgent::Welcome(VERSION), _))));
    old.wait_until("the end", |agent| agent.closed);
    let mut silent = world.admit("silent", 4);
    silent.wait_until("the end", |agent| agent.closed);
    world.wait_until("word of that", |w| {
        w.has_event(&format!("speaks version {}", VERSION + 1)) && w.has_event("not said a word")
    });
    goes_on(&mut honest, 1000);
}

#[test]
fn fingerprints_of_other_bytes_fold_nothing() {
    let (mut world, mut honest, mut liar) = scene();
    // The liar reports the honest member's fingerprints, and donates other bytes.
    liar.shows = |content| content + 1_000_000;
    honest.rest(100, 50..=80);
    world.report();
    liar.rest(100, 50..=80);
    serve_until("answers", &mut [&mut honest, &mut liar], |a| a[1].donated >= 31);
    goes_on(&mut honest, 1000);
    let mut third = world.member("third", 3);
    third.rest(100, 50..=80);
    serve_until("honest folds", &mut [&mut honest, &mut liar, &mut third], |a| a[2].mapped.len() == 31);
    third.check();
    honest.check();
    assert!(!third.closed && !honest.closed);
}

#[test]
fn window_changed_while_read_does_no_harm() {
    let (_world, mut honest, mut liar) = scene();
    let window = rustix::io::dup(liar.window.as_ref().unwrap()).unwrap();
    assert!(ftruncate(&window, 0).is_err());
    let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let stopped = std::sync::Arc::clone(&stop);
    let puncher = std::thread::spawn(move || {
        while !stopped.load(std::sync::atomic::Ordering::Relaxed) {
            let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            fallocate(&window, punch, 0, (wire::DONATION_PAGES as u64) << 12).unwrap();
        }
    });
    honest.rest(200, 300..=600);
    liar.rest(200, 300..=600);
    goes_on(&mut honest, 1000);
    for _ in 0..200 {
        honest.serve();
        liar.serve();
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
    puncher.join().unwrap();
    honest.check();
    liar.check();
}

#[test]
fn member_that_does_not_donate_keeps_nobody_waiting() {
    let (mut world, mut honest, mut liar) = scene();
    honest.rest(100, 50..=60);
    world.report();
    liar.answers = false;
    liar.rest(100, 50..=60);
    // The liar reported last and is asked. As it does not answer, the others are asked.
    let mut third = world.member("third", 3);
    third.rest(100, 50..=60);
    serve_until("folds", &mut [&mut honest, &mut liar, &mut third], |a| {
        a[0].mapped.len() >= 12 && a[2].mapped.len() == 11
    });
    honest.check();
    third.check();
}

#[test]
fn flood_of_member_that_never_reads_delays_nobody() {
    // A busy machine may take several tries. In each, a single long wait counts, as a flood holds others up only once.
    let limit = std::time::Duration::from_secs(2);
    let late: Vec<_> = (0..3).map(|_| longest_wait_in_flood()).take_while(|longest| *longest >= limit).collect();
    assert!(late.len() < 3, "an honest member waited for {late:?}");
}

fn longest_wait_in_flood() -> std::time::Duration {
    let (mut world, mut honest, liar) = scene();
    let flood = std::thread::spawn(move || {
        let mut frame = Vec::new();
        for n in 0..1000_u64 {
            let start = HostVirt((n * 4096 + 100) << 12);
            let fingerprints =
                (0..4096).map(|m| Fingerprint((n << 32 | m).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)).collect();
            ToWorker::Rested(vec![RestedRun { start, pages: 4096, huge: false }], fingerprints).encode(&mut frame);
            let begun = std::time::Instant::now();
            while matches!(liar.socket.send(&frame, &[]), Ok(false)) {
                assert!(begun.elapsed() < world::PATIENCE);
                std::thread::yield_now();
            }
        }
        liar
    });
    let mut longest = std::time::Duration::ZERO;
    for n in 0..20 {
        let start = std::time::Instant::now();
        goes_on(&mut honest, 1000 + 10 * n);
        longest = longest.max(start.elapsed());
    }
    let _liar = flood.join().unwrap();
    goes_on(&mut honest, 9000);
    assert!(world.report().index_bytes < 1 << 30);
    longest
}

#[test]
fn member_that_never_reads_costs_few_frames() {
    let (mut world, mut honest, mut liar) = scene();
    let contents: Vec<u64> = (0..20_000).map(|n| 5000 + n / 2).collect();
    liar.rest(5000, contents);
    for n in 0..300 {
        world.set(Settings { scan_rate: Some(1000 * (n + 1)), ..Settings::default() });
    }
    goes_on(&mut honest, 1000);
    let mut frames = 0;
    while liar.hear().is_some() {
        frames += 1;
    }
    assert!(frames < 600, "{frames} frames waited for a member that never read");
}

#[test]
fn savings_are_counted_from_slots_whatever_a_liar_tells() {
    let (mut world, mut honest, mut liar) = scene();
    let stats = MemberStats { folded_pages: 1 << 30, broken_pages: 7, ..MemberStats::default() };
    liar.say(&ToWorker::Stats(Box::new(stats)));
    world.wait_for_report("what it tells", &mut [&mut honest, &mut liar], |report| report.broken_pages == 7);
    let report = world.report();
    let mapped = (honest.mapped.len() + liar.mapped.len()) as u64;
    assert_eq!((report.sharing_pages, report.savings.folded_bytes), (mapped, mapped << 12));
}

#[test]
fn slots_of_liar_are_freed_when_it_ends() {
    let (mut world, mut honest, mut liar) = scene();
    liar.rest(5000, (0..1000).map(|n| 5000 + n / 2));
    liar.wait_until("folds", |agent| agent.mapped.len() == 1001);
    liar.rest(9000, 7000..8000);
    let slots = world.report().slots;
    assert!(slots >= 501, "{slots}");
    drop(liar);
    world.wait_for_report("free slots", &mut [&mut honest], |report| report.slots <= 2);
    assert_eq!(content(3), honest.slot(honest.mapped[&1]));
    goes_on(&mut honest, 1000);
}
