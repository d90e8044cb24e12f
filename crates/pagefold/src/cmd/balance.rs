//! `pagefold balance`: memory between guests, as it is, as it should be, and as it is made.

mod paces;
mod proposals;
mod show;
mod world;

use crate::cmd::migrate::parse_within;
use crate::cmd::which::Which;
use api::change::parse_destination;
use api::promise::{self, MOST_HOLD_S};
use balance::{Assurance, Ladder, Paces, Params, Policy, Refusal, Rung, Step, Stillness, make_room, plan, policy};
use clap::Subcommand;
use cli::exit::{Outcome, Stop};
use cli::output;
use cli::size::parse_bytes;
use lend::{Entry, Hold, Rules, Turn};
use proposals::Mover;
use serde::Serialize;
use show::{Answer, Answered, Done};
use std::time::Duration;
use survey::Selection;
use world::{Keep, World};

/// Least pause between two rounds: 1 s. Other processes can take the lock of the ledger meanwhile.
const LEAST_PAUSE: Duration = Duration::from_secs(1);

/// Arguments of `pagefold balance`.
#[derive(clap::Args)]
#[command(after_help = "\
A guest without --guaranteed keeps all its RAM: nothing is asked of it. The rest of a guest's size is a loan,
which is withdrawn within 10 s. docs/balance.md tells the policies.

Examples:
  pagefold balance status                                        what each guest has, and how its balloon does
  pagefold balance plan --guaranteed 'acme-*=256M'               what would be done, and why
  pagefold balance apply --guaranteed 'acme-*=256M' --every 10   do it, again and again
  pagefold balance reserve 512M --for acme-7                     make room for a guest before it starts")]
pub struct Args {
    #[command(subcommand)]
    action: Action,
    #[command(flatten)]
    common: Common,
}

/// Arguments that all actions share.
#[derive(clap::Args)]
struct Common {
    #[command(flatten)]
    selection: Selection,
    #[command(flatten)]
    service: Which,
    /// How memory is dealt out
    #[arg(long, value_name = "NAME", default_value = "working-set", value_parser = policy::NAMES, global = true)]
    policy: String,
    /// Size that guests keep whose id or name matches; the rest of their RAM may be lent to others (repeatable)
    #[arg(long, value_name = "GLOB=SIZE", value_parser = parse_guarantee, global = true)]
    guaranteed: Vec<(guest::Glob, u64)>,
    /// Memory that is never lent [default: 1/20 of the host's, 1 GiB at most; more where many guests have folded memory]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes, global = true)]
    floor: Option<u64>,
    /// Control group whose memory limit stands for the host, such as /machine.slice [default: all memory of the host]
    #[arg(long, value_name = "CGROUP", global = true)]
    within: Option<String>,
    /// User whose VMs are guests of this host, by number. Those of root, of libvirt, of containers, of machine.slice and of
    /// services are; a VM that another user runs is like any other program (repeatable)
    #[arg(long = "owner", value_name = "UID", global = true)]
    owners: Vec<u32>,
    /// Destination of guests whose id or name matches. One that is proposed for another host while memory is short is moved there at
    /// once, by pagefold migrate (repeatable) [default: an operator moves it]
    #[arg(long = "move", value_name = "GLOB=URI", value_parser = parse_move, global = true)]
    moves: Vec<(guest::Glob, String)>,
    /// Time after which a guest that was to be moved stays here, if it has not arrived [default: as pagefold migrate has it]
    #[arg(long, value_name = "TIME", value_parser = parse_within, global = true)]
    move_within: Option<u64>,
    /// Print JSON
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Subcommand)]
enum Action {
    /// Host, guests and reserve as they are
    Status,
    /// Changes that would be made, and why
    Plan,
    /// All offers of memory with their prices, and what the policy wants
    Explain,
    /// Do what is planned: guests that shrink first, then guests that grow
    Apply(ApplyArgs),
    /// Make room for a guest before it starts, or say why it cannot be
    Reserve(ReserveArgs),
    /// Pause guests for another process, and resume them when it ends
    #[command(hide = true)]
    Hold,
}

#[derive(clap::Args)]
struct ApplyArgs {
    /// Plan only
    #[arg(long)]
    dry_run: bool,
    /// Again every so many seconds, until it is ended
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    every: Option<u64>,
    /// How guests are admitted where nobody says how: against a full break storm, against the measured one, or against none
    #[arg(long, value_name = "POLICY", default_value = "strict", value_parser = parse_assurance)]
    admit: Assurance,
    /// Seconds that pass for the balancer's rules in one of the host's, for tests
    #[arg(long, value_name = "N", default_value_t = 1, hide = true, value_parser = clap::value_parser!(u32).range(1..=60))]
    hurry: u32,
    /// End when standard input closes
    #[arg(long, hide = true)]
    until_hangup: bool,
}

#[derive(clap::Args)]
struct ReserveArgs {
    /// Size of the guest; 0 ends its reservation
    #[arg(value_parser = parse_size_or_none)]
    size: u64,
    /// Name of the guest
    #[arg(long = "for", value_name = "NAME", value_parser = promise::parse_name)]
    name: String,
    /// Seconds after which the reservation lapses
    #[arg(long, value_name = "SECONDS", default_value_t = MOST_HOLD_S, value_parser = clap::value_parser!(u64).range(1..=MOST_HOLD_S))]
    hold: u64,
    /// Plan only
    #[arg(long)]
    dry_run: bool,
}

/// Parses a size, or 0.
fn parse_size_or_none(text: &str) -> Result<u64, String> {
    if text == "0" { Ok(0) } else { parse_bytes(text) }
}

/// Parses the name of a policy of admission.
pub fn parse_assurance(text: &str) -> Result<Assurance, String> {
    let known = || format!("there is no policy {text:?}; use {}", Assurance::NAMES.join(", "));
    Assurance::named(text).ok_or_else(known)
}

/// Parses `GLOB=SIZE`: the size that is guaranteed to guests with a matching id or name.
fn parse_guarantee(text: &str) -> Result<(guest::Glob, u64), String> {
    let (glob, size) = text.rsplit_once('=').ok_or("use GLOB=SIZE, such as acme-*=256M")?;
    Ok((glob.parse()?, parse_bytes(size)?))
}

/// Parses `GLOB=URI`: where guests with a matching id or name may be moved.
fn parse_move(text: &str) -> Result<(guest::Glob, String), String> {
    let (glob, to) = text.rsplit_once('=').ok_or("use GLOB=URI, such as acme-*=tcp:10.0.0.2:4444")?;
    Ok((glob.parse()?, parse_destination(to)?))
}

impl ApplyArgs {
    /// How the facts of each round are recorded for admissions; `None` if this process does not balance all guests,
    /// again and again.
    fn keep(&self, selection: &Selection) -> Option<Keep> {
        let every = self.every.filter(|_| selection.selects_all())?;
        Some(Keep { every: Duration::from_secs(every), assurance: self.admit })
    }
}

impl Common {
    fn rules(&self) -> Rules {
        Rules {
            guaranteed: self.guaranteed.clone(),
            floor_bytes: self.floor,
            within: self.within.clone(),
            owners: self.owners.clone(),
            moves: self.moves.clone(),
        }
    }

    fn policy(&self) -> anyhow::Result<&'static dyn Policy> {
        policy::named(&self.policy).ok_or_else(|| Stop::Usage(format!("there is no policy {}", self.policy)).into())
    }

    fn print(&self, answer: &impl Serialize, text: impl FnOnce() -> String) -> anyhow::Result<()> {
        if self.json { output::line(serde_json::to_string_pretty(answer)?) } else { output::bytes(text().as_bytes()) }
    }
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<Outcome> {
    let common = &args.common;
    if matches!(args.action, Action::Hold) {
        lend::hold();
        return Ok(Outcome::Done);
    }
    // A process that balances continuously uses its own rules, even if another such process has not ended yet.
    let is_balancer = matches!(&args.action, Action::Apply(apply) if apply.every.is_some());
    let mut world = World::new(common, is_balancer)?;
    match &args.action {
        Action::Apply(apply) if !apply.dry_run => return run_apply(common, &mut world, apply),
        Action::Reserve(reserve) => return run_reserve(common, &mut world, reserve),
        _ => {}
    }
    world.look_twice()?;
    let plan = plan(&world.facts, common.policy()?, &world.history, world.at(), &Params::default());
    let wishes = matches!(args.action, Action::Explain).then(|| {
        let lendable = plan.budget.lendable_bytes(0);
        common.policy().map(|policy| policy.sizes(&world.facts, lendable))
    });
    let answer = Answer {
        plan: (!matches!(args.action, Action::Status)).then_some(&plan),
        budget: plan.budget,
        reserve: plan.reserve,
        proposal: world.proposed(),
        explained: wishes.transpose()?.map(|wishes| show::Explained::of(&world.facts, wishes)),
        facts: &world.facts,
    };
    common.print(&answer, || show::text(&answer))?;
    Ok(Outcome::Done)
}

/// Makes the balancer's clock run `rate` times as fast. Returns the planner's constants for this clock.
fn hurried(world: &mut World, rate: u32) -> Params {
    world.gatherer.hurry(rate);
    let usual = Params::default();
    Params { withdrawal: usual.withdrawal / rate, ..usual }
}

/// Acts against memory pressure: changes the rung of the pressure ladder, the pace of groups, and the guest that is
/// proposed for another host. Does nothing in a single round, where `every` is `None`.
fn answer(
    world: &mut World,
    ladder: &mut Ladder,
    paces: &mut Paces,
    every: Option<u64>,
    turn: &Turn,
) -> anyhow::Result<Answered> {
    let Some(every) = every.map(Duration::from_secs) else { return Ok(Answered::default()) };
    let rung = world.climb(ladder, turn)?;
    Ok(Answered { rung, paced: world.pace(paces, every, turn)?, proposal: world.propose(turn)? })
}

/// Carries plans out, once or again and again.
fn run_apply(common: &Common, world: &mut World, apply: &ApplyArgs) -> anyhow::Result<Outcome> {
    let params = hurried(world, apply.hurry);
    if apply.until_hangup {
        end_at_hangup();
    }
    let (mut is_first, mut ladder, mut paces, mut stillness) =
        (true, Ladder::default(), Paces::default(), Stillness::default());
    let (every, mut mover) = (Duration::from_secs(apply.every.unwrap_or(1)), Mover::default());
    loop {
        if world.is_still(&mut stillness) {
            world.rest(every);
            continue;
        }
        let (began, turn) = (world.at(), world.take_turn()?);
        let mut hold = Hold::default();
        // Guests are paused before facts are gathered anew, which takes some time.
        world.pause(&mut hold, &turn, &params)?;
        if apply.every.is_some() {
            world.ledger.note_rules(&turn, world.gatherer.rules())?;
        }
        world.look()?;
        if std::mem::take(&mut is_first) {
            world.pause(&mut hold, &turn, &params)?;
            world.look_again()?;
        }
        let at = world.at();
        let answered = answer(world, &mut ladder, &mut paces, apply.every, &turn)?;
        let plan = world.plan(common.policy()?, at, &params, apply.keep(&common.selection))?;
        let outcomes = world.carry_out((&plan.frees, &plan.grows), &mut hold, &turn, &params)?;
        let paused = hold.end(&mut world.ledger, &turn)?;
        drop(turn);
        mover.go(answered.proposal.as_ref(), common);
        world.learn(&outcomes, at);
        let complete = outcomes.iter().all(|outcome| outcome.problem.is_none());
        let had_nothing_to_do = outcomes.is_empty() && paused.is_empty() && ladder.rung() == Rung::Idle;
        stillness.note(&world.facts.host, had_nothing_to_do && world.gatherer.is_settled());
        let (at_s, drivers) = (host::boot_clock_s(), world.gatherer.drivers());
        let done = Done { at_s, plan: &plan, outcomes: &outcomes, drivers, answered: &answered, paused: &paused };
        match apply.every {
            None => {
                common.print(&done, || done.text())?;
                return Ok(if complete { Outcome::Done } else { Outcome::Partial });
            }
            Some(_) if common.json => output::line(serde_json::to_string(&done)?)?,
            Some(_) => output::bytes(done.text().as_bytes())?,
        }
        // The time that the round took counts as part of `every`.
        world.rest(every.saturating_sub(world.at() - began).max(LEAST_PAUSE));
    }
}

/// Starts a thread that ends this process when standard input closes. Balancing may be killed at any instant without
/// harm: docs/balance.md.
fn end_at_hangup() {
    std::thread::spawn(|| {
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        std::process::exit(0);
    });
}

/// Makes room for a guest that is to start.
fn run_reserve(common: &Common, world: &mut World, reserve: &ReserveArgs) -> anyhow::Result<Outcome> {
    let params = Params::default();
    if reserve.dry_run {
        world.look_twice()?;
        let steps = make_room(&world.facts, &reserve.name, reserve.size, &params);
        let steps = steps.or_else(|refusal| refuse(common, &refusal))?;
        common.print(&steps, || show::steps_text(&steps))?;
        return Ok(Outcome::Done);
    }
    let turn = world.take_turn()?;
    // An older reservation of the same guest gives way to this one.
    world.ledger.promises()?.set(&reserve.name, 0, 0)?;
    if reserve.size == 0 {
        common.print(&[(); 0], String::new)?;
        return Ok(Outcome::Done);
    }
    world.look_twice()?;
    let steps = match promise_room(world, reserve, &params)? {
        Ok(steps) => steps,
        Err(refusal) => {
            world.ledger.write_down(&turn, Entry::Refusal(&refusal))?;
            return refuse(common, &refusal);
        }
    };
    let outcomes = world.carry_out((&steps, &[]), &mut Hold::default(), &turn, &params)?;
    world.look()?;
    let spare = balance::Budget::of(&world.facts).spare_bytes;
    if spare < 0 {
        world.ledger.promises()?.set(&reserve.name, 0, 0)?;
        let reason = format!("balloons freed less than expected, {} MiB are missing", spare.unsigned_abs() >> 20);
        let refusal = Refusal { guest: reserve.name.clone(), bytes: reserve.size, reason };
        world.ledger.write_down(&turn, Entry::Refusal(&refusal))?;
        return refuse(common, &refusal);
    }
    common.print(&outcomes, || show::outcomes_text(&outcomes))?;
    Ok(Outcome::Done)
}

/// Plans room, and promises it before anything is freed: if this process is killed, other processes keep the memory for
/// the guest.
fn promise_room(
    world: &mut World,
    reserve: &ReserveArgs,
    params: &Params,
) -> anyhow::Result<Result<Vec<Step>, Refusal>> {
    let mut promises = world.promises()?;
    let room = make_room(&world.facts, &reserve.name, reserve.size, params);
    if room.is_ok() {
        promises.set(&reserve.name, reserve.size, reserve.hold)?;
    }
    Ok(room)
}

/// Ends with the reason why there is no room.
fn refuse<T>(common: &Common, refusal: &Refusal) -> anyhow::Result<T> {
    if common.json {
        common.print(refusal, String::new)?;
    }
    anyhow::bail!("no room for {}: {}", refusal.guest, refusal.reason)
}
