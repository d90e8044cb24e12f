//! stub
#[derive(clap::Args)]
pub struct Args {}
pub fn run(_: &Args) -> anyhow::Result<crate::exit::Outcome> {
    Ok(crate::exit::Outcome::Done)
}
