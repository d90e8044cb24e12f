//! A server that forks workers (`workers.c`), attaching and detaching it, and the outcome in its processes.

use crate::common::supervised::{Installed, wait_for_within};
use host::Mapping;
use serde_json::Value;
use std::fs::{self, File, Permissions};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

pub const CONFIG: &str = "[[group]]\nname = 'acme'\n[[group]]\nname = 'beta'\n";
/// Time for anything to happen on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);
/// Words of the program's table before that of the first process, and those of a process.
const HEAD: u64 = 4;
const SLOT: u64 = 4;
/// The word that says which page is touched, and that of a process which says with how many faults.
pub const TOUCHED: u64 = 3;
pub const FAULTS: u64 = 3;
/// Words with the address of inherited memory; with the number of pages that outsiders have written, and of those that they have found wrong.
pub const ADDRESS: [u64; 2] = [1020, 1021];
pub const WRITTEN: u64 = 1022;
pub const LOST: u64 = 1023;

/// A running `workers.c`, and the table that it has mapped.
pub struct Server {
    parent: Child,
    table: File,
    orders: u32,
    /// Number of files that each process has open.
    files: usize,
}

impl Server {
    pub fn start(installed: &Installed) -> Self {
        Self::start_by(installed, Command::new(installed.path("workers")))
    }

    /// Starts one that is a user's.
    pub fn start_as(installed: &Installed, user: u32) -> Self {
        let mut command = Command::new("setpriv");
        command.args([format!("--reuid={user}"), format!("--regid={user}"), "--clear-groups".to_owned()]);
        command.arg(installed.path("workers"));
        Self::start_by(installed, command)
    }

    fn start_by(installed: &Installed, mut command: Command) -> Self {
        let (program, table) = (installed.path("workers"), installed.path("table"));
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/programs/workers.c");
        let made = Command::new("cc").args(["-O1", "-Wall", "-o"]).arg(&program).arg(source).status();
        assert!(made.expect("run a compiler").success());
        fs::write(&table, [0; 4096]).expect("make the table");
        fs::set_permissions(&table, Permissions::from_mode(0o666)).expect("let others write it");
        let parent = command.arg(&table).spawn().expect("start it");
        let table = File::options().read(true).write(true).open(&table).expect("open the table");
        let mut server = Self { parent, table, orders: 0, files: 0 };
        wait("it begins", || (server.pid(0) != 0).then_some(()));
        server.files = entries(server.pid(0), "fd");
        server
    }

    pub fn at(&self, word: u64) -> u32 {
        let mut bytes = [0; 4];
        self.table.read_exact_at(&mut bytes, word * 4).expect("read the table");
        u32::from_ne_bytes(bytes)
    }

    pub fn write(&self, word: u64, value: u32) {
        self.table.write_all_at(&value.to_ne_bytes(), word * 4).expect("write the table");
    }

    /// A word of a process's, the parent's being 0: its pid, the last order that it carried out, wrong pages.
    pub fn word(&self, process: u64, word: u64) -> u32 {
        self.at(HEAD + process * SLOT + word)
    }

    pub fn pid(&self, process: u64) -> u32 {
        self.word(process, 0)
    }

    /// Has all of these processes carry out an order, and asserts that their memory is what it has to be.
    pub fn order(&mut self, order: u8, processes: &[u64]) {
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
    pub fn assert_untouched(&self, process: u64) {
        let pid = self.pid(process);
        let maps = fs::read_to_string(format!("/proc/{pid}/maps")).expect("its mappings");
        assert!(!maps.contains("pagefold"), "{maps}");
        assert_eq!((threads(pid), entries(pid, "fd")), (1, self.files));
    }

    /// Starts an outsider, which writes pages of a worker from another process, and reads them again.
    pub fn outsider(&self, installed: &Installed, worker: u64) -> Outsider {
        let mut command = Command::new(installed.path("workers"));
        command.arg(installed.path("table")).arg(self.pid(worker).to_string());
        Outsider(command.spawn().expect("start an outsider"))
    }

    /// Has the parent fork a worker, and returns its number.
    pub fn fork(&mut self) -> u64 {
        self.fork_by(b'f')
    }

    /// Has the last worker fork another one, which fills no memory.
    pub fn fork_by_last(&mut self) -> u64 {
        let number = u64::from(self.at(2)) + 1;
        self.order(b'g', &[number - 1]);
        wait("the worker's own child begins", || (self.word(number, 1) == self.orders).then_some(number))
    }

    pub fn fork_by(&mut self, order: u8) -> u64 {
        let number = u64::from(self.at(2)) + 1;
        self.order(order, &[0]);
        wait("the worker has filled its memory", || (self.word(number, 1) == self.orders).then_some(()));
        number
    }
}

/// Dropping it ends it.
pub struct Outsider(Child);

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
pub fn threads(pid: u32) -> usize {
    let all = fs::read_dir(format!("/proc/{pid}/task")).expect("it runs").flatten();
    let names = all.filter_map(|thread| fs::read_to_string(thread.path().join("comm")).ok());
    names.filter(|name| !name.starts_with("iou-")).count()
}

pub fn wait<T>(what: &str, look: impl FnMut() -> Option<T>) -> T {
    wait_for_within(PATIENCE, what, look)
}

pub fn attach(installed: &Installed, pid: u32) {
    attach_with(installed, pid, "1");
}

/// Attaches a process. Children of its that have lived for so many seconds become members, too.
pub fn attach_with(installed: &Installed, pid: u32, children_after: &str) {
    let mut command = Command::new(installed.path("pagefold"));
    command.args(["attach", &pid.to_string(), "--group", "acme", "--all-anonymous", "--name", "server"]);
    command
        .env("PAGEFOLD_DIR", installed.path("s"))
        .env("PAGEFOLD_EAGER", "1")
        .env("PAGEFOLD_CHILDREN_AFTER", children_after);
    let attached = command.output().expect("run pagefold");
    assert!(attached.status.success(), "{attached:?}");
}

pub fn detach(installed: &Installed, pid: u32) {
    let detached = installed.pagefold(&["detach", &pid.to_string(), "--wait", "240"]);
    assert!(detached.status.success(), "{detached:?}");
}

/// Detaches a process while all of these write and discard pages all the time.
pub fn detach_meanwhile(installed: &Installed, pid: u32, server: &mut Server, all: &[u64]) {
    detach_with(installed, pid, server, (b"bdw", all), |_| {});
}

/// Detaches a process while all of these carry out orders in turn. `at_start` is called when that has begun. In one second of four, orders
/// discard pages: an agent leaves inherited memory when none were discarded for a second.
pub fn detach_with(
    installed: &Installed,
    pid: u32,
    server: &mut Server,
    (orders, all): (&[u8], &[u64]),
    at_start: impl FnOnce(&mut Server),
) {
    let mut command = Command::new(installed.path("pagefold"));
    command.args(["detach", &pid.to_string(), "--wait", "240"]).env("PAGEFOLD_DIR", installed.path("s"));
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

pub fn member(installed: &Installed, pid: u32) -> Option<Value> {
    let shown = installed.show("acme");
    shown["members"].as_array()?.iter().find(|member| member["pid"] == pid && member["connected"] == true).cloned()
}

/// Waits until a process has so many pages folded. Returns what `group show` says of it.
pub fn folded(installed: &Installed, pid: u32, pages: u64) -> Value {
    wait("it is folded", || member(installed, pid).filter(|found| found["folded_pages"].as_u64() >= Some(pages)))
}

/// Pages of a process that lie in mappings of the pool, by the kernel's list.
pub fn pooled(pid: u32) -> u64 {
    let all = Mapping::list(pid).expect("its mappings");
    let pooled = all.iter().filter(|mapping| !mapping.shared && mapping.name.contains("pagefold"));
    pooled.map(|mapping| (mapping.end.0 - mapping.start.0) / 4096).sum()
}

/// An attached server, which has forked two workers since that are folded, too.
pub fn two_workers(installed: &Installed) -> (Server, [u64; 2]) {
    two_workers_by(installed, b'f')
}

/// The same; `order` forks a worker.
pub fn two_workers_by(installed: &Installed, order: u8) -> (Server, [u64; 2]) {
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
