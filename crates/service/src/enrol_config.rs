//! The parts `[[enrol]]` of a configuration: rules by which running processes become members.

use super::config::{Bytes, User, Wrong};
use api::change::from_word;
use api::enrol::{LEAST_BYTES, Rule, Via};
use guest::Glob;
use serde::Deserialize;
use toml::Spanned;

/// Most `[[enrol]]` rules in a configuration, and most rules that are added on the fly besides.
pub const MOST_RULES: usize = 256;

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct WrittenEnrol {
    group: Spanned<String>,
    cgroup: Option<Spanned<String>>,
    container: Option<Spanned<String>>,
    container_label: Option<Spanned<String>>,
    domain: Option<Spanned<String>>,
    #[serde(default)]
    domain_metadata: bool,
    unit: Option<Spanned<String>>,
    user: Option<Spanned<User>>,
    all_anonymous: Option<Spanned<bool>>,
    #[serde(default, deserialize_with = "from_word")]
    via: Option<Via>,
    #[serde(default, deserialize_with = "from_word")]
    at_least: Option<Bytes>,
}

impl WrittenEnrol {
    /// Checks a rule. `has_group` tells whether a group is configured.
    pub(crate) fn check(
        self,
        has_group: impl Fn(&str) -> bool,
        uid_of: fn(&str) -> Option<u32>,
    ) -> Result<Rule, Wrong> {
        let at = self.group.span().start;
        let group = self.group.into_inner();
        if !has_group(&group) {
            return Err(Wrong(at, format!("there is no [[group]] with the name \"{group}\"")));
        }
        let all_anonymous = self.all_anonymous.as_ref().is_some_and(|all| *all.get_ref());
        let is_of_domains = self.domain.is_some() || self.domain_metadata;
        if let (Some(all), true, true) = (&self.all_anonymous, all_anonymous, is_of_domains) {
            let why = "of a VM, its RAM is folded and nothing else: leave all-anonymous out";
            return Err(Wrong(all.span().start, why.into()));
        }
        let rule = Rule {
            cgroup: self.cgroup.map(path).transpose()?,
            container: self.container.map(pattern).transpose()?,
            container_label: self.container_label.map(label).transpose()?,
            domain: self.domain.map(pattern).transpose()?,
            domain_metadata: self.domain_metadata,
            unit: self.unit.map(pattern).transpose()?,
            user: self.user.map(|user| user.get_ref().number(user.span().start, uid_of)).transpose()?,
            all_anonymous,
            via: self.via.unwrap_or_default(),
            at_least_bytes: self.at_least.map_or(LEAST_BYTES, |bytes| bytes.0),
            group,
        };
        if rule.to_string().is_empty() {
            let why = "a rule must name a cgroup, container, container-label, domain, domain-metadata, unit or user";
            return Err(Wrong(at, why.into()));
        }
        Ok(rule)
    }
}

fn pattern(text: Spanned<String>) -> Result<String, Wrong> {
    text.get_ref().parse::<Glob>().map_err(|why| Wrong(text.span().start, why))?;
    Ok(text.into_inner())
}

/// Checks a pattern for a control group, part by part of its path.
fn path(text: Spanned<String>) -> Result<String, Wrong> {
    let parts = text.get_ref().strip_prefix('/').map(|parts| parts.trim_end_matches('/').split('/'));
    let is_valid = parts.is_some_and(|mut parts| parts.all(|part| part.parse::<Glob>().is_ok()));
    if !is_valid {
        let why = "use the path of a control group, such as /system.slice/acme-*";
        return Err(Wrong(text.span().start, why.into()));
    }
    Ok(text.into_inner())
}

fn label(text: Spanned<String>) -> Result<(String, String), Wrong> {
    let at = text.span().start;
    let parts = text.get_ref().split_once('=').filter(|(key, value)| !key.is_empty() && !value.is_empty());
    let (key, value) = parts.ok_or_else(|| Wrong(at, "use KEY=VALUE, such as tenant=acme".into()))?;
    value.parse::<Glob>().map_err(|why| Wrong(at, why))?;
    Ok((key.to_owned(), value.to_owned()))
}
