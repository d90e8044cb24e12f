//! `pagefold bench park`: guests that a service folds are parked and woken, and the frames that guests need under loads.

mod arms;
mod asleep;
mod load;
mod shell;

use crate::guardian::Guardian;
use crate::ksm::ksmd::{WholeHost, may_use};
use crate::ksm::make_dir;
use arms::{ARMS, KSMD};
use asleep::Herd;
use cli::exit::Outcome;
use cli::output;
use lab::Image;
use load::{LOADS, Load};
use serde::Serialize;
use std::path::Path;
use std::time::Duration;

/// Arguments of `pagefold bench park`.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  pagefold bench park                                     clones of tiny, parked and woken
  pagefold bench park --image tiny --count 200 --json
  pagefold bench park --boot --zram                       guests that have just booted, on a host with zram
  pagefold bench park --only arms --loads oltp --arms zram,fold+zram --yes")]
pub struct Args {
    /// Only this part
    #[arg(long, value_name = "PART", value_parser = ["guests", "arms"])]
    only: Option<String>,
    /// Image of the guests that are parked
    #[arg(long, value_name = "IMAGE", default_value = "tiny", value_parser = ["tiny", "debian"])]
    image: String,
    /// Guests that are parked
    #[arg(long, alias = "guests", value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=1000))]
    count: u16,
    /// Guests of them that are woken at once, with 5% of memory to spare; usually one in four
    #[arg(long, value_name = "N")]
    at_once: Option<u16>,
    /// Boot each guest; else they are clones of one
    #[arg(long)]
    boot: bool,
    /// Swap to a zram device while guests are parked
    #[arg(long)]
    zram: bool,
    /// Ways to save memory under a load
    #[arg(long, value_name = "ARM,...", value_delimiter = ',', default_values = ARMS, value_parser = ARMS)]
    arms: Vec<String>,
    /// Loads of the arms
    #[arg(long, value_name = "LOAD,...", value_delimiter = ',', default_values = ["idle", "oltp", "web"], value_parser = LOADS)]
    loads: Vec<String>,
    /// Debian guests of 512 MiB under a load
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=64))]
    loaded: u16,
    /// Seconds of each measurement of a load
    #[arg(long, value_name = "SECONDS", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=600))]
    measure: u16,
    #[command(flatten)]
    whole_host: WholeHost,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// The result.
#[derive(Default, Serialize)]
struct Bench {
    /// Guests of one image each, with a service in a control group that stands for the host.
    guests: Vec<asleep::Figures>,
    /// Arms, each under one load.
    arms: Vec<arms::Figures>,
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<Outcome> {
    let loads: Vec<Load> = args.loads.iter().map(|name| Load::named(name)).collect::<anyhow::Result<_>>()?;
    let mut guardian = Guardian::start()?;
    if args.wants("arms") && args.arms.iter().any(|arm| arm == KSMD) {
        guardian.keep_ksm(&may_use(args.whole_host)?)?;
    }
    let dir = make_dir(&mut guardian)?;
    let bench = args.measure(&loads, &dir, &mut guardian);
    let put_back = guardian.finish();
    let bench = bench?;
    put_back?;
    if args.json {
        output::line(serde_json::to_string_pretty(&bench)?)?;
    } else {
        bench.guests.iter().try_for_each(|guests| output::line(guests.text()))?;
        bench.arms.iter().try_for_each(|arm| output::line(arm.text()))?;
    }
    Ok(Outcome::Done)
}

impl Args {
    fn wants(&self, part: &str) -> bool {
        self.only.as_deref().is_none_or(|only| only == part)
    }

    fn measure(&self, loads: &[Load], dir: &Path, guardian: &mut Guardian) -> anyhow::Result<Bench> {
        let mut bench = Bench::default();
        if self.wants("guests") {
            let count = usize::from(self.count);
            let herd = Herd {
                image: if self.image == "debian" { Image::Debian } else { Image::Tiny },
                count,
                at_once: self.at_once.map_or(count / 4, usize::from).min(count),
                boot: self.boot,
                zram: self.zram,
            };
            bench.guests.push(herd.measure(dir, guardian)?);
        }
        if self.wants("arms") {
            let arms: Vec<&'static str> =
                ARMS.into_iter().filter(|arm| self.arms.iter().any(|meant| meant == arm)).collect();
            let sizes = arms::Sizes { guests: self.loaded.into(), during: Duration::from_secs(self.measure.into()) };
            bench.arms = arms::run((&arms, loads), sizes, dir, guardian)?;
        }
        Ok(bench)
    }
}
