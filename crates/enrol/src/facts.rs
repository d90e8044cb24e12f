//! The facts about a process that rules are matched against. Neither the process nor a container's root can choose one
//! of them, but for the last row, which can do no harm:
//!
//! | fact | from | chosen by |
//! |---|---|---|
//! | control groups | `/proc/PID/cgroup`, as far as root has given their names (`host::CgroupMakers`) | root |
//! | container, unit, domain | the names of its control groups, the outermost first | root |
//! | labels | the runtime's files, which root alone can write | users who may start containers as root |
//! | group and name in a domain's metadata | libvirt's files, which root alone can write | users who may define domains |
//! | user | the kernel's credentials | root |
//! | private memory, program, whether it runs a VM | the process | the process itself: it can only avoid being attached, or have less of it folded |

use crate::labels::Labels;
use crate::metadata::{Domains, member_name};
use guest::{container_of, domain_of, is_vm};
use host::{CgroupMakers, Cgroups, Process, ProcessId};
use std::collections::BTreeMap;

/// Suffixes of the names of systemd units that processes belong to.
const UNITS: [&str; 2] = [".service", ".scope"];

/// The facts of a process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// Start of the process, in clock ticks after boot.
    pub start_ticks: u64,
    /// Its pid.
    pub pid: u32,
    /// The file name of its program.
    pub program: String,
    /// The uid of the process.
    pub uid: u32,
    /// Its control groups, as far as root has given their paths.
    pub cgroups: Cgroups,
    /// The names and the labels of the container that it runs in.
    pub container: Option<ContainerFacts>,
    /// The systemd unit that the process belongs to.
    pub unit: Option<String>,
    /// The libvirt domain whose VM the process runs.
    pub domain: Option<String>,
    /// The group and the name that the metadata of the process's libvirt domain ask for.
    pub asked: Option<Asked>,
    /// Whether the process runs a VM.
    pub is_vm: bool,
    /// Whether the process runs one of Pagefold's own programs.
    pub is_own: bool,
    /// Private memory of the process in page frames, in bytes.
    pub private_bytes: u64,
    /// Whole seconds since the process started.
    pub age_s: u64,
}

/// The group and the name that a domain's metadata ask for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Asked {
    /// The group.
    pub group: String,
    /// The member's name.
    pub name: Option<String>,
}

/// The facts of a container.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ContainerFacts {
    /// The container's names: its control group's name, and the user's name for it if the runtime names control groups
    /// by a hash.
    pub names: Vec<String>,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
}

/// Reads the facts of processes.
pub struct Looker {
    /// Knows which control groups root has made. `None`: paths of control groups are taken as they are.
    makers: Option<CgroupMakers>,
    labels: Labels,
    domains: Domains,
    own: Cgroups,
    /// Directories in which Pagefold's own programs are installed.
    homes: Vec<std::path::PathBuf>,
}

impl Default for Looker {
    fn default() -> Self {
        Self::new()
    }
}

impl Looker {
    /// A reader for the service's rules. It considers only control groups that root has named.
    pub fn new() -> Self {
        let own = Process::read_without_arguments(std::process::id()).unwrap_or_default();
        let home = own.exe.as_deref().and_then(|exe| exe.parent()).map(std::path::Path::to_owned);
        let library = home.as_ref().and_then(|home| Some(home.parent()?.join("lib/pagefold")));
        let homes = home.into_iter().chain(library).collect();
        Self {
            makers: Some(CgroupMakers::find()),
            labels: Labels::default(),
            domains: Domains::default(),
            own: own.cgroups,
            homes,
        }
    }

    /// A reader for a user who names a control group or a container on the command line. It considers all control
    /// groups, because users may name their own.
    pub fn of_caller() -> Self {
        Self { makers: None, ..Self::new() }
    }

    /// Forgets cached control groups, containers and domains. Called each time before processes are looked at.
    pub fn look_anew(&mut self) {
        self.makers.iter_mut().for_each(CgroupMakers::look_anew);
        self.labels.look_anew();
        self.domains.look_anew();
    }

    /// The facts of a process; `None` if it has ended, is a kernel thread or is still being loaded. Labels and metadata
    /// are read only `with_names`.
    pub fn look(&mut self, pid: u32, with_names: bool) -> Option<Facts> {
        let process = Process::read_without_arguments(pid).ok()?;
        if process.stat.kernel_thread || process.stat.has_ended() || process.stat.loading {
            return None;
        }
        let given = self.makers.as_mut().map(|makers| makers.given_by_root(&process.cgroups));
        let cgroups = given.unwrap_or_else(|| process.cgroups.clone());
        let container = container_of(&cgroups, &self.own);
        let container = container.map(|container| self.labels.of(&container, with_names));
        let program = process.program();
        let is_own = program.starts_with("pagefold")
            && process
                .exe
                .as_deref()
                .and_then(|exe| exe.parent())
                .is_some_and(|dir| self.homes.iter().any(|h| h == dir));
        let id = ProcessId { pid, start_ticks: process.stat.start_ticks };
        let is_vm = is_vm(&process);
        let asked = if with_names && is_vm { self.domains.of(pid) } else { None };
        Some(Facts {
            start_ticks: id.start_ticks,
            pid,
            program: cli::printable(program),
            uid: process.uid,
            container,
            unit: unit_of(&cgroups),
            domain: domain_of(&cgroups).filter(|_| is_vm),
            asked,
            is_vm,
            is_own,
            private_bytes: host::anonymous_bytes(pid).unwrap_or(0),
            age_s: id.age_seconds(),
            cgroups,
        })
    }
}

impl Facts {
    /// The process's name as a member: from the domain's metadata, or else from the domain's name. `None`: it is made
    /// from the program's name.
    pub fn member_name(&self) -> Option<String> {
        let asked = self.asked.as_ref().and_then(|asked| asked.name.clone());
        asked.or_else(|| self.domain.as_deref().and_then(member_name))
    }

    /// The process.
    pub const fn process(&self) -> ProcessId {
        ProcessId { pid: self.pid, start_ticks: self.start_ticks }
    }
}

/// The outermost systemd unit that is not a slice. Names below it are chosen by the user of that unit.
fn unit_of(cgroups: &Cgroups) -> Option<String> {
    cgroups.paths().find_map(|path| {
        let first = path.split('/').skip(1).find(|part| !part.ends_with(".slice"))?;
        UNITS.iter().any(|suffix| first.ends_with(suffix)).then(|| first.to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    #[test]
    fn outermost_unit_counts() {
        let unit = |text: &str| unit_of(&Cgroups::parse(text));
        for (path, expected) in [
            ("0::/system.slice/acme-1.service", Some("acme-1.service")),
            ("0::/system.slice/system-acme.slice/acme@1.service/inner", Some("acme@1.service")),
            ("0::/user.slice/user-7.slice/user@7.service/app.slice/x.service", Some("user@7.service")),
            // Control groups inside a privileged container are named by the container's root.
            ("0::/lxc.payload.web/system.slice/acme-1.service", None),
            (
                "0::/machine.slice/systemd-nspawn@web.service/payload/system.slice/acme-1.service",
                Some("systemd-nspawn@web.service"),
            ),
            ("4:memory:/m\n1:name=systemd:/system.slice/acme-1.service", Some("acme-1.service")),
            ("0::/system.slice", None),
            ("0::/", None),
            ("", None),
        ] {
            assert_eq!(unit(path).as_deref(), expected, "{path}");
        }
    }

    #[test]
    fn facts_of_this_process_are_the_kernels() {
        let facts = Looker::new().look(std::process::id(), true).expect("it runs");
        assert_eq!((facts.pid, facts.uid), (std::process::id(), rustix::process::geteuid().as_raw()));
        assert!(facts.private_bytes > 0 && !facts.is_vm && facts.domain.is_none());
        if host::ProcessStat::read(2).is_ok_and(|stat| stat.kernel_thread) {
            assert_eq!(Looker::new().look(2, true), None, "a thread of the kernel's");
        }
    }

    /// Any user can give a program's file a name that begins with `pagefold`.
    #[test]
    fn own_program_is_told_by_its_directory_too() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pagefold-other");
        // Another process copies the file. If this process did, a child that another test forks could have it open for
        // writing, and executing it would fail (`ETXTBSY`).
        assert!(std::process::Command::new("cp").arg("/bin/sleep").arg(&path).status().unwrap().success());
        let mut child = std::process::Command::new(&path).arg("600").spawn().unwrap();
        let mut looker = Looker::new();
        let until = Instant::now() + Duration::from_secs(120);
        let stranger = loop {
            // While the kernel still loads the program, the process has no facts.
            match looker.look(child.id(), false) {
                None if Instant::now() < until => std::thread::sleep(Duration::from_millis(1)),
                facts => break facts.map(|facts| facts.is_own),
            }
        };
        looker.homes.push(dir.path().canonicalize().unwrap());
        let own = looker.look(child.id(), false).map(|facts| facts.is_own);
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!((stranger, own), (Some(false), Some(true)));
    }
}
