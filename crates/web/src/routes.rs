//! The paths of the web side, and their description as OpenAPI. An answer shows nothing of groups that the caller does
//! not see.
//!
//! A question about a group that the caller may not see is answered as if there were no such group. The supervisor's
//! error messages are shown only to callers that see all groups, because they may name other groups, or memory promised
//! to them.

use crate::access::Caller;
use crate::asker::{Asker, Group};
use crate::changes::Event;
use crate::feed::Feed;
use crate::metrics::{self, Form, Member, Scrape};
use crate::texts::Texts;
use crate::trail;
use api::ask::MemberLine;
use api::change::{Change, Printed, Wanted};
use api::shown::{ListedGroup, ShownGroup};
use axum::body::Bytes;
use axum::extract::rejection::{BytesRejection, PathRejection};
use axum::extract::{DefaultBodyLimit, Path, State};
use axum::http::{HeaderMap, StatusCode, Uri, header};
use axum::response::sse::{KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json, Router};
use host::ProcessId;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use utoipa::OpenApi;
use utoipa_axum::{router::OpenApiRouter, routes};

/// Longest body of a request: 16 KiB.
const MOST_BODY_BYTES: usize = 16 << 10;

/// The sources of all answers.
#[derive(Clone)]
pub struct App {
    /// Asks the supervisor.
    pub asker: Arc<Asker>,
    /// Sends events to their listeners.
    pub feed: Arc<Feed>,
    /// Callers whose question about figures over time is being answered.
    pub asking: crate::history::Asking,
    /// Metrics as text.
    pub texts: Arc<Texts>,
    /// Start of this machine, in seconds since 1970, as it was when this process started.
    pub boot_s: u64,
}

/// Why a request was refused.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct Refusal {
    /// In words.
    error: String,
}

/// A status other than success, with the reason.
#[derive(Debug)]
pub struct Refused(StatusCode, String);

impl Refused {
    /// A refusal with this status and reason.
    pub fn new(status: StatusCode, why: impl Into<String>) -> Self {
        Self(status, why.into())
    }

    fn no_group(group: &str) -> Self {
        Self(StatusCode::NOT_FOUND, format!("there is no group {group:?} that you may see"))
    }

    /// A refusal because the service refuses or does not answer. Its error message `why` is shown only to callers that
    /// see all groups.
    pub(crate) fn of_service(caller: &Caller, status: StatusCode, why: &str) -> Self {
        let why = if caller.sees_all() { why } else { "the service refuses or does not answer; its log says why" };
        Self(status, why.to_owned())
    }
}

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        (self.0, Json(Refusal { error: self.1 })).into_response()
    }
}

pub(crate) type Answered<T> = Result<T, Refused>;

/// The group that a path names.
type InPath = Result<Path<String>, PathRejection>;

/// The OpenAPI description, without the paths.
#[derive(OpenApi)]
#[openapi(
    info(
        title = "Pagefold",
        description = "Groups of a Pagefold service: what folding saves and costs, who is a member, how groups are run, \
                       and what happens. Fields are those of the command line's JSON (docs/formats.md).",
    ),
    components(schemas(Event)),
    modifiers(&Bearer),
    security((), ("token" = []))
)]
struct Description;

/// Adds the way to send a bearer token to the OpenAPI description.
struct Bearer;

impl utoipa::Modify for Bearer {
    fn modify(&self, openapi: &mut utoipa::openapi::OpenApi) {
        use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme};
        let bearer = HttpBuilder::new()
            .scheme(HttpAuthScheme::Bearer)
            .description(Some("Needed on TCP. On the Unix socket a caller without one is known by its user."))
            .build();
        let components = openapi.components.get_or_insert_default();
        components.add_security_scheme("token", SecurityScheme::Http(bearer));
    }
}

fn described() -> (OpenApiRouter<App>, utoipa::openapi::OpenApi) {
    let router = OpenApiRouter::with_openapi(Description::openapi())
        .routes(routes!(version))
        .routes(routes!(groups))
        .routes(routes!(group))
        .routes(routes!(set))
        .routes(routes!(crate::admissions::admit))
        .routes(routes!(members))
        .routes(routes!(group_members))
        .routes(routes!(crate::history::history))
        .routes(routes!(events))
        .routes(routes!(journal))
        .routes(routes!(scrape));
    let description = router.get_openapi().clone();
    (router, description)
}

/// The OpenAPI description as JSON, which is the answer at `/openapi.json`.
pub fn description() -> String {
    described().1.to_pretty_json().unwrap_or_default()
}

/// The router.
pub fn router(app: App) -> Router {
    let (router, _) = described();
    let text: Arc<str> = description().into();
    let openapi = move || async move { ([(header::CONTENT_TYPE, "application/json")], text.to_string()) };
    Router::from(router)
        .route("/openapi.json", axum::routing::get(openapi))
        .fallback(async || Refused::new(StatusCode::NOT_FOUND, "there is nothing here; see /openapi.json"))
        .method_not_allowed_fallback(async || {
            Refused::new(StatusCode::METHOD_NOT_ALLOWED, "there is no such method here; see /openapi.json")
        })
        .layer(DefaultBodyLimit::max(MOST_BODY_BYTES))
        .with_state(app)
}

/// The version and build of the web side
#[derive(Serialize, utoipa::ToSchema)]
struct Version {
    /// The version.
    version: &'static str,
    /// The commit that it was built from; `null` of a build for development.
    commit: Option<&'static str>,
    /// `release` or `development`.
    build: &'static str,
}

/// The version and build of the web side
#[utoipa::path(get, path = "/v1/version", operation_id = "version", responses(
    (status = 200, body = Version),
    (status = 401, body = Refusal, description = "No token, or none that is known"),
))]
async fn version() -> Json<Version> {
    Json(Version { version: cli::version::VERSION, commit: cli::version::COMMIT, build: cli::version::BUILD })
}

/// The groups that the caller sees, what each saves and costs
///
/// As `pagefold group list --json`. Figures that a worker did not tell are null.
#[utoipa::path(get, path = "/v1/groups", operation_id = "list_groups", responses(
    (status = 200, body = [ListedGroup]),
    (status = 401, body = Refusal, description = "No token, or none that is known"),
    (status = 503, body = Refusal, description = "The service does not answer"),
))]
async fn groups(State(app): State<App>, Extension(caller): Extension<Caller>) -> Answered<Json<Vec<ListedGroup>>> {
    let groups = seen_groups(&app, &caller).await?;
    let listed = |Group { line, state }| {
        let group = ListedGroup::new(line, state.as_ref().map(|state| &state.report));
        ListedGroup { waits_for_room: why_it_waits(&caller, group.waits_for_room), ..group }
    };
    Ok(Json(groups.into_iter().map(listed).collect()))
}

/// A group: its members, pages, savings and costs
///
/// As `pagefold group show --json`.
#[utoipa::path(get, path = "/v1/groups/{group}", operation_id = "show_group", params(("group" = String, Path, description = "Its name")), responses(
    (status = 200, body = ShownGroup),
    (status = 400, body = Refusal, description = "The path is no text"),
    (status = 401, body = Refusal, description = "No token, or none that is known"),
    (status = 404, body = Refusal, description = "There is no such group that the caller sees"),
    (status = 503, body = Refusal, description = "The service or the group's worker does not answer"),
))]
async fn group(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    path: InPath,
) -> Answered<Json<ShownGroup>> {
    let group = seen_group(&app, &caller, path).await?;
    let state = app.asker.state(&group).await;
    let state = state.map_err(|why| Refused::of_service(&caller, StatusCode::SERVICE_UNAVAILABLE, &why))?;
    let mut state = (*state).clone();
    state.report.waits_for_room = why_it_waits(&caller, state.report.waits_for_room);
    // `fit` reveals memory that other groups hold.
    state.fit = state.fit.filter(|_| caller.sees_all());
    Ok(Json(ShownGroup::from(state)))
}

/// Why pages wait for memory. The supervisor's message, which may name the host's memory and other groups, is shown
/// only to callers that see all groups.
fn why_it_waits(caller: &Caller, why: Option<String>) -> Option<String> {
    if caller.sees_all() { why } else { why.map(|_| "the service has no memory to promise; its log says why".into()) }
}

/// Change settings of a group
///
/// As `pagefold group set --json`: the answer has all settings. A change takes effect at once, and outlives the service.
#[utoipa::path(patch, path = "/v1/groups/{group}/settings", operation_id = "set_group", params(("group" = String, Path, description = "Its name")),
    request_body = Wanted, responses(
    (status = 200, body = Printed),
    (status = 400, body = Refusal, description = "The body is no JSON, or the path is no text"),
    (status = 401, body = Refusal, description = "No token, or none that is known"),
    (status = 403, body = Refusal, description = "The caller may not change settings"),
    (status = 404, body = Refusal, description = "There is no such group that the caller sees"),
    (status = 409, body = Refusal, description = "The service refuses, such as unfolding for which there is no memory"),
    (status = 413, body = Refusal, description = "The body is too long"),
    (status = 415, body = Refusal, description = "The body is not application/json"),
    (status = 422, body = Refusal, description = "The body has no settings that can be meant"),
    (status = 503, body = Refusal, description = "The service does not answer"),
))]
async fn set(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    path: InPath,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Answered<Json<Printed>> {
    let group = seen_group(&app, &caller, path).await?;
    if !caller.may_change {
        let why = "you may not change settings: that takes a token with rights = \"control\", or root at the Unix socket, \
                   and control = true in [api] of the configuration";
        return Err(Refused::new(StatusCode::FORBIDDEN, why));
    }
    let change = wanted(&headers, body)?;
    let settings = app.asker.set(caller.by.clone(), &group, change).await;
    let settings = settings.map_err(|why| Refused::of_service(&caller, StatusCode::CONFLICT, &why))?;
    Ok(Json(Printed::from(&*settings)))
}

/// Parses the JSON body of a request. `example` is shown to a caller whose body is no JSON.
pub(crate) fn sent<T: DeserializeOwned>(
    headers: &HeaderMap,
    body: Result<Bytes, BytesRejection>,
    example: &str,
) -> Answered<T> {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    if kind.split(';').next().is_none_or(|kind| !kind.trim().eq_ignore_ascii_case("application/json")) {
        return Err(Refused::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "bodies are sent as application/json"));
    }
    let body = body.map_err(|e| Refused::new(e.status(), e.body_text()))?;
    serde_json::from_slice(&body).map_err(|e| {
        if e.is_data() {
            return Refused::new(StatusCode::UNPROCESSABLE_ENTITY, cli::printable(&e.to_string()));
        }
        let place = format!("line {}, column {}", e.line(), e.column());
        Refused::new(
            StatusCode::BAD_REQUEST,
            format!("the body is no JSON ({place}): send an object, such as {example}"),
        )
    })
}

fn wanted(headers: &HeaderMap, body: Result<Bytes, BytesRejection>) -> Answered<Change> {
    let wanted: Wanted = sent(headers, body, "{\"fold\": \"off\"}")?;
    let change = Change::from(wanted);
    if change.is_empty() {
        return Err(Refused::new(StatusCode::UNPROCESSABLE_ENTITY, "there is nothing to set in it"));
    }
    Ok(change)
}

/// The members of all groups that the caller sees
#[utoipa::path(get, path = "/v1/members", operation_id = "list_members", responses(
    (status = 200, body = [MemberLine]),
    (status = 401, body = Refusal, description = "No token, or none that is known"),
    (status = 503, body = Refusal, description = "The service does not answer"),
))]
async fn members(State(app): State<App>, Extension(caller): Extension<Caller>) -> Answered<Json<Vec<MemberLine>>> {
    Ok(Json(seen_members(&app, &caller, |group| caller.sees(group)).await?))
}

/// The members of a group
#[utoipa::path(get, path = "/v1/groups/{group}/members", operation_id = "list_group_members", params(("group" = String, Path, description = "Its name")), responses(
    (status = 200, body = [MemberLine]),
    (status = 400, body = Refusal, description = "The path is no text"),
    (status = 401, body = Refusal, description = "No token, or none that is known"),
    (status = 404, body = Refusal, description = "There is no such group that the caller sees"),
    (status = 503, body = Refusal, description = "The service does not answer"),
))]
async fn group_members(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    path: InPath,
) -> Answered<Json<Vec<MemberLine>>> {
    let group = seen_group(&app, &caller, path).await?;
    Ok(Json(seen_members(&app, &caller, |of| of == group).await?))
}

/// Happenings, as server-sent events
///
/// Each has the name of its `event`, and one `Event` as its data. There is no history: after connecting (again), read
/// the groups once.
#[utoipa::path(get, path = "/v1/events", operation_id = "watch_events", responses(
    (status = 200, body = String, content_type = "text/event-stream"),
    (status = 401, body = Refusal, description = "No token, or none that is known"),
    (status = 429, body = Refusal, description = "This caller listens too often"),
))]
async fn events(State(app): State<App>, Extension(caller): Extension<Caller>) -> Answered<Response> {
    let events = app.feed.listen(&caller);
    let events = events.ok_or_else(|| Refused::new(StatusCode::TOO_MANY_REQUESTS, "you listen too often already"))?;
    Ok(Sse::new(events).keep_alive(KeepAlive::new()).into_response())
}

/// The journal: who has changed what, as server-sent events
///
/// Each has the name of what was done, a line of `pagefold journal --json` as its data, and its place in the journal as its id. It begins behind
/// the place `after`, or that of `Last-Event-ID`, or else with the oldest line that is kept, and goes on for ever.
#[utoipa::path(get, path = "/v1/journal", operation_id = "watch_journal", params(("after" = Option<u64>, Query, description = "Place")), responses(
    (status = 200, body = String, content_type = "text/event-stream"),
    (status = 400, body = Refusal, description = "The place is no number"),
    (status = 401, body = Refusal, description = "No token, or none that is known"),
    (status = 403, body = Refusal, description = "The caller does not see all groups"),
))]
async fn journal(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    uri: Uri,
    headers: HeaderMap,
) -> Answered<Response> {
    if !caller.sees_all() {
        return Err(Refused::new(StatusCode::FORBIDDEN, "the journal is of all groups, and you do not see all"));
    }
    let asked = uri.query().unwrap_or_default().split('&').find_map(|part| part.strip_prefix("after="));
    let last = headers.get("last-event-id").and_then(|id| id.to_str().ok());
    let after = last.or(asked).unwrap_or("0");
    let after = after.parse().map_err(|_| Refused::new(StatusCode::BAD_REQUEST, "a place is a number"))?;
    let lines = trail::follow(Arc::clone(&app.asker), Arc::clone(&app.feed), caller, after);
    Ok(Sse::new(lines).keep_alive(KeepAlive::new()).into_response())
}

/// Metrics of all groups that the caller sees, for Prometheus
#[utoipa::path(get, path = "/metrics", operation_id = "metrics", responses(
    (status = 200, content(
        (String = "text/plain; version=0.0.4; charset=utf-8"),
        (String = "application/openmetrics-text; version=1.0.0; charset=utf-8"),
    )),
    (status = 401, body = Refusal, description = "No token, or none that is known"),
    (status = 503, body = Refusal, description = "The service does not answer"),
))]
async fn scrape(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
) -> Answered<Response> {
    let groups = seen_groups(&app, &caller).await?;
    let members = app.asker.members().await;
    let members = members.map_err(|why| Refused::of_service(&caller, StatusCode::SERVICE_UNAVAILABLE, &why))?;
    let supervisor = app.asker.supervisor().await.ok().map(|pid| *pid);
    let accept = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok()).unwrap_or_default();
    let form = Form::of(accept);
    let make = {
        let (boot_s, sees_all) = (app.boot_s, caller.sees_all());
        move || Ok(metrics::text(scraped((groups.clone(), sees_all), &members, supervisor, boot_s), form)?.into())
    };
    let text = app.texts.get(caller.groups.clone(), form, make).await;
    let text = text.map_err(|why| Refused::new(StatusCode::INTERNAL_SERVER_ERROR, &*why))?;
    Ok(([(header::CONTENT_TYPE, form.content_type())], Bytes::clone(&text)).into_response())
}

/// All figures of these groups for Prometheus.
fn scraped(
    (groups, sees_all): (Vec<Group>, bool),
    members: &[MemberLine],
    supervisor: Option<u32>,
    boot_s: u64,
) -> Scrape {
    let domain = |member: &MemberLine| Some(((member.group.clone(), member.identity.pid), member.domain.clone()?));
    let domains: Domains = members.iter().filter_map(domain).collect();
    let start = |process: ProcessId| {
        boot_s as f64 + process.start_ticks as f64 / rustix::param::clock_ticks_per_second() as f64
    };
    let start = |pid: u32| ProcessId::of(pid).ok().map(start);
    let worker_start = |group: &Group| Some((group.line.name.clone(), start(group.state.as_ref()?.worker_pid?)?));
    Scrape {
        members: groups.iter().flat_map(|group| scraped_members(group, &domains)).collect(),
        sees_all,
        service_start_s: supervisor.and_then(start),
        worker_starts_s: groups.iter().filter_map(worker_start).collect(),
        groups,
    }
}

/// Domains of libvirt, by group and process.
type Domains = BTreeMap<(String, u32), String>;

/// The members of a group, each name once: Prometheus refuses two series with the same labels.
fn scraped_members(group: &Group, domains: &Domains) -> Vec<Member> {
    let mut names = BTreeSet::new();
    let members = group.state.iter().flat_map(|state| &state.report.members);
    let members = members.filter(|report| names.insert(report.name.clone()));
    let member = |report: &api::control::MemberReport| Member {
        group: group.line.name.clone(),
        report: report.clone(),
        domain: domains.get(&(group.line.name.clone(), report.pid)).cloned(),
    };
    members.map(member).collect()
}

/// The groups that a caller sees.
async fn seen_groups(app: &App, caller: &Caller) -> Answered<Vec<Group>> {
    let groups = app.asker.all(|group| caller.sees(group)).await;
    groups.map_err(|why| Refused::of_service(caller, StatusCode::SERVICE_UNAVAILABLE, &why))
}

/// The group that a path names. It is refused unless the caller sees a group of this name.
async fn seen_group(app: &App, caller: &Caller, path: InPath) -> Answered<String> {
    let Path(group) = path.map_err(|e| Refused::new(e.status(), e.body_text()))?;
    if !caller.sees(&group) {
        return Err(Refused::no_group(&group));
    }
    let groups = app.asker.groups().await;
    let groups = groups.map_err(|why| Refused::of_service(caller, StatusCode::SERVICE_UNAVAILABLE, &why))?;
    if groups.iter().any(|line| line.name == group) { Ok(group) } else { Err(Refused::no_group(&group)) }
}

/// The members of groups that a caller sees.
async fn seen_members(app: &App, caller: &Caller, wanted: impl Fn(&str) -> bool) -> Answered<Vec<MemberLine>> {
    let members = app.asker.members().await;
    let members = members.map_err(|why| Refused::of_service(caller, StatusCode::SERVICE_UNAVAILABLE, &why))?;
    Ok(members.iter().filter(|member| wanted(&member.group) && caller.sees(&member.group)).cloned().collect())
}
