//! A template with a disk: Debian with MariaDB, whose memory, disk and swap are of one instant.

use crate::common::is_long;
use crate::rig::{Rig, text};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Script for the template's guest. Rows are committed. A file is written and not yet on the disk, another is in swap. There are SSH host
/// keys, by a program from the second disk. Prints what clones must find.
const LIVES: &str = "set -e
tar xf /dev/vdb -C /
mkdir -p /etc/ssh
ssh-keygen -A >/dev/null
mariadb -e 'create database kept; create table kept.numbers (n int); insert into kept.numbers values (1), (2), (3)'
dd if=/dev/zero of=/swap bs=1M count=64 status=none
chmod 600 /swap
mkswap -q /swap
swapon /swap
head -c 24000000 /dev/urandom >/dev/shm/swapped
sha256sum </dev/shm/swapped
sha256sum </usr/sbin/mariadbd
echo 200 >/proc/sys/vm/swappiness
echo 48M >/sys/fs/cgroup/memory.reclaim || true
awk 'NR == 2 { print $4 }' /proc/swaps
head -c 3000000 /dev/urandom >/root/written
sha256sum </root/written
cat /proc/sys/kernel/random/boot_id /etc/machine-id /etc/ssh/ssh_host_ed25519_key.pub /etc/ssh/ssh_host_rsa_key.pub";

/// Script for a clone: the same, from the disk and from swap.
const LOOKS: &str = "set -e
mariadb -N -e 'select sum(n) from kept.numbers'
sha256sum </dev/shm/swapped
sync
echo 3 >/proc/sys/vm/drop_caches
sha256sum </usr/sbin/mariadbd
awk 'NR == 2 { print $4 }' /proc/swaps
sha256sum </root/written
cat /proc/sys/kernel/random/boot_id /etc/machine-id /etc/ssh/ssh_host_ed25519_key.pub /etc/ssh/ssh_host_rsa_key.pub
hostname";

/// A disk whose content is an archive with `ssh-keygen`, which the image lacks; `None` where the host lacks it, too.
fn second_disk(dir: &Path) -> Option<PathBuf> {
    if !Path::new("/usr/bin/ssh-keygen").exists() {
        eprintln!("skipped: no ssh-keygen here");
        return None;
    }
    let disk = dir.join("more");
    let packed = Command::new("tar").args(["-C", "/", "-cf"]).arg(&disk).arg("usr/bin/ssh-keygen").status();
    assert!(packed.expect("run tar").success());
    Some(disk)
}

#[test]
fn clones_of_debian_have_memory_disk_and_swap_of_one_instant() {
    if !is_long() {
        return eprintln!("skipped: a guest with Debian takes minutes under emulation: PAGEFOLD_LONG_TESTS=1");
    }
    let rig = Rig::new();
    let dir = tempfile::tempdir_in("/tmp").expect("a temporary directory");
    let Some(disk) = second_disk(dir.path()) else { return };
    let drive = format!("--qemu-arg=if=none,id=more,format=raw,readonly=on,file={}", disk.display());
    let more = ["--qemu-arg=-drive", &drive, "--qemu-arg=-device", "--qemu-arg=virtio-blk-pci,drive=more"];
    let words = [&["db", "--image", "debian", "--timeout", "900"][..], &more].concat();
    let Some(told) = rig.prepared(&words, |inside| inside(LIVES)) else { return };
    let template: Vec<&str> = told.lines().collect();
    let [swapped, server, in_swap, written, ..] = template[..] else { panic!("{told}") };
    assert!(in_swap.parse::<u32>().is_ok_and(|kib| kib > 1000), "nothing is in swap: {told}");
    let stored = fs::read_dir(rig.templates().join("acme/db")).expect("its files").count();
    assert_eq!(stored, 4, "memory, device state, disk and description");
    let made = rig.clone("db", &["--count", "2", "--timeout", "240"]);
    // The template's boot_id, machine-id and keys.
    let mut seen: BTreeSet<String> = template[4..].iter().map(|line| (*line).to_owned()).collect();
    for one in &made {
        let name = text(one, "name");
        let found = rig.inside(&name, LOOKS);
        let lines: Vec<&str> = found.lines().collect();
        let [sum, in_memory, on_disk, _, file, ..] = lines[..] else { panic!("{found}") };
        assert_eq!((sum, in_memory, on_disk, file), ("6", swapped, server, written), "{found}");
        let [identity @ .., hostname] = &lines[5..] else { panic!("{found}") };
        assert_eq!((identity.len(), *hostname, identity[1]), (4, &*name, &*text(one, "machine_id")));
        for value in identity {
            assert!(seen.insert((*value).to_owned()), "{value} is another's");
        }
    }
    // Each writes on, for itself.
    rig.inside("db-1", "mariadb -e 'insert into kept.numbers values (10)'; sync");
    let sums = ["db-1", "db-2"].map(|name| rig.inside(name, "mariadb -N -e 'select sum(n) from kept.numbers'"));
    assert_eq!(sums, ["16", "6"]);
    rig.json(&["rollback", "db-1", "--timeout", "240"]);
    assert_eq!(rig.inside("db-1", "mariadb -N -e 'select sum(n) from kept.numbers'; hostname"), "6\ndb-1");
    rig.json(&["template", "verify", "db"]);
}
