//! Checks whether Pagefold folds a guest; if not, they give the reason and a remedy.

use crate::cmd::absent;
use api::ask::{MemberLine, PoolLimit};
use api::client::Service;
use api::control::{GroupReport, NO_HEADROOM, NO_ROOM, Settings};
use api::enrol::Via;
use api::member_words;
use api::place::Meant;
use api::shown::KSM;
use cli::exit::in_words;
use guest::{Guest, GuestKind};
use host::Check;
use page::pages_to_bytes;
use std::collections::BTreeMap;
use std::path::Path;

/// Members and groups of all services, by the services' own account.
#[derive(Default)]
pub struct Folding {
    members: Vec<MemberLine>,
    groups: BTreeMap<String, (Settings, PoolLimit, GroupReport)>,
    /// Reasons why a service, or a group's worker, does not answer.
    silent: Vec<String>,
}

const NEEDED_FOR: &str = "folding its memory with that of its group";

impl Folding {
    /// Asks the services that the caller means and may ask.
    pub fn ask(meant: &Meant) -> Self {
        let mut all = Self::default();
        match Service::find(meant) {
            Ok(services) => {
                for service in services {
                    if let Err(e) = all.add(&service) {
                        all.silent.push(in_words(&e));
                    }
                }
            }
            Err(e) => all.silent.push(in_words(&e)),
        }
        all
    }

    fn add(&mut self, service: &Service) -> anyhow::Result<()> {
        self.members.extend(service.members()?);
        for group in service.groups()?.into_iter().filter(|g| g.members > 0) {
            match service.show(&group.name) {
                Ok(state) => _ = self.groups.insert(group.name, (state.settings, state.pool_limit, state.report)),
                Err(e) => self.silent.push(format!("group {}: {}", group.name, in_words(&e))),
            }
        }
        Ok(())
    }

    /// Whether Pagefold's agents handle the page faults of a guest's memory (userfaultfd); `None` if no connected
    /// member belongs to the guest.
    pub fn follows(&self, guest: &Guest) -> Option<bool> {
        let reports = self.groups.values().flat_map(|(.., report)| &report.members);
        let of_guest: Vec<_> = reports.filter(|m| m.connected && guest.pids.contains(&m.pid)).collect();
        // Where an agent has yielded, a migration or a snapshot handles them.
        (!of_guest.is_empty()).then(|| of_guest.iter().all(|m| m.state != "yielded"))
    }

    /// The check `host:service`, where a service does not answer as it should: the reason stands here and not with each
    /// guest.
    pub fn check_service(&self) -> Option<Check> {
        let (first, others) = self.silent.split_first()?;
        let more = if others.is_empty() { String::new() } else { format!("; and {} more like that", others.len()) };
        let check = Check::ok("host:service", format!("unknown: {first}{more}"), "saying which guests are folded");
        Some(check.warn("look at the log of pagefold serve"))
    }

    /// The check `guest:ID:folding` of a guest.
    pub fn check(&self, guest: &Guest) -> Check {
        let check = |found: String| Check::ok(format!("guest:{}:folding", guest.id), found, NEEDED_FOR);
        let members: Vec<&MemberLine> = self.members.iter().filter(|m| guest.pids.contains(&m.identity.pid)).collect();
        let mut judged: Vec<Check> = members.iter().map(|m| self.judge(m, check)).collect();
        judged.sort_by_key(|c| std::cmp::Reverse(c.status));
        let others = judged.len().saturating_sub(1);
        match judged.into_iter().next() {
            // The member in the worst state stands for the guest.
            Some(worst) if others > 0 => {
                Check { found: format!("{}; and {others} more members", worst.found), ..worst }
            }
            Some(only) => only,
            None => self.no_member(guest, check),
        }
    }

    fn no_member(&self, guest: &Guest, check: impl Fn(String) -> Check) -> Check {
        let group = if guest.group.contains(':') { "GROUP" } else { &guest.group };
        if !self.silent.is_empty() {
            return check("unknown: the service does not say".into()).warn("see service above");
        }
        let is_plain = guest.name.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c));
        let name = if is_plain { &guest.name } else { "NAME" };
        let (which, memory) = match guest.kind {
            GuestKind::Process => (guest.pids.first().map_or("PID".into(), u32::to_string), " --all-anonymous"),
            kind if kind.is_vm() => (format!("--guest {name}"), ""),
            _ => (format!("--container {name}"), " --all-anonymous"),
        };
        // Only root's service attaches.
        check("no: it is not a member of a group".into()).warn(format!(
            "pagefold attach {which} --group {group}{memory}; or start it with pagefold run --group {group} -- ..."
        ))
    }

    fn judge(&self, member: &MemberLine, check: impl Fn(String) -> Check) -> Check {
        let (name, group) = (&member.identity.name, &member.group);
        let who = format!("member {name} of group {group}");
        if member.via == Via::Ksm {
            return check(format!("yes: {who}: {}", member_words::meaning(KSM)));
        }
        if !member.connected {
            let look = absent::absent(member.identity.pid);
            return check(format!("no: {who}, but no agent has connected: {}", look.why)).warn(look.fix);
        }
        let Some((settings, limit, report)) = self.groups.get(group) else {
            let why = self.silent.first().map_or("its group has no worker", String::as_str);
            return check(format!("unknown: {who}: {why}")).warn("look at the log of pagefold serve");
        };
        let Some(found) = report.members.iter().find(|m| m.pid == member.identity.pid && m.connected) else {
            let look = absent::absent(member.identity.pid);
            let found = format!("not now: {who}, but its agent is not connected to the worker: {}", look.why);
            return check(found).warn(look.fix);
        };
        if let Some(stopped) = absent::stopped(found.pid) {
            return check(format!("not now: {who}: {}", stopped.why)).warn(stopped.fix);
        }
        let detail = if found.detail.is_empty() { String::new() } else { format!(" ({})", found.detail) };
        let state = found.state.as_str();
        let folded = cli::bytes(pages_to_bytes(found.folded_pages.saturating_add(found.zero_pages)));
        let enrolled = cli::bytes(pages_to_bytes(found.enrolled_pages));
        let remedy = member_words::remedy(state, group, settings, (limit, report.slots));
        let meaning = member_words::meaning(state);
        match (state, remedy) {
            (_, None) => check(format!("yes: {who}; {folded} of {enrolled} are folded{detail}")),
            (NO_ROOM | NO_HEADROOM, Some(fix)) => {
                check(format!("in part: {who}; {folded} of {enrolled} are folded; {meaning}{detail}")).warn(fix)
            }
            (_, Some(fix)) => check(format!("no: {who}: {meaning}{detail}")).warn(fix),
        }
    }
}

/// The check `host:library`.
pub fn check_library() -> Check {
    let check = |found: String| Check::ok("host:library", found, "pagefold run: loaded into members");
    match crate::cmd::run::library() {
        Ok(path) => check(show(&path)),
        Err(e) => check(format!("{e:#}")).warn("put libpagefold.so next to pagefold, or into ../lib/pagefold"),
    }
}

fn show(path: &Path) -> String {
    path.display().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use api::control::{Fold, Identity, MemberReport};
    use guest::Facts;
    use host::Status;

    fn guest(pids: &[u32]) -> Guest {
        Guest {
            id: "qemu:x".into(),
            name: "x".into(),
            kind: GuestKind::Qemu,
            pids: pids.into(),
            group: "qemu:x".into(),
            ram_bytes: None,
            facts: Facts::default(),
        }
    }

    fn folding(states: &[(&str, bool)], fold: Fold) -> Folding {
        let mut all = Folding::default();
        let mut report = GroupReport::default();
        for (n, (state, connected)) in states.iter().enumerate() {
            let identity = Identity { name: format!("m{n}"), pid: n as u32, started: 1 };
            all.members.push(MemberLine {
                group: "acme".into(),
                identity,
                uid: 0,
                connected: *connected,
                family: None,
                attached_by: None,
                via: Via::Agent,
                domain: None,
            });
            let (state, name) = ((*state).to_owned(), format!("m{n}"));
            report.members.push(MemberReport { name, pid: n as u32, connected: true, state, ..Default::default() });
        }
        let settings = Settings { fold, ..Settings::default() };
        all.groups.insert("acme".into(), (settings, PoolLimit::of(&settings, None), report));
        all
    }

    #[test]
    fn every_state_has_its_remedy() {
        for (state, connected, words, fix) in [
            ("folding", true, "yes: member m0 of group acme", None),
            ("folding", false, "no agent has connected", Some("start it again")),
            ("nothing_enrolled", true, "advised no memory", Some("MADV_MERGEABLE")),
            ("nothing_mapped", true, "can be taken", Some("without --all-anonymous")),
            ("not_foldable", true, "can be folded", Some("without what is named")),
            ("no_room", true, "in part: member m0", Some("group set acme --pool")),
            ("no_headroom", true, "in part: member m0", Some("raise the memory limit")),
            ("off", true, "told not to", Some("group set acme --fold on")),
            ("unpinned", true, "does not pin", Some("start it again without")),
            ("no_vma", true, "vm.max_map_count", Some("sysctl")),
            ("no_move", true, "UFFDIO_MOVE", Some("6.8")),
            ("yielded", true, "migration", Some("wait")),
            ("lost_track", true, "system calls of its own", Some("leave it")),
            ("what else", true, "does not know", Some("look again")),
        ] {
            let check = folding(&[(state, connected)], Fold::Off).check(&guest(&[0]));
            assert_eq!(check.id, "guest:qemu:x:folding");
            assert!(check.found.contains(words), "{state}: {check:?}");
            assert_eq!(check.fix.is_some(), fix.is_some(), "{check:?}");
            assert!(fix.is_none_or(|fix| check.fix.as_ref().unwrap().contains(fix)), "{check:?}");
        }
    }

    #[test]
    fn faults_are_handled_by_agent_unless_it_yields() {
        let follows = |state| folding(&[(state, true)], Fold::On).follows(&guest(&[0]));
        assert_eq!((follows("folding"), follows("yielded")), (Some(true), Some(false)));
        assert_eq!(folding(&[("folding", true)], Fold::On).follows(&guest(&[7])), None);
    }

    #[test]
    fn silence_of_service_is_told_once() {
        let silent = Folding { silent: vec!["no service answers in /x".into()], ..Folding::default() };
        let service = silent.check_service().unwrap();
        assert_eq!(
            (service.id.as_str(), service.found.as_str()),
            ("host:service", "unknown: no service answers in /x")
        );
        let of_guest = silent.check(&guest(&[7]));
        assert!(of_guest.found.starts_with("unknown") && !of_guest.found.contains("/x"), "{of_guest:?}");
        assert!(folding(&[], Fold::On).check_service().is_none());
    }

    #[test]
    fn non_members_are_told_how_to_join_and_worst_member_counts() {
        let check = folding(&[("folding", true)], Fold::On).check(&guest(&[7]));
        assert!(check.found.contains("not a member"), "{check:?}");
        let fix = check.fix.unwrap();
        assert_eq!(fix, "pagefold attach --guest x --group GROUP; or start it with pagefold run --group GROUP -- ...");
        let told = |kind, name: &str| {
            let other = Guest { kind, name: name.into(), group: "acme".into(), ..guest(&[7]) };
            let fix = folding(&[], Fold::On).check(&other).fix.unwrap();
            fix.split(';').next().map(str::to_owned)
        };
        let attach = |words: &str| Some(format!("pagefold attach {words} --group acme --all-anonymous"));
        assert_eq!(told(GuestKind::Lxc, "web"), attach("--container web"));
        assert_eq!(told(GuestKind::Lxc, "$(x)"), attach("--container NAME"));
        assert_eq!(told(GuestKind::Process, "x"), attach("7"));
        let check = folding(&[("folding", true), ("unpinned", true)], Fold::On).check(&guest(&[0, 1]));
        assert!(check.status == Status::Warn && check.found.contains("m1") && check.found.ends_with("1 more members"));
    }
}
