//! Patterns for the names of guests: `*` is any text, `?` any one character, everything else itself.

use serde::{Deserialize, Serialize};
use std::str::FromStr;

/// Longest pattern, in bytes.
const MAX_BYTES: usize = 256;

/// A pattern for names.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Glob(String);

impl TryFrom<String> for Glob {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Glob> for String {
    fn from(glob: Glob) -> Self {
        glob.0
    }
}

impl FromStr for Glob {
    type Err = String;

    /// # Errors
    /// The pattern is empty or too long.
    fn from_str(text: &str) -> Result<Self, String> {
        match text.len() {
            0 => Err("a pattern must not be empty; * matches every name".into()),
            n if n > MAX_BYTES => Err(format!("a pattern may have {MAX_BYTES} bytes, this one has {n}")),
            _ => Ok(Self(text.into())),
        }
    }
}

impl Glob {
    /// Whether the whole of `name` matches.
    pub fn matches(&self, name: &str) -> bool {
        let (pattern, name): (Vec<char>, Vec<char>) = (self.0.chars().collect(), name.chars().collect());
        let (mut p, mut n) = (0, 0);
        // Place behind the last star, and the place in the name where it was tried. After each mismatch that star takes
        // one more character.
        let mut retry = None;
        while n < name.len() {
            match pattern.get(p) {
                Some('*') => {
                    p += 1;
                    retry = Some((p, n));
                }
                Some(&c) if c == '?' || c == name[n] => (p, n) = (p + 1, n + 1),
                _ => match retry {
                    Some((star, at)) => {
                        (p, n) = (star, at + 1);
                        retry = Some((star, at + 1));
                    }
                    None => return false,
                },
            }
        }
        pattern[p..].iter().all(|&c| c == '*')
    }

    /// The pattern as it was written.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stars_and_question_marks_match() {
        let matches = |pattern: &str, name: &str| pattern.parse::<Glob>().unwrap().matches(name);
        for (pattern, name) in [
            ("acme-1", "acme-1"),
            ("acme-*", "acme-"),
            ("*", ""),
            ("a*b*c", "axxbyybzzc"),
            ("*.example", "a.example.example"),
            ("v?", "vö"),
            ("**a", "ba"),
            ("[x]", "[x]"),
        ] {
            assert!(matches(pattern, name), "{pattern} {name}");
        }
        for (pattern, name) in [("acme-1", "acme-10"), ("?", ""), ("a*b", "abc"), ("a?", "a"), ("A", "a")] {
            assert!(!matches(pattern, name), "{pattern} {name}");
        }
    }

    #[test]
    fn length_and_time_are_bounded() {
        assert!("".parse::<Glob>().is_err());
        assert!("x".repeat(257).parse::<Glob>().is_err());
        let nasty = "a*".repeat(128).parse::<Glob>().unwrap();
        assert!(!nasty.matches(&("a".repeat(10_000) + "b").replace('b', "c").replace("aaaa", "bbbb")));
    }
}
