//! Features of this kernel, and the caller's rights to use them. Each is tried; the kernel's version is not asked for.
//!
//! Each probe is harmless: it acts on this process alone and leaves nothing behind.

mod bpf;
mod knobs;
mod kvm;
mod userfaultfd;

pub use knobs::{GOOD_MAP_COUNT, why_denied};
pub use kvm::{KvmTrial, create_vm};

use crate::cgroup::CgroupLayout;
use crate::{Check, Process, frames_visible, has_pagemap_scan};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::fs::File;
use std::io;

/// Everything about the host that `pagefold doctor` reports.
pub fn probe_host() -> Vec<Check> {
    let mut checks = Vec::from(userfaultfd::checks());
    checks.extend([pagemap_scan(), memfd_seals(), frames(), frame_table("kpageflags"), frame_table("kpagecount")]);
    checks.extend([userfaultfd::permission(), knobs::ptrace()]);
    checks.extend([knobs::ksm(), knobs::max_map_count(), knobs::huge_pages(), knobs::swap(), page_size()]);
    checks.extend([kvm::check(), cgroups(), bpf::check()]);
    checks
}

fn pagemap_scan() -> Check {
    let check = |found: String| Check::ok("kernel:pagemap_scan", found, "finding resident and written pages quickly");
    match has_pagemap_scan() {
        Ok(true) => check("works".into()),
        Ok(false) => {
            check("missing".into()).warn("use Linux 6.7 or newer; the census reads page tables the slow way until then")
        }
        Err(e) => check(e.to_string()).warn("use a kernel with CONFIG_PROC_PAGE_MONITOR=y"),
    }
}

fn memfd_seals() -> Check {
    let needed_for = "folding: members of a group read its pool and cannot write it";
    match sealed_memfd_refuses_writers() {
        Ok(true) => Check::ok("kernel:memfd_seals", "F_SEAL_FUTURE_WRITE works", needed_for),
        Ok(false) => Check::ok("kernel:memfd_seals", "F_SEAL_FUTURE_WRITE has no effect", needed_for)
            .fail("use Linux 5.1 or newer"),
        Err(e) => Check::ok("kernel:memfd_seals", format!("F_SEAL_FUTURE_WRITE: {e}"), needed_for)
            .fail("use Linux 5.1 or newer"),
    }
}

/// Seals a memory file against new writers, then tries to map it writable. True if the kernel refuses that. The file
/// stays empty: where the size of files is limited (`RLIMIT_FSIZE`), making it larger would end this program.
fn sealed_memfd_refuses_writers() -> io::Result<bool> {
    let file = memfd_create("pagefold-probe", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    fcntl_add_seals(&file, SealFlags::FUTURE_WRITE)?;
    let rights = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
    let attempt = unsafe { mmap(std::ptr::null_mut(), page::PAGE_BYTES, rights, MapFlags::SHARED, &file, 0) };
    match attempt {
        Err(rustix::io::Errno::PERM) => Ok(true),
        Err(e) => Err(e.into()),
        Ok(address) => {
            // SAFETY: the mapping was made above, is of this length, and nothing refers to it.
            unsafe { munmap(address, page::PAGE_BYTES) }?;
            Ok(false)
        }
    }
}

fn frames() -> Check {
    let needed_for = "telling exactly which pages are one frame already";
    if frames_visible() {
        return Check::ok("rights:page_frames", "page frame numbers are visible", needed_for);
    }
    Check::ok("rights:page_frames", "page frame numbers are hidden", needed_for)
        .warn("run as root (CAP_SYS_ADMIN); the census infers sharing from files and addresses until then")
}

fn frame_table(name: &'static str) -> Check {
    let (id, needed_for) = match name {
        "kpageflags" => ("rights:kpageflags", "telling pages of KSM, huge pages and zero pages"),
        _ => ("rights:kpagecount", "counting who else maps a frame"),
    };
    match File::open(format!("/proc/{name}")) {
        Ok(_) => Check::ok(id, "readable", needed_for),
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            Check::ok(id, "missing", needed_for).warn("use a kernel with CONFIG_PROC_PAGE_MONITOR=y")
        }
        Err(e) => Check::ok(id, e.to_string(), needed_for).warn("run as root"),
    }
}

fn page_size() -> Check {
    let bytes = rustix::param::page_size();
    let check = Check::ok("memory:page_size", format!("{bytes} bytes"), "everything: Pagefold counts in pages of 4096");
    if bytes == page::PAGE_BYTES { check } else { check.fail("use a kernel with pages of 4096 bytes") }
}

fn cgroups() -> Check {
    let layout = Process::read(std::process::id()).map_or(CgroupLayout::None, |p| p.cgroups.layout());
    let check = Check::ok("host:cgroup", layout.name(), "finding containers, and groups by control group");
    match layout {
        CgroupLayout::None => check.warn("use a kernel with CONFIG_CGROUPS=y; name processes with --pid until then"),
        _ => check,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Status;

    #[test]
    fn checks_have_distinct_ids_and_a_fix_unless_ok() {
        let checks = probe_host();
        let mut ids: Vec<&str> = checks.iter().map(|c| c.id.as_str()).collect();
        ids.sort_unstable();
        let count = ids.len();
        ids.dedup();
        assert_eq!(ids.len(), count);
        for check in &checks {
            assert!(check.id.contains(':') && !check.found.is_empty() && !check.needed_for.is_empty(), "{check:?}");
            assert_eq!(check.fix.is_none(), check.status == Status::Ok, "{check:?}");
        }
    }

    #[test]
    fn sealed_memfd_keeps_writers_out() {
        assert!(sealed_memfd_refuses_writers().unwrap());
    }
}
