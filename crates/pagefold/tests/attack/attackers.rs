//! Those who attack: users of the host without a member, members that lie, one that thrashes in its control group, and guests that lie.

use crate::common::lies::{LIES as LIES_OF_GUESTS, TRUTHS};
use crate::common::service::{Member, Service, small_memory, torture};
use crate::common::supervised::Fake;
use crate::common::{self, Afterwards};
use crate::guests::Guests;
use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Users without a member that attack.
const USERS: [u32; 2] = [70_001, 70_002];
/// Kinds of attacks, of each user on each socket: see `fake_agent/attack.rs`.
const KINDS: [&str; 6] = ["junk", "knock", "stare", "ask", "prove", "hello"];
/// Lies of members of acme: see `torture hostile`. Members that are cut off come back.
const LIES: [&str; 9] = [
    "garbage",
    "truncated",
    "flood",
    "deaf",
    "fingerprints",
    "foreign-slots",
    "foreign-releases",
    "window",
    "statistics",
];
/// Memory limit of the tenant that thrashes: 32 MiB.
const LIMIT: u64 = 32 << 20;
/// Reads a file of twice the limit again and again.
const THRASHES: &str = "head -c 64M /dev/zero > $1/thrash; while :; do cat $1/thrash > /dev/null; done";
/// Beginning of a command that runs when nobody else wants the processor. It has a session of its own, to which the kernel gives the least
/// share beside others (`sched_autogroup_enabled`). It is idle within that. In the tests' session, idle threads had a part of a processor by their number.
const IDLE: [&str; 5] =
    ["setsid", "sh", "-c", "echo 19 > /proc/self/autogroup 2> /dev/null; exec chrt --idle 0 \"$@\"", "sh"];

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Attack {
    Strangers,
    Liars,
    Thrashing,
    Guests,
}

impl Attack {
    pub const ALL: [Self; 4] = [Self::Strangers, Self::Liars, Self::Thrashing, Self::Guests];
}

/// Attackers at work. Dropping them ends them.
#[derive(Default)]
pub struct Attackers {
    fakes: Vec<Fake>,
    members: Vec<Member>,
    guests: Option<Guests>,
    _memory: Option<Afterwards>,
}

impl Attackers {
    /// `None`, with the reason printed, where this host lacks something.
    pub fn begin(attack: Attack, service: &Service) -> Option<Self> {
        let mut attackers = Self::default();
        match attack {
            Attack::Strangers => {
                let all = sockets(&service.place());
                attackers.fakes = USERS.map(|user| stranger(service, user, &all)).into();
            }
            Attack::Liars => attackers.members = LIES.map(|lie| liar(service, lie)).into(),
            Attack::Thrashing => {
                let (group, memory) = small_memory(&service.group("thrash"), LIMIT)?;
                let words = format!("echo $$ > {group}/cgroup.procs; {THRASHES}");
                let mut command = Command::new(IDLE[0]);
                let (variable, token) = service.mark();
                command.args(&IDLE[1..]).args(["sh", "-c", &words, "sh"]).arg(parent(service)).env(variable, token);
                attackers.members = vec![Member::spawn(command, "thrashing", &parent(service))];
                attackers._memory = Some(memory);
            }
            Attack::Guests => attackers.guests = Some(Guests::begin(service, LIES_OF_GUESTS)?),
        }
        Some(attackers)
    }

    /// As many processes and threads at the same priority that attack nothing of the service's. Strangers do the same to sockets of another
    /// program, guests do as much without a lie, and others compute. The kernel divides processors, and does what they ask of it; that is not
    /// ours. `None`, with the reason printed, where this host lacks something.
    pub fn stand_in(attack: Attack, service: &Service) -> Option<Self> {
        let count = match attack {
            Attack::Strangers => {
                let mut sink = fake(service, &[]);
                let place = parent(service).join("sink");
                let path =
                    |socket: PathBuf| place.join(socket.strip_prefix(service.place()).expect("one of the service's"));
                let others: Vec<PathBuf> = sockets(&service.place()).into_iter().map(path).collect();
                let dirs = others.iter().filter_map(|path| path.parent());
                dirs.for_each(|dir| fs::create_dir_all(dir).expect("make a directory"));
                others.iter().for_each(|path| assert_eq!(sink.tell(&format!("sink {}", path.display())), "ok"));
                let mut fakes = vec![sink];
                fakes.extend(USERS.map(|user| stranger(service, user, &others)));
                return Some(Self { fakes, ..Self::default() });
            }
            Attack::Guests => return Some(Self { guests: Some(Guests::begin(service, TRUTHS)?), ..Self::default() }),
            Attack::Liars => LIES.len(),
            Attack::Thrashing => 1,
        };
        let spins = |_| {
            let mut fake = fake(service, &IDLE);
            assert_eq!(fake.tell("attack spin -"), "ok");
            fake
        };
        Some(Self { fakes: (0..count).map(spins).collect(), ..Self::default() })
    }

    /// As many liars that are members of another program, which reads what they send and does nothing with it.
    pub fn elsewhere(service: &Service) -> Self {
        let mut drain = fake(service, &[]);
        let socket = parent(service).join("drain.sock");
        let socket = socket.to_str().expect("a plain path");
        let _ = fs::remove_file(socket);
        assert_eq!(drain.tell(&format!("drain {socket}")), "ok");
        let program = torture();
        let liar = |lie| {
            let words = [&IDLE[..], &lying(&program, socket, lie), &["--until-hangup"]].concat();
            let (variable, token) = service.mark();
            let mut command = Command::new(words[0]);
            command.args(&words[1..]).env(variable, token);
            Member::spawn(command, &format!("elsewhere-{lie}"), &parent(service))
        };
        Self { fakes: vec![drain], members: LIES.map(liar).into(), ..Self::default() }.that_have_begun()
    }

    /// Waits until all members run the programs that attack: to start these takes time, too.
    pub fn that_have_begun(self) -> Self {
        let name = |member: &Member| fs::read_to_string(format!("/proc/{}/comm", member.pid())).unwrap_or_default();
        common::service::until(60, "liars have begun", || {
            self.members.iter().all(|member| name(member) == "torture\n")
        });
        self
    }

    /// Ends them. Each has attacked until then.
    pub fn end(mut self, service: &Service) {
        self.members.iter_mut().for_each(Member::assert_is_well);
        for fake in &mut self.fakes {
            assert!(fake.tell("state").starts_with("closed"), "it is no member: {}", service.log());
        }
        if let Some(guests) = self.guests.take() {
            guests.end(service);
        }
    }
}

/// Directory of a service's directory.
fn parent(service: &Service) -> PathBuf {
    service.place().parent().expect("a directory").to_owned()
}

/// A user without a member who attacks all of these sockets.
fn stranger(service: &Service, user: u32, sockets: &[PathBuf]) -> Fake {
    let mut fake = fake(service, &IDLE);
    assert_eq!(fake.tell(&format!("become {user}")), "ok");
    assert!(sockets.len() >= 6, "{sockets:?}");
    for socket in sockets {
        // Sockets of other users' own take nothing from this one, whatever it is.
        let is_own = socket.to_string_lossy().contains("/users/");
        for kind in KINDS.into_iter().filter(|kind| !is_own || *kind == "knock") {
            assert_eq!(fake.tell(&format!("attack {kind} {}", socket.display())), "ok");
        }
    }
    fake
}

/// A process that does as it is told, begun by these words.
fn fake(service: &Service, begin: &[&str]) -> Fake {
    let program = Path::new(env!("CARGO_BIN_EXE_pagefold")).with_file_name("fake_agent");
    let program = program.to_str().expect("a plain path");
    let words = [begin, &[program]].concat();
    let (variable, token) = service.mark();
    Fake::start(Command::new(words[0]).args(&words[1..]).env(variable, token))
}

/// All sockets in a directory and below it.
fn sockets(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).expect("list a directory").flatten() {
        match entry.file_type() {
            Ok(kind) if kind.is_dir() => found.extend(sockets(&entry.path())),
            Ok(kind) if kind.is_socket() => found.push(entry.path()),
            _ => {}
        }
    }
    found
}

/// A member of acme that lies until it is ended.
fn liar(service: &Service, lie: &str) -> Member {
    let (socket, torture) = (service.agent_socket(), torture());
    let words = lying(&torture, &socket, lie);
    service.run("acme", &format!("liar-{lie}"), &[], &[&IDLE[..], &words, &["--until-hangup"]].concat())
}

/// The words that begin a liar.
fn lying<'a>(torture: &'a str, socket: &'a str, lie: &'a str) -> [&'a str; 9] {
    ["env", "-u", "LD_PRELOAD", torture, "hostile", "--socket", socket, "--lie", lie]
}
