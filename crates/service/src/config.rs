//! The configuration of a service.
//!
//! `docs/pagefold.toml` is an annotated example with every key, which a test reads.
//!
//! A rule must name a user or a control group. A program's path alone proves nothing: any user may run any program,
//! with any library loaded into it.

use crate::balance_config::{Balance, WrittenBalance, WrittenGuest};
use crate::enrol_config::{MOST_RULES, WrittenEnrol};
use crate::history_config::{History, WrittenHistory};
use crate::park_config::{Park, WrittenPark};
use crate::sketch_config::{Sketch, WrittenSketch};
use crate::tokens;
use api::change::{Change, HugePages, IndexSize, PoolSize, ScanRate, from_word};
use api::control::{Fold, Latency, Settings, ZeroPolicy};
use api::enrol::{NOT_ONE_DOMAIN, Rule, Via};
use api::name;
use api::setup::Token;
use guest::Glob;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use toml::Spanned;

/// Longest configuration file that is read: 4 MiB, which is room for some thousands of groups.
const MOST_FILE_BYTES: u64 = 4 << 20;
/// Users that workers of root's service run as, unless the configuration names others: the range that systemd sets
/// aside for services with dynamic users.
pub const WORKER_UIDS: Range<u32> = 61_184..65_520;

/// Longest path of a Unix socket that the kernel takes, in bytes (unix(7)).
const LONGEST_SOCKET_PATH: usize = 107;
/// Length of the longest name of a socket in the service's directory, with the slash before it, in bytes.
const LONGEST_SOCKET_NAME: usize = "/control.sock".len();

/// Group of users who may connect to the web side's socket, unless another one is configured.
const USUAL_GROUP: &str = "pagefold";

/// The configuration of a service, checked.
#[derive(Clone, Debug, Default)]
pub struct Config {
    /// The file from which the configuration was read.
    pub file: Option<PathBuf>,
    /// The service's directory; `None`: the usual one of its user.
    pub dir: Option<PathBuf>,
    /// Whether root's service runs no prover.
    pub without_prover: bool,
    /// Whether all processes of this host trust each other, so that ksmd may merge members' pages.
    pub one_trust_domain: bool,
    /// Available memory that must be left for other programs when folded pages become private again, in bytes; `None`:
    /// a part of the host's memory.
    pub reserve: Option<u64>,
    /// Users that workers of root's service run as, one for each group; `None`: [`WORKER_UIDS`].
    pub worker_uids: Option<Range<u32>>,
    /// The web side; `None`: there is none.
    pub api: Option<Api>,
    /// How memory is balanced between guests; `None`: every guest keeps its size.
    pub balance: Option<Balance>,
    /// Guests that are parked when they are idle; `None`: none is.
    pub park: Option<Park>,
    /// Number of `[[guest]]` parts that have no effect, because there is no `[balance]`.
    pub vain_guarantees: usize,
    /// Sketches of guests' contents; `None`: there are none.
    pub sketch: Option<Sketch>,
    /// Figures of groups and members over time; `None`: none are kept.
    pub history: Option<History>,
    /// Rules that enrol running processes.
    pub enrol: Vec<Rule>,
    /// The groups. `None` without a configuration: any group may be made, by the service's own user.
    pub groups: Option<BTreeMap<String, GroupConfig>>,
}

/// The configuration of the web side.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Api {
    /// The path of its Unix socket; `None`: the usual one, in the service's directory.
    pub socket: Option<PathBuf>,
    /// The group of users who may connect there; `None`: the service's own user alone.
    pub group: Option<u32>,
    /// The address at which it also listens.
    pub listen: Option<SocketAddr>,
    /// The file with tokens.
    pub tokens_file: Option<PathBuf>,
    /// The tokens of that file.
    pub tokens: Vec<Token>,
    /// Whether settings may be changed through it.
    pub control: bool,
}

/// The configuration of a group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GroupConfig {
    /// Users who may start members and change settings, besides root and the service's user.
    pub users: Vec<u32>,
    /// The group's settings, before any change on the fly.
    pub settings: Settings,
    /// Rules for processes that become members when they connect, although `pagefold run` has not registered them.
    pub processes: Vec<ProcessRule>,
}

/// A rule for processes that belong to a group: every property that is given must fit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProcessRule {
    /// Effective user of the process when it connected.
    pub uid: Option<u32>,
    /// Pattern for one of the process's control groups.
    pub cgroup: Option<Glob>,
    /// Pattern for the path of the process's program.
    pub program: Option<Glob>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Written {
    #[serde(default)]
    service: WrittenService,
    api: Option<WrittenApi>,
    balance: Option<WrittenBalance>,
    sketch: Option<WrittenSketch>,
    park: Option<WrittenPark>,
    history: Option<WrittenHistory>,
    #[serde(default)]
    guest: Vec<WrittenGuest>,
    #[serde(default)]
    group: Vec<WrittenGroup>,
    #[serde(default)]
    enrol: Vec<Spanned<WrittenEnrol>>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
struct WrittenService {
    dir: Option<Spanned<PathBuf>>,
    worker_uid_base: Option<Spanned<u32>>,
    prover: Option<bool>,
    one_trust_domain: Option<bool>,
    #[serde(default, deserialize_with = "from_word")]
    reserve: Option<Bytes>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
struct WrittenApi {
    socket: Option<Spanned<PathBuf>>,
    group: Option<Spanned<String>>,
    listen: Option<Spanned<String>>,
    tokens: Option<PathBuf>,
    control: Option<bool>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct WrittenGroup {
    name: Spanned<String>,
    #[serde(default)]
    users: Vec<Spanned<User>>,
    #[serde(default, deserialize_with = "from_word")]
    scan_rate: Option<ScanRate>,
    zero_pages: Option<ZeroPolicy>,
    #[serde(default, deserialize_with = "from_word")]
    huge_pages: Option<HugePages>,
    fold: Option<Fold>,
    intra_member_only: Option<bool>,
    #[serde(default, deserialize_with = "from_word")]
    pool: Option<PoolSize>,
    #[serde(default, deserialize_with = "from_word")]
    index_memory: Option<IndexSize>,
    latency: Option<Latency>,
    #[serde(default)]
    processes: Vec<Spanned<WrittenRule>>,
}

#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct WrittenRule {
    uid: Option<User>,
    cgroup: Option<String>,
    program: Option<String>,
}

#[derive(Clone, Deserialize)]
#[serde(untagged, expecting = "expected a user's number, or its name in quotes")]
pub(crate) enum User {
    Number(u32),
    Name(String),
}

impl User {
    /// The user's number. `at` is the place in the text at which the user is written.
    pub(crate) fn number(&self, at: usize, uid_of: fn(&str) -> Option<u32>) -> Result<u32, Wrong> {
        match self {
            Self::Number(uid) => Ok(*uid),
            Self::Name(name) => {
                uid_of(name).ok_or_else(|| Wrong(at, format!("this host has no user {name:?}: write its number")))
            }
        }
    }
}

/// Bytes, as a size in text.
pub(crate) struct Bytes(pub u64);

impl FromStr for Bytes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        cli::size::parse_bytes(text).map(Self)
    }
}

/// An error in a configuration file: its place (a byte of the text), and its description.
pub(crate) struct Wrong(pub usize, pub String);

impl Config {
    /// Reads a configuration file, and the file with tokens if the configuration names one.
    ///
    /// # Errors
    /// One of the two files cannot be read, or is not valid: the error names file, line and key.
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let bytes = host::read_plain_file(path, MOST_FILE_BYTES)?;
        let wrong = |why| anyhow::anyhow!("{}: {why}", path.display());
        let text = String::from_utf8(bytes).map_err(|e| wrong(format!("not text: {}", e.utf8_error())))?;
        let mut config = Self::parse(&text, user_number).map_err(wrong)?;
        if let Some(api) = &mut config.api {
            api.tokens = api.tokens_file.as_deref().map(tokens::read).transpose()?.unwrap_or_default();
        }
        Ok(Self { file: Some(path.to_owned()), ..config })
    }

    fn parse(text: &str, uid_of: fn(&str) -> Option<u32>) -> Result<Self, String> {
        let written: Written = toml::from_str(text).map_err(|e| {
            let at = e.span().map_or(0, |span| span.start);
            in_line(text, &Wrong(at, e.message().replace('\n', ", ")))
        })?;
        Self::check(written, uid_of).map_err(|wrong| in_line(text, &wrong))
    }

    fn check(written: Written, uid_of: fn(&str) -> Option<u32>) -> Result<Self, Wrong> {
        let worker_uids = written.service.worker_uid_base.as_ref().map(worker_uids).transpose()?;
        let mut groups = BTreeMap::new();
        for group in written.group {
            let at = group.name.span().start;
            let name = group.name.get_ref().clone();
            name::check("group", &name).map_err(|why| Wrong(at, why))?;
            if groups.insert(name.clone(), group.check(uid_of)?).is_some() {
                return Err(Wrong(at, format!("there are two groups \"{name}\"")));
            }
        }
        let WrittenService { dir, prover, one_trust_domain, reserve, .. } = written.service;
        let dir = dir.map(|dir| for_sockets(dir, LONGEST_SOCKET_NAME)).transpose()?;
        let one_trust_domain = one_trust_domain == Some(true);
        let (without_prover, reserve) = (prover == Some(false), reserve.map(|reserve| reserve.0));
        let api = written.api.map(WrittenApi::check).transpose()?;
        let vain_guarantees = if written.balance.is_none() { written.guest.len() } else { 0 };
        let balance = written.balance.map(|balance| balance.check(written.guest)).transpose()?;
        let sketch = written.sketch.map(WrittenSketch::check).transpose()?;
        let park = written.park.map(WrittenPark::check).transpose()?;
        let history = written.history.map(WrittenHistory::check).transpose().map_err(|(at, why)| Wrong(at, why))?;
        let takes = |via| match via {
            Via::Agent if without_prover => Err("attaching takes a prover, and [service] has prover = false"),
            Via::Ksm if !one_trust_domain => Err(NOT_ONE_DOMAIN),
            _ => Ok(()),
        };
        let enrol = rules(written.enrol, &groups, takes, uid_of)?;
        Ok(Self {
            file: None,
            dir,
            without_prover,
            one_trust_domain,
            reserve,
            worker_uids,
            api,
            balance,
            park,
            vain_guarantees,
            sketch,
            history,
            enrol,
            groups: Some(groups),
        })
    }
}

/// Users that workers run as: a range that begins with `base`.
fn worker_uids(base: &Spanned<u32>) -> Result<Range<u32>, Wrong> {
    match *base.get_ref() {
        first if (100..1 << 31).contains(&first) => Ok(first..first + WORKER_UIDS.len() as u32),
        first => {
            let why = format!("{first} is no user for workers: use 100 or more, such as 61184");
            Err(Wrong(base.span().start, why))
        }
    }
}

fn rules(
    written: Vec<Spanned<WrittenEnrol>>,
    groups: &BTreeMap<String, GroupConfig>,
    takes: impl Fn(Via) -> Result<(), &'static str>,
    uid_of: fn(&str) -> Option<u32>,
) -> Result<Vec<Rule>, Wrong> {
    let mut rules = Vec::new();
    for rule in written {
        let at = rule.span().start;
        if rules.len() == MOST_RULES {
            return Err(Wrong(at, format!("there are more than {MOST_RULES} rules")));
        }
        let rule = rule.into_inner().check(|group| groups.contains_key(group), uid_of)?;
        takes(rule.via).map_err(|why| Wrong(at, why.into()))?;
        rules.push(rule);
    }
    Ok(rules)
}

impl WrittenApi {
    fn check(self) -> Result<Api, Wrong> {
        let socket = match self.socket {
            Some(path) if !path.get_ref().is_absolute() => {
                return Err(Wrong(path.span().start, "a path that begins with / is needed".into()));
            }
            path => path.map(|path| for_sockets(path, 0)).transpose()?,
        };
        let group = match self.group {
            // A host may do without the usual group: then only root may connect.
            None => group_number(USUAL_GROUP),
            Some(name) => Some(group_number(name.get_ref()).ok_or_else(|| {
                let why = format!(
                    "this host has no group of users {:?}: make it (groupadd --system), or name another",
                    name.get_ref()
                );
                Wrong(name.span().start, why)
            })?),
        };
        let listen = self.listen.map(|text| {
            let at = text.span().start;
            if self.tokens.is_none() {
                return Err(Wrong(
                    at,
                    "at a TCP socket callers are known by tokens alone: name a file of tokens".into(),
                ));
            }
            address(text.get_ref()).ok_or_else(|| {
                Wrong(
                    at,
                    format!("{:?} is no address: use a port, or an address such as 127.0.0.1:9469", text.get_ref()),
                )
            })
        });
        let control = self.control == Some(true);
        Ok(Api { socket, group, listen: listen.transpose()?, tokens_file: self.tokens, tokens: Vec::new(), control })
    }
}

/// A path, unless a socket there would have a longer path than the kernel takes. `name_bytes` is the length of the
/// longest socket name to be appended.
fn for_sockets(path: Spanned<PathBuf>, name_bytes: usize) -> Result<PathBuf, Wrong> {
    let bytes = path.get_ref().as_os_str().len() + name_bytes;
    if bytes > LONGEST_SOCKET_PATH {
        let why =
            format!("paths of sockets have {LONGEST_SOCKET_PATH} bytes at most, and here {bytes}: use a shorter one");
        return Err(Wrong(path.span().start, why));
    }
    Ok(path.into_inner())
}

/// An address to listen at. A port alone means this port at 127.0.0.1.
fn address(text: &str) -> Option<SocketAddr> {
    let port = text.parse::<u16>().ok().map(|port| SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
    port.or_else(|| text.parse().ok())
}

impl WrittenGroup {
    fn check(self, uid_of: fn(&str) -> Option<u32>) -> Result<GroupConfig, Wrong> {
        let known = |user: &User, at: usize| user.number(at, uid_of);
        let users = self.users.iter().map(|u| known(u.get_ref(), u.span().start)).collect::<Result<_, _>>()?;
        let rule = |written: &Spanned<WrittenRule>| {
            let at = written.span().start;
            let WrittenRule { uid, cgroup, program } = written.get_ref();
            let glob = |text: &Option<String>| text.as_ref().map(|t| t.parse::<Glob>()).transpose();
            if uid.is_none() && cgroup.is_none() {
                let why = "a rule for processes must name a uid or a cgroup: any user may run any program";
                return Err(Wrong(at, why.to_owned()));
            }
            Ok(ProcessRule {
                uid: uid.as_ref().map(|u| known(u, at)).transpose()?,
                cgroup: glob(cgroup).map_err(|why| Wrong(at, why))?,
                program: glob(program).map_err(|why| Wrong(at, why))?,
            })
        };
        let processes = self.processes.iter().map(rule).collect::<Result<_, _>>()?;
        let Self { scan_rate, zero_pages, huge_pages, fold, intra_member_only, pool, index_memory, latency, .. } = self;
        let change = Change { scan_rate, zero_pages, huge_pages, fold, intra_member_only, pool, index_memory, latency };
        let settings = change.apply(Settings::default());
        Ok(GroupConfig { users, settings, processes })
    }
}

impl ProcessRule {
    /// Whether the rule may fit a process of this user: it names this user, or none.
    pub fn is_for(&self, uid: u32) -> bool {
        self.uid.is_none_or(|wanted| wanted == uid)
    }

    /// Whether the rule fits this process of this user.
    pub fn fits(&self, uid: u32, process: &host::Process) -> bool {
        let program = || process.exe.as_ref().and_then(|exe| exe.to_str()).unwrap_or_default().to_owned();
        self.is_for(uid)
            && self.cgroup.as_ref().is_none_or(|glob| process.cgroups.paths().any(|path| glob.matches(path)))
            && self.program.as_ref().is_none_or(|glob| glob.matches(&program()))
    }
}

/// An error as it is shown, with line and key: `line 7, scan-rate: what is wrong`.
pub(crate) fn in_line(text: &str, Wrong(at, why): &Wrong) -> String {
    let before = text.get(..*at).unwrap_or(text);
    let number = 1 + before.matches('\n').count();
    let line = text.lines().nth(number - 1).unwrap_or_default();
    match line.split_once('=').map(|(key, _)| key.trim()) {
        Some(key) if !key.is_empty() && !why.contains(key) => format!("line {number}, {key}: {why}"),
        _ => format!("line {number}: {why}"),
    }
}

/// The number of a user, by name; `None` if there is none. The C library looks the name up (NSS): in files, by LDAP, or
/// by systemd.
fn user_number(name: &str) -> Option<u32> {
    uzers::get_user_by_name(name).map(|user| user.uid())
}

/// The number of a user group, by name, from the same sources.
fn group_number(name: &str) -> Option<u32> {
    uzers::get_group_by_name(name).map(|group| group.gid())
}

#[cfg(test)]
mod tests {
    use super::*;
    use host::Process;

    fn parse(text: &str) -> Result<BTreeMap<String, GroupConfig>, String> {
        let users = |name: &str| (name == "alice").then_some(1000);
        Config::parse(text, users).map(|config| config.groups.unwrap())
    }

    #[test]
    fn every_key_is_read() {
        let groups = parse(
            "[service]\ndir = '/run/x'\nworker-uid-base = 62000\n[[group]]\nname = 'acme'\nusers = ['alice', 7]\n\
             scan-rate = 1000\nzero-pages = 'when-idle'\nhuge-pages = 'never'\nfold = 'off'\nintra-member-only = true\n\
             pool = '1G'\nindex-memory = '16M'\nlatency = 'eager'\n[[group.processes]]\nuid = 'alice'\ncgroup = '/m/*'\n\
             program = '/usr/bin/qemu-*'\n[[group]]\nname = 'beta'\nhuge-pages = 30\nscan-rate = 'adaptive:5%'\n",
        )
        .unwrap();
        let acme = &groups["acme"];
        assert_eq!(acme.users, [1000, 7]);
        let expected = Settings {
            scan_rate: Some(1000),
            scan_budget_percent: None,
            zero_pages: ZeroPolicy::WhenIdle,
            split_huge_at_percent: None,
            fold: Fold::Off,
            intra_member_only: true,
            pool_slots: 1 << 18,
            index_pages: 1 << 20,
            latency: Latency::Eager,
        };
        assert_eq!(acme.settings, expected);
        let beta = &groups["beta"].settings;
        assert_eq!((beta.split_huge_at_percent, beta.scan_budget_percent), (Some(30), Some(5)));
        let mut process = Process { exe: Some("/usr/bin/qemu-kvm".into()), ..Process::default() };
        process.cgroups = host::Cgroups::parse("0::/m/vm1\n");
        let rule = &acme.processes[0];
        assert!(rule.fits(1000, &process) && !rule.fits(1001, &process));
        process.cgroups = host::Cgroups::parse("0::/n/m/vm1\n");
        assert!(!rule.fits(1000, &process));
        process.cgroups = host::Cgroups::parse("0::/m/vm1\n");
        process.exe = Some("/home/alice/qemu-kvm".into());
        assert!(!rule.fits(1000, &process));
        process.exe = None;
        assert!(!rule.fits(1000, &process));
    }

    #[test]
    fn rules_beyond_their_bound_are_refused_with_the_line() {
        let with = |count| format!("[[group]]\nname = 'a'\n{}", "[[enrol]]\ngroup = 'a'\nuser = 1\n".repeat(count));
        assert_eq!(Config::parse(&with(MOST_RULES), |_| None).unwrap().enrol.len(), MOST_RULES);
        let why = Config::parse(&with(MOST_RULES + 1), |_| None).expect_err("one too many");
        assert!(why.contains(&format!("line {}: there are more than 256 rules", 3 + 3 * MOST_RULES)), "{why}");
    }

    /// The keys that the parser knows in a table, by its own complaint about a key that it does not know.
    fn known_keys(table: &str) -> Vec<String> {
        let complaint = toml::from_str::<Written>(&format!("{table}\n'?' = 1\n")).err().expect("an unknown key");
        let expected = complaint.message().split("expected ").nth(1).expect("a list of keys");
        expected.split('`').skip(1).step_by(2).map(str::to_owned).collect()
    }

    #[test]
    fn annotated_example_has_every_key_and_usual_values() {
        let text = include_str!("../../../docs/pagefold.toml");
        // Keys that are usually left out stand behind a # without a space.
        let text = &text.replace("\n#", "\n").replace("\n ", "\n# ");
        let config = Config::parse(text, user_number).unwrap();
        assert_eq!(config.groups.unwrap()["acme"].settings, Settings::default());
        assert_eq!((config.worker_uids, config.without_prover), (Some(61_184..65_520), false));
        assert_eq!(config.reserve, Some(1 << 30));
        let balance = config.balance.unwrap();
        assert_eq!((&*balance.policy, balance.every_s, balance.floor_bytes), ("working-set", 5, Some(1 << 30)));
        let example: toml::Table = toml::from_str(text).unwrap();
        let (group, rule) = (&example["group"][0], &example["group"][0]["processes"][0]);
        for (place, header, table) in [
            ("the file", "", &toml::Value::Table(example.clone())),
            ("service", "[service]", &example["service"]),
            ("group", "[[group]]", group),
            ("api", "[api]", &example["api"]),
            ("balance", "[balance]", &example["balance"]),
            ("sketch", "[sketch]", &example["sketch"]),
            ("history", "[history]", &example["history"]),
            ("park", "[park]", &example["park"]),
            ("guest", "[[guest]]", &example["guest"][0]),
            ("group.processes", "[[group]]\nname = 'a'\n[[group.processes]]", rule),
            ("enrol", "[[enrol]]", &example["enrol"][0]),
        ] {
            let keys = known_keys(header);
            assert!(keys.len() > 1, "{place}: {keys:?}");
            for key in keys {
                assert!(table.get(&key).is_some(), "docs/pagefold.toml lacks the key {key} of {place}");
            }
        }
    }

    #[test]
    fn errors_name_line_and_key() {
        let group = |rest: &str| format!("[[group]]\nname = 'a'\n{rest}\n");
        for (text, words) in [
            ("[service]\nport = 1".to_owned(), "line 2: unknown field `port`"),
            (group("scan-rte = 1"), "line 3: unknown field `scan-rte`"),
            (group("scan-rate = 0"), "line 3, scan-rate: \"0\" is no scan rate"),
            (group("scan-rate = 'adaptive:0'"), "line 3, scan-rate: \"adaptive:0\" is no scan rate"),
            (group("scan-rate = true"), "line 3, scan-rate: expected a number or a text"),
            ("[sketch]\nevery = 'often'".to_owned(), "line 2, every: \"often\" is no time"),
            ("[sketch]\ndir = 'x'".to_owned(), "line 2, dir: a path that begins"),
            (group("huge-pages = 101"), "line 3, huge-pages: \"101\" is not when"),
            (group("zero-pages = 'drop'"), "line 3, zero-pages: unknown variant `drop`"),
            (group("fold = true"), "line 3, fold: "),
            (group("pool = 'lots'"), "line 3, pool: unknown unit"),
            (group("users = ['bob']"), "line 3, users: this host has no user \"bob\""),
            (group("users = [true]"), "line 3, users: expected a user's number"),
            (group("[[group.processes]]\nprogram = '*'"), "line 3: a rule for processes must name"),
            (group("[[group.processes]]\nuid = 1\ncgroup = ''"), "a pattern must not be empty"),
            (group("[[group]]\nname = 'a'"), "line 4, name: there are two groups \"a\""),
            ("[[group]]\nname = '../x'".to_owned(), "line 2: group name \"../x\""),
            ("[[group]]\nfold = 'on'".to_owned(), "missing field `name`"),
            ("[service]\nworker-uid-base = 0".to_owned(), "line 2, worker-uid-base: 0 is no user"),
            ("[service]\nreserve = 'much'".to_owned(), "line 2, reserve: unknown unit"),
            ("[service]\nprover = 'no'".to_owned(), "line 2, prover: invalid type: string \"no\", expected a boolean"),
            ("[service".to_owned(), "line 1: "),
            ("[api]\nlisten = '9469'".to_owned(), "line 2, listen: at a TCP socket callers are known by tokens"),
            ("[api]\ntokens = 't'\nlisten = 'here'".to_owned(), "line 3, listen: \"here\" is no address"),
            ("[api]\nsocket = 'api.sock'".to_owned(), "line 2, socket: a path that begins with /"),
            ("[api]\ngroup = 'no such group'".to_owned(), "line 2: this host has no group of users"),
            ("[api]\ncontrol = 1".to_owned(), "line 2, control: invalid type"),
            ("[balance]\npolicy = 'fair'".to_owned(), "line 2: there is no policy \"fair\"; use working-set"),
            ("[balance]\nmove-within = '0s'".to_owned(), "line 2, move-within: \"0s\" is no time"),
            ("[balance]\nevery = 0".to_owned(), "line 2, every: a round takes a second at least"),
            ("[balance]\n[[guest]]\nname = ''\nguaranteed = '1M'".to_owned(), "line 3: a pattern must not be empty"),
            ("[park]\nidle = '10m'".to_owned(), "line 2, idle: name guests (only) or groups"),
            ("[park]\nonly = ['a']".to_owned(), "missing field `idle`"),
            ("[park]\nidle = 'long'\nonly = ['a']".to_owned(), "line 2, idle: \"long\" is no time"),
            ("[park]\nidle = '0'\nonly = ['a']".to_owned(), "line 2, idle: a guest is looked at for a second"),
            ("[park]\nidle = '1m'\ngroups = ['-']".to_owned(), "line 3, groups: group name \"-\""),
            ("[[guest]]\nname = 'a'\nguaranteed = 'much'".to_owned(), "line 3, guaranteed: unknown unit"),
            ("[[guest]]\nguaranteed = '1M'".to_owned(), "missing field `name`"),
            ("[balance]\n[[guest]]\nname = 'a'\nmove-to = 'exec:x'".to_owned(), "line 4, move-to: use tcp:HOST:PORT"),
        ] {
            let error = parse(&text).unwrap_err();
            assert!(error.contains(words), "{text}\n-> {error}");
        }
        assert!(parse("").unwrap().is_empty());
        let missing = Config::read(Path::new("/nonexistent/x.toml")).unwrap_err().to_string();
        assert!(missing.contains("/nonexistent/x.toml"), "{missing}");
    }

    #[test]
    fn errors_of_rules_name_line_and_key() {
        let group = |rest: &str| format!("[[group]]\nname = 'a'\n{rest}\n");
        for (text, words) in [
            ("[[enrol]]\ngroup = 'a'\nuser = 1".to_owned(), "line 2: there is no [[group]] with the name \"a\""),
            ("[[enrol]]\nuser = 1".to_owned(), "missing field `group`"),
            (group("[[enrol]]\ngroup = 'a'"), "line 4: a rule must name a cgroup"),
            (group("[[enrol]]\ngroup = 'a'\nuser = 'bob'"), "line 5: this host has no user \"bob\""),
            (group("[[enrol]]\ngroup = 'a'\ncgroup = 'acme'"), "line 5, cgroup: use the path"),
            (group("[[enrol]]\ngroup = 'a'\ncgroup = '/a//b'"), "line 5, cgroup: use the path"),
            (group("[[enrol]]\ngroup = 'a'\nunit = ''"), "line 5, unit: a pattern must not be empty"),
            (group("[[enrol]]\ngroup = 'a'\ncontainer-label = 'acme'"), "line 5, container-label: use KEY=VALUE"),
            (
                group("[[enrol]]\ngroup = 'a'\ndomain = 'vm'\nall-anonymous = true"),
                "line 6: of a VM, its RAM is folded and nothing else",
            ),
            (group("[[enrol]]\ngroup = 'a'\ncgrup = '/a'"), "line 5: unknown field `cgrup`"),
            (group("[service]\nprover = false\n[[enrol]]\ngroup = 'a'\nuser = 1"), "line 5: attaching takes a prover"),
            (group("[[enrol]]\ngroup = 'a'\nuser = 1\nvia = 'ksm'"), "line 3: ksmd merges pages of any processes"),
            (
                group("[[enrol]]\ngroup = 'a'\nuser = 1\nvia = 'kvm'"),
                "line 6, via: \"kvm\" merges nothing: use agent or ksm",
            ),
        ] {
            let error = parse(&text).unwrap_err();
            assert!(error.contains(words), "{text}\n-> {error}");
        }
        let by_ksm = "[service]\nprover = false\none-trust-domain = true\n[[group]]\nname = 'a'\n[[enrol]]\ngroup = 'a'\nuser = 1\n\
                      via = 'ksm'\n";
        assert_eq!(Config::parse(by_ksm, |_| None).unwrap().enrol[0].via, Via::Ksm);
        let rule =
            "[[group]]\nname = 'a'\n[[enrol]]\ngroup = 'a'\ncgroup = '/a/*/b/'\nuser = 'alice'\nall-anonymous = true\n";
        let config = Config::parse(rule, |_| Some(7)).unwrap();
        let all = &config.enrol[0];
        assert_eq!((all.to_string().as_str(), all.all_anonymous), ("cgroup /a/*/b/, user 7", true));
    }

    #[test]
    fn web_side_is_at_loopback_unless_it_is_told_otherwise() {
        let api = |text: &str| Config::parse(text, |_| None).unwrap().api;
        assert_eq!(api(""), None);
        let usual = api("[api]").unwrap();
        assert_eq!((usual.listen, usual.control, usual.socket), (None, false, None));
        for (text, expected) in [("9469", "127.0.0.1:9469"), ("0.0.0.0:80", "0.0.0.0:80"), ("[::1]:80", "[::1]:80")] {
            let api = api(&format!("[api]\ngroup = 'root'\ntokens = 't'\nlisten = '{text}'\ncontrol = true")).unwrap();
            assert_eq!((api.listen.unwrap().to_string(), api.group, api.control), (expected.to_owned(), Some(0), true));
        }
    }

    #[test]
    fn root_is_known_by_name() {
        assert_eq!(user_number("root"), Some(0));
        assert_eq!(user_number("no such user"), None);
    }
}
