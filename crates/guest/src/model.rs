//! A guest, and the memory that it holds by the kernel's own accounting, in the shape that `pagefold guests --json`
//! prints.

use host::ProcessId;
use page::Region;
use serde::Serialize;

/// The VMM or container runtime that runs a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum GuestKind {
    /// A VM run by QEMU.
    Qemu,
    /// A VM run by Firecracker.
    Firecracker,
    /// A VM run by Cloud Hypervisor.
    CloudHypervisor,
    /// An LXC container.
    Lxc,
    /// A Docker container.
    Docker,
    /// A Podman container.
    Podman,
    /// A container run by containerd, with or without Kubernetes.
    Containerd,
    /// A container run by CRI-O.
    Crio,
    /// A systemd-nspawn container.
    Nspawn,
    /// A process that the user named by its pid, or that a service folds.
    Process,
}

impl GuestKind {
    /// The name used in JSON and tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Qemu => "qemu",
            Self::Firecracker => "firecracker",
            Self::CloudHypervisor => "cloud_hypervisor",
            Self::Lxc => "lxc",
            Self::Docker => "docker",
            Self::Podman => "podman",
            Self::Containerd => "containerd",
            Self::Crio => "crio",
            Self::Nspawn => "nspawn",
            Self::Process => "process",
        }
    }

    /// Whether it is a virtual machine.
    pub const fn is_vm(self) -> bool {
        matches!(self, Self::Qemu | Self::Firecracker | Self::CloudHypervisor)
    }
}

/// A VM, a container or a process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Guest {
    /// Unique on this host: kind and name. Of guests with the same name, the first has this id, and the others have
    /// their pid added. So has a guest whose name has an `@`.
    pub id: String,
    /// The name that its runtime gives it.
    pub name: String,
    /// The VMM or runtime that runs it.
    pub kind: GuestKind,
    /// Its processes, in ascending order.
    pub pids: Vec<u32>,
    /// Its trust domain. A guest that no rule puts elsewhere is in a group of its own.
    pub group: String,
    /// RAM that a VM was given; `None` for other guests, and where it is not known.
    pub ram_bytes: Option<u64>,
    /// Other facts known from the outside.
    #[serde(skip)]
    pub facts: Facts,
}

impl Guest {
    /// Its name for people: with its pid, where its id has that because another guest has the name.
    pub fn shown_name(&self) -> String {
        let by_pid = self.id.rsplit_once('@').and_then(|(_, pid)| pid.parse::<u32>().ok());
        match by_pid.filter(|pid| self.pids.contains(pid)) {
            Some(pid) => format!("{}@{pid}", self.name),
            None => self.name.clone(),
        }
    }
}

/// Facts found together with a guest, used for grouping it and for telling its mappings apart.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// Effective user of its first process.
    pub uid: u32,
    /// Start of its first process, in clock ticks after boot.
    pub start_ticks: u64,
    /// Whether nobody but its owner, an ordinary user, says that this is a VM of this host: see `find.rs`.
    pub is_strangers: bool,
    /// Control group of its first process; `/` if this process is in the root group.
    pub cgroup: String,
    /// The group of a service in which its processes are members; `None` if they are in none, or in several.
    pub folded_in: Option<String>,
    /// Sizes of the blocks of memory that the RAM of a VM consists of; empty if not known.
    pub ram_blocks_bytes: Vec<u64>,
    /// Further facts from QEMU's command line.
    pub qemu: Option<QemuFacts>,
}

/// A member of a group of a service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Membership {
    /// Its process.
    pub process: ProcessId,
    /// The group.
    pub group: String,
}

/// Facts about the machine from QEMU's command line.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct QemuFacts {
    /// `-machine`, without its settings.
    pub machine: Option<String>,
    /// Number of blocks at the end of [`Facts::ram_blocks_bytes`] that are plugged in as devices (DIMMs, virtio-mem).
    pub plugged_blocks: usize,
    /// The socket of its machine protocol (QMP), as the command line names it.
    pub qmp_socket: Option<String>,
    /// Drivers of its devices.
    pub devices: Vec<String>,
    /// Whether it has a balloon.
    pub balloon: bool,
    /// Whether the balloon reports free pages.
    pub free_page_reporting: bool,
    /// Most memory below 4 GiB (`max-ram-below-4g`), if given.
    pub max_below_4g_bytes: Option<u64>,
}

/// A process of a guest that could not be read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Partial {
    /// The guest's id.
    pub guest: String,
    /// The process.
    pub pid: u32,
    /// The reason why it could not be read.
    pub reason: String,
}

/// The memory that one guest holds by `smaps_rollup` and `smaps`, summed over its processes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Footprint {
    /// The guest.
    #[serde(flatten)]
    pub guest: Guest,
    /// Resident set: every mapped page, shared or not.
    pub rss_bytes: u64,
    /// Proportional set: a page shared by n processes counts 1/n.
    pub pss_bytes: u64,
    /// Unique set: pages that no other process maps.
    pub uss_bytes: u64,
    /// Memory in swap.
    pub swap_bytes: u64,
    /// Memory merged by KSM; `None` if the kernel does not tell.
    pub ksm_bytes: Option<u64>,
    /// Pages that were folded and not written since, which lie in the group's pool. The resident set counts only
    /// those of them that were touched.
    pub folded_bytes: u64,
    /// Memory in transparent huge pages.
    pub thp_bytes: u64,
    /// Memory in hugetlbfs pages, which the resident set leaves out.
    pub hugetlb_bytes: u64,
    /// The footprint by region, without regions that hold no resident or swapped memory. The kernel rounds each
    /// mapping's proportional set down to 1 KiB, so these may add up to a little less than the total.
    pub regions: Vec<RegionFootprint>,
}

/// One region of a guest's footprint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct RegionFootprint {
    /// The region.
    pub region: Region,
    /// Resident set.
    pub rss_bytes: u64,
    /// Proportional set.
    pub pss_bytes: u64,
    /// Unique set.
    pub uss_bytes: u64,
    /// Memory in swap.
    pub swap_bytes: u64,
}
