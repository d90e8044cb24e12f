//! Connecting to a unix socket within a bounded time. A blocking `connect` sleeps as long as the listener's queue is
//! full, and the queue of a stopped process stays full for ever.

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use std::io;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// Pause between two attempts to connect.
const PAUSE: Duration = Duration::from_millis(10);

/// Connects, within `timeout`.
///
/// # Errors
/// No process listens, or (`TimedOut`) the listener's queue stayed full all the time.
pub fn connect_within(path: &Path, timeout: Duration) -> io::Result<UnixStream> {
    let deadline = Instant::now() + timeout;
    let address = SocketAddrUnix::new(path)?;
    loop {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        match connect(&socket, &address) {
            Ok(()) => {
                let stream = UnixStream::from(socket);
                stream.set_nonblocking(false)?;
                return Ok(stream);
            }
            Err(Errno::AGAIN) if Instant::now() < deadline => std::thread::sleep(PAUSE),
            Err(Errno::AGAIN) => return Err(io::Error::new(io::ErrorKind::TimedOut, "it lets nobody in")),
            Err(e) => return Err(e.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixListener;

    #[test]
    fn connecting_to_listener_that_never_accepts_times_out() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        assert!(connect_within(&path, Duration::ZERO).is_err());
        let listener = UnixListener::bind(&path).unwrap();
        // As QEMU listens: with a queue of one.
        rustix::net::listen(&listener, 1).unwrap();
        let soon = Duration::from_millis(50);
        let waiting: Vec<_> = std::iter::from_fn(|| connect_within(&path, soon).ok()).take(10).collect();
        assert!((1..10).contains(&waiting.len()), "{} were let in", waiting.len());
        let (mut first, _) = listener.accept().unwrap();
        first.write_all(b"x").unwrap();
        let mut byte = [0];
        (&waiting[0]).read_exact(&mut byte).unwrap();
        assert!(connect_within(&path, soon).is_ok(), "there is room again");
    }
}
