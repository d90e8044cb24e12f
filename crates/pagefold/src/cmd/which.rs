//! The option `--service`, the same for every command that asks one.

use api::place::{Meant, RULE};
use std::path::PathBuf;

/// The service that the caller means.
#[derive(clap::Args)]
pub struct Which {
    #[arg(long, global = true, value_name = "DIR", help = RULE)]
    service: Option<PathBuf>,
}

impl Which {
    /// The service by the option, or else by what is usual.
    pub fn meant(&self) -> Meant {
        Meant::of(self.service.as_deref(), None)
    }
}
