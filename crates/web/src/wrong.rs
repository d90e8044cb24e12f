//! Requests with invalid tokens. They are reported to the supervisor, which writes them to the journal: the first one
//! at once, and those of the next 10 s together. Each counts for [`COST`] of the time that all callers without rights
//! share (`pace.rs`), so that 5 a second are answered.

use crate::access::Peer;
use crate::asker::{Asker, lock};
use cli::note;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Processor time that is counted for a request with an invalid token: 20 ms. All callers without rights together get a
/// tenth of the time.
pub const COST: Duration = Duration::from_millis(20);
/// Time between two reports to the supervisor, each of which becomes a line of the journal: 10 s.
const EVERY: Duration = Duration::from_secs(10);
/// Most client addresses that are counted separately for one report.
const MOST_ADDRESSES: usize = 8;

/// Requests that were not reported to the supervisor yet.
#[derive(Default)]
struct Counts {
    times: u32,
    addresses: BTreeMap<String, u32>,
    is_being_told: bool,
}

/// Requests with an invalid token.
pub struct Wrong {
    asker: Arc<Asker>,
    counts: Mutex<Counts>,
}

impl Wrong {
    /// A counter without requests.
    pub fn new(asker: Arc<Asker>) -> Self {
        Self { asker, counts: Mutex::default() }
    }

    /// Counts a request with an invalid token.
    pub fn note(self: &Arc<Self>, peer: Peer) {
        let mut counts = lock(&self.counts);
        counts.times = counts.times.saturating_add(1);
        if let Peer::Address(address) = peer {
            let address = address.to_string();
            if counts.addresses.len() < MOST_ADDRESSES || counts.addresses.contains_key(&address) {
                let times = counts.addresses.entry(address).or_default();
                *times = times.saturating_add(1);
            }
        }
        if !std::mem::replace(&mut counts.is_being_told, true) {
            tokio::spawn(Arc::clone(self).tell());
        }
    }

    async fn tell(self: Arc<Self>) {
        while let Some((times, addresses)) = self.take() {
            if let Err(why) = self.asker.login_failed(times, addresses).await {
                note!("{times} requests with tokens that are none are not in the journal: {why}");
            }
            tokio::time::sleep(EVERY).await;
        }
    }

    /// Takes the counts that are to be reported; `None` if there was no further request.
    fn take(&self) -> Option<(u32, BTreeMap<String, u32>)> {
        let mut counts = lock(&self.counts);
        counts.is_being_told = counts.times > 0;
        counts.is_being_told.then(|| (std::mem::take(&mut counts.times), std::mem::take(&mut counts.addresses)))
    }
}
