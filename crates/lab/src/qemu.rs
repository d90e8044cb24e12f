//! A guest in QEMU: its command line and its sockets.

use crate::error::Result;
use crate::image::Boot;
use crate::{place, program, saved};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Accelerator: the means by which QEMU executes a guest's code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Accelerator {
    /// The processor, by the kernel's virtual machine monitor.
    Kvm,
    /// QEMU, by translation.
    Tcg,
}

impl Accelerator {
    /// QEMU's arguments for this accelerator.
    pub(crate) const fn arguments(self) -> &'static [&'static str] {
        match self {
            Self::Kvm => &["-accel", "kvm", "-cpu", "host"],
            // tb-size: otherwise the translation cache grows to half a gigabyte a guest.
            // -cx16: in QEMU 7.2 (Debian's 7.2.22), cmpxchg16b sometimes leaves wrong flags. A third of the guests with
            // Linux 6.12 died of that as they booted.
            Self::Tcg => &["-accel", "tcg,tb-size=32", "-cpu", "qemu64,-cx16"],
        }
    }
}

/// Sockets of one guest, in its private directory.
#[derive(Clone, Debug)]
pub(crate) struct Sockets {
    /// QEMU's machine protocol.
    pub(crate) qmp: PathBuf,
    /// The kernel's console and a shell.
    pub(crate) console: PathBuf,
    /// The agent that runs commands.
    pub(crate) agent: PathBuf,
}

impl Sockets {
    pub(crate) fn in_dir(dir: &Path) -> Self {
        Self { qmp: dir.join("qmp"), console: dir.join("console"), agent: dir.join("agent") }
    }
}

/// Everything that QEMU needs to boot a guest.
#[derive(Clone, Debug)]
pub(crate) struct Machine<'a> {
    pub(crate) name: &'a str,
    /// Directory of this guest, into which its sockets and logs go.
    pub(crate) dir: &'a Path,
    pub(crate) boot: &'a Boot,
    pub(crate) accelerator: Accelerator,
    pub(crate) memory_bytes: u64,
    /// Words added to the kernel's command line.
    pub(crate) append: &'a str,
    /// Words added to QEMU's command line.
    pub(crate) qemu_args: &'a [String],
    /// The disk; `None` for the disk of the image, if it has one.
    pub(crate) disk: Option<Disk<'a>>,
    /// Saved state from which the machine goes on; `None` to boot it.
    pub(crate) state: Option<&'a Path>,
}

/// A disk of a VM. Unless the variant says otherwise, it is a file in QEMU's own format over the image's disk.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Disk<'a> {
    /// The guest's writes are kept in it.
    Kept(&'a Path),
    /// The guest's own disk in the format `raw`. The guest's writes are kept in it.
    Own(&'a Path),
    /// A disk that all guests read. QEMU keeps each guest's writes in an unnamed file of that guest.
    Read(&'a Path),
}

/// File with the output of the guest kernel's console.
pub(crate) fn console_log(dir: &Path) -> PathBuf {
    dir.join("console.log")
}

/// The command that runs a machine.
pub(crate) fn command(machine: &Machine) -> Result<Command> {
    let sockets = Sockets::in_dir(machine.dir);
    place::check_socket_path(&sockets.console)?;
    let mut qemu = program::command("qemu-system-x86_64")?;
    qemu.args(["-name", &format!("guest={}", machine.name)]);
    qemu.args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-machine", "pc", "-smp", "1"]);
    qemu.args(machine.accelerator.arguments());
    // The suffix "B" keeps QEMU from taking the number for MiB.
    qemu.args(["-m", &format!("{}B", machine.memory_bytes)]);
    qemu.arg("-kernel").arg(&machine.boot.kernel).arg("-initrd").arg(&machine.boot.initramfs);
    qemu.args(["-append", &kernel_line(machine)]);
    let log = console_log(machine.dir);
    qemu.args(["-chardev", &format!("{},logfile={}", socket("console", &sockets.console), escaped(&log))]);
    qemu.args(["-serial", "chardev:console", "-chardev", &socket("agent", &sockets.agent), "-serial", "chardev:agent"]);
    qemu.args(["-chardev", &socket("qmp", &sockets.qmp), "-mon", "chardev=qmp,mode=control"]);
    let image = machine.boot.disk.as_deref().map(|image| (image, "format=raw,snapshot=on"));
    let disk = match machine.disk {
        Some(Disk::Own(disk)) => Some((disk, "format=raw")),
        Some(Disk::Kept(disk)) => Some((disk, "format=qcow2")),
        Some(Disk::Read(disk)) => Some((disk, "format=qcow2,snapshot=on")),
        None => image,
    };
    if let Some((file, options)) = disk {
        qemu.args(["-drive", &format!("if=none,id=root,{options},file={}", escaped(file))]);
        qemu.args(["-device", "virtio-blk-pci,drive=root"]);
    }
    qemu.args(machine.qemu_args);
    if let Some(state) = machine.state {
        qemu.args(["-incoming", &saved::incoming(state)]);
    }
    Ok(qemu)
}

fn kernel_line(machine: &Machine) -> String {
    let name = machine.name;
    let mut line = format!("console=ttyS0 quiet panic=-1 pagefold.name={name} systemd.hostname={name}");
    if matches!(machine.accelerator, Accelerator::Tcg) {
        // Without KVM, the kernel's check of its timer fails if the host is busy at that moment, and the kernel panics.
        line.push_str(" no_timer_check");
    }
    if machine.boot.disk.is_some() {
        line.push_str(" pagefold.root=/dev/vda");
    }
    if !machine.append.is_empty() {
        line.push(' ');
        line.push_str(machine.append);
    }
    line
}

fn socket(id: &str, path: &Path) -> String {
    format!("socket,id={id},server=on,wait=off,path={}", escaped(path))
}

/// A path as it stands in a QEMU option: QEMU separates options by commas, and a doubled comma stands for one.
fn escaped(path: &Path) -> String {
    path.to_string_lossy().replace(',', ",,")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arguments(dir: &str, disk: Option<&str>) -> Result<Vec<String>> {
        let boot = Boot { kernel: "k".into(), initramfs: "i".into(), disk: disk.map(PathBuf::from) };
        let machine = Machine {
            name: "acme-1",
            dir: Path::new(dir),
            boot: &boot,
            accelerator: Accelerator::Tcg,
            memory_bytes: 128 << 20,
            append: "mitigations=off",
            qemu_args: &["-device".into(), "virtio-rng-pci".into()],
            disk: None,
            state: None,
        };
        let command = command(&machine)?;
        Ok(command.get_args().map(|argument| argument.to_string_lossy().into_owned()).collect())
    }

    #[test]
    fn qemu_command_has_all_options_of_the_machine() {
        let line = arguments("/run/lab/acme-1", Some("/a,b/disk")).expect("a command").join(" ");
        for part in [
            "-name guest=acme-1",
            "-m 134217728B",
            "-accel tcg,tb-size=32 -cpu qemu64,-cx16",
            " no_timer_check pagefold.root=/dev/vda mitigations=off ",
            "path=/run/lab/acme-1/qmp ",
            "snapshot=on,file=/a,,b/disk",
        ] {
            assert!(line.contains(part), "{part} in {line}");
        }
        assert!(line.ends_with("-device virtio-rng-pci"));
    }

    #[test]
    fn qemu_command_without_disk_has_no_drive() {
        let line = arguments("/run/lab/acme-1", None).expect("a command").join(" ");
        assert!(!line.contains("-drive") && !line.contains("pagefold.root"));
    }

    #[test]
    fn directory_too_long_for_socket_paths_is_refused() {
        assert!(arguments(&format!("/run/{}", "x".repeat(100)), None).is_err());
    }
}
