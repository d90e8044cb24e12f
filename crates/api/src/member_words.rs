//! States of members in words: what each means, and what to do about it. `group show` and `doctor` use the same.

use crate::ask::{PoolLimit, PoolLimitBy};
use crate::control::{Fold, NO_HEADROOM, Settings};
use page::pages_to_bytes;

/// Remedy for a member whose agent has never connected.
pub const START_ITSELF: &str = "start the program itself with pagefold run, and see what it writes on stderr";

/// State of a member whose process is stopped.
pub const STOPPED: &str = "stopped";

/// State of a member that folds.
pub const FOLDING: &str = "folding";

/// States of members, with their explanations.
pub const STATES: [(&str, &str); 16] = [
    ("no_agent", "nothing of it is folded, as no agent of it is connected; what it holds already stays folded"),
    (STOPPED, "its process is stopped, and its agent with it; what is folded stays so"),
    ("nothing_enrolled", "it has advised no memory to be mergeable, and nothing else was asked for"),
    ("nothing_mapped", "all of its memory was asked for, and it has none that can be taken"),
    ("not_foldable", "nothing of the memory that it asked for can be folded"),
    ("folding", "it folds"),
    (
        "ksm",
        "the kernel's own merger (ksmd) merges it, with any process of this host that asked for that: groups do not hold there",
    ),
    ("no_room", "it folds onto slots that are there already; no new page gets one, because there is no room for more"),
    (
        NO_HEADROOM,
        "nothing more of it is folded: its control group is too near its memory limit for the memory that folding takes",
    ),
    ("off", "it was told not to fold"),
    ("unfolded", "it has made all its pages private again, as it was told"),
    ("no_move", "pages cannot be moved (UFFDIO_MOVE) on this kernel, or not by this process"),
    ("unpinned", "something may write its memory that does not pin what it writes, so nothing is folded"),
    ("yielded", "a migration or a snapshot needs the userfaultfd of its memory"),
    ("lost_track", "it changes mappings by system calls of its own, past the C library"),
    ("no_vma", "it has as many mappings, its own or by folding, as folding may bring it to (vm.max_map_count)"),
];

/// The explanation of a member's state.
pub fn meaning(state: &str) -> &'static str {
    STATES.iter().find(|s| s.0 == state).map_or("a state that this version does not know", |s| s.1)
}

/// The remedy for a member's state; `None` for a member that folds, or that ksmd merges. `slots` of the pool are in use.
pub fn remedy(state: &str, group: &str, settings: &Settings, (limit, slots): (&PoolLimit, u64)) -> Option<String> {
    Some(match state {
        "folding" | "ksm" => return None,
        "no_agent" => START_ITSELF.into(),
        "no_room" if limit.by == PoolLimitBy::MembersMemory => {
            "raise the memory limits of its members' control groups: the pool may have half of their sum".into()
        }
        "no_room" => more_room(group, u64::from(settings.pool_slots).max(slots)),
        NO_HEADROOM => "raise the memory limit of that control group, or leave it as it is: what is folded stays so".into(),
        "nothing_enrolled" => "let it call madvise(MADV_MERGEABLE) (QEMU: mem-merge=on), or start it with \
                               pagefold run --all-anonymous"
            .into(),
        "nothing_mapped" => "nothing, if it has little memory; or else start it without --all-anonymous, attach it while it \
                             runs (pagefold attach), or leave it as it is"
            .into(),
        STOPPED => "let it go on: kill -CONT, or its debugger".into(),
        "not_foldable" => "start it again without what is named, or leave this guest as it is".into(),
        "off" | "unfolded" if settings.fold != Fold::On => format!("pagefold group set {group} --fold on"),
        "no_move" => "see the reason that group show gives; use Linux 6.8 or newer; without root set vm.unprivileged_userfaultfd=1 or give access to \
                      /dev/userfaultfd; then start it again"
            .into(),
        "unpinned" => {
            "start it again without what is named, or leave this guest as it is: folding could lose what is written there".into()
        }
        "yielded" => "wait for its migration or snapshot to end".into(),
        "no_vma" => "sysctl vm.max_map_count=1048576, and wait: agents read the limit again every 10 s or so".into(),
        "lost_track" => {
            "leave it as it is: what is folded stays so and is right; or start it again without --all-anonymous".into()
        }
        _ => "look again in a moment".into(),
    })
}

/// Why pages that were to be folded were not, by the name in JSON.
pub fn failure(why: &str) -> &'static str {
    match why {
        "changed" => "pages that were written before they were folded",
        "busy" => "pages that the kernel would not move: pinned, shared after a fork, or locked just then",
        "gone" => "pages whose memory was released before it was folded",
        "no_vma" => "pages for which the member had no mappings left (vm.max_map_count)",
        "unpinned" => "pages that something might have written without pinning them",
        "no_memory" => "pages for which the host had no memory",
        "off" => "pages of members that fold nothing for the moment",
        "no_room" => "pages for which the pool had no room",
        _ => "pages, for a reason that this version does not know",
    }
}

/// The command that doubles a group's pool. `slots` is the larger of two numbers: what the pool may hold, and what it
/// holds, which can be more after the setting was lowered.
fn more_room(group: &str, slots: u64) -> String {
    let twice = pages_to_bytes(slots.saturating_mul(2));
    let size = match twice {
        n if n.is_multiple_of(1 << 30) => format!("{}G", n >> 30),
        n if n.is_multiple_of(1 << 20) => format!("{}M", n >> 20),
        n => format!("{}K", n >> 10),
    };
    format!("pagefold group set {group} --pool {size}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_state_that_an_agent_tells_is_explained() {
        for state in wire::MemberState::ALL {
            assert!(STATES.iter().any(|(name, _)| *name == state.name()), "{}", state.name());
        }
    }

    #[test]
    fn every_state_is_explained_and_has_a_remedy() {
        assert_eq!(meaning("folding"), "it folds");
        assert!(meaning("x").contains("does not know"));
        let settings = Settings { fold: Fold::Off, pool_slots: 2048, ..Settings::default() };
        for (state, _) in STATES {
            let limit = PoolLimit::of(&settings, None);
            assert_eq!(
                remedy(state, "acme", &settings, (&limit, 0)).is_none(),
                ["folding", "ksm"].contains(&state),
                "{state}"
            );
        }
        let fix = |settings: &Settings, members| {
            remedy("no_room", "acme", settings, (&PoolLimit::of(settings, members), 5)).unwrap()
        };
        let words = fix(&settings, None);
        assert_eq!(words, "pagefold group set acme --pool 16M");
        let settings = Settings { pool_slots: 3, ..settings };
        // More are in use than may be, since the setting was lowered.
        assert!(fix(&settings, None).contains("--pool 40K"));
        assert!(fix(&settings, Some(4096)).contains("raise the memory limits"));
    }
}
