//! `pagefold doctor`: the requirements that this host and each guest meet, and the reasons why nothing merges.

mod fix;
mod folding;
mod parts;

use crate::cmd::which::Which;
use anyhow::Context;
use cli::exit::{Outcome, Stop};
use host::{Check, KernelFault, Ksm, KvmTrial, Status};
use serde::Serialize;
use std::io::Write;
use std::path::PathBuf;
use survey::Selection;

/// Arguments of `pagefold doctor`.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    selection: Selection,
    #[command(flatten)]
    service: Which,
    /// Print the settings of this host that members need and that are missing: mappings, /dev/userfaultfd, a group
    #[arg(long, conflicts_with = "json")]
    fix: bool,
    /// With --fix: make them
    #[arg(long, requires = "fix")]
    yes: bool,
    /// With --fix: the files of a system that does not run
    #[arg(long, requires = "fix", value_name = "DIR", default_value = "/")]
    root: PathBuf,
    /// Print JSON: {checks, kernel_faults}
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: Args) -> anyhow::Result<Outcome> {
    if args.fix {
        return fix::run(&args.root, args.yes);
    }
    let guests = args.selection.resolve(&|| args.service.members())?;
    let has_ksm = Ksm::read().is_some();
    let mut checks = host::probe_host();
    let trial = cli::cache_dir().and_then(|dir| KvmTrial::known(&dir));
    checks.iter_mut().filter(|c| c.id == "host:kvm").for_each(|kvm| add_trial(kvm, trial.as_ref()));
    checks.push(folding::check_library());
    checks.push(parts::check());
    let folding = folding::Folding::ask(&args.service.meant());
    checks.extend(folding.check_service());
    checks.extend(guests.iter().map(|guest| guest::check_mergeable(guest, has_ksm, folding.follows(guest))));
    checks.extend(guests.iter().map(|guest| folding.check(guest)));
    let mut out = std::io::stdout().lock();
    let kernel_faults = host::kernel_faults(&host::Kernel::this().release);
    let written = if args.json {
        report::json::write(&mut out, &Found { checks: &checks, kernel_faults: &kernel_faults })
    } else {
        report::doctor_table::write(&mut out, &checks, &kernel_faults)
    };
    written.and_then(|()| out.flush()).context("cannot write to stdout")?;
    missing(&checks)
}

/// All that `--json` prints.
#[derive(Serialize)]
struct Found<'a> {
    /// Features of the host and of each guest.
    checks: &'a [Check],
    /// Known faults of kernels in moving pages and in finding written ones.
    kernel_faults: &'a [KernelFault],
}

/// Adds to the check of KVM whether a kernel boots in it. The lab has found that out, and uses KVM or emulation by it.
fn add_trial(kvm: &mut Check, trial: Option<&KvmTrial>) {
    match trial {
        _ if kvm.status != Status::Ok => {}
        Some(KvmTrial::Boots) => kvm.found += ", and a kernel boots in it: pagefold lab uses KVM",
        Some(KvmTrial::Fails(why)) => {
            let fix = "on a virtual machine, let its host nest VMs; pagefold lab emulates until then (TCG)";
            *kvm = Check { found: why.clone(), ..kvm.clone() }.warn(fix);
        }
        None => kvm.found += "; whether a kernel boots in it, pagefold lab up finds out",
    }
}

/// Fails if a check has failed, and names these checks: this host lacks what they are about.
fn missing(checks: &[Check]) -> anyhow::Result<Outcome> {
    let failed: Vec<&str> = checks.iter().filter(|c| c.status == Status::Fail).map(|c| c.id.as_str()).collect();
    if failed.is_empty() {
        return Ok(Outcome::Done);
    }
    Err(Stop::HostLacks(format!("this host lacks {}; see the fix of each", failed.join(", "))).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_failed_checks_are_an_error() {
        let fine = Check::ok("a:b", "x", "y");
        assert!(matches!(missing(&[fine.clone(), fine.clone().warn("z")]), Ok(Outcome::Done)));
        let error = missing(&[fine.clone(), fine.fail("z")]).unwrap_err();
        assert!(matches!(error.downcast_ref(), Some(Stop::HostLacks(why)) if why.contains("a:b")));
    }
}
