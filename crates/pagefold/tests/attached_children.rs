//! Children that an attached process forks are members of its group, and are left as they would be without us.

mod common;

use common::supervised::{Installed, signal, wait_for_within};
use host::Mapping;
use serde_json::Value;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::process::{Child, Command};
use std::time::Duration;

const CONFIG: &str = "[[group]]\nname = 'acme'\n[[group]]\nname = 'beta'\n";
/// Time for anything to happen on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);
/// Words of the program's table before that of the first process, and those of a process.
const HEAD: u64 = 4;
const SLOT: u64 = 4;

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
        assert_eq!((entries(pid, "task"), entries(pid, "fd")), (1, self.files));
    }

    /// Has the parent fork a worker, and returns its number.
    fn fork(&mut self) -> u64 {
        let number = u64::from(self.at(2)) + 1;
        self.order(b'f', &[0]);
        wait("the worker has filled its memory", || (self.word(number, 1) == self.orders).then_some(()));
        number
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

fn wait<T>(what: &str, look: impl FnMut() -> Option<T>) -> T {
    wait_for_within(PATIENCE, what, look)
}

fn attach(installed: &Installed, pid: u32) {
    let mut command = Command::new(installed.path("pagefold"));
    command.args(["attach", &pid.to_string(), "--group", "acme", "--all-anonymous", "--name", "server"]);
    command.env("PAGEFOLD_DIR", installed.path("s")).env("PAGEFOLD_EAGER", "1").env("PAGEFOLD_CHILDREN_AFTER", "1");
    let attached = command.output().expect("run pagefold");
    assert!(attached.status.success(), "{attached:?}");
}

fn detach(installed: &Installed, pid: u32) {
    let detached = installed.pagefold(&["detach", &pid.to_string(), "--wait", "120"]);
    assert!(detached.status.success(), "{detached:?}");
}

/// Detaches a process while all of these write and discard pages all the time.
fn detach_meanwhile(installed: &Installed, pid: u32, server: &mut Server, all: &[u64]) {
    let mut command = Command::new(installed.path("pagefold"));
    command.args(["detach", &pid.to_string(), "--wait", "120"]).env("PAGEFOLD_DIR", installed.path("s"));
    let mut detaching = command.spawn().expect("run pagefold");
    let mut orders = b"bdw".iter().cycle();
    let detached = loop {
        server.order(*orders.next().expect("one"), all);
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
    let mut server = Server::start(installed);
    attach(installed, server.pid(0));
    folded(installed, server.pid(0), 1000);
    let workers = [server.fork(), server.fork()];
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
    detach(&installed, second);
    server.assert_untouched(other);
    server.order(b'w', &all);
    assert!(installed.members("acme").is_empty(), "{:?}", installed.members("acme"));
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
