//! Finding guests (VMs, containers and processes) and their groups, telling what each mapping of their processes is
//! used for, and reading their pages.
#![forbid(unsafe_code)]

mod cloud_hypervisor;
mod container;
mod devices;
mod find;
mod firecracker;
mod footprint;
mod glob;
mod group;
mod leaving;
mod mergeable;
mod model;
mod options;
mod pool;
mod qemu;
mod qemu_config;
pub mod qmp;
mod ram;
mod ram_map;
mod region;
mod scan;
mod slots;

pub use container::{Container, container_of, domain_of};
pub use devices::{Device, DeviceMemory};
pub use find::{Survey, is_vm};
pub use glob::Glob;
pub use group::{GroupError, GroupFile, GroupRule, assign_groups};
pub use leaving::Leaving;
pub use mergeable::check_mergeable;
pub use model::{Facts, Footprint, Guest, GuestKind, Membership, Partial, QemuFacts, RegionFootprint};
pub use pool::{holds_folded_pages, pool_group, pool_name};
pub use qmp::Qmp;
pub use ram::{GuestRam, open_qmp, open_ram, qmp_place};
pub use ram_map::{RamBlock, RamMap};
pub use region::RegionMap;
pub use scan::{HostSide, Missed, Place, Plan, ScanOptions, ScanTotals};
pub use slots::{SeeSlots, each_slots, is_private_copy};
