//! Figures as people read them: sizes in MiB and GiB with three figures or so, shares in percent.

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

/// Three figures or so: `decimals` below ten, one less from ten, none from a hundred.
fn digits(n: f64, decimals: usize) -> String {
    let drop = if n >= 99.95 { 2 } else { usize::from(n >= 9.995 && decimals > 1) };
    format!("{n:.*}", decimals.saturating_sub(drop))
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
    fn mebibytes_never_show_something_as_nothing() {
        let cases =
            [(0, "0"), (4096, "<0.1"), (1 << 20, "1.0"), (104_857_599, "100.0"), (1_234_567 << 20, "1,234,567")];
        for (n, text) in cases {
            assert_eq!(mib(n), text);
        }
    }

    #[test]
    fn shares_never_show_something_as_nothing_or_a_part_as_all() {
        let cases = [(0, 10, "0%"), (1, 1000, "<1%"), (1, 2, "50%"), (999, 1000, ">99%"), (5, 5, "100%")];
        for (part, whole, text) in cases {
            assert_eq!(percent(part, whole), text);
        }
        assert_eq!(percent(3, 0), "0%");
    }
}
