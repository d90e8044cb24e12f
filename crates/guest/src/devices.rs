//! Emulated devices of a VM, as QEMU lists them (`info qtree`), and memory of these devices that the guest can access.
//!
//! ```text
//!   dev: VGA, id ""
//!     vgamem_mb = 16 (0x10)
//!     class VGA controller, addr 00:02.0, pci id 1234:1111 (sub 1af4:1100)
//!     bar 0: mem at 0xfd000000 [0xfdffffff]       -- gpa2hva --> vga.vram, in QEMU's own memory
//!     bar 2: mem at 0xfebf0000 [0xfebf0fff]       -- gpa2hva --> no memory: a device's registers
//!     bar 6: mem at 0xffffffffffffffff [0xfffe]   the guest has not mapped it
//! ```
//!
//! QEMU does not say where other memory of a device lies: its state, its buffers, and a ROM that the guest does not
//! map.

use crate::qmp::{Qmp, QmpError};
use crate::ram_map::{RamBlock, RamMap, address_in};
use host::Mapping;
use page::{GuestPhys, HostVirt, PAGE_BYTES};
use serde_json::json;

/// Most devices that are looked at, and most regions of one device: a PCI device has at most 7.
const MOST_DEVICES: usize = 256;
const MOST_REGIONS: usize = 7;

/// An emulated device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// Its kind, by QEMU's name for it.
    pub driver: String,
    /// Its id; empty if it has none.
    pub id: String,
    /// Its class, where it is a PCI device.
    pub class: Option<String>,
    /// Its regions that are memory of QEMU's process and that the guest has mapped.
    pub memory: Vec<DeviceMemory>,
}

/// Memory of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceMemory {
    /// QEMU's name for it.
    pub name: String,
    /// Its first address in QEMU's process.
    pub host: HostVirt,
    /// Its size.
    pub bytes: u64,
}

/// A device as it is listed, and the guest's addresses of its regions, first and last.
#[derive(Debug, PartialEq, Eq)]
struct Listed {
    device: Device,
    regions: Vec<(u64, u64)>,
}

impl Device {
    /// All devices of a VM. `mappings` are those of QEMU's process: memory that QEMU reports outside of them is left
    /// out.
    ///
    /// # Errors
    /// QEMU does not answer, or refuses to.
    pub fn all(qmp: &mut Qmp, mappings: &[Mapping]) -> Result<Vec<Self>, QmpError> {
        let listed = parse(&human(qmp, "info qtree")?);
        let complete = |Listed { device, regions }| {
            let mut memory = Vec::new();
            for (first, last) in regions {
                memory.extend(memory_at(qmp, first, last)?.filter(|found| is_mapped(found, mappings)));
            }
            Ok(Self { memory, ..device })
        };
        listed.into_iter().map(complete).collect()
    }
}

fn human(qmp: &mut Qmp, line: &str) -> Result<String, QmpError> {
    let answer = qmp.execute("human-monitor-command", json!({"command-line": line}))?;
    Ok(answer.as_str().unwrap_or_default().to_owned())
}

fn is_mapped(memory: &DeviceMemory, mappings: &[Mapping]) -> bool {
    let block = RamBlock { guest: GuestPhys(0), host: memory.host, bytes: memory.bytes };
    !RamMap::new(vec![block]).within(mappings).blocks().is_empty()
}

/// QEMU's memory at these addresses of the guest; `None` unless all of it is one piece.
fn memory_at(qmp: &mut Qmp, first: u64, last: u64) -> Result<Option<DeviceMemory>, QmpError> {
    let page = PAGE_BYTES as u64;
    let Some(bytes) = last.checked_sub(first).and_then(|bytes| bytes.checked_add(1)).filter(|bytes| *bytes >= page)
    else {
        return Ok(None);
    };
    let mut at = |address: u64| Ok(named_address(&human(qmp, &format!("gpa2hva {address:#x}"))?));
    let Some((name, host)) = at(first)? else { return Ok(None) };
    let end = at(last + 1 - page)?;
    let is_whole = end.is_some_and(|(other, end)| other == name && Some(end.0) == host.0.checked_add(bytes - page));
    Ok(is_whole.then_some(DeviceMemory { name, host, bytes }))
}

/// Name and address in `Host virtual address for 0xfd000000 (vga.vram) is 0x7f1e2c000000`.
fn named_address(text: &str) -> Option<(String, HostVirt)> {
    let (_, rest) = text.split_once(" (")?;
    let (name, _) = rest.rsplit_once(") is ")?;
    Some((name.to_owned(), address_in(text)?))
}

/// Reads QEMU's output of `info qtree`.
fn parse(text: &str) -> Vec<Listed> {
    let mut all: Vec<Listed> = Vec::new();
    for line in text.lines().map(str::trim_start) {
        if let Some((driver, id)) = line.strip_prefix("dev: ").and_then(|rest| rest.split_once(", id ")) {
            if all.len() == MOST_DEVICES {
                break;
            }
            let (driver, id) = (driver.to_owned(), id.trim_matches('"').to_owned());
            let device = Device { driver, id, class: None, memory: Vec::new() };
            all.push(Listed { device, regions: Vec::new() });
        } else if let Some(last) = all.last_mut() {
            if let Some((class, _)) = line.strip_prefix("class ").and_then(|rest| rest.split_once(", addr ")) {
                last.device.class = Some(class.to_owned());
            }
            last.regions.extend(region(line).filter(|_| last.regions.len() < MOST_REGIONS));
        }
    }
    all
}

/// The addresses in `bar 0: mem at 0xfd000000 [0xfdffffff]`; `None` if the guest has not mapped the region.
fn region(line: &str) -> Option<(u64, u64)> {
    let (_, addresses) = line.strip_prefix("bar ")?.split_once(": mem at 0x")?;
    let (first, last) = addresses.strip_suffix(']')?.split_once(" [0x")?;
    let [first, last] = [first, last].map(|digits| u64::from_str_radix(digits, 16).ok());
    first.zip(last).filter(|(first, last)| first < last)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TREE: &str = r#"bus: main-system-bus
  type System
  dev: i440FX-pcihost, id ""
    pci-hole64-size = 2147483648 (2 GiB)
    bus: pci.0
      type PCI
      dev: VGA, id "video"
        vgamem_mb = 16 (0x10)
        addr = 02.0
        romfile = "vgabios-stdvga.bin"
        class VGA controller, addr 00:02.0, pci id 1234:1111 (sub 1af4:1100)
        bar 0: mem at 0xfd000000 [0xfdffffff]
        bar 2: mem at 0xfebf0000 [0xfebf0fff]
        bar 4: i/o at 0xc000 [0xc01f]
        bar 6: mem at 0xffffffffffffffff [0xfffe]
      dev: PIIX3, id ""
        class ISA bridge, addr 00:01.0, pci id 8086:7000 (sub 1af4:1100)
        bus: isa.0
          type ISA
          dev: isa-parallel, id "parallel0"
            chardev = "parallel0"
"#;

    #[test]
    fn devices_are_read_with_their_classes_and_mapped_regions() {
        let found = parse(TREE);
        let of =
            |n: usize| (found[n].device.driver.as_str(), found[n].device.id.as_str(), found[n].device.class.as_deref());
        assert_eq!(of(0), ("i440FX-pcihost", "", None));
        assert_eq!(of(1), ("VGA", "video", Some("VGA controller")));
        assert_eq!(of(2), ("PIIX3", "", Some("ISA bridge")));
        assert_eq!(of(3), ("isa-parallel", "parallel0", None));
        assert_eq!(found.len(), 4);
        assert_eq!(found[1].regions, [(0xfd00_0000, 0xfdff_ffff), (0xfebf_0000, 0xfebf_0fff)]);
        assert!(found[2].regions.is_empty());
    }

    #[test]
    fn tree_without_end_is_bounded() {
        let mut text = "dev: x, id \"\"\n".repeat(1000);
        assert_eq!(parse(&text).len(), MOST_DEVICES);
        text = format!("dev: x, id \"\"\n{}", "bar 0: mem at 0x1000 [0x1fff]\n".repeat(1000));
        assert_eq!(parse(&text)[0].regions.len(), MOST_REGIONS);
    }

    #[test]
    fn address_comes_with_the_name_of_its_memory() {
        let told = "Host virtual address for 0xfd000000 (vga.vram) is 0x7f1e2c000000\r\n";
        assert_eq!(named_address(told), Some(("vga.vram".into(), HostVirt(0x7f1e_2c00_0000))));
        assert_eq!(named_address("Memory at address 0xfebf0000 is not RAM"), None);
        assert_eq!(named_address("No memory is mapped at address 0x0"), None);
    }
}
