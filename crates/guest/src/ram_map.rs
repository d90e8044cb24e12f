//! The places of a VM's physical memory in the address space of its VMM.
//!
//! All VMMs for x86-64 leave a hole for devices below 4 GiB. RAM that does not fit below the hole begins at 4 GiB:
//!
//! ```text
//!   guest-physical   0          low            4 GiB
//!                    | RAM      | devices      | RAM goes on         | plugged memory
//!   blocks           |==== one block or several, one after the other ====|   |====|
//! ```
//!
//! | VMM | RAM below the hole | source |
//! |---|---|---|
//! | QEMU, `pc` | 3 GiB if the VM has at least 3.5 GiB, else all | `hw/i386/pc_piix.c` |
//! | QEMU, `q35` | 2 GiB if the VM has at least 2.75 GiB, else all | `hw/i386/pc_q35.c` |
//! | Firecracker | at most 3.25 GiB | |
//! | Cloud Hypervisor | at most 3 GiB | |
//!
//! QEMU reports the exact layout if it can be asked, including memory plugged in while it runs. Otherwise several
//! layouts may be possible. `insight` then finds out which one is right: only in the right layout does it find the
//! kernel.

use crate::qmp::{Qmp, QmpError};
use crate::region::guest_ram;
use crate::{Guest, GuestKind, cloud_hypervisor, firecracker};
use host::Mapping;
use page::{GuestPhys, HostVirt, PAGE_BYTES};
use serde_json::json;

/// Guest-physical address behind the hole, where RAM goes on that does not fit below it.
const FOUR_GIB: u64 = 4 << 30;
/// Most pieces of memory that QEMU is asked about.
const MOST_PIECES: usize = 1024;

/// A piece of guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RamBlock {
    /// Its first address in the guest.
    pub guest: GuestPhys,
    /// Its first address in the VMM.
    pub host: HostVirt,
    /// Its size.
    pub bytes: u64,
}

/// All memory of a guest, in ascending order, without overlaps.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RamMap(pub(crate) Vec<RamBlock>);

impl RamMap {
    /// The map of these pieces. Pieces that are not whole pages, or overlap another one, are left out.
    pub fn new(mut blocks: Vec<RamBlock>) -> Self {
        let page = PAGE_BYTES as u64;
        blocks.retain(|b| {
            let whole = [b.guest.0, b.host.0, b.bytes].iter().all(|n| n.is_multiple_of(page));
            whole && b.bytes > 0 && b.guest.0.checked_add(b.bytes).is_some() && b.host.0.checked_add(b.bytes).is_some()
        });
        blocks.sort_by_key(|b| b.guest);
        let mut map: Vec<RamBlock> = Vec::new();
        for block in blocks {
            match map.last_mut() {
                Some(last) if last.guest.0 + last.bytes > block.guest.0 => {}
                Some(last)
                    if last.guest.0 + last.bytes == block.guest.0 && last.host.0 + last.bytes == block.host.0 =>
                {
                    last.bytes += block.bytes;
                }
                _ => map.push(block),
            }
        }
        Self(map)
    }

    /// The pieces.
    pub fn blocks(&self) -> &[RamBlock] {
        &self.0
    }

    /// The VMM's address of a guest's address, and the number of bytes that follow it without a break.
    pub fn host_of(&self, guest: GuestPhys) -> Option<(HostVirt, u64)> {
        let n = self.0.partition_point(|b| b.guest <= guest).checked_sub(1)?;
        let block = &self.0[n];
        let offset = guest.0 - block.guest.0;
        (offset < block.bytes).then(|| (HostVirt(block.host.0 + offset), block.bytes - offset))
    }

    /// The guest's address of an address in the VMM; `None` if that is not guest memory.
    pub fn guest_of(&self, host: HostVirt) -> Option<GuestPhys> {
        let block = self.0.iter().find(|b| (b.host.0..b.host.0 + b.bytes).contains(&host.0))?;
        Some(GuestPhys(block.guest.0 + (host.0 - block.host.0)))
    }

    /// The pieces for which the VMM's process has mappings, each address in one piece only. Other pieces that QEMU
    /// reports are left out: QEMU's process may be hostile.
    pub fn within(mut self, mappings: &[Mapping]) -> Self {
        let mut taken: Vec<(u64, u64)> = Vec::new();
        self.0.retain(|block| {
            let (first, end) = (block.host.0, block.host.0.saturating_add(block.bytes));
            let reaches = |at: u64, m: &Mapping| if m.start.0 <= at { at.max(m.end.0) } else { at };
            let is_its_own = !taken.iter().any(|other| first < other.1 && other.0 < end);
            let is_there = is_its_own && mappings.iter().fold(first, reaches) >= end;
            taken.extend(is_there.then_some((first, end)));
            is_there
        });
        self
    }

    /// The layouts that a VM may have by its process's mappings, the likeliest first. They leave out memory that was
    /// plugged in as a device.
    pub fn by_mappings(guest: &Guest, mappings: &[Mapping]) -> Vec<Self> {
        let mut pieces: Vec<(HostVirt, u64)> = guest_ram(guest, mappings)
            .into_iter()
            .map(|range| {
                let (start, end) = (mappings[range.start].start, mappings[range.end - 1].end);
                (start, end.0 - start.0)
            })
            .collect();
        let plugged = guest.facts.qemu.as_ref().map_or(0, |facts| facts.plugged_blocks);
        pieces.truncate(pieces.len().saturating_sub(plugged).max(1));
        let whole = pieces.iter().map(|(_, bytes)| bytes).sum();
        let mut layouts: Vec<Self> = Vec::new();
        for low in low_bytes(guest, whole) {
            let layout = lay_out(&pieces, low);
            if !layout.0.is_empty() && !layouts.contains(&layout) {
                layouts.push(layout);
            }
        }
        layouts
    }

    /// The layout that QEMU reports.
    ///
    /// # Errors
    /// QEMU does not answer, or refuses to.
    pub fn by_qmp(qmp: &mut Qmp) -> Result<Self, QmpError> {
        let backends = qmp.execute("query-memdev", json!({}))?;
        let backends = backends.as_array().map(Vec::as_slice).unwrap_or_default();
        let mut names: Vec<String> = backends.iter().filter_map(|b| Some(b["id"].as_str()?.to_owned())).collect();
        names.push("pc.ram".to_owned());
        let mut human = |line: String| -> Result<String, QmpError> {
            let answer = qmp.execute("human-monitor-command", json!({"command-line": line}))?;
            Ok(answer.as_str().unwrap_or_default().to_owned())
        };
        let mut blocks = Vec::new();
        for (first, last) in ram_in_flat_view(&human("info mtree -f".into())?, &names).into_iter().take(MOST_PIECES) {
            if let Some(host) = address_in(&human(format!("gpa2hva {first:#x}"))?) {
                blocks.push(RamBlock { guest: GuestPhys(first), host, bytes: (last - first).saturating_add(1) });
            }
        }
        Ok(Self::new(blocks))
    }
}

/// Possible sizes of the RAM below the hole, the likeliest first. `whole` is the size of all RAM.
fn low_bytes(guest: &Guest, whole: u64) -> Vec<u64> {
    const GIB: u64 = 1 << 30;
    let (pc, q35) =
        (if whole >= 0xe000_0000 { 3 * GIB } else { whole }, if whole >= 0xb000_0000 { 2 * GIB } else { whole });
    match guest.kind {
        GuestKind::Firecracker => vec![firecracker::RAM_BELOW_HOLE_BYTES],
        GuestKind::CloudHypervisor => vec![cloud_hypervisor::RAM_BELOW_HOLE_BYTES],
        _ => {
            let facts = guest.facts.qemu.clone().unwrap_or_default();
            let is_q35 = facts.machine.is_some_and(|machine| machine.contains("q35"));
            let usual = if is_q35 { [q35, pc] } else { [pc, q35] };
            let asked = facts.max_below_4g_bytes.filter(|low| *low < whole);
            asked.into_iter().chain(usual).chain([3 * GIB]).collect()
        }
    }
}

/// Lays pieces out one after the other, first `low` bytes below the hole, and the rest from 4 GiB on.
fn lay_out(pieces: &[(HostVirt, u64)], low: u64) -> RamMap {
    let mut blocks = Vec::new();
    let mut done = 0;
    for &(host, bytes) in pieces {
        let below = low.saturating_sub(done).min(bytes);
        blocks.push(RamBlock { guest: GuestPhys(done), host, bytes: below });
        let guest = GuestPhys(FOUR_GIB + (done + below).saturating_sub(low));
        blocks.push(RamBlock { guest, host: HostVirt(host.0 + below), bytes: bytes - below });
        done += bytes;
    }
    RamMap::new(blocks)
}

/// First and last guest addresses of the memory regions with these names, from QEMU's output of `info mtree -f`. The
/// output has a list for each address space, with lines such as
/// `  0000000100000000-000000013fffffff (prio 0, ram): pc.ram @00000000c0000000 KVM`.
fn ram_in_flat_view(text: &str, names: &[String]) -> Vec<(u64, u64)> {
    let mut found = Vec::new();
    let mut is_memory = false;
    for line in text.lines() {
        if line.starts_with("FlatView") {
            is_memory = false;
        } else if let Some(rest) = line.trim_start().strip_prefix("AS \"") {
            is_memory |= rest.starts_with("memory\"");
        } else if is_memory
            && let Some((addresses, rest)) = line.trim_start().split_once(" (prio ")
            && let Some((kind, rest)) = rest.split_once("): ")
            && let Some((first, last)) = addresses.split_once('-')
            && (kind.ends_with(", ram") || kind.ends_with(", rom"))
            && names.iter().any(|name| rest.split(' ').next() == Some(name))
            && let (Ok(first), Ok(last)) = (u64::from_str_radix(first, 16), u64::from_str_radix(last, 16))
            && first <= last
        {
            found.push((first, last));
        }
    }
    found
}

/// The address in `Host virtual address for 0x0 (pc.ram) is 0x7f1e2c000000`.
pub(crate) fn address_in(text: &str) -> Option<HostVirt> {
    let digits = text.trim().rsplit_once(" is 0x")?.1;
    u64::from_str_radix(digits, 16).ok().map(HostVirt)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Facts, QemuFacts};

    const GIB: u64 = 1 << 30;

    fn guest(kind: GuestKind, machine: &str) -> Guest {
        let qemu = QemuFacts { machine: Some(machine.into()), ..QemuFacts::default() };
        Guest {
            id: "x".into(),
            name: "x".into(),
            kind,
            pids: vec![1],
            group: "x".into(),
            ram_bytes: None,
            facts: Facts { qemu: Some(qemu), ..Facts::default() },
        }
    }

    fn block(guest: u64, host: u64, bytes: u64) -> RamBlock {
        RamBlock { guest: GuestPhys(guest), host: HostVirt(host), bytes }
    }

    #[test]
    fn ram_below_hole_depends_on_vmm_and_machine() {
        let host = 0x7f00_0000_0000;
        for (kind, machine, bytes, low) in [
            (GuestKind::Qemu, "pc", 2 * GIB, 2 * GIB),
            (GuestKind::Qemu, "pc", 4 * GIB, 3 * GIB),
            (GuestKind::Qemu, "pc-q35-7.2", 4 * GIB, 2 * GIB),
            (GuestKind::Qemu, "q35", 2 * GIB, 2 * GIB),
            (GuestKind::Firecracker, "", 4 * GIB, 13 * GIB / 4),
            (GuestKind::CloudHypervisor, "", 4 * GIB, 3 * GIB),
        ] {
            let guest = guest(kind, machine);
            let map = lay_out(&[(HostVirt(host), bytes)], low_bytes(&guest, bytes)[0]);
            let mut wanted = vec![block(0, host, low)];
            if bytes > low {
                wanted.push(block(4 * GIB, host + low, bytes - low));
            }
            assert_eq!(map.blocks(), wanted, "{kind:?} {machine} {bytes}");
            assert_eq!(map.host_of(GuestPhys(low - 1)), Some((HostVirt(host + low - 1), 1)));
            assert_eq!(
                map.guest_of(HostVirt(host + bytes - 4096)).map(|at| map.host_of(at).unwrap().0.0),
                Some(host + bytes - 4096)
            );
            assert_eq!(map.host_of(GuestPhys(5 * GIB + GIB / 4)).is_none(), bytes <= low + GIB, "{machine}");
        }
    }

    #[test]
    fn blocks_follow_each_other_and_hole_may_cut_one() {
        let map = lay_out(&[(HostVirt(0x10_0000), 2 * GIB), (HostVirt(0x7000_0000_0000), 2 * GIB)], 3 * GIB);
        let wanted = [
            block(0, 0x10_0000, 2 * GIB),
            block(2 * GIB, 0x7000_0000_0000, GIB),
            block(4 * GIB, 0x7000_0000_0000 + GIB, GIB),
        ];
        assert_eq!(map.blocks(), wanted);
        assert_eq!(map.host_of(GuestPhys(3 * GIB)), None, "the hole");
    }

    #[test]
    fn output_of_qemu_is_parsed() {
        let text = "FlatView #0\n AS \"I/O\", root: io\n  0000000000000000-0000000000000007 (prio 0, ram): pc.ram\n\nFlatView #1\n \
            AS \"memory\", root: system\n AS \"cpu-memory-0\", root: system\n Root memory region: system\n  \
            0000000000000000-000000000009ffff (prio 0, ram): pc.ram\n  00000000000a0000-00000000000bffff (prio 1, i/o): \
            vga-lowmem\n  00000000000c0000-00000000000dffff (prio 1, rom): pc.ram @00000000000c0000\n  \
            00000000fd000000-00000000fdffffff (prio 1, ram): vga.vram\n  0000000100000000-000000013fffffff (prio 0, ram): \
            dimm0\n  junk-000 (prio 0, ram): pc.ram\n";
        let names = ["pc.ram".to_owned(), "dimm0".to_owned()];
        let wanted = [(0, 0x9_ffff), (0xc_0000, 0xd_ffff), (0x1_0000_0000, 0x1_3fff_ffff)];
        assert_eq!(ram_in_flat_view(text, &names), wanted);
        assert_eq!(
            address_in("Host virtual address for 0x0 (pc.ram) is 0x7f1e2c000000\r\n"),
            Some(HostVirt(0x7f1e_2c00_0000))
        );
        assert_eq!(address_in("No memory is mapped at address 0x7"), None);
    }

    #[test]
    fn overlapping_or_unaligned_pieces_are_left_out() {
        let map = RamMap::new(vec![
            block(0, 0x1000, 0x2000),
            block(0x1000, 0x9000, 0x1000),
            block(0x2000, 0x3000, 0x1000),
            block(0x5001, 0x3000, 0x1000),
            block(u64::MAX - 0xfff, 0x3000, 0x2000),
        ]);
        assert_eq!(map.blocks(), [block(0, 0x1000, 0x3000)]);
    }

    #[test]
    fn pieces_without_addresses_of_their_own_are_left_out() {
        let text =
            "1000-5000 rw-p 00000000 00:00 0 \n5000-9000 r--p 00000000 00:00 0 \na000-b000 rw-p 00000000 00:00 0 \n";
        let mappings = Mapping::parse_all(text).unwrap();
        let pieces = [
            block(0, 0x1000, 0x8000),
            block(0x10_0000, 0x4000, 0x1000),
            block(0x20_0000, 0x9000, 0x2000),
            block(0x30_0000, 0xa000, 0x1000),
            block(0x40_0000, 0, 1 << 62),
        ];
        assert_eq!(RamMap::new(pieces.into()).within(&mappings).blocks(), [pieces[0], pieces[3]]);
    }
}
