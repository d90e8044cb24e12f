//! `kim-floor`: whether memory that was lent comes back in time when all guests write their folded pages at once.

use crate::plan::Planned;
use crate::record::{MERGED, Measured};
use crate::rig::{Rig, mb};
use page::PAGE_BYTES;

/// Number of guests that write their folded pages.
const GUESTS: usize = 4;

/// `kim-floor`: a turn is one break storm of `pagefold bench balance`.
pub fn storm(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    let dir = rig.dir().join(format!("storm-{}", planned.rep.unwrap_or(0)));
    std::fs::create_dir(&dir)?;
    let storm = bench::make_storm(&dir, GUESTS, rig.guardian())?;
    let pages = |bytes: u64| bytes as f64 / PAGE_BYTES as f64;
    let mut measured = Measured::default();
    measured.put(MERGED, pages(storm.folded_bytes));
    measured.put("broken_guarantees", f64::from(u8::from(!storm.guaranteed_held)));
    measured.put("killed", storm.kills as f64);
    measured.put("swapped_mb", mb(pages(storm.host_swap_bytes)));
    measured.put("back_s", storm.back_s);
    measured.put("paused_s", storm.paused_ms as f64 / 1000.0);
    measured.put("least_available_mb", mb(pages(storm.least_available_bytes)));
    measured.put("below_floor_mb", mb(pages(storm.floor_bytes)) - mb(pages(storm.least_available_bytes)));
    Ok(measured)
}
