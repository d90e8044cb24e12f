//! Memory of many guests, as the host sees it.

use super::scene::Guests;
use host::{Mapping, Usage};
use lab::Image;
use serde::Serialize;
use std::hash::{BuildHasher, RandomState};
use std::thread::sleep;
use std::time::Duration;

/// One guest in this many runs a command before memory is counted.
const CALLED: usize = 5;
/// Beginnings of the names of a guest's RAM, as the kernel shows them: a template's memory, and the pool of the bench's group.
const MEMORY: [&str; 2] = ["/memfd:pagefold.template-", "/memfd:pagefold-bench"];
const MIB: f64 = (1 << 20) as f64;

/// Memory of each of many guests.
#[derive(Serialize)]
pub struct Density {
    /// Image of the guests.
    pub image: Image,
    /// As in `many`.
    pub arm: &'static str,
    /// Number of guests.
    pub n: u32,
    /// Seconds since all had answered.
    pub seconds: u64,
    /// Private memory of the guest's RAM, and its part of what the pool has taken.
    pub guest_mib_each: f64,
    /// Memory that the host has less available, without the guest's RAM.
    pub vmm_mib_each: f64,
    /// Proportional set of the whole process, with the guest's RAM. Other programs of the host do not change it.
    pub pss_mib_each: f64,
}

/// `MemAvailable` of the host, in bytes.
fn available_bytes() -> u64 {
    host::available_bytes().unwrap_or_default()
}

/// State of the host before many guests are started.
pub struct Before {
    available_bytes: u64,
    pool_bytes: u64,
}

impl Before {
    /// Reads the host's state; the pool holds this much memory.
    pub fn new(pool_bytes: u64) -> Self {
        Self { available_bytes: available_bytes(), pool_bytes }
    }
}

/// Waits, runs a command in some guests that are chosen at random, and counts memory. `pool_bytes` tells what the pool
/// holds then.
pub fn of(
    image: Image,
    arm: &'static str,
    seconds: u64,
    before: &Before,
    guests: &Guests,
    pool_bytes: impl FnOnce() -> anyhow::Result<u64>,
) -> anyhow::Result<Density> {
    sleep(Duration::from_secs(seconds));
    let mut dirs = guests.dirs();
    let random = RandomState::new();
    dirs.sort_by_key(|dir| random.hash_one(dir));
    dirs.iter().take(dirs.len().div_ceil(CALLED)).try_for_each(|dir| start::measure::call(dir))?;
    let taken = before.available_bytes.saturating_sub(available_bytes()) as f64;
    let n = guests.pids().len().max(1);
    let ram: u64 = guests.pids().into_iter().map(private_ram_bytes).sum();
    let guest = ram + pool_bytes()?.saturating_sub(before.pool_bytes);
    let pss: u64 = guests.pids().into_iter().map(|pid| Usage::of(pid).map_or(0, |usage| usage.pss_bytes)).sum();
    let each = |bytes: f64| bytes / MIB / n as f64;
    Ok(Density {
        image,
        arm,
        n: n as u32,
        seconds,
        guest_mib_each: each(guest as f64),
        vmm_mib_each: each(taken - guest as f64),
        pss_mib_each: each(pss as f64),
    })
}

/// Private memory of a guest's RAM: what no other process has.
pub fn private_ram_bytes(pid: u32) -> u64 {
    let mappings = Mapping::read_all(pid).unwrap_or_default();
    let ram = mappings.iter().filter(|mapping| MEMORY.iter().any(|name| mapping.name.starts_with(name)));
    ram.map(|mapping| mapping.usage.anonymous_bytes).sum()
}
