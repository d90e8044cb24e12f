//! `agarwal-t6.5`, `agarwal-s6.8`, `agarwal-s6.7`: pairs of guests with other devices, with free pages returned, or with other kernels.

use super::{D256, GROUP, Saved, alike, first_of, rep_of, timeline};
use crate::plan::Planned;
use crate::record::{MERGED, Measured, Timeline};
use crate::rig::{Group, Rig, System, VmsWanted, frames_of, mb};
use std::time::Instant;

/// A sound device without a sound server.
const AUDIO: [&str; 6] = ["-audiodev", "none,id=mute", "-device", "intel-hda", "-device", "hda-duplex,audiodev=mute"];
/// A graphics device.
const VIDEO: [&str; 2] = ["-device", "VGA"];
/// Two USB controllers, with a tablet.
const USB: [&str; 6] =
    ["-device", "piix3-usb-uhci,id=one", "-device", "piix4-usb-uhci", "-device", "usb-tablet,bus=one.0"];

/// A balloon by which a guest returns free pages as they become free.
const REPORTING: [&str; 2] = ["-device", "virtio-balloon-pci,free-page-reporting=on"];

/// The devices of an arm.
fn devices(arm: &str) -> &'static [&'static str] {
    const NO_VIDEO: [&str; 12] = join(&AUDIO, &USB);
    const NO_AUDIO: [&str; 8] = join(&VIDEO, &USB);
    const NO_USB: [&str; 8] = join(&VIDEO, &AUDIO);
    const ALL: [&str; 14] = join(&VIDEO, &NO_VIDEO);
    match arm {
        "none" => &[],
        "no-video" => &NO_VIDEO,
        "no-audio" => &NO_AUDIO,
        "no-usb" => &NO_USB,
        _ => &ALL,
    }
}

/// Devices of the machines of `agarwal-s6.8`, by the savings that are applied.
const SAVINGS: [(&str, &[&str]); 4] = {
    const AUDIO_USB: [&str; 12] = join(&AUDIO, &USB);
    const ALL: [&str; 14] = join(&VIDEO, &AUDIO_USB);
    const RETURNING: [&str; 16] = join(&ALL, &REPORTING);
    [("none", &ALL), ("devices", &[]), ("idle pages", &RETURNING), ("both", &REPORTING)]
};

/// One list of words after another.
const fn join<const N: usize>(first: &[&'static str], second: &[&'static str]) -> [&'static str; N] {
    let mut all = [""; N];
    let mut n = 0;
    while n < N {
        all[n] = if n < first.len() { first[n] } else { second[n - first.len()] };
        n += 1;
    }
    all
}

/// The recipe of `agarwal-t6.5`.
pub fn trimmed(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    let mut merger = rig.merger("ksm", &[Group::of(GROUP)])?;
    let system = System { devices: devices(&planned.arm), ..System::TINY };
    let vms = rig.vms(&VmsWanted { system, ..alike(2, first_of(planned, 2), D256 / 2) }, &mut merger)?;
    let (mut measured, mut timeline) = (Measured::default(), timeline());
    merger.on()?;
    merger.settle(Instant::now(), &mut timeline)?;
    let pids = vms.pids();
    let (first, second) = (frames_of(pids[0])?, frames_of(pids[1])?);
    let alone = mb(first.len() as f64);
    let next = mb(second.difference(&first).count() as f64);
    measured.put(MERGED, merger.taken(&pids)?.merged_pages as f64);
    for (metric, by_arm, value) in [("alone_mb", "alone_by_set_mb", alone), ("next_mb", "next_by_set_mb", next)] {
        measured.put(metric, value);
        measured.put_at(by_arm, &planned.arm, value);
    }
    measured.timelines.push(timeline);
    Ok(measured)
}

/// The recipe of `agarwal-s6.8`: what a second guest costs without any saving, with each saving alone, and with both.
/// Guests are the same boots in each repetition.
pub fn together(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    let mut measured = Measured::default();
    let mut merged = f64::MAX;
    let mut next = Vec::new();
    for (savings, devices) in SAVINGS {
        let mut merger = rig.merger(&planned.arm, &[Group::of(GROUP)])?;
        let system = System { devices, ..System::DEBIAN };
        let vms = rig.vms(&VmsWanted { system, ..alike(2, 0, D256) }, &mut merger)?;
        merger.on()?;
        merger.settle(Instant::now(), &mut Timeline::default())?;
        let pids = vms.pids();
        let (first, second) = (frames_of(pids[0])?, frames_of(pids[1])?);
        next.push(mb(second.difference(&first).count() as f64));
        merged = merged.min(merger.taken(&pids)?.merged_pages as f64);
        measured.put_at("next_mb", savings, next[next.len() - 1]);
    }
    let (base, both) = (next[0], next[3]);
    measured.put(MERGED, merged);
    measured.put("saved_share", 1.0 - both / base);
    measured.put("sum_less_both_mb", (base - next[1]) + (base - next[2]) - (base - both));
    Ok(measured)
}

/// The Debian suite whose kernel an arm's guest boots.
fn suite(arm: &str) -> Option<&'static str> {
    ["bullseye", "trixie", "sid"].into_iter().find(|suite| *suite == arm)
}

/// The recipe of `agarwal-s6.7`: first a guest with the arm's kernel alone, then a guest with the installed kernel
/// beside it.
pub fn kernels(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    let mut merger = rig.merger("ksm", &[Group::of(GROUP)])?;
    // The guest with the arm's kernel is the same boot in each repetition; the other guest is another boot each time.
    let other = System { kernel_of: suite(&planned.arm), ..System::DEBIAN };
    let mut vms = rig.vms(&VmsWanted { system: other, ..alike(1, 0, D256) }, &mut merger)?;
    let (begin, mut measured, mut timeline) = (Instant::now(), Measured::default(), timeline());
    merger.on_for_later_guests()?;
    merger.settle(begin, &mut timeline)?;
    let alone = mb(Saved::of(&merger, &vms.pids())?.merged);
    vms.add(rig, &alike(1, rep_of(planned), D256), &mut merger)?;
    timeline.events.push((begin.elapsed().as_secs_f64(), "the second guest is there".into()));
    merger.settle(begin, &mut timeline)?;
    let pair = mb(Saved::of(&merger, &vms.pids())?.merged);
    measured.put(MERGED, merger.taken(&vms.pids())?.merged_pages as f64);
    for (metric, by_arm, value) in [("alone_mb", "alone_by_kernel_mb", alone), ("pair_mb", "pair_by_kernel_mb", pair)] {
        measured.put(metric, value);
        measured.put_at(by_arm, &planned.arm, value);
    }
    measured.timelines.push(timeline);
    Ok(measured)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_lack_the_device_of_their_name() {
        let has = |arm, word| devices(arm).contains(&word);
        for (arm, word) in [("no-video", "VGA"), ("no-audio", "intel-hda"), ("no-usb", "piix4-usb-uhci")] {
            assert!(has("all", word) && !has(arm, word) && !has("none", word), "{arm}");
        }
        assert_eq!(devices("no-video").len() + VIDEO.len(), devices("all").len());
    }
}
