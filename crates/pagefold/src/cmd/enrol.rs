//! `pagefold enrol`: rules by which running processes become members.

use crate::cmd::which::Which;
use anyhow::Context;
use api::client::Service;
use clap::Subcommand;
use cli::exit::{Outcome, Stop};
use cli::output;
use enrol::Planned;
use enrol::attach::PROGRAM;
use std::path::PathBuf;

/// Arguments of `pagefold enrol`.
#[derive(clap::Args)]
#[command(after_help = "\
The rules are those of [[enrol]] in the service's configuration, and those that pagefold attach --cgroup
and --container have added. Root's service carries them out by itself, within 5 seconds, also for
processes that start later. A process that cannot be attached is tried again after 10 seconds, and then
after waits that double, up to 10 minutes; pagefold group show has the reason.

Examples:
  pagefold enrol plan          the processes that rules fit, and what is done about each
  pagefold enrol plan --json
  pagefold enrol apply         carry out the rules of a service that was started with --enrol-apart")]
pub struct Args {
    #[command(subcommand)]
    action: Action,
    #[command(flatten)]
    service: Which,
    /// Print JSON
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Subcommand)]
enum Action {
    /// Tell what is done about each process that a rule fits, and do nothing
    Plan,
    /// Carry out the rules, until it is told to end
    Apply {
        /// End when the standard input closes
        #[arg(long, hide = true)]
        until_hangup: bool,
    },
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<Outcome> {
    let program = program()?;
    match args.action {
        Action::Plan => plan(args, &program),
        Action::Apply { until_hangup } => {
            if until_hangup {
                // This process may end at any instant: `pagefold-attach` goes on with a process that is being attached.
                std::thread::spawn(|| {
                    let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
                    std::process::exit(0);
                });
            }
            enrol::run(&args.service.meant().place(), program)?;
            Ok(Outcome::Done)
        }
    }
}

/// The path of `pagefold-attach`, which attaches processes.
pub fn program() -> anyhow::Result<PathBuf> {
    service::helper::program(PROGRAM).map_err(|e| Stop::HostLacks(format!("{PROGRAM}: {e}")).into())
}

fn plan(args: &Args, program: &std::path::Path) -> anyhow::Result<Outcome> {
    let service = Service::find(&args.service.meant())?.into_iter().next();
    let service = service.context("no service answers: rules take root's, see pagefold serve")?;
    let planned = enrol::plan(&service, program)?;
    if args.json {
        output::line(serde_json::to_string_pretty(&planned)?)?;
        return Ok(Outcome::Done);
    }
    for Planned { pid, program, group, rule, decision, why, private_bytes } in planned {
        let size = cli::size::bytes(private_bytes);
        let why = why.map_or_else(String::new, |why| format!(": {why}"));
        output::line(format!("process {pid} ({program}, {size}) for group {group} by {rule}: {decision}{why}"))?;
    }
    Ok(Outcome::Done)
}
