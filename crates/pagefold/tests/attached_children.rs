//! Children that an attached process forks are members of its group, and are left as they would be without us.

mod common;

use common::supervised::{Installed, signal, wait_for_within};
use host::{Mapping, Visibility};
use serde_json::Value;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const CONFIG: &str = "[[group]]\nname = 'acme'\n[[group]]\nname = 'beta'\n";
/// Time for anything to happen on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);
/// Words of the program's table before that of the first process, and those of a process.
const HEAD: u64 = 4;
const SLOT: u64 = 4;
/// The word that says which page is touched, and that of a process which says with how many faults.
const TOUCHED: u64 = 3;
const FAULTS: u64 = 3;
/// Words with the address of inherited memory; with the number of pages that outsiders have written, and of those that they have found wrong.
const ADDRESS: [u64; 2] = [1020, 1021];
const WRITTEN: u64 = 1022;
const LOST: u64 = 1023;

/// Asks the keeper for the userfaultfd of its own page at an address again and again, on many connections. Says how often it was told
/// that none is kept: `SOCKET ADDRESS SECONDS`.
const ASKER: &str = "
import socket, struct, sys, threading, time
path, frame, end = sys.argv[1], b'l' + struct.pack('<Q', int(sys.argv[2])), time.time() + int(sys.argv[3])
told = []
def ask():
    while time.time() < end:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as s:
            s.connect(path); s.send(frame); told.append(s.recv(8))
threads = [threading.Thread(target=ask) for _ in range(16)]
for t in threads: t.start()
for t in threads: t.join()
print(sum(answer == b'n' for answer in told))
";

/// A running `workers.c`, and the table that it has mapped.
struct Server {
    parent: Child,
    table: File,
    orders: u32,
    /// Number of files that each process has open.
    files: usize,
}

impl Server {
    fn start(installed: &Installed) -> Self {
        let (program, table) = (installed.path("workers"), installed.path("table"));
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/programs/workers.c");
        let made = Command::new("cc").args(["-O1", "-Wall", "-o"]).arg(&program).arg(source).status();
        assert!(made.expect("run a compiler").success());
        fs::write(&table, [0; 4096]).expect("make the table");
        let parent = Command::new(&program).arg(&table).spawn().expect("start it");
        let table = File::options().read(true).write(true).open(&table).expect("open the table");
        let mut server = Self { parent, table, orders: 0, files: 0 };
        wait("it begins", || (server.pid(0) != 0).then_some(()));
        server.files = entries(server.pid(0), "fd");
        server
    }

    fn at(&self, word: u64) -> u32 {
        let mut bytes = [0; 4];
        self.table.read_exact_at(&mut bytes, word * 4).expect("read the table");
        u32::from_ne_bytes(bytes)
    }

    fn write(&self, word: u64, value: u32) {
        self.table.write_all_at(&value.to_ne_bytes(), word * 4).expect("write the table");
    }

    /// A word of a process's, the parent's being 0: its pid, the last order that it carried out, wrong pages.
    fn word(&self, process: u64, word: u64) -> u32 {
        self.at(HEAD + process * SLOT + word)
    }

    fn pid(&self, process: u64) -> u32 {
        self.word(process, 0)
    }

    /// Has all of these processes carry out an order, and asserts that their memory is what it has to be.
    fn order(&mut self, order: u8, processes: &[u64]) {
        self.orders += 1;
        self.write(1, order.into());
        self.write(0, self.orders);
        for process in processes {
            wait("the order is carried out", || (self.word(*process, 1) == self.orders).then_some(()));
            let wrong = self.word(*process, 2);
            assert_eq!(wrong, 0, "wrong pages of process {process} after order {}", char::from(order));
        }
    }

    /// Asserts that nothing of Pagefold's is in a process.
    fn assert_untouched(&self, process: u64) {
        let pid = self.pid(process);
        let maps = fs::read_to_string(format!("/proc/{pid}/maps")).expect("its mappings");
        assert!(!maps.contains("pagefold"), "{maps}");
        assert_eq!((threads(pid), entries(pid, "fd")), (1, self.files));
    }

    /// Starts an outsider, which writes pages of a worker from another process, and reads them again.
    fn outsider(&self, installed: &Installed, worker: u64) -> Outsider {
        let mut command = Command::new(installed.path("workers"));
        command.arg(installed.path("table")).arg(self.pid(worker).to_string());
        Outsider(command.spawn().expect("start an outsider"))
    }

    /// Has the parent fork a worker, and returns its number.
    fn fork(&mut self) -> u64 {
        self.fork_by(b'f')
    }

    /// Has the last worker fork another one, which fills no memory.
    fn fork_by_last(&mut self) -> u64 {
        let number = u64::from(self.at(2)) + 1;
        self.order(b'g', &[number - 1]);
        wait("the worker's own child begins", || (self.word(number, 1) == self.orders).then_some(number))
    }

    fn fork_by(&mut self, order: u8) -> u64 {
        let number = u64::from(self.at(2)) + 1;
        self.order(order, &[0]);
        wait("the worker has filled its memory", || (self.word(number, 1) == self.orders).then_some(()));
        number
    }
}

/// Dropping it ends it.
struct Outsider(Child);

impl Drop for Outsider {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Orphans are ended by the installation.
        let _ = self.parent.kill();
        let _ = self.parent.wait();
    }
}

fn entries(pid: u32, dir: &str) -> usize {
    fs::read_dir(format!("/proc/{pid}/{dir}")).expect("it runs").count()
}

/// Number of a process's threads, but for the kernel's own that serve its rings.
fn threads(pid: u32) -> usize {
    let all = fs::read_dir(format!("/proc/{pid}/task")).expect("it runs").flatten();
    let names = all.filter_map(|thread| fs::read_to_string(thread.path().join("comm")).ok());
    names.filter(|name| !name.starts_with("iou-")).count()
}

fn wait<T>(what: &str, look: impl FnMut() -> Option<T>) -> T {
    wait_for_within(PATIENCE, what, look)
}

fn attach(installed: &Installed, pid: u32) {
    attach_with(installed, pid, "1");
}

/// Attaches a process. Children of its that have lived for so many seconds become members, too.
fn attach_with(installed: &Installed, pid: u32, children_after: &str) {
    let mut command = Command::new(installed.path("pagefold"));
    command.args(["attach", &pid.to_string(), "--group", "acme", "--all-anonymous", "--name", "server"]);
    command
        .env("PAGEFOLD_DIR", installed.path("s"))
        .env("PAGEFOLD_EAGER", "1")
        .env("PAGEFOLD_CHILDREN_AFTER", children_after);
    let attached = command.output().expect("run pagefold");
    assert!(attached.status.success(), "{attached:?}");
}

fn detach(installed: &Installed, pid: u32) {
    let detached = installed.pagefold(&["detach", &pid.to_string(), "--wait", "120"]);
    assert!(detached.status.success(), "{detached:?}");
}

/// Detaches a process while all of these write and discard pages all the time.
fn detach_meanwhile(installed: &Installed, pid: u32, server: &mut Server, all: &[u64]) {
    detach_with(installed, pid, server, (b"bdw", all), |_| {});
}

/// Detaches a process while all of these carry out orders in turn. `at_start` is called when that has begun. In one second of four, orders
/// discard pages: an agent leaves inherited memory when none were discarded for a second.
fn detach_with(
    installed: &Installed,
    pid: u32,
    server: &mut Server,
    (orders, all): (&[u8], &[u64]),
    at_start: impl FnOnce(&mut Server),
) {
    let mut command = Command::new(installed.path("pagefold"));
    command.args(["detach", &pid.to_string(), "--wait", "120"]).env("PAGEFOLD_DIR", installed.path("s"));
    let mut detaching = command.spawn().expect("run pagefold");
    at_start(server);
    let (mut orders, begin) = (orders.iter().cycle(), Instant::now());
    let detached = loop {
        let may_discard = begin.elapsed().as_secs().is_multiple_of(4);
        let order = match orders.next().expect("one") {
            b'd' if !may_discard => b'w',
            b'k' if !may_discard => b'K',
            order => *order,
        };
        server.order(order, all);
        if let Some(status) = detaching.try_wait().expect("wait for it") {
            break status;
        }
    };
    assert!(detached.success(), "{detached}");
}

fn member(installed: &Installed, pid: u32) -> Option<Value> {
    let shown = installed.show("acme");
    shown["members"].as_array()?.iter().find(|member| member["pid"] == pid && member["connected"] == true).cloned()
}

/// Waits until a process has so many pages folded. Returns what `group show` says of it.
fn folded(installed: &Installed, pid: u32, pages: u64) -> Value {
    wait("it is folded", || member(installed, pid).filter(|found| found["folded_pages"].as_u64() >= Some(pages)))
}

/// Pages of a process that lie in mappings of the pool, by the kernel's list.
fn pooled(pid: u32) -> u64 {
    let all = Mapping::list(pid).expect("its mappings");
    let pooled = all.iter().filter(|mapping| !mapping.shared && mapping.name.contains("pagefold"));
    pooled.map(|mapping| (mapping.end.0 - mapping.start.0) / 4096).sum()
}

/// An attached server, which has forked two workers since that are folded, too.
fn two_workers(installed: &Installed) -> (Server, [u64; 2]) {
    two_workers_by(installed, b'f')
}

/// The same; `order` forks a worker.
fn two_workers_by(installed: &Installed, order: u8) -> (Server, [u64; 2]) {
    let mut server = Server::start(installed);
    attach(installed, server.pid(0));
    folded(installed, server.pid(0), 1000);
    let workers = [server.fork_by(order), server.fork_by(order)];
    for worker in workers.map(|worker| server.pid(worker)) {
        assert!(pooled(worker) >= 1000, "nothing was inherited");
        let found = folded(installed, worker, 1000);
        assert_eq!(found["family"], "server", "{found}");
    }
    (server, workers)
}

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

/// The first page of a process that maps the pool.
fn first_pooled(pid: u32) -> u64 {
    let all = Mapping::list(pid).expect("its mappings");
    let mut pooled = all.iter().filter(|mapping| !mapping.shared && mapping.name.contains("pagefold"));
    pooled.next().expect("a mapping of the pool").start.0
}

/// Looking for a userfaultfd protects a page of each candidate. A process that asks all the time makes that no family's but its own.
#[test]
fn member_that_asks_for_a_userfaultfd_all_the_time_does_not_slow_children_of_others() {
    let Some(installed) = Installed::attaching() else { return };
    let _supervisor = installed.serve(CONFIG, &[]);
    let mut server = Server::start(&installed);
    attach_with(&installed, server.pid(0), "never");
    folded(&installed, server.pid(0), 1000);
    let worker = server.fork();
    let [high, low] = ADDRESS.map(|word| u64::from(server.at(word)));
    let (page, area) = (first_pooled(server.pid(worker)), high << 32 | low);
    server.write(TOUCHED, u32::try_from((page - area) / 4096).expect("a page of the area"));
    let mut asker = Command::new("python3");
    asker.args(["-c", ASKER, &installed.text("s/prove.sock"), &page.to_string(), "4"]).stdout(Stdio::piped());
    let asker = asker.spawn().expect("run python3");
    server.order(b't', &[worker]);
    let faults = server.word(worker, FAULTS);
    let told = asker.wait_with_output().expect("wait for it").stdout;
    let told: u32 = String::from_utf8_lossy(&told).trim().parse().expect("a number");
    eprintln!("{faults} faults, and {told} answers");
    assert!(told > 50, "the keeper has answered {told} times");
    assert!(faults <= 20, "{faults} faults, of which the kernel's own look after memory is one or two");
}

/// The process of the service's keeper, if it runs.
fn keeper(supervisor: u32) -> Option<u32> {
    let children = host::children(supervisor);
    children.into_iter().find(|pid| host::runs_program(*pid, "pagefold-prove") == Some(true))
}

/// Kills the keeper at these times from here on, or as soon as there is one.
fn kill_keeper_at(supervisor: u32, times: [u64; 2]) {
    let start = Instant::now();
    for time in times.map(|time| start + Duration::from_millis(time)) {
        std::thread::sleep(time.saturating_duration_since(Instant::now()));
        signal(wait("there is a keeper", || keeper(supervisor)), "KILL");
    }
}

/// Number of userfaultfds that a process has open.
fn followed(pid: u32) -> usize {
    let links = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    links.filter(|link| fs::read_link(link.path()).is_ok_and(|to| to.as_os_str() == "anon_inode:[userfaultfd]")).count()
}

/// Waits until the service's keeper follows so many children, and has a standby. Neither is this process, which was killed and may
/// take a moment to end. Returns both.
fn keeper_of(supervisor: u32, children: usize, but: u32) -> (u32, u32) {
    wait("the keeper follows all", || {
        let keeper = keeper(supervisor).filter(|keeper| *keeper != but && followed(*keeper) == children)?;
        let standby = host::children(keeper).into_iter().find(|pid| *pid != but)?;
        Some((keeper, standby))
    })
}

/// Pages that were being discarded showed their slots. Nobody followed children whose parents had ended, or children of children.
#[test]
fn discards_read_as_zeros_when_keeper_is_killed_at_any_time() {
    let Some(installed) = Installed::attaching() else { return };
    let supervisor = installed.serve(CONFIG, &[]);
    let service = supervisor.0.id();
    let mut server = Server::start(&installed);
    attach_with(&installed, server.pid(0), "never");
    folded(&installed, server.pid(0), 1000);
    let workers: Vec<u64> = (0..6).map(|_| server.fork()).collect();
    let grandchild = server.fork_by_last();
    let (first, _) = keeper_of(service, 7, 0);
    let killing = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(30));
        signal(first, "KILL");
    });
    server.order(b's', &workers[..5]);
    killing.join().expect("it kills");
    // Its standby has handed all of them on. The next keeper loses its standby first, and then its own life.
    let (second, standby) = keeper_of(service, 7, first);
    signal(server.pid(0), "KILL");
    signal(standby, "KILL");
    let (_, other) = keeper_of(service, 7, standby);
    signal(second, "KILL");
    server.order(b's', &[workers[5], grandchild]);
    server.order(b'd', &workers);
    wait("the last keeper follows all", || {
        keeper(service).filter(|keeper| *keeper != second && followed(*keeper) == 7)
    });
    wait("no other process is left", || (!fs::exists(format!("/proc/{other}/exe")).ok()?).then_some(()));
    server.order(b'w', &workers);
}

/// Another process and the kernel's own threads write pages of a worker all the time, which nobody can stop.
#[test]
fn no_write_is_lost_when_keeper_is_killed_while_worker_is_left() {
    let Some(installed) = Installed::attaching() else { return };
    let is_long = std::env::var_os("PAGEFOLD_SOAK_SECONDS").is_some();
    let supervisor = installed.serve(CONFIG, &[]);
    let mut server = Server::start(&installed);
    attach(&installed, server.pid(0));
    folded(&installed, server.pid(0), 1000);
    for cycle in 0..if is_long { 12 } else { 2 } {
        let worker = server.fork();
        let pid = server.pid(worker);
        folded(&installed, pid, 1000);
        let outsider = server.outsider(&installed, worker);
        wait("it has written", || (server.at(WRITTEN) > 1000).then_some(()));
        assert_eq!(server.at(LOST), 0, "writes from outside are lost in cycle {cycle} before the worker is left");
        // None is killed in the first: then pages are discarded, too.
        let orders: &[u8] = if cycle == 0 { b"kkbd" } else { b"KKb" };
        let mut killing = None;
        detach_with(&installed, pid, &mut server, (orders, &[worker]), |_| {
            let (supervisor, first) = (supervisor.0.id(), 100 + cycle * 350 % 1500);
            killing = (cycle > 0).then(|| std::thread::spawn(move || kill_keeper_at(supervisor, [first, first + 600])));
        });
        killing.into_iter().for_each(|thread| thread.join().expect("it kills"));
        server.assert_untouched(worker);
        server.order(b'k', &[worker]);
        let written = server.at(WRITTEN);
        wait("each page was read once more", || (server.at(WRITTEN) > written + 1000).then_some(()));
        drop(outsider);
        assert_eq!(server.at(LOST), 0, "writes from outside are lost in cycle {cycle}");
        signal(pid, "KILL");
    }
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
