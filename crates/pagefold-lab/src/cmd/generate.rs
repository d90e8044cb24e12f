//! `pagefold-lab generate`: manual pages and completions of shells, for packages.

use anyhow::Context;
use clap::Command;
use clap_complete::Shell;
use cli::exit::Outcome;
use std::fs;
use std::path::PathBuf;

/// Arguments of `pagefold-lab generate`.
#[derive(clap::Args)]
pub struct Args {
    /// Directory to write to
    dir: PathBuf,
}

/// Runs the command. `own` is this program's command line.
pub fn run(args: &Args, own: Command) -> anyhow::Result<Outcome> {
    let dir = |name: &str| {
        let dir = args.dir.join(name);
        fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
        Ok::<_, anyhow::Error>(dir)
    };
    let command = whole(own);
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

/// The command line of `pagefold`, with the commands of this program in place of those by which `pagefold` only
/// executes it.
fn whole(own: Command) -> Command {
    let own = commands::with_exit_codes(own);
    let shown = own.get_subcommands().filter(|command| !command.is_hide_set());
    shown.cloned().fold(commands::command(), |all, one| {
        let name = one.get_name().to_owned();
        all.mut_subcommand(name, |_| one)
    })
}
