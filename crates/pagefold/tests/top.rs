//! `pagefold top` on a service whose member folds: as JSON, as text, and in a terminal.

mod common;

use common::formats::assert_documented;
use common::service::{Service, cannot_fold, find_member, folded_pages, until};
use common::{json_of, number};
use serde_json::Value;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};

/// `pagefold top` in a terminal that `script` makes; it ends with the test.
struct Terminal {
    child: Child,
    keys: ChildStdin,
    shown: PathBuf,
}

impl Terminal {
    fn start(service: &Service) -> Self {
        let shown = service.place().join("shown");
        let place = service.place();
        let top = format!(
            "stty rows 24 cols 80; exec {} top --interval 0.5 --service {}",
            env!("CARGO_BIN_EXE_pagefold"),
            place.display()
        );
        let mut command = Command::new("script");
        command.args(["--quiet", "--flush", "--return", "--command", &top]).arg(&shown);
        let (variable, token) = service.mark();
        command.env(variable, token).env("TERM", "xterm");
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().expect("run script");
        let keys = child.stdin.take().expect("a pipe");
        Self { child, keys, shown }
    }

    /// Everything that was written to the terminal.
    fn written(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.shown).unwrap_or_default()).into_owned()
    }

    fn until_shown(&self, words: &str) {
        until(60, &format!("{words:?} is shown"), || screen(&self.written()).contains(words));
    }

    fn press(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).and_then(|()| self.keys.flush()).expect("press keys");
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        _ = self.child.kill();
        _ = self.child.wait();
    }
}

/// The screen after all of this was written to it. Only cells that change are written, with moves of the cursor in between.
fn screen(written: &str) -> String {
    let (mut cells, mut at) = (vec![vec![' '; 80]; 24], (0, 0));
    let mut parts = written.split('\u{1b}');
    parts.next();
    for part in parts {
        // A sequence begins with a bracket, and ends with a letter.
        let end = part.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(0);
        let (sequence, text) = part.split_at((end + 1).min(part.len()));
        let numbers = sequence.trim_start_matches('[').trim_end_matches(|c: char| c.is_ascii_alphabetic());
        match sequence.chars().last() {
            Some('H') => {
                let mut place = numbers.split(';').map(|n| n.parse::<usize>().unwrap_or(1) - 1);
                at = (place.next().unwrap_or(0), place.next().unwrap_or(0));
            }
            Some('J' | 'h') => cells.iter_mut().for_each(|line| line.fill(' ')),
            _ => {}
        }
        for c in text.chars() {
            if let Some(cell) = cells.get_mut(at.0).and_then(|line| line.get_mut(at.1)) {
                *cell = c;
            }
            at.1 += 1;
        }
    }
    cells.iter().map(|line| line.iter().collect::<String>() + "\n").collect()
}

/// The row of a list that has this value.
fn row<'a>(rows: &'a Value, field: &str, value: &str) -> &'a Value {
    rows.as_array().unwrap().iter().find(|row| row[field] == value).unwrap_or_else(|| panic!("no {value} in {rows}"))
}

#[test]
fn member_is_watched_and_its_group_changed_after_a_confirmation() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let program = PathBuf::from(env!("CARGO_BIN_EXE_pagefold")).with_file_name("known_pages");
    let mut a = service.run("acme", "a", &[], &[program.to_str().expect("a plain path")]);
    ["alloc x 3000", "same x 0 2000 1", "zero x 2000 500", "fill x 2500 500 9", "mergeable x"]
        .iter()
        .for_each(|line| _ = a.tell(line));
    until(60, "all is folded", || folded_pages(&service.show("acme"), "a") == 2000);
    let shown = service.show("acme");
    let own = number(&find_member(&shown, "a").expect("it is listed")["anonymous_bytes"]);
    // 500 pages are its own, beside those of program and agent.
    assert!((500 << 12..3000 << 12).contains(&own), "{shown}");

    let top = json_of(&service.pagefold(&["top", "--once", "--json", "--interval", "0.5"]));
    assert_documented(&["pagefold top --json", "group show --json"], &top);
    let (group, name) = (row(&top["groups"], "group", &service.group("acme")), row(&top["members"], "member", "a"));
    assert_eq!((number(&name["folded_bytes"]), &name["state"]), (2000 << 12, &"folding".into()), "{name}");
    assert!(group["cpu_percent"].is_number() && top["interval_s"].as_f64().unwrap() >= 0.5, "{top}");
    let text = service.pagefold(&["top", "--once", "--interval", "0"]);
    let text = String::from_utf8(text.stdout).unwrap();
    assert!(text.contains("UNIQUE") && text.contains(&service.group("acme")) && !text.contains('\u{1b}'), "{text}");

    let mut terminal = Terminal::start(&service);
    terminal.until_shown("BROKEN/S");
    terminal.press("\r");
    terminal.until_shown("Members of");
    // Not confirmed, and then confirmed.
    terminal.press("r1234\rn");
    terminal.until_shown("nothing was changed");
    assert_eq!(service.show("acme")["settings"]["scan_rate"], "auto");
    terminal.press("r1234\ry");
    until(60, "the rate has changed", || service.show("acme")["settings"]["scan_rate"] == 1234);
    terminal.until_shown("is changed");
    terminal.press("q");
    let ended = terminal.child.wait().expect("wait for script");
    let written = terminal.written();
    assert!(ended.success() && written.contains("\u{1b}[?1049l"), "{ended}: {written:?}");
}
