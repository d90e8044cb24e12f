//! Emulated devices that a VM may do without, the memory of each, and the option of QEMU that leaves it out. Agarwal,
//! "A Study of Virtualization Overheads" (2015), table 6.5, has what they cost there.

use guest::{Guest, QemuFacts, Qmp};
use host::{Mapping, Pagemap};
use page::pages_to_bytes;
use serde::Serialize;

/// Parts of the names of devices that guests on a server rarely need.
const DISPENSABLE: [&str; 10] = ["VGA", "vga", "qxl", "virtio-gpu", "cirrus", "hda", "AC97", "xhci", "ehci", "usb"];

/// Devices that QEMU adds by itself, by the beginnings of their names, and the options that leave them out.
const USUAL: [(&str, &str); 13] = [
    ("VGA", "with -vga none"),
    ("cirrus-vga", "with -vga none"),
    ("qxl-vga", "with -vga none"),
    ("virtio-vga", "with -vga none"),
    ("vmware-svga", "with -vga none"),
    ("e1000", "with -nic none"),
    ("isa-parallel", "with -parallel none"),
    ("ide-cd", "with -nodefaults"),
    ("floppy", "with -nodefaults"),
    ("piix3-usb-uhci", "without -usb"),
    ("ich9-usb-", "without -usb"),
    ("hpet", "with -machine hpet=off"),
    ("vmport", "with -machine vmport=off"),
];

/// An emulated device.
#[derive(Clone, Debug, Serialize)]
pub struct Device {
    /// Its kind, by QEMU's name for it.
    pub driver: String,
    /// Its id; `None` if it has none.
    pub id: Option<String>,
    /// Its class, where it is a PCI device.
    pub class: Option<String>,
    /// Its memory in QEMU that the guest has mapped, by region.
    pub regions: Vec<DeviceRegion>,
    /// The backed part of those regions; `None` where there is none, since QEMU does not tell where other memory of a device lies.
    pub costs_bytes: Option<u64>,
    /// The option that leaves it out; `None` where that is not known.
    pub left_out: Option<String>,
}

/// A region of a device's memory.
#[derive(Clone, Debug, Serialize)]
pub struct DeviceRegion {
    /// QEMU's name for it.
    pub name: String,
    /// Its size.
    pub bytes: u64,
    /// The part that the host backs.
    pub backed_bytes: u64,
}

/// Whether a server's guests rarely need devices with this name.
pub(super) fn is_dispensable(driver: &str) -> bool {
    DISPENSABLE.iter().any(|part| driver.contains(part))
}

impl Device {
    /// The devices of a VM that can be left out, or have memory that is known. Its QEMU lists them.
    ///
    /// # Errors
    /// QEMU does not answer, or the process may not be read.
    pub fn all(guest: &Guest, qmp: &mut Qmp) -> anyhow::Result<Vec<Self>> {
        let pid = guest.pids.first().copied().unwrap_or(0);
        let found = guest::Device::all(qmp, &Mapping::list(pid)?)?;
        let pagemap = Pagemap::open(pid)?;
        let device = |device: guest::Device| {
            let mut regions = Vec::new();
            for guest::DeviceMemory { name, host, bytes } in device.memory {
                let backed = pagemap.present_ranges(host, page::HostVirt(host.0 + bytes))?;
                let backed_bytes = pages_to_bytes(backed.iter().map(|range| range.pages).sum());
                regions.push(DeviceRegion { name, bytes, backed_bytes });
            }
            let costs_bytes = (!regions.is_empty()).then(|| regions.iter().map(|region| region.backed_bytes).sum());
            let left_out = guest.facts.qemu.as_ref().and_then(|facts| left_out(&device.driver, facts));
            let id = Some(device.id).filter(|id| !id.is_empty());
            Ok(Self { driver: device.driver, id, class: device.class, regions, costs_bytes, left_out })
        };
        let all: anyhow::Result<Vec<Self>> = found.into_iter().map(device).collect();
        Ok(all?.into_iter().filter(|device| device.left_out.is_some() || !device.regions.is_empty()).collect())
    }
}

/// The option that leaves a device out; `None` if none is known. A device that the command line asks for is left out by
/// dropping its `-device`, unless servers may need it. Others are devices that QEMU adds by itself.
fn left_out(driver: &str, facts: &QemuFacts) -> Option<String> {
    if facts.devices.iter().any(|asked| asked == driver) {
        return is_dispensable(driver).then(|| format!("without -device {driver}"));
    }
    USUAL.iter().find(|(usual, _)| driver.starts_with(usual)).map(|(_, how)| (*how).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_that_was_asked_for_is_left_out_by_not_asking() {
        let facts = QemuFacts { devices: vec!["VGA".into(), "virtio-net-pci".into()], ..QemuFacts::default() };
        let found = ["VGA", "cirrus-vga", "e1000", "virtio-net-pci", "PIIX3"].map(|driver| left_out(driver, &facts));
        let expected = [Some("without -device VGA"), Some("with -vga none"), Some("with -nic none"), None, None];
        assert_eq!(found.each_ref().map(Option::as_deref), expected);
    }
}
