//! Lends the userfaultfd of a forked child to the agent in that child.
//!
//! ```text
//!   agent in the child                    keeper
//!     | a page that the child has inherited |
//!     | ----------------------------------> | which of all kept userfaultfds is that process's?
//!     |                                     |   each one that looks after such a page: protect it, or not, by lot;
//!     |                                     |   the asker's page table, which the kernel shows, has the same each time
//!     | <------------- the userfaultfd ---- | reads it no more
//!     | makes private what is inherited     |
//!     | closes the connection ------------> | goes on
//! ```
//!
//! The kernel does not say whose memory a userfaultfd looks after. The asker is known by the kernel's word. A process that asks
//! for another one's would have to foresee the lots. Or it would have to change its own page table in step with the other's,
//! which it cannot read. While a page of another child is protected, its writer waits for some microseconds.

use crate::keep::{self, Kept};
use act::Follower;
use host::{PagemapEntry, PeerPages, Received, Seqpacket};
use page::{HostVirt, PageRange};
use rustix::fd::AsFd;
use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};
use std::io;
use std::sync::MutexGuard;
use std::time::{Duration, Instant};
use wire::prove::{LENT, NOT_KEPT};

/// Number of lots that are drawn for each userfaultfd.
const LOTS: u32 = 32;
/// Longest time for a child's nursery to have read and settled all: 5 s.
const PATIENCE: Duration = Duration::from_secs(5);
/// Longest time for one candidate to be tried: 200 ms. One that is lent to another process is not the asker.
const TRY_TIME: Duration = Duration::from_millis(200);
/// Time between two attempts: 1 ms.
const AGAIN: Duration = Duration::from_millis(1);
/// Pause of an asker whose userfaultfd is not kept: 100 ms. Each question costs a look at all that are.
const PAUSE: Duration = Duration::from_millis(100);

/// Lends the userfaultfd that looks after this page of the asker's, until the asker hangs up or ends.
///
/// # Errors
/// The asker may not be looked at, or does not read.
pub fn serve(socket: &Seqpacket, page: HostVirt) -> io::Result<()> {
    let asker = PeerPages::of(socket)?;
    let (all, mut own) = (keep::all(), None);
    for kept in &all {
        if is_of(kept, &asker, PageRange { start: page, pages: 1 })? {
            own = Some(kept);
            break;
        }
    }
    let at_rest = |follower: &mut Follower| follower.is_at_rest().then_some(());
    // Held until the end, so that nobody else reads the kernel's messages.
    let Some((held, ())) = own.and_then(|kept| hold(kept, PATIENCE, at_rest)) else {
        socket.send(&NOT_KEPT, &[])?;
        std::thread::sleep(PAUSE);
        return Ok(());
    };
    if !socket.send(&LENT, &[held.watch().as_fd()])? {
        return Err(io::Error::other("it does not read what it asked for"));
    }
    while asker.wait_for(socket)? && matches!(socket.receive_bare(&mut [0; 8])?, Received::Nothing) {}
    Ok(())
}

/// Takes the follower of a child as soon as `look` finds something, if that comes in time. Its nursery reads meanwhile.
fn hold<T>(
    kept: &Kept,
    patience: Duration,
    mut look: impl FnMut(&mut Follower) -> Option<T>,
) -> Option<(MutexGuard<'_, Follower>, T)> {
    let until = Instant::now() + patience;
    loop {
        if let Some(mut follower) = kept.try_hold()
            && let Some(found) = look(&mut follower)
        {
            return Some((follower, found));
        }
        if Instant::now() > until {
            return None;
        }
        std::thread::sleep(AGAIN);
    }
}

/// Whether a child is the asker.
fn is_of(kept: &Kept, asker: &PeerPages, page: PageRange) -> io::Result<bool> {
    let tried = hold(kept, TRY_TIME, |follower| match try_lots(follower, asker, page) {
        // A message that is unread has to be read first.
        Ok(Err(Errno::AGAIN)) => None,
        tried => Some(tried),
    });
    tried.map_or(Ok(false), |(_, tried)| Ok(tried? == Ok(true)))
}

/// Draws lots. The inner error is the kernel's word on the userfaultfd.
fn try_lots(follower: &Follower, asker: &PeerPages, page: PageRange) -> io::Result<Result<bool, Errno>> {
    let mut lots = [0; size_of::<u32>()];
    getrandom(&mut lots[..], GetRandomFlags::empty())?;
    let lots = u32::from_ne_bytes(lots);
    let (mut entries, mut buffer) = (Vec::new(), Vec::new());
    let mut outcome = Ok(true);
    for lot in (0..LOTS).map(|n| lots >> n & 1 == 1) {
        outcome = follower.watch().protect(page, lot).map(|()| true);
        if outcome.is_err() {
            break;
        }
        entries.clear();
        asker.append(page, &mut entries, &mut buffer).map_err(io::Error::other)?;
        if entries.first().map(|entry: &PagemapEntry| entry.write_protected()) != Some(lot) {
            outcome = Ok(false);
            break;
        }
    }
    // Writers sleep no longer than this. If a message is unread, whoever reads it lets them go on.
    let lifted = follower.watch().protect(page, false);
    Ok(outcome.and_then(|is_it| lifted.map(|()| is_it)))
}
