//! Tables of `pagefold census`, as a reader sees them.

use super::sample;

use census::{Findings, FrameIdentity};
use report::census_table;

fn render(findings: &Findings) -> String {
    let mut out = Vec::new();
    census_table::write(&mut out, findings).unwrap();
    String::from_utf8(out).unwrap()
}

/// Compared word for word. After an intended change, copy the new text over the old.
#[test]
fn census_equals_expected_text() {
    let text = render(&sample::with_change_and_partial(sample::findings(2)));
    assert_eq!(text, include_str!("census_table.txt"), "it reads now:\n{text}");
}

#[test]
fn empty_census_is_described() {
    let text = render(&Findings::default());
    assert!(text.starts_with("0 guests, 0 pages in 0.00 s"));
    assert!(text.contains("there is nothing to merge"));
    assert!(!text.contains("NaN") && !text.contains("partial"), "{text}");
}

#[test]
fn free_isolation_is_mentioned() {
    let mut findings = sample::findings(2);
    findings.isolation_price_pages = 0;
    assert!(render(&findings).contains("Keeping the groups apart costs nothing: all of the 323 MiB"));
}

#[test]
fn inferred_frames_and_several_passes_are_mentioned() {
    let mut findings = sample::findings(2);
    findings.host.frames = FrameIdentity::Inferred;
    findings.host.passes = 3;
    let text = render(&findings);
    assert!(text.contains("The kernel hid the frame numbers"));
    assert!(text.contains("3 passes over the hash space, index 5.3 MiB; 12 pages changed between passes."), "{text}");
}

#[test]
fn ksm_pages_are_mentioned_if_there_are_any() {
    let mut findings = sample::findings(2);
    findings.already_shared.ksm_frames = 1;
    findings.already_shared.ksm_saved_pages = 512;
    let text = render(&findings).replace('\n', " ");
    assert!(text.contains("; 1 frame merged by KSM, which saves 2.0 MiB."), "{text}");
}

/// Even with long names, a terabyte and a hostile name, lines keep within 100 columns and contain nothing that steers
/// the terminal. Only lines about parts that could not be read may be longer.
#[test]
fn lines_keep_within_100_columns() {
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
