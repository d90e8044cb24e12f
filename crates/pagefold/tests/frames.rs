//! Every frame of a group has a place in the account. The worker's account of its pool and the contents of all frames
//! add up to what page tables say.

mod common;

use audit::contents::{Class, Contents, Places};
use common::number;
use common::service::{Service, cannot_fold, until};
use common::supervised::signal;
use rustix::fs::stat;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::time::Duration;

/// Frames and contents of some processes and of their pool, counted page by page and byte by byte.
#[derive(Debug, PartialEq, Eq)]
struct ByHand {
    frames: u64,
    contents: u64,
    zeros: u64,
}

fn maps(pid: u32) -> Vec<(u64, u64, String)> {
    let text = fs::read_to_string(format!("/proc/{pid}/maps")).expect("maps");
    let line = |line: &str| {
        let (start, rest) = line.split_once('-').expect("a range");
        let (end, rest) = rest.split_once(' ').expect("a range");
        let page = |hex| u64::from_str_radix(hex, 16).expect("an address") >> 12;
        (page(start), page(end), rest.to_owned())
    };
    text.lines().map(line).collect()
}

impl ByHand {
    fn of(members: &[u32], worker: u32) -> Self {
        let flags = File::open("/proc/kpageflags").expect("root");
        let word = |file: &File, n: u64| {
            let mut bytes = [0; 8];
            file.read_exact_at(&mut bytes, n * 8).map_or(0, |()| u64::from_ne_bytes(bytes))
        };
        let (mut frames, mut contents) = (BTreeMap::new(), BTreeSet::new());
        for pid in members {
            let [pagemap, memory] =
                ["pagemap", "mem"].map(|name| File::open(format!("/proc/{pid}/{name}")).expect(name));
            let private =
                maps(*pid).into_iter().filter(|(.., rest)| rest.as_bytes()[3] == b'p' && !rest.contains("[v"));
            for (start, end, rest) in private {
                for page in start..end {
                    let (entry, mut bytes) = (word(&pagemap, page), vec![0; 4096]);
                    let (is_present, is_file, pfn) = (entry >> 63 == 1, entry >> 61 & 1 == 1, entry & ((1 << 55) - 1));
                    let is_private = is_present && !is_file && word(&flags, pfn) & 1 << 24 == 0;
                    let is_slot = rest.contains("/memfd:pagefold-") && (is_file || !is_present);
                    if is_private || is_slot {
                        memory.read_exact_at(&mut bytes, page << 12).expect("a page");
                        contents.insert(bytes.clone());
                    }
                    if is_private {
                        frames.insert(pfn, bytes.iter().all(|byte| *byte == 0));
                    }
                }
            }
        }
        let mut pool = BTreeMap::new();
        for (start, end, _) in maps(worker).into_iter().filter(|(.., rest)| rest.contains("/memfd:pagefold-")) {
            let found = stat(format!("/proc/{worker}/map_files/{:x}-{:x}", start << 12, end << 12)).expect("a file");
            pool.insert((found.st_dev, found.st_ino), found.st_blocks as u64 / 8);
        }
        contents.remove(&vec![0; 4096]);
        Self {
            frames: frames.len() as u64 + pool.values().sum::<u64>(),
            contents: contents.len() as u64,
            zeros: frames.values().filter(|is_zero| **is_zero).count() as u64,
        }
    }
}

#[test]
fn account_adds_up_to_what_page_tables_say() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let words = ["stable", "--pages", "6000", "--classes", "1500", "--writes", "2000"];
    let members = ["one", "other"].map(|name| service.torture("acme", name, &[], &words));
    let pids = members.each_ref().map(|member| member.pid());
    let folded = |shown: &serde_json::Value| number(&shown["sharing_pages"]) > 6000;
    until(60, "much is folded", || folded(&service.show("acme")));
    // Broken pages are folded again while the programs go on to write. They stand still at some moment of that.
    until(60, "pages are folded again", || number(&service.show("acme")["refolds"]) > 100);
    pids.iter().for_each(|pid| signal(*pid, "STOP"));
    let worker = service.worker_pid("acme").expect("a worker");
    // The worker gives idle slots back, and hears of broken pages, until it has heard all that they said.
    let mut seen = None;
    until(60, "nothing changes while page tables are read", || {
        let frames = service.show("acme")["frames"].clone();
        let found = Places::of(&pids, &[worker]).unwrap().read().unwrap();
        let by_hand = ByHand::of(&pids, worker);
        std::thread::sleep(Duration::from_secs(1));
        let is_still = service.show("acme")["frames"] == frames;
        seen = Some((found, by_hand, frames));
        is_still
    });
    let (found, by_hand, frames) = seen.expect("a look");
    let Contents { taken, contents, zeros, alike, .. } = found;
    assert_eq!(ByHand { frames: taken.frames, contents, zeros }, by_hand);
    let slots: Vec<u64> = frames["slots_by_sharers"].as_array().expect("a list").iter().map(number).collect();
    assert_eq!(number(&frames["pool_in_use"]), slots.iter().sum::<u64>(), "{frames}");
    let by_tables = found.slots_by_sharers;
    assert_eq!(contents + zeros + alike + found.superfluous() + by_tables[0], by_hand.frames, "{found:?}");
    // A slot whose contents were asked of an agent that stands still has no frame.
    let (told, there) = (number(&frames["pool_in_use"]) + number(&frames["pool_idle"]), by_tables.iter().sum::<u64>());
    assert!((there..there + there / 30).contains(&told), "{told}, {there} by page tables: {frames}");
    // Agents stand still with pages of which they have not yet told that they are broken: some 40 of 6700 frames here.
    let in_account = slots[0] + number(&frames["pool_idle"]);
    assert!(in_account.abs_diff(by_tables[0]) * 30 <= by_hand.frames, "{in_account} of {by_tables:?}: {frames}");
    // All kinds of duplicates are there: broken and private ones.
    let broken = |class: &&Class| class.has_slot && class.pages.iter().any(|page| page.is_broken);
    assert!(found.duplicates.iter().any(|class| broken(&class)) && found.superfluous() > 20, "{found:?}");
    pids.iter().for_each(|pid| signal(*pid, "CONT"));
}
