//! Guests with real balloons whose roots lie to the service's balancer, at the least priority.

use crate::common::lab::{Lab, pid};
use crate::common::lies::{self, LIARS};
use crate::common::number;
use crate::common::service::Service;
use serde_json::Value;
use std::process::Command;

/// RAM, and what the service's configuration promises: see `CONFIG`.
const RAM: &str = "192M";
const GUARANTEED: u64 = 112 << 20;

/// Guests at work. Dropping them ends them.
pub struct Guests(Lab);

impl Guests {
    /// Two guests that run these scripts. `None`, with the reason printed, where this host lacks something.
    pub fn begin(service: &Service, scripts: [&str; LIARS]) -> Option<Self> {
        let lab = Lab::new(&[service.mark()]);
        let (count, group) = (LIARS.to_string(), service.group("vm"));
        let up = ["--image", "tiny", "--guests", &count, "--groups", &group, "--memory", RAM, "--saved"];
        let listed = lab.up(&[&up[..], &["--qemu-arg", "-device", "--qemu-arg", "virtio-balloon-pci"]].concat())?;
        lies::begin(&lab, &listed, &scripts);
        for guest in &listed {
            let pid = pid(guest);
            let idle = format!("echo 19 > /proc/{pid}/autogroup; chrt --all-tasks --idle --pid 0 {pid}");
            assert!(Command::new("sh").args(["-c", &idle]).status().expect("run a shell").success());
        }
        Some(Self(lab))
    }

    /// Asserts that the balancer has looked at all of them, and that they run.
    pub fn end(self, service: &Service) {
        let status: Value = crate::common::json_of(&service.pagefold(&["balance", "status", "--json"]));
        let of_group = |guest: &&Value| guest["id"].as_str().is_some_and(|id| id.contains(&service.group("vm")));
        let guests: Vec<_> = status["facts"]["guests"].as_array().expect("guests").iter().filter(of_group).collect();
        assert!(
            guests.len() == LIARS && guests.iter().all(|one| number(&one["guaranteed_bytes"]) == GUARANTEED),
            "{status}"
        );
        assert_eq!(
            self.0.everywhere(&self.0.guests().iter().map(crate::common::lab::name).collect::<Vec<_>>(), "echo alive"),
            ["alive"; LIARS]
        );
    }
}
