//! `pagefold top`: guests and groups as an operator watches them.
//!
//! ```text
//!   services --look--> Look: their answers, as they were given
//!                        |
//!                      Frame: facts of groups, members, processes; rates since the look before    (--json)
//!                        |
//!   keys ------------> View: level, scope, order, filter, cursor, dialogs
//!     |                  |
//!     v                draw: cells of a buffer                                    (a terminal; --once: text)
//!   Act: a change of settings, that the service takes or refuses
//! ```
//!
//! | module | holds |
//! |---|---|
//! | `look` | questions to the services, and their answers |
//! | `frame`, `figures` | facts in one shape, and the sums of which they are made |
//! | `columns` | the columns of each level: their widths, cells and order |
//! | `view`, `keys` | the part of the facts that is shown; effects of keys |
//! | `draw`, `details`, `popup` | the picture |
//! | `plain` | sizes and strangers' texts, short and harmless |
//! | `screen` | the terminal, and the thread that asks |
//!
//! Everything comes from the services' control sockets, and changes go there. So the program can do nothing that another
//! client of the same user could not.
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

/// Width of a picture that no terminal shows, in columns.
const PLAIN_COLUMNS: u16 = 160;

/// A call of `pagefold top`.
#[derive(Clone, Debug)]
pub struct Options {
    /// The services.
    pub meant: Meant,
    /// Time between two looks; zero: one look and no rates, for a single picture.
    pub every: Duration,
    /// Whether one picture, or one object, is enough.
    pub once: bool,
    /// Whether to print JSON.
    pub json: bool,
    /// Whether to print the answers of services to two looks, as the tests of this crate read them.
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

/// A frame with the rates of one interval, and the look of which it was made.
fn rated(options: &Options, began: Instant) -> anyhow::Result<(Frame, Look)> {
    let first = Look::take(&options.meant, began)?;
    if options.every.is_zero() {
        return Ok((Frame::of(&first, None), first));
    }
    std::thread::sleep(options.every);
    let second = Look::take(&options.meant, began)?;
    Ok((Frame::of(&second, Some(&first)), second))
}

/// Prints an object a line, or one alone.
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
