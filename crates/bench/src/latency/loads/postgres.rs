//! PostgreSQL: pgbench asks for transactions at a fixed rate. Its log tells when each was due and how long it took from
//! then on.

use super::{Kind, Load, Member};
use crate::latency::client::Client;
use crate::latency::samples::{Samples, in_ns, now_ns};
use crate::latency::scene::Scene;
use crate::overhead::servers::{POSTGRES_USER, Postgres};
use anyhow::{Context, ensure};
use rustix::time::{ClockId, clock_gettime};
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::time::Duration;

pub const POSTGRES: Kind = Kind {
    name: "postgres",
    is_usual: false,
    rate: 100,
    members: &[Member::Started, Member::Attached],
    // Processes of connections are forked from the server and have little memory that is equal to other memory and
    // stays so.
    floor: 0,
    needs: &[("pgbench", "postgresql-client-common")],
    begin,
};

/// Interval between two reads of the log: 50 ms.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// Longest time by which a transaction may come in the log after one that was due later: 1 s.
const LATE: Duration = Duration::from_secs(1);

fn begin(scene: &Scene) -> anyhow::Result<Load> {
    let server = Postgres::prepare(&scene.side)?;
    let words = server.words();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let running = scene.start("postgres", Some(POSTGRES_USER), &words, || server.is_ready())?;
    scene.side.aside(&server.pgbench(&["-i", "-s", "5", "-q"]))?;
    let (prefix, rate) = (scene.side.path("transactions")?, scene.rate(&POSTGRES).to_string());
    let asks =
        ["-c", "4", "-j", "1", "-T", "1000000", "-R", &rate, "--log", "--log-prefix", &prefix, "--random-seed", "7"];
    let asking = scene.side.serve_aside("pgbench", &server.pgbench(&asks), || log_of(Path::new(&prefix)).is_some())?;
    let log = log_of(Path::new(&prefix)).context("pgbench has no log")?;
    let log = File::open(&log).with_context(|| format!("cannot open {}", log.display()))?;
    let mut client = Client::of(Samples::out_of_order(LATE));
    client.go(move |samples| follow(log, samples))?;
    Ok(Load { client, pid: running.pid(), _programs: Box::new((asking, running)) })
}

/// The log file of pgbench, whose name ends in pgbench's process id. `None` while there is none.
fn log_of(prefix: &Path) -> Option<PathBuf> {
    let name = prefix.file_name()?.to_str()?;
    let entries = fs::read_dir(prefix.parent()?).ok()?;
    entries.filter_map(|entry| Some(entry.ok()?.path())).find(|path| {
        path.file_name().and_then(|file| file.to_str()).is_some_and(|file| file.starts_with(&format!("{name}.")))
    })
}

fn follow(log: File, samples: &Samples) -> anyhow::Result<()> {
    let ahead_ns = in_ns(clock_gettime(ClockId::Realtime)).saturating_sub(now_ns());
    let (mut reader, mut line) = (BufReader::new(log), String::new());
    while !samples.is_over() {
        // If the line is not complete, its rest is read the next time.
        if reader.read_line(&mut line)? == 0 || !line.ends_with('\n') {
            std::thread::sleep(LOOK_EVERY);
            continue;
        }
        let (ended_ns, took_ns) = transaction(&line)?;
        samples.add(ended_ns.saturating_sub(ahead_ns + took_ns), took_ns);
        line.clear();
    }
    Ok(())
}

/// From a line of the log, in nanoseconds: when a transaction ended by the wall clock, and how long it took from when
/// it was due.
fn transaction(line: &str) -> anyhow::Result<(u64, u64)> {
    let numbers: Vec<u64> = line.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    ensure!(numbers.len() >= 6, "pgbench notes {line:?}");
    Ok((numbers[4] * 1_000_000_000 + numbers[5] * 1000, numbers[2] * 1000))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transaction_is_timed_since_it_was_due() {
        assert_eq!(
            transaction("0 199 2241 0 1175850568 995598 1020\n").unwrap(),
            (1_175_850_568_995_598_000, 2_241_000)
        );
        assert!(transaction("0 199 skipped\n").is_err());
    }
}
