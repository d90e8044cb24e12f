//! A storm in which one guest lies: its root says that its balloon is as large as the host wants it, and gives nothing back. Honest ones
//! beside it have loans, which they give back.

use crate::common::lies::{LIES, begin};
use crate::common::service::{cgroup_path, small_memory, until};
use crate::common::{Afterwards, number};
use crate::rig::{Applying, Guests, KEPT, M, RAM, guests};
use serde_json::{Value, json};
use std::process::{Command, Stdio};

/// Memory of the host, which is never lent: 512 MiB.
const HOST: u64 = 512 * M;
/// Memory of the group that is available beyond all that honest guests may take: 24 MiB, and 1/20 of its limit, which does not count.
const BEYOND: u64 = HOST / 20 + 24 * M;
/// Memory that the liar has yet to use: 32 MiB.
const UNUSED: u64 = 32 * M;

/// Has a guest use all of its memory but so many MiB, and free it again: it lies in frames of the host.
fn use_up(guests_of: &Guests, n: usize, all_but: u64) {
    let script = format!(
        "mount -o remount,size=95% /tmp; f=$(awk '/MemAvailable/ {{print int($2 / 1024) - {all_but}}}' /proc/meminfo)
dd if=/dev/zero of=/tmp/x bs=1M count=$f 2>/dev/null; rm /tmp/x"
    );
    guests_of.lab.everywhere(&guests_of.names()[n..=n], &script);
}

#[test]
fn guest_that_gives_nothing_back_is_paused_in_a_storm_and_honest_ones_are_not() {
    let token = format!("storm{}", std::process::id());
    let Some((group, _afterwards)) = small_memory(&token, HOST) else { return };
    let Some(guests_of) = Guests::many(3, "storm", "virtio-balloon-pci") else { return };
    [UNUSED / M, 48, 48].into_iter().enumerate().for_each(|(n, all_but)| use_up(&guests_of, n, all_but));
    begin(&guests_of.lab, &guests_of.listed, &LIES[..1]);
    // Its own driver would give memory back.
    guests_of
        .lab
        .everywhere(&guests_of.names()[..1], "while grep -q ^virtio_balloon /proc/modules; do sleep 0.1; done");
    guests_of.qmp(0, "balloon", json!({"value": KEPT}));
    until(60, "it says that it has what it is guaranteed", || guests_of.sizes() == [KEPT, RAM, RAM]);
    let status = guests_of.status();
    let of = |n: usize, figure: &str| number(&guests(&status)[n][figure]);
    assert!(of(0, "resident_bytes") > KEPT + 16 * M, "it has kept its memory: {status}");
    let [liar, one, other] = [0, 1, 2].map(|n: usize| guests(&status)[n]["id"].as_str().expect("an id").to_owned());
    let may_take = [1, 2].map(|n| RAM - of(n, "resident_bytes") + of(n, "folded_bytes"));
    assert!(may_take.iter().all(|bytes| *bytes > 3 * M), "a pause of them would spare something: {status}");
    // Somebody takes the host's memory, but for what honest guests may take, and a little.
    let available = may_take.iter().sum::<u64>() + BEYOND;
    assert!(available < HOST / 2, "memory is short: {status}");
    let _taken = take(&token, &group, HOST - available);
    for guest in &guests_of.listed {
        std::fs::write(format!("{group}/cgroup.procs"), guest["pid"].to_string()).expect("move a guest");
    }
    let floor = HOST.to_string();
    let mut command = guests_of.command(&["apply", "--every", "1", "--floor", &floor, "--within", cgroup_path(&group)]);
    let _applying = Applying(command.stdout(Stdio::null()).spawn().expect("run pagefold balance"));
    let place = |journal: &[Value], kind: &str, guest: &str| {
        journal.iter().position(|line| line["entry"] == kind && line["guest"] == *guest)
    };
    until(120, "the liar is paused, and runs again", || place(&guests_of.journal(), "resume", &liar).is_some());
    let journal = guests_of.journal();
    let resumed = place(&journal, "resume", &liar).expect("it runs again");
    assert!(journal[resumed]["problem"].is_null(), "{}", journal[resumed]);
    for honest in [&one, &other] {
        assert_eq!(place(&journal, "pause", honest), None, "{journal:#?}");
        let given = place(&journal, "outcome", honest).expect("it gives back");
        assert!(given < resumed, "it stood still while others gave back: {journal:#?}");
    }
}

/// A process takes memory of the control group. Dropping the result frees it.
fn take(token: &str, group: &str, bytes: u64) -> Afterwards {
    let taken = format!("/dev/shm/pagefold-test-{token}");
    let afterwards = Afterwards::run(&format!("rm -f {taken}"));
    let take = format!("echo $$ > {group}/cgroup.procs && exec head -c {bytes} /dev/zero > {taken}");
    assert!(Command::new("sh").args(["-c", &take]).status().expect("run a shell").success());
    afterwards
}
