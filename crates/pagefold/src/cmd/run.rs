//! `pagefold run`: start any program as a member of a group.

mod ksm;
mod preload;
mod unfit;

use crate::cmd::which::Which;
use anyhow::Context;
use api::client::Service;
use api::enrol::Via;
use api::name;
use api::place::{Meant, Place};
use cli::exit::{Outcome, Stop};
use cli::say;
use host::{Check, Status};
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

pub use preload::library;

/// Arguments of `pagefold run`.
#[derive(clap::Args)]
#[command(after_help = "\
The program is not changed: a library is loaded into it (LD_PRELOAD), which sees the memory that
the program itself advises to be merged with madvise(MADV_MERGEABLE), as QEMU does with the RAM of
its guest. Where no service runs, a private one is started, in PAGEFOLD_DIR if that is set; it ends
by itself when the last member has ended. With --service, none is started.

With --via ksm, no library is loaded: ksmd, the kernel's own merger, merges all memory of the program and
of its children. It knows no groups, so the service's configuration must say that this host is one trust
domain. It serves any program, and kernels older than 6.8.

Exit code: the program's own, once it runs; 126 if it cannot be executed, 127 if there is no such
program; otherwise as for every command.

Examples:
  pagefold run --group acme --name web1 -- qemu-system-x86_64 -m 2G ...
  pagefold run --group acme --all-anonymous -- python3 server.py
  pagefold run --group acme --via ksm -- ./static-server")]
pub struct Args {
    /// The group: its members share pages with each other and with nobody else
    #[arg(long, value_name = "GROUP", value_parser = name::parse_group)]
    group: String,
    /// Name of the member in its group [default: the program's name and pid]
    #[arg(long, value_name = "NAME", value_parser = name::parse_member)]
    name: Option<String>,
    /// Fold all private anonymous memory (heap, arenas, large mappings), and not only what the program advises
    #[arg(long)]
    all_anonymous: bool,
    /// The merger: agent, or ksm for the kernel's own, which takes all memory and knows no groups
    #[arg(long, value_name = "MERGER", default_value = "agent", conflicts_with = "all_anonymous")]
    via: Via,
    #[command(flatten)]
    service: Which,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "CMD")]
    command: Vec<OsString>,
}

/// Runs the command. Does not return if all goes well.
pub fn run(args: &Args) -> anyhow::Result<Outcome> {
    let program = match preload::find_program(&args.command[0]) {
        Ok(program) => program,
        Err(missing) => {
            say!("pagefold: {missing}");
            return Ok(Outcome::Status(missing.code()));
        }
    };
    let mut command = Command::new(&program);
    command.arg0(&args.command[0]).args(&args.command[1..]);
    let file_name = program.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    match args.via {
        Via::Agent => preload_agent(args, &mut command, &program, &file_name)?,
        Via::Ksm => ksm::join(args, &mut command, &file_name)?,
    }
    let error = command.exec();
    say!("pagefold: cannot execute {}: {error}", program.display());
    Ok(Outcome::Status(if error.kind() == std::io::ErrorKind::NotFound { 127 } else { 126 }))
}

/// Makes this process a member, and has the agent loaded into the program.
fn preload_agent(args: &Args, command: &mut Command, program: &Path, file_name: &str) -> anyhow::Result<()> {
    preload::check_program(program)?;
    // The seccomp filters are examined first, because they may forbid calls that this process makes later.
    let filters = unfit::filters();
    if let Some(why) = unfit::by_filters(filters).or_else(|| unfit::by_sanitizer(program)) {
        say!("pagefold: {} runs without being folded: {why}", program.display());
        return Ok(());
    }
    let library = preload::library()?;
    check_host(&host::probe_host())?;
    let service = join(args, file_name)?;
    let socket = std::path::absolute(service.place.agent_socket()).context("the service's directory is not there")?;
    // The connection to the service must not stay open in the program.
    drop(service);
    command.env("LD_PRELOAD", preload::prepended(&library, std::env::var_os("LD_PRELOAD")));
    command.env("PAGEFOLD_SOCKET", socket).env("PAGEFOLD_PID", std::process::id().to_string());
    if filters > 0 {
        command.env("PAGEFOLD_FILTERS", filters.to_string());
    } else {
        command.env_remove("PAGEFOLD_FILTERS");
    }
    if args.all_anonymous {
        command.env("PAGEFOLD_ALL", "1");
    } else {
        command.env_remove("PAGEFOLD_ALL");
    }
    Ok(())
}

/// Makes this process a member at the chosen service, or else at the caller's own.
fn join(args: &Args, program: &str) -> anyhow::Result<Service> {
    let attempt = |service: &Service| service.join(&args.group, args.name.as_deref(), program, Via::Agent);
    let meant = args.service.meant();
    let found = match Service::find(&meant) {
        // A private service is then started in the preset directory. If that fails, its error is the better one.
        Err(_) if matches!(meant, Meant::Preset(_)) => Vec::new(),
        found => found?,
    };
    let mut refused: Option<anyhow::Error> = None;
    let mut own_runs = false;
    for service in found {
        own_runs |= service.place == Place::own();
        match attempt(&service) {
            Ok(_) => {
                if let Some(why) = refused {
                    say!("pagefold: the host's service refuses ({why:#}); your own service is used");
                }
                return Ok(service);
            }
            Err(e) => refused = Some(e),
        }
    }
    if let Some(why) = refused.take_if(|_| own_runs || meant != Meant::Nearest) {
        return Err(why);
    }
    let service = Service::start_private(meant.place())?;
    if let Some(why) = refused {
        say!("pagefold: the host's service refuses ({why:#}); a private one is used");
    }
    attempt(&service)?;
    Ok(service)
}

/// Fails if the kernel, its page size, or the rights of this process do not allow folding.
fn check_host(checks: &[Check]) -> anyhow::Result<()> {
    for id in ["kernel:uffdio_move", "kernel:memfd_seals", "memory:page_size"] {
        let Some(check) = checks.iter().find(|c| c.id == id && c.status != Status::Ok) else { continue };
        let rights = check.status == Status::Warn;
        let fix = if rights {
            "run as root, or set vm.unprivileged_userfaultfd=1, or give this user access to /dev/userfaultfd"
        } else {
            check.fix.as_deref().unwrap_or("use Linux 6.8 or newer")
        };
        return Err(Stop::HostLacks(format!("no folding here: {id}: {}; {fix}", check.found)).into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_host_features_are_reported_with_remedy() {
        let fine = |id: &str| Check::ok(id, "works", "folding");
        assert!(check_host(&[fine("kernel:uffdio_move"), fine("host:kvm").warn("x")]).is_ok());
        let says = |check: Check| match check_host(&[check]).unwrap_err().downcast_ref() {
            Some(Stop::HostLacks(why)) => why.clone(),
            _ => panic!("another error"),
        };
        let old = says(fine("kernel:uffdio_move").fail("use Linux 6.8 or newer"));
        assert!(old.ends_with("use Linux 6.8 or newer"), "{old}");
        let denied = says(fine("kernel:uffdio_move").warn("x"));
        assert!(denied.contains("vm.unprivileged_userfaultfd=1"), "{denied}");
    }
}
