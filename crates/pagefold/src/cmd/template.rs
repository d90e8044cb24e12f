//! `pagefold template`: guests as files, from which clones are started.

use super::apart::become_lab;
use anyhow::Context;
use api::name;
use clap::Subcommand;
use cli::exit::{Outcome, Stop};
use cli::output;
use cli::size::parse_bytes;
use guest::{Guest, Survey};
use host::ProcessId;
use report::{Align, Table};
use serde_json::{Value, json};
use start::{Clones, Running, Source, Store, Template};
use std::path::Path;
use std::time::{Duration, SystemTime};

/// Arguments of `pagefold template`.
#[derive(clap::Args)]
#[command(after_help = "\
A template is a guest at one instant, as files: memory, device state and disk. It belongs to a group: its clones share its
pages, and other groups cannot clone it. It stays when the host is started again. Templates lie in PAGEFOLD_TEMPLATES, or
else /var/lib/pagefold/templates.

Examples:
  pagefold template create web --image tiny --group acme
  pagefold clone web --count 10 --group acme")]
pub struct Args {
    #[command(subcommand)]
    action: Action,
    /// Print JSON
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Subcommand)]
enum Action {
    /// Boot a guest, and make a template of it when it is idle
    Create(CreateArgs),
    /// Show the templates
    List,
    /// Show one template: its size, its clones, its age, and the VMM and the processor that it needs
    Show(WhichArgs),
    /// Read all of its files, and compare them with what they were when it was made
    Verify(WhichArgs),
    /// Remove a template that has no clones
    Remove(RemoveArgs),
}

/// Arguments of `pagefold template create`.
#[derive(clap::Args)]
pub struct CreateArgs {
    /// Name of the template in its group
    name: String,
    /// The group whose guests it may become
    #[arg(long, value_name = "GROUP", value_parser = name::parse_group)]
    group: String,
    /// Image of the guest, as for pagefold lab: tiny or debian. It takes pagefold-lab
    #[arg(long, value_name = "IMAGE", required_unless_present = "from")]
    image: Option<String>,
    /// A VM that runs, by its name or id in pagefold guests: it goes on running. It must have no disk that it may write
    #[arg(long, value_name = "GUEST", conflicts_with_all = ["image", "memory", "append", "qemu_args"])]
    from: Option<String>,
    /// RAM of the guest [default: 256M, debian 512M]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub memory: Option<u64>,
    /// Add to the kernel's command line
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true, allow_hyphen_values = true)]
    pub append: String,
    /// Add an argument to QEMU's command line; give one for each word
    #[arg(long = "qemu-arg", value_name = "WORD", allow_hyphen_values = true)]
    pub qemu_args: Vec<String>,
    /// Make a template of a guest in which nobody answers, too
    #[arg(long)]
    pub allow_unconfirmed: bool,
    /// Longest time that the guest may take to answer
    #[arg(long, value_name = "SECONDS", default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub timeout: u64,
}

#[derive(clap::Args)]
struct WhichArgs {
    /// Name of the template
    name: String,
    /// Its group; needed where several have a template of this name
    #[arg(long, value_name = "GROUP", value_parser = name::parse_group)]
    group: Option<String>,
}

#[derive(clap::Args)]
struct RemoveArgs {
    #[command(flatten)]
    which: WhichArgs,
    /// If clones live, remove it after the last of them, and make no more until then
    #[arg(long)]
    when_unused: bool,
}

/// Runs the command. pagefold-lab runs it in place of this program if it is for an image.
///
/// # Errors
/// Files of a template cannot be read or written, or pagefold-lab is needed and not installed.
pub fn run(args: &Args) -> anyhow::Result<Outcome> {
    run_with(args, &|_, _| Err(become_lab()))
}

/// Runs the command. `of_image` gives the machine of the image with this name.
///
/// # Errors
/// Files of a template cannot be read or written, or there is no such machine.
pub fn run_with(
    args: &Args,
    of_image: &dyn Fn(&CreateArgs, &str) -> anyhow::Result<Source>,
) -> anyhow::Result<Outcome> {
    let store = Store::open(&start::templates_dir());
    let clones = Clones::open(&start::clones_dir());
    match &args.action {
        Action::Create(create) => {
            store.tidy(&clones.list()?)?;
            let source = |image: &str| of_image(create, image);
            run_create(&store, create, args.json, &source)
        }
        Action::List => list(&store, &clones, args.json),
        Action::Show(which) => show(&which.find(&store)?, &clones, args.json),
        Action::Verify(which) => verify(&store, &which.find(&store)?, args.json),
        Action::Remove(remove) => {
            let template = remove.which.find(&store)?;
            let gone = store.remove(&template, &clones, remove.when_unused)?;
            let what = if gone { "removed" } else { "is removed after its last clone:" };
            say(args.json, &json!({"name": template.name, "group": template.group, "removed": gone}), what)
        }
    }
}

impl WhichArgs {
    fn find(&self, store: &Store) -> anyhow::Result<Template> {
        let found = match &self.group {
            Some(group) => store.find(group, &self.name),
            None => store.find_any(&self.name),
        };
        Ok(found?.0)
    }
}

fn run_create(
    store: &Store,
    args: &CreateArgs,
    as_json: bool,
    of_image: &dyn Fn(&str) -> anyhow::Result<Source>,
) -> anyhow::Result<Outcome> {
    let template = match (&args.from, &args.image) {
        (Some(guest), _) => store.create_from(&args.group, &args.name, &running(guest)?)?,
        (None, Some(image)) => store.create(&args.group, &args.name, &of_image(image)?)?,
        (None, None) => return Err(Stop::Usage("say --image or --from".into()).into()),
    };
    say(as_json, &line(&template, 0), "made")
}

/// The running VM with this name or id, and how it can be copied.
fn running(name: &str) -> anyhow::Result<Running> {
    let usage = |text: String| anyhow::Error::from(Stop::Usage(text));
    let guests = Survey::take()?.guests(&[], &[]);
    let found: Vec<&Guest> = guests.iter().filter(|guest| guest.id == name || guest.name == name).collect();
    let [guest] = found[..] else {
        return Err(usage(format!(
            "{} guests are called {name}: pagefold guests lists them, with their ids",
            found.len()
        )));
    };
    let process = host::Process::read(guest.pids[0])?;
    let no_qmp = || usage(format!("{name} has no QMP socket, by which it could be copied"));
    let facts = guest.facts.qemu.as_ref().ok_or_else(|| usage(format!("{name} is no QEMU")))?;
    let [memory_bytes] = guest.facts.ram_blocks_bytes[..] else {
        return Err(usage(format!("the memory of {name} is no plain block")));
    };
    let mut words = process.cmdline.clone();
    let program = process.exe.clone().ok_or_else(|| usage(format!("the program of {name} is not known")))?;
    words.splice(..1, [program.to_string_lossy().into_owned()]);
    Ok(Running {
        process: ProcessId::of(process.pid)?,
        sees_cpu: words.iter().any(|word| word.contains("kvm")),
        words,
        qmp: facts.qmp_socket.clone().ok_or_else(no_qmp)?.into(),
        memory_bytes,
    })
}

/// Prints what has become of a template: as JSON, or as its name behind `what`.
fn say(as_json: bool, value: &Value, what: &str) -> anyhow::Result<Outcome> {
    if as_json {
        output::line(serde_json::to_string_pretty(value)?)?;
    } else {
        let text = |field: &str| value[field].as_str().unwrap_or_default().to_owned();
        output::line(format_args!("{what} template {} of group {}", text("name"), text("group")))?;
    }
    Ok(Outcome::Done)
}

/// A template as JSON.
fn line(template: &Template, clones: usize) -> Value {
    let made = SystemTime::UNIX_EPOCH + Duration::from_secs(template.made_s);
    json!({
        "name": template.name,
        "group": template.group,
        "memory_bytes": template.memory.bytes,
        "stored_bytes": template.stored_bytes(),
        "clones": clones,
        "age_seconds": made.elapsed().unwrap_or_default().as_secs(),
        "vmm": template.vmm.version,
        "cpu": template.cpu,
        "digest": template.memory.digest,
        "has_disk": template.disk.is_some(),
        "has_helper": template.has_helper,
    })
}

fn list(store: &Store, clones: &Clones, as_json: bool) -> anyhow::Result<Outcome> {
    let living = clones.list()?;
    store.tidy(&living)?;
    let templates = store.list()?;
    let count = |template: &Template| living.iter().filter(|clone| clone.is_of(template)).count();
    if as_json {
        let lines: Vec<Value> = templates.iter().map(|template| line(template, count(template))).collect();
        output::line(serde_json::to_string_pretty(&json!({"templates": lines}))?)?;
        return Ok(Outcome::Done);
    }
    if templates.is_empty() {
        output::line(format_args!("no templates in {}", start::templates_dir().display()))?;
        return Ok(Outcome::Done);
    }
    let (left, right) = (Align::Left, Align::Right);
    let columns =
        [("TEMPLATE", left), ("GROUP", left), ("RAM", right), ("STORED", right), ("CLONES", right), ("AGE", right)];
    let mut table = Table::new(&columns);
    for template in &templates {
        let value = line(template, count(template));
        let age = humantime::format_duration(Duration::from_secs(value["age_seconds"].as_u64().unwrap_or(0) / 60 * 60));
        let sizes = (cli::bytes(template.memory.bytes), cli::bytes(template.stored_bytes()));
        let clones = count(template).to_string();
        table.row([template.name.clone(), template.group.clone(), sizes.0, sizes.1, clones, age.to_string()]);
    }
    output::bytes(table.to_string().as_bytes())?;
    Ok(Outcome::Done)
}

fn show(template: &Template, clones: &Clones, as_json: bool) -> anyhow::Result<Outcome> {
    let value = line(template, clones.of(template)?.len());
    if as_json {
        return say(true, &value, "");
    }
    for (field, found) in value.as_object().context("a template is an object")? {
        let found = found.as_str().map_or_else(|| found.to_string(), str::to_owned);
        output::line(format_args!("{field:<13} {found}"))?;
    }
    Ok(Outcome::Done)
}

fn verify(store: &Store, template: &Template, as_json: bool) -> anyhow::Result<Outcome> {
    let dir = store.dir_of(&template.group, &template.name);
    check_dir(&dir)?;
    template.verify(&dir)?;
    say(as_json, &json!({"name": template.name, "group": template.group, "whole": true}), "nothing has changed in")
}

fn check_dir(dir: &Path) -> anyhow::Result<()> {
    if dir.is_dir() { Ok(()) } else { Err(Stop::Usage(format!("{} is gone", dir.display())).into()) }
}
