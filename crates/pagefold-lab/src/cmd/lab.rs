//! `pagefold lab`: real guests to try the other commands on.

mod exec;
mod list;
mod up;

pub use up::{ImageName, Show};

use clap::Subcommand;
use cli::exit::Outcome;
use cli::{output, say};
use lab::{Idle, Lab, Progress};
use serde_json::json;
use std::path::PathBuf;
use std::time::Duration;

/// Arguments of `pagefold lab`.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    action: Action,
    /// The lab's directory [default: PAGEFOLD_LAB_DIR, or pagefold-lab in XDG_RUNTIME_DIR, /run or /tmp]
    #[arg(long, global = true, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Print JSON
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Subcommand)]
enum Action {
    /// Bring guests up and wait until they are ready; again to add more
    Up(up::Args),
    /// Show the guests
    List,
    /// Run a command inside one guest, or inside all of them
    Exec(exec::Args),
    /// Wait until the guests are idle
    Settle(SettleArgs),
    /// End all guests
    Down,
    /// Run a process guest
    #[command(hide = true)]
    Hold(up::HoldArgs),
}

#[derive(clap::Args)]
struct SettleArgs {
    /// Longest time to wait
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = seconds())]
    timeout: u64,
}

/// Limits of waiting, in seconds: up to a day.
fn seconds() -> clap::builder::RangedU64ValueParser {
    clap::value_parser!(u64).range(1..=86_400)
}

/// Runs the command.
pub fn run(args: Args) -> anyhow::Result<Outcome> {
    let lab = Lab::open(&args.dir.unwrap_or_else(lab::default_lab_dir))?;
    match args.action {
        Action::Up(up) => up::run(&lab, up, args.json),
        Action::List => list::run(&lab, args.json),
        Action::Exec(exec) => exec::run(&lab, exec, args.json),
        Action::Settle(settle) => run_settle(&lab, &settle, args.json),
        Action::Down => run_down(&lab, args.json),
        Action::Hold(hold) => up::hold(&hold),
    }
}

fn run_settle(lab: &Lab, args: &SettleArgs, as_json: bool) -> anyhow::Result<Outcome> {
    let show = up::Show::new();
    let progress = |event: Progress| show.event(&event);
    let settled = lab.settle(Idle::default(), Duration::from_secs(args.timeout), &progress)?;
    drop(show);
    let seconds = settled.waited.as_secs_f64();
    if as_json {
        output::line(json!({"idle": settled.idle, "seconds": seconds, "busiest_share": settled.busiest}))?;
    } else if settled.idle {
        output::line(format_args!("idle after {seconds:.1} s"))?;
    }
    if settled.idle {
        return Ok(Outcome::Done);
    }
    let percent = settled.busiest * 100.0;
    say!("pagefold: not idle after {seconds:.0} s: the busiest guest uses {percent:.0}% of a CPU");
    Ok(Outcome::Partial)
}

fn run_down(lab: &Lab, as_json: bool) -> anyhow::Result<Outcome> {
    let ended = lab.down()?;
    if as_json {
        output::line(json!({"ended": ended}))?;
    } else if ended.is_empty() {
        output::line(format_args!("no guests in {}", lab.dir().display()))?;
    } else {
        output::line(format_args!("ended {}", ended.join(", ")))?;
    }
    Ok(Outcome::Done)
}
