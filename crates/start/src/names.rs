//! Names of templates and clones.

use cli::exit::Stop;
use std::collections::BTreeSet;

/// Longest name, in bytes: 48. It leaves room for the paths of a clone's sockets.
const MOST_BYTES: usize = 48;
/// Placeholder for a clone's number in the name pattern of a request.
const NUMBER: &str = "%d";

/// Checks a name, which becomes the name of a directory and of a machine. `what` says for the error what is named.
pub(crate) fn check(what: &str, name: &str) -> anyhow::Result<()> {
    let fine = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-');
    if (1..=MOST_BYTES).contains(&name.len()) && name.chars().all(fine) && !name.starts_with(['.', '-']) {
        return Ok(());
    }
    let text =
        format!("{what} name {name:?}: use 1 to {MOST_BYTES} letters, digits, - and ., and begin with neither - nor .");
    Err(Stop::Usage(text).into())
}

/// Names for `count` clones by a pattern. Names in `taken` are left out. Numbers begin with 1.
pub(crate) fn deal(pattern: &str, count: usize, taken: &BTreeSet<String>) -> anyhow::Result<Vec<String>> {
    if !pattern.contains(NUMBER) {
        check("clone", pattern)?;
        if count != 1 {
            return Err(Stop::Usage(format!(
                "{count} clones cannot all be called {pattern}: put {NUMBER} into the name"
            ))
            .into());
        }
        if taken.contains(pattern) {
            return Err(Stop::Usage(format!("there is a clone {pattern} already: pagefold clones lists them")).into());
        }
        return Ok(vec![pattern.to_owned()]);
    }
    let numbered = |number: usize| pattern.replacen(NUMBER, &number.to_string(), 1);
    check("clone", &numbered(count + taken.len()))?;
    Ok((1..).map(numbered).filter(|name| !taken.contains(name)).take(count).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_numbered_around_those_that_are_taken() {
        let taken = BTreeSet::from(["web-2".to_owned(), "db".to_owned()]);
        assert_eq!(deal("web-%d", 3, &taken).expect("names"), ["web-1", "web-3", "web-4"]);
        assert_eq!(deal("one", 1, &taken).expect("a name"), ["one"]);
        for (pattern, count) in [("db", 1), ("web", 2), ("../x-%d", 1), ("", 1), ("-%d", 1)] {
            assert!(deal(pattern, count, &taken).is_err(), "{pattern} {count}");
        }
    }
}
