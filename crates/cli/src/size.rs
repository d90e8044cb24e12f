//! Sizes as people type them, and figures as people read them: sizes with about three figures, counts, and shares in
//! percent.

const KIB: f64 = 1024.0;
const MIB: f64 = 1024.0 * KIB;
const GIB: f64 = 1024.0 * MIB;

/// A size with its unit: `0`, `12 KiB`, `3.4 MiB`, `345 MiB`, `1.25 GiB`, `34.5 GiB`.
pub fn bytes(n: u64) -> String {
    let n = n as f64;
    if n == 0.0 {
        "0".into()
    } else if n < MIB {
        format!("{} KiB", (n / KIB).ceil())
    } else if n < GIB {
        format!("{} MiB", digits(n / MIB, 1))
    } else {
        format!("{} GiB", digits(n / GIB, 2))
    }
}

/// A size in MiB without the unit, for columns that name it: `0`, `<0.1`, `3.4`, `345.6`, `12,346`.
pub fn mib(n: u64) -> String {
    let n = n as f64 / MIB;
    if n == 0.0 {
        "0".into()
    } else if n < 0.05 {
        "<0.1".into()
    } else if n < 999.95 {
        format!("{n:.1}")
    } else {
        count(n.round() as u64)
    }
}

/// A signed size in MiB without the unit, like [`mib`].
pub fn signed_mib(n: i64) -> String {
    let sign = if n < 0 { "-" } else { "" };
    format!("{sign}{}", mib(n.unsigned_abs()))
}

/// A signed size with its unit, like [`bytes`].
pub fn signed_bytes(n: i64) -> String {
    let sign = if n < 0 { "-" } else { "" };
    format!("{sign}{}", bytes(n.unsigned_abs()))
}

/// A plain number with its thousands set apart: `1,234,567`.
pub fn count(n: u64) -> String {
    let plain = n.to_string();
    let mut out = String::with_capacity(plain.len() * 4 / 3);
    for (i, digit) in plain.chars().enumerate() {
        if i > 0 && (plain.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// A number of things: `1 group`, `1,234 groups`, `2 classes`.
pub fn plural(n: u64, what: &str) -> String {
    let ending = match n {
        1 => "",
        _ if what.ends_with('s') => "es",
        _ => "s",
    };
    format!("{} {what}{ending}", count(n))
}

/// `part` of `whole` in percent: `0%`, `<1%`, `37%`, `>99%`; of nothing, `0%`.
pub fn percent(part: u64, whole: u64) -> String {
    if part == 0 || whole == 0 {
        return "0%".into();
    }
    let share = part as f64 / whole as f64 * 100.0;
    match share {
        s if s < 1.0 => "<1%".into(),
        s if s > 99.0 && part < whole => ">99%".into(),
        s => format!("{s:.0}%"),
    }
}

/// A number with about three figures: `decimals` below ten, one decimal less from ten on, none from a hundred on.
fn digits(n: f64, decimals: usize) -> String {
    let drop = if n >= 99.95 { 2 } else { usize::from(n >= 9.995 && decimals > 1) };
    format!("{n:.*}", decimals.saturating_sub(drop))
}

/// Parses `4096`, `256M`, `1G`, `1.5GiB`: bytes, or a number with a binary unit K, M, G, T.
///
/// # Errors
/// The fault of the text, in words that the command line shows.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    if text.starts_with('-') {
        return Err(format!("\"{text}\": a size must not be negative"));
    }
    let unit_at = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(unit_at);
    let shift = match unit.trim_end_matches("iB").trim_end_matches('B') {
        "" => 0,
        "K" | "k" => 10,
        "M" | "m" => 20,
        "G" | "g" => 30,
        "T" | "t" => 40,
        _ => return Err(format!("unknown unit \"{unit}\": use K, M, G or T")),
    };
    let number: f64 = number.parse().map_err(|_| format!("\"{text}\" is not a size: write 256M or 1G"))?;
    let bytes = number * f64::from(1_u32 << (shift % 30)) * if shift >= 30 { f64::from(1_u32 << 30) } else { 1.0 };
    // 2^63 keeps the conversion exact enough and far from the end of u64.
    if bytes < 1.0 || bytes > (1_u64 << 63) as f64 {
        return Err(format!("\"{text}\" is out of range"));
    }
    Ok(bytes as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_keep_about_three_figures() {
        let cases = [
            (0, "0"),
            (1, "1 KiB"),
            (12 << 10, "12 KiB"),
            ((1 << 20) - 1, "1024 KiB"),
            (1 << 20, "1.0 MiB"),
            (35 << 20, "35.0 MiB"),
            (345 << 20, "345 MiB"),
            (1023 << 20, "1023 MiB"),
            (1280 << 20, "1.25 GiB"),
            (12_800 << 20, "12.5 GiB"),
            (999 << 30, "999 GiB"),
        ];
        for (n, text) in cases {
            assert_eq!(bytes(n), text);
        }
    }

    #[test]
    fn small_sizes_are_not_shown_as_zero_mib() {
        let cases =
            [(0, "0"), (4096, "<0.1"), (1 << 20, "1.0"), (104_857_599, "100.0"), (1_234_567 << 20, "1,234,567")];
        for (n, text) in cases {
            assert_eq!(mib(n), text);
        }
        assert_eq!((signed_mib(-(5 << 20)), signed_mib(1)), ("-5.0".into(), "<0.1".into()));
        assert_eq!((signed_bytes(-4096), signed_bytes(0)), ("-4 KiB".into(), "0".into()));
    }

    #[test]
    fn small_shares_are_not_shown_as_zero_nor_large_ones_as_all() {
        let cases = [(0, 10, "0%"), (1, 1000, "<1%"), (1, 2, "50%"), (999, 1000, ">99%"), (5, 5, "100%")];
        for (part, whole, text) in cases {
            assert_eq!(percent(part, whole), text);
        }
        assert_eq!(percent(3, 0), "0%");
    }

    #[test]
    fn typed_sizes_are_parsed() {
        let good =
            [("4096", 4096), ("1k", 1024), ("256M", 256 << 20), ("1.5G", 3 << 29), ("2GiB", 2 << 30), ("1T", 1 << 40)];
        for (text, bytes) in good {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
        for text in ["", "M", "-1M", "1X", "1.2.3G", "0", "99999999999T", "1e9"] {
            assert!(parse_bytes(text).is_err(), "{text}");
        }
        assert_eq!(parse_bytes("-1").unwrap_err(), "\"-1\": a size must not be negative");
    }
}
