//! `pagefold config`: whether a configuration is valid, and which parts of it are doubtful on this host.

mod doubts;

use clap::Subcommand;
use cli::exit::{Outcome, Stop};
use cli::output;
use serde::Serialize;
use service::config::Config;
use std::path::PathBuf;

/// The configuration of the host's service, as packages install it.
const HOSTS: &str = "/etc/pagefold/pagefold.toml";

/// Arguments of `pagefold config`.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  pagefold config check && systemctl reload pagefold
  pagefold config check ./pagefold.toml --json")]
pub struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand)]
enum Action {
    /// Read a configuration as the service would, with the file of tokens that it names, and tell what is doubtful on this host; start nothing
    Check(CheckArgs),
}

#[derive(clap::Args)]
struct CheckArgs {
    /// TOML file with the groups: see pagefold serve --help
    #[arg(default_value = HOSTS)]
    file: PathBuf,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// A configuration that can be meant.
#[derive(Serialize)]
struct Checked {
    /// The file.
    file: String,
    /// Names of the groups.
    groups: Vec<String>,
    /// Number of enrol rules.
    rules: usize,
    /// The web side; `None` without `[api]`.
    http: Option<Http>,
    /// Parts that are valid, and yet dangerous or without effect on this host as it is.
    doubts: Vec<String>,
}

/// The web side of a configuration.
#[derive(Serialize)]
struct Http {
    /// The address at which it listens; `None`: at its Unix socket alone.
    listen: Option<String>,
    /// Names of the tokens.
    tokens: Vec<String>,
    /// Whether it takes changes of settings.
    control: bool,
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<Outcome> {
    let Action::Check(CheckArgs { file, json }) = &args.action;
    let config = Config::read(file).map_err(Stop::usage)?;
    let doubts = doubts::of(&config);
    let checked = Checked {
        doubts,
        file: file.display().to_string(),
        rules: config.enrol.len(),
        groups: config.groups.into_iter().flatten().map(|(name, _)| name).collect(),
        http: config.api.map(|api| Http {
            listen: api.listen.map(|address| address.to_string()),
            tokens: api.tokens.into_iter().map(|token| token.name).collect(),
            control: api.control,
        }),
    };
    if *json {
        output::line(serde_json::to_string_pretty(&checked)?)?;
    } else {
        output::line(words(&checked))?;
    }
    Ok(Outcome::Done)
}

fn words(checked: &Checked) -> String {
    let Checked { file, groups, rules, http, doubts } = checked;
    let count = |n: usize, thing: &str| format!("{n} {thing}{}", if n == 1 { "" } else { "s" });
    let http = http.as_ref().map_or("no HTTP".to_owned(), |http| {
        let listen = http.listen.as_ref().map_or(String::new(), |address| format!(" and {address}"));
        let control = if http.control { "" } else { ", for reading alone" };
        format!("HTTP at a Unix socket{listen}, {}{control}", count(http.tokens.len(), "token"))
    });
    let rules = if *rules > 0 { format!("{} for running processes; ", count(*rules, "rule")) } else { String::new() };
    let doubts: String = doubts.iter().map(|doubt| format!("\n  doubtful: {doubt}")).collect();
    let fine = if doubts.is_empty() { "fine" } else { "valid" };
    format!("{file}: {fine}; {}; {rules}{http}{doubts}", count(groups.len(), "group"))
}
