//! `pagefold serve`: the service, whose supervisor is a program of its own.

use super::place::become_program;
use api::place::RULE;
use cli::exit::Outcome;
use std::ffi::OsString;
use std::path::PathBuf;

/// The program of the service's supervisor.
const PROGRAM: &str = "pagefoldd";

/// Arguments of `pagefold serve`.
#[derive(clap::Args)]
#[command(after_help = "\
Without a configuration, any group may be used by the user whose service it is. Root may ask, change
and audit it too (--service DIR), and has no members there.
`pagefold run` starts such a service by itself where none runs.

A configuration names the groups, who may start their members, and which other processes belong
to them. docs/pagefold.toml of the source is an annotated example with every key:

  [[group]]
  name = \"acme\"
  users = [\"alice\"]                # may start members, and change settings; root always may
  fold = \"on\"                      # or off, unfold
  intra-member-only = false        # true: pages of a member only with its own
  scan-rate = \"auto\"               # or pages a second, or \"adaptive\"
  zero-pages = \"share\"             # or ignore, when-idle
  huge-pages = 50                  # split one when 50% of it would fold; or \"never\"
  pool = \"64G\"                     # the most memory of the pool
  index-memory = \"1G\"              # the most memory of the index
  latency = \"quiet\"                # or eager: its threads preempt others when they wake

  [[group.processes]]              # members not started by pagefold run: all that is named must fit
  uid = \"qemu\"                     # this or cgroup must be named
  cgroup = \"/machine.slice/acme-*\"
  program = \"/usr/bin/qemu-*\"

  [[enrol]]                        # processes that run already become members: all that is named must fit
  group = \"acme\"
  cgroup = \"/system.slice/acme-*\" # this or another of the next six must be named
  container = \"acme-*\"
  container-label = \"tenant=acme\"
  domain = \"acme-*\"                # of libvirt: the RAM of its VM
  domain-metadata = true           # of libvirt: its metadata name this group
  unit = \"acme-*.service\"
  user = \"acme\"
  all-anonymous = true             # false: only memory that the program advises
  via = \"agent\"                  # or ksm, the kernel's own merger, which knows no groups
  at-least = \"4M\"                # smaller processes are left alone

  [service]                        # optional
  dir = \"/run/pagefold\"
  worker-uid-base = 61184
  prover = true                    # or false: no helper of root's that reads reference counts
  one-trust-domain = false         # true: all of this host trusts each other, so that ksmd may merge members
  reserve = \"1G\"                   # memory that unfolding leaves for other programs

  [api]                            # optional: JSON and metrics over HTTP, at DIR/api.sock
  socket = \"/run/pagefold/api.sock\"
  group = \"pagefold\"               # who may connect there, and see everything
  listen = \"127.0.0.1:9469\"        # and here, for those who have a token
  tokens = \"/etc/pagefold/tokens.toml\"
  control = false                  # true: settings can be changed there, too

  [balance]                        # optional: memory is lent between guests, see docs/balance.md
  policy = \"working-set\"           # or group, entitlement, equal, reporting
  admit = \"strict\"                 # or likely, none: how guests are admitted (pagefold admit)
  every = 5                        # seconds between two rounds
  floor = \"1G\"                    # memory that is never lent
  within = \"/machine.slice\"       # a control group whose memory limit stands for the host
  owners = [107]                   # users whose VMs are guests, too: otherwise root's, libvirt's, members
  move-within = \"10m\"            # a guest that is moved by move-to stays, if it has not arrived after this

  [sketch]                         # optional: sketches of guests for plans over many hosts, see docs/fleet.md
  every = \"10m\"
  dir = \"/var/lib/pagefold/sketches\"
  keys = \"/var/lib/pagefold/sketch\"
  keep = 144                       # most files of this host there
  keep-size = \"1G\"               # most bytes of them

  [history]                        # optional: figures of groups and members over time (pagefold history)
  dir = \"/var/lib/pagefold/history\"
  keep-size = \"1G\"               # most bytes of the file

  [[guest]]                        # what its name or id matches keeps this; the rest may be lent
  name = \"acme-*\"
  guaranteed = \"256M\"
  move-to = \"tcp:10.0.0.2:4444\"    # where it is moved when it is proposed while memory is short

  [park]                           # optional: guests that do nothing stand still, until pagefold wake
  idle = \"10m\"                     # for so long
  only = [\"acme-*\"]                # names or ids; these or groups have to be named
  groups = [\"acme\"]
  most = 100                       # at a time

When it is told to end (SIGTERM, SIGINT), members run on, and workers go on for 30 s, so that a
new service can take them over without any loss: stop and start it to upgrade. SIGHUP has it read
its configuration again, and says what of it only the next service takes over. When it is killed, workers go on until a new one takes over. What was changed by `pagefold group set` outlives a
service, until the configuration of that group is changed.

Examples:
  pagefold serve --config /etc/pagefold.toml   the host's service, as root
  pagefold serve                               your own service, for any group")]
pub struct Args {
    /// TOML file with the groups; see below
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    #[arg(long, value_name = "DIR", help = RULE)]
    dir: Option<PathBuf>,
    /// End the workers at once when it is told to end
    #[arg(long)]
    stop_workers: bool,
    /// Leave it to others to start `pagefold enrol apply`, which carries out the rules of [[enrol]]
    #[arg(long)]
    enrol_apart: bool,
    /// Started by `pagefold run`: end once there have been no members for a minute
    #[arg(long, hide = true, conflicts_with = "config")]
    private: bool,
    /// End once there have been no members for so many seconds, in place of 60; workers of groups too
    #[arg(long, hide = true, value_name = "SECONDS", default_value_t = 60)]
    linger: u64,
    /// Go on in the background
    #[arg(long, hide = true, requires_all = ["private", "dir"])]
    detach: bool,
    /// End workers that no supervisor takes over
    #[arg(long, hide = true, requires = "dir", conflicts_with = "private")]
    end_orphans: bool,
}

/// Runs the command: executes the supervisor `pagefoldd` in place of this process.
pub fn run(args: &Args) -> anyhow::Result<Outcome> {
    let remedy = "install all programs from one package, or cargo build -p service";
    Err(become_program(PROGRAM, remedy, args.words().into_iter()))
}

impl Args {
    /// The command line of the supervisor for these arguments.
    fn words(&self) -> Vec<OsString> {
        let value = |name: &str, value: &Option<PathBuf>| -> Vec<OsString> {
            value.iter().flat_map(|value| [name.into(), value.into()]).collect()
        };
        let flags = [
            ("--stop-workers", self.stop_workers),
            ("--enrol-apart", self.enrol_apart),
            ("--private", self.private),
            ("--detach", self.detach),
            ("--end-orphans", self.end_orphans),
        ];
        let given = flags.iter().filter(|(_, is_given)| *is_given).map(|(name, _)| OsString::from(name));
        let linger = ["--linger".into(), self.linger.to_string().into()];
        let values = [value("--config", &self.config), value("--dir", &self.dir)].concat();
        values.into_iter().chain(given).chain(linger).collect()
    }
}
