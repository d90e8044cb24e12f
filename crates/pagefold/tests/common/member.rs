//! Programs whose output is kept and which end with the test, and what `group show` says of members.

use super::number;
use super::service::until;
use serde_json::Value;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A running program. Dropping it ends it.
pub struct Member {
    pub name: String,
    child: Child,
    input: Option<ChildStdin>,
    lines: Arc<Mutex<Vec<String>>>,
    reader: JoinHandle<()>,
    errors: PathBuf,
}

impl Member {
    /// Starts a program with its output kept.
    pub fn spawn(mut command: Command, name: &str, dir: &Path) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let errors = dir.join(format!("{name}-{}.err", NUMBER.fetch_add(1, Ordering::Relaxed)));
        let file = File::create(&errors).expect("make a file");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(file);
        let mut child = command.spawn().expect("start a member");
        let (input, output) = (child.stdin.take(), child.stdout.take().expect("a pipe"));
        let lines = Arc::new(Mutex::new(Vec::new()));
        let kept = Arc::clone(&lines);
        let reader = std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                kept.lock().unwrap_or_else(PoisonError::into_inner).push(line);
            }
        });
        Self { name: name.to_owned(), child, input, lines, reader, errors }
    }

    /// Waits until all of its output is read, for which the reading thread may take a moment after its end. Children that it
    /// left behind may keep the pipe, so this takes a while at most.
    pub fn until_all_is_read(&self) {
        let end = Instant::now() + Duration::from_secs(10);
        while !self.reader.is_finished() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// `pagefold run` executes the program, so this is the program's own process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Lines of its standard output up to this moment.
    pub fn lines(&self) -> Vec<String> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Its standard error.
    pub fn errors(&self) -> String {
        fs::read_to_string(&self.errors).unwrap_or_default()
    }

    /// Asserts that it still runs. A program that finds an error ends.
    pub fn assert_is_well(&mut self) {
        if let Some(status) = self.child.try_wait().expect("ask for its state") {
            panic!("{} ended with {status}: {}", self.name, self.errors());
        }
    }

    /// Waits for its end, asserts that it succeeded, and returns its last line.
    pub fn finish(&mut self, seconds: u64) -> Value {
        let status = self.end(seconds);
        assert!(status.success(), "{} ended with {status}: {}", self.name, self.errors());
        // The reading thread may lag behind for a moment, and an earlier line is none to judge.
        self.until_all_is_read();
        let last = || self.lines().last().and_then(|line| serde_json::from_str(line).ok());
        until(5, "its last line", || last().is_some());
        last().unwrap_or_default()
    }

    /// Its exit status, if it has ended.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("ask for its state")
    }

    /// Waits for its end, and returns its exit status.
    pub fn end(&mut self, seconds: u64) -> ExitStatus {
        let end = Instant::now() + Duration::from_secs(seconds);
        loop {
            if let Some(status) = self.child.try_wait().expect("ask for its state") {
                return status;
            }
            assert!(Instant::now() < end, "{} still runs after {seconds} s: {}", self.name, self.stacks());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Kernel stacks of its threads, to explain why it hangs.
    pub fn stacks(&self) -> String {
        let mut text = String::new();
        for thread in fs::read_dir(format!("/proc/{}/task", self.pid())).into_iter().flatten().flatten() {
            for file in ["comm", "wchan", "syscall", "stack"] {
                let mut part = String::new();
                let _ = File::open(thread.path().join(file)).and_then(|mut f| f.read_to_string(&mut part));
                text.push_str(&format!("{} ", part.trim().replace('\n', " ")));
            }
            text.push('\n');
        }
        text
    }

    /// Ends its input.
    pub fn close_input(&mut self) {
        self.input = None;
    }

    /// Writes a line to its input and waits for its answer.
    pub fn tell(&mut self, line: &str) -> String {
        let before = self.lines().len();
        writeln!(self.input.as_mut().expect("a pipe"), "{line}").expect("tell a member");
        until(60, &format!("an answer to {line}"), || {
            self.assert_is_well();
            self.lines().len() > before
        });
        self.lines()[before].clone()
    }

    /// `kill -9`.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!(
                "--- {} said\n{:?}\n{}---",
                self.name,
                self.lines().iter().rev().take(5).collect::<Vec<_>>(),
                self.errors()
            );
        }
        self.kill();
    }
}

/// One member in the output of `group show`.
pub fn member<'a>(shown: &'a Value, name: &str) -> &'a Value {
    find_member(shown, name).unwrap_or_else(|| panic!("no {name} in {shown}"))
}

/// One member in the output of `group show`, if it has been admitted.
pub fn find_member<'a>(shown: &'a Value, name: &str) -> Option<&'a Value> {
    let members = shown["members"].as_array().unwrap_or_else(|| panic!("no members in {shown}"));
    members.iter().find(|m| m["name"] == name)
}

/// Folded pages of a member; 0 if it has not been admitted.
pub fn folded_pages(shown: &Value, name: &str) -> u64 {
    find_member(shown, name).map_or(0, |member| number(&member["folded_pages"]))
}

/// Pages whose fold failed, by the group's own counters.
pub fn failures(shown: &Value) -> u64 {
    shown["fold_failures"].as_object().map_or(0, |reasons| reasons.values().map(number).sum())
}
