//! Memory of many guests, as the host sees it.

use super::scene::Guests;
use host::{Mapping, Usage};
use lab::Image;
use serde::Serialize;
use std::thread::sleep;
use std::time::Duration;

/// Share of the guests that are called before memory is counted: 1 in 5.
const CALLED: usize = 5;
/// Beginning of the name of a template's memory, as the kernel shows it.
const MEMORY: &str = "/memfd:pagefold.template-";
const MIB: f64 = (1 << 20) as f64;

/// Memory of each of many guests.
#[derive(Serialize)]
pub struct Density {
    pub image: Image,
    pub arm: &'static str,
    pub n: u32,
    /// Seconds since all had answered.
    pub seconds: u64,
    /// Private memory of the guest's RAM.
    pub guest_mib_each: f64,
    /// Memory that the host has less available, without the guest's RAM.
    pub vmm_mib_each: f64,
    /// Proportional set of the whole process, with the guest's RAM. Other programs of the host do not change it.
    pub pss_mib_each: f64,
}

/// The host's `MemAvailable`.
pub fn available_bytes() -> u64 {
    host::available_bytes().unwrap_or_default()
}

/// Waits, calls some of the guests, and counts.
pub fn of(image: Image, arm: &'static str, seconds: u64, before: u64, guests: &Guests) -> anyhow::Result<Density> {
    sleep(Duration::from_secs(seconds));
    guests.dirs().iter().step_by(CALLED).try_for_each(|dir| start::measure::call(dir))?;
    let taken = before.saturating_sub(available_bytes()) as f64;
    let n = guests.pids().len().max(1);
    let guest: u64 = guests.pids().into_iter().map(private_ram_bytes).sum();
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

/// Memory that only this guest has of its RAM.
fn private_ram_bytes(pid: u32) -> u64 {
    let mappings = Mapping::read_all(pid).unwrap_or_default();
    let ram = mappings.iter().filter(|mapping| mapping.name.starts_with(MEMORY));
    ram.map(|mapping| mapping.usage.anonymous_bytes).sum()
}
