//! Names and labels that users have given to containers, as the container runtimes report them.
//!
//! | runtime | name and labels |
//! |---|---|
//! | LXC, systemd-nspawn | the control group has the name; there are no labels |
//! | Docker | its file `config.v2.json`, which root alone can write |
//! | Podman, of root | `podman container inspect` |
//! | others | the first digits of the hash; no labels |

use crate::facts::ContainerFacts;
use guest::{Container, GuestKind};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, kill_process_group};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::collections::{BTreeMap, HashMap};
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Directory of Docker's containers.
const DOCKER: &str = "/var/lib/docker/containers";
/// Longest `config.v2.json` of Docker, and longest answer of Podman, in bytes.
const MOST_BYTES: u64 = 4 << 20;
/// Time for `podman container inspect` to answer: 10 s. Podman waits as long as another process holds the container's
/// lock.
const PODMAN_TIME: Duration = Duration::from_secs(10);
/// Time for which Podman is asked about no container after it has not answered in time: 60 s.
const PODMAN_RESTS: Duration = Duration::from_secs(60);
/// Time between two calls of `waitpid` for Podman: 1 ms.
const LOOK: Duration = Duration::from_millis(1);
/// Time for which a container's cached names and labels are used: 10 s. A container's labels never change, but its name
/// may.
const BELIEVED: Duration = Duration::from_secs(10);

/// Names and labels of containers, which are cached.
#[derive(Debug, Default)]
pub struct Labels {
    known: HashMap<String, (Instant, ContainerFacts)>,
    podman: Podman,
}

/// Runs `podman container inspect`.
#[derive(Debug)]
struct Podman {
    program: PathBuf,
    time: Duration,
    /// The time from which on Podman may be asked again; `None` if it answered in time when it was last asked.
    rests: Option<Instant>,
}

impl Default for Podman {
    fn default() -> Self {
        Self { program: "podman".into(), time: PODMAN_TIME, rests: None }
    }
}

/// Name and labels of a container, in Docker's file or Podman's answer. Docker's names begin with a slash.
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
    /// Forgets facts that are older than [`BELIEVED`].
    pub fn look_anew(&mut self) {
        self.known.retain(|_, (since, _)| since.elapsed() < BELIEVED);
    }

    /// Names and labels of a container. The runtime is asked only `with_names`.
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
            GuestKind::Podman => self.podman.inspect(&container.name),
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

impl Podman {
    fn inspect(&mut self, id: &str) -> Option<Said> {
        if self.rests.is_some_and(|until| Instant::now() < until) {
            return None;
        }
        let mut command = Command::new(&self.program);
        command.args(["container", "inspect", id]);
        let (text, is_late) = answer_within(&mut command, self.time);
        self.rests = is_late.then(|| Instant::now() + PODMAN_RESTS);
        let said: Vec<Said> = parsed(&text)?;
        said.into_iter().next()
    }
}

/// Runs a program for `time` at most. Returns its output, and whether it took longer, in which case it is killed and
/// the output is empty.
fn answer_within(command: &mut Command, time: Duration) -> (Vec<u8>, bool) {
    let (mut text, until) = (Vec::new(), Instant::now() + time);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).process_group(0);
    let Ok(mut child) = command.spawn() else { return (text, false) };
    let is_late = !read_until(&mut child, &mut text, until) || !has_ended_by(&mut child, until);
    if is_late {
        // Kills the program and its children. A program in uninterruptible sleep ends later, and `crew` reaps it.
        let _ = kill_process_group(Pid::from_child(&child), Signal::KILL);
        let _ = child.try_wait();
        text.clear();
    }
    (text, is_late)
}

/// Reads the output of a program until `until`. True if the output ended or got too long, false at the timeout.
fn read_until(child: &mut Child, text: &mut Vec<u8>, until: Instant) -> bool {
    let Some(mut output) = child.stdout.take() else { return true };
    let mut part = [0; 4096];
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let mut files = [PollFd::new(&output, PollFlags::IN)];
        match poll(&mut files, Timespec::try_from(left).ok().as_ref()) {
            Ok(0) => return false,
            Ok(_) => match output.read(&mut part) {
                Ok(0) | Err(_) => return true,
                Ok(bytes) => text.extend(&part[..bytes]),
            },
            Err(_) if left.is_zero() => return false,
            Err(_) => {}
        }
        if text.len() as u64 > MOST_BYTES {
            return true;
        }
    }
}

/// Waits for the end of a program. True if the program has ended before `until`.
fn has_ended_by(child: &mut Child, until: Instant) -> bool {
    loop {
        match child.try_wait() {
            Ok(None) if Instant::now() > until => return false,
            Ok(None) => std::thread::sleep(LOOK),
            Ok(Some(_)) | Err(_) => return true,
        }
    }
}

fn parsed<T: DeserializeOwned>(text: &[u8]) -> Option<T> {
    serde_json::from_slice(text).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::make_script;

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

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn answer_is_read_to_its_end() {
        let long = Duration::from_secs(120);
        assert_eq!(answer_within(&mut shell("echo one; sleep 0.05; echo two"), long), (b"one\ntwo\n".to_vec(), false));
        let (text, is_late) = answer_within(&mut shell("head -c 300000 /dev/zero"), long);
        assert_eq!((text.len(), is_late), (300_000, false));
        assert_eq!(answer_within(&mut Command::new("/no/such/program"), long), (Vec::new(), false));
        // A program whose output never ends is read up to a bound, and then ended by its closed output.
        let (text, is_late) = answer_within(&mut shell("cat /dev/zero"), long);
        assert!(text.len() as u64 > MOST_BYTES && !is_late, "{} bytes", text.len());
    }

    /// Whether a process runs.
    fn runs(pid: &str) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        stat.rsplit_once(')').is_some_and(|(_, rest)| !rest.trim_start().starts_with(['Z', 'X']))
    }

    /// A regression test: the process that enrols waited for such a program for ever, and attached no process any more.
    #[test]
    fn program_that_does_not_answer_is_ended_with_all_that_it_has_started() {
        let dir = tempfile::tempdir().unwrap();
        let began = Instant::now();
        let patience = Duration::from_secs(120);
        for output in ["", ">&-"] {
            let script = format!("sleep 600 {output} & echo $! $$ > new; mv new pids; exec sleep 600 {output}");
            // On a busy machine, the program may begin later than this.
            let mut time = Duration::from_millis(200);
            let pids = loop {
                let (text, is_late) = answer_within(shell(&script).current_dir(dir.path()), time);
                assert!(is_late && text.is_empty());
                if let Ok(pids) = std::fs::read_to_string(dir.path().join("pids")) {
                    break pids;
                }
                assert!(began.elapsed() < patience, "it does not begin");
                time *= 2;
            };
            for pid in pids.split_whitespace() {
                while runs(pid) {
                    assert!(began.elapsed() < patience, "{pid} goes on");
                    std::thread::sleep(LOOK);
                }
            }
            std::fs::remove_file(dir.path().join("pids")).unwrap();
        }
    }

    #[test]
    fn silent_podman_is_left_alone_for_a_while() {
        let dir = tempfile::tempdir().unwrap();
        let (program, asked) = (dir.path().join("podman"), dir.path().join("asked"));
        let say = |what: &str| {
            make_script(&program, &format!("echo \"$*\" >> {}\n{what}", asked.display()));
        };
        let count = || std::fs::read_to_string(&asked).unwrap_or_default().lines().count();
        say("sleep 600");
        let podman = Podman { program: program.clone(), time: Duration::from_millis(300), rests: None };
        let mut labels = Labels { podman, ..Labels::default() };
        let container =
            |name: &str| Container { kind: GuestKind::Podman, name: name.into(), group: format!("/{name}") };
        assert_eq!(labels.of(&container("4c01"), true).names, ["4c01"]);
        assert_eq!(labels.of(&container("4c02"), true).names, ["4c02"]);
        assert!(count() <= 1, "the second container is not asked about");
        say("echo '[{\"Name\":\"web\",\"Config\":{\"Labels\":{\"tenant\":\"acme\"}}}]'");
        labels.podman = Podman { rests: Some(Instant::now()), time: Duration::from_secs(120), ..labels.podman };
        let facts = labels.of(&container("4c03"), true);
        assert_eq!((facts.names, facts.labels["tenant"].as_str()), (vec!["4c03".to_owned(), "web".to_owned()], "acme"));
        assert_eq!(std::fs::read_to_string(&asked).unwrap().lines().last(), Some("container inspect 4c03"));
        assert_eq!(labels.of(&container("4c03"), false).names.len(), 2, "it is believed for a while");
    }
}
