//! The stream of events. While there is a listener, a snapshot of all groups is made every two seconds, and compared
//! with the one before (`changes.rs`).
//!
//! Each listener has a queue of its own, with the events of the groups that it sees. A listener whose queue is full is
//! disconnected.

use crate::access::{Access, Caller, CallerId};
use crate::asker::{Asker, lock};
use crate::changes::{Event, Look};
use axum::response::sse;
use futures_util::stream::{Stream, unfold};
use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{Notify, mpsc};

/// Time between two snapshots of all groups: 2 s.
const EVERY: Duration = Duration::from_secs(2);
/// Most events in the queue of a listener, which is disconnected when there are more.
const MOST_WAITING: usize = 1024;
/// Most listeners of one caller. The number of all listeners is bounded by the places for connections.
const MOST_OF_CALLER: usize = 32;

/// Whether a caller may see an event. Events of the service itself are for callers that see all groups.
fn may_see(caller: &Caller, event: &Event) -> bool {
    event.group.as_ref().map_or(caller.sees_all(), |group| caller.sees(group))
}

/// All listeners.
pub struct Feed {
    asker: Arc<Asker>,
    listeners: Mutex<Vec<Listener>>,
    came: Notify,
    /// The present rights of callers; `None`: they have not changed since the start.
    access: Mutex<Option<Arc<Access>>>,
}

struct Listener {
    caller: Caller,
    queue: mpsc::Sender<Arc<Event>>,
}

impl Feed {
    /// A feed without listeners.
    pub fn new(asker: Arc<Asker>) -> Self {
        Self { asker, listeners: Mutex::default(), came: Notify::new(), access: Mutex::default() }
    }

    fn listeners(&self) -> MutexGuard<'_, Vec<Listener>> {
        self.listeners.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The stream of events for a new listener; `None` if its caller has [`MOST_OF_CALLER`] listeners already.
    pub fn listen(&self, caller: &Caller) -> Option<impl Stream<Item = Result<sse::Event, Infallible>> + use<>> {
        let (queue, events) = mpsc::channel(MOST_WAITING);
        {
            let mut listeners = self.listeners();
            listeners.retain(|listener| !listener.queue.is_closed());
            let same = |id: &CallerId| listeners.iter().filter(|listener| listener.caller.id == *id).count();
            if same(&caller.id) >= MOST_OF_CALLER {
                return None;
            }
            listeners.push(Listener { caller: caller.clone(), queue });
        }
        self.came.notify_one();
        Some(unfold(events, async |mut events| {
            let event: Arc<Event> = events.recv().await?;
            let data = serde_json::to_string(&*event).unwrap_or_default();
            let kind = serde_json::to_value(event.event).unwrap_or_default();
            Some((Ok(sse::Event::default().event(kind.as_str().unwrap_or_default()).data(data)), events))
        }))
    }

    /// Takes over new rights, and disconnects listeners that no longer see the same groups.
    pub fn set_access(&self, access: &Arc<Access>) {
        *lock(&self.access) = Some(Arc::clone(access));
        self.listeners().retain(|listener| access.still_shows(&listener.caller));
    }

    /// Whether a caller still sees the same groups as when it was admitted.
    pub fn still_shows(&self, caller: &Caller) -> bool {
        lock(&self.access).as_ref().is_none_or(|access| access.still_shows(caller))
    }

    /// Queues an event for the listeners that may see it. A listener whose queue is full is disconnected.
    fn tell(&self, event: Event) {
        let event = Arc::new(event);
        let tell = |listener: &Listener| {
            !may_see(&listener.caller, &event) || listener.queue.try_send(Arc::clone(&event)).is_ok()
        };
        self.listeners().retain(tell);
    }

    /// Runs for ever: queues new events every two seconds while there are listeners, and sleeps while there is none.
    pub async fn run(&self) {
        let mut before: Option<Look> = None;
        loop {
            if self.is_empty() {
                before = None;
                self.came.notified().await;
                continue;
            }
            let (groups, members) = (self.asker.all(|_| true).await, self.asker.members().await);
            if let (Ok(groups), Ok(members), Ok(troubles)) = (groups, members, self.asker.troubles().await) {
                let look = Look::new(groups, &members, before.as_ref()).with_troubles(&troubles);
                let events = before.map(|before| before.events_until(&look)).unwrap_or_default();
                events.into_iter().for_each(|event| self.tell(event));
                before = Some(look);
            }
            tokio::time::sleep(EVERY).await;
        }
    }

    /// Whether there are no listeners.
    fn is_empty(&self) -> bool {
        let mut listeners = self.listeners();
        listeners.retain(|listener| !listener.queue.is_closed());
        listeners.is_empty()
    }
}
