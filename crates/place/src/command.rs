//! The commands, one file each, and what they share.

pub mod bench;
pub mod fleet;
pub mod place;
pub mod sketch;
pub mod suggest;
pub mod weigh;

use ::place::fleet::{Collector, Fleet};
use ::place::table::{self, Source};
use anyhow::Context;
use api::client::Service;
use api::place::{Meant, RULE};
use cli::output;
use guest::{Guest, Membership};
use host::ProcessId;
use serde::Serialize;
use std::path::PathBuf;
use std::time::{Duration, UNIX_EPOCH};
use survey::Selection;

/// The guests of this host that are meant.
#[derive(clap::Args)]
pub struct Guests {
    #[command(flatten)]
    selection: Selection,
    #[arg(long, value_name = "DIR", help = RULE)]
    service: Option<PathBuf>,
    /// Scanning threads
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: u16,
    /// Bound the index (64M, 1G, ...) and scan in several passes when it is reached
    #[arg(long, value_name = "SIZE", value_parser = cli::size::parse_bytes)]
    index_memory: Option<u64>,
}

impl Guests {
    fn resolve(&self) -> anyhow::Result<Vec<Guest>> {
        self.selection.resolve(&|| self.members())
    }

    fn members(&self) -> anyhow::Result<Option<Vec<Membership>>> {
        let services = Service::find(&Meant::of(self.service.as_deref(), None))?;
        if services.is_empty() {
            return Ok(None);
        }
        let mut members = Vec::new();
        for service in services {
            members.extend(service.members()?.into_iter().map(|member| Membership {
                process: ProcessId { pid: member.identity.pid, start_ticks: member.identity.started },
                group: member.group,
            }));
        }
        Ok(Some(members))
    }

    fn index_bytes(&self) -> Option<usize> {
        self.index_memory.map(|bytes| usize::try_from(bytes).unwrap_or(usize::MAX))
    }
}

/// Tables of sketches.
#[derive(clap::Args)]
pub struct Tables {
    /// Files of pagefold sketch --parquet, or directories of such files, of which the newest of each host count
    #[arg(required = true, value_name = "FILE|DIR")]
    tables: Vec<PathBuf>,
    /// Part of each host's memory that is not for guests, in percent
    #[arg(long, value_name = "PERCENT", default_value_t = 5, value_parser = clap::value_parser!(u8).range(0..=99))]
    floor: u8,
}

impl Tables {
    fn files(&self) -> anyhow::Result<Vec<Source>> {
        table::files(&self.tables)
    }

    fn fleet(&self) -> anyhow::Result<Fleet> {
        fleet_of(&self.files()?, f64::from(self.floor) / 100.0)
    }
}

/// The fleet in these tables of sketches. `floor` is the part of each host's memory that guests do not get, from 0 to
/// 1.
fn fleet_of(files: &[Source], floor: f64) -> anyhow::Result<Fleet> {
    let mut collector = Collector::of_rows(table::count(files)?);
    table::read(files, &mut |row| collector.add(row))?;
    collector.finish(floor)
}

/// The present, in seconds since 1970.
#[expect(clippy::disallowed_methods, reason = "sketches of several hosts have no other clock in common")]
fn now_s() -> anyhow::Result<u64> {
    let now = std::time::SystemTime::now().duration_since(UNIX_EPOCH);
    Ok(now.context("the clock stands before 1970")?.as_secs())
}

/// Parses a time such as `10m` or `1h 30m`, of at least a second.
fn parse_time(text: &str) -> Result<Duration, String> {
    match humantime::parse_duration(text) {
        Ok(time) if time >= Duration::from_secs(1) => Ok(time),
        Ok(_) => Err("at least one second".to_owned()),
        Err(e) => Err(format!("{e}; use 10m, 1h, ...")),
    }
}

/// Parses `GLOB=SIZE`: the memory that is guaranteed to guests with a matching id or name.
fn parse_guarantee(text: &str) -> Result<(guest::Glob, u64), String> {
    let (glob, size) = text.rsplit_once('=').ok_or("use GLOB=SIZE, such as acme-*=256M")?;
    Ok((glob.parse()?, cli::size::parse_bytes(size)?))
}

fn print_json(value: &impl Serialize) -> anyhow::Result<()> {
    let mut out = Vec::new();
    report::json::write(&mut out, value)?;
    output::bytes(&out)
}
