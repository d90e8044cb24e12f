//! The lines that the service writes to its journal: who has changed what, with the old and the new value.
//!
//! ```text
//!   a user who may --> a place for a line? --no--> refused, with the reason
//!                            | yes
//!                      the change is made --> its line is written --the disk is full--> it waits, and is written later
//! ```
//!
//! No line is left out, and none is merged with another. No user can fill the journal until lines of others are
//! dropped. A user has [`MOST_AN_HOUR`] lines an hour, and so has the bearer of a token. Root and the service's own
//! user have no bound. While lines wait that cannot be written, all other users are refused changes. These two may
//! still make changes until [`MOST_WAITING`] lines wait, so that a full disk does not keep them from turning folding
//! off.

#![cfg_attr(not(test), deny(clippy::arithmetic_side_effects))]

use api::change::Printed;
use api::control::Settings;
use api::place::own_uid;
use cli::journal::{By, Journal, Line, Lines};
use cli::note;
use serde_json::{Value, json};
use std::collections::{BTreeMap, VecDeque};
use std::path::Path;
use std::time::{Duration, Instant};

/// Most lines of one user, or of the bearer of one token, in an hour.
const MOST_AN_HOUR: u32 = 600;
/// The time for which lines are counted: 1 h.
const HOUR: Duration = Duration::from_secs(3600);
/// Most users and tokens whose lines are counted at a time. Meanwhile, changes by any further user are refused.
const MOST_COUNTED: usize = 1024;
/// Number of waiting lines from which on root's changes are refused, too.
const MOST_WAITING: usize = 4096;
/// Most bytes of the journal that one answer has: 32 KiB.
const MOST_READ: usize = 32 << 10;

/// The fields of a journal line about a change of settings: the settings that differ, before and after.
pub fn changed(group: &str, before: &Settings, after: &Settings) -> Value {
    let printed = |settings| serde_json::to_value(Printed::from(settings)).unwrap_or_default();
    let (before, after) = (printed(before), printed(after));
    let only = |of: &Value| {
        let differ = |(key, _): &(&String, &Value)| before[key.as_str()] != after[key.as_str()];
        let all = of.as_object().into_iter().flatten();
        Value::Object(all.filter(differ).map(|(key, value)| (key.clone(), value.clone())).collect())
    };
    json!({ "group": group, "from": only(&before), "to": only(&after) })
}

/// Adds the fields of a second JSON object to the first.
pub fn with(mut object: Value, more: Value) -> Value {
    if let (Value::Object(object), Value::Object(more)) = (&mut object, more) {
        object.extend(more);
    }
    object
}

/// The journal, and the lines that could not be written to it yet.
pub struct Trail {
    journal: Journal,
    waiting: VecDeque<Line<Value>>,
    problem: Option<String>,
    counted: BTreeMap<String, (Instant, u32)>,
}

/// The user or token for which lines are counted; `None` for root and the service's own user, whose lines are not
/// bounded.
fn counted_as(by: &By) -> Option<String> {
    match (&by.token, by.user) {
        (Some(token), _) => Some(format!("token {token}")),
        // The web side may claim any user, so lines that come through it are always counted.
        (None, Some(user)) => (by.web || user != 0 && user != own_uid()).then(|| format!("user {user}")),
        (None, None) => Some("the web side".into()),
    }
}

impl Trail {
    /// The journal of a service in this directory, to be kept. If the service manager has set a directory for logs
    /// (`LogsDirectory=`), the journal is there, so that it survives a restart of the host.
    pub fn kept(dir: &Path) -> Self {
        let logs = std::env::var_os("LOGS_DIRECTORY").filter(|logs| !logs.is_empty());
        if let Some(logs) = logs
            && let Err(e) = std::os::unix::fs::symlink(&logs, dir.join("journal"))
            && e.kind() != std::io::ErrorKind::AlreadyExists
        {
            note!("the journal is not kept in {}: {e}", Path::new(&logs).display());
        }
        Self::new(dir)
    }

    /// The journal of a service in this directory.
    pub fn new(dir: &Path) -> Self {
        let journal = Journal::of_service(dir);
        Self { journal, waiting: VecDeque::new(), problem: None, counted: BTreeMap::new() }
    }

    /// Counts one line for a change that `by` is about to make.
    ///
    /// # Errors
    /// The change must not be made, because its author has made too many within the hour, or the journal cannot be
    /// written. The text says why.
    pub fn place(&mut self, by: &By, now: Instant) -> Result<(), String> {
        self.flush();
        let key = counted_as(by);
        if let Some(problem) = &self.problem
            && (key.is_some() || self.waiting.len() >= MOST_WAITING)
        {
            return Err(format!("the journal cannot be written, and nothing is changed without: {problem}"));
        }
        let Some(key) = key else { return Ok(()) };
        self.counted.retain(|_, (since, _)| now.saturating_duration_since(*since) < HOUR);
        if self.counted.len() >= MOST_COUNTED && !self.counted.contains_key(&key) {
            return Err("too many users have changed something within the hour: try again later".into());
        }
        let (_, lines) = self.counted.entry(key.clone()).or_insert((now, 0));
        if *lines >= MOST_AN_HOUR {
            return Err(format!("{key} has changed something {MOST_AN_HOUR} times within the hour: try again later"));
        }
        *lines = lines.saturating_add(1);
        Ok(())
    }

    /// Writes a line, at once or as soon as the journal can be written again.
    pub fn write(&mut self, by: By, what: &str, more: Value) {
        self.waiting.push_back(Line::now(by, what, more));
        self.flush();
    }

    /// Writes a line of the service's own.
    pub fn write_own(&mut self, what: &str, more: Value) {
        self.write(By::this_process(), what, more);
    }

    /// Writes the lines that wait.
    pub fn flush(&mut self) {
        if self.waiting.is_empty() {
            return;
        }
        match self.journal.append(self.waiting.iter()) {
            Ok(()) => {
                self.waiting.clear();
                self.problem = None;
            }
            Err(e) => {
                let problem = format!("{}: {e}", self.journal.path().display());
                if self.problem.is_none() {
                    note!("the journal cannot be written: {problem}");
                }
                self.problem = Some(problem);
            }
        }
    }

    /// Reason why lines wait to be written; `None` if none wait.
    pub fn problem(&self) -> Option<String> {
        let waiting = self.waiting.len();
        let lost = || format!("{waiting} lines wait, and nobody but root changes anything");
        self.problem.as_ref().map(|problem| format!("the journal cannot be written: {problem}; {}", lost()))
    }

    /// The lines of the journal after the place `after`, as many as an answer has room for.
    ///
    /// # Errors
    /// They cannot be read.
    pub fn read(&self, after: u64) -> Result<Lines, String> {
        self.journal.read(after, MOST_READ).map_err(|e| format!("{}: {e}", self.journal.path().display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn user(user: u32) -> By {
        By { user: Some(user), pid: Some(1), ..By::default() }
    }

    fn over_http(by: By) -> By {
        By { web: true, ..by }
    }

    #[test]
    fn nobody_but_root_fills_the_journal_for_others() {
        let dir = tempfile::tempdir().unwrap();
        let mut trail = Trail::new(dir.path());
        let now = Instant::now();
        let token = By { token: Some("ops".into()), ..By::default() };
        for by in [user(4242), over_http(user(0)), token] {
            assert!((0..MOST_AN_HOUR).all(|_| trail.place(&by, now).is_ok()));
            assert!(trail.place(&by, now).unwrap_err().contains("600 times within the hour"));
        }
        assert!(trail.place(&user(4243), now).is_ok(), "another user has places");
        assert!((0..=MOST_AN_HOUR).all(|_| trail.place(&user(0), now).is_ok()));
        assert!(trail.place(&user(4242), now + HOUR).is_ok());
    }

    #[test]
    fn line_that_cannot_be_written_waits_and_others_than_root_change_nothing_meanwhile() {
        let dir = tempfile::tempdir().unwrap();
        let mut trail = Trail::new(dir.path());
        // A file at the path of the journal's directory keeps lines from being written.
        fs::write(dir.path().join("journal"), "").unwrap();
        trail.write(user(0), "settings_changed", json!({ "group": "acme" }));
        assert!(trail.problem().unwrap().contains("1 lines wait"));
        assert!(trail.place(&user(4242), Instant::now()).unwrap_err().contains("cannot be written"));
        // Root may still make changes, to turn folding off for example, until too many lines wait.
        assert!(trail.place(&user(0), Instant::now()).is_ok());
        (1..MOST_WAITING).for_each(|_| trail.write(user(0), "settings_changed", json!({ "group": "beta" })));
        assert!(trail.place(&user(0), Instant::now()).unwrap_err().contains("cannot be written"));
        fs::remove_file(dir.path().join("journal")).unwrap();
        assert!(trail.place(&user(0), Instant::now()).is_ok() && trail.problem().is_none());
        let lines = trail.read(0).unwrap().lines;
        assert!(lines[0].1.contains("\"group\":\"acme\"") && lines.len() > 1, "{lines:?}");
    }
}
