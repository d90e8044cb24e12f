//! A lab of a test's own, used by the command line as users do.

use super::{json_of, number};
use serde_json::Value;
use std::process::{Command, Output, Stdio};

/// A lab. Dropping it ends its guests.
pub struct Lab {
    dir: tempfile::TempDir,
    env: Vec<(String, String)>,
}

impl Lab {
    /// A lab that adds `env` to the environment of everything it starts.
    pub fn new(env: &[(&str, &str)]) -> Self {
        let dir = tempfile::Builder::new().prefix("testlab").tempdir_in("/tmp").expect("a temporary directory");
        Self { dir, env: env.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect() }
    }

    /// A directory of this lab's own.
    pub fn dir(&self) -> &std::path::Path {
        self.dir.path()
    }

    /// `pagefold lab` with these arguments.
    pub fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pagefold"));
        command.arg("lab").args(words).env("PAGEFOLD_LAB_DIR", self.dir.path().join("lab"));
        command.envs(self.env.iter().map(|(name, value)| (name, value)));
        command
    }

    pub fn run(&self, words: &[&str]) -> Output {
        self.command(words).output().expect("run pagefold lab")
    }

    /// Brings guests up, and lists them; `None`, with the reason printed, if the host lacks something.
    pub fn up(&self, words: &[&str]) -> Option<Vec<Value>> {
        let output = self.run(&[&["up", "--json"], words].concat());
        if output.status.code() == Some(3) {
            eprintln!("skipped: {}", String::from_utf8_lossy(&output.stderr));
            return None;
        }
        Some(list(&output))
    }

    /// The lab's guests, as `lab list` prints them.
    pub fn guests(&self) -> Vec<Value> {
        list(&self.run(&["list", "--json"]))
    }

    /// Path of the mapping file of groups.
    pub fn groups(&self) -> String {
        self.dir.path().join("lab/groups.toml").to_str().expect("a plain path").to_owned()
    }

    /// Runs a shell script in all guests at once, and returns what each printed.
    pub fn everywhere(&self, guests: &[String], script: &str) -> Vec<String> {
        let start = |guest: &String| {
            let mut command = self.command(&["exec", "--guest", guest, "--timeout", "480", "--", "sh", "-c", script]);
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("run pagefold lab exec")
        };
        let running: Vec<_> = guests.iter().map(start).collect();
        let wait = |(guest, child): (&String, std::process::Child)| {
            let output = child.wait_with_output().expect("wait for a command");
            let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
            let errors = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{guest}: {script}: {text} {errors}");
            text
        };
        guests.iter().zip(running).map(wait).collect()
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        self.run(&["down"]);
    }
}

fn list(output: &Output) -> Vec<Value> {
    let guests = json_of(output);
    guests["guests"].as_array().or(guests.as_array()).expect("a list of guests").clone()
}

/// Name of a guest.
pub fn name(guest: &Value) -> String {
    guest["name"].as_str().expect("a name").to_owned()
}

/// Pid of a guest.
pub fn pid(guest: &Value) -> u32 {
    number(&guest["pid"]) as u32
}
