//! Stands in for the worker until it is there.

use fold::control::{GroupReport, Identity, MemberReport, News, Order};
use host::{Received, Seqpacket, SeqpacketListener};
use std::time::Duration;

pub fn run(listener: SeqpacketListener, _group: &str, _supervisor_uid: u32) -> anyhow::Result<()> {
    let mut supervisor: Option<Seqpacket> = None;
    let mut members: Vec<(Identity, std::os::fd::OwnedFd)> = Vec::new();
    let mut begun = false;
    let mut buffer = vec![0; fold::control::CONTROL_BYTES];
    loop {
        if let Some(next) = listener.accept()? {
            let news =
                News::Adopted { members: members.iter().map(|m| m.0.clone()).collect(), segments: vec![], begun };
            next.send(&serde_json::to_vec(&news)?, &[])?;
            supervisor = Some(next);
        }
        if let Some(s) = &supervisor {
            let mut files = Vec::new();
            match s.receive(&mut buffer, &mut files) {
                Ok(Received::Frame(n)) => match serde_json::from_slice(&buffer[..n])? {
                    Order::Take { .. } => begun = true,
                    Order::Admit(identity) => members.extend(files.pop().map(|f| (identity, f))),
                    Order::Set(_) => {}
                    Order::Report => {
                        let members = members
                            .iter()
                            .map(|m| MemberReport {
                                name: m.0.name.clone(),
                                pid: m.0.pid,
                                connected: true,
                                state: "folding".into(),
                                ..MemberReport::default()
                            })
                            .collect();
                        let report = GroupReport { members, ..GroupReport::default() };
                        s.send(&serde_json::to_vec(&News::Report(Box::new(report)))?, &[])?;
                    }
                },
                Ok(Received::Nothing) => {}
                _ => supervisor = None,
            }
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}
