//! `pagefold bench place --moved`: what a plan predicts for real guests beside what an audit finds.
//!
//! Two guests of one image are sketched, each as if it were the only one of a host. The plan moves one to the other. In truth they are on
//! one host, where a service folds them as the plan expects. Then page frames are counted.

use crate::guardian::Guardian;
use crate::serving::Serving;
use anyhow::{Context, bail, ensure};
use cli::exit::Outcome;
use cli::say;
use lab::{Cache, Fold, Guest, Idle, Image, Lab, Spec};
use serde_json::Value;
use std::ffi::OsString;
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// The option by which guests are run and their predicted savings checked.
const MOVED: &str = "--moved";
/// RAM of a guest, in bytes: 128 MiB.
const RAM: u64 = 128 << 20;
/// Name of the guests' group.
const GROUP: &str = "moved";
/// Names of the two hosts.
const HOSTS: [&str; 2] = ["one", "two"];
/// Longest time until guests are idle: 1 min.
const IDLE_WITHIN: Duration = Duration::from_secs(60);
/// Longest time until folding is settled: 2 min.
const SETTLED_WITHIN: Duration = Duration::from_secs(120);
/// Folding counts as settled after this many readings of the savings without a change, a second apart.
const STILL_LOOKS: usize = 8;

/// Arguments of `pagefold bench place`, which pagefold-place knows.
#[derive(clap::Args)]
#[command(disable_help_flag = true)]
pub struct Args {
    /// Arguments of pagefold-place, which --help lists
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENT")]
    words: Vec<OsString>,
}

/// A move in a plan, and what it saves.
struct Predicted {
    /// Name of the guest that moves.
    moved: String,
    /// Bytes that the plan says the move saves.
    predicted_bytes: u64,
    /// Bytes that the guests save on one host beyond what each saves alone, by page frames.
    audited_bytes: u64,
}

/// Runs the command: measures the moves where the arguments ask for that, and calls `place` with the completed arguments.
pub fn run(args: &Args, place: impl FnOnce(&[OsString]) -> anyhow::Result<Outcome>) -> anyhow::Result<Outcome> {
    let mut words = args.words.clone();
    if let Some(at) = words.iter().position(|word| word == MOVED) {
        words.remove(at);
        let Predicted { moved, predicted_bytes, audited_bytes } = measured()?;
        words.extend(["--predicted".into(), format!("{moved}:{predicted_bytes}:{audited_bytes}").into()]);
    }
    place(&words)
}

fn measured() -> anyhow::Result<Predicted> {
    let mut guardian = Guardian::start()?;
    let dir = std::env::temp_dir().join(format!("pagefold-bench-{}", std::process::id()));
    DirBuilder::new().mode(0o711).create(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    guardian.keep_dir(&dir)?;
    let found = moved(&dir, &mut guardian);
    let put_back = guardian.finish();
    let found = found?;
    put_back?;
    Ok(found)
}

fn moved(dir: &Path, guardian: &mut Guardian) -> anyhow::Result<Predicted> {
    let own = program()?;
    let serving = Serving::start(dir, &format!("[[group]]\nname = '{GROUP}'\nfold = 'off'\n"), guardian)?;
    let lab_dir = dir.join("lab");
    guardian.keep_lab(&lab_dir)?;
    let lab = Lab::open(&lab_dir)?;
    let fold = Fold { pagefold: program()?, service: Some(serving.dir().to_owned()) };
    let (groups, guests) = (vec![GROUP.to_owned()], HOSTS.len());
    let spec =
        Spec { guests, groups, memory_bytes: Some(RAM), saved: true, fold: Some(fold), ..Spec::new(Image::Tiny) };
    say!("pagefold: place: {guests} guests go on from saved states");
    let guests = lab.up(&spec, &Cache::open(&lab::cache_dir()?)?, &|_| {})?;
    ensure!(lab.settle(Idle::default(), IDLE_WITHIN, &|_| {})?.idle, "the guests are not idle: is this host busy?");
    for (guest, host) in guests.iter().zip(HOSTS) {
        sketch(host, guest, dir)?;
    }
    let tables = dir.join("tables");
    let asked = |words: &[&str]| json(Command::new(&own).args(words).arg(&tables).env("PAGEFOLD_DIR", serving.dir()));
    let (plan, fleet) = (asked(&["place", "--json", "--storm", "0"])?, asked(&["fleet", "--json"])?);
    let first = &plan["moves"][0];
    let predicted_bytes = bytes(first, "saved_bytes")?;
    let apart = bytes(&fleet, "saved_without_zero_bytes")? + bytes(&fleet, "zero_bytes")?;
    let set =
        Command::new(&own).args(["group", "set", GROUP, "--fold", "on"]).env("PAGEFOLD_DIR", serving.dir()).output();
    ensure!(set.context("cannot run pagefold group set")?.status.success(), "folding cannot be set on");
    until_settled(&serving)?;
    let audit = json(Command::new(&own).args(["audit", "--json"]).env("PAGEFOLD_DIR", serving.dir()))?;
    let audited_bytes = saved_bytes(&audit)?.saturating_sub(apart);
    // The guests must end before the service of which they are members.
    lab.down()?;
    Ok(Predicted { moved: first["guest"].as_str().unwrap_or_default().to_owned(), predicted_bytes, audited_bytes })
}

/// Sketches one guest as if it were the only one of a host with this name.
fn sketch(host: &str, guest: &Guest, dir: &Path) -> anyhow::Result<()> {
    let script = "hostname \"$1\"; shift; exec \"$@\"";
    let mut command = Command::new("unshare");
    command.args(["--uts", "sh", "-c", script, "sh", host]).arg(program()?);
    command.args(["sketch", "--fine", "--group-by", "all", "--guest", &guest.name, "--json"]);
    command.arg("--keys").arg(dir.join("keys")).arg("--parquet").arg(dir.join("tables"));
    std::fs::create_dir_all(dir.join("tables")).context("cannot make a directory for tables")?;
    json(&mut command).map(drop)
}

/// Bytes that folding saves, by an audit of page frames. Tables of the service and its agents are not subtracted: no
/// plan predicts them.
fn saved_bytes(audit: &Value) -> anyhow::Result<u64> {
    let savings = audit["by_group"].as_array().and_then(|all| all.iter().find(|group| group["savings"].is_object()));
    let savings = &savings.context("the audit tells no savings")?["savings"];
    let all = bytes(savings, "folded_bytes")? + bytes(savings, "zero_bytes")?;
    Ok(all.saturating_sub(bytes(savings, "pool_bytes")?))
}

fn bytes(of: &Value, name: &str) -> anyhow::Result<u64> {
    of[name].as_u64().with_context(|| format!("no {name} in {of}"))
}

/// Waits until the group's savings do not change any more.
fn until_settled(serving: &Serving) -> anyhow::Result<()> {
    let (begin, mut last, mut still) = (Instant::now(), 0, 0);
    while begin.elapsed() < SETTLED_WITHIN {
        std::thread::sleep(Duration::from_secs(1));
        let report = serving.show(GROUP)?.report;
        let saved = report.sharing_pages + report.zero_pages;
        still = if saved > 0 && saved.abs_diff(last) <= saved / 200 { still + 1 } else { 0 };
        last = saved;
        if still >= STILL_LOOKS {
            return Ok(());
        }
    }
    bail!("folding is not settled after {} s", SETTLED_WITHIN.as_secs())
}

fn json(command: &mut Command) -> anyhow::Result<Value> {
    let output = command.output().with_context(|| format!("cannot run {}", command.get_program().display()))?;
    ensure!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// Path of this program, to run it again.
fn program() -> anyhow::Result<PathBuf> {
    std::env::current_exe().context("cannot find this program to start it again")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn savings_are_what_is_folded_and_zeros_without_the_pool() {
        let group = |bytes: u64| json!({"savings": {"folded_bytes": bytes, "zero_bytes": 5, "pool_bytes": 3}});
        assert_eq!(saved_bytes(&json!({"by_group": [{"name": "no member"}, group(10)]})).unwrap(), 12);
        assert!(saved_bytes(&json!({"by_group": []})).is_err());
    }

    #[test]
    fn other_words_go_to_the_other_program_alone() {
        let args = Args { words: vec!["--json".into()] };
        let mut seen = Vec::new();
        run(&args, |words| {
            seen = words.to_vec();
            Ok(Outcome::Done)
        })
        .unwrap();
        assert_eq!(seen, ["--json"]);
    }
}
