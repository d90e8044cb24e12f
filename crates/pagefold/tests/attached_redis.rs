//! Redis, attached and detached again and again while its clients work: each of them knows what every answer must be.
//!
//! Long form: 1,000 cycles, or as many as fit into `PAGEFOLD_SOAK_SECONDS`.

mod common;

use common::json_of;
use common::service::seconds;
use common::supervised::{Installed, wait_for, wait_for_within};
use host::Mapping;
use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Number of keys, and of different contents. Ten keys have the same.
const KEYS: usize = 3000;
const KINDS: usize = 300;
/// Least number of pages that are folded in a cycle, and of those that are broken then.
const FOLDED: u64 = 1000;
const BROKEN: u64 = 100;
/// Kinds of which all values are changed in a cycle: 200 pages.
const CHANGED_KINDS: usize = 20;
/// Number of clients that work all the time, each with keys of its own.
const CLIENTS: usize = 4;
/// Number of cycles, and most cycles of the long form.
const CYCLES: usize = 4;
const MOST_CYCLES: usize = 1000;
/// Longest time for anything to happen on a busy machine: 2 minutes.
const PATIENCE: Duration = Duration::from_secs(120);

/// A connection to Redis.
struct Client(BufReader<UnixStream>);

impl Client {
    fn connect(socket: &str) -> Self {
        Self(BufReader::new(UnixStream::connect(socket).expect("connect to redis")))
    }

    /// Sends a command. Returns its answer: text, a number, or nothing.
    fn ask(&mut self, words: &[&str]) -> Option<String> {
        let mut text = format!("*{}\r\n", words.len());
        words.iter().for_each(|word| text += &format!("${}\r\n{word}\r\n", word.len()));
        self.0.get_mut().write_all(text.as_bytes()).expect("ask redis");
        let mut line = String::new();
        self.0.read_line(&mut line).expect("hear from redis");
        let (kind, rest) = line.trim_end().split_at(1);
        match (kind, rest.parse::<i64>()) {
            ("$", Ok(-1)) => None,
            ("$", Ok(length)) => {
                let mut bytes = vec![0; length as usize + 2];
                self.0.read_exact(&mut bytes).expect("hear from redis");
                bytes.truncate(length as usize);
                Some(String::from_utf8(bytes).expect("text"))
            }
            ("+" | ":", _) => Some(rest.to_owned()),
            _ => panic!("{words:?}: {line}"),
        }
    }

    fn must(&mut self, words: &[&str], answer: &str) {
        assert_eq!(self.ask(words).as_deref(), Some(answer), "{words:?}");
    }
}

/// The value of a key of this kind. Its first page differs with each version, so that it is written.
fn value(kind: usize, version: usize) -> String {
    format!("{version:08}{}", format!("{kind:04}").repeat(1998))
}

/// Works until it is over: counts, has a queue, and sets and gets values of its own and those that nobody changes.
fn work(socket: &str, number: usize, is_over: &AtomicBool, answers: &AtomicU64) {
    let mut client = Client::connect(socket);
    let name = |what: &str| format!("{what}-{number}");
    for turn in 1_usize.. {
        let text = turn.to_string();
        client.must(&["incr", &name("count")], &text);
        client.must(&["rpush", &name("queue"), &text], "1");
        client.must(&["lpop", &name("queue")], &text);
        let own = format!("own-{number}-{}", turn % 50);
        let before = (turn > 50).then(|| value(turn - 50, number));
        assert_eq!(client.ask(&["get", &own]), before, "{own}");
        client.must(&["set", &own, &value(turn, number)], "OK");
        // All but the version, which `change` writes.
        let key = (turn * 7 + number) % KEYS;
        let found = client.ask(&["getrange", &format!("key-{key}"), "8", "-1"]).expect("a value");
        assert!(found == value(key % KINDS, 0)[8..], "key-{key} is {found}");
        answers.fetch_add(6, Ordering::Relaxed);
        if is_over.load(Ordering::Relaxed) {
            return;
        }
    }
}

/// A running `redis-server`. It ends with the test, whatever ends that.
struct Redis {
    child: Child,
    socket: String,
    /// The version of each kind.
    versions: Vec<usize>,
    /// The kind that is changed next. Its values have rested for longest.
    next: usize,
}

impl Redis {
    fn start(installed: &Installed) -> Option<Self> {
        if Command::new("redis-server").arg("--version").output().is_err() {
            eprintln!("skipped: no redis-server here: install redis-server");
            return None;
        }
        let socket = installed.text("redis");
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "redis-server", "--port", "0", "--save", "", "--unixsocket", &socket]);
        let child = command.arg("--dir").arg(installed.path("")).stdout(Stdio::null()).spawn().expect("setpriv");
        let redis = Self { child, socket, versions: vec![0; KINDS], next: 0 };
        wait_for("redis answers", || UnixStream::connect(&redis.socket).is_ok().then_some(()));
        let mut client = Client::connect(&redis.socket);
        (0..KEYS).for_each(|key| client.must(&["set", &format!("key-{key}"), &value(key % KINDS, 0)], "OK"));
        Some(redis)
    }

    fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Writes the values of some kinds where they lie.
    fn change(&mut self, client: &mut Client) {
        for kind in (0..CHANGED_KINDS).map(|n| (self.next + n) % KINDS).collect::<Vec<_>>() {
            self.versions[kind] += 1;
            let version = format!("{:08}", self.versions[kind]);
            for key in (kind..KEYS).step_by(KINDS) {
                client.must(&["setrange", &format!("key-{key}"), "0", &version], &(8 + 4 * 1998).to_string());
            }
        }
        self.next = (self.next + CHANGED_KINDS) % KINDS;
    }

    fn assert_values(&self, client: &mut Client) {
        for key in 0..KEYS {
            let found = client.ask(&["get", &format!("key-{key}")]);
            assert!(found == Some(value(key % KINDS, self.versions[key % KINDS])), "key-{key} is {found:?}");
        }
    }

    /// Pages that are its own in mappings of the pool.
    fn broken(&self) -> u64 {
        let all = Mapping::read_all(self.pid()).expect("its mappings");
        let pooled = all.iter().filter(|mapping| mapping.name.contains("pagefold"));
        pooled.map(|mapping| mapping.usage.anonymous_bytes / 4096).sum()
    }

    /// Entries that are there at two looks. Ten times a second, Redis opens a file for a moment, to learn how much memory it has.
    fn listed(&self, what: &str) -> Vec<String> {
        let look = || {
            let entries = fs::read_dir(format!("/proc/{}/{what}", self.pid())).expect("it runs");
            entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect::<BTreeSet<_>>()
        };
        let first = look();
        thread::sleep(Duration::from_millis(30));
        first.intersection(&look()).cloned().collect()
    }

    /// Its files and threads, and its mappings.
    fn look(&self) -> ([Vec<String>; 2], Mappings) {
        let maps = fs::read_to_string(format!("/proc/{}/maps", self.pid())).expect("it runs");
        assert!(!maps.contains("pagefold"), "{maps}");
        (["fd", "task"].map(|what| self.listed(what)), Mappings::of(&maps))
    }
}

/// All mappings of a process. Neighbours with the same rights and name count as one: the kernel does not always join them again.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Mappings {
    count: usize,
    bytes: u64,
}

impl Mappings {
    fn of(maps: &str) -> Self {
        let part = |line: &str| {
            let mut words = line.split_whitespace().map(str::to_owned);
            let range = words.next().expect("a range");
            let address = |text: &str| u64::from_str_radix(text, 16).expect("an address");
            let (start, end) = range.split_once('-').expect("a range");
            (address(start), address(end), words.next(), words.next_back())
        };
        let all: Vec<_> = maps.lines().map(part).collect();
        let joins = all.windows(2).filter(|two| (&two[0].1, &two[0].2, &two[0].3) == (&two[1].0, &two[1].2, &two[1].3));
        Self { count: all.len() - joins.count(), bytes: all.iter().map(|(start, end, ..)| end - start).sum() }
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// One cycle; returns how many pages were folded and broken.
fn cycle(installed: &Installed, redis: &mut Redis, client: &mut Client) -> [u64; 2] {
    let pid = redis.pid().to_string();
    let mut attach = Command::new(installed.path("pagefold"));
    attach.args(["attach", &pid, "--group", "acme", "--all-anonymous", "--json"]);
    attach.env("PAGEFOLD_DIR", installed.path("s")).env("PAGEFOLD_EAGER", "1");
    json_of(&attach.output().expect("run pagefold"));
    let folded = wait_for_within(PATIENCE, "it is folded", || {
        installed.show("acme")["sharing_pages"].as_u64().filter(|pages| *pages >= FOLDED)
    });
    // Pages that are not folded yet are written, too: then others are in the next turn.
    let broken = wait_for_within(PATIENCE, "folded pages are broken", || {
        redis.change(client);
        let enough = Some(redis.broken()).filter(|pages| *pages >= BROKEN);
        enough.or_else(|| {
            thread::sleep(Duration::from_millis(200));
            None
        })
    });
    json_of(&installed.pagefold(&["detach", &pid, "--json", "--wait", "120"]));
    [folded, broken]
}

#[test]
fn redis_with_clients_is_left_as_it_was_by_each_of_many_cycles() {
    let Some(installed) = Installed::attaching() else { return };
    let Some(mut redis) = Redis::start(&installed) else { return };
    let _supervisor = installed.serve("[[group]]\nname = 'acme'\n", &[]);
    let (is_over, answers, socket) = (AtomicBool::new(false), AtomicU64::new(0), redis.socket.clone());
    let (began, long) = (Instant::now(), Duration::from_secs(seconds(0)));
    let mut least = [u64::MAX; 2];
    let mut cycles = 0;
    thread::scope(|scope| {
        let over = Over(&is_over);
        let (is_over, answers, socket) = (&is_over, &answers, &socket[..]);
        let client = |number| scope.spawn(move || work(socket, number, is_over, answers));
        let clients: Vec<_> = (0..CLIENTS).map(client).collect();
        let mut client = Client::connect(socket);
        wait_for("clients work", || (answers.load(Ordering::Relaxed) > 10_000).then_some(()));
        let (before, mappings) = redis.look();
        while cycles < CYCLES || (cycles < MOST_CYCLES && began.elapsed() < long) {
            let answered = answers.load(Ordering::Relaxed);
            let counts = cycle(&installed, &mut redis, &mut client);
            least = [0, 1].map(|n| least[n].min(counts[n]));
            let (now, its) = redis.look();
            assert_eq!(now, before, "files and threads after cycle {cycles}");
            assert_eq!(its, mappings, "mappings after cycle {cycles}");
            assert!(clients.iter().all(|client| !client.is_finished()), "a client has ended in cycle {cycles}");
            assert!(answers.load(Ordering::Relaxed) > answered, "no client was answered in cycle {cycles}");
            cycles += 1;
        }
        redis.assert_values(&mut client);
        drop(over);
    });
    let (answers, took) = (answers.load(Ordering::Relaxed), began.elapsed());
    eprintln!(
        "{cycles} cycles in {took:.1?}: at least {least:?} pages folded and broken in each; {answers} answers were right"
    );
}

/// Ends the clients, also when the test fails.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
