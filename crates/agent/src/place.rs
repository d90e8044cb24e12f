//! Placing slots of the pool in a program's memory, such that they are followed from their first moment.
//!
//! A mapping is followed once it is registered. Between mapping and registering it, a discard would go unseen; nobody touches
//! the pages then, but they would read as the pool's bytes ever after. So where discards were seen that come by other ways than
//! through the hooks, or may come:
//!
//! ```text
//!   map the slots elsewhere, register, move the mapping over (the kernel tells the follower)   -- exact, and 12 to 35 us dearer
//! ```
//!
//! and else the slots are mapped in place and registered there. Either way no page table entry comes along: whoever touches the
//! pages sleeps until they are mapped here, but for those that were discarded meanwhile, of which zeros are made.

use crate::follow::{Following, Shared};
use crate::maps::Kind;
use crate::table::Traits;
use host::{PoolView, Watch, move_mapping_over};
use page::{HostVirt, PageRange, PoolSlot};
use rustix::io::Errno;

/// What is mapped in place is registered there, whatever it takes: so many attempts.
const ATTEMPTS: u32 = 1000;

/// What is to be placed.
#[derive(Clone, Copy)]
pub struct Placing<'a> {
    /// The segment.
    pub pool: &'a PoolView,
    /// The slot for the first page.
    pub slot: PoolSlot,
    /// What is known of the memory there.
    pub traits: Traits,
    /// And what kind it is.
    pub kind: Kind,
    /// Where copies lie for children that were born while pages were out of reach.
    pub staged: Option<HostVirt>,
}

/// Replaces what is mapped at `piece`, which is registered with what follows memory, by slots.
///
/// # Safety
/// The program would find `piece` unchanged: the slots hold what it held. Nobody can write it until this returns.
///
/// # Errors
/// The process has as many mappings as it may, memory is short, or something else lies there (`ESTALE`); `piece` is as it was, or (on
/// old kernels, where memory for the mapping itself is short) unmapped.
pub unsafe fn place(following: &Following, placing: Placing<'_>, piece: PageRange) -> Result<(), Errno> {
    let Placing { pool, slot, traits, kind, staged } = placing;
    let advice = traits.inherited();
    if following.expects_discards() {
        let strip = pool.map(slot, piece.pages)?;
        following.watch().register(strip.range(), Watch::AbsentAndWrites)?;
        advice.apply(strip.range())?;
        if !following.may_replace_followed(piece, traits, kind) {
            return Err(Errno::STALE);
        }
        following.hold().expect_placing(Some(strip.range().start));
        // SAFETY: by the caller.
        let moved = unsafe { move_mapping_over(strip.range(), piece.start) };
        moved.inspect_err(|_| following.hold().expect_placing(None))?;
        strip.forget();
    } else {
        if !following.may_replace_followed(piece, traits, kind) {
            return Err(Errno::STALE);
        }
        // SAFETY: by the caller.
        unsafe { pool.map_over(piece, slot) }?;
        let register = |_| following.watch().register(piece, Watch::AbsentAndWrites).is_ok();
        // It fails for want of memory alone, which the kernel finds.
        let _ = (0..ATTEMPTS).any(|n| {
            register(n) || {
                std::thread::yield_now();
                false
            }
        });
        // What is refused is advice, not content.
        let _ = advice.apply(piece);
    }
    let (shared, _) = following.until_read(|shared| {
        staged.inspect(|staged| shared.give_to_born(piece, *staged));
        shared.placed(piece);
        fill(following, shared, piece)
    });
    drop(shared);
    Ok(())
}

/// Maps all pages that were not discarded.
fn fill(following: &Following, shared: &Shared, piece: PageRange) -> Result<(), Errno> {
    let kept = shared.kept(piece);
    if kept.is_empty() {
        // Only to see whether a message is unread.
        return following.watch().protect(piece, false);
    }
    for range in kept {
        let mut at = 0;
        while at < range.pages {
            let rest = PageRange { start: range.start.add_pages(at), pages: range.pages - at };
            at += match following.watch().map_present(rest) {
                Ok(pages) => pages,
                Err(Errno::AGAIN) => return Err(Errno::AGAIN),
                // Somebody has touched it, or (as when memory is short) will find it when it is touched.
                Err(_) => 1,
            };
        }
    }
    Ok(())
}
