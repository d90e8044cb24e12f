//! `pagefold ksm`: drives ksmd, the kernel's own merger, on a host of one trust domain.

use anyhow::Context;
use balance::ksm::{Bounds, Rule};
use cli::exit::{Outcome, Stop};
use cli::output;
use cli::size::{count, parse_bytes, signed_bytes};
use cli::time::parse_seconds;
use lend::ksmd::{self, Driving, Look, Status};
use std::time::{Duration, Instant};

/// Greatest value of `--for` and `--every`, in seconds: 1 year.
const MOST_S: u64 = 366 * 86_400;
/// Pause between two checks whether this process is to end: 50 ms.
const PAUSE: Duration = Duration::from_millis(50);

/// Arguments of `pagefold ksm`.
#[derive(clap::Args)]
#[command(after_help = "\
ksmd merges equal pages of all programs that ask for it (MADV_MERGEABLE, as QEMU does; pagefold run --via ksm). Groups do not
hold there: programs learn by timing what others hold. pagefold group keeps groups apart, without ksmd.

Examples:
  pagefold ksm drive --one-trust-domain               off until memory is short, then as fast as it merges
  pagefold ksm drive --one-trust-domain --rule advisor --off-until-pressure
  pagefold ksm status --json                          what is merged, what it saves and costs, net
  pagefold ksm restore                                knobs as they were before a driver that was killed with its guard")]
pub struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand)]
enum Action {
    /// Set ksmd's knobs by a rule, until this command is told to end; then all knobs are as before
    Drive(DriveArgs),
    /// Merged pages, what they save and cost, and the driver of ksmd
    Status {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Put back knobs that a driver left behind which was killed together with its guard
    Restore,
    /// Waits for the end of a driver, and puts its knobs back
    #[command(hide = true)]
    Guard,
}

#[derive(clap::Args)]
struct DriveArgs {
    /// Rule: off until memory is short, and then as fast as it merges (need). Those of other programs (ksmtuned, mom). The kernel's own,
    /// since Linux 6.8 (advisor)
    #[arg(long, value_name = "need|ksmtuned|mom|advisor", default_value = "need", value_parser = parse_rule)]
    rule: Rule,
    /// Merge nothing with any rule until memory is short
    #[arg(long)]
    off_until_pressure: bool,
    /// Available memory below which memory is short, as a size or as a part of RAM
    #[arg(long, value_name = "SIZE|N%", default_value = "20%", value_parser = parse_bound)]
    pressure_below: u64,
    /// Whether pages of different NUMA nodes become one: true or false. It can only be changed while nothing is merged
    #[arg(long, value_name = "BOOL", action = clap::ArgAction::Set)]
    merge_across_nodes: Option<bool>,
    /// Time between two looks, usually that of the rule: 10s, with ksmtuned 60s
    #[arg(long, value_name = "TIME", value_parser = parse_window)]
    every: Option<u64>,
    /// End after so long
    #[arg(long = "for", value_name = "TIME", value_parser = parse_window)]
    lasts: Option<u64>,
    /// All programs on this host may learn what the others hold
    #[arg(long)]
    one_trust_domain: bool,
    /// Print JSON, an object for each look
    #[arg(long)]
    json: bool,
}

fn parse_rule(text: &str) -> Result<Rule, String> {
    let rule = Rule::ALL.into_iter().find(|rule| rule.name() == text);
    rule.ok_or_else(|| format!("{text:?} is no rule: use need, ksmtuned, mom or advisor"))
}

fn parse_window(text: &str) -> Result<u64, String> {
    match parse_seconds(text, MOST_S)? {
        0 => Err("a second is the least".into()),
        seconds => Ok(seconds),
    }
}

fn parse_bound(text: &str) -> Result<u64, String> {
    match text.strip_suffix('%').map(str::parse::<u64>) {
        Some(Ok(percent @ 0..=100)) => Ok(host::ram_bytes() / 100 * percent),
        Some(_) => Err(format!("{text:?} is no part of RAM: use 0% to 100%, or a size")),
        None => parse_bytes(text),
    }
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<Outcome> {
    match &args.action {
        Action::Drive(args) => drive(args)?,
        Action::Status { json: true } => output::line(serde_json::to_string_pretty(&ksmd::status()?)?)?,
        Action::Status { json: false } => output::bytes(status_text(&ksmd::status()?).as_bytes())?,
        Action::Restore => {
            let was_left = ksmd::restore()?;
            output::line(if was_left { "ksmd's knobs are as they were" } else { "nothing was left behind" })?;
        }
        Action::Guard => ksmd::guard()?,
    }
    Ok(Outcome::Done)
}

fn drive(args: &DriveArgs) -> anyhow::Result<()> {
    if !args.one_trust_domain {
        let why = "ksmd merges pages of all programs that ask for it, and by timing they learn what others hold";
        return Err(Stop::Usage(format!("{why}: say --one-trust-domain where they may, or use groups")).into());
    }
    host::note_interrupts().context("cannot catch signals")?;
    let bounds = Bounds { short_below_bytes: args.pressure_below, off_until_short: args.off_until_pressure };
    let window = args.every.map_or(args.rule.window(), Duration::from_secs);
    let end = args.lasts.map(|seconds| Instant::now() + Duration::from_secs(seconds));
    let mut driving = Driving::begin(args.rule, bounds, args.merge_across_nodes)?;
    while host::interrupted().is_none() && end.is_none_or(|end| Instant::now() < end) {
        let look = driving.look()?;
        if args.json {
            output::line(serde_json::to_string(&look)?)?;
        } else if look.is_new {
            output::line(look_text(&look))?;
        }
        wait(window, end);
    }
    driving.end()
}

/// Waits for the time `window`. Returns earlier at `end`, and when a signal tells this process to end.
fn wait(window: Duration, end: Option<Instant>) {
    let until = Instant::now() + window;
    let until = end.map_or(until, |end| end.min(until));
    while Instant::now() < until && host::interrupted().is_none() {
        std::thread::sleep(PAUSE);
    }
}

fn look_text(look: &Look) -> String {
    let does = match (look.runs, look.pages_to_scan, look.sleep_millisecs) {
        (false, ..) => "ksmd stops".to_owned(),
        (true, Some(pages), Some(sleep)) => format!("ksmd scans {} pages every {sleep} ms", count(pages)),
        (true, ..) => "ksmd runs".to_owned(),
    };
    let cpu = look.ksmd_cpu_s.map_or(String::new(), |cpu| format!(", for {cpu:.1} s of processor time"));
    format!("{does}: {}; it saves {} net{cpu}", look.reason, signed_bytes(look.net_bytes))
}

fn status_text(status: &Status) -> String {
    let mut text = match (&status.driver, status.left_behind) {
        (Some(driver), _) => {
            let rule = driver.rule.name();
            format!("driven by process {} for {} s, rule {rule}: {}\n", driver.pid, driver.seconds, driver.reason)
        }
        (None, true) => "a driver that was killed has left its knobs: pagefold ksm restore\n".to_owned(),
        (None, false) => "not driven\n".to_owned(),
    };
    let knobs: Vec<String> = status.knobs.iter().map(|(name, value)| format!("{name} {value}")).collect();
    text += &format!("knobs           {}\n", knobs.join(", ").replace('"', ""));
    let zeros = status.zero_pages.map_or(String::new(), |pages| format!(", and {} of zeros", count(pages)));
    let [shared, sharing] = [status.pages_shared, status.pages_sharing].map(count);
    text += &format!("merged          {sharing} pages into {shared} others{zeros}\n");
    text += &format!("saved           {}, net of ksmd's records\n", signed_bytes(status.net_bytes));
    let cpu =
        status.ksmd_cpu_s.map_or("not shown in this PID namespace".into(), |cpu| format!("{cpu:.1} s since boot"));
    let driven = status.driver.as_ref().and_then(|driver| driver.ksmd_cpu_s);
    let driven = driven.map_or(String::new(), |cpu| format!(", {cpu:.1} s of it driven"));
    text + &format!("processor time  {cpu}{driven}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_rules_and_times_are_parsed() {
        assert!(Rule::ALL.iter().all(|rule| parse_rule(rule.name()) == Ok(*rule)));
        assert!(parse_rule("fast").is_err_and(|why| why.contains("ksmtuned")));
        assert_eq!((parse_bound("0%"), parse_bound("64M")), (Ok(0), Ok(64 << 20)));
        assert!(parse_bound("100%").is_ok_and(|all| all > host::ram_bytes() / 100 * 99));
        assert!(["101%", "-1%", "%", "lots"].iter().all(|text| parse_bound(text).is_err()));
        assert!(parse_window("10s") == Ok(10) && parse_window("0s").is_err());
    }

    #[test]
    fn look_tells_knobs_reason_and_net_figures() {
        let look = Look {
            at_s: 1,
            runs: true,
            pages_to_scan: Some(1250),
            sleep_millisecs: Some(10),
            reason: "memory is short".into(),
            net_bytes: -4096,
            ksmd_cpu_s: Some(0.5),
            is_new: true,
        };
        let text =
            "ksmd scans 1,250 pages every 10 ms: memory is short; it saves -4 KiB net, for 0.5 s of processor time";
        assert_eq!(look_text(&look), text);
        assert!(look_text(&Look { runs: false, ..look }).starts_with("ksmd stops: memory is short;"));
    }
}
