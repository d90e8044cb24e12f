//! The web side of a service: JSON over HTTP, metrics for Prometheus, and a stream of events.
//!
//! ```text
//!   pagefold serve --sockets, tokens--> pagefold-web <--HTTP-- curl, Prometheus, programs     Unix socket, TCP
//!        ^                                  |
//!        +------- control.sock: Groups, Members, Show, Set -------+                           as a user of its own
//! ```
//!
//! It is a process without rights. All that it can do is to ask the supervisor what the command line asks. The supervisor
//! takes no other question from its user, and no change where the configuration has none made over HTTP.
//!
//! | module | holds |
//! |---|---|
//! | `start` | the supervisor's word |
//! | `server`, `places`, `patient`, `pace` | connections and their bounds |
//! | `access` | callers and their rights |
//! | `routes` | paths, and their description as OpenAPI |
//! | `asker` | questions to the supervisor |
//! | `history` | figures over time |
//! | `metrics`, `texts` | figures for Prometheus |
//! | `feed`, `changes` | events |
//! | `trail`, `wrong` | the journal, and what gets into it from here |
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

/// Most threads that ask the supervisor at the same time. One waits for each group whose worker is silent.
const ASKING_THREADS: usize = 64;
/// Stack of a thread, in bytes.
const STACK_BYTES: usize = 512 << 10;

/// Serves until the supervisor ends. `limit` is called once the sockets are there, to give up rights, while the process has one thread.
///
/// # Errors
/// The supervisor's word is none, or rights cannot be given up.
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

/// Takes over tokens and rights. Listeners to events whose token has changed connect again, and are asked for it then.
fn change(server: &Server, feed: &Feed, setup: &Setup, owner: u32) {
    let access = Arc::new(Access::new(setup, owner));
    server.set_access(Arc::clone(&access));
    feed.set_access(&access);
}
