//! The file with bearer tokens for the web side.
//!
//! ```toml
//! [[token]]
//! name = "prometheus"
//! token = "..."          # openssl rand -hex 32
//! rights = "read"        # or "control": may change settings, too
//! groups = ["acme"]      # left out: all
//! ```

use super::config::{Wrong, in_line};
use anyhow::bail;
use api::name;
use api::place::own_uid;
use api::setup::{LEAST_TOKEN_CHARS, Token};
use serde::Deserialize;
use std::collections::BTreeSet;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use toml::Spanned;

/// Longest file of tokens: 32 KiB, so that the message to the web side, which has all tokens, is not too long.
const MOST_BYTES: u64 = 32 << 10;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    #[serde(default)]
    token: Vec<WrittenToken>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenToken {
    name: Spanned<String>,
    token: Spanned<String>,
    #[serde(default)]
    rights: Rights,
    groups: Option<Spanned<Vec<String>>>,
}

#[derive(Clone, Copy, Default, PartialEq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Rights {
    #[default]
    Read,
    Control,
}

/// Reads the tokens of a file that only its owner can read.
///
/// # Errors
/// The file cannot be read, other users can read it, or it is not valid: file and line are named.
pub fn read(path: &Path) -> anyhow::Result<Vec<Token>> {
    let (file, found) = host::open_plain_file(path)?;
    let shown = path.display();
    if found.uid() != 0 && found.uid() != own_uid() {
        bail!("{shown} belongs to user {}, who could give any right: chown root {shown}", found.uid());
    }
    if found.mode() & 0o077 != 0 {
        bail!("{shown}: others can use it (mode {:04o}): chmod 0600 {shown}", found.mode() & 0o7777);
    }
    let mut text = String::new();
    file.take(MOST_BYTES + 1).read_to_string(&mut text).map_err(|e| anyhow::anyhow!("cannot read {shown}: {e}"))?;
    if text.len() as u64 > MOST_BYTES {
        bail!("{shown}: more than {MOST_BYTES} bytes");
    }
    parse(&text).map_err(|why| anyhow::anyhow!("{shown}: {why}"))
}

fn parse(text: &str) -> Result<Vec<Token>, String> {
    let written: Written = toml::from_str(text).map_err(|e| {
        let wrong = Wrong(e.span().map_or(0, |span| span.start), e.message().to_owned());
        without_secrets(&in_line(text, &wrong))
    })?;
    let (mut tokens, mut names, mut secrets) = (Vec::new(), BTreeSet::new(), BTreeSet::new());
    for one in written.token {
        let token = one.check().map_err(|wrong| in_line(text, &wrong))?;
        let (name_at, at) = (one.name.span().start, one.token.span().start);
        if !names.insert(token.name.clone()) {
            return Err(in_line(text, &Wrong(name_at, format!("there are two tokens named {}", token.name))));
        }
        if !secrets.insert(token.token.clone()) {
            return Err(in_line(text, &Wrong(at, "this is the secret of another token, too".into())));
        }
        tokens.push(token);
    }
    Ok(tokens)
}

/// The parser's error message without words that are long enough to be tokens: it quotes the file, and must not show
/// secrets.
fn without_secrets(complaint: &str) -> String {
    let plain = complaint.replace('\n', ", ");
    let is_long = |word: &&str| word.len() >= LEAST_TOKEN_CHARS;
    let words = plain.split_inclusive(|c: char| !c.is_ascii_graphic() || matches!(c, '"' | '`'));
    words.map(|word| if is_long(&word) { "... " } else { word }).collect()
}

impl WrittenToken {
    fn check(&self) -> Result<Token, Wrong> {
        let name = self.name.get_ref();
        name::check("token", name).map_err(|why| Wrong(self.name.span().start, why))?;
        let secret = self.token.get_ref();
        let is_plain = secret.bytes().all(|b| b.is_ascii_graphic());
        if secret.len() < LEAST_TOKEN_CHARS || !is_plain {
            let why = format!(
                "a token has at least {LEAST_TOKEN_CHARS} characters of ASCII, and no spaces: use openssl rand -hex 32"
            );
            return Err(Wrong(self.token.span().start, why));
        }
        let groups = self.groups.as_ref().map(|groups| {
            let at = groups.span().start;
            groups.get_ref().iter().try_for_each(|group| name::check("group", group).map_err(|why| Wrong(at, why)))?;
            Ok(groups.get_ref().iter().cloned().collect())
        });
        let (token, control) = (secret.clone(), self.rights == Rights::Control);
        Ok(Token { name: name.clone(), token, control, groups: groups.transpose()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;

    const SECRET: &str = "0123456789abcdef0123456789abcdef";

    fn written(more: &str) -> String {
        format!("[[token]]\nname = 'prometheus'\ntoken = '{SECRET}'\n{more}\n")
    }

    #[test]
    fn tokens_have_the_rights_that_are_written() {
        let text = written("")
            + &written("rights = 'control'\ngroups = ['acme']").replace("prom", "x").replace("abcdef", "ABCDEF");
        let tokens = parse(&text).unwrap();
        assert_eq!((tokens[0].control, &tokens[0].groups, &*tokens[0].token), (false, &None, SECRET));
        assert_eq!((tokens[1].control, tokens[1].groups.as_ref().unwrap().contains("acme")), (true, true));
        assert!(!format!("{tokens:?}").contains("456789"));
    }

    #[test]
    fn errors_name_the_line_and_no_secret() {
        let two = written("");
        for (text, words) in [
            (written("rights = 'all'"), "line 4, rights: unknown variant `all"),
            (written("groups = ['../x']"), "line 4, groups: group name \"../x\""),
            (written("group = 'x'"), "line 4: unknown field `group"),
            (written("").replace("cdef'", "'"), "line 3: a token has at least 32"),
            (written("").replace("cdef'", " cdef'"), "line 3: a token has at least 32"),
            (two.clone() + &two, "line 6: there are two tokens named prometheus"),
            (two.clone() + &two.replace("prom", "x"), "line 7: this is the secret of another"),
            (written("").replace("prom", "-"), "line 2: token name \"-etheus\""),
            (format!("token = '{SECRET}'"), "line 1, token: invalid type"),
            (format!("[[token]]\nname = 'x'\ntoken = {SECRET}"), "line 3"),
            (format!("{SECRET} = 1"), "line 1: unknown field"),
            (format!("[[token]]\nname = 'x'\ntoken = 'y'\nrights = '{SECRET}'"), "line 4, rights: unknown variant"),
            ("[[token]]\nname = 'x'".to_owned(), "missing field `token"),
        ] {
            let error = parse(&text).unwrap_err();
            assert!(error.contains(words) && !error.contains("456789"), "{text}\n-> {error}");
        }
    }

    #[test]
    fn file_that_others_can_read_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tokens.toml");
        fs::write(&path, written("")).unwrap();
        for mode in [0o640, 0o604, 0o660, 0o610] {
            fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            let error = read(&path).unwrap_err().to_string();
            assert!(error.contains("chmod 0600"), "{mode:o}: {error}");
        }
        fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        assert_eq!(read(&path).unwrap().len(), 1);
        if own_uid() == 0 {
            std::os::unix::fs::chown(&path, Some(65_534), None).unwrap();
            assert!(read(&path).unwrap_err().to_string().contains("belongs to user 65534"));
        }
    }
}
