//! Memory for guests that are about to start, where a service balances memory between guests.

use anyhow::{Context, bail};
use api::place::Meant;
use lab::Spec;
use lend::Ledger;
use std::path::Path;
use std::process::{Command, Stdio};

/// A reservation, which ends with this value. If this process is killed, it lapses by itself.
pub struct Room {
    service: std::path::PathBuf,
    name: String,
}

impl Room {
    /// Reserves memory for all guests of a request; `None` where no service balances memory, or a guest has no size.
    ///
    /// # Errors
    /// There is no room.
    pub fn make(service: Option<&Path>, spec: &Spec) -> anyhow::Result<Option<Self>> {
        let meant = Meant::of(service, None);
        let service = meant.place().dir().to_owned();
        let is_balanced = Ledger::open(&service).is_ok_and(|ledger| ledger.rules().is_some());
        let Some(each) = spec.known_bytes().filter(|_| is_balanced) else { return Ok(None) };
        let bytes = each.saturating_mul(u64::try_from(spec.guests).unwrap_or(u64::MAX));
        let room = Self { service, name: format!("lab-up-{}", std::process::id()) };
        if !room.reserve(bytes)? {
            bail!("these guests do not fit: pagefold balance status shows the memory that is lent");
        }
        Ok(Some(room))
    }

    fn reserve(&self, bytes: u64) -> anyhow::Result<bool> {
        let mut command = Command::new(cli::OWN_PROGRAM);
        command.args(["balance", "reserve", &bytes.to_string(), "--for", &self.name]);
        let command = command.arg("--service").arg(&self.service).stdin(Stdio::null()).stdout(Stdio::null());
        Ok(command.status().context("cannot reserve memory")?.success())
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        // The guests' own memory counts from here on. A reservation that stays lapses.
        let _ = self.reserve(0);
    }
}
