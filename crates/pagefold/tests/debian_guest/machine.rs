//! The machine: its disks, and commands inside.

use crate::common::lab::{Lab, name};
use crate::common::not_root;
use crate::common::package::{built, done, next_version, tree};
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Longest time for each thing that happens inside: 10 minutes. libvirt asks QEMU for minutes what it can do.
pub const PATIENCE: Duration = Duration::from_secs(600);
/// Suite of Debian, of its kernel, too.
const SUITE: &str = "trixie";
const PACKAGES: &str =
    "dbus,libvirt-clients,libvirt-daemon-system,procps,qemu-system-x86,systemd-container,systemd-sysv,udev";
/// Script that makes a disk of Debian from packages, with the lab's agent. That has another name and directory here, so that all that is called
/// pagefold is the package's. libvirt runs when it is started.
const MAKE_DISK: &str = r#"set -e
disk=$1 dir=$2 suite=$3 packages=$4 recipes=$5 root=$2/root
mmdebstrap --quiet --mode=root --variant=minbase --format=directory --aptopt='APT::Install-Recommends "false"' \
    --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
    --include="$packages" "$suite" "$root" >&2
units=$root/etc/systemd/system
sed 's,/run/pagefold,/run/lab,' "$recipes/agent.sh" > "$root/usr/local/sbin/lab-agent"
chmod 755 "$root/usr/local/sbin/lab-agent"
sed 's,/pagefold-agent,/lab-agent,' "$recipes/pagefold-agent.service" > "$units/lab-agent.service"
mkdir -p "$units/multi-user.target.wants"
ln -s ../lab-agent.service "$units/multi-user.target.wants/"
rm -f "$units"/*.wants/libvirt* "$units"/*.wants/virt*
for unit in apt-daily.timer apt-daily-upgrade.timer e2scrub_reap.service; do ln -sf /dev/null "$units/$unit"; done
# Otherwise it is the first boot, at which systemd asks for a time zone.
echo 0123456789abcdef0123456789abcdef > "$root/etc/machine-id"
truncate -s 4G "$dir/disk"
mke2fs -q -t ext4 -J size=16 -d "$root" "$dir/disk"
rm -f "${disk%-*}"-*
mv "$dir/disk" "$disk"
"#;

/// The disk of Debian, which is made once.
fn disk() -> PathBuf {
    let (place, recipes) = (Path::new(env!("CARGO_TARGET_TMPDIR")), tree().join("crates/lab/recipes"));
    let mut hasher = DefaultHasher::new();
    (SUITE, PACKAGES, MAKE_DISK, fs::read(recipes.join("agent.sh")).expect("the agent")).hash(&mut hasher);
    let disk = place.join(format!("debian-guest-{:x}", hasher.finish()));
    if !disk.exists() {
        let dir = tempfile::tempdir_in(place).expect("a directory");
        let mut make = Command::new("sh");
        make.args(["-c", MAKE_DISK, "sh"]).arg(&disk).arg(dir.path()).args([SUITE, PACKAGES]).arg(recipes);
        done(&mut make);
    }
    disk
}

/// A disk with the package and a newer one, a program, and files of a test.
fn more(dir: &Path, package: &Path, files: &[(&str, &str)]) -> PathBuf {
    let (content, disk) = (dir.join("more"), dir.join("more.disk"));
    fs::create_dir(&content).expect("make a directory");
    fs::copy(package, content.join("pagefold.deb")).expect("copy the package");
    next_version(package, &content.join("next.deb"));
    let known_pages = Path::new(env!("CARGO_BIN_EXE_pagefold")).with_file_name("known_pages");
    fs::copy(known_pages, content.join("known_pages")).expect("copy a program");
    for (name, text) in files {
        fs::write(content.join(name), text).expect("write a file");
    }
    done(Command::new("mke2fs").args(["-q", "-t", "ext4", "-d"]).args([&content, &disk]).arg("512M"));
    disk
}

/// The machine.
pub struct Debian {
    lab: Lab,
    name: String,
    _dir: TempDir,
}

impl Debian {
    /// Boots it with some files in `/mnt/more`, and installs the package. `None`, with the reason printed, where this host lacks something,
    /// or a test may not take so long. It has one processor: with two, QEMU 7.2 sometimes executes code of the kernel's that is just being changed.
    pub fn with_package(files: &[(&str, &str)]) -> Option<Self> {
        if std::env::var_os("PAGEFOLD_SOAK_SECONDS").is_none() || not_root() {
            eprintln!("skipped: it takes longer than a test may: ./x soak 60 debian_guest, as root");
            return None;
        }
        let dir = tempfile::Builder::new().prefix("debian").tempdir_in("/tmp").expect("a temporary directory");
        let package = built(&dir)?;
        let disks = [disk(), more(dir.path(), &package, files)];
        let lab = Lab::new(&[]);
        let mut words: Vec<String> = ["--image", "tiny", "--suite", SUITE, "--memory", "2G", "--timeout", "1200"]
            .into_iter()
            .chain(["--append", "pagefold.root=/dev/vda mitigations=off"])
            .map(str::to_owned)
            .collect();
        for (n, disk) in disks.iter().enumerate() {
            let drive = format!("if=none,id=disk{n},format=raw,snapshot=on,file={}", disk.display());
            for word in ["-drive", &drive, "-device", &format!("virtio-blk-pci,drive=disk{n}")] {
                words.extend(["--qemu-arg".to_owned(), word.to_owned()]);
            }
        }
        let began = Instant::now();
        let listed = lab.up(&words.iter().map(String::as_str).collect::<Vec<_>>())?;
        eprintln!("debian: booted in {} s", began.elapsed().as_secs());
        let debian = Self { name: name(&listed[0]), lab, _dir: dir };
        debian.sh("mkdir /mnt/more && mount /dev/vdb /mnt/more; . /etc/os-release; echo $PRETTY_NAME; uname -r");
        debian.sh("dpkg -i /mnt/more/pagefold.deb 2>&1; systemctl is-active pagefold.service pagefold-enrol.service");
        Some(debian)
    }

    /// The output of a script, which has to succeed.
    pub fn sh(&self, script: &str) -> String {
        let began = Instant::now();
        let answer = self.quietly(script);
        eprintln!("debian: {} s: {script}\n{answer}", began.elapsed().as_secs());
        answer
    }

    /// Like [`Self::sh`], and shows nothing.
    pub fn quietly(&self, script: &str) -> String {
        let script = format!("set -e; {script}");
        self.lab.everywhere(std::slice::from_ref(&self.name), &script).remove(0)
    }
}
