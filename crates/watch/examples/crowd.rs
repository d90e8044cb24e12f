//! Answers questions as a service with 500 members in 50 groups would, to measure what `pagefold top` takes:
//!
//! ```text
//! cargo build --workspace --examples
//! target/debug/examples/crowd DIR &
//! pagefold top --service DIR
//! ```
//!
//! Its members are those of a captured look, and their counters grow from question to question.

use anyhow::{Context, bail};
use api::ask::{self, Answer, Ask, GroupState};
use host::{Files, Seqpacket, SeqpacketListener};
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use std::time::Duration;
use watch::look::{Answers, Look};

/// Groups, and members of each.
const CROWD: (u32, u32) = (50, 10);
/// A captured look of a service with two guests.
const CAPTURED: &str = include_str!("../tests/frames/two_guests.jsonl");

/// The crowd: copies of the first captured group, and of its members.
fn crowd() -> anyhow::Result<Answers> {
    let look: Look = serde_json::from_str(CAPTURED.lines().next().context("no look")?)?;
    let captured = look.services.into_iter().next().context("no service")?;
    let state = captured.states.first().context("no group")?;
    let mut crowd = Answers { troubles: captured.troubles.clone(), ..Answers::default() };
    for group in 0..CROWD.0 {
        let name = format!("tenant-{group:02}");
        let line = captured.groups.iter().find(|line| line.name == state.name).context("no line")?;
        crowd.groups.push(ask::GroupLine { name: name.clone(), members: CROWD.1 as usize, ..line.clone() });
        let mut copy = GroupState { name: name.clone(), ..state.clone() };
        copy.report.members.clear();
        for number in 0..CROWD.1 {
            let pid = 100_000 + group * CROWD.1 + number;
            let from = &state.report.members[number as usize % state.report.members.len()];
            let mut report = from.clone();
            (report.name, report.pid) = (format!("web-{group:02}-{number}"), pid);
            (report.family, report.pids) = (report.name.clone(), vec![pid]);
            let member = captured.members.iter().find(|line| line.identity.pid == from.pid).context("no member")?;
            let mut member = member.clone();
            (member.group, member.identity.pid) = (name.clone(), pid);
            (member.identity.name, member.family) = (report.name.clone(), None);
            crowd.members.push(member);
            copy.report.members.push(report);
        }
        crowd.states.push(copy);
    }
    Ok(crowd)
}

/// Lets a group's counters grow.
fn work(state: &mut GroupState) {
    state.report.bill.worker_cpu_s += 0.01;
    state.report.bill.refolds += 50;
    for (number, member) in state.report.members.iter_mut().enumerate() {
        member.refolds += 7 * number as u64;
        member.agent_cpu_s += 0.003;
        member.folded_pages += 1;
        member.anonymous_bytes = member.anonymous_bytes.map(|bytes| bytes + 4096);
    }
}

fn answer(socket: &Seqpacket, question: Ask, crowd: &mut Answers) -> anyhow::Result<()> {
    let mut answers: Vec<Answer> = match question {
        Ask::Groups => crowd.groups.iter().cloned().map(Answer::Group).collect(),
        Ask::Members => crowd.members.iter().cloned().map(Answer::Member).collect(),
        Ask::Troubles => crowd.troubles.iter().cloned().map(Answer::Trouble).collect(),
        Ask::Show { group } => {
            let state = crowd.states.iter_mut().find(|state| state.name == group).context("no such group")?;
            work(state);
            vec![Answer::Report(Box::new(state.clone()))]
        }
        other => bail!("{other:?} is not answered"),
    };
    if !matches!(answers.first(), Some(Answer::Report(_))) {
        answers.push(Answer::Done);
    }
    for answer in &answers {
        while !socket.send(&ask::encode(answer), &[])? {
            std::thread::sleep(Duration::from_micros(100));
        }
    }
    Ok(())
}

fn main() -> anyhow::Result<()> {
    let dir = PathBuf::from(std::env::args_os().nth(1).context("which directory?")?);
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&dir)?;
    let listener = SeqpacketListener::bind(&dir.join("control.sock"), Files::Refused)?;
    let mut crowd = crowd()?;
    loop {
        let Some(socket) = listener.accept()? else {
            std::thread::sleep(Duration::from_millis(1));
            continue;
        };
        let mut buffer = Vec::new();
        // Until the client hangs up.
        while let Ok(question) = ask::receive::<Ask>(&socket, &mut buffer) {
            match question {
                Some(question) => answer(&socket, question, &mut crowd)?,
                None => std::thread::sleep(Duration::from_micros(200)),
            }
        }
    }
}
