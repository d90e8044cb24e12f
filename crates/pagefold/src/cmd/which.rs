//! The option `--service`, the same for every command that asks one.

use api::ask::MemberLine;
use api::client::Service;
use api::place::{Meant, RULE};
use guest::Membership;
use host::ProcessId;
use std::ffi::OsString;
use std::path::PathBuf;

/// The service that the caller means.
#[derive(clap::Args)]
pub struct Which {
    #[arg(long, global = true, value_name = "DIR", help = RULE)]
    service: Option<PathBuf>,
}

impl Which {
    /// The service in the directory of `--service` or of the environment; without both, the service of the host or of
    /// the caller.
    pub fn meant(&self) -> Meant {
        Meant::of(self.service.as_deref(), None)
    }

    /// The option `--service` as words of a command line, for another program.
    pub fn words(&self) -> Vec<OsString> {
        self.service.iter().flat_map(|dir| ["--service".into(), dir.into()]).collect()
    }

    /// The members of all services that the caller means; `None` if none of them answers.
    pub fn members(&self) -> anyhow::Result<Option<Vec<Membership>>> {
        let services = Service::find(&self.meant())?;
        if services.is_empty() {
            return Ok(None);
        }
        let mut members = Vec::new();
        for service in services {
            members.extend(service.members()?.iter().map(membership));
        }
        Ok(Some(members))
    }
}

/// A member of a service, as a survey of guests takes it.
pub fn membership(member: &MemberLine) -> Membership {
    let process = ProcessId { pid: member.identity.pid, start_ticks: member.identity.started };
    Membership { process, group: member.group.clone() }
}
