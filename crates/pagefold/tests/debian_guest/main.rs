//! The Debian package in a VM with Debian 13, where systemd runs the service by its units.
//!
//! ```text
//!   QEMU: Debian 13 -- systemd -- pagefold.service and pagefold-enrol.service, by dpkg
//!                              |- libvirtd -- QEMU of libvirt-qemu, with a balloon       (lends)
//!                              `- two programs, of which one is a user's                 (day)
//! ```
//!
//! Nothing here needs KVM. It takes more minutes than `./x test` gives a test, and packages from apt's mirror the first time:
//! `./x soak 60 debian_guest`.

#[path = "../common/mod.rs"]
mod common;

mod day;
mod lends;
mod machine;
