//! Sizes as people type them.

/// Parses `4096`, `256M`, `1G`, `1.5GiB`: bytes, or with a binary unit K, M, G, T.
///
/// # Errors
/// What is wrong with the text, for the command line to show.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
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
    fn sizes_as_people_type_them() {
        let good =
            [("4096", 4096), ("1k", 1024), ("256M", 256 << 20), ("1.5G", 3 << 29), ("2GiB", 2 << 30), ("1T", 1 << 40)];
        for (text, bytes) in good {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
        }
        for text in ["", "M", "-1M", "1X", "1.2.3G", "0", "99999999999T", "1e9"] {
            assert!(parse_bytes(text).is_err(), "{text}");
        }
    }
}
