//! Finding guests among the processes of the host, from `/proc` alone.
//!
//! | process | guest |
//! |---|---|
//! | runs a VM, inside a container or not | a guest by itself |
//! | other process in a container | one guest with the others in the same container |
//! | other process that the user names by pid, or that is a member of a service's group | a guest by itself |
//! | forked copy of a VMM that is itself found | none; if the user names it, or it is a member, a guest by itself |
//! | any other process | none |
//!
//! A **forked copy** is a child of that VMM that has executed no program since. It has the VMM's command line, and so
//! its name, until it executes a program or ends. The agent's fork probe is such a copy (`act::ForkProbe`). A copy
//! whose VMM has ended counts as a VM: so does a QEMU with `-daemonize`.
//!
//! A process runs a VM if its program has a VMM's name, and one of these holds:
//!
//! - The program's file belongs to root or to the caller, and nobody else may write it.
//! - A service has the process as a member, or the caller names it.
//!
//! The size of RAM is taken from its command line if it is not larger than its address space. Otherwise the RAM is
//! found among its mappings.
//!
//! A VM is a **stranger's** if nobody but its owner, an ordinary user, says that it is a guest of this host. It is not
//! a stranger's if one of these holds:
//!
//! - Root or the caller runs it.
//! - A service has it as a member.
//! - Root has put it into a control group of a container, of libvirt, or of `machine.slice`.
//!
//! Among VMs with the same name, a stranger's comes last, and otherwise the one that started first comes first.

use crate::container::{Container, container_of, is_placed_by_host};
use crate::{Facts, Guest, GuestKind, Membership, cloud_hypervisor, firecracker, qemu, region};
use host::{CgroupMakers, Cgroups, Mapping, Process, ProcessId, ProcessStat};
use std::collections::{BTreeMap, HashMap};

/// Processes younger than this are read again by each [`Survey::renewed`], in seconds: 10 s. They may still change
/// their user and control group.
const YOUNG_S: u64 = 10;

/// The processes of the host at one moment.
#[derive(Clone, Debug, Default)]
pub struct Survey {
    /// Processes that have memory, in ascending order of pid.
    pub processes: Vec<Process>,
    /// Pids of processes whose memory accounts the caller may not read, in ascending order.
    pub unreadable: Vec<u32>,
    /// The calling process.
    pub own: Process,
}

impl Survey {
    /// Reads all processes. Processes that end meanwhile are left out.
    ///
    /// # Errors
    /// `/proc` cannot be read.
    pub fn take() -> host::Result<Self> {
        Self::default().renewed()
    }

    /// Looks again. Of a process that was seen before, and has executed no program since, only the state is read, which
    /// costs a tenth. A later change of its user, control group or arguments is seen by [`Self::take`] alone.
    ///
    /// # Errors
    /// `/proc` cannot be read.
    pub fn renewed(&self) -> host::Result<Self> {
        let mut survey = Self::default();
        for pid in host::pids()? {
            match ProcessStat::read(pid) {
                Ok(stat) if stat.kernel_thread || stat.has_ended() => {}
                Ok(stat) => survey.add(pid, self.known(pid, stat)),
                Err(e) if e.is_denied() => survey.unreadable.push(pid),
                Err(_) => {}
            }
        }
        survey.own = Process::read(std::process::id())?;
        Ok(survey)
    }

    /// A process as it was read before, with its present state; `None` if it has to be read.
    fn known(&self, pid: u32, stat: ProcessStat) -> Option<Process> {
        let before = self.process(pid)?;
        let program = |stat: &ProcessStat| (stat.start_ticks, stat.forked, stat.layout);
        let is_same = stat.layout.is_some() && program(&stat) == program(&before.stat);
        let is_young = ProcessId { pid, start_ticks: stat.start_ticks }.age_seconds() < YOUNG_S;
        (is_same && !is_young).then(|| Process { stat, ..before.clone() })
    }

    fn process(&self, pid: u32) -> Option<&Process> {
        with_pid(&self.processes, pid)
    }

    fn add(&mut self, pid: u32, known: Option<Process>) {
        // The kernel shows no layout (addresses of code and stack) of a process that the caller may not read. `known`
        // has one, so the caller may read this process.
        if let Some(process) = known {
            self.processes.push(process);
            return;
        }
        match Process::read(pid) {
            Ok(process) => {
                if host::check_readable(pid).is_err_and(|e| e.is_denied()) {
                    self.unreadable.push(pid);
                }
                self.processes.push(process);
            }
            Err(e) if e.is_denied() => self.unreadable.push(pid),
            Err(_) => {}
        }
    }

    /// Whether the caller may read a guest. Its first process decides, because that one has started the others.
    pub fn may_read(&self, guest: &Guest) -> bool {
        guest.pids.first().is_some_and(|pid| self.unreadable.binary_search(pid).is_err())
    }

    /// All VMs and containers, and those processes of `named` and `members` that belong to neither. Every guest is in a
    /// group of its own until [`crate::assign_groups`] is called.
    pub fn guests(&self, named: &[u32], members: &[Membership]) -> Vec<Guest> {
        let group_of = |pid: u32| {
            let process = self.process(pid)?;
            let id = ProcessId { pid, start_ticks: process.stat.start_ticks };
            members.iter().find(|m| m.process == id).map(|m| m.group.as_str())
        };
        let wanted = |pid: u32| named.contains(&pid) || group_of(pid).is_some();
        let mut guests = find(&self.processes, &self.own.cgroups, &wanted);
        for guest in &mut guests {
            let mut groups: Vec<_> = guest.pids.iter().filter_map(|pid| group_of(*pid)).collect();
            groups.dedup();
            guest.facts.folded_in = <[_; 1]>::try_from(groups).ok().map(|[group]| group.to_owned());
            guest.facts.is_strangers &= guest.facts.folded_in.is_none();
        }
        make_ids_unique(&mut guests);
        for guest in guests.iter_mut().filter(|g| g.kind.is_vm() && g.ram_bytes.is_none()) {
            complete(guest, &self.processes);
        }
        guests
    }
}

/// The process with this pid, of processes in ascending order.
fn with_pid(processes: &[Process], pid: u32) -> Option<&Process> {
    processes.binary_search_by_key(&pid, |process| process.pid).ok().map(|n| &processes[n])
}

/// Finds the guests; see [`Survey::guests`]. RAM whose size only a configuration file or the mappings show is left
/// `None`.
fn find(processes: &[Process], own: &Cgroups, wanted: &dyn Fn(u32) -> bool) -> Vec<Guest> {
    let mut guests = Vec::new();
    let mut containers: BTreeMap<Container, Vec<&Process>> = BTreeMap::new();
    let mut makers = CgroupMakers::find();
    for process in processes {
        let is_copy = is_copy(process, processes, wanted);
        if !is_copy && let Some(mut guest) = vm(process, wanted(process.pid)) {
            guest.facts.is_strangers = is_strangers(process, &mut makers);
            guests.push(guest);
        } else if !is_copy && let Some(container) = container_of(&process.cgroups, own) {
            containers.entry(container).or_default().push(process);
        } else if wanted(process.pid) {
            guests.push(guest(GuestKind::Process, Some(process.comm.clone()), &[process]));
        }
    }
    guests.extend(containers.into_iter().map(|(c, members)| guest(c.kind, Some(c.name), &members)));
    guests.sort_by(|a, b| (a.kind, &a.name, &a.pids).cmp(&(b.kind, &b.name, &b.pids)));
    guests
}

/// Whether a process runs a VM, by its program: it has the name of a VMM, and its file belongs to root or the caller,
/// as far as is known.
pub fn is_vm(process: &Process) -> bool {
    has_vmm_name(process) && process.exe_owner.is_none_or(is_own_or_roots)
}

fn has_vmm_name(process: &Process) -> bool {
    qemu::is_qemu(process) || firecracker::is_firecracker(process) || cloud_hypervisor::is_cloud_hypervisor(process)
}

/// Whether a process is a forked copy of a VMM that is found itself, or of another copy of it. If the caller may not
/// trace the processes, the kernel shows no layout of either, and the layouts count as equal.
fn is_copy(process: &Process, processes: &[Process], wanted: &dyn Fn(u32) -> bool) -> bool {
    let is_original = |parent: &Process| {
        let program = |of: &Process| (of.exe.clone(), of.stat.layout);
        (is_vm(parent) || has_vmm_name(parent) && wanted(parent.pid))
            && program(parent) == program(process)
            && parent.cmdline == process.cmdline
    };
    process.stat.forked && with_pid(processes, process.stat.parent).is_some_and(is_original)
}

fn is_own_or_roots(uid: u32) -> bool {
    uid == 0 || uid == host::own_uid()
}

/// The VM that a process runs. `is_named`: the caller or a service names the process.
fn vm(process: &Process, is_named: bool) -> Option<Guest> {
    if !is_named && !is_vm(process) {
        return None;
    }
    let args = &process.cmdline;
    let (kind, name, blocks, facts) = if qemu::is_qemu(process) {
        let read = |path: &str| host::read_file_of(process.pid, path.as_ref(), qemu::MAX_CONFIG_BYTES).ok();
        let config = qemu::Config::parse(args, &read);
        (GuestKind::Qemu, config.name, config.blocks_bytes, Some(config.facts))
    } else if firecracker::is_firecracker(process) {
        (GuestKind::Firecracker, firecracker::name(args), vec![], None)
    } else if cloud_hypervisor::is_cloud_hypervisor(process) {
        (GuestKind::CloudHypervisor, cloud_hypervisor::name(args), cloud_hypervisor::blocks_bytes(args), None)
    } else {
        return None;
    };
    let mut guest = guest(kind, name, &[process]);
    guest.facts.qemu = facts;
    set_ram(&mut guest, blocks);
    // A VM cannot have more RAM than its process has addresses. If the first thread has ended, the size of the address
    // space is not known.
    let address_bytes = process.stat.address_bytes;
    if address_bytes > 0 && guest.ram_bytes.is_some_and(|ram| ram > address_bytes) {
        set_ram(&mut guest, Vec::new());
    }
    Some(guest)
}

/// Whether only the process's owner says that it runs a VM of this host. The owner is then an ordinary user, and the
/// host did not place the process.
fn is_strangers(process: &Process, makers: &mut CgroupMakers) -> bool {
    !is_own_or_roots(process.uid) && !is_placed_by_host(&makers.given_by_root(&process.cgroups))
}

fn set_ram(guest: &mut Guest, blocks_bytes: Vec<u64>) {
    guest.ram_bytes = blocks_bytes.iter().try_fold(0_u64, |sum, b| sum.checked_add(*b)).filter(|sum| *sum > 0);
    guest.facts.ram_blocks_bytes = blocks_bytes;
}

/// A guest made of these processes, at least one. A guest without a name is named by its pid.
fn guest(kind: GuestKind, name: Option<String>, processes: &[&Process]) -> Guest {
    let first = processes[0];
    let id_name = match (&name, kind) {
        (Some(name), kind) if kind != GuestKind::Process => name.clone(),
        _ => first.pid.to_string(),
    };
    let id = format!("{}:{id_name}", kind.name());
    Guest {
        group: id.clone(),
        id,
        name: name.unwrap_or(id_name),
        kind,
        pids: processes.iter().map(|p| p.pid).collect(),
        ram_bytes: None,
        facts: Facts {
            uid: first.uid,
            start_ticks: first.stat.start_ticks,
            cgroup: first.cgroups.main_path().to_owned(),
            ..Facts::default()
        },
    }
}

/// Adds the first pid to the ids of guests with the kind and name of another guest that comes before them (see the head
/// of this module). A name with an `@` gets the pid, too: its owner may have chosen the name to be taken for another
/// guest.
fn make_ids_unique(guests: &mut [Guest]) {
    let rank = |guest: &Guest| (guest.facts.is_strangers, guest.facts.start_ticks, guest.pids[0]);
    let mut first: HashMap<String, (bool, u64, u32)> = HashMap::new();
    for guest in guests.iter() {
        let rank = rank(guest);
        let first = first.entry(guest.id.clone()).or_insert(rank);
        *first = rank.min(*first);
    }
    for guest in guests.iter_mut().filter(|g| first[&g.id] != rank(g) || g.id.contains('@')) {
        guest.id = format!("{}@{}", guest.id, guest.pids[0]);
        guest.group.clone_from(&guest.id);
    }
}

/// Looks up the RAM of a VM whose command line does not give it: in its configuration file, or else by its mappings. It
/// stays `None` if neither can be read.
fn complete(guest: &mut Guest, processes: &[Process]) {
    let pid = guest.pids[0];
    let process = processes.iter().find(|p| p.pid == pid);
    let config = process
        .filter(|_| guest.kind == GuestKind::Firecracker)
        .and_then(|p| {
            host::read_file_of(pid, firecracker::config_file(&p.cmdline)?, firecracker::MAX_CONFIG_BYTES).ok()
        })
        .and_then(|config| firecracker::ram_bytes_of_config(&config));
    let ram_bytes = config.or_else(|| region::ram_by_mappings(guest.kind, &Mapping::read_all(pid).ok()?));
    set_ram(guest, ram_bytes.into_iter().collect());
}

#[cfg(test)]
#[path = "forked_copy_tests.rs"]
mod forked_copy_tests;

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "4c01db0b339c4c01db0b339c4c01db0b339c4c01db0b339c4c01db0b339c4c01";

    fn process(pid: u32, cmdline: &str, cgroup: &str) -> Process {
        let cmdline: Vec<String> = cmdline.split(' ').map(str::to_owned).collect();
        let comm = cmdline[0].rsplit('/').next().unwrap().to_owned();
        let cgroups = Cgroups::parse(&cgroup.replace("ID", ID));
        Process { pid, comm, cmdline, cgroups, uid: 1000 + pid, ..Process::default() }
    }

    fn host() -> Vec<Process> {
        vec![
            process(1, "/sbin/init", "0::/init.scope"),
            process(20, "/usr/bin/qemu-system-x86_64 -name guest=acme-1 -m 1G", "0::/machine.slice/x.scope"),
            process(21, "/usr/bin/qemu-system-x86_64 -m 256", "0::/"),
            process(30, "/firecracker --id fc1", "0::/firecracker/fc1"),
            process(40, "/usr/bin/cloud-hypervisor --memory size=512M", "0::/"),
            process(50, "lxc-start -n web", "0::/lxc.monitor.web"),
            process(51, "/sbin/init", "0::/lxc.payload.web/init.scope"),
            process(52, "nginx: master", "0::/lxc.payload.web/system.slice/nginx.service"),
            process(60, "/usr/bin/qemu-kvm -name kubevirt", "0::/kubepods.slice/cri-containerd-ID.scope"),
            process(61, "virt-launcher", "0::/kubepods.slice/cri-containerd-ID.scope"),
            process(70, "sleep 9", "0::/user.slice"),
        ]
    }

    fn found(processes: Vec<Process>) -> Vec<Guest> {
        Survey { processes, ..Survey::default() }.guests(&[], &[])
    }

    fn ids(guests: &[Guest]) -> Vec<&str> {
        guests.iter().map(|g| g.id.as_str()).collect()
    }

    #[test]
    fn guests_of_every_kind_are_found() {
        let guests = find(&host(), &Cgroups::default(), &|_| false);
        assert_eq!(
            ids(&guests),
            [
                "qemu:21",
                "qemu:acme-1",
                "qemu:kubevirt",
                "firecracker:fc1",
                "cloud_hypervisor:40",
                "lxc:web",
                "containerd:4c01db0b339c"
            ]
        );
        let by_id = |id: &str| guests.iter().find(|g| g.id == id).unwrap();
        let acme = by_id("qemu:acme-1");
        assert_eq!((acme.ram_bytes, acme.pids.as_slice(), acme.name.as_str()), (Some(1 << 30), &[20][..], "acme-1"));
        assert_eq!((acme.group.as_str(), acme.facts.uid), ("qemu:acme-1", 1020));
        assert_eq!(acme.facts.cgroup, "/machine.slice/x.scope");
        assert_eq!(by_id("lxc:web").pids, [51, 52]);
        assert_eq!(by_id("firecracker:fc1").ram_bytes, None);
        assert_eq!(by_id("cloud_hypervisor:40").ram_bytes, Some(512 << 20));
        // The VM in the pod is a guest by itself, not a part of the container around it.
        assert_eq!(by_id("containerd:4c01db0b339c").pids, [61]);
    }

    #[test]
    fn named_process_is_guest_unless_part_of_one() {
        let guests = find(&host(), &Cgroups::default(), &|pid| [70, 20, 52].contains(&pid));
        assert_eq!(guests.iter().filter(|g| g.kind == GuestKind::Process).count(), 1);
        let sleep = guests.last().unwrap();
        assert_eq!((sleep.id.as_str(), sleep.name.as_str(), sleep.pids.as_slice()), ("process:70", "sleep", &[70][..]));
    }

    #[test]
    fn members_of_services_are_guests() {
        let mut survey = Survey { processes: host(), ..Survey::default() };
        survey.processes.iter_mut().for_each(|p| p.stat.start_ticks = 5);
        let member = |pid, start_ticks, group: &str| Membership {
            process: ProcessId { pid, start_ticks },
            group: group.to_owned(),
        };
        let members = [member(70, 5, "acme"), member(20, 5, "beta"), member(51, 5, "acme"), member(52, 5, "beta")];
        let guests = survey.guests(&[], &members);
        let group_of = |id: &str| guests.iter().find(|g| g.id == id).map(|g| g.facts.folded_in.as_deref());
        assert_eq!(group_of("process:70"), Some(Some("acme")));
        assert_eq!(group_of("qemu:acme-1"), Some(Some("beta")));
        assert_eq!(group_of("lxc:web"), Some(None), "two groups in one container");
        assert_eq!(group_of("qemu:21"), Some(None));
        // The pid of a member that ended may be another process's.
        assert!(survey.guests(&[], &[member(70, 4, "acme")]).iter().all(|g| g.kind != GuestKind::Process));
    }

    #[test]
    fn guests_of_same_name_get_distinct_ids() {
        let duplicate = |pid| process(pid, "/usr/bin/qemu-kvm -name db", "0::/");
        let guests = found(vec![duplicate(7), duplicate(9)]);
        assert_eq!(ids(&guests), ["qemu:db", "qemu:db@9"]);
        assert_eq!(guests[1].group, "qemu:db@9");
    }

    #[test]
    fn crafted_name_does_not_give_id_of_another_guest() {
        let named = |pid, name: &str| process(pid, &format!("/usr/bin/qemu-kvm -name {name}"), "0::/");
        let guests = found(vec![named(7, "db"), named(8, "db@7"), named(9, "db")]);
        assert_eq!(ids(&guests), ["qemu:db", "qemu:db@9", "qemu:db@7@8"]);
        assert_eq!(guests[2].group, "qemu:db@7@8");
    }

    #[test]
    fn newcomer_and_stranger_with_a_guests_name_leave_its_id_alone() {
        let named = |pid, uid, start_ticks| {
            let process = process(pid, "/usr/bin/qemu-kvm -name acme-7", "0::/");
            Process { uid, stat: ProcessStat { start_ticks, ..ProcessStat::default() }, ..process }
        };
        let guests = found(vec![named(7, 0, 50), named(5, 0, 60), named(6, 1006, 10)]);
        let seen: Vec<_> = guests.iter().map(|g| (g.id.as_str(), g.pids[0], g.facts.is_strangers)).collect();
        assert_eq!(seen, [("qemu:acme-7@5", 5, false), ("qemu:acme-7@6", 6, true), ("qemu:acme-7", 7, false)]);
    }

    #[test]
    fn program_of_another_user_is_no_vmm_unless_it_is_named() {
        let made_by = |exe_owner| Process { exe_owner: Some(exe_owner), ..process(7, "/tmp/kvm -m 64T", "0::/") };
        assert!(is_vm(&made_by(0)) && is_vm(&made_by(host::own_uid())) && !is_vm(&made_by(1006)));
        assert_eq!(find(&[made_by(1006)], &Cgroups::default(), &|_| false), []);
        assert_eq!(ids(&find(&[made_by(1006)], &Cgroups::default(), &|pid| pid == 7)), ["qemu:7"]);
    }

    #[test]
    fn ram_that_a_process_has_no_addresses_for_is_not_believed() {
        let with = |address_bytes| {
            let stat = ProcessStat { address_bytes, ..ProcessStat::default() };
            let process = Process { stat, ..process(7, "/usr/bin/qemu-kvm -m 64T", "0::/") };
            find(&[process], &Cgroups::default(), &|_| false)[0].ram_bytes
        };
        assert_eq!([with(1 << 40), with((64 << 40) + 1)], [None, Some(64 << 40)]);
    }

    #[test]
    fn known_process_is_not_read_again_unless_it_is_another_program_or_young() {
        let stat = ProcessStat { start_ticks: 100, layout: Some((1, 2)), ..ProcessStat::default() };
        let of =
            |stat| Survey { processes: vec![Process { pid: 70, stat, ..Process::default() }], ..Survey::default() };
        let later = ProcessStat { cpu_ticks: 9, ..stat };
        assert_eq!(of(stat).known(70, later).map(|process| process.stat), Some(later));
        assert_eq!(of(stat).known(71, stat), None, "a new process");
        for other in [
            ProcessStat { layout: Some((3, 2)), ..stat },
            ProcessStat { start_ticks: 101, ..stat },
            ProcessStat { forked: true, ..stat },
        ] {
            assert_eq!(of(stat).known(70, other), None, "{other:?}");
        }
        let unseen = ProcessStat { layout: None, ..stat };
        assert_eq!(of(unseen).known(70, unseen), None, "its layout is not told");
        let young = ProcessStat { start_ticks: u64::MAX, ..stat };
        assert_eq!(of(young).known(70, young), None, "young");
    }

    #[test]
    fn survey_of_this_host_has_this_process() {
        let survey = Survey::take().unwrap();
        let me = std::process::id();
        assert!(survey.processes.iter().any(|p| p.pid == me));
        let guests = survey.guests(&[me], &[]);
        assert!(guests.iter().any(|g| g.id == format!("process:{me}") && g.pids == [me]));
    }
}
