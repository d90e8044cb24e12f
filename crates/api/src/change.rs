//! A group's settings as people write them, in the configuration and in `pagefold group set`.

use crate::control::{Fold, Latency, Settings, ZeroPolicy};
use serde::{Deserialize, Deserializer, Serialize, de};
use std::str::FromStr;

/// How many pages of a group may be fingerprinted a second.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ScanRate {
    /// All pages that were not written for a whole round ([`wire::Pace::pages_per_s`]).
    Auto,
    /// A rate that follows what folding yields, and takes at most this percentage of a processor.
    Adaptive(u8),
    /// At most this many.
    Pages(u32),
}

/// When huge pages are split.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum HugePages {
    /// Never.
    Never,
    /// When at least this percentage of one would fold.
    Percent(u8),
}

/// A change of a group's settings. A setting that is `None` stays as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Change {
    /// See [`Settings::scan_rate`].
    pub scan_rate: Option<ScanRate>,
    /// See [`Settings::zero_pages`].
    pub zero_pages: Option<ZeroPolicy>,
    /// See [`Settings::split_huge_at_percent`].
    pub huge_pages: Option<HugePages>,
    /// See [`Settings::fold`].
    pub fold: Option<Fold>,
    /// See [`Settings::intra_member_only`].
    pub intra_member_only: Option<bool>,
    /// See [`Settings::pool_slots`].
    pub pool: Option<PoolSize>,
    /// See [`Settings::index_pages`].
    pub index_memory: Option<IndexSize>,
    /// See [`Settings::latency`].
    pub latency: Option<Latency>,
}

/// A change of a group's settings, as programs write it in JSON: the names and values of [`Printed`], sizes also as
/// text such as `2G`.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Wanted {
    /// Most pages fingerprinted a second, `auto`, or `adaptive:N%`.
    #[serde(deserialize_with = "from_word")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<OrWord>))]
    scan_rate: Option<ScanRate>,
    /// Treatment of pages of zeros.
    zero_pages: Option<ZeroPolicy>,
    /// Least percentage of a huge page that must fold for it to be split, or `never`.
    #[serde(deserialize_with = "from_word")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<OrWord>))]
    huge_pages: Option<HugePages>,
    /// Whether to fold.
    fold: Option<Fold>,
    /// Whether pages of different members are never folded into one.
    intra_member_only: Option<bool>,
    /// Most memory of the pool, in bytes or as text.
    #[serde(deserialize_with = "from_word")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<OrWord>))]
    pool: Option<PoolSize>,
    /// Most memory of the index, in bytes or as text.
    #[serde(deserialize_with = "from_word")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<OrWord>))]
    index_memory: Option<IndexSize>,
    /// What folding may take from programs that want the same processors.
    latency: Option<Latency>,
}

impl From<Wanted> for Change {
    fn from(wanted: Wanted) -> Self {
        let Wanted { scan_rate, zero_pages, huge_pages, fold, intra_member_only, pool, index_memory, latency } = wanted;
        Self { scan_rate, zero_pages, huge_pages, fold, intra_member_only, pool, index_memory, latency }
    }
}

/// Most memory of a pool, as a number of slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolSize(pub u32);

/// Most memory of an index, as a number of pages that it may remember.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IndexSize(pub u32);

/// Most processor time that folding takes with the scan rate `adaptive`, if no percentage is given: 10% of a processor.
const BUDGET_PERCENT: u8 = 10;

/// Memory that a worker's index takes for each page that it remembers, in bytes.
const INDEX_BYTES_A_PAGE: u64 = 16;

/// Smallest size of a pool or an index that is accepted: 64 KiB. In a smaller one, the unit was probably forgotten.
const LEAST_BYTES: u64 = 64 << 10;

/// Parses a size such as `2G`, and returns how many parts of `each` bytes it holds.
fn parts(text: &str, each: u64) -> Result<u32, String> {
    let bytes = cli::size::parse_bytes(text)?;
    if bytes < LEAST_BYTES {
        return Err(format!("{text} are {bytes} bytes, and 64K is the least: write a unit, such as 64M"));
    }
    Ok(u32::try_from(bytes.checked_div(each).unwrap_or(bytes)).unwrap_or(u32::MAX))
}

impl FromStr for PoolSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        parts(text, page::PAGE_BYTES as u64).map(Self)
    }
}

impl FromStr for IndexSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        parts(text, INDEX_BYTES_A_PAGE).map(Self)
    }
}

/// A number, or a word in its place such as `auto` or `never`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum OrWord {
    /// The number.
    Number(u32),
    /// The word in place of a number.
    Word(String),
}

/// A group's settings under the names and with the values of the configuration, for JSON. Sizes are in bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Printed {
    /// Most pages fingerprinted a second, `auto`, or `adaptive:N%`.
    scan_rate: OrWord,
    /// Treatment of pages of zeros.
    zero_pages: ZeroPolicy,
    /// Least percentage of a huge page that must fold for it to be split, or `never`.
    huge_pages: OrWord,
    /// Whether to fold.
    fold: Fold,
    /// Whether pages of different members are never folded into one.
    intra_member_only: bool,
    /// Most memory of the pool, in bytes.
    pool: u64,
    /// Most memory of the index, in bytes.
    index_memory: u64,
    /// What folding may take from programs that want the same processors.
    latency: Latency,
}

impl From<&Settings> for Printed {
    fn from(settings: &Settings) -> Self {
        let or = |number: Option<u32>, word: &str| number.map_or(OrWord::Word(word.to_owned()), OrWord::Number);
        let budget = settings.scan_budget_percent.map(|percent| format!("adaptive:{percent}%"));
        Self {
            scan_rate: or(settings.scan_rate, budget.as_deref().unwrap_or("auto")),
            zero_pages: settings.zero_pages,
            huge_pages: or(settings.split_huge_at_percent.map(u32::from), "never"),
            fold: settings.fold,
            intra_member_only: settings.intra_member_only,
            pool: page::pages_to_bytes(settings.pool_slots.into()),
            index_memory: u64::from(settings.index_pages) * INDEX_BYTES_A_PAGE,
            latency: settings.latency,
        }
    }
}

impl Printed {
    /// The scan rate as people write it.
    pub fn scan_rate_words(&self) -> String {
        match &self.scan_rate {
            OrWord::Number(pages) => pages.to_string(),
            OrWord::Word(word) => word.clone(),
        }
    }

    /// Whether to fold.
    pub const fn fold(&self) -> Fold {
        self.fold
    }
}

impl FromStr for ScanRate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let budget =
            text.strip_prefix("adaptive:").map(|budget| budget.strip_suffix('%').unwrap_or(budget).parse::<u8>());
        match (text, budget, text.parse::<u32>()) {
            ("auto", ..) => Ok(Self::Auto),
            ("adaptive", ..) => Ok(Self::Adaptive(BUDGET_PERCENT)),
            (_, Some(Ok(percent @ 1..=100)), _) => Ok(Self::Adaptive(percent)),
            (_, None, Ok(pages)) if pages > 0 && pages < u32::MAX => Ok(Self::Pages(pages)),
            _ => Err(format!(
                "{text:?} is no scan rate: use auto, or pages a second (1 or more), or adaptive, or adaptive:5% for at most so much of a processor"
            )),
        }
    }
}

impl FromStr for HugePages {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match (text, text.strip_suffix('%').unwrap_or(text).parse()) {
            ("never", _) => Ok(Self::Never),
            (_, Ok(percent @ 1..=100)) => Ok(Self::Percent(percent)),
            _ => Err(format!("{text:?} is not when to split huge pages: use never, or a percentage from 1 to 100")),
        }
    }
}

/// Parses the setting `zero-pages` for the command line.
///
/// # Errors
/// The text is no value of this setting.
pub fn parse_zero_pages(text: &str) -> Result<ZeroPolicy, String> {
    match text {
        "share" => Ok(ZeroPolicy::Share),
        "ignore" => Ok(ZeroPolicy::Ignore),
        "when-idle" => Ok(ZeroPolicy::WhenIdle),
        _ => Err(format!("{text:?} is not what to do with pages of zeros: use share, ignore or when-idle")),
    }
}

/// Parses the setting `fold` for the command line.
///
/// # Errors
/// The text is no value of this setting.
pub fn parse_fold(text: &str) -> Result<Fold, String> {
    match text {
        "on" => Ok(Fold::On),
        "off" => Ok(Fold::Off),
        "unfold" => Ok(Fold::Unfold),
        _ => Err(format!("{text:?} is not whether to fold: use on, off or unfold")),
    }
}

/// Parses the setting `latency` for the command line.
///
/// # Errors
/// The text is no value of this setting.
pub fn parse_latency(text: &str) -> Result<Latency, String> {
    match text {
        "quiet" => Ok(Latency::Quiet),
        "eager" => Ok(Latency::Eager),
        _ => Err(format!("{text:?} is not how folding treats programs that want its processors: use quiet or eager")),
    }
}

impl Change {
    /// Whether the change leaves all settings as they are.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// The settings after this change.
    pub fn apply(&self, settings: Settings) -> Settings {
        let (scan_rate, scan_budget_percent) = match self.scan_rate {
            None => (settings.scan_rate, settings.scan_budget_percent),
            Some(ScanRate::Auto) => (None, None),
            Some(ScanRate::Adaptive(percent)) => (None, Some(percent)),
            Some(ScanRate::Pages(pages)) => (Some(pages), None),
        };
        Settings {
            scan_rate,
            scan_budget_percent,
            zero_pages: self.zero_pages.unwrap_or(settings.zero_pages),
            split_huge_at_percent: match self.huge_pages {
                None => settings.split_huge_at_percent,
                Some(HugePages::Never) => None,
                Some(HugePages::Percent(percent)) => Some(percent),
            },
            fold: self.fold.unwrap_or(settings.fold),
            intra_member_only: self.intra_member_only.unwrap_or(settings.intra_member_only),
            pool_slots: self.pool.map_or(settings.pool_slots, |pool| pool.0),
            index_pages: self.index_memory.map_or(settings.index_pages, |index| index.0),
            latency: self.latency.unwrap_or(settings.latency),
        }
    }

    /// The change that turns any settings into these.
    pub fn to(settings: &Settings) -> Self {
        Self {
            scan_rate: Some(match (settings.scan_rate, settings.scan_budget_percent) {
                (Some(pages), _) => ScanRate::Pages(pages),
                (None, Some(percent)) => ScanRate::Adaptive(percent),
                (None, None) => ScanRate::Auto,
            }),
            zero_pages: Some(settings.zero_pages),
            huge_pages: Some(settings.split_huge_at_percent.map_or(HugePages::Never, HugePages::Percent)),
            fold: Some(settings.fold),
            intra_member_only: Some(settings.intra_member_only),
            pool: Some(PoolSize(settings.pool_slots)),
            index_memory: Some(IndexSize(settings.index_pages)),
            latency: Some(settings.latency),
        }
    }

    /// The parts of this change that make a difference to these settings.
    pub fn beyond(&self, settings: &Settings) -> Self {
        fn part<T: PartialEq>(own: Option<T>, there: &Option<T>) -> Option<T> {
            if own == *there { None } else { own }
        }
        let there = Self::to(settings);
        Self {
            scan_rate: part(self.scan_rate, &there.scan_rate),
            zero_pages: part(self.zero_pages, &there.zero_pages),
            huge_pages: part(self.huge_pages, &there.huge_pages),
            fold: part(self.fold, &there.fold),
            intra_member_only: part(self.intra_member_only, &there.intra_member_only),
            pool: part(self.pool, &there.pool),
            index_memory: part(self.index_memory, &there.index_memory),
            latency: part(self.latency, &there.latency),
        }
    }

    /// This change followed by another one.
    pub fn then(&self, later: &Self) -> Self {
        Self {
            scan_rate: later.scan_rate.or(self.scan_rate),
            zero_pages: later.zero_pages.or(self.zero_pages),
            huge_pages: later.huge_pages.or(self.huge_pages),
            fold: later.fold.or(self.fold),
            intra_member_only: later.intra_member_only.or(self.intra_member_only),
            pool: later.pool.or(self.pool),
            index_memory: later.index_memory.or(self.index_memory),
            latency: later.latency.or(self.latency),
        }
    }
}

/// A value that a file may give as a number or as text.
#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a number or a text in quotes")]
enum Word {
    Number(i64),
    Text(String),
}

/// Deserializes a value that may be a number or text, with the parser of the command line ([`FromStr`]).
///
/// # Errors
/// The value is neither, or the parser refuses it.
pub fn from_word<'de, D: Deserializer<'de>, T: FromStr<Err = String>>(file: D) -> Result<Option<T>, D::Error> {
    let text = match Word::deserialize(file)? {
        Word::Number(n) => n.to_string(),
        Word::Text(text) => text,
    };
    text.parse().map(Some).map_err(de::Error::custom)
}

/// Checks the destination of a guest that is moved to another host, as QEMU names it. Only sockets are accepted: QEMU
/// would also take a command (`exec:`), and run it with QEMU's rights.
///
/// # Errors
/// The text is neither `tcp:HOST:PORT` nor `unix:/PATH`.
pub fn parse_destination(text: &str) -> Result<String, String> {
    let is_port = |text: &str| text.parse::<u16>().is_ok_and(|port| port > 0);
    let is_right = match text.split_once(':') {
        Some(("tcp", rest)) => rest.rsplit_once(':').is_some_and(|(host, port)| !host.is_empty() && is_port(port)),
        Some(("unix", path)) => path.starts_with('/'),
        _ => false,
    };
    if is_right { Ok(text.to_owned()) } else { Err("use tcp:HOST:PORT or unix:/PATH".to_owned()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scan_rate_and_huge_pages_are_parsed() {
        assert_eq!("auto".parse(), Ok(ScanRate::Auto));
        assert_eq!("1000".parse(), Ok(ScanRate::Pages(1000)));
        assert_eq!("adaptive".parse(), Ok(ScanRate::Adaptive(10)));
        assert_eq!("adaptive:5".parse(), Ok(ScanRate::Adaptive(5)));
        assert_eq!("adaptive:100%".parse(), Ok(ScanRate::Adaptive(100)));
        for text in ["", "0", "-1", "4294967295", "fast", "1k", "adaptive:", "adaptive:0%", "adaptive:101", "adaptive5"]
        {
            assert!(text.parse::<ScanRate>().is_err(), "{text}");
        }
        assert_eq!("never".parse(), Ok(HugePages::Never));
        assert_eq!("50%".parse(), Ok(HugePages::Percent(50)));
        assert_eq!("100".parse(), Ok(HugePages::Percent(100)));
        for text in ["", "0", "101", "%", "always", "50%%"] {
            assert!(text.parse::<HugePages>().is_err(), "{text}");
        }
    }

    #[test]
    fn settings_that_were_printed_can_be_wanted() {
        let settings = Settings {
            scan_rate: Some(7),
            fold: Fold::Off,
            pool_slots: 2048,
            latency: Latency::Eager,
            ..Settings::default()
        };
        let printed = serde_json::to_string(&Printed::from(&settings)).unwrap();
        let change = Change::from(serde_json::from_str::<Wanted>(&printed).unwrap());
        assert_eq!(change.apply(Settings::default()), settings);
        let adaptive = Settings { scan_rate: None, scan_budget_percent: Some(5), ..settings };
        let printed = serde_json::to_string(&Printed::from(&adaptive)).unwrap();
        assert!(printed.contains(r#""scan_rate":"adaptive:5%""#), "{printed}");
        let change = Change::from(serde_json::from_str::<Wanted>(&printed).unwrap());
        assert_eq!([change, Change::to(&adaptive)].map(|change| change.apply(settings)), [adaptive; 2]);
        assert_eq!(Change { scan_rate: Some(ScanRate::Auto), ..change }.apply(adaptive).scan_budget_percent, None);
        let wanted = |text: &str| serde_json::from_str::<Wanted>(text).map(Change::from).map_err(|e| e.to_string());
        assert!(wanted("{}").unwrap().is_empty());
        assert_eq!(wanted(r#"{"pool": "8M"}"#).unwrap().pool, Some(PoolSize(2048)));
        for wrong in [r#"{"pool": -1}"#, r#"{"fold": true}"#, r#"{"huge-pages": 1}"#, r#"{"scan_rate": null}"#] {
            assert!(wanted(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn settings_are_printed_as_they_are_written() {
        let settings = Settings { scan_rate: Some(7), pool_slots: 2048, ..Settings::default() };
        let printed = serde_json::to_value(Printed::from(&settings)).unwrap();
        let expected = serde_json::json!({
            "scan_rate": 7, "zero_pages": "share", "huge_pages": 50, "fold": "on", "intra_member_only": false,
            "pool": 8 << 20, "index_memory": 1 << 30, "latency": "quiet",
        });
        assert_eq!(printed, expected);
        let settings = Settings { split_huge_at_percent: None, ..Settings::default() };
        let printed = serde_json::to_value(Printed::from(&settings)).unwrap();
        assert_eq!((&printed["scan_rate"], &printed["huge_pages"]), (&"auto".into(), &"never".into()));
        assert_eq!(("8M".parse(), "64K".parse()), (Ok(PoolSize(2048)), Ok(PoolSize(16))));
        assert!("64".parse::<PoolSize>().is_err_and(|why| why.contains("64M")) && "8K".parse::<IndexSize>().is_err());
        assert_eq!("16M".parse(), Ok(IndexSize(1 << 20)));
        assert!("lots".parse::<PoolSize>().is_err());
    }

    #[test]
    fn change_back_to_settings_is_none_beyond_them() {
        let settings = Settings { scan_rate: Some(7), split_huge_at_percent: None, ..Settings::default() };
        let back = Change::to(&settings);
        assert_eq!(back.apply(Settings::default()), settings);
        assert!(back.beyond(&settings).is_empty());
        let off = Change { fold: Some(Fold::Off), ..back };
        assert_eq!(off.beyond(&settings), Change { fold: Some(Fold::Off), ..Change::default() });
    }

    #[test]
    fn only_named_settings_change() {
        let before = Settings { scan_rate: Some(7), pool_slots: 9, ..Settings::default() };
        assert_eq!(Change::default().apply(before), before);
        let change = Change {
            scan_rate: Some(ScanRate::Auto),
            zero_pages: Some(ZeroPolicy::Ignore),
            huge_pages: Some(HugePages::Never),
            fold: Some(Fold::Off),
            intra_member_only: Some(true),
            pool: Some(PoolSize(3)),
            index_memory: Some(IndexSize(4)),
            latency: Some(Latency::Eager),
        };
        let after = change.apply(before);
        assert_eq!((after.scan_rate, after.zero_pages), (None, ZeroPolicy::Ignore));
        assert_eq!((after.split_huge_at_percent, after.fold, after.intra_member_only), (None, Fold::Off, true));
        assert_eq!((after.pool_slots, after.index_pages, after.latency), (3, 4, Latency::Eager));
        let later = Change { fold: Some(Fold::On), ..Change::default() };
        assert_eq!(change.then(&later), Change { fold: Some(Fold::On), ..change });
    }

    #[test]
    fn only_sockets_are_destinations() {
        for right in ["tcp:10.0.0.2:4444", "tcp:[fe80::1]:4444", "tcp:host.example:1", "unix:/run/x"] {
            assert_eq!(parse_destination(right), Ok(right.to_owned()));
        }
        for wrong in ["exec:cat", "fd:3", "tcp:host", "tcp::4444", "tcp:host:0", "host:4444", "unix:x", "", "tcp:h:p"] {
            assert!(parse_destination(wrong).is_err(), "{wrong}");
        }
    }
}
