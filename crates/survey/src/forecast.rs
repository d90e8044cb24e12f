//! The number of further guests like the present ones that fit into memory.
//!
//! A census of N guests tells how many frames (or, folded, contents) exactly 1, 2, ... N of them have in common. From
//! that follows the memory that any n of them take together, on average over all ways to choose n. At least one of n
//! guests has an item that k of N have with probability 1 - C(N-k, n) / C(N, n). So the curve of the average footprint
//! is exact up to N, and no guest is started or stopped for it.
//!
//! Beyond N, each further guest is assumed to cost as much as the Nth. That is the memory that guests have for
//! themselves alone. `docs/insight.md` tells the measured error of this assumption.
//!
//! All this holds for guests as they are. A guest may come to use all memory that it was given, and write what it
//! shares: [`Grown`] tells how many would fit then.

use census::Commonness;
use page::pages_to_bytes;
use serde::Serialize;

/// Numbers of guests at which the forecast curve is printed, as multiples of the number of present guests.
const AHEAD: [u64; 3] = [2, 4, 8];

/// The forecast, in the shape that `--json` prints.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Forecast {
    /// Whether the guests are folded in one group.
    pub folded: bool,
    /// The present guests.
    pub now: Now,
    /// Limit of the average footprint with many guests.
    pub asymptote_bytes: u64,
    /// Memory that one more guest takes.
    pub next_guest_bytes: u64,
    /// Available memory less the reserve. If folded, the memory that folding the present guests would give back is
    /// added.
    pub free_bytes: u64,
    /// Memory to be kept free.
    pub reserve_bytes: u64,
    /// Number of further guests that fit.
    pub fits: u64,
    /// Lower bound of `fits`, by two standard errors.
    pub fits_low: u64,
    /// Upper bound; absent with a single guest, which cannot tell how much further ones share with it.
    pub fits_high: Option<u64>,
    /// The same if every guest used all memory that it was given; absent where that is not known of each.
    pub grown: Option<Grown>,
    /// Average footprint by number of guests: measured up to `now.guests`, a forecast beyond.
    pub curve: Vec<Point>,
}

/// Guests that use all memory they were given, and share nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Grown {
    /// Average memory of such a guest.
    pub guest_bytes: u64,
    /// Memory and swap that all guests could have together, less the reserve.
    pub room_bytes: u64,
    /// The part of `room_bytes` that is swap.
    pub swap_bytes: u64,
    /// Number of further guests that fit if all are grown.
    pub fits: u64,
    /// Memory that would be missing with [`Forecast::fits`] further guests, all grown, in bytes.
    pub short_bytes: u64,
}

/// A present guest.
#[derive(Clone, Copy, Debug)]
pub struct Present {
    /// Pages that only this guest has.
    pub alone_pages: u64,
    /// Memory that the guest takes once it uses all that it was given; `None` if it has no limit.
    pub full_bytes: Option<u64>,
}

/// Memory of the host that guests can use.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    /// Available memory.
    pub available_bytes: u64,
    /// Free swap.
    pub swap_bytes: u64,
    /// Memory to be kept free.
    pub reserve_bytes: u64,
}

/// The present guests.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Now {
    /// Number of guests.
    pub guests: u64,
    /// Average footprint of a guest.
    pub average_bytes: u64,
}

/// A point of the curve.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Point {
    /// Number of guests.
    pub guests: u64,
    /// Average footprint of a guest.
    pub average_bytes: u64,
}

/// Forecasts from the frames and contents that guests have in common.
pub fn forecast(common: &Commonness, present: &[Present], folded: bool, room: &Room) -> Forecast {
    let guests = common.guests();
    let taken = |n: usize| common.together(n, folded);
    let bytes = |pages: f64| pages_to_bytes(1) as f64 * pages;
    // The mean of the pages that guests have for themselves alone, computed from the curve. With one guest nothing is
    // shared.
    let next = if guests > 1 { taken(guests) - taken(guests - 1) } else { taken(1) };
    let (spread, trend) = (
        standard_error(present),
        if guests > 2 {
            // By how much the last guest cost less than the one before: the cost of further guests may go on falling.
            (taken(guests - 1) - taken(guests - 2) - next).max(0.0)
        } else {
            0.0
        },
    );
    let gained = if folded { bytes((common.together(guests, false) - taken(guests)).max(0.0)) as u64 } else { 0 };
    let free_bytes = (room.available_bytes + gained).saturating_sub(room.reserve_bytes);
    let fits = |pages: f64| if pages >= 1.0 { (free_bytes as f64 / bytes(pages)) as u64 } else { u64::MAX };
    let average = |n: u64, pages: f64| Point { guests: n, average_bytes: (bytes(pages) / n as f64) as u64 };
    let mut curve: Vec<Point> = (1..=guests).map(|n| average(n as u64, taken(n))).collect();
    for times in AHEAD {
        let n = guests as u64 * times;
        curve.push(average(n, taken(guests) + (n - guests as u64) as f64 * next));
    }
    Forecast {
        folded,
        now: Now { guests: guests as u64, average_bytes: curve[guests - 1].average_bytes },
        asymptote_bytes: bytes(next) as u64,
        next_guest_bytes: bytes(next) as u64,
        free_bytes,
        reserve_bytes: room.reserve_bytes,
        fits: fits(next),
        fits_low: fits(next + 2.0 * spread),
        fits_high: (guests > 1).then(|| fits((next - 2.0 * spread - trend).max(1.0))),
        grown: grown(present, bytes(common.together(guests, false)) as u64, fits(next), room),
        curve,
    }
}

/// The further guests that fit if all use the memory they were given; `None` unless that is known of every present
/// guest. The present guests take `taken_bytes` now, and `further` more are forecast to fit.
fn grown(present: &[Present], taken_bytes: u64, further: u64, room: &Room) -> Option<Grown> {
    let full: u64 = present.iter().map(|p| p.full_bytes).sum::<Option<u64>>()?;
    let guest_bytes = full.checked_div(present.len() as u64).filter(|bytes| *bytes > 0)?;
    let room_bytes = (taken_bytes + room.available_bytes + room.swap_bytes).saturating_sub(room.reserve_bytes);
    Some(Grown {
        guest_bytes,
        room_bytes,
        swap_bytes: room.swap_bytes,
        fits: room_bytes.saturating_sub(full) / guest_bytes,
        short_bytes: further.saturating_mul(guest_bytes).saturating_add(full).saturating_sub(room_bytes),
    })
}

/// Standard error of the mean of the pages that guests have for themselves alone.
fn standard_error(present: &[Present]) -> f64 {
    let n = present.len() as f64;
    if present.len() < 2 {
        return 0.0;
    }
    let figures = || present.iter().map(|p| p.alone_pages as f64);
    let mean = figures().sum::<f64>() / n;
    let variance = figures().map(|f| (f - mean).powi(2)).sum::<f64>() / (n - 1.0);
    (variance / n).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Three guests. Each has 100 pages for itself, each pair shares ten pages (30 in all), and all three share 60.
    fn three() -> Commonness {
        Commonness {
            frames_mapped_by: vec![300, 30, 60],
            other_frames_mapped_by: vec![30, 0, 30],
            contents_held_by: vec![120, 30, 20],
            alone_if_folded: vec![50; 3],
        }
    }

    #[test]
    fn the_curve_is_the_mean_over_all_choices() {
        let common = three();
        let taken = |n| common.together(n, false);
        assert_eq!([taken(1), taken(2), taken(3)].map(f64::round), [180.0, 290.0, 390.0]);
    }

    #[test]
    fn fits_follow_from_memory_of_next_guest() {
        let room = Room { available_bytes: 1000 << 12, swap_bytes: 0, reserve_bytes: 100 << 12 };
        let present = |pages: &[u64]| -> Vec<Present> {
            pages.iter().map(|pages| Present { alone_pages: *pages, full_bytes: None }).collect()
        };
        let found = forecast(&three(), &present(&[90, 100, 110]), false, &room);
        assert_eq!(found.now, Now { guests: 3, average_bytes: 130 << 12 });
        assert_eq!((found.next_guest_bytes, found.fits), (100 << 12, 9));
        assert!(found.fits_low < 9 && found.fits_high > Some(9), "{found:?}");
        assert_eq!(found.curve.last().map(|p| p.guests), Some(24));
        let folded = forecast(&three(), &present(&[50; 3]), true, &room);
        // 170 contents and 60 frames take the place of 390 frames.
        assert_eq!(folded.free_bytes, (900 + 160) << 12);
        assert_eq!((folded.next_guest_bytes, folded.fits, folded.fits_low), (50 << 12, 21, 21));
        let one = Commonness { frames_mapped_by: vec![100], ..Commonness::default() };
        let one = Commonness {
            other_frames_mapped_by: vec![0],
            contents_held_by: vec![90],
            alone_if_folded: vec![90],
            ..one
        };
        let found = forecast(&one, &present(&[100]), false, &Room { reserve_bytes: 0, ..room });
        assert_eq!((found.fits, found.fits_high, found.grown), (10, None, None));
    }

    #[test]
    fn grown_guests_take_what_they_were_given() {
        let room = Room { available_bytes: 1000 << 12, swap_bytes: 110 << 12, reserve_bytes: 100 << 12 };
        let present = [90, 100, 110].map(|pages| Present { alone_pages: pages, full_bytes: Some(pages << 13) });
        // The three take 390 frames, 9 more like them fit. All 12 grown take 2400 pages, for which there are 1400.
        let found = forecast(&three(), &present, false, &room);
        let grown = found.grown.expect("full sizes are known");
        let expected = Grown {
            guest_bytes: 200 << 12,
            room_bytes: 1400 << 12,
            swap_bytes: 110 << 12,
            fits: 4,
            short_bytes: 1000 << 12,
        };
        assert_eq!((found.fits, grown), (9, expected));
        let ample = Room { available_bytes: 100_000 << 12, ..room };
        let one = [Present { alone_pages: 180, full_bytes: Some(180 << 12) }; 3];
        assert_eq!(grown_of(&one, &ample).short_bytes, 0);
        // The present guests alone may be too many.
        let tight = Room { available_bytes: 0, swap_bytes: 0, reserve_bytes: 0 };
        assert_eq!((grown_of(&present, &tight).fits, grown_of(&present, &tight).short_bytes), (0, 210 << 12));
    }

    fn grown_of(present: &[Present], room: &Room) -> Grown {
        grown(present, 390 << 12, 0, room).expect("full sizes are known")
    }
}
