//! Connections: each is served by a task of its own, within bounds.
//!
//! | of | bound |
//! |---|---|
//! | connections | `places.rs` |
//! | a request's head | 16 KiB, 64 headers, 15 s; a path of 512 bytes |
//! | a request's body | 16 KiB (`routes.rs`) |
//! | a request, until its answer begins | 10 s |
//! | a peer that does not read | `patient.rs` |
//! | a caller's part of the time | `pace.rs` |
//!
//! Answers have no header `Date`, which would be of no use at a Unix socket and would make equal answers differ.

use crate::access::{Access, Caller, Peer};
use crate::pace::{MOST_WAIT, Paces, Timed};
use crate::patient::Patient;
use crate::places::{MOST, Place, Places};
use crate::routes::Refused;
use crate::wrong::{COST, Wrong};
use axum::Router;
use axum::body::Body;
use axum::http::{HeaderValue, Request, Response, StatusCode, header};
use axum::response::IntoResponse;
use cli::note;
use hyper::body::{Body as _, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use std::convert::Infallible;
use std::io;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tower::ServiceExt;

/// Most bytes of a request's head, and size of the buffer for reading requests and writing answers: 16 KiB.
const MOST_HEAD_BYTES: usize = 16 << 10;
/// Most headers of a request.
const MOST_HEADERS: usize = 64;
/// Most bytes of a request's path and query.
const MOST_PATH_BYTES: usize = 512;
/// Longest time until a request's head is complete, and longest idle time of a connection: 15 s.
const HEAD_PATIENCE: Duration = Duration::from_secs(15);
/// Longest time until an answer begins, after which the request is refused: 10 s.
const ANSWER_PATIENCE: Duration = Duration::from_secs(10);
/// Processor time that is counted for each byte of an answer: 1 ns. The answer is written after its time was measured.
const WRITE: Duration = Duration::from_nanos(1);
/// Pause after a failure to accept a connection: 200 ms.
const PAUSE: Duration = Duration::from_millis(200);

/// Serves connections.
pub struct Server {
    router: Router,
    access: RwLock<Arc<Access>>,
    places: Arc<Places>,
    paces: Paces,
    wrong: Arc<Wrong>,
}

impl Server {
    /// A server of these paths.
    pub fn new(router: Router, access: Access, wrong: Wrong) -> Self {
        let (access, places) = (RwLock::new(Arc::new(access)), Places::new(MOST));
        Self { router, access, places, paces: Paces::default(), wrong: Arc::new(wrong) }
    }

    /// Changes the rights of callers.
    pub fn set_access(&self, access: Arc<Access>) {
        *self.access.write().unwrap_or_else(PoisonError::into_inner) = access;
    }

    /// Serves the connections to a Unix socket, for ever.
    pub async fn serve_unix(self: Arc<Self>, listener: UnixListener) {
        loop {
            match listener.accept().await {
                Ok((stream, _)) => match stream.peer_cred() {
                    Ok(peer) => self.begin(stream, Peer::User(peer.uid())),
                    Err(e) => note!("a connection was refused: {e}"),
                },
                Err(e) => cannot_accept(&e).await,
            }
        }
    }

    /// Serves the connections to a TCP socket, for ever.
    pub async fn serve_tcp(self: Arc<Self>, listener: TcpListener) {
        loop {
            match listener.accept().await {
                Ok((stream, address)) => {
                    // Answers are written as a whole, so waiting for more bytes gains nothing. If this fails, answers
                    // only come a little later.
                    let _ = stream.set_nodelay(true);
                    self.begin(stream, Peer::Address(address.ip().to_canonical()));
                }
                Err(e) => cannot_accept(&e).await,
            }
        }
    }

    fn begin<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(self: &Arc<Self>, stream: S, peer: Peer) {
        let (server, place) = (Arc::clone(self), Arc::new(self.places.take()));
        tokio::spawn(async move {
            let io = TokioIo::new(Patient::new(stream));
            let answers = service_fn(|request| server.answer(request, peer, &place));
            let connection = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEAD_PATIENCE)
                .max_header_size(MOST_HEAD_BYTES)
                .max_buf_size(MOST_HEAD_BYTES)
                .max_headers(MOST_HEADERS)
                .auto_date_header(false)
                .serve_connection(io, answers);
            tokio::select! {
                // An error of a connection concerns its peer alone.
                _ = connection => {}
                () = place.is_lost() => {}
            }
        });
    }

    async fn answer(
        &self,
        request: Request<Incoming>,
        peer: Peer,
        place: &Place,
    ) -> Result<Response<Body>, Infallible> {
        let access = Arc::clone(&self.access.read().unwrap_or_else(PoisonError::into_inner));
        let caller = access.caller(peer, request.headers());
        let id = caller.as_ref().map(|caller| caller.id.clone());
        let is_wrong = caller.is_none() && request.headers().contains_key(header::AUTHORIZATION);
        if is_wrong {
            self.wrong.note(peer);
        }
        let cost = if is_wrong { COST } else { Duration::ZERO };
        place.heard(id.as_ref());
        let turn = self.paces.turn(id.as_ref(), Instant::now());
        tokio::time::sleep(turn.map_or(MOST_WAIT, |turn| turn.wait)).await;
        let mut response = if let Some(turn) = turn {
            let (response, took) = Timed::new(self.answer_to(request, caller)).await;
            let bytes = u32::try_from(response.body().size_hint().lower()).unwrap_or(u32::MAX);
            self.paces.took(id.as_ref(), turn, took + WRITE * bytes + cost, Instant::now());
            response
        } else {
            Refused::new(StatusCode::TOO_MANY_REQUESTS, "you ask for more than your part of the time").into_response()
        };
        let headers = response.headers_mut();
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
        headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
        Ok(response)
    }

    async fn answer_to(&self, mut request: Request<Incoming>, caller: Option<Caller>) -> Response<Body> {
        if request.uri().path_and_query().is_none_or(|path| path.as_str().len() > MOST_PATH_BYTES) {
            Refused::new(StatusCode::URI_TOO_LONG, "there is no such long path here; see /openapi.json").into_response()
        } else if let Some(caller) = caller {
            request.extensions_mut().insert(caller);
            let answered = self.router.clone().oneshot(request.map(Body::new));
            match tokio::time::timeout(ANSWER_PATIENCE, answered).await {
                Ok(Ok(response)) => response,
                Err(_) => Refused::new(StatusCode::REQUEST_TIMEOUT, "the request takes too long").into_response(),
            }
        } else {
            let refused =
                Refused::new(StatusCode::UNAUTHORIZED, "a known token is needed: Authorization: Bearer TOKEN");
            ([(header::WWW_AUTHENTICATE, "Bearer")], refused).into_response()
        }
    }
}

async fn cannot_accept(error: &io::Error) {
    note!("cannot accept a connection: {error}");
    tokio::time::sleep(PAUSE).await;
}
