//! The tables of `pagefold census`, as a reader sees them.

use super::sample;

use census::{Findings, FrameIdentity};
use report::census_table;

fn render(findings: &Findings) -> String {
    let mut out = Vec::new();
    census_table::write(&mut out, findings).unwrap();
    String::from_utf8(out).unwrap()
}

/// Word for word; where a change is meant, copy the new text over the old.
#[test]
fn a_census_reads_as_it_should() {
    let text = render(&sample::with_change_and_partial(sample::findings(2)));
    assert_eq!(text, include_str!("census_table.txt"), "it reads now:\n{text}");
}

#[test]
fn nothing_found_is_said_in_words() {
    let text = render(&Findings::default());
    assert!(text.starts_with("0 guests, 0 pages in 0.00 s"));
    assert!(text.contains("there is nothing to merge"));
    assert!(!text.contains("NaN") && !text.contains("partial"), "{text}");
}

#[test]
fn isolation_that_costs_nothing_is_said_so() {
    let mut findings = sample::findings(2);
    findings.isolation_price_pages = 0;
    assert!(render(&findings).contains("Keeping the groups apart costs nothing: all of the 323 MiB"));
}

#[test]
fn inferred_frames_and_several_passes_are_told() {
    let mut findings = sample::findings(2);
    findings.host.frames = FrameIdentity::Inferred;
    findings.host.passes = 3;
    let text = render(&findings);
    assert!(text.contains("The kernel hid the frame numbers"));
    assert!(text.contains("3 passes over the hash space, index 5.3 MiB; 12 pages changed between passes."), "{text}");
}

#[test]
fn what_ksm_holds_is_told_where_it_holds_something() {
    let mut findings = sample::findings(2);
    findings.already_shared.ksm_frames = 1;
    findings.already_shared.ksm_saved_pages = 512;
    let text = render(&findings).replace('\n', " ");
    assert!(text.contains("; 1 frame merged by KSM, which saves 2.0 MiB."), "{text}");
}

/// Long names, a terabyte and a hostile name leave every line but those of what was not read within 100
/// columns, and nothing for the terminal to obey.
#[test]
fn it_keeps_within_a_hundred_columns() {
    let mut findings = sample::findings(2);
    for guest in &mut findings.guests {
        guest.name = "k8s_\u{1b}[31mreally-long-name-of-a-container-in-a-pod-0123456789abcdef".into();
        guest.group = "a-tenant-with-a-name-of-some-length".into();
        guest.resident_pages = 1 << 27;
        guest.incremental_pages = 1 << 27;
    }
    findings.groups[0].name = "a-tenant-with-a-name-of-some-length-and-then-some-more-and-more".into();
    let text = render(&sample::with_change_and_partial(findings));
    assert!(!text.contains('\u{1b}'));
    for line in text.lines().filter(|line| !line.starts_with("  ")) {
        assert!(line.chars().count() <= 100, "{line}");
    }
}
