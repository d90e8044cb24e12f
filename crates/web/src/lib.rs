//! The web side of a service: JSON over HTTP, metrics for Prometheus, and a stream of events.
//!
//! ```text
//!   pagefold serve --sockets, tokens--> pagefold-web <--HTTP-- curl, Prometheus, programs     Unix socket, TCP
//!        ^                                  |
//!        +------- control.sock: Groups, Members, Show, Set -------+                           as a user of its own
//! ```
//!
//! `pagefold-web` is a process without rights. All that it can do is to ask the supervisor, as the command line does.
//! From the user that it runs as, the supervisor accepts only some questions, and changes only if the configuration
//! allows them over HTTP (`control`).
//!
//! | module | holds |
//! |---|---|
//! | `start` | messages of the supervisor: sockets, tokens and rights |
//! | `server`, `places`, `patient`, `pace` | connections and their bounds |
//! | `access` | callers and their rights |
//! | `routes` | paths, and their description as OpenAPI |
//! | `asker` | questions to the supervisor |
//! | `history` | figures over time |
//! | `metrics`, `texts` | figures for Prometheus |
//! | `feed`, `changes` | events |
//! | `trail`, `wrong` | followers of the journal, and failed logins, which are written to it |
#![forbid(unsafe_code)]

mod access;
mod admissions;
mod asker;
mod changes;
mod feed;
mod history;
mod metrics;
mod pace;
mod patient;
mod places;
mod routes;
mod server;
mod start;
mod texts;
mod trail;
mod wrong;

pub use routes::description;

use access::Access;
use anyhow::Context;
use api::place::Place;
use api::setup::Setup;
use asker::Asker;
use feed::Feed;
use host::Seqpacket;
use routes::App;
use server::Server;
use start::Listeners;
use std::sync::Arc;
use texts::Texts;
use tokio::net::{TcpListener, UnixListener};
use wrong::Wrong;

/// Most threads that block at the same time while they ask the supervisor. For each group whose worker does not answer,
/// one is blocked.
const ASKING_THREADS: usize = 64;
/// Stack of each thread, in bytes.
const STACK_BYTES: usize = 512 << 10;

/// Serves until the supervisor ends. `limit` gives up the process's rights. It is called once the sockets have come,
/// while the process still has only one thread.
///
/// # Errors
/// A message of the supervisor is not valid, rights cannot be given up, or the sockets cannot be served.
pub fn serve(supervisor: Seqpacket, limit: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<()> {
    let Some((setup, listeners)) = start::hear(&supervisor)? else { return Ok(()) };
    limit()?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .max_blocking_threads(ASKING_THREADS)
        .thread_stack_size(STACK_BYTES)
        .enable_all()
        .build()
        .context("cannot start")?;
    let guard = runtime.enter();
    let place = Place::at(&setup.dir);
    let owner = place.owner()?;
    let asker = Arc::new(Asker::new(place));
    let feed = Arc::new(Feed::new(Arc::clone(&asker)));
    let wrong = Wrong::new(Arc::clone(&asker));
    let boot_s = host::boot_time_s()?;
    let (texts, asking) = (Arc::new(Texts::default()), history::Asking::default());
    let router = routes::router(App { asker, feed: Arc::clone(&feed), texts, asking, boot_s });
    let server = Arc::new(Server::new(router, Access::new(&setup, owner), wrong));
    begin(&server, &feed, listeners).context("cannot serve the sockets")?;
    drop(guard);
    while let Some((setup, _)) = start::hear(&supervisor)? {
        change(&server, &feed, &setup, owner);
    }
    runtime.shutdown_background();
    Ok(())
}

fn begin(server: &Arc<Server>, feed: &Arc<Feed>, listeners: Listeners) -> std::io::Result<()> {
    for listener in listeners.unix {
        listener.set_nonblocking(true)?;
        tokio::spawn(Arc::clone(server).serve_unix(UnixListener::from_std(listener)?));
    }
    for listener in listeners.tcp {
        listener.set_nonblocking(true)?;
        tokio::spawn(Arc::clone(server).serve_tcp(TcpListener::from_std(listener)?));
    }
    let feed = Arc::clone(feed);
    tokio::spawn(async move { feed.run().await });
    Ok(())
}

/// Takes over new tokens and rights. Listeners to events whose token is gone or shows other groups now are
/// disconnected.
fn change(server: &Server, feed: &Feed, setup: &Setup, owner: u32) {
    let access = Arc::new(Access::new(setup, owner));
    server.set_access(Arc::clone(&access));
    feed.set_access(&access);
}
