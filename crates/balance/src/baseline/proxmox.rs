//! Proxmox VE's automatic ballooning.
//!
//! The host is to use 80% of its memory. The distance to that goal is dealt out above the guests' minimum, in equal
//! shares. No guest changes by more than 100 MiB a round, and a goal of 10 MiB or less is none. Guests that have little
//! free memory grow first, and guests that have much shrink first. All others follow if that changes nothing.

use super::wishes;
use crate::facts::Facts;
use crate::policy::{Policy, Wish};
use crate::reserve::signed;
use std::collections::{BTreeMap, BTreeSet};

/// Part of the host's memory that is to be used, in percent.
const TARGET_PERCENT: u64 = 80;
/// Distance from the goal that is ignored: 10 MiB.
const DEAD_ZONE: i64 = 10 << 20;
/// Most by which a guest's memory grows or shrinks in a round, in Proxmox VE: 100 MiB.
const MOST_CHANGE: i64 = 100 << 20;

/// The rules of Proxmox VE: every 10 s, with equal shares.
pub struct Proxmox;

/// One guest: least, present and greatest size.
struct Vm {
    least: i64,
    now: i64,
    most: i64,
}

/// New sizes by number of the guest.
type Sizes = BTreeMap<usize, i64>;

impl Policy for Proxmox {
    fn name(&self) -> &'static str {
        "proxmox"
    }

    fn sizes(&self, facts: &Facts, _lendable_bytes: u64) -> Vec<Wish> {
        let sizes = sizes(facts);
        wishes(facts, |n, _| sizes.get(&n).and_then(|size| u64::try_from(*size).ok()), "Proxmox VE")
    }
}

fn sizes(facts: &Facts) -> Sizes {
    let host = &facts.host;
    let used = host.total_bytes.saturating_sub(host.available_bytes);
    let goal = signed((host.total_bytes / 100).saturating_mul(TARGET_PERCENT)).saturating_sub(signed(used));
    let vms: Vec<Vm> = facts.guests.iter().map(vm).collect();
    // A guest without a minimum, or without a working driver, takes no part.
    let all: Vec<usize> = (0..vms.len()).filter(|n| vms[*n].least > 0 && facts.guests[*n].can_balloon()).collect();
    let has_free = |n: &usize| {
        let free = facts.guests[*n].claims.map_or(0, |claims| signed(claims.free_bytes));
        free > 0 && free > vms[*n].least / 4 && vms[*n].now >= vms[*n].least
    };
    let (relaxed, pressed): (Vec<usize>, Vec<usize>) = all.iter().copied().partition(has_free);
    let mut sizes = Sizes::new();
    if goal.abs() <= DEAD_ZONE {
        return sizes;
    }
    let left = deal_out(&vms, if goal > 0 { &pressed } else { &relaxed }, goal, &mut sizes);
    let no_progress = if goal > 0 { left >= goal } else { left <= goal };
    if no_progress {
        deal_out(&vms, &all, left, &mut sizes);
    }
    sizes
}

fn vm(guest: &crate::GuestFacts) -> Vm {
    Vm { least: signed(guest.guaranteed_bytes), now: signed(guest.actual_bytes), most: signed(guest.ram_bytes) }
}

/// Shares `bytes` out among these guests in rounds, until nothing changes any more. Returns what is left.
fn deal_out(vms: &[Vm], numbers: &[usize], bytes: i64, sizes: &mut Sizes) -> i64 {
    let (mut left, mut done) = (bytes, BTreeSet::new());
    loop {
        let open: Vec<usize> = numbers.iter().copied().filter(|n| !done.contains(n)).collect();
        let above = |n: &usize| sizes.get(n).unwrap_or(&vms[*n].now).saturating_sub(vms[*n].least);
        let to_deal = open.iter().map(above).fold(left, i64::saturating_add);
        let mut change = None;
        for &n in &open {
            let vm = &vms[n];
            let wanted =
                vm.least.saturating_add(to_deal.checked_div(open.len() as i64).unwrap_or(0)).min(vm.most).max(vm.least);
            let size = match wanted.saturating_sub(vm.now) {
                more if more > 0 && bytes > 0 => wanted.min(vm.now.saturating_add(MOST_CHANGE)),
                less if less < 0 => wanted.max(vm.now.saturating_sub(MOST_CHANGE)),
                _ => {
                    done.insert(n);
                    continue;
                }
            };
            let before = sizes.insert(n, size).unwrap_or(vm.now);
            if before != size {
                change = Some(size.saturating_sub(before).saturating_add(change.unwrap_or(0)));
            }
        }
        let Some(change) = change else { return left };
        left = left.saturating_sub(change);
        if left == 0 {
            return 0;
        }
    }
}
