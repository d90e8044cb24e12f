//! A survey of all open files of the process, made by the agent's thread, whose own table of descriptors is another.
//! The agent borrows each file for a moment (`pidfd_getfd`), to ask the kernel what it is.
//!
//! Files are found in the tables of all threads ([`tables`]), and among those that are registered with a ring ([`rings`]).
//! A file of which this cannot be told counts as a reason.
//!
//! The survey does not see rings that have no descriptor. Neither does it see the tables of other processes that share
//! this one's memory, such as a child of `vfork` before it executes a program.

use super::judge::{Facts, Verdict, filesystem_name, is_known_device, is_known_family, is_known_inode, judge};
use super::tables::{self, Table};
use super::{Reason, UNPINNED, distrusted, rings};
use crate::raw;
use std::fs;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

/// Number of attempts at a survey during which threads end.
const SURVEYS: u32 = 8;
/// Number of attempts at the text about a ring that is in use.
const LOOKS: u32 = 200;

/// A reason, and whether it holds for ever.
type Found = (Reason, bool);

/// The reason against the least trusted open file, if any is not trusted, and whether that reason holds for ever.
pub fn worst() -> Option<Found> {
    for _ in 0..SURVEYS {
        let Some(tables) = tables::all() else { return unseen("/proc/self/task cannot be read") };
        let mut found: Vec<Found> = tables.iter().filter_map(|table| worst_of(*table)).collect();
        // The files of a thread that ends are not listed any more, but another thread may have the same table.
        if !tables.iter().any(|table| table.has_ended()) {
            let worst = found.iter().position(|(_, for_ever)| *for_ever).unwrap_or(0);
            return (!found.is_empty()).then(|| found.swap_remove(worst));
        }
    }
    unseen("threads end all the time")
}

fn unseen(what: &str) -> Option<Found> {
    Some((Reason(format!("{what}: what the program has open cannot be known")), false))
}

/// The same for the files of one table.
fn worst_of(table: Table) -> Option<Found> {
    let Some(opened) = table.open() else {
        return unseen(
            "a thread has open files of its own, or the first thread has ended, and Linux 6.9 or newer is needed to look at them",
        );
    };
    let Some(numbers) = table.numbers() else { return unseen("a list of open files cannot be read") };
    let mut worst = None;
    for number in numbers {
        let file = match tables::borrow(&opened, number) {
            Ok(file) => file,
            // Closed meanwhile; or the thread has ended, and the caller finds that.
            Err(Some(libc::EBADF | libc::ESRCH)) => continue,
            Err(_) => return unseen("a file cannot be borrowed (pidfd_getfd)"),
        };
        match look_at(&file, table, number) {
            Some((reason, true)) => return Some((reason, true)),
            Some(reason) => worst = Some(reason),
            None => {}
        }
    }
    worst
}

/// The reason against a file, if there is one, and whether it holds for ever.
fn look_at(file: &OwnedFd, table: Table, number: usize) -> Option<Found> {
    let facts = facts(file.as_raw_fd());
    let link = || fs::read_link(format!("/proc/thread-self/fd/{}", file.as_raw_fd())).unwrap_or_default();
    let said = |what: String, for_ever| Some((Reason(format!("{what}, {UNPINNED}")), for_ever));
    let Some(facts) = facts else {
        return said(format!("descriptor {number} ({}) cannot be asked what it is", link().display()), false);
    };
    let name = filesystem_name(facts.filesystem);
    match judge(facts, distrusted()) {
        Verdict::Harmless => None,
        Verdict::PlainReads => said(format!("{} on {name} is open", link().display()), false),
        Verdict::DirectReads => {
            said(format!("{} on {name} is open for direct reads (O_DIRECT)", link().display()), true)
        }
        Verdict::ByName => {
            let link = link();
            match link.to_str().is_some_and(is_known_inode) {
                true if link.to_str() == Some("anon_inode:[io_uring]") => registered_files(table, number),
                true if link.to_str() == Some("anon_inode:kvm-vm") => judge_kvm(),
                true => None,
                false => said(format!("{} is open", link.display()), true),
            }
        }
        Verdict::ByDevice => {
            let (major, minor) = facts.device;
            let device = fs::read_link(format!("/sys/dev/char/{major}:{minor}")).ok();
            let known = is_known_device(facts.device, device.as_deref().and_then(Path::to_str));
            (!known).then(|| said(format!("device {} ({major}:{minor}) is open", link().display()), true)).flatten()
        }
        Verdict::BySocket => judge_socket(file).and_then(|what| said(what, true)),
    }
}

/// The reason against files that are registered with a ring. Nothing says how they were opened, so they are taken to be
/// open for direct reads.
fn registered_files(table: Table, number: usize) -> Option<Found> {
    let said = |what: String, for_ever| Some((Reason(format!("{what}, {UNPINNED}")), for_ever));
    for _ in 0..LOOKS {
        let text = table.text(number);
        if let Some(names) = rings::registered(&text) {
            let unknown = names.into_iter().find(|name| !is_known_file(name));
            return unknown.and_then(|name| said(format!("{name} is registered with an io_uring"), true));
        }
        std::thread::yield_now();
    }
    said("an io_uring is open that does not tell which files are registered with it".into(), false)
}

/// Whether a registered file of this name is known not to write memory without pinning it. Of sockets, the kernel does
/// not say of which family they are.
fn is_known_file(name: &str) -> bool {
    match path_facts(Path::new(name)) {
        Some(facts) if name.starts_with('/') => {
            judge(Facts { flags: libc::O_DIRECT, ..facts }, distrusted()) == Verdict::Harmless
        }
        _ => name.starts_with("pipe:") || name.starts_with("anon_inode:") && is_known_inode(name),
    }
}

/// The reason against a virtual machine that may run machines of its own. A nested hypervisor gives its processor pages
/// to write (`nested_get_vmcs12_pages`). KVM held these by plain references before Linux 6.13 (2bcb52a3602b, "KVM: Pin
/// (as in FOLL_PIN) pages during kvm_vcpu_map()").
fn judge_kvm() -> Option<(Reason, bool)> {
    let nested = ["kvm_intel", "kvm_amd"].iter().any(|module| {
        let value = fs::read_to_string(format!("/sys/module/{module}/parameters/nested")).unwrap_or_default();
        matches!(value.trim(), "Y" | "1")
    });
    let text = "a virtual machine may run machines of its own (module parameter nested), whose pages KVM pins only from Linux \
                6.13 on; nothing can be folded safely. Load kvm_intel or kvm_amd with nested=0, or run a newer kernel";
    (nested && !is_at_least(&rustix::system::uname().release().to_string_lossy(), (6, 13)))
        .then(|| (Reason(text.into()), false))
}

/// Whether a kernel's release is of this version or a later one.
fn is_at_least(release: &str, version: (u32, u32)) -> bool {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) >= version
}

fn path_facts(path: &Path) -> Option<Facts> {
    let file =
        rustix::fs::open(path, rustix::fs::OFlags::PATH | rustix::fs::OFlags::CLOEXEC, rustix::fs::Mode::empty())
            .ok()?;
    facts(file.as_raw_fd())
}

/// The reason against a socket, if there is one.
fn judge_socket(file: &OwnedFd) -> Option<String> {
    let family = option(file, libc::SOL_SOCKET, libc::SO_DOMAIN);
    let family = i32::from_ne_bytes(family.get(..4).and_then(|bytes| bytes.try_into().ok()).unwrap_or_default());
    if !is_known_family(family) {
        return Some(format!("a socket of family {family} is open"));
    }
    let is_inet = family == libc::AF_INET || family == libc::AF_INET6;
    let handler = if is_inet { option(file, libc::IPPROTO_TCP, libc::TCP_ULP) } else { [0; 16] };
    let plain = handler.iter().all(|byte| *byte == 0) || handler.starts_with(b"mptcp");
    (!plain).then(|| "a socket is open whose contents the kernel decrypts (TCP_ULP)".into())
}

/// The first bytes of a socket's option, zeros where it has none.
fn option(file: &OwnedFd, level: i32, name: i32) -> [u8; 16] {
    let mut value = [0_u8; 16];
    let mut length = value.len() as libc::socklen_t;
    let arguments = [
        file.as_raw_fd() as usize,
        level as usize,
        name as usize,
        value.as_mut_ptr() as usize,
        &raw mut length as usize,
        0,
    ];
    // SAFETY: the kernel writes at most `length` bytes to `value`.
    let answer = unsafe { raw::call(libc::SYS_getsockopt, arguments) };
    if answer == 0 { value } else { [0; 16] }
}

/// The kernel's facts about an open file. Allocates nothing, because hooks call it too.
pub fn facts(file: i32) -> Option<Facts> {
    let mut stat = std::mem::MaybeUninit::<libc::stat>::zeroed();
    // SAFETY: the kernel fills the structure, which is of its layout on x86-64.
    let stated = unsafe { raw::call(libc::SYS_fstat, [file as usize, stat.as_mut_ptr() as usize, 0, 0, 0, 0]) };
    let mut system = std::mem::MaybeUninit::<libc::statfs>::zeroed();
    // SAFETY: as above.
    let systemed = unsafe { raw::call(libc::SYS_fstatfs, [file as usize, system.as_mut_ptr() as usize, 0, 0, 0, 0]) };
    // SAFETY: reads the flags of a descriptor.
    let flags = unsafe { raw::call(libc::SYS_fcntl, [file as usize, libc::F_GETFL as usize, 0, 0, 0, 0]) };
    if stated != 0 || systemed != 0 || raw::error(flags).is_some() {
        return None;
    }
    // SAFETY: filled, and all-zero before.
    let stat = unsafe { stat.assume_init() };
    // SAFETY: as above.
    let system = unsafe { system.assume_init() };
    let device = (libc::major(stat.st_rdev), libc::minor(stat.st_rdev));
    Some(Facts { mode: stat.st_mode, device, filesystem: system.f_type as u32, flags: flags as i32 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_as_numbers() {
        for newer in ["6.13.0", "6.13-rc1", "6.18.44-fc-v657", "7.0.0"] {
            assert!(is_at_least(newer, (6, 13)), "{newer}");
        }
        for older in ["6.12.57+deb13-amd64", "6.8.0-31-generic", "5.20", ""] {
            assert!(!is_at_least(older, (6, 13)), "{older}");
        }
    }
}
