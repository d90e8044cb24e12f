//! BPF, by which Pagefold reads page frames without touching them. With type information (BTF) it also reads a frame's
//! reference count, which proves that no device writes to the frame.

use crate::Check;
use crate::bpf::{load_syscall_program, op};
use std::io;
use std::path::Path;

pub(super) fn check() -> Check {
    let has_types = Path::new("/sys/kernel/btf/vmlinux").exists();
    check_by(has_types, usable())
}

fn check_by(has_types: bool, usable: io::Result<()>) -> Check {
    let needed_for = "a census that leaves no trace; folding pages again that were written after a fold, with proof \
        that no device still writes them";
    let check = |found: &str| Check::ok("host:bpf", found, needed_for);
    match (has_types, usable) {
        (true, Ok(())) => check("BPF and BTF are there"),
        (false, Ok(())) => check("BPF is there, no BTF").warn("use a kernel with CONFIG_DEBUG_INFO_BTF=y"),
        (_, Err(e)) if e.raw_os_error() == Some(libc::EPERM) => {
            check("BPF is not permitted").warn("run as root (CAP_BPF and CAP_PERFMON), without kernel lockdown")
        }
        (_, Err(e)) => check(&format!("BPF: {e}")).warn("use Linux 5.14 or newer with CONFIG_BPF_SYSCALL=y"),
    }
}

/// Whether the caller may load a program of the type that Pagefold uses. The program loaded for this does nothing.
fn usable() -> io::Result<()> {
    let [zero, exit] = [op(0xb7, 0, 0, 0, 0), op(0x95, 0, 0, 0, 0)];
    load_syscall_program(&[zero, exit]).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{FrameReader, Status};

    #[test]
    fn check_names_missing_part() {
        let error = |number| Err(io::Error::from_raw_os_error(number));
        for (has_types, usable, status, fix) in [
            (true, Ok(()), Status::Ok, ""),
            (false, Ok(()), Status::Warn, "CONFIG_DEBUG_INFO_BTF"),
            (true, error(libc::EPERM), Status::Warn, "CAP_BPF"),
            (true, error(libc::EINVAL), Status::Warn, "5.14"),
            (false, error(libc::ENOSYS), Status::Warn, "CONFIG_BPF_SYSCALL"),
        ] {
            let check = check_by(has_types, usable);
            assert!(check.status == status && check.fix.unwrap_or_default().contains(fix), "{}", check.found);
        }
    }

    #[test]
    fn check_passes_where_frame_reader_opens() {
        assert!(usable().is_ok() || FrameReader::open().is_err());
    }
}
