//! BPF with type information: reads a frame's reference count, which proves that no device writes to it.

use crate::Check;
use std::io;
use std::path::Path;

/// `enum bpf_cmd` of `include/uapi/linux/bpf.h`. Asks for the first loaded program after number 0.
const BPF_PROG_GET_NEXT_ID: libc::c_int = 11;
/// Size of `union bpf_attr` as far as this command goes: `start_id`, `next_id`, `open_flags`.
const ATTR_BYTES: u32 = 12;

pub(super) fn check() -> Check {
    let needed_for = "folding pages again that were written after a fold, with proof that no device still writes them";
    let has_types = Path::new("/sys/kernel/btf/vmlinux").exists();
    let check = |found: &str| Check::ok("host:bpf", found, needed_for);
    match (has_types, usable()) {
        (true, Ok(())) => check("BPF and BTF are there"),
        (false, _) => check("no BTF").warn("use a kernel with CONFIG_DEBUG_INFO_BTF=y"),
        (true, Err(e)) if e.raw_os_error() == Some(libc::EPERM) => {
            check("BTF is there; BPF is not permitted").warn("run as root (CAP_BPF and CAP_PERFMON)")
        }
        (true, Err(e)) => check(&format!("BTF is there; BPF: {e}")).warn("use a kernel with CONFIG_BPF_SYSCALL=y"),
    }
}

/// Whether the caller may use BPF: asks for a program, there need not be one.
fn usable() -> io::Result<()> {
    let mut attr = [0_u32; ATTR_BYTES as usize / 4];
    // SAFETY: `attr` has the length that is passed and is exclusively borrowed; the command reads and writes
    // numbers in it and creates nothing.
    let answer = unsafe { libc::syscall(libc::SYS_bpf, BPF_PROG_GET_NEXT_ID, attr.as_mut_ptr(), ATTR_BYTES) };
    match io::Error::last_os_error() {
        _ if answer == 0 => Ok(()),
        e if e.raw_os_error() == Some(libc::ENOENT) => Ok(()),
        e => Err(e),
    }
}
