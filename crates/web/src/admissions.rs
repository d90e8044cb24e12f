//! `POST /v1/admissions`: whether further guests fit.

use crate::access::Caller;
use crate::routes::{Answered, App, Refusal, Refused, sent};
use api::promise::{self, Asked, Assurance, Wanted};
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::http::{HeaderMap, StatusCode};
use axum::{Extension, Json};
use serde::Deserialize;

/// Guests that are to start. With `like` or `memory_bytes` it is known what one of them takes.
#[derive(Debug, Default, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct WantedGuests {
    /// Id or name of a VM that the wanted guests are like.
    like: Option<String>,
    /// RAM of each wanted guest, in bytes.
    memory_bytes: Option<u64>,
    /// The group of the wanted guests.
    group: Option<String>,
    /// Number of wanted guests; 1 if it is left out.
    guests: Option<u64>,
    /// Seconds for which memory is promised; 60 if it is left out, and 0 for a question alone.
    hold_s: Option<u64>,
    /// The policy; that of the service if it is left out.
    policy: Option<Assurance>,
    /// Name of the promise. For one guest, it is that guest's, whose start ends the promise.
    name: Option<String>,
}

impl From<WantedGuests> for Asked {
    fn from(sent: WantedGuests) -> Self {
        let WantedGuests { like, memory_bytes, group, guests, hold_s, policy, name } = sent;
        let wanted = Wanted { like, memory_bytes, group, guests: guests.unwrap_or(1), ..Wanted::default() };
        Self { wanted, assurance: policy, name, hold_s: hold_s.unwrap_or(promise::USUAL_HOLD_S) }
    }
}

/// Whether further guests fit, with a promise of memory
///
/// As `pagefold admit --json`. The answer is 200 whether they fit or not: `admitted` tells.
#[utoipa::path(post, path = "/v1/admissions", operation_id = "admit", request_body = WantedGuests, responses(
    (status = 200, body = promise::Answered),
    (status = 400, body = Refusal, description = "The body is no JSON"),
    (status = 401, body = Refusal, description = "No token, or none that is known"),
    (status = 403, body = Refusal, description = "The caller may not have memory promised, or does not see all groups"),
    (status = 409, body = Refusal, description = "Nobody balances memory here, or the service refuses"),
    (status = 413, body = Refusal, description = "The body is too long"),
    (status = 415, body = Refusal, description = "The body is not application/json"),
    (status = 422, body = Refusal, description = "The body has no guests that can be meant"),
))]
pub(crate) async fn admit(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Answered<Json<promise::Answered>> {
    if !caller.may_change || !caller.sees_all() {
        let why = "you may not have memory promised, which is all groups': that takes a token with rights = \"control\" for all of \
                   them, or root at the Unix socket, and control = true in [api] of the configuration";
        return Err(Refused::new(StatusCode::FORBIDDEN, why));
    }
    let sent: WantedGuests = sent(&headers, body, "{\"memory_bytes\": 536870912, \"guests\": 2}")?;
    let answered = app.asker.admit(caller.by.clone(), sent.into()).await;
    answered.map(Json).map_err(|why| Refused::of_service(&caller, StatusCode::CONFLICT, &why))
}
