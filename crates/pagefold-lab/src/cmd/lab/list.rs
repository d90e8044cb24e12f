//! `pagefold lab list`

use cli::exit::Outcome;
use cli::{output, say};
use lab::{Guest, GuestState, Image, Lab};
use report::{Align, Table};
use serde_json::{Value, json};

/// Runs the command.
pub fn run(lab: &Lab, as_json: bool) -> anyhow::Result<Outcome> {
    print(lab, &lab.guests()?, as_json)
}

/// Prints some guests of a lab.
pub fn print(lab: &Lab, guests: &[Guest], as_json: bool) -> anyhow::Result<Outcome> {
    if as_json {
        let listed: Vec<Value> = guests.iter().map(in_json).collect::<serde_json::Result<_>>()?;
        let whole = json!({"dir": lab.dir(), "groups_file": lab.groups_file(), "guests": listed});
        output::line(serde_json::to_string_pretty(&whole)?)?;
        return Ok(Outcome::Done);
    }
    if guests.is_empty() {
        output::line(format_args!("no guests in {}", lab.dir().display()))?;
        return Ok(Outcome::Done);
    }
    let (left, right) = (Align::Left, Align::Right);
    let columns = [("GUEST", left), ("GROUP", left), ("IMAGE", left), ("PID", right), ("READY", right), ("RAM", right)];
    let mut table = Table::new(&columns);
    for guest in guests {
        let pid = guest.pid.map_or_else(|| "-".into(), |pid| pid.to_string());
        let age = guest.age_seconds.unwrap_or_default();
        let ready = match guest.state {
            GuestState::Ended => "ended".into(),
            GuestState::Ready => time(guest.ready_seconds.unwrap_or_default()),
            GuestState::Starting => format!("not yet, after {age} s"),
            GuestState::Failed => format!("failed, {age} s ago"),
        };
        let memory = guest.memory_bytes.map_or_else(|| "-".into(), cli::bytes);
        table.row([guest.name.clone(), guest.group.clone(), image_name(guest.image), pid, ready, memory]);
    }
    output::bytes(table.to_string().as_bytes())?;
    if guests.iter().any(|guest| guest.state == GuestState::Failed) {
        let dir = lab.dir().display();
        say!(
            "failed: the lab up that started it is gone, and it was not ready; pagefold lab down --dir {dir} ends all"
        );
    }
    Ok(Outcome::Done)
}

/// A time for people to read.
pub fn time(seconds: f64) -> String {
    if seconds < 1.0 { format!("{:.0} ms", seconds * 1000.0) } else { format!("{seconds:.1} s") }
}

/// A guest as JSON, with all its processes.
fn in_json(guest: &Guest) -> serde_json::Result<Value> {
    let mut value = serde_json::to_value(guest)?;
    value["pids"] = json!(guest.pids());
    Ok(value)
}

/// An image's name as `--image` takes it.
pub fn image_name(image: Image) -> String {
    let value = serde_json::to_value(image).expect("a plain name");
    value.as_str().expect("a plain name").to_owned()
}
