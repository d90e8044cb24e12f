//! Output of `pagefold doctor`: each check with a mark, its finding, its purpose, and a remedy.

use crate::table::wrap;
use cli::printable;
use host::{Applies, Check, KernelFault, Status};
use std::io::{self, Write};

/// Greatest length of a line, in characters.
const COLUMNS: usize = 100;
/// Width of the mark with the blanks around it, in characters.
const MARK_COLUMNS: usize = 8;
/// Topics of the checks: prefixes of their ids, with headings, in the order of output.
const TOPICS: [(&str, &str); 6] = [
    ("kernel", "What the kernel can do"),
    ("rights", "What it lets you do"),
    ("memory", "How memory is set up"),
    ("host", "What else is there"),
    ("guest", "Whether guests could be merged"),
    ("member", "Whether Pagefold folds them"),
];

/// Writes `checks` to `out`, and the faults of the kernel that apply or may apply.
pub fn write(out: &mut dyn Write, checks: &[Check], faults: &[KernelFault]) -> io::Result<()> {
    for (topic, title) in TOPICS {
        let of_topic: Vec<&Check> = checks.iter().filter(|c| split_id(c).0 == topic).collect();
        let Some(name_columns) = of_topic.iter().map(|c| split_id(c).1.chars().count()).max() else { continue };
        writeln!(out, "{title}")?;
        for check in of_topic {
            item(out, check, name_columns.min(30))?;
        }
        writeln!(out)?;
    }
    write_faults(out, faults)?;
    let count = |status| checks.iter().filter(|c| c.status == status).count();
    let [ok, warn, fail] = [Status::Ok, Status::Warn, Status::Fail].map(count);
    let is_bound = checks.iter().any(|check| check.id == "rights:page_frames" && check.status != Status::Ok);
    let whose = if is_bound { ", as far as this user may look: root sees the rest" } else { "" };
    writeln!(out, "{ok} ok, {warn} could be better, {fail} missing{whose}")
}

/// Writes the faults that apply or may apply. They are no checks: Pagefold avoids them, so nobody has to act on them.
fn write_faults(out: &mut dyn Write, faults: &[KernelFault]) -> io::Result<()> {
    let apply: Vec<_> = faults.iter().filter(|fault| fault.applies != Applies::No).collect();
    if apply.is_empty() {
        return Ok(());
    }
    writeln!(out, "Faults of this kernel that Pagefold avoids")?;
    let name_columns = apply.iter().map(|fault| fault.id.len()).max().unwrap_or_default();
    for fault in apply {
        let word = if fault.applies == Applies::Yes { "has" } else { "may" };
        let indent = MARK_COLUMNS + name_columns + 2;
        let text = wrap(fault.effect, COLUMNS - indent) + &wrap(&format!("-> {}", fault.avoided_by), COLUMNS - indent);
        for (n, line) in text.lines().enumerate() {
            match n {
                0 => writeln!(out, "  {word:<5} {:<name_columns$}  {line}", fault.id)?,
                _ => writeln!(out, "{:indent$}{line}", "")?,
            }
        }
    }
    writeln!(out)
}

fn item(out: &mut dyn Write, check: &Check, name_columns: usize) -> io::Result<()> {
    let mark = match check.status {
        Status::Ok => "ok",
        Status::Warn => "warn",
        Status::Fail => "FAIL",
    };
    let indent = MARK_COLUMNS + name_columns + 2;
    let mut text = wrap(&printable(&check.found), COLUMNS - indent);
    // For guests, the heading tells the purpose of all checks.
    if !matches!(split_id(check).0, "guest" | "member") {
        text += &wrap(&format!("for {}", printable(&check.needed_for)), COLUMNS - indent);
    }
    if let Some(fix) = &check.fix {
        text += &wrap(&format!("-> {}", printable(fix)), COLUMNS - indent);
    }
    if let Some(fix) = &check.fix_for_good {
        text += &wrap(&format!("   for good: {}", printable(fix)), COLUMNS - indent);
    }
    let name = printable(split_id(check).1);
    for (n, line) in text.lines().enumerate() {
        match n {
            0 => writeln!(out, "  {mark:<5} {name:<name_columns$}  {line}")?,
            _ => writeln!(out, "{:indent$}{line}", "")?,
        }
    }
    Ok(())
}

/// The topic and the name of a check. A guest has two checks, whether its memory can be merged and whether Pagefold
/// folds it, each with a topic of its own.
fn split_id(check: &Check) -> (&str, &str) {
    let (topic, name) = check.id.split_once(':').unwrap_or(("host", &check.id));
    if let Some(name) = name.strip_suffix(":folding").filter(|_| topic == "guest") {
        return ("member", name);
    }
    (topic, name.strip_suffix(":mergeable").unwrap_or(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_has_topics_marks_and_fixes() {
        let checks = [
            Check::ok("guest:qemu:a\u{1b}1:mergeable", "no: its RAM is shared memory", "merging its memory")
                .warn("start it with share=off"),
            Check::ok("kernel:uffdio_move", "missing", "folding").fail("use Linux 6.8"),
            Check::ok("kernel:wp_async", "works", "folding"),
        ];
        let mut out = Vec::new();
        let faults = [host::kernel_faults("6.12.5"), host::kernel_faults("6.7.0")].concat();
        let faults: Vec<_> = faults.into_iter().filter(|fault| fault.id == "move_swap_cache").collect();
        write(&mut out, &checks, &faults).unwrap();
        assert_eq!(
            String::from_utf8(out).unwrap(),
            "\
What the kernel can do
  FAIL  uffdio_move  missing
                     for folding
                     -> use Linux 6.8
  ok    wp_async     works
                     for folding

Whether guests could be merged
  warn  qemu:a?1  no: its RAM is shared memory
                  -> start it with share=off

Faults of this kernel that Pagefold avoids
  has   move_swap_cache  CVE-2025-21984: a page is moved that is just being swapped out or in; the
                         kernel stops (BUG)
                         -> nothing is folded on such a kernel while the host has swap

1 ok, 1 could be better, 1 missing
"
        );
    }

    #[test]
    fn lines_keep_within_their_columns_whatever_the_name() {
        let check = Check::ok(format!("guest:qemu:{}:mergeable", "x".repeat(80)), "y ".repeat(200), "z").warn("w");
        let mut out = Vec::new();
        write(&mut out, &[check], &[]).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert!(text.lines().skip(2).all(|l| l.chars().count() <= COLUMNS), "{text}");
    }
}
