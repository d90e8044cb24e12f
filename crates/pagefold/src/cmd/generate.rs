//! `pagefold generate`: manual pages and completions of shells, for packages.

use anyhow::Context;
use clap::Command;
use clap_complete::Shell;
use cli::exit::Outcome;
use std::fs;
use std::path::PathBuf;

/// Arguments of `pagefold generate`.
#[derive(clap::Args)]
pub struct Args {
    /// Directory to write to
    dir: PathBuf,
}

/// Runs the command. `command` is the whole command line.
pub fn run(args: &Args, command: Command) -> anyhow::Result<Outcome> {
    let dir = |name: &str| {
        let dir = args.dir.join(name);
        fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
        Ok::<_, anyhow::Error>(dir)
    };
    let manuals = dir("man")?;
    clap_mangen::generate_to(command.clone(), &manuals)
        .with_context(|| format!("cannot write to {}", manuals.display()))?;
    let completions = dir("completions")?;
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        clap_complete::generate_to(shell, &mut command.clone(), "pagefold", &completions)
            .with_context(|| format!("cannot write to {}", completions.display()))?;
    }
    Ok(Outcome::Done)
}
