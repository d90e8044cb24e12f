//! `pagefold-place weigh`: memory of one guest.

use crate::command::{Guests, now_s, print_json};
use cli::exit::{Outcome, Stop};
use place::key::{Keys, usual_dir};
use place::sketch::Settings;
use place::table;
use place::theta::FINE_LG_K;
use place::weigh::weigh;
use std::path::PathBuf;

/// Arguments of `pagefold-place weigh`.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    guests: Guests,
    /// Table of the host where the guest may go
    #[arg(long, value_name = "FILE|DIR")]
    sketch: Option<PathBuf>,
    /// Bytes at the end of its RAM of which the backed part is wanted
    #[arg(long, value_name = "BYTES", default_value_t = 0)]
    last: u64,
    /// Directory of keys
    #[arg(long, value_name = "DIR")]
    keys: Option<PathBuf>,
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<Outcome> {
    let guests = args.guests.resolve()?;
    let [guest] = guests.as_slice() else {
        return Err(Stop::Usage("name one guest".into()).into());
    };
    let keys = Keys::open(&args.keys.clone().unwrap_or_else(usual_dir))?;
    let tables = args.sketch.as_ref().map(|path| table::files(std::slice::from_ref(path))).transpose()?;
    let settings = Settings {
        threads: args.guests.threads.into(),
        index_bytes: args.guests.index_bytes(),
        lg_k: FINE_LG_K,
        guaranteed: &[],
        epoch_s: now_s()?,
    };
    print_json(&weigh(guest, &|group| keys.of(group), &settings, &tables.unwrap_or_default(), args.last)?)?;
    Ok(Outcome::Done)
}
