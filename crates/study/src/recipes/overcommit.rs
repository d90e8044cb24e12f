//! `kloster-fig7.7`: many idle guests on a small host that they would fill several times over; then some wake.
//!
//! ```text
//!   idle guests in a control group -> merged until that is settled -> the group gets its limit
//!     -> a tenth of the guests fill memory -> who lives, what was swapped, how much merging was lost
//! ```
//!
//! The host's memory is that of a control group. It swaps to a file of the turn's own.

use super::{GROUP, on_small_host, rep_of};
use crate::data::Length;
use crate::plan::Planned;
use crate::record::{MERGED, Measured, Timeline};
use crate::rig::{Merger, Rig, System, Vms, VmsWanted, mb};
use bench::{SmallHost, workload};
use cli::say;
use lab::Guest;
use page::PAGE_BYTES;
use std::thread;
use std::time::{Duration, Instant};

/// Memory of a guest.
const K512: u64 = 512 << 20;
/// Number of guests in the short form.
const SHORT: usize = 24;
/// Number of guests in the full form: as many as in the paper.
const FULL: usize = 60;
/// One guest in this many wakes.
const WAKES: usize = 10;
/// Memory limit of the control group that stands for the host.
const HOST: u64 = 2 << 30;
/// Swap of the host, in MiB.
const SWAP: usize = 1024;
/// Time limit for an answer of a guest, whose memory may be in swap.
const ANSWER: Duration = Duration::from_secs(60);

/// The recipe of `kloster-fig7.7`.
pub fn idle_then_awake(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    let guests = if planned.length == Length::Full { FULL } else { SHORT };
    let wanted = VmsWanted {
        guests,
        first: rep_of(planned),
        memory_bytes: K512,
        groups: vec![GROUP.to_owned()],
        system: System::TINY,
    };
    let (small, _swap, merger, vms) = on_small_host(rig, planned, &wanted, SWAP)?;
    let begin = Instant::now();
    let mut timeline = Timeline { name: "saved".into(), unit: "MB".into(), ..Timeline::default() };
    let mut measured = Measured::default();
    merger.on()?;
    merger.settle(begin, &mut timeline)?;
    let idle = look(&merger, &vms, "idle", &mut measured)?;
    measured.put(MERGED, idle.merged_pages);
    measured.put("overcommitted", (guests as u64 * K512) as f64 / 1e6 / idle.all_mb);
    small.limit(HOST)?;
    let awake = &vms.guests[..guests.div_ceil(WAKES)];
    timeline.events.push((begin.elapsed().as_secs_f64(), format!("{} guests wake", awake.len())));
    let woken = vms.tell(awake, workload::WAKE_SCRIPT).and_then(|_| {
        merger.settle(begin, &mut timeline)?;
        look(&merger, &vms, "awake", &mut measured)
    });
    if let Some(woken) = Toll::of(&small, &vms.guests).put(woken, &mut measured)? {
        measured.put("saving_kept", woken.saved_mb / idle.saved_mb);
    }
    measured.timelines.push(timeline);
    Ok(measured)
}

/// What a shortage of memory did to the guests of a small host.
pub struct Toll {
    killed: u64,
    answering: usize,
    guests: usize,
}

impl Toll {
    /// Counts the processes that were killed, and asks each guest for an answer.
    pub fn of(small: &SmallHost, guests: &[Guest]) -> Self {
        let answers = |guest: &Guest| guest.exec(&["sh", "-c", ":"], ANSWER).is_ok_and(|output| output.status == 0);
        let answering = thread::scope(|scope| {
            let asked: Vec<_> = guests.iter().map(|guest| scope.spawn(move || answers(guest))).collect();
            asked.into_iter().filter_map(|one| one.join().ok()).filter(|answers| *answers).count()
        });
        Self { killed: small.kills(), answering, guests: guests.len() }
    }

    /// Puts how many processes were killed, and the share of guests that answer. `seen` was measured after the
    /// shortage: if it failed and a guest has died, `None` is returned.
    ///
    /// # Errors
    /// The measurement failed although no guest died.
    pub fn put<T>(self, seen: anyhow::Result<T>, measured: &mut Measured) -> anyhow::Result<Option<T>> {
        let Self { killed, answering, guests } = self;
        measured.put("killed", killed as f64);
        measured.put("alive", answering as f64 / guests.max(1) as f64);
        match seen {
            Ok(seen) => Ok(Some(seen)),
            Err(e) if killed == 0 && answering == guests => Err(e),
            Err(e) => {
                say!("pagefold: memory was short, and this failed: {e:#}");
                let note = "in some turn, guests died for want of memory: what follows was not measured there";
                measured.note(note);
                Ok(None)
            }
        }
    }
}

/// Memory of all guests at one time.
struct Seen {
    /// Memory of the guests in frames and in swap, in MB.
    all_mb: f64,
    saved_mb: f64,
    merged_pages: f64,
}

/// Measures the guests' memory, and puts what they take, what is saved, and what is swapped out.
fn look(merger: &Merger, vms: &Vms, when: &str, measured: &mut Measured) -> anyhow::Result<Seen> {
    let swapped: u64 = vms.pids().iter().map(|pid| host::swapped_bytes(*pid)).sum::<Result<_, _>>()?;
    let swapped_mb = mb(swapped as f64 / PAGE_BYTES as f64);
    let taken = merger.taken(&vms.pids())?;
    let (taken_mb, saved_mb) = (mb(taken.frames as f64), mb(merger.saved_pages()? as f64));
    measured.put_at("taken_mb", when, taken_mb);
    measured.put_at("saved_mb", when, saved_mb);
    measured.put_at("swapped_mb", when, swapped_mb);
    Ok(Seen { all_mb: taken_mb + swapped_mb, saved_mb, merged_pages: taken.merged_pages as f64 })
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::bail;

    fn put(toll: Toll, seen: anyhow::Result<u32>) -> (anyhow::Result<Option<u32>>, Vec<f64>) {
        let mut measured = Measured::default();
        let seen = toll.put(seen, &mut measured);
        (seen, measured.samples.iter().map(|sample| sample.value).collect())
    }

    #[test]
    fn death_of_a_guest_is_a_result_and_no_error() {
        let ended = || -> anyhow::Result<u32> { bail!("it has ended") };
        let (seen, figures) = put(Toll { killed: 1, answering: 23, guests: 24 }, ended());
        assert_eq!((seen.unwrap(), figures), (None, vec![1.0, 23.0 / 24.0]));
        let (seen, figures) = put(Toll { killed: 0, answering: 24, guests: 24 }, Ok(7));
        assert_eq!((seen.unwrap(), figures), (Some(7), vec![0.0, 1.0]));
        let (seen, _) = put(Toll { killed: 2, answering: 24, guests: 24 }, Ok(7));
        assert_eq!(seen.unwrap(), Some(7), "others than guests were killed");
        assert!(put(Toll { killed: 0, answering: 24, guests: 24 }, ended()).0.is_err(), "nobody died");
    }
}
