//! A survey of all open files of the process. It is made by the agent's thread, which has another table of descriptors.
//!
//! Files are found in the tables of all threads ([`tables`]), and among those that are registered with an `io_uring`
//! ([`rings`]). A file about which the kernel does not tell enough counts as a reason not to fold.
//!
//! The survey asks the kernel, and no file system. A file system that does not answer would hold up the agent's thread,
//! and the end of the process. [`mounts`] has the one exception. So files are examined by their paths under `/proc`: a
//! duplicated descriptor would have to be closed, of which the file system is told. Sockets have no file system, so
//! their descriptors are duplicated for a moment ([`facts`]).
//!
//! The survey does not see rings that have no descriptor. Neither does it see the tables of other processes that share
//! this one's memory, such as a child of `vfork` before it executes a program.

use super::judge::{Facts, Verdict, filesystem_name, is_known_device, is_known_family, is_known_inode, judge};
use super::look::{self, Look, look};
use super::tables::{self, Table};
use super::{Holds, Reason, UNPINNED, distrusted, mounts, rings};
use rustix::fd::AsRawFd;
use rustix::io::Errno;
use std::ffi::{CStr, CString, OsString};
use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use wire::attach::Socket;

/// Most attempts at a survey, if threads end while it is made.
const SURVEYS: u32 = 8;
/// Most attempts to examine a descriptor that is given to other files meanwhile, and to read the kernel's text about a
/// ring that is in use.
const LOOKS: u32 = 200;

/// The kernel's name of an `io_uring`.
const RING: &str = "anon_inode:[io_uring]";
/// The reason if the tables of open files cannot be found out.
const TABLES: &str = "its tables of open files cannot be told apart";

/// A reason, and how long it holds.
type Found = (Reason, Holds);

/// The reason against the open file that is trusted least, and how long it holds; `None` if all are trusted.
pub fn worst() -> Option<Found> {
    for _ in 0..SURVEYS {
        let Some(tables) = tables::all() else { return unseen(TABLES) };
        let found: Vec<Found> = tables.iter().filter_map(|table| worst_of(*table)).collect();
        // When a thread ends, its list of files becomes empty, but another thread may have the same table. And while
        // threads end, the kernel's list of threads may lack some. So the result counts only if a second list of
        // threads leads to the same tables.
        let Some(again) = tables::all() else { return unseen(TABLES) };
        if again == tables && !tables.iter().any(|table| table.has_ended()) {
            return found.into_iter().max_by_key(|(_, holds)| *holds);
        }
    }
    unseen("threads end all the time")
}

fn said(what: String, holds: Holds) -> Option<Found> {
    Some((Reason(format!("{what}, {UNPINNED}")), holds))
}

fn unseen(what: &str) -> Option<Found> {
    Some((Reason(format!("{what}: what the program has open cannot be known")), Holds::Once))
}

/// As [`worst`], for the files of one table.
fn worst_of(table: Table) -> Option<Found> {
    let Some(numbers) = table.numbers() else { return unseen("a list of open files cannot be read") };
    let mut sockets = Vec::new();
    let found: Vec<Found> = numbers.into_iter().filter_map(|number| look_at(table, number, &mut sockets)).collect();
    found.into_iter().chain(judge_sockets(table, &sockets)).max_by_key(|(_, holds)| *holds)
}

/// The descriptor number stands for another file than before.
struct Changed;

/// The reason against a file; `None` if there is none. The numbers of sockets are added to `sockets`, to be judged
/// afterwards.
fn look_at(table: Table, number: usize, sockets: &mut Vec<usize>) -> Option<Found> {
    let look = |_| look_once(table, number, sockets).ok();
    (0..LOOKS).find_map(look).unwrap_or_else(|| unseen("a descriptor is another file's all the time"))
}

fn look_once(table: Table, number: usize, sockets: &mut Vec<usize>) -> Result<Option<Found>, Changed> {
    let Ok(path) = CString::new(table.path(number)) else { return Ok(None) };
    let link = || fs::read_link(table.path(number)).unwrap_or_default();
    let unknown =
        || said(format!("descriptor {number} ({}) cannot be asked what it is", link().display()), Holds::While);
    let seen = match look(libc::AT_FDCWD, &path) {
        Ok(look) => look,
        // The file was closed meanwhile. Or the thread has ended, which the caller finds out.
        Err(Some(libc::ENOENT | libc::ESRCH)) => return Ok(None),
        Err(_) => return Ok(unknown()),
    };
    let filesystem = seen.needs_filesystem().then(|| mounts::filesystem(seen, &path)).flatten();
    let name = filesystem_name(filesystem.unwrap_or(0));
    let judged = judge_open(table, number, |flags| seen.facts(filesystem, flags));
    // The flags, or the file system, may belong to a file that has got this descriptor number since.
    let is_mixed = matches!(judged, Ok(Verdict::ByFilesystem | Verdict::PlainReads | Verdict::DirectReads));
    if is_mixed && look(libc::AT_FDCWD, &path) != Ok(seen) {
        return Err(Changed);
    }
    Ok(match judged {
        Err(e) if e.kind() == ErrorKind::NotFound => None,
        Err(_) => unknown(),
        Ok(Verdict::Harmless) => None,
        Ok(Verdict::ByFilesystem) => unknown(),
        Ok(Verdict::PlainReads) => said(format!("{} on {name} is open", link().display()), Holds::While),
        Ok(Verdict::DirectReads) => {
            said(format!("{} on {name} is open for direct reads (O_DIRECT)", link().display()), Holds::ForEver)
        }
        Ok(Verdict::ByName) => match link_of(&path, seen)? {
            Err(Errno::NOENT | Errno::SRCH) => None,
            Err(_) => unknown(),
            Ok(link) => match link.to_str() {
                Some(RING) => registered_files(table, number)?,
                Some("anon_inode:kvm-vm") => judge_kvm(),
                Some(link) if is_known_inode(link) => None,
                _ => said(format!("{} is open", link.display()), Holds::ForEver),
            },
        },
        Ok(Verdict::ByDevice) => judge_device(seen.device, link),
        Ok(Verdict::BySocket) => {
            sockets.push(number);
            None
        }
    })
}

/// The reason against a device; `None` if the device is known.
fn judge_device((major, minor): (u32, u32), link: impl Fn() -> PathBuf) -> Option<Found> {
    let device = fs::read_link(format!("/sys/dev/char/{major}:{minor}")).ok();
    if is_known_device((major, minor), device.as_deref().and_then(Path::to_str)) {
        return None;
    }
    // The kernel forgets the name of a device that was removed. If it tells no names at all, nothing is known about the
    // device.
    let is_out = device.is_none() && Path::new("/sys/dev/char").exists();
    let holds = if is_out { Holds::While } else { Holds::ForEver };
    said(format!("device {} ({major}:{minor}) is open", link().display()), holds)
}

/// The kernel's name of the file that a path leads to, if this is still the file that was examined before.
fn link_of(path: &CStr, before: Look) -> Result<Result<PathBuf, Errno>, Changed> {
    let file = match look::keep(path) {
        Ok((file, look)) if look == before => file,
        Ok(_) => return Err(Changed),
        Err(e) => return Ok(Err(e)),
    };
    let link = rustix::fs::readlink(format!("/proc/thread-self/fd/{}", file.as_raw_fd()), Vec::new());
    Ok(link.map(|link| PathBuf::from(OsString::from_vec(link.into_bytes()))))
}

/// Judges a file with the flags that it is open with.
fn judge_open(table: Table, number: usize, facts: impl Fn(i32) -> Facts) -> io::Result<Verdict> {
    // The flags take time to find out, and often do not matter.
    match judge(facts(libc::O_RDWR | libc::O_DIRECT), distrusted()) {
        verdict @ (Verdict::Harmless | Verdict::ByName | Verdict::BySocket) => Ok(verdict),
        _ => Ok(judge(facts(table.flags(number)?), distrusted())),
    }
}

/// The reason against files that are registered with an `io_uring`. The kernel does not say how they were opened, so
/// they are taken to be open for direct reads.
fn registered_files(table: Table, number: usize) -> Result<Option<Found>, Changed> {
    for _ in 0..LOOKS {
        let text = table.text(number).unwrap_or_default();
        if let Some(names) = rings::registered(&text) {
            let unknown = names.into_iter().find(|name| !is_known_file(name));
            return Ok(unknown.and_then(|name| said(format!("{name} is registered with an io_uring"), Holds::ForEver)));
        }
        if !fs::read_link(table.path(number)).is_ok_and(|link| link.as_os_str() == RING) {
            return Err(Changed);
        }
        std::thread::yield_now();
    }
    Ok(said("an io_uring is open that does not tell which files are registered with it".into(), Holds::While))
}

/// Whether a registered file of this name is known not to write memory without pinning it. For sockets this is not
/// known: the kernel does not tell their family here.
fn is_known_file(name: &str) -> bool {
    match look::named(name) {
        Some(facts) if name.starts_with('/') => judge(facts, distrusted()) == Verdict::Harmless,
        _ => name.starts_with("pipe:") || name.starts_with("anon_inode:") && is_known_inode(name),
    }
}

/// The reason against a virtual machine in which nested virtual machines may run. A nested hypervisor gives the
/// processor pages to write (`nested_get_vmcs12_pages`). Before Linux 6.13, KVM held these pages by plain references
/// (2bcb52a3602b, "KVM: Pin (as in FOLL_PIN) pages during kvm_vcpu_map()").
fn judge_kvm() -> Option<Found> {
    let nested = ["kvm_intel", "kvm_amd"].iter().any(|module| {
        let value = fs::read_to_string(format!("/sys/module/{module}/parameters/nested")).unwrap_or_default();
        matches!(value.trim(), "Y" | "1")
    });
    let text = "a virtual machine may run machines of its own (module parameter nested), whose pages KVM pins only from Linux \
                6.13 on; nothing can be folded safely. Load kvm_intel or kvm_amd with nested=0, or run a newer kernel";
    (nested && !is_at_least(&rustix::system::uname().release().to_string_lossy(), (6, 13)))
        .then(|| (Reason(text.into()), Holds::While))
}

/// Whether a kernel release is this version or a later one.
fn is_at_least(release: &str, version: (u32, u32)) -> bool {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) >= version
}

/// The worst reason against sockets, if there is one.
fn judge_sockets(table: Table, numbers: &[usize]) -> Option<Found> {
    let sockets = match table.sockets(numbers) {
        Ok(sockets) => sockets,
        Err(why) => return unseen(why),
    };
    sockets.into_iter().filter_map(judge_socket).max_by_key(|(_, holds)| *holds)
}

/// The reason against a socket, if there is one.
fn judge_socket(socket: Socket) -> Option<Found> {
    let said = |what: String| said(what, Holds::ForEver);
    match socket {
        // This also happens if the thread has ended, which the caller finds out.
        Socket::Closed => None,
        Socket::Unknown => unseen("a socket cannot be looked at"),
        Socket::Open { family, .. } if !is_known_family(family.cast_signed()) => {
            said(format!("a socket of family {family} is open"))
        }
        Socket::Open { transformed: true, .. } => {
            said("a socket is open whose contents the kernel decrypts (TCP_ULP)".into())
        }
        Socket::Open { .. } => None,
    }
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
