//! Guests whose roots lie to the balancer, with a real device.

use super::lab::{Lab, name};
use serde_json::Value;

/// Number of liars.
pub const LIARS: usize = 2;
/// Lies of the guests. The first says at once that the balloon is as large as the host wants it, and gives nothing back.
/// Of the device's I/O ports, `num_pages` is at 20, and `actual` at 24. The second takes all pages of the balloon back as soon as it has any.
pub const LIES: [&str; LIARS] = [
    "rmmod virtio_balloon; d=$(grep -l 0x1002 /sys/bus/pci/devices/*/device | head -n 1)
while [ ! -e /tmp/honest ]; do
    dd if=${d%device}resource0 bs=4 skip=5 count=1 2>/dev/null | dd of=${d%device}resource0 bs=4 seek=6 conv=notrunc 2>/dev/null
    sleep 0.1
done; insmod /modules/*balloon*",
    "while [ ! -e /tmp/honest ]; do rmmod virtio_balloon; sleep 0.3; insmod /modules/*balloon*; sleep 0.3; done",
];
/// Scripts with as much work for each guest, and without a lie.
pub const TRUTHS: [&str; LIARS] = [
    "while [ ! -e /tmp/honest ]; do dd if=/dev/zero bs=4 count=1 2>/dev/null | dd of=/dev/null bs=4 2>/dev/null; sleep 0.1; done",
    "while [ ! -e /tmp/honest ]; do cat /proc/modules > /dev/null; sleep 0.3; cat /modules/*balloon* > /dev/null; sleep 0.3; done",
];
/// Script that ends a lie.
pub const END: &str = "touch /tmp/honest; while [ ! -e /tmp/done ]; do sleep 0.1; done; rm /tmp/done; grep -c ^virtio_balloon /proc/modules";

/// Has the first of these guests do so, one a script, until they are told to be honest.
pub fn begin(lab: &Lab, guests: &[Value], scripts: &[&str]) {
    for (guest, script) in guests.iter().zip(scripts) {
        let begin =
            format!("rm -f /tmp/honest; (sh -c '{script}'; echo done > /tmp/done) > /dev/null 2>&1 < /dev/null &");
        lab.everywhere(&[name(guest)], &begin);
    }
}
