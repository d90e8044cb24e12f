//! Loads: programs whose requests are timed. Each load is a file in this directory.

mod guest_ticker;
mod postgres;
mod redis;
mod ticker;
mod web;

use super::client::Client;
use super::scene::Scene;
use serde::Serialize;
use std::any::Any;

/// All kinds of loads.
pub const KINDS: [&Kind; 4] = [&redis::REDIS, &ticker::TICKER, &postgres::POSTGRES, &web::WEB];

/// How programs become members.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Member {
    /// Started by `pagefold run`.
    Started,
    /// Attached by `pagefold attach`, once they run.
    Attached,
    /// In a guest of QEMU, which `pagefold run` starts.
    Guest,
}

impl Member {
    /// Name of this way to become a member, as in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Started => "started",
            Self::Attached => "attached",
            Self::Guest => "guest",
        }
    }
}

/// A kind of load.
pub struct Kind {
    pub name: &'static str,
    /// Whether it runs where no load is named.
    pub is_usual: bool,
    /// Requests a second, unless others are asked for.
    pub rate: u32,
    /// Kinds of members in which it runs.
    pub members: &'static [Member],
    /// Pages of all its programs that must be folded while it is measured in the arm `on`.
    pub floor: u64,
    /// Programs that must be there, each with the Debian package that has it.
    pub needs: &'static [(&'static str, &'static str)],
    /// Starts its programs, two alike, and the client of the first.
    pub begin: fn(&Scene) -> anyhow::Result<Load>,
}

/// A load that runs. Dropping it ends its client, and then its programs.
pub struct Load {
    /// The client that times its requests.
    pub client: Client,
    /// The program that gets the requests. Its children answer some of them.
    pub pid: u32,
    /// Programs that end with the load, and what they need.
    pub _programs: Box<dyn Any>,
}
