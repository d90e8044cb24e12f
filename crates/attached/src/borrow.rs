//! Gets from the keeper the userfaultfd with which memory that this process has inherited is registered.

use act::{Claim, Userfault};
use agent::world;
use host::{Received, Seqpacket};
use page::HostVirt;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};
use wire::attach::Server;
use wire::prove::{CLAIMED, LENT, NOT_KEPT, YOURS, encode_lend};

/// Longest time that the keeper may take to hand over a userfaultfd: 20 s. It may have to try thousands.
const LEND_TIME: Duration = Duration::from_secs(20);

/// Gets the userfaultfd with which a page that this process has inherited is registered. As long as the claim lasts, no
/// other process reads the kernel's messages from it.
///
/// # Errors
/// There is no keeper, it does not answer, or it does not follow that page.
pub fn borrow(page: HostVirt) -> io::Result<(Userfault, Claim)> {
    let socket = world::connect(Server::Prover, Path::new(""))?;
    let (mut files, until) = (Vec::new(), Instant::now() + LEND_TIME);
    if !socket.send(&encode_lend(page), &[])? {
        return Err(io::ErrorKind::WouldBlock.into());
    }
    let watch = match answer(&socket, &mut files, until)? {
        LENT => Userfault::from_fd(files.pop().ok_or(io::ErrorKind::InvalidData)?)?,
        NOT_KEPT => return Err(io::ErrorKind::NotFound.into()),
        _ => return Err(io::ErrorKind::InvalidData.into()),
    };
    let claim = watch.claim()?;
    // If the keeper is gone by now, this fails: the parent's agent may be reading the messages.
    socket.send(&CLAIMED, &[])?;
    match answer(&socket, &mut files, until)? {
        YOURS => Ok((watch, claim)),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// The keeper's next answer, of one byte.
fn answer(socket: &Seqpacket, files: &mut Vec<OwnedFd>, until: Instant) -> io::Result<[u8; 1]> {
    let mut frame = [0; 2];
    loop {
        match socket.receive(&mut frame, files)? {
            Received::Frame(1) => return Ok([frame[0]]),
            Received::Frame(_) => return Err(io::ErrorKind::InvalidData.into()),
            Received::Closed => return Err(io::ErrorKind::UnexpectedEof.into()),
            Received::Nothing => {}
        }
        let left = until.checked_duration_since(Instant::now()).ok_or(io::ErrorKind::TimedOut)?;
        let left = Timespec::try_from(left).map_err(io::Error::other)?;
        let _ = poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&left));
    }
}
