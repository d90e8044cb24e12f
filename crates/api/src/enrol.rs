//! Rules that enrol running processes as members, and the processes that could not be enrolled.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Processes with less private memory are not attached, because that is not worth its costs, unless a rule says
/// otherwise: 4 MiB.
pub const LEAST_BYTES: u64 = 4 << 20;

/// The merger that a member's pages are merged by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum Via {
    /// An agent in its process, with pages of its group alone.
    #[default]
    Agent,
    /// The kernel's own, ksmd: with pages of any process of the host that asked for that. Groups do not hold there.
    Ksm,
}

impl Via {
    /// The word for it on command lines and in configurations.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Agent => "agent",
            Self::Ksm => "ksm",
        }
    }
}

impl FromStr for Via {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        [Self::Agent, Self::Ksm]
            .into_iter()
            .find(|via| via.word() == word)
            .ok_or_else(|| format!("{word:?} merges nothing: use agent or ksm"))
    }
}

/// Why a service refuses to have members merged by ksmd.
pub const NOT_ONE_DOMAIN: &str = "ksmd merges pages of any processes that asked for that, so groups do not hold there: where all of \
                                  this host trusts each other, write one-trust-domain = true into [service] of the \
                                  service's configuration";

/// A rule: every property that is given must fit. Texts are patterns, with `*` and `?`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rule {
    /// The group whose members the processes become.
    pub group: String,
    /// A control group of theirs, or one that it lies in: a pattern for each part of the path.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cgroup: Option<String>,
    /// The container that they run in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container: Option<String>,
    /// A label of that container, and its value.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container_label: Option<(String, String)>,
    /// The domain of libvirt that they run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub domain: Option<String>,
    /// Whether the metadata of that domain must name this group.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub domain_metadata: bool,
    /// The unit of systemd that they belong to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unit: Option<String>,
    /// The user whose rights they have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<u32>,
    /// Whether all private anonymous memory is folded, and not only what the program advises.
    pub all_anonymous: bool,
    /// The merger.
    #[serde(default)]
    pub via: Via,
    /// Least private memory of a process in bytes; smaller ones are left alone.
    pub at_least_bytes: u64,
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let label = self.container_label.as_ref().map(|(key, value)| format!("{key}={value}"));
        let user = self.user.map(|user| user.to_string());
        let parts = [
            ("cgroup", &self.cgroup),
            ("container", &self.container),
            ("container-label", &label),
            ("domain", &self.domain),
            ("unit", &self.unit),
            ("user", &user),
        ];
        let words = parts.into_iter().filter_map(|(key, value)| Some(format!("{key} {}", value.as_ref()?)));
        let words: Vec<String> = words.chain(self.domain_metadata.then(|| "domain-metadata".to_owned())).collect();
        f.write_str(&words.join(", "))
    }
}

/// Why a process of root's that is not dumpable (`PR_SET_DUMPABLE`) is not attached.
pub const HIDES: &str = "it has asked the kernel to hide its memory, also from others of root's (prctl PR_SET_DUMPABLE), as ssh-agent does, \
                         or has changed its rights: no page of it is shared";

/// A process that a rule fits, or that a member has forked, and that is no member.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct NotAttached {
    /// Its pid.
    pub pid: u32,
    /// The file name of its program.
    pub program: String,
    /// The group that the rule names, or the parent's.
    pub group: String,
    /// Of a forked child: its family, the name of the first member of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub family: Option<String>,
    /// Why it is no member, and what to do.
    pub why: String,
    /// Seconds until it is tried again; `None`: it is looked at, and not tried.
    pub again_s: Option<u64>,
}

/// Most [`NotAttached`] processes in one report: of all processes that rules fit, and of the children of one process.
pub const MOST_NOT_ATTACHED: (usize, usize) = (256, 16);
/// Longest reason in [`NotAttached::why`], in characters.
pub const MOST_REASON: usize = 300;

/// The reason why a process could not be attached, taken from what `pagefold-attach` has written to stderr.
pub fn reason(errors: &str, pid: u32) -> String {
    let words = errors.split_whitespace().collect::<Vec<_>>().join(" ");
    let words = words.strip_prefix("pagefold: ").unwrap_or(&words);
    let why = words.strip_prefix(&format!("process {pid} cannot be attached: ")).unwrap_or(words);
    if why.is_empty() { "it ended without a word".to_owned() } else { cli::printable(why) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reason_is_told_without_what_everybody_knows() {
        assert_eq!(
            reason("pagefold: process 7 cannot be attached: it is traced\nby another\n", 7),
            "it is traced by another"
        );
        assert_eq!(reason("pagefold: there is no process 7", 7), "there is no process 7");
        assert_eq!(reason("", 7), "it ended without a word");
    }
}
