//! Whether the memory of a guest could be merged, by KSM or by Pagefold, and the obstacle if it cannot.
//!
//! Only private anonymous memory can be merged. A write to a shared or file-backed mapping must be seen by others, so
//! its pages cannot be replaced by private copies. Three kinds of private anonymous memory cannot be merged:
//!
//! - memory that a device may write to without the CPU noticing (vfio),
//! - locked memory,
//! - huge pages of hugetlbfs.
//!
//! A VM that was restored from a snapshot may map the snapshot's file privately (Firecracker, Cloud Hypervisor,
//! clones). A page that the VM has not written is one frame for all VMs that map this file. Pages that it has written
//! are private to it, and cannot be folded: the kernel (`UFFDIO_MOVE`) does not move pages out of a mapping of a file.

use crate::{Guest, GuestKind, RegionMap};
use host::{Check, KsmStat, Mapping};
use page::Region;
use std::path::Path;

/// Facts about all processes of a guest that decide whether its memory can be merged.
#[derive(Clone, Debug, Default)]
struct Evidence {
    /// Mappings that would be merged: the RAM of a VM, otherwise all private anonymous memory.
    mappings: Vec<Mapping>,
    /// Open files by which devices are passed through.
    passthrough: Vec<String>,
    /// Whether it has memory that no mapping shows (guest_memfd).
    has_guest_memfd: bool,
    /// Whether a process asked for all its memory to be merged.
    merge_any: bool,
    /// Whether the kernel has KSM; without it no mapping can be advised.
    has_ksm: bool,
    /// Whether Pagefold's agent handles the faults of its memory.
    followed: bool,
}

/// File name of the agent's library.
const AGENT: &str = "libpagefold.so";

/// The check `guest:ID:mergeable` of `guest`. `followed` is the answer of a service that has the guest as a member:
/// whether Pagefold's agent handles the faults of its memory. Without an answer, this is concluded from mappings of a
/// pool or of the agent's library.
pub fn check_mergeable(guest: &Guest, has_ksm: bool, followed: Option<bool>) -> Check {
    let check = |found: String| Check::ok(format!("guest:{}:mergeable", guest.id), found, "merging its memory");
    match gather(guest, has_ksm) {
        Ok(evidence) => {
            let followed = followed.unwrap_or(evidence.followed);
            judge(guest, &Evidence { followed, ..evidence }, check)
        }
        Err(e) if e.is_gone() => check("it has ended".into()).warn("look again"),
        Err(e) if e.is_denied() => {
            let (why, fix) = host::why_denied();
            check(why).warn(fix)
        }
        Err(e) => check(e.to_string()).warn("look again as root"),
    }
}

fn gather(guest: &Guest, has_ksm: bool) -> host::Result<Evidence> {
    let mut evidence = Evidence { has_ksm, ..Evidence::default() };
    let (mut seen, mut gone) = (false, None);
    for &pid in &guest.pids {
        match gather_process(guest, pid, &mut evidence) {
            Ok(()) => seen = true,
            // Processes of a container start and end all the time. It is an error only if all of them have ended.
            Err(e) if e.is_gone() => gone = Some(e),
            Err(e) => return Err(e),
        }
    }
    match gone {
        Some(e) if !seen => Err(e),
        _ => Ok(evidence),
    }
}

fn gather_process(guest: &Guest, pid: u32, evidence: &mut Evidence) -> host::Result<()> {
    let mappings = Mapping::read_all(pid)?;
    evidence.followed |= mappings.iter().any(|m| crate::holds_folded_pages(m) || m.name.ends_with(AGENT));
    let regions = RegionMap::new(Some(guest), &mappings);
    let wanted = |n: usize| match regions.region_of(n) {
        Region::GuestRam => true,
        Region::Heap => !guest.kind.is_vm(),
        _ => false,
    };
    // Folded pages are left out: they could be merged, and were.
    let wanted = mappings.into_iter().enumerate().filter(|(n, m)| wanted(*n) && !crate::holds_folded_pages(m));
    evidence.mappings.extend(wanted.map(|(_, m)| m));
    let files = host::open_files(pid)?;
    evidence.passthrough.extend(files.iter().filter(|f| passes_device(f)).map(|f| f.display().to_string()));
    evidence.has_guest_memfd |= files.iter().any(|file| file.to_string_lossy().contains("kvm-gmem"));
    evidence.merge_any |= KsmStat::of(pid)?.ksm_merge_any == Some(true);
    Ok(())
}

/// Whether an open file is of a driver that lets a device write to the memory of a process.
fn passes_device(file: &Path) -> bool {
    let name = file.to_string_lossy();
    name.starts_with("/dev/vfio/") || name == "/dev/iommu" || name.starts_with("/dev/vhost-vdpa")
}

/// Reports the first obstacle found, beginning with those that are hardest to remove.
fn judge(guest: &Guest, evidence: &Evidence, check: impl Fn(String) -> Check) -> Check {
    let mappings = &evidence.mappings;
    // A VM cannot be merged if one block of its RAM cannot. A container has many mappings, of which one is enough.
    let stuck = |is: &dyn Fn(&Mapping) -> bool| match guest.kind.is_vm() {
        true => mappings.iter().any(is),
        false => mappings.iter().all(is),
    };
    let what = if guest.kind.is_vm() { "its RAM" } else { "its memory" };
    if mappings.is_empty() {
        return check("no private anonymous memory was found".into())
            .warn("nothing need be done: there is nothing to merge");
    }
    if !evidence.passthrough.is_empty() {
        let files = evidence.passthrough.join(", ");
        return check(format!("no: a device may write to {what} at any time ({files})"))
            .warn("take the device out of the guest (vfio, vhost-vdpa), or leave this guest as it is");
    }
    if guest.kind.is_vm() && evidence.has_guest_memfd {
        return check(format!("no: {what} is in a guest_memfd, which no process can read"))
            .warn(format!("start it {}", ways(guest.kind).no_guest_memfd));
    }
    if stuck(&|m| m.has_flag(b"ht")) {
        return check(format!("no: {what} is in hugetlbfs pages"))
            .warn(format!("start it {}", ways(guest.kind).no_huge_pages));
    }
    if guest.kind.is_vm() && stuck(&|m| m.shared) {
        return check(format!("no: {what} is shared memory{}", backing(mappings)))
            .warn(format!("start it {}", ways(guest.kind).not_shared));
    }
    if guest.kind.is_vm() && stuck(&Mapping::has_file) {
        let found = private_file(mappings);
        return check(format!("in part: {what} is a private mapping of a file{}: {found}", backing(mappings)))
            .warn(ways(guest.kind).of_file);
    }
    if stuck(&|m| m.has_flag(b"lo")) {
        return check(format!("no: {what} is locked"))
            .warn("start it without locking (QEMU: -overcommit mem-lock=off)");
    }
    if evidence.followed {
        // The agent does not pass a guest's advice about merging (`MADV_MERGEABLE`) on to the kernel, so the mappings'
        // flags do not show it.
        return check(format!("yes: {what} is private, and Pagefold's agent looks after it"));
    }
    if stuck(&|m| m.has_flag(b"um") || m.has_flag(b"uw") || m.has_flag(b"ui")) {
        return check(format!("not now: somebody handles the faults of {what} with a userfaultfd"))
            .warn("wait for its migration, snapshot or restore to end");
    }
    judge_advice(guest, evidence, what, check)
}

/// Reports whether the kernel was asked to merge memory of a guest without any obstacle.
fn judge_advice(guest: &Guest, evidence: &Evidence, what: &str, check: impl Fn(String) -> Check) -> Check {
    let advised = evidence.mappings.iter().filter(|m| m.has_flag(b"mg")).count();
    if evidence.merge_any {
        return check("yes: it asked the kernel to merge all its memory (prctl)".into());
    }
    if advised > 0 {
        return check(format!("yes: {what} is private, and advised as mergeable"));
    }
    if !evidence.has_ksm {
        return check(format!("yes: {what} is private; this kernel has no KSM that it could be advised to"));
    }
    if guest.kind == GuestKind::Qemu {
        return check(format!("not by the kernel: {what} is private, but not advised as mergeable (mem-merge=off)"))
            .warn("start it with -machine mem-merge=on, and without merge=off at its memory backend");
    }
    check(format!("not by the kernel: {what} is private, but nothing advises it as mergeable"))
        .warn("let it call prctl(PR_SET_MEMORY_MERGE), or madvise(MADV_MERGEABLE) on its memory")
}

/// Memory of private mappings of files: what is the file's, and what the guest has written.
fn private_file(mappings: &[Mapping]) -> String {
    let of_files = mappings.iter().filter(|mapping| mapping.has_file());
    let (all, written) = of_files.fold((0, 0), |(all, written), mapping| {
        (all + mapping.usage.rss_bytes, written + mapping.usage.anonymous_bytes)
    });
    let [file, written] = [all.saturating_sub(written), written].map(|bytes| bytes >> 20);
    format!(
        "{file} MiB are the file's, one frame for all its guests; {written} MiB that it has written are its own, and not folded"
    )
}

/// Advice to the operator: how to start this kind of VMM so that its memory can be folded.
struct Ways {
    no_guest_memfd: &'static str,
    no_huge_pages: &'static str,
    not_shared: &'static str,
    /// A remedy for pages that were written in a private mapping of a file.
    of_file: &'static str,
}

fn ways(kind: GuestKind) -> Ways {
    match kind {
        GuestKind::Firecracker => Ways {
            no_guest_memfd: "without guest_memfd",
            no_huge_pages: "without huge_pages in its machine-config",
            not_shared: "without vhost-user devices: they need shared memory",
            of_file: "leave it as it is; or boot it in place of restoring it: the RAM of a guest that was booted can be folded",
        },
        GuestKind::CloudHypervisor => Ways {
            no_guest_memfd: "without a confidential --platform",
            no_huge_pages: "without hugepages=on in --memory",
            not_shared: "with shared=off in --memory (virtiofs and vhost-user need shared=on: then leave it as it is)",
            of_file: "leave it as it is; or restore it with memory_restore_mode=copy, and without file= in --memory-zone: all of its RAM can be folded then",
        },
        _ => Ways {
            no_guest_memfd: "without confidential-guest-support",
            no_huge_pages: "with memory-backend-ram, without -mem-path on hugetlbfs",
            not_shared: "with share=off (virtiofs and vhost-user need share=on: then leave it as it is)",
            of_file: "have it cloned where a service serves its group (pagefold clone), which folds what it writes; or start it with memory-backend-ram in place of memory-backend-file or -memfd",
        },
    }
}

fn backing(mappings: &[Mapping]) -> String {
    let file = mappings.iter().find(|m| m.has_file() && !m.name.is_empty());
    file.map(|m| format!(" ({})", m.name.strip_suffix(" (deleted)").unwrap_or(&m.name))).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Facts;
    use host::Status;

    fn guest(kind: GuestKind) -> Guest {
        Guest {
            id: "x:y".into(),
            name: "y".into(),
            kind,
            pids: vec![1],
            group: "g".into(),
            ram_bytes: None,
            facts: Facts::default(),
        }
    }

    /// One mapping with these rights, name and flags.
    fn evidence(rights: &str, name: &str, flags: &str) -> Evidence {
        let inode = if name.is_empty() { 0 } else { 9 };
        let smaps =
            format!("7f0000000000-7f0004000000 {rights} 00000000 00:01 {inode} {name}\nVmFlags: rd wr {flags}\n");
        Evidence { mappings: Mapping::parse_all(&smaps).unwrap(), has_ksm: true, ..Evidence::default() }
    }

    fn found(kind: GuestKind, evidence: &Evidence) -> (Status, String) {
        let check = judge(&guest(kind), evidence, |found| Check::ok("guest:x:y:mergeable", found, "merging"));
        (check.status, check.found)
    }

    fn assert_says(kind: GuestKind, evidence: &Evidence, status: Status, words: &str) {
        let (is, text) = found(kind, evidence);
        assert!(is == status && text.contains(words), "{is:?} {text}");
    }

    #[test]
    fn obstacles_of_vm_are_named() {
        use GuestKind::Qemu;
        use Status::{Ok, Warn};
        let memfd = "/memfd:memory-backend-memfd (deleted)";
        assert_says(Qemu, &evidence("rw-p", "", "dc mg"), Ok, "yes");
        assert_says(Qemu, &evidence("rw-p", "", "dc"), Warn, "mem-merge=off");
        assert_says(Qemu, &evidence("rw-s", memfd, "dc"), Warn, "shared memory (/memfd:memory-backend-memfd)");
        assert_says(Qemu, &evidence("rw-p", memfd, "dc mg"), Warn, "private mapping of a file");
        assert_says(Qemu, &evidence("rw-s", "/dev/hugepages/x", "ht"), Warn, "hugetlbfs");
        let hidden = Evidence { has_guest_memfd: true, ..evidence("rw-p", "", "mg") };
        assert_says(Qemu, &hidden, Warn, "guest_memfd");
        assert_says(Qemu, &evidence("rw-p", "", "lo mg"), Warn, "locked");
        assert_says(Qemu, &evidence("rw-p", "", "mg um"), Warn, "userfaultfd");
        let member = Evidence { followed: true, ..evidence("rw-p", "", "mg um") };
        assert_says(Qemu, &member, Ok, "Pagefold's agent");
        let vfio = Evidence { passthrough: vec!["/dev/vfio/12".into()], ..evidence("rw-p", "", "mg lo") };
        assert_says(Qemu, &vfio, Warn, "/dev/vfio/12");
        let no_ksm = Evidence { has_ksm: false, ..evidence("rw-p", "", "dc") };
        assert_says(Qemu, &no_ksm, Ok, "no KSM");
        assert_says(Qemu, &Evidence::default(), Warn, "no private anonymous");
    }

    #[test]
    fn guests_other_than_qemu_have_to_ask() {
        let plain = evidence("rw-p", "", "");
        assert_says(GuestKind::Lxc, &plain, Status::Warn, "nothing advises it");
        assert_says(GuestKind::Firecracker, &plain, Status::Warn, "nothing advises it");
        let asked = Evidence { merge_any: true, ..plain };
        assert_says(GuestKind::Process, &asked, Status::Ok, "prctl");
        assert_says(GuestKind::Process, &evidence("rw-p", "", "mg"), Status::Ok, "advised");
        let mut partly_locked = evidence("rw-p", "", "mg lo");
        assert_says(GuestKind::Process, &partly_locked, Status::Warn, "locked");
        partly_locked.mappings.extend(evidence("rw-p", "", "mg").mappings);
        assert_says(GuestKind::Process, &partly_locked, Status::Ok, "advised");
        assert_says(GuestKind::Qemu, &partly_locked, Status::Warn, "locked");
    }

    #[test]
    fn each_vmm_is_told_its_own_way_out() {
        let snapshot = evidence("rw-p", "/srv/vm/memory", "");
        for (kind, memory, way) in [
            (GuestKind::Firecracker, &snapshot, "boot it"),
            (GuestKind::CloudHypervisor, &snapshot, "memory_restore_mode=copy"),
            (GuestKind::Qemu, &snapshot, "pagefold clone"),
            (GuestKind::Firecracker, &evidence("rw-s", "/memfd:guest_mem", ""), "vhost-user"),
            (GuestKind::CloudHypervisor, &evidence("rw-s", "/memfd:ch_ram", ""), "shared=off"),
            (GuestKind::Firecracker, &evidence("rw-p", "/memfd:x", "ht"), "huge_pages"),
        ] {
            let check = judge(&guest(kind), memory, |found| Check::ok("guest:x:y:mergeable", found, "merging"));
            assert!(check.fix.as_ref().is_some_and(|fix| fix.contains(way)), "{check:?}");
        }
    }

    #[test]
    fn passthrough_devices_are_told_from_other_files() {
        for yes in ["/dev/vfio/12", "/dev/vfio/vfio", "/dev/vfio/devices/vfio0", "/dev/iommu", "/dev/vhost-vdpa-0"] {
            assert!(passes_device(Path::new(yes)), "{yes}");
        }
        for no in ["/dev/kvm", "/dev/vhost-net", "/home/dev/vfio/x", "anon_inode:kvm-vm"] {
            assert!(!passes_device(Path::new(no)), "{no}");
        }
    }

    #[test]
    fn real_process_is_judged_and_ended_one_is_told() {
        let survey = crate::Survey::take().unwrap();
        let me = std::process::id();
        let guest = survey.guests(&[me], &[]).into_iter().find(|g| g.pids == [me]).unwrap();
        let check = check_mergeable(&guest, true, None);
        assert_eq!(check.id, format!("guest:process:{me}:mergeable"));
        assert!(check.found.contains("nothing advises it"), "{check:?}");
        let gone = Guest { pids: vec![u32::MAX >> 2], ..guest };
        assert_eq!(check_mergeable(&gone, true, None).found, "it has ended");
    }
}
