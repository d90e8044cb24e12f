//! Names and labels that users give to containers, by their runtimes' own word.
//!
//! | runtime | name and labels |
//! |---|---|
//! | LXC, systemd-nspawn | the control group has the name; there are no labels |
//! | Docker | its file `config.v2.json`, which root alone can write |
//! | Podman, of root | `podman container inspect` |
//! | others | the first digits of the hash; no labels |

use crate::facts::ContainerFacts;
use guest::{Container, GuestKind};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Directory of Docker's containers.
const DOCKER: &str = "/var/lib/docker/containers";
/// Longest file of Docker's, in bytes.
const MOST_BYTES: u64 = 4 << 20;
/// Time for which a container's names and labels are believed: 10 s. Labels cannot be changed; names can.
const BELIEVED: Duration = Duration::from_secs(10);

/// The facts of containers.
#[derive(Debug, Default)]
pub struct Labels {
    known: HashMap<String, (Instant, ContainerFacts)>,
}

/// A runtime's word on a container. Docker's names begin with a slash.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Said {
    #[serde(default)]
    name: String,
    config: Config,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Config {
    labels: Option<BTreeMap<String, String>>,
}

impl Labels {
    /// Forgets what may have changed.
    pub fn look_anew(&mut self) {
        self.known.retain(|_, (since, _)| since.elapsed() < BELIEVED);
    }

    /// The facts of a container. The runtime is asked only `with_names`.
    pub fn of(&mut self, container: &Container, with_names: bool) -> ContainerFacts {
        if let Some((_, facts)) = self.known.get(&container.group) {
            return facts.clone();
        }
        let mut facts = ContainerFacts { names: vec![container.name.clone()], ..ContainerFacts::default() };
        if !with_names {
            return facts;
        }
        let said = match container.kind {
            GuestKind::Docker => docker(&container.group),
            GuestKind::Podman => podman(&container.name),
            _ => None,
        };
        if let Some(Said { name, config }) = said {
            facts.names.push(name.trim_start_matches('/').to_owned());
            facts.labels = config.labels.unwrap_or_default();
        }
        self.known.insert(container.group.clone(), (Instant::now(), facts.clone()));
        facts
    }
}

fn docker(group: &str) -> Option<Said> {
    let part = group.rsplit('/').next()?;
    let id = part.strip_suffix(".scope").unwrap_or(part).trim_start_matches("docker-");
    let is_id = !id.is_empty() && id.bytes().all(|byte| byte.is_ascii_hexdigit());
    let path = PathBuf::from(DOCKER).join(Some(id).filter(|_| is_id)?).join("config.v2.json");
    parsed(&host::read_plain_file(&path, MOST_BYTES).ok()?)
}

fn podman(id: &str) -> Option<Said> {
    let mut command = Command::new("podman");
    command.args(["container", "inspect", id]).stdin(Stdio::null()).stderr(Stdio::null());
    let said: Vec<Said> = parsed(&command.output().ok()?.stdout)?;
    said.into_iter().next()
}

fn parsed<T: DeserializeOwned>(text: &[u8]) -> Option<T> {
    serde_json::from_slice(text).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_labels_are_read_as_runtimes_write_them() {
        let docker =
            br#"{"StreamConfig":{},"ID":"4c01","Config":{"Hostname":"4c01","Labels":{"tenant":"acme"}},"Name":"/web"}"#;
        let said: Said = parsed(docker).unwrap();
        assert_eq!((said.name.as_str(), &said.config.labels.unwrap()["tenant"][..]), ("/web", "acme"));
        let podman = br#"[{"Id":"4c01","Name":"web","Config":{"Labels":null}}]"#;
        let said: Vec<Said> = parsed(podman).unwrap();
        assert_eq!((said[0].name.as_str(), said[0].config.labels.is_none()), ("web", true));
    }
}
