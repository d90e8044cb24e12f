//! The journal, for those who follow it. Each has a place of its own, from which the supervisor is asked every second while there is nothing
//! new.

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

/// Time between two questions for lines that have yet to come: 1 s.
const EVERY: Duration = Duration::from_secs(1);

struct Follower {
    asker: Arc<Asker>,
    feed: Arc<Feed>,
    caller: Caller,
    after: u64,
    lines: VecDeque<(u64, Value)>,
}

/// Lines behind the place `after`, for as long as the caller keeps its rights.
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
