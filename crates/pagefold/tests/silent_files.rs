//! Files whose server answers when they are opened, and never again. A process that asks about such a file, or closes
//! it, waits for ever. That is the program's own business, and nothing that an agent may add.

mod common;

use common::number;
use common::service::{Member, Service, cannot_fold, find_member, torture, until};
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

/// A server of one such file, `/mnt/file` in a mount namespace of its own. Dropping it ends it, and answers everybody
/// who waits.
struct Server(Child);

impl Server {
    fn start(service: &Service) -> Self {
        let (variable, token) = service.mark();
        let program = PathBuf::from(env!("CARGO_BIN_EXE_pagefold")).with_file_name("fake_agent");
        let mut command = Command::new(program);
        command.arg("--serve-file-silently").env(variable, token).stdout(Stdio::piped());
        let mut child = command.spawn().expect("start fake_agent");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("a pipe")).read_line(&mut line).expect("hear from it");
        assert_eq!(line, "mounted\n");
        Self(child)
    }

    /// Starts a member that has the file, too.
    fn run(&self, service: &Service, name: &str) -> Member {
        let (variable, token) = service.mark();
        let mut command = Command::new("nsenter");
        command.arg(format!("--mount=/proc/{}/ns/mnt", self.0.id())).arg(env!("CARGO_BIN_EXE_pagefold"));
        command.args(["run", "--group", &service.group("acme"), "--name", name]);
        command.arg("--service").arg(service.place()).args(["--", &torture(), "refs"]);
        command.env(variable, token).env("PAGEFOLD_EAGER", "1");
        Member::spawn(command, name, &service.place())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn member_does_not_wait_for_file_that_it_opens() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    // Ends after the server: before, it might wait for it.
    let mut member: Member;
    let server = Server::start(&service);
    member = server.run(&service, "one");
    assert_eq!(member.tell("fill 2000"), "ok");
    service.show("acme");
    service.set("acme", &["--scan-rate", "400000"]);
    until(60, "it folds", || number(&service.show("acme")["sharing_pages"]) > 1000);
    assert_eq!(member.tell("read /mnt/file"), "ok");
    // The agent does not wait for it either: it says why it folds nothing, and still does what it is asked.
    until(60, "it is not folded", || {
        find_member(&service.show("acme"), "one").is_some_and(|shown| {
            shown["state"] == "unpinned"
                && shown["detail"].as_str().is_some_and(|why| why.contains("/mnt/file on fuse"))
        })
    });
    service.set("acme", &["--fold", "unfold"]);
    until(60, "it unfolds", || member.tell("folded") == "0");
    assert_eq!(member.tell("check"), "ok");
}
