//! `pagefold doctor --fix`: settings of this host that members and readers need, printed or made.
//!
//! The files are those of the package. One that an administrator has changed is left as it is.

use anyhow::{Context, bail};
use cli::exit::{Outcome, Stop};
use cli::output;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

/// A setting that a host may lack, and how it is made.
struct Remedy {
    /// Purpose of the setting, as it is printed.
    why: &'static str,
    /// Where the file belongs, below the root, and where the package has it.
    places: [&'static str; 2],
    text: &'static str,
    /// Commands that put the file in force; `FILE` and `ROOT` stand for its path and for the root.
    commands: &'static [&'static [&'static str]],
    /// Whether the commands take another root directory than `/`, as `--root` does. Others change the running kernel.
    works_below: bool,
    is_in_force: fn(&Path) -> bool,
}

const REMEDIES: [Remedy; 3] = [
    Remedy {
        why: "the group pagefold: its users may read the web side's socket",
        places: ["etc/sysusers.d/pagefold.conf", "usr/lib/sysusers.d/pagefold.conf"],
        text: include_str!("../../../../../packaging/systemd/pagefold.sysusers"),
        commands: &[&["systemd-sysusers", "--root=ROOT", "FILE"]],
        works_below: true,
        is_in_force: |root| gid_of(root, "pagefold").is_some(),
    },
    Remedy {
        why: "mappings of a member: each run of folded pages is one",
        places: ["etc/sysctl.d/60-pagefold.conf", "usr/lib/sysctl.d/60-pagefold.conf"],
        text: include_str!("../../../../../packaging/systemd/60-pagefold.conf"),
        commands: &[&["sysctl", "--quiet", "--load=FILE"]],
        works_below: false,
        is_in_force: |_| has_mappings(),
    },
    Remedy {
        why: "/dev/userfaultfd for VMMs of the group kvm: they fold without being root",
        places: ["etc/udev/rules.d/60-pagefold.rules", "usr/lib/udev/rules.d/60-pagefold.rules"],
        text: include_str!("../../../../../packaging/systemd/60-pagefold.rules"),
        commands: &[
            &["udevadm", "control", "--reload"],
            &["udevadm", "trigger", "--settle", "--name-match=userfaultfd"],
        ],
        works_below: false,
        is_in_force: has_userfaultfd,
    },
];

/// Prints what this host lacks, or makes it with `yes`. `root` is `/`, or a directory with the files of a system that
/// does not run.
pub fn run(root: &Path, yes: bool) -> anyhow::Result<Outcome> {
    if yes && !rustix::process::geteuid().is_root() {
        return Err(Stop::HostLacks("settings of the host are root's to make: run this with sudo".into()).into());
    }
    let (mut lacking, mut outcome) = (false, Outcome::Done);
    for remedy in &REMEDIES {
        match remedy.state(root)? {
            State::Fine => output::line(format!("fine: {}", remedy.why))?,
            State::Changed(path) => {
                let path = path.display();
                output::line(format!("left as it is: {path} has another content; it is for {}", remedy.why))?;
                outcome = Outcome::Partial;
            }
            State::Lacking { file } => {
                lacking = true;
                if yes { remedy.make(root, file)? } else { remedy.tell(root, file)? }
            }
        }
    }
    if lacking && !yes {
        output::line("nothing was changed: pagefold doctor --fix --yes does all this")?;
    }
    Ok(outcome)
}

/// Whether a setting is made on this host.
enum State {
    Fine,
    /// The file at this path has another content than ours: an administrator has changed it.
    Changed(PathBuf),
    /// It is not in force. `file` tells whether its file is missing, too.
    Lacking {
        file: bool,
    },
}

impl Remedy {
    fn state(&self, root: &Path) -> anyhow::Result<State> {
        let mut has_file = false;
        for path in self.places.map(|place| root.join(place)) {
            match fs::read_to_string(&path) {
                Ok(text) if text == self.text => has_file = true,
                Ok(_) => return Ok(State::Changed(path)),
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
                Err(e) => return Err(e).with_context(|| format!("cannot read {}", path.display())),
            }
        }
        let is_in_force = (root != Path::new("/") && !self.works_below) || (self.is_in_force)(root);
        Ok(if has_file && is_in_force { State::Fine } else { State::Lacking { file: !has_file } })
    }

    fn path(&self, root: &Path) -> PathBuf {
        let place = self.places.into_iter().find(|place| root.join(place).exists());
        root.join(place.unwrap_or(self.places[0]))
    }

    /// The commands that put the file in force. None if `root` is another directory than `/` and they cannot work
    /// there.
    fn commands(&self, root: &Path) -> Vec<Vec<String>> {
        let is_running = root == Path::new("/");
        let file = self.path(root);
        let words = |command: &&[&str]| {
            let word =
                |word: &&str| word.replace("FILE", &file.to_string_lossy()).replace("ROOT", &root.to_string_lossy());
            command.iter().map(word).collect()
        };
        if is_running || self.works_below { self.commands.iter().map(words).collect() } else { Vec::new() }
    }

    fn tell(&self, root: &Path, file: bool) -> anyhow::Result<()> {
        output::line(format!("missing: {}", self.why))?;
        if file {
            output::line(format!("  would write {}:", self.path(root).display()))?;
            for line in self.text.lines() {
                output::line(format!("    {line}"))?;
            }
        }
        self.commands(root).iter().try_for_each(|command| output::line(format!("  would run {}", command.join(" "))))
    }

    fn make(&self, root: &Path, file: bool) -> anyhow::Result<()> {
        let path = self.path(root);
        if file {
            let write = || {
                fs::create_dir_all(path.parent().unwrap_or(root))?;
                fs::write(&path, self.text)?;
                fs::set_permissions(&path, fs::Permissions::from_mode(0o644))
            };
            write().with_context(|| format!("cannot write {}", path.display()))?;
            output::line(format!("wrote {}, for {}", path.display(), self.why))?;
        }
        for command in self.commands(root) {
            let shown = command.join(" ");
            let ran = Command::new(&command[0]).args(&command[1..]).output();
            let ran = ran
                .with_context(|| format!("cannot run {shown}; the file is there, and counts from the next boot on"))?;
            if !ran.status.success() {
                bail!("{shown}: {}: {}", ran.status, String::from_utf8_lossy(&ran.stderr).trim());
            }
            output::line(format!("ran {shown}"))?;
        }
        Ok(())
    }
}

/// The number of a group by `etc/group` below `root`; `None` if there is no such group.
fn gid_of(root: &Path, group: &str) -> Option<u32> {
    let groups = fs::read_to_string(root.join("etc/group")).ok()?;
    groups.lines().find_map(|line| line.strip_prefix(group)?.strip_prefix(':')?.split(':').nth(1)?.parse().ok())
}

fn has_mappings() -> bool {
    let mappings = fs::read_to_string("/proc/sys/vm/max_map_count").ok();
    mappings.and_then(|text| text.trim().parse::<u64>().ok()).is_some_and(|mappings| mappings >= host::GOOD_MAP_COUNT)
}

/// Whether the group kvm may use `/dev/userfaultfd`, or this host has no such device.
fn has_userfaultfd(root: &Path) -> bool {
    let Ok(device) = fs::metadata(root.join("dev/userfaultfd")) else { return true };
    device.mode() & 0o060 == 0o060 && gid_of(root, "kvm") == Some(device.gid())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doctor_recommends_what_its_file_sets() {
        let file = REMEDIES.iter().find(|remedy| remedy.text.contains("vm.max_map_count")).expect("a file for sysctl");
        assert!(file.text.contains(&format!("vm.max_map_count = {}\n", host::GOOD_MAP_COUNT)), "{}", file.text);
    }
}
