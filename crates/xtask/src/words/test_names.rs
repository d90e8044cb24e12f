//! A test's name says what holds: `short_gap_does_not_end_burst`.

/// Beginnings of names that tell of something without naming it. Whole names of further riddles can be added.
const RIDDLES: &[&str] = &["what_", "who_", "whoever_", "whatever_", "that_", "where_", "when_"];

/// Says why a name is a riddle.
pub fn check(name: &str) -> Option<String> {
    let riddle = RIDDLES.iter().find(|riddle| name.starts_with(**riddle))?;
    Some(format!("begins with \"{riddle}\"; name the thing, and what holds of it"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn riddles_are_found() {
        assert!(check("what_rests_is_folded").is_some());
        assert!(check("when_it_rains").is_some());
        assert!(check("nobody_waits").is_none());
        assert!(check("whenever_asked_it_answers").is_none());
        assert!(check("pages_that_rest_are_folded").is_none());
    }
}
