//! Children that an attached process forks are members of its group, and are left as they would be without us.

#[path = "../common/mod.rs"]
mod common;

mod besieged;
mod keepers;
mod rig;

use common::supervised::{Installed, signal};
use host::{Mapping, Visibility};
use rig::{
    CONFIG, Server, attach, detach, detach_meanwhile, detach_with, folded, member, pooled, threads, two_workers,
    two_workers_by, wait,
};

#[test]
fn workers_forked_by_attached_process_fold_and_are_left_as_they_were() {
    let Some(installed) = Installed::attaching() else { return };
    let _supervisor = installed.serve(CONFIG, &[]);
    let (mut server, [one, other]) = two_workers(&installed);
    let [parent, first, second] = [0, one, other].map(|process| server.pid(process));
    let all = [0, one, other];
    for order in *b"wbd" {
        server.order(order, &all);
    }
    detach_meanwhile(&installed, first, &mut server, &all);
    server.assert_untouched(one);
    let other_group = installed.pagefold(&["attach", &first.to_string(), "--group", "beta", "--all-anonymous"]);
    let why = String::from_utf8_lossy(&other_group.stderr);
    assert!(why.contains("forked by a member of group acme, and can join no other"), "{why}");
    // Discards reach the kernel alone from here on.
    server.order(b'd', &all);
    server.order(b'w', &all);
    detach(&installed, parent);
    server.assert_untouched(0);
    server.order(b'b', &all);
    folded(&installed, second, 1000);
    // Pages that are discarded meanwhile, and that nobody touches before the agent has left, are zeros.
    detach_with(&installed, second, &mut server, (b"-", &[other]), |server| {
        for _ in 0..40 {
            server.order(b'D', &[other]);
        }
    });
    server.assert_untouched(other);
    server.order(b'w', &all);
    assert!(installed.members("acme").is_empty(), "{:?}", installed.members("acme"));
}

/// As workers of Apache and PHP-FPM do. The kernel hides them from their own user from then on.
#[test]
fn workers_that_give_up_roots_rights_fold_and_are_left_as_they_were() {
    let Some(installed) = Installed::attaching() else { return };
    let _supervisor = installed.serve(CONFIG, &[]);
    let (mut server, workers) = two_workers_by(&installed, b'u');
    let all = [0, workers[0], workers[1]];
    for worker in workers.map(|worker| server.pid(worker)) {
        assert_eq!(Visibility::of(worker).unwrap(), Visibility::RootSinceGivenUp);
    }
    for order in *b"wbd" {
        server.order(order, &all);
    }
    for worker in workers {
        detach_meanwhile(&installed, server.pid(worker), &mut server, &all);
        server.assert_untouched(worker);
    }
    server.order(b'w', &all);
}

#[test]
fn worker_stays_member_without_its_parent_and_executed_program_does_not() {
    let Some(installed) = Installed::attaching() else { return };
    let mut supervisor = installed.serve(CONFIG, &[]);
    let (mut server, [one, last]) = two_workers(&installed);
    let [first, executing] = [one, last].map(|worker| server.pid(worker));
    server.order(b'x', &[0, one]);
    wait("the executed program is no member", || member(&installed, executing).is_none().then_some(()));
    signal(executing, "KILL");
    signal(server.pid(0), "KILL");
    server.order(b'w', &[one]);
    supervisor.kill();
    server.order(b'd', &[one]);
    let _supervisor = installed.serve(CONFIG, &[]);
    server.order(b'b', &[one]);
    folded(&installed, first, 1000);
    detach_meanwhile(&installed, first, &mut server, &[one]);
    server.assert_untouched(one);
    server.order(b'd', &[one]);
}

#[test]
fn group_show_says_why_worker_cannot_be_attached() {
    let Some(installed) = Installed::attaching() else { return };
    let _supervisor = installed.serve(CONFIG, &[]);
    let mut server = Server::start(&installed);
    attach(&installed, server.pid(0));
    let worker = server.fork_by(b'T');
    let pid = server.pid(worker);
    let not_attached = || installed.show("acme")["not_attached"].as_array().expect("a list").clone();
    let found = wait("the reason is told", || not_attached().into_iter().next());
    assert_eq!(
        (&found["pid"], &found["family"], &found["program"]),
        (&pid.into(), &"server".into(), &"workers".into())
    );
    assert!(found["why"].as_str().is_some_and(|why| why.contains("traces it")) && found["again_s"].is_u64(), "{found}");
    // While it is tried again, no reason is told.
    let words = format!("process {pid} (workers, of server): process {} traces it", server.pid(0));
    wait(&format!("it is told in words: {words}"), || {
        let text = installed.pagefold(&["group", "show", "acme"]).stdout;
        String::from_utf8_lossy(&text).contains(&words).then_some(())
    });
    signal(pid, "KILL");
    wait("a worker that has ended is not told of", || not_attached().is_empty().then_some(()));
}

/// A device writes to the frame that it holds, whatever lies at the page's address by then.
#[test]
fn process_is_not_left_as_long_as_device_holds_pages() {
    let Some(installed) = Installed::attaching() else { return };
    let _supervisor = installed.serve(CONFIG, &[]);
    let mut server = Server::start(&installed);
    let pid = server.pid(0);
    attach(&installed, pid);
    folded(&installed, pid, 1000);
    server.order(b'h', &[0]);
    let refused = installed.pagefold(&["detach", &pid.to_string(), "--wait", "8"]);
    let why = String::from_utf8_lossy(&refused.stderr);
    assert!(why.contains("something holds pages that are folded"), "{why}");
    assert!(pooled(pid) > 0);
    server.order(b'l', &[0]);
    wait("the agent, which has gone on trying, has left", || (threads(pid) == 1).then_some(()));
    server.assert_untouched(0);
    server.order(b'w', &[0]);
}

/// Pages that a process may only read, in anonymous memory and in mappings of the pool.
fn read_only(pid: u32) -> u64 {
    let all = Mapping::list(pid).expect("its mappings");
    let shut = all.iter().filter(|mapping| mapping.read && !mapping.write && !mapping.execute && !mapping.shared);
    let shut = shut.filter(|mapping| mapping.name.is_empty() || mapping.name.contains("pagefold"));
    shut.map(|mapping| (mapping.end.0 - mapping.start.0) / 4096).sum()
}

/// The agent reads the list of mappings, and replaces them some time later.
#[test]
fn program_that_changes_protection_is_left_with_what_it_has_set() {
    let Some(installed) = Installed::attaching() else { return };
    let _supervisor = installed.serve(CONFIG, &[]);
    let mut server = Server::start(&installed);
    let pid = server.pid(0);
    let at_first = read_only(pid);
    for is_at_rest in [true, false] {
        attach(&installed, pid);
        folded(&installed, pid, 1000);
        server.order(b'm', &[0]);
        if is_at_rest {
            detach(&installed, pid);
        } else {
            detach_with(&installed, pid, &mut server, (b"m", &[0]), |_| {});
        }
        server.assert_untouched(0);
        assert_eq!(read_only(pid) - at_first, 256);
        server.order(b'M', &[0]);
        assert_eq!(read_only(pid), at_first);
        server.order(b'b', &[0]);
    }
}

/// Pages of a process with each kind of advice: against children, dumps and huge pages, and for the kernel's own merger.
fn advised(pid: u32) -> [u64; 4] {
    let all = Mapping::read_all(pid).expect("its mappings");
    [b"dc", b"dd", b"nh", b"mg"].map(|flag| {
        let advised = all.iter().filter(|mapping| mapping.name.is_empty() && mapping.vm_flags.contains(flag));
        advised.map(|mapping| (mapping.end.0 - mapping.start.0) / 4096).sum()
    })
}

#[test]
fn advice_that_program_has_given_holds_after_it_was_left() {
    let Some(installed) = Installed::attaching() else { return };
    let _supervisor = installed.serve(CONFIG, &[]);
    let mut server = Server::start(&installed);
    let pid = server.pid(0);
    server.order(b'a', &[0]);
    let before = advised(pid);
    assert!(before[..3].iter().all(|pages| *pages >= 256), "{before:?}");
    attach(&installed, pid);
    folded(&installed, pid, 1800);
    detach(&installed, pid);
    assert_eq!(advised(pid), before);
    server.assert_untouched(0);
    server.order(b'b', &[0]);
}
