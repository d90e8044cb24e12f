//! The part `[sketch]` of a configuration: sketches of guests' contents (small summaries, made of keyed hashes of their
//! pages), which another program writes at intervals.

use super::config::{Bytes, Wrong};
use api::change::from_word;
use serde::Deserialize;
use std::path::PathBuf;
use std::str::FromStr;
use toml::Spanned;

/// The directory that sketches are written to, unless another one is configured.
const USUAL_DIR: &str = "/var/lib/pagefold/sketches";
/// Time between two sketches, in seconds, unless another one is configured: 10 minutes.
const USUAL_EVERY_S: u32 = 600;
/// Most sketch files that are kept, unless another number is configured: 144, one day with a sketch every 10 minutes.
const USUAL_KEEP: u32 = 144;
/// Most bytes of all kept sketch files together, unless another size is configured: 1 GiB.
const USUAL_KEEP_BYTES: u64 = 1 << 30;
/// Memory of the census's index. It is enough for 50 GiB of guests at once; more are scanned in several passes.
const INDEX_MEMORY: &str = "256M";

/// Configuration of the program that writes sketches of guests' contents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sketch {
    /// Seconds between two sketches.
    pub every_s: u32,
    /// The directory that sketches are written to.
    pub dir: PathBuf,
    /// The directory with the keys of the fingerprints; `None`: the usual one of the service's user.
    pub keys: Option<PathBuf>,
    /// Most sketch files of this host that are kept in the directory.
    pub keep: u32,
    /// Most bytes of these sketch files together. The newest file is kept in any case.
    pub keep_bytes: u64,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub(crate) struct WrittenSketch {
    #[serde(deserialize_with = "from_word")]
    every: Option<Every>,
    dir: Option<Spanned<PathBuf>>,
    keys: Option<Spanned<PathBuf>>,
    keep: Option<Spanned<u32>>,
    #[serde(deserialize_with = "from_word")]
    keep_size: Option<Bytes>,
}

/// Seconds, as a number or as text such as `10m`.
struct Every(u32);

impl FromStr for Every {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let units = [('h', 3600), ('m', 60), ('s', 1)];
        let unit = units.iter().find_map(|(unit, each)| Some((text.strip_suffix(*unit)?, *each)));
        let (number, each) = unit.unwrap_or((text, 1));
        let seconds = number.parse().ok().and_then(|number: u32| number.checked_mul(each)).filter(|s| *s > 0);
        seconds.map(Self).ok_or_else(|| format!("{text:?} is no time between two sketches: use 10m, 1h, ..."))
    }
}

impl WrittenSketch {
    pub(crate) fn check(self) -> Result<Sketch, Wrong> {
        let absolute = |path: Spanned<PathBuf>| match path.get_ref() {
            absolute if absolute.is_absolute() => Ok(absolute.clone()),
            _ => Err(Wrong(path.span().start, "a path that begins with / is needed".into())),
        };
        let keep = match self.keep {
            Some(keep) if *keep.get_ref() == 0 => {
                return Err(Wrong(keep.span().start, "a file at least is kept".into()));
            }
            keep => keep.map_or(USUAL_KEEP, Spanned::into_inner),
        };
        Ok(Sketch {
            every_s: self.every.map_or(USUAL_EVERY_S, |every| every.0),
            dir: self.dir.map(absolute).transpose()?.unwrap_or_else(|| USUAL_DIR.into()),
            keys: self.keys.map(absolute).transpose()?,
            keep,
            keep_bytes: self.keep_size.map_or(USUAL_KEEP_BYTES, |bytes| bytes.0),
        })
    }
}

impl Sketch {
    /// The command-line arguments of the program that writes sketches.
    pub fn arguments(&self) -> Vec<String> {
        let Self { every_s, dir, keys, keep, keep_bytes } = self;
        let (every, keep, bytes) = (format!("{every_s}s"), keep.to_string(), keep_bytes.to_string());
        // The slash at the end tells the program that this is a directory.
        let dir = format!("{}/", dir.display());
        let words = ["sketch", "--until-hangup", "--group-by", "service", "--every", &every, "--parquet", &dir];
        let bounds = ["--keep", &keep, "--keep-size", &bytes, "--index-memory", INDEX_MEMORY];
        let keys = keys.iter().flat_map(|keys| ["--keys".to_owned(), keys.display().to_string()]);
        words.into_iter().chain(bounds).map(str::to_owned).chain(keys).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_have_the_whole_configuration() {
        let written: WrittenSketch =
            toml::from_str("every = '2h'\ndir = '/d e'\nkeys = '/k'\nkeep = 3\nkeep-size = '1M'").unwrap();
        let sketch = written.check().ok().expect("it is valid");
        let dir = "/d e/".to_owned();
        assert!(sketch.arguments().contains(&dir), "one word");
        assert_eq!(
            sketch.arguments().join(" "),
            "sketch --until-hangup --group-by service --every 7200s --parquet /d e/ --keep 3 --keep-size 1048576 \
             --index-memory 256M --keys /k"
        );
        let usual = WrittenSketch::default().check().ok().expect("it is valid");
        assert_eq!((usual.every_s, usual.keep, usual.keys), (600, 144, None));
    }

    #[test]
    fn paths_times_and_numbers_are_checked() {
        let is_valid = |text: &str| toml::from_str::<WrittenSketch>(text).is_ok_and(|written| written.check().is_ok());
        for valid in ["", "every = 1", "every = '90s'", "every = '10m'", "keep = 1", "keep-size = '1K'"] {
            assert!(is_valid(valid), "{valid}");
        }
        let wrong =
            ["every = 0", "every = '0m'", "every = 'm'", "every = '9999999h'", "dir = 'd'", "keys = 'k'", "keep = 0"];
        assert!(wrong.iter().all(|text| !is_valid(text)));
    }
}
