//! Names of groups and guests: `acme`, and in it `acme-1`, `acme-2`, ...
//!
//! Names appear in command lines, file names, socket paths, container names and a TOML file. So only characters are
//! allowed that are harmless in all of these.

use crate::error::{Error, Result};
use std::collections::{BTreeMap, BTreeSet};

/// Longest name of a group, in bytes. Guests add a number, and a socket path has room for 107 bytes in all.
const MAX_GROUP: usize = 24;

/// Checks the names of groups: 1 to 24 ASCII letters, digits, `-` and `_`, a letter or digit first, none twice.
///
/// # Errors
/// [`Error::Stop`] that says which name is wrong and what is allowed.
pub fn check_groups(groups: &[String]) -> Result<()> {
    let mut seen = BTreeSet::new();
    for group in groups {
        let harmless = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
        let first = group.as_bytes().first().is_some_and(u8::is_ascii_alphanumeric);
        if !first || group.len() > MAX_GROUP || !group.bytes().all(harmless) {
            return Err(Error::usage(format!(
                "group name {group:?} does not do: take 1 to {MAX_GROUP} letters, digits, '-' and '_', \
                 a letter or digit first"
            )));
        }
        if !seen.insert(group) {
            return Err(Error::usage(format!("group {group:?} is named twice")));
        }
    }
    if groups.is_empty() { Err(Error::usage("no group is named".into())) } else { Ok(()) }
}

/// Names for `count` new guests, which are divided evenly among the groups: the first group gets at most one guest more
/// than the last. Each guest gets the lowest number that `taken` leaves free. Returns (group, guest) in the order of
/// the groups.
pub fn deal(groups: &[String], count: usize, taken: &BTreeSet<String>) -> Vec<(String, String)> {
    let mut dealt = Vec::with_capacity(count);
    for (index, group) in groups.iter().enumerate() {
        let share = count / groups.len() + usize::from(index < count % groups.len());
        let free = (1..).map(|number| format!("{group}-{number}")).filter(|name| !taken.contains(name));
        dealt.extend(free.take(share).map(|name| (group.clone(), name)));
    }
    dealt
}

/// Content of the file that `pagefold census --groups` reads: under `[groups]`, each group with patterns of its guests'
/// names.
pub fn groups_toml<'a>(guests: impl Iterator<Item = (&'a str, &'a str)>) -> String {
    let mut members: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (group, guest) in guests {
        members.entry(group).or_default().push(guest);
    }
    let mut text = String::from("# Written by pagefold lab. A group, and patterns of its guests' names.\n[groups]\n");
    for (group, guests) in members {
        let quoted: Vec<String> = guests.iter().map(|guest| format!("{guest:?}")).collect();
        text.push_str(&format!("{group} = [{}]\n", quoted.join(", ")));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(list: &[&str]) -> Vec<String> {
        list.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn guests_are_dealt_evenly_and_numbers_continue() {
        let groups = names(&["acme", "beta"]);
        let dealt = |count, taken: &[&str]| -> Vec<String> {
            deal(&groups, count, &names(taken).into_iter().collect()).into_iter().map(|(_, guest)| guest).collect()
        };
        assert_eq!(dealt(4, &[]), ["acme-1", "acme-2", "beta-1", "beta-2"]);
        assert_eq!(dealt(3, &[]), ["acme-1", "acme-2", "beta-1"]);
        assert_eq!(dealt(2, &["acme-1", "beta-2"]), ["acme-2", "beta-1"]);
        assert_eq!(dealt(1, &[]), ["acme-1"]);
    }

    #[test]
    fn names_that_could_do_harm_are_refused() {
        assert!(check_groups(&names(&["acme", "Beta_2", "0-x"])).is_ok());
        for bad in ["", "-acme", "a,b", "a/b", "..", "a b", "gr\u{fc}n", &"x".repeat(25)] {
            assert!(check_groups(&names(&[bad])).is_err(), "{bad:?}");
        }
        assert!(check_groups(&names(&["acme", "acme"])).is_err());
        assert!(check_groups(&[]).is_err());
    }

    #[test]
    fn the_mapping_file_is_toml() {
        let guests = [("acme", "acme-1"), ("beta", "beta-1"), ("acme", "acme-2")];
        let table: toml::Table = groups_toml(guests.into_iter()).parse().expect("valid TOML");
        assert_eq!(table["groups"]["acme"].as_array().map(Vec::len), Some(2));
        assert_eq!(table["groups"]["beta"][0].as_str(), Some("beta-1"));
    }
}
