//! The words that an identifier is made of.

/// Splits at everything that is no letter and no digit, and where capitals begin: `HTTPServer_name2` is `http`,
/// `server` and `name2`.
pub fn segments(identifier: &str) -> Vec<String> {
    let pieces = identifier.split(|c: char| !c.is_alphanumeric()).filter(|piece| !piece.is_empty());
    pieces.flat_map(camel).collect()
}

fn camel(piece: &str) -> Vec<String> {
    let chars: Vec<char> = piece.chars().collect();
    let mut words: Vec<String> = Vec::new();
    for (at, &c) in chars.iter().enumerate() {
        let previous = at.checked_sub(1).map(|at| chars[at]);
        let ends_capitals =
            previous.is_some_and(char::is_uppercase) && chars.get(at + 1).is_some_and(|next| next.is_lowercase());
        let begins = previous.is_none_or(|previous| c.is_uppercase() && (!previous.is_uppercase() || ends_capitals));
        if begins {
            words.push(String::new());
        }
        words.last_mut().expect("the first character begins a word").extend(c.to_lowercase());
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identifiers_are_split_at_underscores_and_capitals() {
        assert_eq!(segments("CALM_SECONDS"), ["calm", "seconds"]);
        assert_eq!(segments("is_calm"), ["is", "calm"]);
        assert_eq!(segments("CastShadow"), ["cast", "shadow"]);
        assert_eq!(segments("HTTPServer_name2"), ["http", "server", "name2"]);
        assert_eq!(segments("era's"), ["era", "s"]);
        assert_eq!(segments("crates/agent/src/regain.rs"), ["crates", "agent", "src", "regain", "rs"]);
        assert_eq!(segments("--"), Vec::<String>::new());
    }

    #[test]
    fn words_inside_of_words_are_not_split_off() {
        assert_eq!(segments("operation_outdoors"), ["operation", "outdoors"]);
    }
}
