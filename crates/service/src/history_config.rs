//! The part `[history]` of a configuration: figures of groups and members over time, which another program keeps.

use serde::Deserialize;
use std::path::PathBuf;
use toml::Spanned;

/// The directory of the file with figures, unless another one is configured.
const USUAL_DIR: &str = "/var/lib/pagefold/history";
/// Most bytes that the file with figures may have, unless another size is configured: 1 GiB.
const USUAL_KEEP_BYTES: u64 = 1 << 30;
/// Smallest size that may be configured for the file, in bytes: 64 MiB.
const LEAST_KEEP_BYTES: u64 = 64 << 20;

/// Configuration of the program that keeps figures over time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct History {
    /// The directory of the file with figures.
    pub dir: PathBuf,
    /// Most bytes of the file.
    pub keep_bytes: u64,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub(crate) struct WrittenHistory {
    dir: Option<Spanned<PathBuf>>,
    keep_size: Option<Spanned<String>>,
}

impl WrittenHistory {
    /// The configuration, or the place of an error in the text and its description.
    pub(crate) fn check(self) -> Result<History, (usize, String)> {
        let dir = match self.dir {
            Some(dir) if !dir.get_ref().is_absolute() => {
                return Err((dir.span().start, "a path that begins with / is needed".into()));
            }
            dir => dir.map_or_else(|| USUAL_DIR.into(), Spanned::into_inner),
        };
        let Some(size) = self.keep_size else { return Ok(History { dir, keep_bytes: USUAL_KEEP_BYTES }) };
        match cli::size::parse_bytes(size.get_ref()) {
            Ok(keep_bytes) if keep_bytes >= LEAST_KEEP_BYTES => Ok(History { dir, keep_bytes }),
            Ok(_) => Err((size.span().start, "the file takes 64M at least".into())),
            Err(why) => Err((size.span().start, why)),
        }
    }
}

impl History {
    /// The command-line arguments of the program that keeps a history: it runs as user `uid`, and answers questions of
    /// user `reader`, if these are given.
    pub fn arguments(&self, uid: Option<u32>, reader: Option<u32>) -> Vec<String> {
        let (dir, bytes) = (self.dir.display().to_string(), self.keep_bytes.to_string());
        let words = ["history", "record", "--until-hangup", "--dir", &dir, "--keep-size", &bytes].map(str::to_owned);
        let user = |option: &str, uid: Option<u32>| uid.map(|uid| [option.to_owned(), uid.to_string()]);
        words.into_iter().chain(user("--uid", uid).into_iter().chain(user("--reader", reader)).flatten()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Option<History> {
        toml::from_str::<WrittenHistory>(text).ok()?.check().ok()
    }

    #[test]
    fn arguments_have_the_whole_configuration() {
        let history = read("dir = '/d e'\nkeep-size = '64M'").unwrap();
        assert_eq!(
            history.arguments(Some(7), Some(8)),
            [
                "history",
                "record",
                "--until-hangup",
                "--dir",
                "/d e",
                "--keep-size",
                "67108864",
                "--uid",
                "7",
                "--reader",
                "8"
            ]
        );
        let usual = read("").unwrap();
        assert_eq!((usual.keep_bytes, usual.arguments(None, None).len()), (1 << 30, 7));
        for wrong in ["dir = 'd'", "keep-size = '63M'", "keep-size = 1", "every = 10"] {
            assert_eq!(read(wrong), None, "{wrong}");
        }
    }
}
