//! `pagefold lab exec`

use super::seconds;
use cli::exit::{Outcome, Stop};
use cli::{output, say};
use lab::{Guest, Lab, Output};
use serde_json::{Value, json};
use std::io::{self, Write};
use std::thread;
use std::time::Duration;

/// Arguments of `pagefold lab exec`.
#[derive(clap::Args)]
pub struct Args {
    /// The guest; its command's exit status becomes this one's [default: all guests]
    #[arg(long, value_name = "NAME")]
    guest: Option<String>,
    /// Longest time that the command may take
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = seconds())]
    timeout: u64,
    /// The command, exactly these words; take `sh -c '...'` for a shell's. It may print 1 MiB; further writes fail
    #[arg(last = true, required = true, value_name = "CMD")]
    command: Vec<String>,
}

/// Runs the command.
pub fn run(lab: &Lab, args: Args, as_json: bool) -> anyhow::Result<Outcome> {
    let words: Vec<&str> = args.command.iter().map(String::as_str).collect();
    let timeout = Duration::from_secs(args.timeout);
    if let Some(name) = &args.guest {
        let output = lab.guest(name)?.exec(&words, timeout)?;
        if as_json {
            output::line(in_json(name, &Ok(output.clone())))?;
        } else {
            show(&output)?;
        }
        return Ok(Outcome::Status(output.status));
    }
    let guests = lab.guests()?;
    if guests.is_empty() {
        return Err(Stop::Usage(format!("no guests in {}", lab.dir().display())).into());
    }
    let results = in_all(&guests, &words, timeout);
    if as_json {
        let list: Vec<Value> = results.iter().map(|(name, result)| in_json(name, result)).collect();
        output::line(Value::from(list))?;
    } else {
        results.iter().try_for_each(|(name, result)| print(name, result))?;
    }
    let all_well = results.iter().all(|(_, result)| result.as_ref().is_ok_and(|output| output.status == 0));
    Ok(if all_well { Outcome::Done } else { Outcome::Partial })
}

type InGuest = (String, lab::Result<Output>);

fn in_all(guests: &[Guest], words: &[&str], timeout: Duration) -> Vec<InGuest> {
    thread::scope(|scope| {
        let run = |guest: &Guest| (guest.name.clone(), guest.exec(words, timeout));
        let running: Vec<_> = guests.iter().map(|guest| scope.spawn(move || run(guest))).collect();
        running.into_iter().map(|thread| thread.join().expect("no panic in exec")).collect()
    })
}

fn in_json(guest: &str, result: &lab::Result<Output>) -> Value {
    match result {
        Ok(output) => json!({
            "guest": guest,
            "status": output.status,
            "stdout": String::from_utf8_lossy(&output.stdout),
            "stderr": String::from_utf8_lossy(&output.stderr),
        }),
        Err(error) => json!({"guest": guest, "error": error.to_string()}),
    }
}

fn print(guest: &str, result: &lab::Result<Output>) -> anyhow::Result<()> {
    let status = result.as_ref().map_or(0, |output| output.status);
    let status = if status == 0 { String::new() } else { format!(": exit status {status}") };
    output::line(format_args!("== {guest}{status}"))?;
    match result {
        Ok(output) => show(output)?,
        Err(error) => say!("pagefold: {error}"),
    }
    Ok(())
}

/// Passes on the output of the command unchanged.
fn show(output: &Output) -> anyhow::Result<()> {
    output::bytes(&output.stdout)?;
    // An error of stderr is ignored, as in all commands.
    let _ = io::stderr().write_all(&output.stderr);
    Ok(())
}
