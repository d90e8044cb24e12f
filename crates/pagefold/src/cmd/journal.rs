//! `pagefold journal`: who has changed what.

use crate::cmd::which::Which;
use anyhow::{Context, bail};
use cli::exit::Outcome;
use cli::journal::{By, Journal, Line};
use cli::{output, printable};
use serde_json::{Map, Value};
use std::time::{Duration, SystemTime};

/// Most bytes that are read at once: 1 MiB.
const MOST_READ: usize = 1 << 20;
/// Pause before the journal is read again for new lines, with `--follow`: 500 ms.
const LOOK: Duration = Duration::from_millis(500);

/// Arguments of `pagefold journal`.
#[derive(clap::Args)]
#[command(after_help = "\
Settings, rules, processes that were attached and detached, what balancing did, starts of the service, and requests
to the web side with tokens that are none: who did it, and from what to what. Lines are appended, and never changed. The last
40 MiB are kept, in DIR/journal. The web side streams the same: /v1/journal. It is read from the files: also while
no service runs.

Examples:
  pagefold journal --since 1h
  pagefold journal --since 2026-11-29T12:00:00Z --json
  pagefold journal --follow")]
pub struct Args {
    /// Lines since then: a time in UTC, or how long ago
    #[arg(long, value_name = "WHEN", value_parser = parse_since)]
    since: Option<SystemTime>,
    /// Go on with lines that are yet to come
    #[arg(long)]
    follow: bool,
    #[command(flatten)]
    service: Which,
    /// Print JSON, an object a line
    #[arg(long)]
    json: bool,
}

/// Parses `2026-11-29T12:00:00Z`, `2026-11-29 12:00:00` or `1h 30min` (ago).
#[expect(clippy::disallowed_methods, reason = "a date that people name")]
fn parse_since(text: &str) -> Result<SystemTime, String> {
    let ago = || humantime::parse_duration(text).ok().and_then(|ago| SystemTime::now().checked_sub(ago));
    let at = humantime::parse_rfc3339_weak(text).ok().or_else(ago);
    at.ok_or_else(|| format!("{text:?} is no time: use 2026-11-29T12:00:00Z, or 90min for 90 minutes ago"))
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<Outcome> {
    let place = args.service.meant().place();
    let journal = Journal::of_service(place.dir());
    let path = journal.path();
    if !args.follow && std::fs::symlink_metadata(&path).is_err_and(|e| e.kind() == std::io::ErrorKind::NotFound) {
        bail!("there is no journal at {}: no service has run there, or it is another user's", path.display());
    }
    let mut place = 0;
    loop {
        let read = journal.read(place, MOST_READ).with_context(|| format!("cannot read {}", path.display()))?;
        place = read.next;
        for (_, text) in &read.lines {
            let Ok(line) = serde_json::from_str::<Line<Map<String, Value>>>(text) else { continue };
            let at = humantime::parse_rfc3339(&line.time).unwrap_or(SystemTime::UNIX_EPOCH);
            if args.since.is_none_or(|since| at >= since) {
                output::line(printable(&if args.json { text.clone() } else { in_words(&line) }))?;
            }
        }
        match (read.lines.is_empty(), args.follow) {
            (true, false) => return Ok(Outcome::Done),
            (true, true) => std::thread::sleep(LOOK),
            (false, _) => {}
        }
    }
}

/// A line in words: `2026-11-29T12:00:00.123Z user 0 (process 17) settings_changed, group acme: fold off -> on`.
fn in_words(line: &Line<Map<String, Value>>) -> String {
    let empty = Value::Null;
    let of = |key: &str| line.more.get(key).unwrap_or(&empty);
    let mut words = format!("{} {} {}", line.time, who(&line.by), line.what);
    if let (Some(from), Some(to)) = (of("from").as_object(), of("to").as_object()) {
        let change = |(key, to): (&String, &Value)| format!("{key} {} -> {}", plain(&from[key]), plain(to));
        let changes: Vec<String> = to.iter().map(change).collect();
        let changes = if changes.is_empty() { "as before".to_owned() } else { changes.join(", ") };
        return words + &format!(", group {}: {changes}", plain(of("group")));
    }
    for (key, value) in line.more.iter().filter(|(_, value)| !value.is_null()) {
        words += &format!(", {key} {}", plain(value));
    }
    words
}

fn who(by: &By) -> String {
    let process = by.pid.map(|pid| format!(" (process {pid})")).unwrap_or_default();
    let user = by.user.map(|user| format!("user {user}{process}"));
    let token = by.token.as_ref().map(|token| format!("token {token}"));
    let address = by.address.as_ref().map(|address| format!("at {address}"));
    let web = by.web.then(|| "over HTTP".to_owned());
    [token, user, address, web].into_iter().flatten().collect::<Vec<_>>().join(" ")
}

fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn line_says_who_has_changed_what_from_what_to_what() {
        let line = |by, what: &str, more: Value| Line {
            time: "2026-11-29T12:00:00.123Z".into(),
            by,
            what: what.into(),
            more: more.as_object().unwrap().clone(),
        };
        let root = By { user: Some(0), pid: Some(17), ..By::default() };
        let far = By { web: true, token: Some("ops".into()), address: Some("192.0.2.1".into()), ..By::default() };
        let changed = json!({ "group": "acme", "from": { "fold": "on" }, "to": { "fold": "off" } });
        let lines = [
            (root, "settings_changed", changed, "user 0 (process 17) settings_changed, group acme: fold on -> off"),
            (far, "rule_added", json!({ "group": "a" }), "token ops at 192.0.2.1 over HTTP rule_added, group a"),
        ];
        for (by, what, more, words) in lines {
            assert_eq!(in_words(&line(by, what, more)), format!("2026-11-29T12:00:00.123Z {words}"));
        }
        assert!(
            parse_since("1h").is_ok() && parse_since("2026-11-29 12:00:00").is_ok() && parse_since("soon").is_err()
        );
    }
}
