//! `pagefold admit`: whether further guests fit, with a promise of memory.

use super::balance::parse_assurance;
use super::which::Which;
use anyhow::Context;
use api::name;
use api::promise::{self, Answered, Asked, Assurance, MOST_GUESTS, MOST_HOLD_S, NoLook, Wanted};
use cli::exit::{Outcome, Stop};
use cli::journal::By;
use cli::output;
use cli::size::{bytes, parse_bytes, plural};
use cli::time::parse_seconds;
use start::Store;
use std::fmt::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Longest wait for other processes that hold the lock of the promises: 10 s.
const PATIENCE: Duration = Duration::from_secs(10);
/// Longest wait, with `--wait`, until the process that balances memory has recorded facts of the host and its guests:
/// 60 s.
const FIRST_LOOK: Duration = Duration::from_secs(60);
/// Pause between two attempts to ask during this wait: 100 ms.
const PAUSE: Duration = Duration::from_millis(100);

/// Arguments of `pagefold admit`.
#[derive(clap::Args)]
#[command(after_help = "\
Needs a process that balances memory: a service with [balance], or pagefold balance apply --every. The answer is by its last look,
by memory that is available at the moment, and by all promises. The exit code is 1 for a no. A promise for one guest ends
when a guest of its name is seen. Any promise ends when it lapses, and by pagefold balance reserve 0 --for NAME.

Examples:
  pagefold admit --like web-1 -n 3                     three more like web-1, held for a minute
  pagefold admit --memory 512M --group acme --hold 0   a question alone: nothing is promised
  pagefold admit --template web --group acme -n 20 --policy likely")]
pub struct Args {
    /// VM that they are like, by id or name
    #[arg(long, value_name = "GUEST", required_unless_present_any = ["template", "memory"])]
    like: Option<String>,
    /// Template that they are clones of
    #[arg(long, value_name = "TEMPLATE", requires = "group", conflicts_with_all = ["like", "memory"])]
    template: Option<String>,
    /// Memory of each
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    memory: Option<u64>,
    /// Their group
    #[arg(long, value_name = "GROUP", value_parser = name::parse_group)]
    group: Option<String>,
    /// How many
    #[arg(short = 'n', value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=MOST_GUESTS))]
    guests: u64,
    /// Time after which the promise lapses, 10m at most; with 0, nothing is promised
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = parse_hold)]
    hold: u64,
    /// Storm for which there has to be memory: full (strict), as measured (likely), or none [default: that of the process that balances memory]
    #[arg(long, value_name = "POLICY", value_parser = parse_assurance)]
    policy: Option<Assurance>,
    /// Name of the promise: the guest's, where it is one
    #[arg(long = "for", value_name = "NAME", value_parser = promise::parse_name)]
    name: Option<String>,
    /// Have loans withdrawn where that makes room: it takes 10 s and more
    #[arg(long)]
    wait: bool,
    #[command(flatten)]
    service: Which,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn parse_hold(text: &str) -> Result<u64, String> {
    parse_seconds(text, MOST_HOLD_S)
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<Outcome> {
    let template = match (&args.template, &args.group) {
        (Some(template), Some(group)) => Some(Store::open(&start::templates_dir()).find(group, template)?.0),
        _ => None,
    };
    let memory_bytes = template.map(|template| template.memory.bytes).or(args.memory);
    let (like, group, guests) = (args.like.clone(), args.group.clone(), args.guests);
    let wanted = Wanted { like, memory_bytes, group, guests, ..Wanted::default() };
    let asked = Asked { wanted, assurance: args.policy, name: args.name.clone(), hold_s: args.hold };
    let answered = ask(args.service.meant().place().dir(), asked, args.wait)?;
    if args.json {
        output::line(serde_json::to_string_pretty(&answered)?)?;
    } else if answered.admission.admitted {
        output::bytes(text(&answered, args.guests).as_bytes())?;
    }
    match refusal(&answered, args.name.as_deref().unwrap_or("them")) {
        Some(no) => anyhow::bail!(no),
        None => Ok(Outcome::Done),
    }
}

/// Asks whether guests fit, by the facts that the process which balances memory for a service has recorded last. With
/// `waits`, waits for its first record, and has memory withdrawn that guests were lent beyond their guarantees.
pub fn ask(service: &Path, asked: Asked, waits: bool) -> anyhow::Result<Answered> {
    let asked = match (&asked.name, waits) {
        (None, true) => Asked { name: Some(format!("admission-of-{}", std::process::id())), ..asked },
        _ => asked,
    };
    let end = Instant::now() + FIRST_LOOK;
    let mut answered = loop {
        match promise::ask(service, &asked, &By::this_process(), PATIENCE) {
            Err(error) if error.is::<NoLook>() && waits && Instant::now() < end => std::thread::sleep(PAUSE),
            Err(error) if error.is::<NoLook>() => return Err(Stop::HostLacks(error.to_string()).into()),
            answered => break answered?,
        }
    };
    let admission = &mut answered.admission;
    if waits && asked.hold_s > 0 && admission.loans_would_do {
        let name = asked.name.clone().unwrap_or_default();
        if reserve(service, admission.bytes, &name, asked.hold_s)? {
            (admission.admitted, admission.reason, admission.again_s) = (true, None, None);
            (answered.promise, answered.held_s) = (Some(name), Some(asked.hold_s));
        }
    }
    Ok(answered)
}

/// Runs `pagefold balance reserve`, which reads the facts of the host anew, withdraws memory that guests were lent, and
/// promises it. Returns whether there was room.
fn reserve(service: &Path, bytes: u64, name: &str, hold_s: u64) -> anyhow::Result<bool> {
    let mut command = Command::new(cli::pagefold());
    command.args(["balance", "reserve", &bytes.to_string(), "--for", name, "--hold", &hold_s.to_string()]);
    let command = command.arg("--service").arg(service).stdin(Stdio::null()).stdout(Stdio::null());
    Ok(command.status().context("cannot reserve memory")?.success())
}

/// The reason of a refusal in words; `None` if the guests are admitted.
pub fn refusal(answered: &Answered, name: &str) -> Option<String> {
    let reason = answered.admission.reason.as_ref()?;
    let again = answered.admission.again_s.map_or_else(String::new, |s| format!(" (it may be otherwise in {s} s)"));
    Some(format!("no room for {}: {reason}{again}", cli::printable(name)))
}

fn text(answered: &Answered, guests: u64) -> String {
    let Answered { promise, held_s, admission } = answered;
    let costs = &admission.costs;
    let mut text = format!(
        "{} more like this fit; a full break storm needs {}, the reserve is {}\n",
        admission.more,
        bytes(admission.storm_bytes),
        bytes(admission.reserve_bytes)
    );
    let _ =
        write!(text, "yes: {} with {} ({})", plural(guests, "guest"), bytes(admission.bytes), admission.policy.name());
    if let (Some(name), Some(held_s)) = (promise, held_s) {
        let _ = write!(text, ", promised as {} for {held_s} s", cli::printable(name));
    }
    let _ = writeln!(
        text,
        "\neach takes {} after its start, {} when it has diverged, {} in the worst break storm; measured: {}",
        bytes(costs.start_bytes),
        bytes(costs.diverged_bytes),
        bytes(costs.storm_bytes),
        plural(costs.measured_guests, "guest")
    );
    if let Some(chance) = admission.chance_of_more {
        let _ = writeln!(text, "chance that one takes more than was measured: {:.1}%", chance * 100.0);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hold_is_in_seconds_or_minutes() {
        assert_eq!(["0", "60", "60s", "10m"].map(parse_hold), [Ok(0), Ok(60), Ok(60), Ok(600)]);
        assert!(
            ["", "s", "-1", "11m", "1h", "601s", "18446744073709551615m"].iter().all(|text| parse_hold(text).is_err())
        );
    }
}
