//! KVM: whether VMs can be created.

use crate::Check;
use rustix::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::fs::OpenOptions;
use std::io;

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
