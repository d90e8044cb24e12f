//! One thing that was looked at, what was found, and what to do about it.

use serde::Serialize;

/// How a check turned out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// As it should be.
    Ok,
    /// Works, but less well, or not for everything.
    Warn,
    /// What it is needed for cannot work.
    Fail,
}

/// One check, in the shape that `pagefold doctor --json` prints.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Check {
    /// `topic:name`, for guests `guest:ID:name`.
    pub id: String,
    /// How it turned out.
    pub status: Status,
    /// The value found, in words.
    pub found: String,
    /// What it is good for.
    pub needed_for: String,
    /// What to do about it; `None` where nothing need be done.
    pub fix: Option<String>,
}

impl Check {
    /// As it should be.
    pub fn ok(id: impl Into<String>, found: impl Into<String>, needed_for: impl Into<String>) -> Self {
        Self { id: id.into(), status: Status::Ok, found: found.into(), needed_for: needed_for.into(), fix: None }
    }

    /// Works less well; `fix` says how to better it.
    #[must_use]
    pub fn warn(self, fix: impl Into<String>) -> Self {
        Self { status: Status::Warn, fix: Some(fix.into()), ..self }
    }

    /// Cannot work; `fix` says what would have to change.
    #[must_use]
    pub fn fail(self, fix: impl Into<String>) -> Self {
        Self { status: Status::Fail, fix: Some(fix.into()), ..self }
    }
}
