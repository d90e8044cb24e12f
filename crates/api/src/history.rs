//! Questions about figures over time, and the answers of `pagefold-history`, which listens at DIR/history.sock.
//!
//! Each connection has one question: JSON, up to where the asker shuts its side down. The answer is JSON, too, and the
//! connection ends. Root and the web side may connect, or the service's own user.

use crate::place::Place;
use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// Longest question: 256 KiB. It may name all groups that a token sees.
pub const MOST_QUESTION_BYTES: u64 = 256 << 10;
/// Longest answer that is read: 64 MiB. A longer one is an error.
const MOST_ANSWER_BYTES: u64 = 64 << 20;
/// Longest wait for the next bytes of an answer: 8 s.
const PATIENCE: Duration = Duration::from_secs(8);

/// A question about figures over time. A `None` for group, member or figure stands for all of them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Wanted {
    /// The groups that the asker sees; `None`: all.
    pub groups: Option<BTreeSet<String>>,
    /// The group.
    pub group: Option<String>,
    /// The member; the empty name is the group itself.
    pub member: Option<String>,
    /// The figure.
    pub figure: Option<String>,
    /// The first second, since 1970; `None`: a day before the last one.
    pub since: Option<i64>,
    /// The second behind the last one; `None`: the present moment.
    pub until: Option<i64>,
    /// Time of one point, in seconds: a multiple of 10. `None`: the step in which the time was kept.
    pub step: Option<i64>,
}

/// Figures over time.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct History {
    /// The first second, since 1970.
    pub since_unix_s: i64,
    /// The second behind the last one.
    pub until_unix_s: i64,
    /// Time of one point.
    pub step_s: i64,
    /// The series that have points.
    pub series: Vec<Series>,
    /// Losses in that time; empty for callers that do not see all groups.
    pub notes: Vec<Note>,
    /// Blocks of these series that could not be read.
    pub damaged_blocks: u64,
}

/// A figure of a group or of a member.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Series {
    /// The group.
    pub group: String,
    /// The member; `null`: the group itself.
    pub member: Option<String>,
    /// The figure, with its unit.
    pub figure: String,
    /// Points in order: the time at which a step begins, and the mean of it, or the last value of a counter.
    #[cfg_attr(feature = "openapi", schema(value_type = Vec<Vec<i64>>))]
    pub points: Vec<[i64; 2]>,
}

/// Something that was lost, and why.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Note {
    /// Its time, in seconds since 1970.
    pub unix_s: i64,
    /// In words.
    pub text: String,
}

/// An answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Told {
    /// The figures.
    History(History),
    /// The question cannot be meant, or its answer would be too long.
    Refused(String),
    /// The file cannot be read.
    Failed(String),
}

impl History {
    /// Replaces characters in all texts that could steer a terminal.
    pub fn make_printable(&mut self) {
        for Series { group, member, figure, .. } in &mut self.series {
            for text in [Some(group), member.as_mut(), Some(figure)].into_iter().flatten() {
                *text = cli::printable(text);
            }
        }
        self.notes.iter_mut().for_each(|note| note.text = cli::printable(&note.text));
    }
}

/// Asks the process that keeps the history of a service; `None` if no such process listens.
///
/// # Errors
/// The process does not answer in time, or its answer cannot be read.
pub fn ask(place: &Place, wanted: &Wanted) -> anyhow::Result<Option<Told>> {
    let path = place.history_socket();
    let mut stream = match UnixStream::connect(&path) {
        Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused) => return Ok(None),
        stream => stream.with_context(|| format!("cannot connect to {}", path.display()))?,
    };
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.write_all(&serde_json::to_vec(wanted)?)?;
    stream.shutdown(std::net::Shutdown::Write)?;
    let mut answer = Vec::new();
    stream.take(MOST_ANSWER_BYTES).read_to_end(&mut answer).context("the history does not answer")?;
    if answer.is_empty() {
        bail!("the history has hung up");
    }
    Ok(match serde_json::from_slice(&answer).context("the history's answer is none")? {
        Told::History(mut history) => {
            history.make_printable();
            Some(Told::History(history))
        }
        Told::Refused(why) => Some(Told::Refused(cli::printable(&why))),
        Told::Failed(why) => Some(Told::Failed(cli::printable(&why))),
    })
}
