//! What a guest is and what it holds by the kernel's own accounting, in the shape that
//! `pagefold guests --json` prints.

use page::Region;
use serde::Serialize;

/// What runs a guest.
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
    /// Processes that were named.
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
    /// Unique on this host: kind and name; the pid, too, where two bear the same name or a name has an `@`.
    pub id: String,
    /// What its runtime calls it.
    pub name: String,
    /// What runs it.
    pub kind: GuestKind,
    /// Its processes, in ascending order.
    pub pids: Vec<u32>,
    /// Its trust domain; a guest that no rule puts elsewhere is a group of one.
    pub group: String,
    /// RAM the guest was given, where it is a VM and tells.
    pub ram_bytes: Option<u64>,
    /// What else is known of it from the outside.
    #[serde(skip)]
    pub facts: Facts,
}

/// What finding a guest brought up besides, for grouping it and for telling its mappings apart.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// Effective user of its first process.
    pub uid: u32,
    /// Control group of its first process; `/` for none in particular.
    pub cgroup: String,
    /// Blocks of memory that the RAM of a VM consists of; empty where that is not known.
    pub ram_blocks_bytes: Vec<u64>,
    /// What QEMU's command line says besides.
    pub qemu: Option<QemuFacts>,
}

/// What QEMU's command line says of the machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct QemuFacts {
    /// `-machine`, without its settings.
    pub machine: Option<String>,
    /// Blocks of memory at the end of the list that are plugged in as devices (DIMMs, virtio-mem).
    pub plugged_blocks: usize,
    /// Where it listens for its machine protocol, as it names the socket.
    pub qmp_socket: Option<String>,
    /// Drivers of its devices.
    pub devices: Vec<String>,
    /// It has a balloon.
    pub balloon: bool,
    /// The balloon reports free pages.
    pub free_page_reporting: bool,
    /// Memory that may lie below 4 GiB, where that was said.
    pub max_below_4g_bytes: Option<u64>,
}

/// Something of a guest that could not be read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Partial {
    /// The guest's id.
    pub guest: String,
    /// The process concerned.
    pub pid: u32,
    /// What is missing and why.
    pub reason: String,
}

/// What one guest holds by `smaps_rollup` and `smaps`, summed over its processes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Footprint {
    /// Which guest.
    #[serde(flatten)]
    pub guest: Guest,
    /// Resident set: every mapped page, shared or not.
    pub rss_bytes: u64,
    /// Proportional set: a page shared by n processes counts 1/n.
    pub pss_bytes: u64,
    /// Unique set: pages no other process maps.
    pub uss_bytes: u64,
    /// In swap.
    pub swap_bytes: u64,
    /// Merged by the kernel's merger; `None` where the kernel does not tell.
    pub ksm_bytes: Option<u64>,
    /// Pages that were folded and not written since, touched or not: they lie in the group's pool. Of those, the resident
    /// set has what was touched.
    pub folded_bytes: u64,
    /// In transparent huge pages.
    pub thp_bytes: u64,
    /// In hugetlbfs pages, which the resident set leaves out.
    pub hugetlb_bytes: u64,
    /// Where it lies; regions without resident or swapped memory are left out. The kernel rounds each
    /// mapping's proportional set down to 1 KiB, so these may add up to a little less than the total.
    pub regions: Vec<RegionFootprint>,
}

/// One region of a guest's footprint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct RegionFootprint {
    /// Which.
    pub region: Region,
    /// Resident set.
    pub rss_bytes: u64,
    /// Proportional set.
    pub pss_bytes: u64,
    /// Unique set.
    pub uss_bytes: u64,
    /// In swap.
    pub swap_bytes: u64,
}
