//! ksmd's knobs at the end of a turn, before they are put back: figures depend on them.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Settings of ksmd. A setting that the kernel does not have is `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KsmSettings {
    /// `run`
    pub run: u64,
    /// `pages_to_scan`
    pub pages_to_scan: Option<u64>,
    /// `sleep_millisecs`
    pub sleep_millisecs: Option<u64>,
    /// `smart_scan`
    pub smart_scan: Option<u64>,
    /// `advisor_mode`
    pub advisor_mode: Option<String>,
    /// `use_zero_pages`
    pub use_zero_pages: Option<u64>,
}

impl KsmSettings {
    /// Reads the knobs; `None` on a kernel without KSM.
    pub fn read() -> Option<Self> {
        let host::Ksm { run, pages_to_scan, sleep_millisecs, smart_scan, advisor_mode, use_zero_pages, .. } =
            host::Ksm::read()?;
        Some(Self { run, pages_to_scan, sleep_millisecs, smart_scan, advisor_mode, use_zero_pages })
    }
}

impl fmt::Display for KsmSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { run, pages_to_scan, sleep_millisecs, smart_scan, advisor_mode, use_zero_pages } = self;
        write!(f, "run {run}")?;
        let number = |value: &Option<u64>| value.map(|value| value.to_string());
        for (name, value) in [
            ("pages_to_scan", number(pages_to_scan)),
            ("sleep_millisecs", number(sleep_millisecs)),
            ("smart_scan", number(smart_scan)),
            ("advisor_mode", advisor_mode.clone()),
            ("use_zero_pages", number(use_zero_pages)),
        ] {
            value.map_or(Ok(()), |value| write!(f, ", {name} {value}"))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_that_kernel_lacks_are_left_out_of_words() {
        let (some, none) = (Some(0), Some("none".to_owned()));
        let settings = KsmSettings { run: 1, smart_scan: some, advisor_mode: none, ..KsmSettings::default() };
        assert_eq!(settings.to_string(), "run 1, smart_scan 0, advisor_mode none");
    }
}
