//! Two guests with balloons, and `pagefold balance` for them alone.

use crate::common;
use crate::common::lab::{Lab, name};
use crate::common::{json_of, number};
use guest::Qmp;
use serde_json::{Value, json};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

pub const M: u64 = 1 << 20;
/// RAM of each guest: 192 MiB.
pub const RAM: u64 = 192 * M;
/// Guaranteed size of each guest: 112 MiB.
pub const KEPT: u64 = 112 * M;

/// Two guests with balloons, and a ledger of their own.
pub struct Guests {
    pub lab: Lab,
    /// Their group, by which they differ from all others of the host.
    pub group: String,
    pub listed: Vec<Value>,
}

impl Guests {
    pub fn start(group: &str) -> Option<Self> {
        Self::with(group, "virtio-balloon-pci")
    }

    pub fn with(group: &str, balloon: &str) -> Option<Self> {
        Self::many(2, group, balloon)
    }

    /// Like [`Self::with`], with more guests.
    pub fn many(count: usize, group: &str, balloon: &str) -> Option<Self> {
        let lab = Lab::new(&[]);
        let group = format!("{group}{}", common::world());
        let memory = format!("{}M", RAM / M);
        let up =
            ["--image", "tiny", "--guests", &count.to_string(), "--groups", &group, "--memory", &memory, "--saved"];
        let balloon = ["--qemu-arg", "-device", "--qemu-arg", balloon];
        let listed = lab.up(&[&up[..], &balloon].concat())?;
        Some(Self { lab, group, listed })
    }

    /// `pagefold balance` for these guests alone.
    pub fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pagefold"));
        let ledger = self.lab.dir().join("ledger");
        command.args(["balance", "--guest", &format!("{}-*", self.group)]).args(words).arg("--service").arg(ledger);
        command.args(["--json", "--guaranteed", &format!("{}-*={KEPT}", self.group), "--policy", "equal"]);
        command
    }

    pub fn run(&self, words: &[&str]) -> Output {
        self.command(words).output().expect("run pagefold balance")
    }

    pub fn status(&self) -> Value {
        json_of(&self.run(&["status"]))
    }

    /// Their sizes, as QEMU has them.
    pub fn sizes(&self) -> Vec<u64> {
        let size = |n| number(&self.qmp(n, "query-balloon", json!({}))["actual"]);
        (0..self.listed.len()).map(size).collect()
    }

    pub fn names(&self) -> Vec<String> {
        self.listed.iter().map(name).collect()
    }

    pub fn qmp(&self, n: usize, command: &str, arguments: Value) -> Value {
        let socket = self.listed[n]["qmp"].as_str().expect("a socket");
        let mut qmp = Qmp::connect(Path::new(socket), Duration::from_secs(10)).expect("QEMU answers");
        qmp.execute(command, arguments).expect("QEMU does it")
    }

    /// Lines of the journal about balancing. They are all whole.
    pub fn journal(&self) -> Vec<Value> {
        let text = std::fs::read_to_string(self.lab.dir().join("ledger/journal/journal")).unwrap_or_default();
        let lines = text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}")));
        lines.filter(|line: &Value| line["what"] == "balance").collect()
    }

    /// Entries of one kind in the journal.
    pub fn entries(&self, kind: &str) -> Vec<Value> {
        self.journal().into_iter().filter(|line| line["entry"] == kind).collect()
    }

    /// Runs `apply` again and again. The host is taken to be short of memory, and not to run out of it: more than half of the floor is
    /// available.
    pub fn keep_withdrawing(&self) -> Applying {
        self.keep_withdrawing_with(&[])
    }

    /// Like [`Self::keep_withdrawing`], with the balancer's clock four times as fast as the host's.
    pub fn keep_withdrawing_in_a_hurry(&self) -> Applying {
        self.keep_withdrawing_with(&["--hurry", "4"])
    }

    fn keep_withdrawing_with(&self, words: &[&str]) -> Applying {
        let floor = (host::available_bytes().expect("the kernel tells") / 4 * 5).to_string();
        let mut command = self.command(&[&["apply", "--every", "1", "--floor", &floor], words].concat());
        Applying(command.stdout(Stdio::piped()).spawn().expect("run pagefold balance"))
    }
}

/// A running `apply --every`. Dropping it kills it.
pub struct Applying(pub Child);

impl Drop for Applying {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub fn guests(answer: &Value) -> &Vec<Value> {
    answer["facts"]["guests"].as_array().expect("a list of guests")
}
