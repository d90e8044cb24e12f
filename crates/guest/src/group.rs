//! Groups of guests that trust each other. A rule puts every guest into a group; a file names groups for guests for
//! which the rule is not right.

use crate::{Glob, Guest};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use toml::Spanned;

/// Longest file of groups, in bytes: room for some ten thousand guests.
const MAX_FILE_BYTES: u64 = 1 << 20;
/// Longest name of a group in a file, in bytes.
const MAX_NAME_BYTES: usize = 64;

/// The rule by which guests that the file does not mention are put into groups.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GroupRule {
    /// Every guest in a group of its own.
    #[default]
    Each,
    /// All guests in one group.
    All,
    /// By the user whose rights the guest's first process has.
    User,
    /// By the guest's name up to its last `-`.
    Name,
    /// By the group of the service that folds it.
    Service,
    /// By one component of the path of the control group of the guest's first process. Components are counted from 1.
    Cgroup(usize),
}

/// A reason why guests cannot be put into groups.
#[derive(Debug, thiserror::Error)]
pub enum GroupError {
    /// The file cannot be read.
    #[error(transparent)]
    File(#[from] host::Error),
    /// The content of the file is not valid.
    #[error("{}: {problem}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// The fault, in words.
        problem: String,
    },
    /// A guest cannot be in two groups.
    #[error("guest {guest} is in two groups: \"{first}\" by {first_glob} and \"{second}\" by {second_glob}")]
    Ambiguous {
        /// The guest.
        guest: String,
        /// One group.
        first: String,
        /// Its pattern.
        first_glob: String,
        /// The other group.
        second: String,
        /// Its pattern.
        second_glob: String,
    },
}

/// Groups by name, each with patterns for the names or ids of its guests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GroupFile {
    path: PathBuf,
    groups: BTreeMap<String, Vec<Pattern>>,
}

/// A pattern of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Pattern {
    glob: Glob,
    /// Line, from 1.
    line: usize,
}

/// The file's structure for the TOML parser.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    groups: BTreeMap<String, Vec<Spanned<String>>>,
}

impl FromStr for GroupRule {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "each" => Ok(Self::Each),
            "all" => Ok(Self::All),
            "user" => Ok(Self::User),
            "name" => Ok(Self::Name),
            "service" => Ok(Self::Service),
            "cgroup" => Ok(Self::Cgroup(1)),
            _ => match text.strip_prefix("cgroup:").map(str::parse) {
                Some(Ok(n)) if n > 0 => Ok(Self::Cgroup(n)),
                Some(_) => Err("cgroup:N counts the components of the path from 1".into()),
                None => Err("use each, all, user, name, service, cgroup or cgroup:N".into()),
            },
        }
    }
}

impl GroupRule {
    /// The guest's group; a group of its own if the rule does not apply to it.
    fn group_of(self, guest: &Guest) -> String {
        let by_rule = match self {
            Self::Each => None,
            Self::All => Some("all".to_owned()),
            Self::User => Some(format!("uid-{}", guest.facts.uid)),
            Self::Name => match guest.name.rsplit_once('-') {
                Some((front, _)) if !front.is_empty() => Some(front.to_owned()),
                _ => Some(guest.name.clone()),
            },
            Self::Service => guest.facts.folded_in.clone(),
            Self::Cgroup(n) => guest.facts.cgroup.split('/').filter(|p| !p.is_empty()).nth(n - 1).map(str::to_owned),
        };
        by_rule.unwrap_or_else(|| guest.id.clone())
    }
}

impl GroupFile {
    /// Reads a file such as
    ///
    /// ```toml
    /// [groups]
    /// acme = ["acme-*", "lxc:shop"]
    /// beta = ["beta-?"]
    /// ```
    ///
    /// # Errors
    /// [`GroupError::File`] and [`GroupError::Content`].
    pub fn read(path: &Path) -> Result<Self, GroupError> {
        let content = |problem| GroupError::Content { path: path.into(), problem };
        let bytes = host::read_plain_file(path, MAX_FILE_BYTES)?;
        let text = String::from_utf8(bytes).map_err(|e| content(format!("not text: {}", e.utf8_error())))?;
        let groups = Self::parse(&text).map_err(content)?;
        Ok(Self { path: path.into(), groups })
    }

    /// Parses the text of such a file.
    fn parse(text: &str) -> Result<BTreeMap<String, Vec<Pattern>>, String> {
        let line_at = |at: usize| 1 + text.get(..at).unwrap_or(text).matches('\n').count();
        let written: Written = toml::from_str(text).map_err(|e| {
            let line = e.span().map_or(1, |span| line_at(span.start));
            format!("line {line}: {}", e.message().replace('\n', ", "))
        })?;
        let mut groups = BTreeMap::new();
        for (name, patterns) in written.groups {
            check_name(&name)?;
            let pattern = |p: &Spanned<String>| {
                let line = line_at(p.span().start);
                let glob = p.get_ref().parse().map_err(|e| format!("line {line}: group \"{name}\": {e}"))?;
                Ok::<_, String>(Pattern { glob, line })
            };
            let patterns = patterns.iter().map(pattern).collect::<Result<_, _>>()?;
            groups.insert(name, patterns);
        }
        Ok(groups)
    }

    /// Checks that every pattern matches a guest: a pattern without a match is most likely a mistake.
    ///
    /// # Errors
    /// [`GroupError::Content`] for the first pattern for which `means_somebody` is false.
    pub fn check(&self, means_somebody: impl Fn(&Glob) -> bool) -> Result<(), GroupError> {
        let patterns = self.groups.iter().flat_map(|(name, patterns)| patterns.iter().map(move |p| (name, p)));
        let Some((name, pattern)) = patterns.into_iter().find(|(_, p)| !means_somebody(&p.glob)) else {
            return Ok(());
        };
        let (line, glob) = (pattern.line, pattern.glob.as_str());
        let problem = format!("line {line}: no guest matches {glob:?} of group \"{name}\": correct it, or take it out");
        Err(GroupError::Content { path: self.path.clone(), problem })
    }

    fn group_of(&self, guest: &Guest) -> Result<Option<&str>, GroupError> {
        let mine = |p: &Pattern| (p.glob.matches(&guest.name) || p.glob.matches(&guest.id)).then(|| p.glob.clone());
        let mut hits = self.groups.iter().filter_map(|(name, p)| Some((name, p.iter().find_map(mine)?)));
        let first = hits.next();
        match (first, hits.next()) {
            (Some((first, first_glob)), Some((second, second_glob))) => Err(GroupError::Ambiguous {
                guest: guest.id.clone(),
                first: first.clone(),
                first_glob: first_glob.as_str().to_owned(),
                second: second.clone(),
                second_glob: second_glob.as_str().to_owned(),
            }),
            (first, _) => Ok(first.map(|(name, _)| name.as_str())),
        }
    }
}

/// Checks that a name has only letters, digits, dashes, underscores and dots. The group of a guest by itself is named
/// by the guest's id, which has a colon. So no group of a file is mistaken for such a guest.
fn check_name(name: &str) -> Result<(), String> {
    let fine = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    if name.is_empty() || name.len() > MAX_NAME_BYTES || !name.chars().all(fine) {
        return Err(format!("group name {name:?}: use 1 to {MAX_NAME_BYTES} of letters, digits, - _ and ."));
    }
    Ok(())
}

/// Puts every guest into the group that the file gives it, or else into the group that the rule gives it.
///
/// # Errors
/// [`GroupError::Ambiguous`] if the file puts a guest into two groups.
pub fn assign_groups(guests: &mut [Guest], rule: GroupRule, file: &GroupFile) -> Result<(), GroupError> {
    for guest in guests {
        guest.group = match file.group_of(guest)? {
            Some(name) => name.to_owned(),
            None => rule.group_of(guest),
        };
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Facts, GuestKind};

    fn guest(name: &str, uid: u32, cgroup: &str) -> Guest {
        Guest {
            id: format!("qemu:{name}"),
            name: name.into(),
            kind: GuestKind::Qemu,
            pids: vec![1],
            group: String::new(),
            ram_bytes: None,
            facts: Facts {
                uid,
                cgroup: cgroup.into(),
                folded_in: (uid == 0).then(|| "folders".to_owned()),
                ..Facts::default()
            },
        }
    }

    fn groups(rule: &str, file: &str) -> Result<Vec<String>, String> {
        let mut guests = [
            guest("acme-1", 0, "/machine.slice/a.scope"),
            guest("acme-eu-2", 7, "/machine.slice/b.scope/emulator"),
            guest("solo", 7, "/"),
            guest("-odd", 7, "/x"),
        ];
        let file = GroupFile { path: "groups.toml".into(), groups: GroupFile::parse(file)? };
        assign_groups(&mut guests, rule.parse()?, &file).map_err(|e| e.to_string())?;
        Ok(guests.map(|g| g.group).into())
    }

    const NONE: &str = "[groups]";

    #[test]
    fn rules_give_groups() {
        for (rule, expected) in [
            ("each", ["qemu:acme-1", "qemu:acme-eu-2", "qemu:solo", "qemu:-odd"]),
            ("all", ["all", "all", "all", "all"]),
            ("user", ["uid-0", "uid-7", "uid-7", "uid-7"]),
            ("name", ["acme", "acme-eu", "solo", "-odd"]),
            ("service", ["folders", "qemu:acme-eu-2", "qemu:solo", "qemu:-odd"]),
            ("cgroup", ["machine.slice", "machine.slice", "qemu:solo", "x"]),
            ("cgroup:2", ["a.scope", "b.scope", "qemu:solo", "qemu:-odd"]),
        ] {
            assert_eq!(groups(rule, NONE).unwrap(), expected, "{rule}");
        }
        for rule in ["", "Each", "cgroup:0", "cgroup:", "cgroup:x", "cgroup:-1"] {
            assert!(rule.parse::<GroupRule>().is_err(), "{rule}");
        }
    }

    #[test]
    fn file_goes_before_rule() {
        let file = "[groups]\nacme = ['acme-*']\nbeta = ['qemu:solo', 'nobody']\n";
        assert_eq!(groups("all", file).unwrap(), ["acme", "acme", "beta", "all"]);
    }

    #[test]
    fn guest_in_two_groups_is_error_that_names_both() {
        let error = groups("all", "[groups]\nx = ['acme-1']\ny = ['*-1']\n").unwrap_err();
        assert_eq!(error, "guest qemu:acme-1 is in two groups: \"x\" by acme-1 and \"y\" by *-1");
    }

    #[test]
    fn pattern_that_means_nobody_is_named_with_its_line() {
        let groups = GroupFile::parse("[groups]\nacme = [\n  'acme-*',\n  'acne-1',\n]\n").unwrap();
        let file = GroupFile { path: "groups.toml".into(), groups };
        let error = file.check(|glob| glob.matches("acme-1")).unwrap_err().to_string();
        assert!(error.starts_with("groups.toml: line 4: no guest matches \"acne-1\" of group \"acme\""), "{error}");
        assert!(file.check(|_| true).is_ok());
    }

    #[test]
    fn invalid_file_is_error_that_names_fault() {
        for (file, word) in [
            ("", "groups"),
            ("[groups]\n[other]", "other"),
            ("[groups]\nacme = 'acme-*'", "sequence"),
            ("[groups]\nacme = ['']", "line 2: group \"acme\": a pattern must not be empty"),
            ("[groups]\n'qemu:x' = ['x']", "qemu:x"),
            ("[groups]\n'' = ['x']", "group name"),
            ("groups", "expected"),
            ("[groups]\na = ['x']\na = ['y']", "line 3: duplicate key"),
        ] {
            let error = GroupFile::parse(file).unwrap_err();
            assert!(error.contains(word), "{file:?}: {error}");
        }
        let long = format!("[groups]\n{} = ['x']", "n".repeat(65));
        assert!(GroupFile::parse(&long).unwrap_err().contains("64"));
        let missing = GroupFile::read(Path::new("/nonexistent/groups.toml")).unwrap_err();
        assert!(missing.to_string().starts_with("cannot read /nonexistent/groups.toml: "));
    }
}
