//! The parts `[balance]` and `[[guest]]` of a configuration: how memory is dealt out between guests.

use super::config::{Bytes, Wrong};
use api::change::{from_word, parse_destination};
use balance::Assurance;
use cli::time::parse_seconds;
use guest::Glob;
use serde::Deserialize;
use toml::Spanned;

/// Pause between two rounds, in seconds, unless another one is configured.
const USUAL_EVERY_S: u64 = 5;

/// Longest time that may be configured for moving a guest to another host, in seconds: 7 days.
const MOST_MOVE_S: u64 = 7 * 86_400;

/// Configuration of the process that balances memory between guests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Balance {
    /// Name of the policy by which memory is dealt out.
    pub policy: String,
    /// The policy by which it is decided whether further guests fit.
    pub admit: Assurance,
    /// Seconds between two rounds.
    pub every_s: u64,
    /// Memory of the host that is kept in reserve, and never lent to a guest, in bytes; `None`: the usual part of the
    /// host's memory.
    pub floor_bytes: Option<u64>,
    /// Control group whose memory limit counts as the host's memory; `None`: the memory of the host itself.
    pub within: Option<String>,
    /// Users whose VMs are balanced, although nothing else says that these VMs are guests of this host.
    pub owners: Vec<u32>,
    /// Patterns for guests' names, and the size below which a guest that fits is never made smaller, in bytes.
    pub guaranteed: Vec<(String, u64)>,
    /// Patterns for guests' names, and the destination that a guest which fits is moved to when a plan proposes it for
    /// another host.
    pub moves: Vec<(String, String)>,
    /// Seconds after which a move that is not over is given up, so that the guest stays; `None`: the usual time of
    /// `pagefold migrate`.
    pub move_within_s: Option<u64>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub(crate) struct WrittenBalance {
    policy: Option<Spanned<String>>,
    admit: Option<Spanned<String>>,
    every: Option<Spanned<u64>>,
    #[serde(default, deserialize_with = "from_word")]
    floor: Option<Bytes>,
    within: Option<String>,
    #[serde(default)]
    owners: Vec<u32>,
    move_within: Option<Spanned<String>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct WrittenGuest {
    name: Spanned<String>,
    #[serde(default, deserialize_with = "from_word")]
    guaranteed: Option<Bytes>,
    move_to: Option<Spanned<String>>,
}

impl WrittenBalance {
    /// Checks `[balance]` and all `[[guest]]` parts. `[[guest]]` parts without `[balance]` are allowed, and have no
    /// effect.
    pub(crate) fn check(self, guests: Vec<WrittenGuest>) -> Result<Balance, Wrong> {
        let policy = match self.policy {
            None => balance::policy::NAMES[0].to_owned(),
            Some(name) if balance::policy::named(name.get_ref()).is_some() => name.into_inner(),
            Some(name) => {
                let known = balance::policy::NAMES.join(", ");
                return Err(Wrong(name.span().start, format!("there is no policy {:?}; use {known}", name.get_ref())));
            }
        };
        let admit = match self.admit {
            None => Assurance::default(),
            Some(name) => Assurance::named(name.get_ref()).ok_or_else(|| {
                let known = Assurance::NAMES.join(", ");
                Wrong(name.span().start, format!("there is no admission {:?}; use {known}", name.get_ref()))
            })?,
        };
        let every_s = match self.every {
            Some(every) if *every.get_ref() == 0 => {
                return Err(Wrong(every.span().start, "a round takes a second at least".into()));
            }
            every => every.map_or(USUAL_EVERY_S, Spanned::into_inner),
        };
        let (mut guaranteed, mut moves) = (Vec::new(), Vec::new());
        for guest in guests {
            let at = guest.name.span().start;
            let name = guest.name.into_inner();
            name.parse::<Glob>().map_err(|why| Wrong(at, why))?;
            if let Some(to) = guest.move_to {
                parse_destination(to.get_ref()).map_err(|why| Wrong(to.span().start, why))?;
                moves.push((name.clone(), to.into_inner()));
            }
            guaranteed.extend(guest.guaranteed.map(|bytes| (name, bytes.0)));
        }
        let move_within_s = self.move_within.map(|time| {
            let found = parse_seconds(time.get_ref(), MOST_MOVE_S).ok().filter(|seconds| *seconds > 0);
            found.ok_or_else(|| {
                Wrong(time.span().start, format!("{:?} is no time up to 7 days: write 10m", time.get_ref()))
            })
        });
        let move_within_s = move_within_s.transpose()?;
        let (floor_bytes, within, owners) = (self.floor.map(|floor| floor.0), self.within, self.owners);
        Ok(Balance { policy, admit, every_s, floor_bytes, within, owners, guaranteed, moves, move_within_s })
    }
}

impl Balance {
    /// The command-line arguments of the `pagefold` process that balances memory.
    pub fn arguments(&self) -> Vec<String> {
        let every = self.every_s.to_string();
        let mut words: Vec<String> = [
            "balance",
            "apply",
            "--until-hangup",
            "--every",
            &every,
            "--policy",
            &self.policy,
            "--admit",
            self.admit.name(),
        ]
        .map(str::to_owned)
        .into();
        words.extend(self.floor_bytes.into_iter().flat_map(|floor| ["--floor".to_owned(), floor.to_string()]));
        words.extend(self.within.iter().flat_map(|group| ["--within".to_owned(), group.clone()]));
        words.extend(self.owners.iter().flat_map(|owner| ["--owner".to_owned(), owner.to_string()]));
        let guarantee = |(glob, bytes): &(String, u64)| ["--guaranteed".to_owned(), format!("{glob}={bytes}")];
        words.extend(self.guaranteed.iter().flat_map(guarantee));
        words.extend(self.moves.iter().flat_map(|(glob, to)| ["--move".to_owned(), format!("{glob}={to}")]));
        words.extend(self.move_within_s.iter().flat_map(|time| ["--move-within".to_owned(), time.to_string()]));
        words
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_have_the_whole_configuration() {
        let guaranteed = vec![("acme-*".to_owned(), 7), ("b=c".to_owned(), 9)];
        let (policy, within) = ("group".to_owned(), Some("/m".to_owned()));
        let admit = Assurance::Likely;
        let moves = vec![("acme-1".to_owned(), "tcp:h:1".to_owned())];
        let (every_s, floor_bytes, owners, move_within_s) = (5, Some(3), vec![107], Some(60));
        let config = Balance { policy, admit, every_s, floor_bytes, within, owners, guaranteed, moves, move_within_s };
        assert_eq!(
            config.arguments().join(" "),
            "balance apply --until-hangup --every 5 --policy group --admit likely --floor 3 --within /m --owner 107 --guaranteed acme-*=7 --guaranteed b=c=9 --move acme-1=tcp:h:1 --move-within 60"
        );
    }
}
