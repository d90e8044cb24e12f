//! Maps slots of the pool in a program's memory, so that the follower gets the message of every discard there from the
//! first moment on.
//!
//! A mapping is followed once it is registered with the userfaultfd. If pages were discarded between mapping and
//! registering, no message would be sent, and they would read as the pool's bytes, and not as zeros. So there are three
//! ways:
//!
//! ```text
//!   discards that bypass the hooks were seen, or may come:
//!      map the slots elsewhere, register, move the mapping over (the kernel tells the follower). This takes longer
//!   else, if the program has asked that forked children never get this memory (MADV_DONTFORK):
//!      map the slots elsewhere, advise, move the mapping over, register there
//!   else:
//!      map the slots in place, register there
//! ```
//!
//! Either way, the mapping has no page table entries at first: a thread that touches its pages sleeps until they are
//! filled in here. Pages that were discarded meanwhile are not filled in; they become zeros.

use crate::follow::{Following, Shared};
use crate::map::Traits;
use crate::maps::Kind;
use act::{PoolView, Watch, move_mapping_over};
use page::{HostVirt, PageRange, PoolSlot};
use rustix::io::Errno;

/// Most attempts to register slots that were mapped in place. There are many, because the slots must be followed.
const ATTEMPTS: u32 = 1000;

/// Slots that are to be placed.
#[derive(Clone, Copy)]
pub struct Placing<'a> {
    /// The segment.
    pub pool: &'a PoolView,
    /// The slot for the first page.
    pub slot: PoolSlot,
    /// The traits of the memory that they replace.
    pub traits: Traits,
    /// The kind of that memory.
    pub kind: Kind,
    /// Address of copies of the pages, for children that were forked while the pages were out; `None` if no page is
    /// out.
    pub staged: Option<HostVirt>,
}

/// Replaces the mapping at `piece`, which is registered with the follower, by slots.
///
/// # Safety
/// The slots must hold the same bytes as `piece`, so that the program finds it unchanged. Nobody may be able to write
/// `piece` until this returns.
///
/// # Errors
/// The process has as many mappings as it may, memory is short, or the kernel lists something else at `piece`
/// (`ESTALE`). Then `piece` is as it was.
pub unsafe fn place(following: &Following, placing: Placing<'_>, piece: PageRange) -> Result<(), Errno> {
    let Placing { pool, slot, traits, kind, staged } = placing;
    let advice = traits.inherited_by_pool();
    let is_followed_first = following.expects_discards();
    if is_followed_first || advice.dont_fork {
        let strip = pool.map(slot, piece.pages)?;
        if is_followed_first {
            following.watch().register(strip.range(), Watch::AbsentAndWrites)?;
        }
        advice.apply(strip.range())?;
        if !following.may_replace_followed(piece, traits, kind) {
            return Err(Errno::STALE);
        }
        if is_followed_first {
            following.hold().expect_placing(strip.range().start, piece);
        }
        // SAFETY: by the caller.
        let moved = unsafe { move_mapping_over(strip.range(), piece.start) };
        moved.inspect_err(|_| following.hold().expect_no_placing())?;
        strip.forget();
    } else {
        if !following.may_replace_followed(piece, traits, kind) {
            return Err(Errno::STALE);
        }
        // SAFETY: by the caller.
        unsafe { pool.map_over(piece, slot) }?;
    }
    if !is_followed_first {
        let register = |_| following.watch().register(piece, Watch::AbsentAndWrites).is_ok();
        // Registering fails only when memory is short, and the kernel finds some in the end.
        let _ = (0..ATTEMPTS).any(|n| {
            register(n) || {
                std::thread::yield_now();
                false
            }
        });
        if !advice.dont_fork {
            // If it fails, the pages lack advice, not content.
            let _ = advice.apply(piece);
        }
    }
    let (shared, _) = following.until_read(|shared| {
        staged.inspect(|staged| shared.give_to_born(piece, *staged));
        shared.placed(piece);
        fill(following, shared, piece)
    });
    drop(shared);
    Ok(())
}

/// Maps the slots' pages at all pages that were not discarded.
fn fill(following: &Following, shared: &Shared, piece: PageRange) -> Result<(), Errno> {
    let kept = shared.kept(piece);
    if kept.is_empty() {
        // This call changes nothing. It fails with `EAGAIN` while a message is unread.
        return following.watch().protect(piece, false);
    }
    for range in kept {
        let mut at = 0;
        while at < range.pages {
            let rest = PageRange { start: range.start.add_pages(at), pages: range.pages - at };
            at += match following.watch().map_present(rest) {
                Ok(pages) => pages,
                Err(Errno::AGAIN) => return Err(Errno::AGAIN),
                // The page has an entry already, or (as when memory is short) gets one when it is touched.
                Err(_) => 1,
            };
        }
    }
    Ok(())
}
