//! Tests without files. Those with files that are opened for real are those of the hooks (`preload`).

use super::*;

#[test]
fn tables_are_unknown_where_proc_is_of_another_namespace() {
    const INSIDE: &str = "PAGEFOLD_TEST_INSIDE";
    if std::env::var_os(INSIDE).is_some() {
        return assert!(tables::all().is_none());
    }
    assert!(tables::all().is_some());
    if !rustix::process::geteuid().is_root() {
        return eprintln!("skipped: only root can make a PID namespace");
    }
    let name = "references::tests::tables_are_unknown_where_proc_is_of_another_namespace";
    let mut command = std::process::Command::new("unshare");
    command.args(["--pid", "--fork"]).arg(std::env::current_exe().unwrap()).args(["--exact", name]);
    let inside = command.env(INSIDE, "1").output().unwrap();
    assert!(inside.status.success() && String::from_utf8_lossy(&inside.stdout).contains("1 passed"), "{inside:?}");
}

#[test]
fn finding_that_holds_for_ever_is_never_replaced() {
    let reason = |text: &str| Reason(text.to_owned());
    let mut seen = None;
    let mut survey = |found: Option<(&str, Holds)>| {
        let found = found.map(|(text, holds)| (reason(text), holds));
        take_in(&mut seen, found).err().map_or_else(String::new, |reason| reason.to_string())
    };
    assert_eq!(survey(Some(("unseen", Holds::Once))), "unseen");
    assert_eq!(survey(None), "", "nothing was found, and the next survey could look");
    assert_eq!(survey(Some(("open", Holds::While))), "open");
    assert_eq!(survey(None), "open", "a read of it may be under way");
    assert_eq!(survey(Some(("direct", Holds::ForEver))), "direct");
    for found in [None, Some(("open", Holds::While)), Some(("unseen", Holds::Once))] {
        assert_eq!(survey(found), "direct");
    }
}
