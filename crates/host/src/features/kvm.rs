//! KVM: whether VMs can be created.

use crate::{Check, Result, boot_id};
use rustix::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::fs::{self, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// `_IO(0xAE, 0x00)`
const KVM_GET_API_VERSION: libc::Ioctl = 0xae00;
/// `_IO(0xAE, 0x01)`; the argument is a machine type, 0 for the usual one.
const KVM_CREATE_VM: libc::Ioctl = 0xae01;
/// The only version there has been since Linux 2.6.22.
const KVM_API_VERSION: libc::c_int = 12;

pub(super) fn check() -> Check {
    let needed_for = "VMs at full speed; without it QEMU emulates";
    match create_vm() {
        Ok(()) => Check::ok("host:kvm", "a VM can be created", needed_for),
        Err(e) => Check::ok("host:kvm", format!("/dev/kvm: {e}"), needed_for).warn(match e.kind() {
            io::ErrorKind::PermissionDenied => "run as root or join the group kvm",
            io::ErrorKind::NotFound => "enable virtualization in the firmware and load kvm_intel or kvm_amd",
            _ => "see the kernel log for what KVM lacks",
        }),
    }
}

/// Creates a VM and closes it again.
///
/// # Errors
/// `/dev/kvm` is missing, may not be used, or cannot make one.
pub fn create_vm() -> io::Result<()> {
    let kvm = OpenOptions::new().read(true).write(true).open("/dev/kvm")?;
    // SAFETY: this ioctl takes no pointer.
    let version = unsafe { libc::ioctl(kvm.as_raw_fd(), KVM_GET_API_VERSION, 0) };
    if version != KVM_API_VERSION {
        return Err(io::Error::other(format!("speaks version {version} of its interface, not {KVM_API_VERSION}")));
    }
    // SAFETY: this ioctl takes a number, no pointer, and returns a new descriptor or an error.
    let vm = unsafe { libc::ioctl(kvm.as_raw_fd(), KVM_CREATE_VM, 0) };
    if vm < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just given us this descriptor, and nobody else knows of it.
    drop(unsafe { OwnedFd::from_raw_fd(vm) });
    Ok(())
}

/// Time after which a trial that failed is made again: 1 h. It may have failed because the host was busy.
const AGAIN: Duration = Duration::from_secs(3600);
/// Content of the file that keeps the outcome, if KVM works. Otherwise the file has the reason why not.
const WORKS: &str = "yes";

/// Outcome of a trial whether KVM runs a kernel here. `pagefold lab` makes it, and keeps it until the host boots again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KvmTrial {
    /// A kernel boots.
    Boots,
    /// It does not, for this reason.
    Fails(String),
}

impl KvmTrial {
    /// The outcome that is kept in a directory; `None` if a trial has to be made. If no VM can be created, no trial is
    /// needed, and the outcome is [`Self::Fails`].
    pub fn known(dir: &Path) -> Option<Self> {
        if let Err(e) = create_vm() {
            return Some(Self::Fails(format!("/dev/kvm: {e}")));
        }
        let answer = Self::file(dir).ok()?;
        let text = fs::read_to_string(&answer).ok()?;
        if text == WORKS {
            return Some(Self::Boots);
        }
        let age = fs::metadata(&answer).and_then(|m| m.modified()).ok()?.elapsed().unwrap_or_default();
        let minutes = age.as_secs() / 60;
        (age < AGAIN)
            .then(|| Self::Fails(format!("{text} (tried {minutes} min ago; tried again when that is an hour)")))
    }

    /// Content of the file that keeps the outcome.
    pub fn text(&self) -> &str {
        if let Self::Fails(why) = self { why } else { WORKS }
    }

    /// The file that keeps the outcome in a directory.
    ///
    /// # Errors
    /// `/proc` is not there.
    pub fn file(dir: &Path) -> Result<PathBuf> {
        Ok(dir.join(format!("kvm-{}", boot_id()?)))
    }
}
