//! `GET /v1/history`: figures over time, which the process `pagefold-history` keeps.

use crate::access::{Caller, CallerId};
use crate::asker::lock;
use crate::routes::{Answered, App, Refusal, Refused};
use api::history::{History, Told, Wanted};
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::{Extension, Json};
use cli::exit::in_words;
use serde::Deserialize;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

/// Callers whose question is being answered. Each may have one at a time, so that nobody queues many questions before
/// those of others.
#[derive(Clone, Default)]
pub struct Asking(Arc<Mutex<BTreeSet<CallerId>>>);

/// A caller's question while it is answered. When this value is dropped, the caller may ask the next one.
struct Turn {
    asking: Asking,
    caller: CallerId,
}

impl Asking {
    fn begin(&self, caller: &CallerId) -> Option<Turn> {
        lock(&self.0).insert(caller.clone()).then(|| Turn { asking: self.clone(), caller: caller.clone() })
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        lock(&self.asking.0).remove(&self.caller);
    }
}

/// The figures that are wanted.
#[derive(Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct Asked {
    /// Of this group
    group: Option<String>,
    /// Of this member; the empty name is the group itself
    member: Option<String>,
    /// This figure
    figure: Option<String>,
    /// The first second, since 1970 (usually a day before the last one)
    since: Option<i64>,
    /// The second behind the last one (usually the present moment)
    until: Option<i64>,
    /// Seconds of a point: a multiple of 10, up to a week (usually 10 for a day, 60 for a month, 900 beyond)
    step: Option<i64>,
}

/// Figures of groups and members over time
///
/// Of the groups that the caller sees. A point is a time and a value: the mean of its step, or the last value of a counter.
/// The query may have `group`, `member`, `figure`, `since` and `until` (seconds since 1970), and `step` (seconds of a point).
/// The time may be 732 days. All series together may have 100,000 points, made of 4,000,000 samples.
#[utoipa::path(get, path = "/v1/history", operation_id = "history", params(Asked), responses(
    (status = 200, body = History),
    (status = 400, body = Refusal, description = "The query is none"),
    (status = 401, body = Refusal, description = "No token, or none that is known"),
    (status = 404, body = Refusal, description = "No history is kept here"),
    (status = 422, body = Refusal, description = "The query cannot be meant, or the answer would be too long"),
    (status = 429, body = Refusal, description = "This caller's last question is under way"),
    (status = 503, body = Refusal, description = "The history does not answer, or its file cannot be read"),
))]
pub async fn history(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    query: Result<Query<Asked>, QueryRejection>,
) -> Answered<Json<History>> {
    let Query(Asked { group, member, figure, since, until, step }) =
        query.map_err(|e| Refused::new(StatusCode::BAD_REQUEST, cli::printable(&e.body_text())))?;
    let groups = caller.groups.as_deref().cloned();
    let wanted = Wanted { groups, group, member, figure, since, until, step };
    let turn = app.asking.begin(&caller.id);
    let turn = turn.ok_or_else(|| Refused::new(StatusCode::TOO_MANY_REQUESTS, "your last question is under way"))?;
    let asker = Arc::clone(&app.asker);
    // The turn ends when the question is answered, even if the caller has left before.
    let asked = tokio::task::spawn_blocking(move || {
        let _turn = turn;
        asker.history(&wanted)
    });
    let failed = |why: &str| Refused::of_service(&caller, StatusCode::SERVICE_UNAVAILABLE, why);
    match asked.await.map_err(|e| failed(&e.to_string()))?.map_err(|e| failed(&in_words(&e)))? {
        Some(Told::History(history)) => Ok(Json(history)),
        Some(Told::Refused(why)) => Err(Refused::new(StatusCode::UNPROCESSABLE_ENTITY, why)),
        Some(Told::Failed(why)) => Err(failed(&why)),
        None => Err(Refused::new(
            StatusCode::NOT_FOUND,
            "no history is kept here: [history] of the configuration has it kept",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn caller_has_one_question_under_way() {
        let (asking, one, other) = (Asking::default(), CallerId::User(1), CallerId::User(2));
        let turn = asking.begin(&one).unwrap();
        assert!(asking.begin(&one).is_none() && asking.begin(&other).is_some());
        drop(turn);
        assert!(asking.begin(&one).is_some());
    }
}
