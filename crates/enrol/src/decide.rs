//! Decides whether one process is to be attached: a pure function of the facts about it, the rules, and earlier
//! attempts.
//!
//! ```text
//!   no rule fits, or it is Pagefold's own ----> Nothing
//!   it is a member ---------------------------> Member
//!   rules of two groups fit ------------------> Wait
//!   it has less memory than the rule wants ---> Wait
//!   it has just started ----------------------> Soon
//!   an attempt to attach it has failed -------> Wait, until the next attempt is due
//!   otherwise --------------------------------> Attach
//! ```

use crate::facts::Facts;
use api::enrol::Rule;
use guest::Glob;

/// Younger processes are not attached: 1 s. So programs that end at once are left alone, and so are processes that a
/// service manager is still setting up.
const LEAST_AGE_S: u64 = 1;

/// The rules of a service.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rules(Vec<Compiled>);

/// A rule with its patterns parsed.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Compiled {
    rule: Rule,
    cgroup: Option<Vec<Glob>>,
    container: Option<Glob>,
    label: Option<(String, Glob)>,
    domain: Option<Glob>,
    unit: Option<Glob>,
}

/// Membership and failed attempts of a process, as the decision needs them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    /// Whether the process is a member of a group.
    pub is_member: bool,
    /// The reason why the last attempt failed, and the seconds until the next one.
    pub failed: Option<(String, u64)>,
}

/// The decision about one process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict<'a> {
    /// No rule fits the process, or the process is Pagefold's own.
    Nothing,
    /// The process is a member already.
    Member(&'a Rule),
    /// The process is to be attached. `true`: all its private anonymous memory is folded; `false`: only the ranges it
    /// advises.
    Attach(&'a Rule, bool),
    /// The process has just started, and is to be decided about again in 2 s.
    Soon(&'a Rule),
    /// The process is left alone for this reason. After a failed attempt to attach it, also the seconds until the next attempt.
    Wait(&'a Rule, String, Option<u64>),
}

impl Rules {
    /// Compiles rules that came from a service. A rule that is not valid is left out.
    pub fn new(rules: Vec<Rule>) -> Self {
        Self(rules.into_iter().filter_map(|rule| Compiled::new(rule).ok()).collect())
    }

    /// Whether there are no rules.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether a rule asks for names, labels or metadata that only container runtimes and libvirt know.
    pub fn want_names(&self) -> bool {
        self.0.iter().any(|one| one.container.is_some() || one.label.is_some() || one.rule.domain_metadata)
    }

    /// Whether any rule fits a process, regardless of its memory, age and earlier attempts.
    pub fn fit(&self, facts: &Facts) -> bool {
        !facts.is_own && self.0.iter().any(|one| one.fits(facts))
    }

    /// Decides about a process.
    pub fn decide(&self, facts: &Facts, standing: &Standing) -> Verdict<'_> {
        let mut fitting = self.0.iter().filter(|one| one.fits(facts)).map(|one| &one.rule);
        let Some(first) = fitting.next().filter(|_| !facts.is_own) else { return Verdict::Nothing };
        if standing.is_member {
            return Verdict::Member(first);
        }
        if let Some(other) = fitting.clone().find(|other| other.group != first.group) {
            let why = format!("rules of two groups fit it: {} ({first}) and {} ({other})", first.group, other.group);
            return Verdict::Wait(first, why, None);
        }
        let rule =
            fitting.fold(first, |least, rule| if rule.at_least_bytes < least.at_least_bytes { rule } else { least });
        if facts.private_bytes < rule.at_least_bytes {
            let [has, least] = [facts.private_bytes, rule.at_least_bytes].map(cli::bytes);
            let why = format!("it has {has} of private memory, and the rule wants {least} at least (at-least)");
            return Verdict::Wait(rule, why, None);
        }
        if facts.age_s < LEAST_AGE_S {
            return Verdict::Soon(rule);
        }
        match &standing.failed {
            Some((why, seconds)) if *seconds > 0 => Verdict::Wait(rule, why.clone(), Some(*seconds)),
            // For a VM, only guest RAM is folded, even if the rule asks for all anonymous memory.
            _ => Verdict::Attach(rule, rule.all_anonymous && !facts.is_vm),
        }
    }
}

impl Compiled {
    fn new(rule: Rule) -> Result<Self, String> {
        let glob = |text: &Option<String>| text.as_ref().map(|text| text.parse::<Glob>()).transpose();
        let parts = |path: &String| path.trim_matches('/').split('/').map(str::parse).collect::<Result<Vec<Glob>, _>>();
        Ok(Self {
            cgroup: rule.cgroup.as_ref().map(parts).transpose()?,
            container: glob(&rule.container)?,
            label: match &rule.container_label {
                Some((key, value)) => Some((key.clone(), value.parse()?)),
                None => None,
            },
            domain: glob(&rule.domain)?,
            unit: glob(&rule.unit)?,
            rule,
        })
    }

    fn fits(&self, facts: &Facts) -> bool {
        let Self { rule, cgroup, container, label, domain, unit } = self;
        let is_in = |patterns: &Vec<Glob>| facts.cgroups.paths().any(|path| begins(path, patterns));
        let matches = |glob: &Glob, text: &Option<String>| text.as_ref().is_some_and(|text| glob.matches(text));
        let inside = facts.container.as_ref();
        let named = |glob: &Glob| inside.is_some_and(|inside| inside.names.iter().any(|name| glob.matches(name)));
        let labelled = |(key, glob): &(String, Glob)| {
            inside.and_then(|inside| inside.labels.get(key)).is_some_and(|value| glob.matches(value))
        };
        // A container's root may have the host's uid 0. So a rule of a user alone fits no process in a container.
        let is_user_alone = cgroup.is_none() && container.is_none() && label.is_none() && unit.is_none();
        cgroup.as_ref().is_none_or(is_in)
            && container.as_ref().is_none_or(named)
            && label.as_ref().is_none_or(labelled)
            && domain.as_ref().is_none_or(|glob| matches(glob, &facts.domain))
            && (!rule.domain_metadata || facts.asked.as_ref().is_some_and(|asked| asked.group == rule.group))
            && unit.as_ref().is_none_or(|glob| matches(glob, &facts.unit))
            && rule.user.is_none_or(|user| user == facts.uid && (!is_user_alone || inside.is_none()))
    }
}

/// Whether the first parts of a path match these patterns, one part each. The path may have further parts.
fn begins(path: &str, patterns: &[Glob]) -> bool {
    let mut parts = path.trim_matches('/').split('/');
    patterns.iter().all(|pattern| parts.next().is_some_and(|part| pattern.matches(part)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::{Asked, ContainerFacts};
    use host::Cgroups;
    use std::collections::BTreeMap;

    const MIB: u64 = 1 << 20;

    fn rule(group: &str) -> Rule {
        Rule { group: group.into(), all_anonymous: true, at_least_bytes: 4 * MIB, ..Rule::default() }
    }

    fn by_cgroup(group: &str, pattern: &str) -> Rule {
        Rule { cgroup: Some(pattern.into()), ..rule(group) }
    }

    fn facts(path: &str) -> Facts {
        Facts {
            pid: 7,
            start_ticks: 1,
            uid: 1000,
            cgroups: Cgroups::parse(&format!("0::{path}\n")),
            private_bytes: 8 * MIB,
            age_s: 10,
            ..Facts::default()
        }
    }

    fn decided(rules: &[Rule], facts: &Facts) -> String {
        words(&Rules::new(rules.to_vec()).decide(facts, &Standing::default()))
    }

    fn words(verdict: &Verdict<'_>) -> String {
        match verdict {
            Verdict::Nothing => "nothing".into(),
            Verdict::Member(rule) => format!("member {}", rule.group),
            Verdict::Attach(rule, all) => format!("attach {} {all}", rule.group),
            Verdict::Soon(_) => "soon".into(),
            Verdict::Wait(rule, why, again) => format!("wait {} {why} {again:?}", rule.group),
        }
    }

    #[test]
    fn control_group_fits_by_its_first_parts() {
        let rules = [by_cgroup("acme", "/system.slice/acme-*")];
        for (path, expected) in [
            ("/system.slice/acme-1.service", "attach acme true"),
            ("/system.slice/acme-1.service/worker/3", "attach acme true"),
            ("/system.slice", "nothing"),
            ("/system.slice/other.service/acme-1.service", "nothing"),
            // Names of control groups inside a container are chosen by the container's root.
            ("/lxc.payload.web/system.slice/acme-1.service", "nothing"),
            ("/", "nothing"),
        ] {
            assert_eq!(decided(&rules, &facts(path)), expected, "{path}");
        }
        assert_eq!(decided(&[by_cgroup("a", "/*/acme")], &facts("/x/y/acme")), "nothing", "a star ends at a slash");
        let two_trees = Facts { cgroups: Cgroups::parse("4:memory:/m\n1:name=systemd:/s\n"), ..facts("/") };
        assert_eq!(decided(&[by_cgroup("a", "/m")], &two_trees), "attach a true");
    }

    #[test]
    fn every_property_of_a_rule_must_fit() {
        let container = ContainerFacts {
            names: vec!["4c01db0b339c".into(), "web".into()],
            labels: BTreeMap::from([("tenant".into(), "acme".into())]),
        };
        let inside = Facts { container: Some(container), unit: Some("docker-4c01.scope".into()), ..facts("/d") };
        let vm = Facts { domain: Some("acme-db".into()), is_vm: true, ..facts("/machine.slice/x.scope") };
        let asking = Facts { asked: Some(Asked { group: "a".into(), name: None }), ..vm.clone() };
        let text = |text: &str| Some(text.to_owned());
        let label = |key: &str, value: &str| Some((key.to_owned(), value.to_owned()));
        for (rule, facts, fits) in [
            (Rule { container: text("we?"), ..rule("a") }, &inside, true),
            (Rule { container: text("4c01*"), ..rule("a") }, &inside, true),
            (Rule { container: text("db"), ..rule("a") }, &inside, false),
            (Rule { container_label: label("tenant", "ac*"), ..rule("a") }, &inside, true),
            (Rule { container_label: label("tenant", "beta"), ..rule("a") }, &inside, false),
            (Rule { container_label: label("other", "*"), ..rule("a") }, &inside, false),
            (Rule { container_label: label("tenant", "*"), ..rule("a") }, &vm, false),
            (Rule { unit: text("docker-*"), ..rule("a") }, &inside, true),
            (Rule { unit: text("*"), ..rule("a") }, &vm, false),
            (Rule { domain: text("acme-*"), ..rule("a") }, &vm, true),
            (Rule { domain: text("*"), ..rule("a") }, &inside, false),
            (Rule { domain_metadata: true, ..rule("a") }, &asking, true),
            (Rule { domain_metadata: true, ..rule("b") }, &asking, false),
            (Rule { domain_metadata: true, ..rule("a") }, &vm, false),
            (Rule { domain_metadata: true, domain: text("beta-*"), ..rule("a") }, &asking, false),
            (Rule { user: Some(1000), ..rule("a") }, &vm, true),
            (Rule { user: Some(1001), ..rule("a") }, &vm, false),
            // A rule that names only a user fits no process in a container.
            (Rule { user: Some(1000), ..rule("a") }, &inside, false),
            (Rule { user: Some(1000), container: text("web"), ..rule("a") }, &inside, true),
            (Rule { user: Some(0), container: text("web"), ..rule("a") }, &inside, false),
            (Rule { user: Some(1000), unit: text("docker-*"), ..rule("a") }, &inside, true),
            (Rule { user: Some(1000), cgroup: text("/d"), ..rule("a") }, &inside, true),
            (Rule { user: Some(1000), container_label: label("tenant", "*"), ..rule("a") }, &inside, true),
        ] {
            let is_attached = decided(std::slice::from_ref(&rule), facts).starts_with("attach");
            assert_eq!(is_attached, fits, "{rule}");
        }
        assert_eq!(decided(&[Rule { user: Some(1000), ..rule("a") }], &vm), "attach a false", "of a VM, RAM alone");
    }

    #[test]
    fn reason_is_told_when_a_process_is_left_alone() {
        let rules = [by_cgroup("acme", "/a"), Rule { user: Some(1000), ..rule("beta") }];
        let both = decided(&rules, &facts("/a"));
        assert_eq!(both, "wait acme rules of two groups fit it: acme (cgroup /a) and beta (user 1000) None");
        let small = Facts { private_bytes: MIB, ..facts("/a") };
        let why = "it has 1.0 MiB of private memory, and the rule wants 4.0 MiB at least (at-least)";
        assert_eq!(decided(&rules[..1], &small), format!("wait acme {why} None"));
        let just = Facts { private_bytes: 4 * MIB, age_s: LEAST_AGE_S, ..facts("/a") };
        assert_eq!(decided(&rules[..1], &just), "attach acme true", "as much as the rule wants, and as old");
        let wide = Rule { at_least_bytes: 0, ..by_cgroup("acme", "/*") };
        assert_eq!(decided(&[rules[0].clone(), wide], &small), "attach acme true", "one of the rules wants less");
        assert_eq!(decided(&rules[..1], &Facts { age_s: 0, ..facts("/a") }), "soon");
        assert_eq!(decided(&rules[..1], &Facts { is_own: true, ..facts("/a") }), "nothing");
        let rules = Rules::new(rules[..1].to_vec());
        let member = Standing { is_member: true, ..Standing::default() };
        assert_eq!(words(&rules.decide(&small, &member)), "member acme");
        let failed = |seconds| Standing { failed: Some(("it is traced".into(), seconds)), ..Standing::default() };
        assert_eq!(words(&rules.decide(&facts("/a"), &failed(5))), "wait acme it is traced Some(5)");
        assert_eq!(words(&rules.decide(&facts("/a"), &failed(0))), "attach acme true");
    }

    #[test]
    fn rule_that_is_not_valid_fits_nothing() {
        assert!(Rules::new(vec![Rule { unit: Some(String::new()), ..rule("a") }]).is_empty());
    }
}
