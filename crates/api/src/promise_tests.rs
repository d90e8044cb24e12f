use super::*;
use balance::Seen;
use serde_json::Value;
use std::time::Instant;

const M: u64 = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(60);

/// A look of this process: the host has `spare_bytes` of memory above its floor, and `guests` guests that have no claim
/// to further memory.
fn look(spare_bytes: u64, guests: usize) -> Look {
    let guest = |n: usize| Seen {
        id: format!("qemu:vm{n}"),
        name: format!("vm{n}"),
        group: format!("group{}", n % 10),
        ram_bytes: 512 * M,
        private_bytes: 100 * M,
        peak_bytes: 200 * M,
        age_s: 1000,
        ..Seen::default()
    };
    let standing = Standing {
        total_bytes: u64::MAX,
        available_bytes: spare_bytes,
        guests: (0..guests).map(guest).collect(),
        ..Standing::default()
    };
    Look {
        boot: host::boot_id().unwrap(),
        balancer: ProcessId::of(std::process::id()).unwrap(),
        began_ms: host::boot_clock_ms(),
        every_s: 5,
        within: None,
        assurance: Assurance::Strict,
        standing,
    }
}

fn keep(dir: &Path, look: &Look, runs: &[&str]) {
    Promises::lock(dir, PATIENCE).unwrap().keep(look, |name| runs.contains(&name)).unwrap();
}

fn want(name: Option<&str>, bytes: u64, hold_s: u64) -> Asked {
    let wanted = Wanted { memory_bytes: Some(bytes), guests: 1, ..Wanted::default() };
    Asked { wanted, name: name.map(str::to_owned), hold_s, assurance: None }
}

fn ask_for(dir: &Path, asked: &Asked) -> Answered {
    ask(dir, asked, &By::this_process(), PATIENCE).unwrap()
}

/// Names and ends of promises in the journal, in their order.
fn journal(dir: &Path) -> Vec<(String, String)> {
    let lines = Journal::of_service(dir).read(0, 1 << 20).unwrap().lines;
    let of = |(_, line): (u64, String)| {
        let line: Value = serde_json::from_str(&line).unwrap();
        let text = |key: &str| line[key].as_str().unwrap_or_default().to_owned();
        (text("name"), if line["entry"] == "promise" { "promise".to_owned() } else { text("became") })
    };
    lines.into_iter().map(of).collect()
}

/// Memory above the floor in most tests. It is much less than the host has available, so that other programs do not
/// matter.
const SPARE: u64 = 64 * M;

#[test]
fn askers_at_the_same_time_are_never_promised_the_same_bytes() {
    let dir = tempfile::tempdir().unwrap();
    keep(dir.path(), &look(SPARE, 0), &[]);
    let admitted: u64 = std::thread::scope(|scope| {
        let asker =
            |_| scope.spawn(|| (0..16).filter(|_| ask_for(dir.path(), &want(None, M, 60)).admission.admitted).count());
        let askers: Vec<_> = (0..16).map(asker).collect();
        askers.into_iter().map(|asker| asker.join().unwrap() as u64).sum()
    });
    assert_eq!(admitted, SPARE / M, "of 256 that asked for a MiB each");
    let held: u64 = reservations(dir.path(), 0, |_| false).unwrap().iter().map(|one| one.bytes).sum();
    assert_eq!((held, journal(dir.path()).len() as u64), (SPARE, SPARE / M), "each is in the journal");
}

#[test]
fn promise_that_nobody_uses_ends_and_its_memory_counts_until_a_look_after_that() {
    let dir = tempfile::tempdir().unwrap();
    keep(dir.path(), &look(SPARE, 0), &[]);
    let whole = want(Some("a"), SPARE, 1);
    assert!(ask_for(dir.path(), &whole).admission.admitted);
    let refused = ask_for(dir.path(), &want(Some("b"), M, 1)).admission;
    assert_eq!((refused.admitted, refused.again_s), (false, Some(1)), "{refused:?}");
    std::thread::sleep(Duration::from_millis(1100));
    assert!(!ask_for(dir.path(), &want(Some("b"), M, 1)).admission.admitted, "nobody has looked since");
    keep(dir.path(), &look(SPARE, 0), &[]);
    assert!(ask_for(dir.path(), &want(Some("b"), M, 1)).admission.admitted);
    let told = [("a", "promise"), ("a", "lapsed"), ("b", "promise")].map(|(a, b)| (a.to_owned(), b.to_owned()));
    assert_eq!(journal(dir.path()), told);
}

#[test]
fn journal_tells_what_became_of_each_promise() {
    let dir = tempfile::tempdir().unwrap();
    keep(dir.path(), &look(SPARE, 0), &[]);
    for name in ["used", "ended"] {
        assert_eq!(ask_for(dir.path(), &want(Some(name), M, 600)).promise.as_deref(), Some(name));
    }
    let again = ask(dir.path(), &want(Some("used"), M, 600), &By::this_process(), PATIENCE);
    assert!(again.unwrap_err().to_string().contains("was promised memory already"));
    Promises::lock(dir.path(), PATIENCE).unwrap().set("ended", 0, 0).unwrap();
    std::thread::sleep(Duration::from_millis(5));
    keep(dir.path(), &look(SPARE, 0), &["used"]);
    let told = [("used", "promise"), ("ended", "promise"), ("ended", "ended"), ("used", "used")];
    assert_eq!(journal(dir.path()), told.map(|(a, b)| (a.to_owned(), b.to_owned())));
    assert_eq!(reservations(dir.path(), 0, |_| false).unwrap(), []);
}

/// When the first guest runs, the others have not started yet, and need the promise.
#[test]
fn promise_for_several_guests_is_not_used_up_by_the_first_of_them() {
    let dir = tempfile::tempdir().unwrap();
    keep(dir.path(), &look(SPARE, 0), &[]);
    let three = want(Some("web"), SPARE / 4, 600);
    let three = Asked { wanted: Wanted { guests: 3, ..three.wanted }, ..three };
    assert_eq!(ask_for(dir.path(), &three).promise.as_deref(), Some("web"));
    keep(dir.path(), &look(SPARE, 0), &["web"]);
    let refused = ask_for(dir.path(), &want(None, SPARE / 2, 60));
    assert!(!refused.admission.admitted, "{refused:?}");
    let held = reservations(dir.path(), 0, |name| name == "web").unwrap();
    assert_eq!(held, [Reservation { name: "web".into(), bytes: SPARE / 4 * 3 }]);
}

/// A look is forgotten when another process has lent memory since, which the look counts as free.
#[test]
fn nothing_is_promised_by_a_look_that_was_forgotten() {
    let dir = tempfile::tempdir().unwrap();
    keep(dir.path(), &look(SPARE, 0), &[]);
    for _ in 0..2 {
        Promises::lock(dir.path(), PATIENCE).unwrap().forget_look().unwrap();
        let refused = ask(dir.path(), &want(None, M, 5), &By::this_process(), PATIENCE).unwrap_err();
        assert!(refused.is::<NoLook>() && Looks::default().fresh(dir.path()).is_none());
    }
}

#[test]
fn question_where_nobody_balances_makes_no_directory() {
    let dir = tempfile::tempdir().unwrap();
    let none = dir.path().join("none");
    assert!(ask(&none, &want(None, M, 5), &By::this_process(), PATIENCE).unwrap_err().is::<NoLook>());
    assert!(!none.exists());
}

#[test]
fn question_without_a_hold_promises_nothing() {
    let dir = tempfile::tempdir().unwrap();
    keep(dir.path(), &look(SPARE, 0), &[]);
    let answered = ask_for(dir.path(), &want(Some("a"), SPARE, 0));
    assert_eq!((answered.admission.admitted, answered.promise), (true, None));
    assert!(ask_for(dir.path(), &want(Some("a"), SPARE, 5)).admission.admitted);
}

#[test]
fn nothing_is_promised_by_an_old_look_or_that_of_a_balancer_which_has_ended() {
    let dir = tempfile::tempdir().unwrap();
    let refused = || ask(dir.path(), &want(None, M, 5), &By::this_process(), PATIENCE).unwrap_err().is::<NoLook>();
    assert!(refused(), "nobody has looked");
    let fresh = look(SPARE, 0);
    let old = Look { began_ms: fresh.began_ms.saturating_sub(60_000), ..fresh.clone() };
    let gone = Look { balancer: ProcessId { pid: u32::MAX >> 1, start_ticks: 1 }, ..fresh.clone() };
    let before = Look { boot: "another".into(), ..fresh };
    for look in [old, gone, before] {
        keep(dir.path(), &look, &[]);
        assert!(refused(), "{look:?}");
    }
}

#[test]
fn one_that_holds_the_lock_keeps_others_waiting_for_as_long_as_they_want() {
    let dir = tempfile::tempdir().unwrap();
    let held = Promises::lock(dir.path(), PATIENCE).unwrap();
    let refused = Promises::lock(dir.path(), Duration::from_millis(10)).unwrap_err().to_string();
    assert!(refused.contains("try again"), "{refused}");
    drop(held);
    Promises::lock(dir.path(), Duration::ZERO).unwrap();
}

#[test]
fn figure_of_a_group_is_by_its_usual_guests() {
    let dir = tempfile::tempdir().unwrap();
    let mut look = look(SPARE, 4);
    look.standing.guests.iter_mut().for_each(|guest| guest.ram_bytes = 16 * M);
    keep(dir.path(), &look, &[]);
    assert!(ask_for(dir.path(), &want(None, 10 * M, 60)).admission.admitted);
    let fit = fit(dir.path(), &look, "group1").unwrap();
    assert_eq!((fit.more, fit.like_bytes, fit.storm_bytes, fit.reserve_bytes), (3, 16 * M, 10 * M, SPARE));
    assert_eq!(super::fit(dir.path(), &look, "unknown"), None);
}

/// With 500 guests, and all askers in turn. `pagefold bench admit` has the figure.
#[test]
fn answers_come_soon_with_500_guests() {
    let dir = tempfile::tempdir().unwrap();
    keep(dir.path(), &look(SPARE, 500), &[]);
    let mut took: Vec<Duration> = (0..200)
        .map(|_| {
            let began = Instant::now();
            ask_for(dir.path(), &want(None, 4096, 60));
            began.elapsed()
        })
        .collect();
    took.sort_unstable();
    eprintln!("p50 {:?}, p99 {:?}", took[100], took[197]);
    assert!(took[100] < Duration::from_millis(200), "{took:?}");
}
