//! Lends the userfaultfd of a forked child to the agent in that child.
//!
//! ```text
//!   agent in the child                    keeper
//!     | a page that the child has inherited |
//!     | ----------------------------------> | which userfaultfd of followed children is that process's?
//!     |                                     |   each one in turn: write-protects that page, or not, by random bits;
//!     |                                     |   the asker's page table, which the kernel shows, has the same each time
//!     | <------------- the userfaultfd ---- | reads it no more
//!     | claims it ------------------------> | sees the claim
//!     | <---------------------------- yes   | and leaves that child alone as long as it lasts
//!     | makes private what is inherited     |
//!     | gives up the claim                  | goes on
//! ```
//!
//! **Processes that are killed.** An agent write-protects pages and copies them. If another process lifts the
//! protection meanwhile, or reads the event of a discard that the agent then never sees, writes are lost. When the
//! keeper is killed, the parent's agent takes its children back, and hands them to the next keeper. Both look for the
//! claim before they read ([`Follower::is_claimed`]). The keeper's answer proves that the keeper was alive when the
//! claim existed. So the parent's agent had not yet seen the keeper's connection closed: the files of a killed process
//! are closed only when its last thread has ended. Without the answer, the agent in the child changes nothing, and asks
//! again.
//!
//! The kernel does not say which process's memory is registered with a userfaultfd. The keeper knows the asker by its
//! pidfd, and finds the asker's userfaultfd by random bits (lots): it sets or lifts the write protection of the page
//! through a userfaultfd, and compares the asker's page table. To get the userfaultfd of another process, the asker
//! would have to guess the bits, or change its own page table in step with the other process's, which it cannot read.
//! While a page of another child is protected, a thread that writes it waits for some microseconds. So only children of
//! the asker's family are tried each time: those that were forked from the same program, and so have the same addresses
//! of code and stack, which the kernel chooses at random for each program that is executed. Other children are tried
//! once a second, for all askers together. A child that was handed over in the moment in which its parent executed
//! another program, or ended, is one of them.

use crate::keep::{self, Kept};
use act::{Follower, Watch};
use host::{PagemapEntry, PeerPages, Received, Seqpacket};
use page::{HostVirt, PageRange};
use rustix::fd::AsFd;
use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use wire::prove::{CLAIMED, LENT, NOT_KEPT, YOURS};

/// Number of random bits by which one userfaultfd is tried.
const LOTS: u32 = 32;
/// Longest time for which a userfaultfd is not lent because the thread that follows the child has not read all messages
/// and mapped zeros for all discards: 5 s.
const PATIENCE: Duration = Duration::from_secs(5);
/// Longest time for which the lock of one candidate is awaited: 200 ms. If another agent is about to claim its
/// userfaultfd, the candidate is not the asker.
const TRY_TIME: Duration = Duration::from_millis(200);
/// Time between two times that children of other families are tried: 1 s.
const OTHERS_EVERY: Duration = Duration::from_secs(1);
/// Time between two attempts to lock a follower: 1 ms.
const AGAIN: Duration = Duration::from_millis(1);
/// Time for which an asker waits whose userfaultfd was not found: 100 ms. Each question tries all candidates.
const PAUSE: Duration = Duration::from_millis(100);

/// Sends the asker the userfaultfd with which this page of its memory is registered, and waits until the asker has
/// claimed it. If none is found, says so ([`NOT_KEPT`]).
///
/// # Errors
/// The asker does not read its socket, or says that it has claimed the userfaultfd and has not.
pub fn serve(socket: &Seqpacket, page: HostVirt, asker: &PeerPages) -> io::Result<()> {
    // `find` drops its list of candidates when it returns. Otherwise the userfaultfds of children that are no longer
    // followed would stay open during the wait for the asker.
    let own = find(host::peer_layout(socket), page, asker)?;
    let at_rest = |follower: &mut Follower| (follower.is_at_rest() && !follower.is_claimed()).then_some(());
    // The follower is locked until the asker has claimed the userfaultfd, so that nobody else reads the kernel's
    // messages.
    let Some((mut held, kept)) = own.as_deref().and_then(|kept| Some((hold(kept, PATIENCE, at_rest)?.0, kept))) else {
        socket.send(&NOT_KEPT, &[])?;
        std::thread::sleep(PAUSE);
        return Ok(());
    };
    if !socket.send(&LENT, &[held.watch().as_fd()])? {
        return Err(io::Error::other("it does not read what it asked for"));
    }
    held.expect_claim();
    let mut frame = [0; 8];
    while asker.wait_for(socket)? {
        match socket.receive_bare(&mut frame)? {
            Received::Nothing => {}
            Received::Frame(bytes) if frame[..bytes] == CLAIMED && held.is_claimed() && kept.is_ours() => {
                return socket.send(&YOURS, &[]).map(drop);
            }
            Received::Frame(_) => return Err(io::Error::other("it has not claimed what it was lent")),
            Received::Closed => break,
        }
    }
    Ok(())
}

/// The followed child that is the asker; `None` if none is.
fn find(layout: Option<(u64, u64)>, page: HostVirt, asker: &PeerPages) -> io::Result<Option<Arc<Kept>>> {
    let (family, others): (Vec<_>, Vec<_>) = keep::all().into_iter().partition(|kept| kept.has_layout(layout));
    // Children of other families are tried only if none of the family was the asker.
    let others = std::iter::once(others).filter(|_| may_try_others()).flatten();
    for kept in family.into_iter().chain(others) {
        if is_of(&kept, asker, PageRange { start: page, pages: 1 })? {
            return Ok(Some(kept));
        }
    }
    Ok(None)
}

/// Whether children of other families may be tried. If so, nobody else may for a while.
fn may_try_others() -> bool {
    static NEXT: Mutex<Option<Instant>> = Mutex::new(None);
    let (mut next, now) = (NEXT.lock().unwrap_or_else(PoisonError::into_inner), Instant::now());
    let may = next.is_none_or(|next| next <= now);
    if may {
        *next = Some(now + OTHERS_EVERY);
    }
    may
}

/// Locks the follower of a child, and returns the lock once `look` returns a result; `None` if that takes longer than
/// `patience`. Between two tries, the thread that follows the child reads its messages.
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

/// Whether this child is the asker.
fn is_of(kept: &Kept, asker: &PeerPages, page: PageRange) -> io::Result<bool> {
    let tried = hold(kept, TRY_TIME, |follower| {
        if follower.is_claimed() {
            // An agent has claimed this userfaultfd, and sets and lifts write protection by itself.
            return Some(Ok(Ok(false)));
        }
        // `EAGAIN` means that a message is unread, which the thread that follows the child has to read first.
        Some(try_lots(follower, asker, page)).filter(|tried| !matches!(tried, Ok(Err(Errno::AGAIN))))
    });
    tried.map_or(Ok(false), |(_, tried)| Ok(tried? == Ok(true)))
}

/// Write-protects the page or lifts the protection, by a random bit each time, and looks whether the asker's page table
/// shows the same. Returns whether all agree. The inner error is the kernel's answer to a call on the userfaultfd.
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
    if outcome == Ok(true) && follower.watch().register(page, Watch::Writes) == Err(Errno::BUSY) {
        // A forked child may have several userfaultfds, made by the agents of its parent and of its grandparent. With
        // this one, other memory of the child is registered.
        outcome = Ok(false);
    }
    // Threads that wait to write the page go on from here. If that fails because a message is unread, the thread that
    // reads it lets them go on.
    let lifted = follower.watch().protect(page, false);
    Ok(outcome.and_then(|is_it| lifted.map(|()| is_it)))
}
