//! `pagefold group`: the list of groups, their state, and changes of their settings.

mod list;
mod show;
mod words;

use crate::cmd::place;
use crate::cmd::which::Which;
use anyhow::bail;
use api::change::{
    Change, HugePages, IndexSize, PoolSize, Printed, ScanRate, parse_fold, parse_latency, parse_zero_pages,
};
use api::client::Service;
use api::control::{Fold, Latency, Settings, ZeroPolicy};
use api::name;
use clap::{ArgAction, Subcommand};
use cli::exit::{Outcome, Stop};
use cli::output;

/// Arguments of `pagefold group`.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  pagefold group list                            what each group saves and costs, and the totals
  pagefold group show acme --json
  pagefold group show acme --watch 5             again every five seconds
  pagefold group show acme --family apache       a member and its forked children, each with a line
  pagefold group set acme --fold off             leave what is folded, fold nothing more
  pagefold group set acme --fold unfold          make all pages private again, if there is memory for it
  pagefold group set acme --pool 2G              a smaller one unfolds nothing, it takes no new pages
  pagefold group set acme --scan-rate 50000 --huge-pages never
  pagefold group reset acme                      as the configuration has it again
  pagefold group suggest                         who would save most by trusting each other; nothing is changed")]
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
    /// The groups that you may deal with, what they save and cost, and the totals
    List,
    /// How a group does: members, pages, savings, costs
    Show(show::ShowArgs),
    /// Run a group differently from now on
    Set(SetArgs),
    /// Which groups of this host would save most if they were one, and what they would let each other learn
    Suggest(place::Args),
    /// Run a group as it is configured again
    Reset {
        /// The group
        #[arg(value_parser = name::parse_group)]
        group: String,
    },
}

#[derive(clap::Args)]
struct SetArgs {
    /// The group
    #[arg(value_parser = name::parse_group)]
    group: String,
    /// Pages that may be fingerprinted a second in the whole group. With auto all that rest, and with adaptive as many as yields, for at
    /// most 10% of a processor, or so much of one
    #[arg(long, value_name = "auto|N|adaptive[:N%]")]
    scan_rate: Option<ScanRate>,
    /// Treatment of pages of zeros: share, ignore or when-idle
    #[arg(long, value_name = "POLICY", value_parser = parse_zero_pages)]
    zero_pages: Option<ZeroPolicy>,
    /// Split a huge page when so many percent of it would fold, or never
    #[arg(long, value_name = "never|N%")]
    huge_pages: Option<HugePages>,
    /// on; off: leave what is folded and fold nothing more; unfold: make everything private again
    #[arg(long, value_name = "on|off|unfold", value_parser = parse_fold)]
    fold: Option<Fold>,
    /// Fold pages of a member only with pages of the same member
    #[arg(long, value_name = "BOOL", action = ArgAction::Set)]
    intra_member_only: Option<bool>,
    /// Most memory of the pool; a smaller one unfolds nothing, and gives out no slots until less is in use
    #[arg(long, value_name = "SIZE")]
    pool: Option<PoolSize>,
    /// Most memory of the index
    #[arg(long, value_name = "SIZE")]
    index_memory: Option<IndexSize>,
    /// quiet: threads that scan and fold preempt no other thread when they wake; eager: they do
    #[arg(long, value_name = "quiet|eager", value_parser = parse_latency)]
    latency: Option<Latency>,
}

impl Args {
    /// The services that are asked about groups.
    fn services(&self) -> anyhow::Result<Vec<Service>> {
        Service::find(&self.service.meant())
    }
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<Outcome> {
    match &args.action {
        Action::List => list::run(args),
        Action::Show(show) => show::run(args, show),
        Action::Set(set) => change(args, set),
        Action::Suggest(suggest) => {
            let json = args.json.then(|| "--json".into());
            place::run(
                &["group", "suggest"],
                &[args.service.words(), json.into_iter().collect(), suggest.words.clone()].concat(),
            )
        }
        Action::Reset { group } => print_settings(args, &find(args, group)?.reset(group)?),
    }
}

/// The service that has the group. Fails if none has it, or if none answers.
fn find(args: &Args, group: &str) -> anyhow::Result<Service> {
    let mut known = Vec::new();
    let services = args.services()?;
    if services.is_empty() {
        bail!("no service answers that could have a group {group}: see pagefold run and pagefold serve");
    }
    for service in services {
        let groups = service.groups()?;
        if groups.iter().any(|g| g.name == group) {
            return Ok(service);
        }
        known.extend(groups.into_iter().map(|g| g.name));
    }
    let others = match known.is_empty() {
        true => ", and no other that you may deal with: see pagefold run and pagefold serve".to_owned(),
        false => format!(" that you may deal with; there are {}", known.join(", ")),
    };
    Err(Stop::Usage(format!("there is no group {group}{others}")).into())
}

fn change(args: &Args, set: &SetArgs) -> anyhow::Result<Outcome> {
    let change = Change {
        scan_rate: set.scan_rate,
        zero_pages: set.zero_pages,
        huge_pages: set.huge_pages,
        fold: set.fold,
        intra_member_only: set.intra_member_only,
        pool: set.pool,
        index_memory: set.index_memory,
        latency: set.latency,
    };
    if change.is_empty() {
        return Err(Stop::Usage("nothing to set: see pagefold group set --help".into()).into());
    }
    print_settings(args, &find(args, &set.group)?.set(&set.group, change)?)
}

fn print_settings(args: &Args, settings: &Settings) -> anyhow::Result<Outcome> {
    if args.json {
        output::line(serde_json::to_string_pretty(&Printed::from(settings))?)?;
    }
    Ok(Outcome::Done)
}
