//! VMs that are moved between two hosts: namespaces of processes, mounts and the network, each with a service of its own.

#[path = "../common/mod.rs"]
mod common;

mod arrives;
mod cut;
mod endless;
mod proposed;
mod refused;
mod rig;
mod stays;
