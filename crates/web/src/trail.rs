//! The journal, as a stream for callers that follow it. Each follower has its own place in the journal, after which it
//! asks the supervisor for lines: every second while there are none.

use crate::access::Caller;
use crate::asker::Asker;
use crate::feed::Feed;
use axum::response::sse;
use futures_util::stream::{Stream, unfold};
use serde_json::Value;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

/// Time after which a follower that has got no line asks again: 1 s.
const EVERY: Duration = Duration::from_secs(1);

struct Follower {
    asker: Arc<Asker>,
    feed: Arc<Feed>,
    caller: Caller,
    after: u64,
    lines: VecDeque<(u64, Value)>,
}

/// The lines after the place `after`, old and new ones, as a stream that ends when the caller's rights change.
pub fn follow(
    asker: Arc<Asker>,
    feed: Arc<Feed>,
    caller: Caller,
    after: u64,
) -> impl Stream<Item = Result<sse::Event, Infallible>> {
    let follower = Follower { asker, feed, caller, after, lines: VecDeque::new() };
    unfold(follower, async |mut follower| {
        let (place, line) = follower.next().await?;
        let what = line["what"].as_str().unwrap_or_default().to_owned();
        Some((Ok(sse::Event::default().id(place.to_string()).event(what).data(line.to_string())), follower))
    })
}

impl Follower {
    async fn next(&mut self) -> Option<(u64, Value)> {
        loop {
            if !self.feed.still_shows(&self.caller) {
                return None;
            }
            if let Some(line) = self.lines.pop_front() {
                return Some(line);
            }
            // An error is ignored: a supervisor that is restarting answers later.
            if let Ok((lines, next)) = self.asker.journal(self.after).await {
                (self.lines, self.after) = (lines.into(), next);
            }
            if self.lines.is_empty() {
                tokio::time::sleep(EVERY).await;
            }
        }
    }
}
