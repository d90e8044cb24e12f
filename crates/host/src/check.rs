//! One check of the host: the value found, its use, and the remedy if the value is bad.

use serde::Serialize;

/// How a check turned out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// As it should be.
    Ok,
    /// Works, but less well, or not for everything.
    Warn,
    /// The features that need it cannot work.
    Fail,
}

/// One check, in the shape that `pagefold doctor --json` prints.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Check {
    /// `topic:name`; for guests, `guest:ID:name`.
    pub id: String,
    /// How the check turned out.
    pub status: Status,
    /// The value found, in words.
    pub found: String,
    /// The features that need the thing checked.
    pub needed_for: String,
    /// The remedy; `None` where none is needed.
    pub fix: Option<String>,
    /// The remedy that outlives the next boot, where `fix` does not.
    pub fix_for_good: Option<String>,
}

impl Check {
    /// A check that found everything as it should be.
    pub fn ok(id: impl Into<String>, found: impl Into<String>, needed_for: impl Into<String>) -> Self {
        Self {
            id: id.into(),
            status: Status::Ok,
            found: found.into(),
            needed_for: needed_for.into(),
            fix: None,
            fix_for_good: None,
        }
    }

    /// The same check with the status [`Status::Warn`]; `fix` says how to improve things.
    #[must_use]
    pub fn warn(self, fix: impl Into<String>) -> Self {
        Self { status: Status::Warn, fix: Some(fix.into()), ..self }
    }

    /// The same check with a remedy that outlives the next boot.
    #[must_use]
    pub fn for_good(self, fix: impl Into<String>) -> Self {
        Self { fix_for_good: Some(fix.into()), ..self }
    }

    /// The same check with the status [`Status::Fail`]; `fix` says what would have to change.
    #[must_use]
    pub fn fail(self, fix: impl Into<String>) -> Self {
        Self { status: Status::Fail, fix: Some(fix.into()), ..self }
    }
}
