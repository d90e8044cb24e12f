//! Those who attack: users of the host without a member, members that lie, and one that thrashes in its control group.

use crate::common::Afterwards;
use crate::common::service::{Member, Service, small_memory, torture};
use crate::common::supervised::Fake;
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
/// Beginning of a command that runs when nobody else wants the processor.
const IDLE: [&str; 3] = ["chrt", "--idle", "0"];

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Attack {
    Strangers,
    Liars,
    Thrashing,
}

impl Attack {
    pub const ALL: [Self; 3] = [Self::Strangers, Self::Liars, Self::Thrashing];
}

/// Attackers at work. Dropping them ends them.
pub struct Attackers {
    fakes: Vec<Fake>,
    members: Vec<Member>,
    _memory: Option<Afterwards>,
}

impl Attackers {
    /// `None`, with the reason printed, where this host lacks something.
    pub fn begin(attack: Attack, service: &Service) -> Option<Self> {
        let mut attackers = Self { fakes: Vec::new(), members: Vec::new(), _memory: None };
        match attack {
            Attack::Strangers => attackers.fakes = USERS.map(|user| stranger(service, user)).into(),
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
        }
        Some(attackers)
    }

    /// Ends them. Each has attacked until then.
    pub fn end(mut self, service: &Service) {
        self.members.iter_mut().for_each(Member::assert_is_well);
        for fake in &mut self.fakes {
            assert!(fake.tell("state").starts_with("closed"), "it is no member: {}", service.log());
        }
    }
}

/// Directory of a service's directory.
fn parent(service: &Service) -> PathBuf {
    service.place().parent().expect("a directory").to_owned()
}

/// A user without a member who attacks all sockets of a service.
fn stranger(service: &Service, user: u32) -> Fake {
    let program = Path::new(env!("CARGO_BIN_EXE_pagefold")).with_file_name("fake_agent");
    let (variable, token) = service.mark();
    let mut fake = Fake::start(Command::new(IDLE[0]).args(&IDLE[1..]).arg(program).env(variable, token));
    assert_eq!(fake.tell(&format!("become {user}")), "ok");
    let sockets = sockets(&service.place());
    assert!(sockets.len() >= 6, "{sockets:?}");
    for socket in sockets {
        for kind in KINDS {
            assert_eq!(fake.tell(&format!("attack {kind} {}", socket.display())), "ok");
        }
    }
    fake
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
    let words = ["env", "-u", "LD_PRELOAD", &torture, "hostile", "--socket", &socket, "--lie", lie];
    service.run("acme", &format!("liar-{lie}"), &[], &[&IDLE[..], &words, &["--until-hangup"]].concat())
}
