//! Databases: filled, rested, put under load, killed and recovered, and asked by their own means whether all is right.

use crate::common::service::{Member, until};
use crate::rig::{Peer, Side};
use serde_json::{Value, json};
use std::io::Write;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

pub const REDIS: Peer = Peer {
    name: "redis",
    about: "two Redis servers with the same data: snapshot and rewrite under load, every key read back, restart from disk",
    floor: 1000,
    needs: &[("redis-server", "redis-server"), ("redis-benchmark", "redis-tools")],
    is_short: true,
    at_once: false,
    recipe: redis,
};

pub const SQLITE: Peer = Peer {
    name: "sqlite",
    about: "SQLite's shell with a script of inserts, indexes, updates and a vacuum; integrity check and digest",
    floor: 0,
    needs: &[("sqlite3", "sqlite3")],
    is_short: false,
    at_once: false,
    recipe: sqlite,
};

pub const MARIADB: Peer = Peer {
    name: "mariadb",
    about: "two MariaDB servers with the same tables: sysbench OLTP, SIGKILL, recovery, CHECK TABLE EXTENDED",
    floor: 1000,
    needs: &[("mariadbd", "mariadb-server"), ("sysbench", "sysbench")],
    is_short: false,
    at_once: false,
    recipe: mariadb,
};

pub const POSTGRES: Peer = Peer {
    name: "postgres",
    about: "PostgreSQL: pgbench, SIGKILL, recovery, pg_amcheck",
    floor: 1000,
    needs: &[("/usr/lib/postgresql/15/bin/postgres", "postgresql"), ("pgbench", "postgresql-client-common")],
    is_short: false,
    at_once: false,
    recipe: postgres,
};

/// Waits until a server answers.
fn until_it_answers(member: &mut Member, mut ask: impl FnMut() -> bool) {
    until(60, &format!("{} answers: {}", member.name, member.errors()), || {
        member.assert_is_well();
        ask()
    });
}

/// Whether a client that is no part of what is judged succeeds.
fn succeeds(words: &[&str]) -> bool {
    Command::new(words[0]).args(&words[1..]).output().is_ok_and(|output| output.status.success())
}

// --- Redis

fn redis_server(side: &Side, name: &str) -> Member {
    let (dir, socket) = (side.path(name), side.path(&format!("{name}.sock")));
    std::fs::create_dir_all(&dir).expect("a directory");
    let words = ["redis-server", "--port", "0", "--unixsocket", &socket, "--dir", &dir, "--save", "", "--appendonly"];
    let more = ["yes", "--enable-debug-command", "yes", "--daemonize", "no"];
    let mut server = side.start(name, &[&words[..], &more].concat());
    let loaded = || {
        let asked = Command::new("redis-cli").args(["-s", &socket, "info", "persistence"]).output();
        asked.is_ok_and(|output| String::from_utf8_lossy(&output.stdout).contains("\nloading:0"))
    };
    until_it_answers(&mut server, loaded);
    server
}

fn redis_cli(side: &Side, name: &str, words: &[&str], input: &str) -> String {
    let socket = side.path(&format!("{name}.sock"));
    side.aside(&[&["redis-cli", "-s", &socket], words].concat(), input)
}

/// Waits until no child of the server saves or rewrites.
fn until_saved(side: &Side, name: &str) {
    until(60, "it has saved", || {
        let info = redis_cli(side, name, &["info", "persistence"], "");
        info.contains("rdb_bgsave_in_progress:0")
            && info.contains("aof_rewrite_in_progress:0")
            && info.contains("aof_rewrite_scheduled:0")
    });
}

fn redis(side: &Side) -> Value {
    let keys: u32 = if side.is_short { 20_000 } else { 100_000 };
    let value = |key: u32| format!("{key}:{}", "0123456789abcdef".repeat(16));
    let load: String = (0..keys).map(|key| format!("set key:{key} {}\n", value(key))).collect();
    let names = ["one", "other"];
    let mut servers = names.map(|name| redis_server(side, name));
    for name in names {
        redis_cli(side, name, &[], &load);
    }
    side.rest();
    for name in names {
        let socket = side.path(&format!("{name}.sock"));
        redis_cli(side, name, &["bgsave"], "");
        let (requests, second) = (keys.to_string(), ["--dbnum", "1", "-d", "300", "-r", "20000", "-q"]);
        let words = ["redis-benchmark", "-s", &socket, "-t", "set,get,lpush,lpop", "-n", &requests];
        side.aside(&[&words[..], &second].concat(), "");
        until_saved(side, name);
        redis_cli(side, name, &["bgrewriteaof"], "");
        side.aside(&[&words[..], &second].concat(), "");
        until_saved(side, name);
        redis_cli(side, name, &["-n", "1", "flushdb"], "");
    }
    side.let_go();
    let gets: String = (0..keys).map(|key| format!("get key:{key}\n")).collect();
    let right: String = (0..keys).map(|key| format!("{}\n", value(key))).collect();
    let mut digests = Vec::new();
    for (name, server) in names.into_iter().zip(&mut servers) {
        assert!(redis_cli(side, name, &[], &gets) == right, "a key of {name} is wrong");
        digests.push(redis_cli(side, name, &["debug", "digest"], "").trim().to_owned());
        server.kill();
        // From what is on disk, after a SIGKILL.
        let mut again = redis_server(side, name);
        assert!(redis_cli(side, name, &[], &gets) == right, "a key of {name} is wrong after a restart");
        digests.push(redis_cli(side, name, &["debug", "digest"], "").trim().to_owned());
        again.kill();
    }
    json!({"keys": keys, "digests": digests})
}

// --- SQLite

const SQLITE_SCRIPT: &str = "
pragma page_size = 4096; pragma cache_size = -65536; pragma temp_store = memory;
create table t (id integer primary key, k integer, name text, body blob);
with recursive n(i) as (select 1 union all select i + 1 from n where i < 200000)
  insert into t select i, (i * 7919) % 10007, printf('name-%08d', i % 5000), zeroblob(i % 200) || printf('%0100d', i % 13) from n;
create index by_k on t (k); create index by_name on t (name, k);
update t set body = body || name where id % 3 = 0; delete from t where id % 7 = 0; vacuum;
pragma integrity_check; select count(*), sum(k), sum(length(body)) from t;
select k, count(*), group_concat(name) from t where k < 50 group by k order by k;
";

fn sqlite(side: &Side) -> Value {
    let script = side.file("script.sql", SQLITE_SCRIPT);
    let base = side.path("base");
    let said = side.must("sqlite", &["sqlite3", &base, &format!(".read {script}")], 300);
    assert!(said.starts_with("ok\n"), "{said}");
    let digest = side.must("digest", &["sqlite3", &base, ".sha3sum"], 300);
    let dump = side.aside(&["sh", "-c", &format!("sqlite3 {base} .dump | sha256sum")], "");
    json!({"said": said.len(), "digest": digest.trim(), "dump": dump.trim()})
}

// --- MariaDB

fn mariadb_server(side: &Side, name: &str) -> Member {
    let (data, socket) =
        (format!("--datadir={}", side.path(name)), format!("--socket={}", side.path(&format!("{name}.sock"))));
    let usual = "--no-defaults --user=root --skip-networking --skip-grant-tables --innodb-buffer-pool-size=128M --innodb-log-file-size=32M";
    let words: Vec<&str> = ["mariadbd"].into_iter().chain(usual.split(' ')).chain([&data[..], &socket]).collect();
    let mut server = side.start(name, &words);
    until_it_answers(&mut server, || succeeds(&["mariadb-admin", "--no-defaults", &socket, "ping"]));
    server
}

fn mariadb(side: &Side) -> Value {
    let names = ["one", "other"];
    let socket = |name: &str| side.path(&format!("{name}.sock"));
    let sql =
        |name: &str, text: &str| side.aside(&["mariadb", "--no-defaults", "-N", "-S", &socket(name), "-e", text], "");
    let sysbench = |name: &str, test: &str, verb: &str| {
        let words = format!(
            "sysbench {test} --db-driver=mysql --mysql-socket={} --mysql-user=root --mysql-db=test --tables=4 --table-size=20000 \
             --threads=2 --time=10 --rand-seed=7 {verb}",
            socket(name)
        );
        side.aside(&words.split(' ').filter(|word| !word.is_empty()).collect::<Vec<_>>(), "")
    };
    for name in names {
        let data = format!("--datadir={}", side.path(name));
        side.aside(
            &[
                "mariadb-install-db",
                "--no-defaults",
                "--user=root",
                "--skip-test-db",
                "--auth-root-authentication-method=normal",
                &data,
            ],
            "",
        );
    }
    let mut servers = names.map(|name| mariadb_server(side, name));
    for name in names {
        sql(name, "create database test");
        sysbench(name, "oltp_read_write", "prepare");
        sql(name, "use test; create table known select seq id, repeat(sha1(seq), 20) body from seq_1_to_20000");
    }
    side.rest();
    let mut outcome = Vec::new();
    for (name, server) in names.into_iter().zip(&mut servers) {
        let ran = sysbench(name, "oltp_read_write", "run");
        assert!(ran.contains("ignored errors:                      0"), "{ran}");
        side.let_go();
        server.kill();
        let _server = mariadb_server(side, name);
        let checked =
            sql(name, "check table test.sbtest1, test.sbtest2, test.sbtest3, test.sbtest4, test.known extended");
        let known = sql(name, "select count(*), sum(crc32(body)) from test.known");
        let rows = sql(name, "select count(*) from test.sbtest1 union all select count(*) from test.sbtest2");
        outcome.push(json!({"check": checked.trim(), "known": known.trim(), "rows": rows.trim()}));
    }
    json!(outcome)
}

// --- PostgreSQL

/// Number of sessions that hold a result, and rows of each.
const SESSIONS: usize = 4;
const ROWS: usize = 40_000;

/// A session whose server process holds the rows of a cursor in its own memory. Dropping it ends it.
struct Session(Child);

impl Session {
    fn start(dir: &str) -> Self {
        let words = ["-h", dir, "-U", "postgres", "-At", "-q", "postgres"];
        let child = Command::new("psql").args(words).stdin(Stdio::piped()).stdout(Stdio::null()).spawn();
        let mut session = Self(child.expect("run psql"));
        session.say(&format!(
            "set work_mem = '512MB'; declare c cursor with hold for select n, repeat(md5((n % 999)::text), 9) \
             from generate_series(1, {ROWS}) n;"
        ));
        session
    }

    fn say(&mut self, words: &str) {
        writeln!(self.0.stdin.as_mut().expect("a pipe"), "{words}").expect("tell psql");
    }

    /// Has it write its rows to a file, and end. Returns their number and digest.
    fn rows(mut self, side: &Side, file: &str) -> String {
        self.say(&format!("\\o {file}\nfetch all from c;\n\\q"));
        let ended = self.0.wait().expect("wait for psql");
        assert!(ended.success(), "psql: {ended}");
        side.aside(&["sh", "-c", &format!("wc -l < {file}; sha256sum < {file}")], "")
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

const POSTGRES_BIN: &str = "/usr/lib/postgresql/15/bin";

fn postgres_server(side: &Side, data: &str) -> Member {
    let program = format!("{POSTGRES_BIN}/postgres");
    let dir = side.path("");
    let words = [&program, "-D", data, "-k", &dir, "-c", "listen_addresses=", "-c", "shared_buffers=64MB"];
    let mut server = side.start_as("postgres", Some("postgres"), &words);
    until_it_answers(&mut server, || succeeds(&[&format!("{POSTGRES_BIN}/pg_isready"), "-h", &dir, "-U", "postgres"]));
    server
}

fn postgres(side: &Side) -> Value {
    let (data, dir) = (side.path("data"), side.path(""));
    let as_postgres = ["setpriv", "--init-groups", "--reuid", "postgres", "--regid", "postgres", "--"];
    let aside = |words: &[&str]| side.aside(&[&as_postgres[..], words].concat(), "");
    aside(&[&format!("{POSTGRES_BIN}/initdb"), "-D", &data, "-A", "trust", "--data-checksums", "-U", "postgres"]);
    let mut server = postgres_server(side, &data);
    let pgbench = |words: &[&str]| aside(&[&["pgbench", "-h", &dir, "-U", "postgres"], words, &["postgres"]].concat());
    pgbench(&["-i", "-s", "5", "-q"]);
    let sessions: Vec<Session> = (0..SESSIONS).map(|_| Session::start(&dir)).collect();
    // A server process for each connection holds the memory. Most of them rest at any time.
    std::thread::scope(|scope| {
        scope.spawn(|| pgbench(&["-c", "40", "-j", "2", "-S", "-R", "20", "-T", "30"]));
        side.rest();
    });
    pgbench(&["-c", "4", "-j", "2", "-T", "10"]);
    if side.is_attached {
        let members = || side.shown()["members"].as_array().map_or(0, Vec::len);
        until(120, "server processes of sessions are members", || members() > SESSIONS);
    }
    side.let_go();
    let rows: Vec<String> = sessions.into_iter().map(|session| session.rows(side, &side.path("rows"))).collect();
    assert!(rows.iter().all(|one| *one == rows[0] && one.starts_with(&ROWS.to_string())), "{rows:?}");
    // The postmaster alone: its children notice, and end.
    server.kill();
    std::thread::sleep(Duration::from_secs(2));
    let server = postgres_server(side, &data);
    let amcheck = format!("{POSTGRES_BIN}/pg_amcheck");
    let checked = aside(&[&amcheck, "-h", &dir, "-U", "postgres", "--install-missing", "--heapallindexed", "postgres"]);
    let sums = "select (select sum(abalance) from pgbench_accounts) = (select sum(bbalance) from pgbench_branches), \
                (select count(*) from pgbench_accounts)";
    let said = aside(&["psql", "-h", &dir, "-U", "postgres", "-At", "-c", sums, "postgres"]);
    drop(server);
    json!({"amcheck": checked.trim(), "sums": said.trim(), "rows": rows[0]})
}
