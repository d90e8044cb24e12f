//! Memory that is shared from the beginning: a private mapping of a template's file, which the program has made by
//! itself and has enrolled. Each of its pages has a *home*, the slot at its place in the template, and shows its home's
//! content until it is written.
//!
//! ```text
//!   at home: the file's page, in the program's own mapping; nothing is noted for it
//!      | written                           ^
//!      v                                   | it holds what its home holds: the private page is dropped (refold)
//!   broken, in the program's mapping ------+
//!      | folded to another slot            ^
//!      v                                   | the same: the template is mapped over it
//!   placed: a slot, or broken again -------+
//! ```
//!
//! Memory of a file shows the file's bytes again when it is discarded, and so does this memory. In the program's own
//! mapping, the kernel does that: the mapping is followed only while its pages are folded again. Where other slots were
//! placed, the follower copies the template's bytes into a discarded page, until the agent's thread has mapped the
//! template over it.
//!
//! A child's follower does not know the template. So only memory that children do not get (`MADV_DONTFORK`, as QEMU
//! advises) is folded again. A private page of zeros stays as it is, unless its home is empty.

use crate::follow::{Following, Shared};
use crate::lock::Lock;
use crate::maps::Kind;
use crate::pool::Pool;
use crate::section;
use crate::table::{self, Home, READ_WRITE, Table, Traits};
use act::PoolView;
use page::{HostVirt, PAGE_BYTES, PageRange, PageSet, PoolSlot, pages_to_bytes};
use rustix::io::Errno;
use wire::SlotRun;

/// A template of which something is or was mapped in this process. It is kept as long as the process lives: memory that
/// shows the template may be discarded at any time.
struct Template {
    file: (u64, u64),
    view: PoolView,
}

static TEMPLATES: Lock<Vec<&'static Template>> = Lock::new(Vec::new());

/// The template of this file, whose view is `view`.
fn template(file: (u64, u64), view: &PoolView) -> Result<&'static Template, Errno> {
    let mut all = TEMPLATES.lock();
    if let Some(known) = all.iter().find(|known| known.file == file) {
        return Ok(known);
    }
    let template: &'static Template = Box::leak(Box::new(Template { file, view: view.again()? }));
    all.push(template);
    Ok(template)
}

/// The template whose bytes a page with a home shows when it is discarded, and the index of the page's home in the
/// template.
fn of(shared: &Shared, page: HostVirt) -> Option<(&'static Template, u32)> {
    let content = shared.home_of(page)?;
    let all = TEMPLATES.lock();
    all.iter().find_map(|template| Some((*template, template.view.place_of(content)?)))
}

/// Finds memory that maps templates which the worker has offered, and notes it in the table. Returns the homes of which
/// the worker has to be told.
pub fn enter(pool: &Pool, following: &Following) -> Vec<SlotRun> {
    let mut table = table::lock();
    let mut told = Vec::new();
    for (range, traits) in table.of_files().to_vec() {
        let mut at = range.start;
        while at < range.end()
            && let Some(there) = following.mapping_of(at)
        {
            let end = there.range.end().min(range.end());
            let part = PageRange { start: at, pages: end.page() - at.page() };
            let first = (there.offset + (at.0 - there.range.start.0)) / PAGE_BYTES as u64;
            if there.private && there.access == READ_WRITE {
                told.append(&mut enter_part(&mut table, (pool, following), (part, traits), (there.file, first)));
            }
            at = end;
        }
    }
    told
}

fn enter_part(
    table: &mut Table,
    (pool, following): (&Pool, &Following),
    (part, traits): (PageRange, Traits),
    (file, first): ((u64, u64), u64),
) -> Vec<SlotRun> {
    let Some((number, _)) = pool.template(file).filter(|(_, slots)| first + part.pages <= *slots) else {
        return Vec::new();
    };
    let slot = u32::try_from(first).ok().and_then(|first| PoolSlot::new(number, first));
    let Some((slot, view)) = slot.and_then(|slot| Some((slot, pool.of(slot)?))) else { return Vec::new() };
    let Ok(template) = template(file, view) else { return Vec::new() };
    let Some(content) = template.view.slots(slot, part.pages) else { return Vec::new() };
    following.hold().set_home(part, content.start);
    let home = Some(Home::new(part.start.page(), slot));
    table.enter_home(part, Traits { access: READ_WRITE, home, ..traits })
}

/// Begins to keep writers out of pages that lie in the program's own mapping of a template. Returns whether that
/// succeeded.
pub fn watch(following: &Following, range: PageRange, traits: Traits) -> bool {
    following.may_replace(range, traits, Kind::Pool) && following.watch().register(range, act::Watch::Writes).is_ok()
}

/// Ends what [`watch`] began: unregisters the pages that still lie in the program's own mapping, which lets writers in.
/// Pages over which slots were placed meanwhile stay followed.
pub fn leave(table: &Table, following: &Following, range: PageRange) {
    let mut placed = PageSet::new();
    table.placed_pages(range).into_iter().for_each(|part| placed.insert(part));
    for part in placed.missing(range) {
        let _ = following.watch().unregister(part);
    }
}

/// Has all pages of a piece show their homes again. If it fails, none of them does.
///
/// # Safety
/// Writers are kept out, and every page holds the same bytes as its home. If `is_empty` is set, the pages hold zeros,
/// and this function checks whether their homes do.
///
/// # Errors
/// Something else lies there (`ESTALE`), or `is_empty` is set and the homes do not hold zeros. The pages are as they
/// were then.
pub unsafe fn come_home(
    table: &mut Table,
    following: &Following,
    (piece, traits): (PageRange, Traits),
    is_empty: bool,
) -> Result<(), Errno> {
    let (template, place) = of(&following.hold(), piece.start).ok_or(Errno::STALE)?;
    let home = PoolSlot::new(0, place).ok_or(Errno::INVAL)?;
    if is_empty && !has_zeros(&template.view, home, piece.pages) {
        return Err(Errno::OPNOTSUPP);
    }
    if table.placed_pages(piece).is_empty() {
        let offset = pages_to_bytes(place.into());
        if !following.may_replace_followed(piece, traits, Kind::Pool)
            || !following.shows_file(piece, template.file, offset)
        {
            return Err(Errno::STALE);
        }
        following.hold().expect_dropping(Some(piece.start));
        // SAFETY: by the caller, as the file's pages are their homes.
        let dropped = unsafe { act::drop_private(piece) };
        following.hold().expect_dropping(None);
        dropped?;
    } else {
        if !following.may_replace_followed(piece, traits, Kind::Pool) {
            return Err(Errno::STALE);
        }
        // SAFETY: by the caller.
        unsafe { template.view.map_over(piece, home) }?;
        // If it fails, the pages lack advice, not content.
        let _ = traits.inherited_by_pool().apply(piece);
    }
    following.hold().forget(piece);
    table.set_home(piece);
    Ok(())
}

/// Whether these slots hold zeros. Reading a slot without a page would allocate one. But a slot whose page in the
/// member was written has one: the kernel reads the file's page, and copies it.
fn has_zeros(view: &PoolView, first: PoolSlot, pages: u64) -> bool {
    let Some(slots) = view.slots(first, pages) else { return false };
    // SAFETY: one is a page of the view, which reaches to the end of a file that cannot shrink. The other is a
    // constant.
    (0..pages).all(|n| unsafe { act::pages_equal(slots.start.add_pages(n), section::zeros()) })
}

/// Handles a discard of pages with homes, all with these traits. `is_absent` says whether none of them has a private
/// copy. Returns the pages whose discard no longer needs to be remembered.
pub fn settle(
    table: &mut Table,
    (following, shared): (&Following, &Shared),
    (part, traits): (PageRange, Traits),
    is_absent: bool,
) -> Option<PageRange> {
    if table.placed_pages(part).is_empty() {
        if is_absent {
            table.come_back(part);
        }
        return Some(part);
    }
    let (template, place) = of(shared, part.start)?;
    let home = PoolSlot::new(0, place)?;
    if !is_absent || !following.may_replace(part, traits, Kind::Pool) {
        return None;
    }
    // SAFETY: the pages were discarded, and have no page table entries. The program finds the template there.
    unsafe { template.view.map_over(part, home) }.ok()?;
    let _ = traits.inherited_by_pool().apply(part);
    table.come_back(part);
    Some(part)
}

/// The parts of a range whose homes are not empty. All pages of the range show their homes.
pub fn shown(following: &Following, range: PageRange) -> Vec<PageRange> {
    let Some((template, place)) = of(&following.hold(), range.start) else { return Vec::new() };
    let Some(home) = PoolSlot::new(0, place) else { return Vec::new() };
    let filled = template.view.filled(home, range.pages);
    filled.into_iter().map(|(from, pages)| PageRange { start: range.start.add_pages(from), pages }).collect()
}
