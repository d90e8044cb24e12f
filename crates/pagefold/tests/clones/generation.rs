//! The device by which a VMM tells a guest's kernel that it is a copy (vmgenid).

use crate::common::lab;
use crate::rig::Rig;

/// Number of new keys that the guest's kernel has made because it is a copy.
const TOLD: &str = "dmesg | grep 'crng reseeded due to virtual machine fork' | wc -l";

#[test]
fn kernel_that_knows_vmgenid_makes_a_new_key_in_each_clone() {
    let (rig, lab) = (Rig::new(), lab::Lab::new(&[]));
    let line = format!("--qemu-arg=socket,id=identity,server=on,wait=off,path={}/identity", lab.dir().display());
    let helper = ["--qemu-arg=-chardev", &line, "--qemu-arg=-device", "--qemu-arg=isa-serial,chardev=identity,irq=5"];
    let words = ["--image", "tiny", "--suite", "trixie", "--append", "pagefold.identity=/dev/ttyS2"];
    let device = ["--qemu-arg=-device", "--qemu-arg=vmgenid,guid=auto"];
    let Some(guests) = lab.up(&[&words[..], &helper, &device].concat()) else { return };
    let name = lab::name(&guests[0]);
    rig.json(&["template", "create", "web", "--from", &name, "--group", "acme"]);
    assert_eq!(lab.everywhere(std::slice::from_ref(&name), TOLD), ["0"]);
    rig.clone("web", &["--count", "2"]);
    assert_eq!(["web-1", "web-2"].map(|clone| rig.inside(clone, TOLD)), ["1", "1"]);
    rig.json(&["rollback", "web-1"]);
    assert_eq!(rig.inside("web-1", TOLD), "1", "another machine again");
}
