//! Names of groups, members, templates and tokens: short, and made of characters that mean nothing to a shell, a path
//! or a terminal.

/// Longest name: with it, the path of a worker's socket still fits into a socket's address.
pub const MOST_BYTES: usize = 48;

/// Checks a name that a user chose. `what` says what has the name: "group", "member", "template" or "token".
///
/// # Errors
/// The reason why it is refused, with the name escaped.
pub fn check(what: &str, name: &str) -> Result<(), String> {
    let fine = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    if name.is_empty() || name.len() > MOST_BYTES || !name.chars().all(fine) || name.starts_with(['.', '-']) {
        let shown: String = name.chars().take(MOST_BYTES).collect();
        return Err(format!(
            "{what} name {shown:?}: use 1 to {MOST_BYTES} letters, digits, - _ and ., and begin with neither - nor ."
        ));
    }
    if what == "group" && page::NOT_GROUPS.contains(&name) {
        return Err(format!("group name {name:?}: that is what other memory of Pagefold is called; use another"));
    }
    Ok(())
}

/// A valid name for a process, made from its program's name and its pid.
pub fn of_process(program: &str, pid: u32) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() { c } else { '-' };
    let program: String = program.chars().take(MOST_BYTES - 12).map(plain).collect();
    let program = program.trim_start_matches('-');
    format!("{}-{pid}", if program.is_empty() { "process" } else { program })
}

/// A valid name that ends with `-` and this number, made from a valid name, which is cut if it is too long.
pub fn numbered(name: &str, number: u32) -> String {
    let end = format!("-{number}");
    format!("{}{end}", &name[..name.len().min(MOST_BYTES.saturating_sub(end.len()))])
}

/// A valid name for a group, as similar to `text` as possible.
pub fn of_group(text: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || matches!(c, '.' | '_') { c } else { '-' };
    let text: String = text.chars().take(MOST_BYTES.saturating_sub("group-".len())).map(plain).collect();
    if check("group", &text).is_ok() { text } else { format!("group-{}", text.trim_start_matches(['-', '.'])) }
}

/// Parses a group's name for the command line.
///
/// # Errors
/// As for [`check`].
pub fn parse_group(text: &str) -> Result<String, String> {
    check("group", text).map(|()| text.to_owned())
}

/// Parses a member's name for the command line.
///
/// # Errors
/// As for [`check`].
pub fn parse_member(text: &str) -> Result<String, String> {
    check("member", text).map(|()| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_names_are_accepted() {
        for name in ["a", "acme", "web-1.example_2", "0", &"n".repeat(48)] {
            assert!(check("group", name).is_ok(), "{name}");
        }
        assert!(check("group", "lease").is_err() && check("member", "lease").is_ok());
        let long = "n".repeat(49);
        for name in ["", ".", "..", ".hidden", "-rf", "a/b", "../x", "a b", "a\n", "\u{1b}[2J", "ä", "a\0", &long] {
            let error = check("group", name).unwrap_err();
            assert!(error.starts_with("group name \"") && !error.contains(['\n', '\u{1b}']), "{error}");
        }
    }

    #[test]
    fn every_text_gives_a_valid_group() {
        for (text, name) in [
            ("acme", "acme"),
            ("qemu:acme-1", "qemu-acme-1"),
            ("-odd", "group-odd"),
            ("lease", "group-lease"),
            ("", "group-"),
            (&"\u{1b}".repeat(500), "group-"),
        ] {
            assert_eq!(of_group(text), name);
            check("group", name).unwrap();
        }
        check("group", &of_group(&"x".repeat(500))).unwrap();
    }

    #[test]
    fn numbered_names_are_valid_and_differ() {
        assert_eq!(numbered("web1", 77), "web1-77");
        let long = "n".repeat(MOST_BYTES);
        check("member", &numbered(&long, u32::MAX)).unwrap();
        assert_ne!(numbered(&long, u32::MAX), long);
    }

    #[test]
    fn every_process_gets_a_valid_name() {
        for (program, name) in [
            ("qemu-system-x86_64", "qemu-system-x86-64-7"),
            ("", "process-7"),
            ("--", "process-7"),
            ("\u{1b}[2J", "2J-7"),
            (&"x".repeat(500), &format!("{}-7", "x".repeat(36))),
        ] {
            assert_eq!(of_process(program, 7), name);
            check("member", &of_process(program, u32::MAX)).unwrap();
        }
    }
}
