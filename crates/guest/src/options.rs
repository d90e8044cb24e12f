//! Command lines of VMMs: `-key value` pairs, `a=1,b=2` lists, sizes with units.

use serde_json::Value;

/// The options of one command line, in order: name without dashes, and value.
///
/// The value follows `=` within the argument, or else it is the next argument, unless that is an option itself. An
/// option without a value gets an empty one.
pub(crate) fn options(args: &[String]) -> impl Iterator<Item = (&str, &str)> {
    args.iter().enumerate().filter_map(|(n, arg)| {
        let name = arg.strip_prefix("--").or_else(|| arg.strip_prefix('-')).filter(|name| !name.is_empty())?;
        if let Some((name, value)) = name.split_once('=')
            && !name.contains([',', ' '])
        {
            return Some((name, value));
        }
        let value = args.get(n + 1).map(String::as_str).filter(|v| !v.starts_with('-'));
        Some((name, value.unwrap_or("")))
    })
}

/// The settings of one option: `first,b=2,c=3`, or a JSON object with strings, numbers and booleans.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Settings(Vec<(String, String)>);

impl Settings {
    /// Parses settings. A first item without `=` gets the key `implied`. `,,` stands for a comma in a value.
    pub fn parse(text: &str, implied: &str) -> Self {
        if text.starts_with('{') {
            return Self::parse_json(text);
        }
        let comma = "\u{0}";
        let text = text.replace(",,", comma);
        let setting = |(n, item): (usize, &str)| {
            let (key, value) = match item.split_once('=') {
                Some(pair) => pair,
                None if n == 0 => (implied, item),
                None => (item, "on"),
            };
            (key.to_owned(), value.replace(comma, ","))
        };
        Self(text.split(',').enumerate().map(setting).collect())
    }

    /// Settings that were read from somewhere else, as pairs of key and value.
    pub fn of(pairs: Vec<(String, String)>) -> Self {
        Self(pairs)
    }

    fn parse_json(text: &str) -> Self {
        let Ok(Value::Object(object)) = serde_json::from_str(text) else { return Self::default() };
        let setting = |(key, value): (String, Value)| match value {
            Value::String(text) => Some((key, text)),
            Value::Number(number) => Some((key, number.to_string())),
            Value::Bool(on) => Some((key, if on { "on" } else { "off" }.to_owned())),
            _ => None,
        };
        Self(object.into_iter().filter_map(setting).collect())
    }

    /// The last value of `key`, which overrides the others.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.0.iter().rev().find(|(k, _)| k == key).map(|(_, v)| v.as_str())
    }
}

/// Parses a size: digits with an optional fraction and unit (`B K M G T P E`, powers of 1024, either case), or
/// hexadecimal bytes. Without a unit, the number counts units of `default_unit` bytes. `None` if it is no size, or at
/// least 2^63.
pub(crate) fn parse_size(text: &str, default_unit: u64) -> Option<u64> {
    let fits = |bytes: &u64| *bytes < 1 << 63;
    if let Some(digits) = text.strip_prefix("0x") {
        return u64::from_str_radix(digits, 16).ok().filter(fits);
    }
    let (number, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len()));
    let unit = match unit.chars().next().map(|c| c.to_ascii_uppercase()) {
        None => default_unit,
        Some('B') => 1,
        Some(c) => 1 << (10 * (1 + "KMGTPE".find(c)?)),
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let mut bytes = whole.parse::<u64>().ok()?.checked_mul(unit)?;
    if !fraction.is_empty() {
        bytes = bytes.checked_add((format!("0.{fraction}").parse::<f64>().ok()? * unit as f64) as u64)?;
    }
    Some(bytes).filter(fits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_parsed_in_all_spellings() {
        const M: u64 = 1 << 20;
        for (text, bytes) in [
            ("512", 512 * M),
            ("1G", 1 << 30),
            ("1.5g", 3 << 29),
            ("1048576k", 1 << 30),
            ("4096B", 4096),
            ("0x10000", 65536),
            ("2T", 2 << 40),
            ("0", 0),
        ] {
            assert_eq!(parse_size(text, M), Some(bytes), "{text}");
        }
        for text in ["", "G", "-1", "1X", "99999999999G", "16E", "1.2.3", "0xg", "0x8000000000000000"] {
            assert_eq!(parse_size(text, M), None, "{text}");
        }
    }

    #[test]
    fn settings_are_parsed_from_lists_and_json() {
        let list = Settings::parse("acme-1,,x,debug-threads=on,size=1G,size=2G,flag", "guest");
        assert_eq!(list.get("guest"), Some("acme-1,x"));
        assert_eq!(list.get("size"), Some("2G"));
        assert_eq!(list.get("flag"), Some("on"));
        assert_eq!(list.get("none"), None);
        let json = Settings::parse(r#"{"qom-type":"memory-backend-ram","id":"r","size":1048576,"share":true}"#, "x");
        assert_eq!((json.get("size"), json.get("share"), json.get("id")), (Some("1048576"), Some("on"), Some("r")));
        assert_eq!(Settings::parse("{broken", "x"), Settings::default());
    }

    #[test]
    fn options_get_their_values() {
        let args: Vec<String> = ["vmm", "-m", "1G", "--id=x", "-S", "--api-socket", "path=/x", "-name", "guest=a", "-"]
            .map(Into::into)
            .into();
        assert_eq!(
            options(&args).collect::<Vec<_>>(),
            [("m", "1G"), ("id", "x"), ("S", ""), ("api-socket", "path=/x"), ("name", "guest=a")]
        );
    }
}
