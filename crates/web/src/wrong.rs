//! Requests with tokens that are none. The supervisor is told, and writes them into the journal: the first one at once, and those of
//! the next 10 s together. Each of them costs all who have no right [`COST`] of their time (`pace.rs`): 5 a second are answered.

use crate::access::Peer;
use crate::asker::{Asker, lock};
use cli::note;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Time that a request with an invalid token counts for: 20 ms. All callers without rights together get a tenth of the
/// time.
pub const COST: Duration = Duration::from_millis(20);
/// Time between two lines of the journal: 10 s.
const EVERY: Duration = Duration::from_secs(10);
/// Most addresses that are counted one by one between two lines.
const MOST_ADDRESSES: usize = 8;

/// Requests that the supervisor was not told of yet.
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

    /// Takes the requests that the supervisor is to be told of.
    fn take(&self) -> Option<(u32, BTreeMap<String, u32>)> {
        let mut counts = lock(&self.counts);
        counts.is_being_told = counts.times > 0;
        counts.is_being_told.then(|| (std::mem::take(&mut counts.times), std::mem::take(&mut counts.addresses)))
    }
}
