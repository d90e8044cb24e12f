//! Each state has a test that causes it and ends it. A new one without such a test fails here, or does not compile.

use api::member_words::STATES;
use std::fs;
use std::path::Path;
use wire::MemberState;

/// The test that causes a state that agents tell, and ends it by its remedy: its file, and its name.
const fn of_agents(state: MemberState) -> (&'static str, &'static str) {
    match state {
        MemberState::NothingEnrolled => ("reasons/main.rs", "member_that_advised_nothing_is_folded_once_it_does"),
        MemberState::Folding | MemberState::Off | MemberState::Unfolded => {
            ("reasons/main.rs", "settings_that_stop_folding_are_named_and_undone")
        }
        MemberState::NoMove => {
            ("reasons/by_itself.rs", "program_without_userfaultfd_is_told_and_folded_when_it_is_given_access")
        }
        MemberState::Unpinned => {
            ("reasons/by_itself.rs", "program_that_lends_pages_to_a_pipe_is_named_and_folded_without")
        }
        MemberState::Yielded => {
            ("reasons/by_itself.rs", "agent_that_yields_takes_memory_back_when_the_program_is_done")
        }
        MemberState::NoVma => ("reasons/by_itself.rs", "limit_of_mappings_is_named_and_raised"),
        MemberState::LostTrack => {
            ("reasons/by_itself.rs", "program_that_changes_mappings_by_itself_is_named_and_folded_by_its_own_advice")
        }
        MemberState::NotFoldable => ("reasons/main.rs", "locked_memory_is_named_and_member_without_it_is_folded"),
        MemberState::NothingMapped => {
            ("reasons/by_itself.rs", "attached_program_without_memory_is_told_so_until_it_has_some")
        }
    }
}

/// The same of states that a service or its client tells.
fn of_others(state: &str) -> Option<(&'static str, &'static str)> {
    Some(match state {
        // `pagefold`'s `cmd/absent.rs` has a list of its reasons.
        "no_agent" => ("reasons/main.rs", "limit_of_processes_is_named_and_raised"),
        "stopped" => ("reasons/main.rs", "stopped_member_says_so_until_it_goes_on"),
        "ksm" => ("via_ksm.rs", "ksmd_merges_started_and_attached_members_until_they_are_detached"),
        "no_room" => ("reasons/main.rs", "full_pool_is_named_and_enlarged"),
        "no_headroom" => ("headroom.rs", "program_below_its_memory_limit_lives_through_storms"),
        _ => return None,
    })
}

#[test]
fn each_state_has_a_test_that_causes_it_and_ends_it() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    for (state, _) in STATES {
        let told = MemberState::ALL.into_iter().find(|told| told.name() == state);
        let test = told.map(of_agents).or_else(|| of_others(state));
        let (file, name) = test.unwrap_or_else(|| panic!("no test causes {state}, and ends it by its remedy"));
        let text = fs::read_to_string(dir.join(file)).unwrap_or_else(|e| panic!("{file}: {e}"));
        assert!(text.contains(&format!("#[test]\nfn {name}() {{")), "{state}: {file} has no test {name}");
        assert!(text.contains(&format!("\"{state}\"")), "{state} does not occur in {file}");
    }
}
