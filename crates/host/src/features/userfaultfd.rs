//! userfaultfd: its features in this kernel, and the right to use it.

use crate::Check;
use crate::userfaultfd_features;
use linux_raw_sys::general::{UFFD_FEATURE_MOVE, UFFD_FEATURE_WP_ASYNC};
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;

/// The two features that folding cannot do without.
pub(super) fn checks() -> [Check; 2] {
    let features = userfaultfd_features();
    [
        feature(&features, "kernel:uffdio_move", UFFD_FEATURE_MOVE, "6.8", "folding: takes a page out of a live guest"),
        feature(
            &features,
            "kernel:wp_async",
            UFFD_FEATURE_WP_ASYNC,
            "6.7",
            "folding: finds the pages that were written",
        ),
    ]
}

fn feature(features: &io::Result<u64>, id: &str, bit: u32, since: &str, needed_for: &str) -> Check {
    match features {
        Ok(bits) if bits & u64::from(bit) != 0 => Check::ok(id, "works", needed_for),
        Ok(bits) => Check::ok(id, format!("missing from features {bits:#x}"), needed_for)
            .fail(format!("use Linux {since} or newer")),
        Err(e) if e.raw_os_error() == Some(libc::ENOSYS) => {
            Check::ok(id, "the kernel has no userfaultfd", needed_for).fail("use a kernel with CONFIG_USERFAULTFD=y")
        }
        Err(e) => Check::ok(id, format!("unknown: cannot open a userfaultfd: {e}"), needed_for)
            .warn("run as root, or see userfaultfd below"),
    }
}

/// Whether VMMs that do not run as root may use userfaultfd.
pub(super) fn permission() -> Check {
    let sysctl = fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").ok();
    let device = fs::metadata("/dev/userfaultfd").ok().map(|m| (m.mode() & 0o7777, m.uid(), m.gid()));
    permission_by(sysctl.as_deref().map(str::trim), device)
}

fn permission_by(sysctl: Option<&str>, device: Option<(u32, u32, u32)>) -> Check {
    let for_all = sysctl == Some("1");
    let for_some = device.is_some_and(|(mode, _, _)| mode & 0o006 == 0o006 || mode & 0o060 == 0o060);
    let device = match device {
        Some((mode, uid, gid)) => format!("/dev/userfaultfd has mode {mode:04o}, owner {uid}:{gid}"),
        None => "no /dev/userfaultfd".into(),
    };
    let found = format!("vm.unprivileged_userfaultfd={}; {device}", sysctl.unwrap_or("missing"));
    let check = Check::ok("rights:userfaultfd", found, "folding guests whose VMM does not run as root");
    if for_all || for_some {
        return check;
    }
    check.warn("give the VMM's group access: chgrp kvm /dev/userfaultfd && chmod 0660 /dev/userfaultfd").for_good(
        "echo 'KERNEL==\"userfaultfd\", GROUP=\"kvm\", MODE=\"0660\"' > /etc/udev/rules.d/60-pagefold.rules && udevadm \
         control --reload && udevadm trigger --name-match=userfaultfd; for a VMM that is a unit of its own, systemctl \
         edit its unit: [Service] SupplementaryGroups=kvm",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Status;

    #[test]
    fn permission_needs_sysctl_or_accessible_device() {
        let status = |sysctl, device| permission_by(sysctl, device).status;
        assert_eq!(status(Some("1"), None), Status::Ok);
        assert_eq!(status(Some("0"), Some((0o660, 0, 106))), Status::Ok);
        assert_eq!(status(Some("0"), Some((0o666, 0, 0))), Status::Ok);
        assert_eq!(status(Some("0"), Some((0o600, 0, 0))), Status::Warn);
        assert_eq!(status(Some("0"), None), Status::Warn);
        let found = permission_by(Some("0"), Some((0o600, 0, 0))).found;
        assert_eq!(found, "vm.unprivileged_userfaultfd=0; /dev/userfaultfd has mode 0600, owner 0:0");
    }

    #[test]
    fn missing_feature_is_told_from_missing_rights() {
        let check = |features| feature(&features, "kernel:x", UFFD_FEATURE_MOVE, "6.8", "x");
        assert_eq!(check(Ok(1 << 16)).status, Status::Ok);
        let old = check(Ok(0xfff));
        assert_eq!((old.status, old.fix.as_deref()), (Status::Fail, Some("use Linux 6.8 or newer")));
        assert_eq!(check(Err(io::Error::from_raw_os_error(libc::ENOSYS))).status, Status::Fail);
        assert_eq!(check(Err(io::Error::from_raw_os_error(libc::EPERM))).status, Status::Warn);
    }

    #[test]
    fn this_kernel_names_its_features() {
        match userfaultfd_features() {
            Ok(features) => assert_ne!(features, 0),
            Err(e) => eprintln!("skipped: cannot open a userfaultfd: {e}"),
        }
    }
}
