//! Open TCP connections of a copied guest: the other end knows one guest, and a clone is another.
//!
//! A connection whose own address this machine no longer has sends nothing, and its program sees no error: a read waits
//! for ever, and a write for a quarter of an hour (`tcp_retries2`). If a clone got the template's address back, from a
//! DHCP server for example, it would go on with the template's connection. So each of these connections is ended before
//! there are new addresses.

use rustix::io::Errno;
use rustix::net::{Shutdown, connect_unspec, shutdown};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};
use std::thread::sleep;
use std::time::Duration;

/// The kernel's lists of TCP sockets in this network namespace.
const LISTS: [&str; 2] = ["/proc/net/tcp", "/proc/net/tcp6"];
/// States of TCP sockets without a connection, as those lists have them (`TCP_CLOSE`, `TCP_LISTEN`).
const UNCONNECTED: [u8; 2] = [0x07, 0x0a];
/// Attempts to make a socket drop the data that it has to send: 100, and the time between two: 1 ms.
const ATTEMPTS: u32 = 100;
const SOON: Duration = Duration::from_millis(1);
/// Any port, to ask the kernel for a route.
const PORT: u16 = 9;

/// Ends the connections whose own address this machine does not have. In the programs that hold them, the next read or
/// write returns.
///
/// # Errors
/// A connection cannot be taken from its program: the kernel is older than 5.6, for example.
pub(crate) fn end_lost() -> io::Result<()> {
    let lists = LISTS.map(|list| fs::read_to_string(list).unwrap_or_default());
    let open = lists.iter().flat_map(|list| list.lines()).filter_map(connection);
    let mut lost: BTreeSet<u64> = open.filter(|(address, _)| !is_own(*address)).map(|(_, inode)| inode).collect();
    let processes = if lost.is_empty() { Vec::new() } else { numbers_in("/proc") };
    for pid in processes {
        let dir = format!("/proc/{pid}/fd");
        for fd in numbers_in(&dir) {
            let inode = fs::read_link(format!("{dir}/{fd}")).ok().and_then(|link| socket(&link.to_string_lossy()));
            if let Some(inode) = inode.filter(|inode| lost.contains(inode))
                && end(pid, fd)?
            {
                lost.remove(&inode);
            }
        }
    }
    // The sockets that are left belong to no program any more, or to the kernel, which connects again.
    Ok(())
}

/// Ends the connection of a process's socket. Returns whether the process still had it.
fn end(pid: i32, fd: i32) -> io::Result<bool> {
    let Some(process) = Pid::from_raw(pid) else { return Ok(false) };
    let taken =
        pidfd_open(process, PidfdFlags::empty()).and_then(|process| pidfd_getfd(process, fd, PidfdGetfdFlags::empty()));
    let socket = match taken {
        Ok(socket) => socket,
        Err(Errno::SRCH | Errno::BADF) => return Ok(false),
        Err(why) => return Err(io::Error::other(format!("connection of process {pid}: {why}"))),
    };
    // A system call in which a program waits for this socket returns then.
    let _ = shutdown(&socket, Shutdown::Both);
    for _ in 0..ATTEMPTS {
        // After this, data that is left in the socket is not sent later. The kernel refuses it (`EBUSY`) while a
        // program is still in a system call on the socket.
        if connect_unspec(&socket) != Err(Errno::BUSY) {
            break;
        }
        sleep(SOON);
    }
    Ok(true)
}

/// Whether packets to this address stay in this machine. The kernel looks for a route, and sends nothing.
fn is_own(address: IpAddr) -> bool {
    let any: IpAddr = if address.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let source = || {
        let socket = UdpSocket::bind((any, 0))?;
        socket.connect((address, PORT))?;
        socket.local_addr()
    };
    address.is_loopback() || source().is_ok_and(|source| source.ip() == address)
}

/// Own address and inode of a connection in a line of the kernel's list; `None` for other lines, and where no program
/// holds the socket.
fn connection(line: &str) -> Option<(IpAddr, u64)> {
    let fields: Vec<&str> = line.split_whitespace().collect();
    let (local, state, inode) = (*fields.get(1)?, *fields.get(3)?, *fields.get(9)?);
    let state = u8::from_str_radix(state, 16).ok().filter(|state| !UNCONNECTED.contains(state));
    let inode = inode.parse().ok().filter(|inode| *inode != 0)?;
    state.and(Some((address(local.split_once(':')?.0)?, inode)))
}

/// An address as the kernel writes it: words of 32 bits, each in this machine's order of bytes.
fn address(hex: &str) -> Option<IpAddr> {
    let word = |digits: &[u8]| u32::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok().map(u32::to_ne_bytes);
    let bytes = hex.as_bytes().chunks(8).map(word).collect::<Option<Vec<_>>>()?.concat();
    let v4 = <[u8; 4]>::try_from(&*bytes).ok().map(IpAddr::from);
    v4.or_else(|| Some(IpAddr::from(<[u8; 16]>::try_from(&*bytes).ok()?).to_canonical()))
}

/// Inode of the socket that a descriptor's link names.
fn socket(link: &str) -> Option<u64> {
    link.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
}

/// Names in a directory that are numbers: processes, or descriptors.
fn numbers_in(dir: &str) -> Vec<i32> {
    let Ok(found) = fs::read_dir(dir) else { return Vec::new() };
    found.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsRawFd;

    const HEADER: &str =
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode";

    #[test]
    fn connections_are_told_from_sockets_that_listen_and_from_orphans() {
        let line = |local: &str, state: &str, inode: &str| {
            format!(
                "   1: {local}:0050 0202000A:1F90 {state} 00000000:00000000 00:00000000 00000000     0        0 {inode} 1 0"
            )
        };
        let found = |local: &str, state: &str, inode: &str| connection(&line(local, state, inode));
        assert_eq!(found("0F02000A", "01", "4711"), Some(("10.0.2.15".parse().expect("an address"), 4711)));
        assert_eq!(found("0F02000A", "08", "4711").map(|(_, inode)| inode), Some(4711));
        let mapped = found("0000000000000000FFFF00000F02000A", "01", "1").map(|(address, _)| address.to_string());
        assert_eq!(mapped.as_deref(), Some("10.0.2.15"));
        let v6 = found("B80D0120000000000000000001000000", "01", "1").map(|(address, _)| address.to_string());
        assert_eq!(v6.as_deref(), Some("2001:db8::1"));
        for (local, state, inode) in
            [("0F02000A", "0A", "1"), ("0F02000A", "07", "1"), ("0F02000A", "06", "0"), ("0F02000X", "01", "1")]
        {
            assert_eq!(found(local, state, inode), None, "{local} {state} {inode}");
        }
        assert_eq!(connection(HEADER), None);
        assert_eq!((socket("socket:[12]"), socket("pipe:[12]")), (Some(12), None));
    }

    #[test]
    fn own_addresses_are_told_from_others() {
        let own = |text: &str| is_own(text.parse().expect("an address"));
        assert!(own("127.0.0.1") && own("127.0.0.9") && own("::1"));
        assert!(!own("192.0.2.1") && !own("2001:db8::1"));
    }

    #[test]
    fn ended_connection_is_told_to_its_program_and_nobody_else_needs_to_be_asked() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).expect("listen");
        let mut ours = TcpStream::connect(listener.local_addr().expect("its address")).expect("connect");
        let (_theirs, _) = listener.accept().expect("accept");
        let reader = std::thread::spawn({
            let mut ours = ours.try_clone().expect("duplicate");
            move || ours.read(&mut [0; 8]).unwrap_or(0)
        });
        let own = i32::try_from(std::process::id()).expect("a pid");
        match end(own, ours.as_raw_fd()) {
            Ok(ended) => assert!(ended),
            // Some sandboxes of builds allow no process to look at another.
            Err(why) => return eprintln!("skipped: {why}"),
        }
        assert_eq!(reader.join().expect("its end"), 0);
        assert!(!matches!(ours.read(&mut [0; 8]), Ok(1..)));
        assert!(ours.peer_addr().is_err(), "it is connected to nobody");
        assert!(!end(own, i32::MAX).expect("no such descriptor"));
    }
}
