//! `pagefold stop`: all pages private again, and attached processes left as they were before.

use crate::cmd::attach;
use crate::cmd::which::Which;
use anyhow::bail;
use api::ask::{GroupState, MemberLine};
use api::change::Change;
use api::client::Service;
use api::control::{Fold, MemberReport};
use cli::exit::{Outcome, Stop};
use cli::{output, say};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;
use std::time::{Duration, Instant};

/// Time between two questions how much is still folded: 500 ms.
const LOOK: Duration = Duration::from_millis(500);
/// Time for which nothing must be folded before a group counts as stopped: 2 s. Members report their figures each
/// second.
const SETTLED: Duration = Duration::from_secs(2);

/// Arguments of `pagefold stop`.
#[derive(clap::Args)]
#[command(after_help = "\
Nothing more is folded, and all that is folded becomes private again. That takes memory: nothing is begun
where it does not fit. Attached processes are detached. Programs that were started with pagefold run stay
members, with nothing folded, until they end or pagefold detach takes them out. pagefold group reset has a
group fold again.

Examples:
  pagefold stop --group acme
  pagefold stop --everything")]
pub struct Args {
    /// This group
    #[arg(long, value_name = "NAME", required_unless_present = "everything", conflicts_with = "everything")]
    group: Option<String>,
    /// All groups that you may deal with
    #[arg(long)]
    everything: bool,
    /// Longest time to wait until all pages are private, and for each process that is detached
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    wait: u64,
    #[command(flatten)]
    service: Which,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// A group that was stopped.
#[derive(Serialize)]
struct Stopped {
    group: String,
    /// Bytes that were folded.
    folded_bytes: u64,
    /// Bytes that are still folded.
    left_bytes: u64,
    /// Processes that were detached.
    detached: Vec<u32>,
    /// Processes that were started as members.
    members: Vec<u32>,
}

/// A group that is being stopped.
struct Group<'a> {
    service: &'a Service,
    name: String,
    folded_bytes: u64,
}

impl Group<'_> {
    /// Memory that is still folded, in bytes, and whether a member may still fold, because it has not got the new
    /// settings yet. Pages that such a member is folding are in no figure.
    fn left(&self) -> anyhow::Result<(u64, bool)> {
        let state = self.service.show(&self.name)?;
        Ok((folded_bytes(&state), state.report.members.iter().any(MemberReport::may_fold)))
    }
}

/// Memory of a group's members without a frame of its own, in bytes: folded pages and zero pages.
fn folded_bytes(state: &GroupState) -> u64 {
    page::pages_to_bytes(state.report.sharing_pages.saturating_add(state.report.zero_pages))
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<Outcome> {
    let services = Service::find(&args.service.meant())?;
    let groups = meant(args, &services)?;
    let needed = groups.iter().map(|group| group.folded_bytes).fold(0, u64::saturating_add);
    let available = host::available_bytes().unwrap_or(0);
    let [needed_words, available_words] = [needed, available].map(cli::bytes);
    if needed > available {
        bail!(
            "{needed_words} are folded, and {available_words} are available: nothing is made private. End guests, or stop one group \
             at a time (--group)"
        );
    }
    if needed > 0 {
        say!("pagefold: {needed_words} become private; {available_words} are available");
    }
    let unfold = Change { fold: Some(Fold::Unfold), ..Change::default() };
    let mut outcome = Outcome::Done;
    for group in &groups {
        if let Err(e) = group.service.set(&group.name, unfold) {
            say!("pagefold: group {}: {e:#}", group.name);
            outcome = Outcome::Partial;
        }
    }
    let patience = Duration::from_secs(args.wait);
    let left = wait(&groups, needed, patience)?;
    let mut all = Vec::new();
    for (group, (left_bytes, may_fold)) in groups.iter().zip(left) {
        if may_fold {
            say!("pagefold: group {}: a member has not answered in {} s, and may still fold", group.name, args.wait);
        }
        let (stopped, is_left) = leave_all(group, left_bytes, patience)?;
        if !is_left || left_bytes > 0 || may_fold {
            outcome = Outcome::Partial;
        }
        all.push(stopped);
    }
    if args.json {
        output::line(serde_json::to_string_pretty(&all)?)?;
    } else {
        all.iter().try_for_each(|stopped| output::line(in_words(stopped)))?;
    }
    Ok(outcome)
}

/// Detaches the members of a group that were attached. Returns what was done, and whether all of them have been
/// detached.
fn leave_all(group: &Group<'_>, left_bytes: u64, patience: Duration) -> anyhow::Result<(Stopped, bool)> {
    let of_group = |member: &MemberLine| member.group == group.name;
    let members: Vec<MemberLine> = group.service.members()?.into_iter().filter(of_group).collect();
    let (attached, started): (Vec<_>, Vec<_>) = members.into_iter().partition(MemberLine::was_attached);
    let (mut detached, mut is_left) = (Vec::new(), true);
    for member in attached {
        match attach::leave(group.service, &member, patience) {
            Ok(()) => detached.push(member.identity.pid),
            Err(e) => {
                say!("pagefold: {e:#}");
                is_left = false;
            }
        }
    }
    let members = started.iter().map(|member| member.identity.pid).collect();
    let (group, folded_bytes) = (group.name.clone(), group.folded_bytes);
    Ok((Stopped { group, folded_bytes, left_bytes, detached, members }, is_left))
}

fn meant<'a>(args: &Args, services: &'a [Service]) -> anyhow::Result<Vec<Group<'a>>> {
    let mut groups = Vec::new();
    for service in services {
        for line in service.groups()? {
            if args.group.as_ref().is_none_or(|group| *group == line.name) {
                let folded_bytes = folded_bytes(&service.show(&line.name)?);
                groups.push(Group { service, name: line.name, folded_bytes });
            }
        }
    }
    match &args.group {
        Some(group) if groups.is_empty() => {
            Err(Stop::Usage(format!("there is no group {group} that you may deal with: see pagefold group list"))
                .into())
        }
        _ => Ok(groups),
    }
}

/// Waits until nothing is folded and no member may fold, for `patience` at most. Returns [`Group::left`] of each group.
fn wait(groups: &[Group<'_>], all: u64, patience: Duration) -> anyhow::Result<Vec<(u64, bool)>> {
    let bar = ProgressBar::with_draw_target(Some(all), ProgressDrawTarget::stderr_with_hz(4));
    bar.set_style(ProgressStyle::with_template("{bar:30} {bytes} of {total_bytes} private, {eta} left")?);
    let (until, mut settled) = (Instant::now() + patience, Instant::now() + SETTLED);
    loop {
        let left = groups.iter().map(Group::left).collect::<anyhow::Result<Vec<(u64, bool)>>>()?;
        let sum = left.iter().fold(0, |sum: u64, (bytes, _)| sum.saturating_add(*bytes));
        let may_fold = left.iter().any(|(_, may_fold)| *may_fold);
        bar.set_position(all.saturating_sub(sum));
        let now = Instant::now();
        if sum > 0 || may_fold {
            settled = now + SETTLED;
        }
        if now >= settled || now > until {
            bar.finish_and_clear();
            return Ok(left);
        }
        std::thread::sleep(LOOK);
    }
}

fn in_words(stopped: &Stopped) -> String {
    let Stopped { group, folded_bytes, left_bytes, detached, members } = stopped;
    let private = cli::bytes(folded_bytes.saturating_sub(*left_bytes));
    let left = if *left_bytes > 0 { format!(", {} are still folded", cli::bytes(*left_bytes)) } else { String::new() };
    let stay = match members.len() {
        0 => String::new(),
        n => format!(
            "; {n} that pagefold run has started stay members, with nothing folded (pagefold detach takes them out)"
        ),
    };
    format!("group {group}: {private} private again{left}; {} detached{stay}", detached.len())
}
