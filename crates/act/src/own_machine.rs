//! Changes to the machine that this process runs on, for the helper inside a guest (`pagefold-identity`): the kernel's
//! random pool, files mounted over other files, serial lines.

use rustix::fd::{AsFd, AsRawFd};
use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Bytes of a seed: the length of the key of the kernel's random generator.
pub const SEED_BYTES: usize = 32;
/// `RNDADDENTROPY`: `_IOW('R', 3, int[2])`.
const ADD_ENTROPY: libc::Ioctl = 0x4008_5203_u32 as libc::Ioctl;
/// `RNDRESEEDCRNG`: `_IO('R', 7)`.
const RESEED: libc::Ioctl = 0x5207;

/// `struct rand_pool_info` with room for a seed. Entropy is in bits, the size in bytes.
#[repr(C)]
struct Pool {
    entropy: i32,
    size: i32,
    seed: [u8; SEED_BYTES],
}

const _: () = assert!(size_of::<Pool>() == 8 + SEED_BYTES);

/// Mixes a seed into the kernel's random pool, and has the kernel make a new key from the pool at once. All that is
/// drawn afterwards depends on the seed.
///
/// # Errors
/// The caller lacks `CAP_SYS_ADMIN`, the kernel is older than 4.14, or its generator is not seeded at all.
pub fn reseed_kernel_random(seed: &[u8; SEED_BYTES]) -> io::Result<()> {
    let pool = Pool { entropy: 8 * SEED_BYTES as i32, size: SEED_BYTES as i32, seed: *seed };
    let device = File::options().write(true).open("/dev/urandom")?;
    // SAFETY: the kernel reads a `rand_pool_info` and `size` bytes behind it; `Pool` is both, and outlives the call.
    done(unsafe { libc::ioctl(device.as_raw_fd(), ADD_ENTROPY, &raw const pool) })?;
    // SAFETY: this call takes no argument, and changes no memory of ours.
    done(unsafe { libc::ioctl(device.as_raw_fd(), RESEED) })
}

/// Makes a terminal, such as a serial line, pass all bytes unchanged and without echo.
///
/// # Errors
/// The file is no terminal (`ENOTTY`), or its settings cannot be changed.
pub fn make_raw(terminal: impl AsFd) -> io::Result<()> {
    let fd = terminal.as_fd().as_raw_fd();
    let mut settings = std::mem::MaybeUninit::<libc::termios>::uninit();
    // SAFETY: the kernel writes one `termios` there, for which there is room.
    done(unsafe { libc::tcgetattr(fd, settings.as_mut_ptr()) })?;
    // SAFETY: the call above has succeeded, so all of it is written.
    let mut settings = unsafe { settings.assume_init() };
    // SAFETY: it changes the structure, which is ours, and nothing else.
    unsafe { libc::cfmakeraw(&raw mut settings) };
    // SAFETY: the kernel reads one `termios`, which is ours.
    done(unsafe { libc::tcsetattr(fd, libc::TCSANOW, &raw const settings) })
}

/// Mounts `file` over the path `over` (`MS_BIND`).
///
/// # Errors
/// The caller lacks `CAP_SYS_ADMIN`, or one of the files is missing.
pub fn put_file_over(file: &Path, over: &Path) -> io::Result<()> {
    let text = |path: &Path| CString::new(path.as_os_str().as_bytes()).map_err(io::Error::other);
    let (file, over) = (text(file)?, text(over)?);
    let none = std::ptr::null();
    // SAFETY: both paths end in a zero byte and outlive the call. A bind mount reads neither a type nor data.
    done(unsafe { libc::mount(file.as_ptr(), over.as_ptr(), none, libc::MS_BIND, none.cast()) })
}

fn done(answer: i32) -> io::Result<()> {
    if answer == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pool_takes_a_seed_from_root_and_from_nobody_else() {
        let taken = reseed_kernel_random(&[7; SEED_BYTES]);
        assert_eq!(taken.is_ok(), rustix::process::geteuid().is_root(), "{taken:?}");
    }

    #[test]
    fn file_that_is_no_terminal_cannot_be_made_raw() {
        let error = make_raw(File::open("/dev/null").unwrap()).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOTTY));
    }
}
