//! Memory for guests that are about to start, where a service balances memory between guests.

use super::admit;
use anyhow::bail;
use api::promise::{Asked, MOST_HOLD_S, Wanted};
use lend::Ledger;
use std::path::{Path, PathBuf};

/// A promise of memory, withdrawn when this value is dropped. If this process is killed, the promise lapses by itself.
pub struct Room {
    service: PathBuf,
    name: String,
}

impl Room {
    /// Gets memory promised for `guests` guests of `each` bytes, and has memory withdrawn for them that other guests
    /// were lent. `None` if no process balances memory for the service.
    ///
    /// # Errors
    /// There is no room.
    pub fn make(
        service: &Path,
        what: &str,
        (each, guests): (u64, usize),
        group: Option<&str>,
    ) -> anyhow::Result<Option<Self>> {
        let is_balanced = Ledger::open(service).is_ok_and(|ledger| ledger.rules().is_some());
        if !is_balanced || guests == 0 {
            return Ok(None);
        }
        let name = format!("{what}-{}", std::process::id());
        let (group, guests) = (group.map(str::to_owned), u64::try_from(guests).unwrap_or(u64::MAX));
        let wanted = Wanted { memory_bytes: Some(each), group, guests, ..Wanted::default() };
        let asked = Asked { wanted, name: Some(name.clone()), hold_s: MOST_HOLD_S, assurance: None };
        let answered = admit::ask(service, asked, true)?;
        if let Some(no) = admit::refusal(&answered, &name) {
            bail!("{no}; these guests do not fit: pagefold balance status shows the memory that is lent");
        }
        Ok(Some(Self { service: service.to_owned(), name }))
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        // If this fails, the promise lapses by itself.
        let _ = Ledger::open(&self.service).and_then(|ledger| ledger.promises()?.set(&self.name, 0, 0));
    }
}
