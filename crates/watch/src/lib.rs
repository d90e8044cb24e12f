//! `pagefold top`: shows groups, members and processes in a terminal, and refreshes them.
//!
//! ```text
//!   services --look--> Look: their answers, unchanged
//!                        |
//!                      Frame: facts of groups, members, processes; rates since the answers before (--json)
//!                        |
//!   keys ------------> View: level, scope, order, filter, cursor, dialogs
//!     |                  |
//!     v                draw: cells of a buffer                                    (a terminal; --once: text)
//!   Act: a change of settings, which the service makes or refuses
//! ```
//!
//! | module | holds |
//! |---|---|
//! | `look` | questions to the services, and their answers |
//! | `frame`, `figures` | facts of all services in one form, and how they are computed |
//! | `columns` | the columns of each level: their widths, cells and order |
//! | `view`, `keys` | the part of the facts that is shown; effects of keys |
//! | `draw`, `details`, `popup` | drawing the picture |
//! | `plain` | short texts for sizes, and texts from services made harmless |
//! | `screen` | the terminal, and the thread that asks services |
//!
//! All facts come from the services' control sockets, and all changes are asked for there. So the program has no more
//! rights than any other client of the same user.
#![forbid(unsafe_code)]

pub mod columns;
mod details;
pub mod draw;
mod figures;
pub mod frame;
pub mod keys;
pub mod look;
pub mod plain;
mod popup;
mod screen;
pub mod view;

use api::place::Meant;
use cli::exit::Outcome;
use cli::output;
use draw::Paint;
use frame::Frame;
use look::Look;
use std::time::{Duration, Instant};

/// Width of the picture if the output is no terminal, in columns.
const PLAIN_COLUMNS: u16 = 160;

/// The options of `pagefold top`.
#[derive(Clone, Debug)]
pub struct Options {
    /// Which services the caller means.
    pub meant: Meant,
    /// Time between two rounds of questions to the services. Zero: for a single picture, they are asked once, and there
    /// are no rates.
    pub every: Duration,
    /// Whether to print one picture, or one JSON object, and end.
    pub once: bool,
    /// Whether to print JSON.
    pub json: bool,
    /// Whether to ask services twice and print their answers as JSON, which the tests of this crate read.
    pub raw: bool,
    /// Whether colours may be used.
    pub colour: bool,
}

/// Runs the command. Without a terminal, one picture is printed.
///
/// # Errors
/// No service answers, or the terminal or stdout cannot be used.
pub fn run(options: &Options) -> anyhow::Result<Outcome> {
    use std::io::{IsTerminal, stdin, stdout};
    let began = Instant::now();
    if options.raw {
        output::line(serde_json::to_string(&Look::take(&options.meant, began)?)?)?;
        std::thread::sleep(options.every);
        output::line(serde_json::to_string(&Look::take(&options.meant, began)?)?)?;
    } else if options.json {
        print_json(options, began)?;
    } else if options.once || !stdout().is_terminal() || !stdin().is_terminal() {
        let (frame, _) = rated(options, began)?;
        let columns = if stdout().is_terminal() { ratatui::crossterm::terminal::size()?.0 } else { PLAIN_COLUMNS };
        output::bytes(draw::text(&frame, columns).as_bytes())?;
    } else {
        screen::run(&options.meant, options.every, Paint { colour: options.colour })?;
    }
    Ok(Outcome::Done)
}

/// A frame with rates over [`Options::every`], and the answers that it was made of.
fn rated(options: &Options, began: Instant) -> anyhow::Result<(Frame, Look)> {
    let first = Look::take(&options.meant, began)?;
    if options.every.is_zero() {
        return Ok((Frame::of(&first, None), first));
    }
    std::thread::sleep(options.every);
    let second = Look::take(&options.meant, began)?;
    Ok((Frame::of(&second, Some(&first)), second))
}

/// Prints a JSON object in a line again and again, or with [`Options::once`] a single one.
fn print_json(options: &Options, began: Instant) -> anyhow::Result<()> {
    let (frame, mut before) = rated(options, began)?;
    if options.once {
        return output::line(serde_json::to_string_pretty(&frame)?);
    }
    output::line(serde_json::to_string(&frame)?)?;
    loop {
        std::thread::sleep(options.every.max(screen::LEAST_INTERVAL));
        let look = Look::take(&options.meant, began)?;
        output::line(serde_json::to_string(&Frame::of(&look, Some(&before)))?)?;
        before = look;
    }
}
