//! The part `[park]` of a configuration: which guests are stopped and their memory written to swap (parked) after they
//! have been idle.

use super::config::Wrong;
use api::name;
use cli::time::parse_seconds;
use guest::Glob;
use serde::Deserialize;
use toml::Spanned;

/// Shortest and longest time that may be configured for a guest to be idle before it is parked: 1 s, 1 day.
const IDLE_S: (u64, u64) = (1, 86_400);

/// Which guests are parked when they are idle.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Park {
    /// Seconds for which a guest has to be idle before it is parked.
    pub idle_s: u64,
    /// Patterns for ids or names of guests that may be parked; none: all guests of `groups`.
    pub only: Vec<String>,
    /// Groups whose guests may be parked; none: guests of any group that the patterns match.
    pub groups: Vec<String>,
    /// Most guests that are parked at a time; `None`: any number.
    pub most: Option<u32>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct WrittenPark {
    idle: Spanned<String>,
    #[serde(default)]
    only: Vec<Spanned<String>>,
    #[serde(default)]
    groups: Vec<Spanned<String>>,
    most: Option<u32>,
}

impl WrittenPark {
    pub(crate) fn check(self) -> Result<Park, Wrong> {
        let at = self.idle.span().start;
        let idle_s = parse_seconds(self.idle.get_ref(), IDLE_S.1).map_err(|why| Wrong(at, why))?;
        if idle_s < IDLE_S.0 {
            return Err(Wrong(at, "a guest is looked at for a second at least".into()));
        }
        if self.only.is_empty() && self.groups.is_empty() {
            let why = "name guests (only) or groups: a guest that is parked answers nobody until it is woken";
            return Err(Wrong(at, why.into()));
        }
        for glob in &self.only {
            glob.get_ref().parse::<Glob>().map_err(|why| Wrong(glob.span().start, why))?;
        }
        for group in &self.groups {
            name::check("group", group.get_ref()).map_err(|why| Wrong(group.span().start, why))?;
        }
        let texts = |all: Vec<Spanned<String>>| all.into_iter().map(Spanned::into_inner).collect();
        Ok(Park { idle_s, only: texts(self.only), groups: texts(self.groups), most: self.most })
    }
}

impl Park {
    /// The command-line arguments of the `pagefold` process that parks guests.
    pub fn arguments(&self) -> Vec<String> {
        let idle = format!("{}s", self.idle_s);
        let mut words: Vec<String> = ["park", "--until-hangup", "--idle", &idle].map(str::to_owned).into();
        words.extend(self.only.iter().flat_map(|glob| ["--only".to_owned(), glob.clone()]));
        words.extend(self.groups.iter().flat_map(|group| ["--group".to_owned(), group.clone()]));
        words.extend(self.most.iter().flat_map(|most| ["--most".to_owned(), most.to_string()]));
        words
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_have_the_whole_configuration() {
        let park = Park { idle_s: 600, only: vec!["a-*".into()], groups: vec!["b".into(), "c".into()], most: Some(7) };
        let words = "park --until-hangup --idle 600s --only a-* --group b --group c --most 7";
        assert_eq!(park.arguments().join(" "), words);
    }
}
