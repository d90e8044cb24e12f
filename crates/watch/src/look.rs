//! Asks services about all of their groups and members, and keeps their answers.

use anyhow::bail;
use api::ask::{GroupLine, GroupState, MemberLine, Trouble};
use api::change::Change;
use api::client::Service;
use api::control::Settings;
use api::member_words::START_ITSELF;
use api::place::{Meant, Place};
use api::shown;
use cli::exit::in_words;
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// The answers of all services at one moment.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Look {
    /// Milliseconds from the start of the program to these answers.
    pub at_ms: u64,
    /// The date, in seconds since 1970.
    pub unix_s: u64,
    /// The answers of each service.
    pub services: Vec<Answers>,
}

/// The answers of one service.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Answers {
    /// The service's directory.
    pub dir: String,
    /// Troubles of the service itself.
    pub troubles: Vec<Trouble>,
    /// Its groups.
    pub groups: Vec<GroupLine>,
    /// Its members.
    pub members: Vec<MemberLine>,
    /// States of its groups, with a row for each member.
    pub states: Vec<GroupState>,
    /// Groups whose states could not be had, and why.
    pub silent: Vec<(String, String)>,
}

/// What is shown of a member without an agent: where to find the reason. To find it here, its process would have to be
/// examined, which takes rights that a client of the service may lack.
fn absent(group: &str, is_connected: bool) -> Option<shown::Look> {
    let why = || format!("no agent of it is connected; pagefold group show {group} tells why");
    (!is_connected).then(|| shown::Look { is_stopped: false, why: why(), fix: START_ITSELF.to_owned() })
}

impl Look {
    /// Asks all services that the caller means. `began` is when the program started.
    ///
    /// # Errors
    /// No service answers.
    pub fn take(meant: &Meant, began: Instant) -> anyhow::Result<Self> {
        let services = Service::find(meant)?;
        if services.is_empty() {
            bail!("no service answers: see pagefold run and pagefold serve");
        }
        let services = services.iter().map(Answers::of).collect::<anyhow::Result<_>>()?;
        #[expect(clippy::disallowed_methods, reason = "a date that people read")]
        let unix_s = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        Ok(Self { at_ms: u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX), unix_s, services })
    }
}

impl Answers {
    fn of(service: &Service) -> anyhow::Result<Self> {
        let mut answers = Self {
            dir: service.place.dir().display().to_string(),
            groups: service.groups()?,
            // A service of an earlier version knows no such question.
            troubles: service.troubles().unwrap_or_default(),
            members: service.members()?,
            ..Self::default()
        };
        for group in &answers.groups {
            match service.show(&group.name) {
                Ok(mut state) => {
                    shown::complete(&mut state, &answers.members, |_, connected| absent(&group.name, connected));
                    answers.states.push(state);
                }
                Err(e) => answers.silent.push((group.name.clone(), cli::printable(&in_words(&e)))),
            }
        }
        Ok(answers)
    }
}

/// Has the service in a directory change settings of a group.
///
/// # Errors
/// The service refuses, or does not answer.
pub fn change(dir: &str, group: &str, change: Change) -> anyhow::Result<Settings> {
    Service::connect_soon(&Place::at(Path::new(dir)))?.set(group, change)
}
