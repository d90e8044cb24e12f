//! Decides whether further guests fit on this host. The facts are the figures that the process which balances memory
//! last read of the host and its guests (its last look, `api::promise::Look`).

use super::registry::Registry;
use api::promise::{Answered, Asked, Fit, NoLook, Promises};
use cli::journal::By;
use std::time::{Duration, Instant};

/// Longest wait for the lock of the file of promises, which another process may hold: 100 ms. The supervisor answers
/// nobody while it waits.
const PATIENCE: Duration = Duration::from_millis(100);

/// Decides on a request for memory, and promises the memory if the request wants that.
pub(crate) fn ask(registry: &mut Registry, asked: &Asked, by: &By) -> Result<Answered, String> {
    // A promise is written to the journal.
    if asked.hold_s > 0 {
        registry.trail.place(by, Instant::now())?;
    }
    let in_words = |error: anyhow::Error| cli::exit::in_words(&error);
    let dir = registry.place.dir().to_owned();
    let mut promises = Promises::lock(&dir, PATIENCE).map_err(in_words)?;
    let look = registry.looks.fresh(&dir).ok_or_else(|| NoLook.to_string())?;
    promises.ask(look, asked, by).map_err(in_words)
}

/// How many further guests of a group fit; `None` if there is no look of late, or the group has no VM.
pub(crate) fn fit(registry: &mut Registry, group: &str) -> Option<Fit> {
    let dir = registry.place.dir().to_owned();
    api::promise::fit(&dir, registry.looks.fresh(&dir)?, group)
}
