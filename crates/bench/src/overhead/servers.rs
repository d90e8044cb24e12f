//! Servers: two instances of each hold the same data, and the first gets the requests of the server's own benchmark
//! program.

use super::{USUAL, Workload};
use crate::side::{Running, Side};
use anyhow::{Context, ensure};
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};

pub(super) const REDIS: Workload = Workload {
    name: "redis",
    unit: "SET and GET of 300 bytes",
    cap: USUAL,
    floor: 5000,
    needs: &[("redis-server", "redis-server"), ("redis-benchmark", "redis-tools")],
    recipe: redis,
};

pub(super) const MARIADB: Workload = Workload {
    name: "mariadb",
    unit: "transaction of sysbench OLTP",
    cap: USUAL,
    floor: 1000,
    needs: &[("mariadbd", "mariadb-server"), ("mariadb-admin", "mariadb-client"), ("sysbench", "sysbench")],
    recipe: mariadb,
};

pub(super) const POSTGRES: Workload = Workload {
    name: "postgres",
    unit: "transaction of pgbench",
    cap: USUAL,
    // Most memory is that of the server's forked children, which are not enrolled for folding.
    floor: 0,
    needs: &[("pgbench", "postgresql-client-common")],
    recipe: postgres,
};

/// Names of the two instances of a server, which have the same data. Only the first gets requests.
pub const NAMES: [&str; 2] = ["one", "other"];

/// Whether a command succeeds, as a sign that the server answers.
fn succeeds(words: &[&str]) -> bool {
    let mut command = Command::new(words[0]);
    command.args(&words[1..]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

// --- Redis

/// Command line of a Redis that writes nothing to disk.
pub fn redis_words(socket: &str) -> [&str; 9] {
    ["redis-server", "--port", "0", "--unixsocket", socket, "--save", "", "--appendonly", "no"]
}

/// Whether the Redis at this socket answers.
pub fn redis_answers(socket: &str) -> bool {
    succeeds(&["redis-cli", "-s", socket, "ping"])
}

/// A command for Redis that sets a key to its value of 300 bytes: the keys are those that redis-benchmark asks for.
pub fn redis_set(key: u64) -> String {
    format!("SET key:{key:012} {key:010}{}\r\n", "0123456789".repeat(29))
}

/// Fills both instances with the same keys.
///
/// # Errors
/// An instance does not answer.
pub fn fill_redis(side: &Side, keys: u64) -> anyhow::Result<()> {
    let load = side.path("load")?;
    fs::write(&load, (0..keys).map(redis_set).collect::<String>()).with_context(|| format!("cannot write {load}"))?;
    for name in NAMES {
        side.aside(&["sh", "-c", &format!("redis-cli -s {} --pipe < {load}", side.path(&format!("{name}.sock"))?)])?;
    }
    Ok(())
}

fn redis_server(side: &Side, name: &str) -> anyhow::Result<Running> {
    let socket = side.path(&format!("{name}.sock"))?;
    side.serve(name, None, &redis_words(&socket), || redis_answers(&socket))
}

fn redis(side: &Side) -> anyhow::Result<f64> {
    let keys = side.amount(100_000, 5000);
    let _servers = NAMES.map(|name| redis_server(side, name)).into_iter().collect::<anyhow::Result<Vec<_>>>()?;
    fill_redis(side, keys)?;
    side.rest()?;
    let (requests, socket) = (side.amount(1_200_000, 10_000), side.path("one.sock")?);
    let (n, range) = (requests.to_string(), keys.to_string());
    let words = ["redis-benchmark", "-s", &socket, "-t", "set,get", "-n", &n, "-r", &range, "-d", "300", "-q"];
    Ok(side.aside(&words)?.1 / (2 * requests) as f64)
}

// --- MariaDB

/// Settings with which a commit waits for no disk.
const MARIADB_SETTINGS: &str = "--no-defaults --user=root --skip-networking --skip-grant-tables \
    --innodb-buffer-pool-size=128M --innodb-log-file-size=64M --innodb-flush-log-at-trx-commit=0";

fn mariadb_server(side: &Side, name: &str, data: &str, is_measured: bool) -> anyhow::Result<Running> {
    let (data, socket) = (format!("--datadir={data}"), format!("--socket={}", side.path(&format!("{name}.sock"))?));
    let settings = MARIADB_SETTINGS.split_whitespace();
    let words: Vec<&str> = ["mariadbd"].into_iter().chain(settings).chain([&data[..], &socket]).collect();
    let answers = || succeeds(&["mariadb-admin", "--no-defaults", &socket, "ping"]);
    if is_measured { side.serve(name, None, &words, answers) } else { side.serve_aside(name, &words, answers) }
}

fn sysbench(side: &Side, name: &str, verb: &str, more: &str) -> anyhow::Result<f64> {
    let words = format!(
        "sysbench oltp_read_write --db-driver=mysql --mysql-socket={} --mysql-user=root --mysql-db=test --tables=4 \
         --table-size=20000 --rand-seed=7 {more} {verb}",
        side.path(&format!("{name}.sock"))?
    );
    Ok(side.aside(&words.split_whitespace().collect::<Vec<_>>())?.1)
}

/// Makes the data directory of which both servers get a copy.
fn mariadb_data(side: &Side, dir: &str) -> anyhow::Result<()> {
    let install =
        "mariadb-install-db --no-defaults --user=root --skip-test-db --auth-root-authentication-method=normal";
    let data = format!("--datadir={dir}/data");
    side.aside(&install.split_whitespace().chain([&data[..]]).collect::<Vec<_>>())?;
    let _server = mariadb_server(side, "prepare", &format!("{dir}/data"), false)?;
    let socket = side.path("prepare.sock")?;
    side.aside(&["mariadb", "--no-defaults", "-S", &socket, "-e", "create database test"])?;
    sysbench(side, "prepare", "prepare", "")?;
    Ok(())
}

fn mariadb(side: &Side) -> anyhow::Result<f64> {
    let prepared = side.prepared(|dir| mariadb_data(side, dir))?;
    let start = |name: &str| {
        let data = side.path(name)?;
        side.aside(&["cp", "-a", &format!("{prepared}/data"), &data])?;
        mariadb_server(side, name, &data, true)
    };
    let _servers = NAMES.map(start).into_iter().collect::<anyhow::Result<Vec<_>>>()?;
    for name in NAMES {
        // Reading all rows brings the tables into the buffer pools of both servers.
        let sums = "select sum(crc32(c)) from test.sbtest1, (select 1) x union all select sum(crc32(c)) from test.sbtest2 \
                    union all select sum(crc32(c)) from test.sbtest3 union all select sum(crc32(c)) from test.sbtest4";
        side.aside(&["mariadb", "--no-defaults", "-S", &side.path(&format!("{name}.sock"))?, "-e", sums])?;
    }
    side.rest()?;
    let events = side.amount(25_000, 200);
    Ok(sysbench(side, NAMES[0], "run", &format!("--threads=2 --time=0 --events={events}"))? / events as f64)
}

// --- PostgreSQL

/// Beginning of a command that runs as PostgreSQL's user: as root, its programs refuse to work.
const AS_POSTGRES: [&str; 7] = ["setpriv", "--init-groups", "--reuid", POSTGRES_USER, "--regid", POSTGRES_USER, "--"];
/// The user as whom PostgreSQL runs.
pub const POSTGRES_USER: &str = "postgres";

/// Directory of the programs of the newest PostgreSQL that is installed.
fn postgres_bin() -> anyhow::Result<String> {
    let versions = fs::read_dir("/usr/lib/postgresql").context("not installed: apt-get install postgresql")?;
    let newest = versions.filter_map(|entry| Some(entry.ok()?.path())).max();
    let bin: Option<PathBuf> = newest.map(|dir| dir.join("bin")).filter(|bin| bin.join("postgres").is_file());
    let bin = bin.context("not installed: apt-get install postgresql")?;
    bin.to_str().map(str::to_owned).context("a path that is not UTF-8")
}

/// A PostgreSQL server's programs, and its data for this turn.
pub struct Postgres {
    bin: String,
    dir: String,
}

impl Postgres {
    /// Makes the server's data directory, as a copy of one that is made once.
    ///
    /// # Errors
    /// PostgreSQL is not installed.
    pub fn prepare(side: &Side) -> anyhow::Result<Self> {
        let (bin, dir) = (postgres_bin()?, side.path("")?);
        let prepared = side.prepared(|dir| {
            let init = ["-A", "trust", "-U", "postgres", "--no-sync", "-D"];
            let (initdb, data) = (format!("{bin}/initdb"), format!("{dir}/data"));
            let words = [&AS_POSTGRES[..], &[&initdb], &init, &[&data]].concat();
            side.aside(&words).map(drop)
        })?;
        side.aside(&["cp", "-a", &format!("{prepared}/data"), &format!("{dir}/data")])?;
        Ok(Self { bin, dir })
    }

    /// Command line that starts the server, with settings by which no commit waits for a disk. It has to run as
    /// `POSTGRES_USER`.
    pub fn words(&self) -> Vec<String> {
        let settings = ["-c", "listen_addresses=", "-c", "shared_buffers=64MB", "-c", "fsync=off"];
        let words = [format!("{}/postgres", self.bin), "-D".into(), format!("{}/data", self.dir), "-k".into()];
        words.into_iter().chain([self.dir.clone()]).chain(settings.map(str::to_owned)).collect()
    }

    /// Whether the server accepts connections.
    pub fn is_ready(&self) -> bool {
        succeeds(&[&format!("{}/pg_isready", self.bin), "-h", &self.dir, "-U", "postgres"])
    }

    /// Command line of pgbench with these arguments, for this server.
    pub fn pgbench<'a>(&'a self, words: &[&'a str]) -> Vec<&'a str> {
        [&AS_POSTGRES[..], &["pgbench", "-h", &self.dir, "-U", "postgres", "-n"], words, &["postgres"]].concat()
    }
}

fn postgres(side: &Side) -> anyhow::Result<f64> {
    let server = Postgres::prepare(side)?;
    let words = server.words();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let _server = side.serve("postgres", Some(POSTGRES_USER), &words, || server.is_ready())?;
    side.aside(&server.pgbench(&["-i", "-s", "5", "-q"]))?;
    side.rest()?;
    const CLIENTS: u64 = 4;
    let each = side.amount(30_000, 100);
    let (clients, each_words) = (CLIENTS.to_string(), each.to_string());
    let (_, seconds) = side.aside(&server.pgbench(&["-c", &clients, "-j", "2", "-t", &each_words]))?;
    ensure!(seconds > 0.0, "pgbench took no time");
    Ok(seconds / (CLIENTS * each) as f64)
}
