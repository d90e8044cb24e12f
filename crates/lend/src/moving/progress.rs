//! The progress of a migration, as QEMU tells it.

use cli::size::bytes;
use serde_json::Value;
use std::time::Duration;

/// The state of a migration at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Progress {
    /// Time since its begin, in seconds.
    pub seconds: f64,
    /// Bytes that were sent.
    pub sent_bytes: u64,
    /// Bytes of RAM that are to be sent, by QEMU's last count.
    pub left_bytes: u64,
    /// Number of QEMU's passes over the memory. Each begins with a count of the pages that the guest has written.
    pub passes: u64,
    /// Bytes a second of RAM that the guest wrote between the last two counts. A page counts once.
    pub written_bytes_per_s: u64,
}

impl Progress {
    /// The state by QEMU's answer to `query-migrate`.
    pub(super) fn of(found: &Value) -> Self {
        let ram = |name: &str| found["ram"][name].as_u64().unwrap_or(0);
        let ms = found["total-time"].as_u64().unwrap_or(0);
        Self {
            seconds: Duration::from_millis(ms).as_secs_f64(),
            sent_bytes: ram("transferred"),
            left_bytes: ram("remaining"),
            passes: ram("dirty-sync-count"),
            written_bytes_per_s: ram("dirty-pages-rate").saturating_mul(ram("page-size")),
        }
    }

    /// Mean of the bytes that are sent in a second.
    pub fn sent_bytes_per_s(&self) -> u64 {
        if self.seconds > 0.0 { (self.sent_bytes as f64 / self.seconds) as u64 } else { 0 }
    }

    /// The state in a sentence.
    pub fn in_words(&self) -> String {
        let [sent, left, pace, written] =
            [self.sent_bytes, self.left_bytes, self.sent_bytes_per_s(), self.written_bytes_per_s].map(bytes);
        format!("pass {}, {sent} sent ({pace} a second), {left} left, the guest writes {written} a second", self.passes)
    }

    /// Why a guest stays whose migration took longer than allowed, and what can be done.
    pub(super) fn too_late(&self, taken: Duration) -> String {
        format!(
            "it had not arrived after {} s ({}). Move it when it writes less, with more --bandwidth on a faster link, or with a longer \
             --within. Postcopy would need no bound, and is refused: docs/fleet.md",
            taken.as_secs(),
            self.in_words()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn progress_is_what_qemu_tells_and_an_answer_without_ram_is_none() {
        let ram = json!({"transferred": 20 << 20, "remaining": 3 << 20, "dirty-sync-count": 4, "dirty-pages-rate": 512, "page-size": 4096});
        let found = Progress::of(&json!({"status": "active", "total-time": 2500, "ram": ram}));
        assert_eq!(
            found.in_words(),
            "pass 4, 20.0 MiB sent (8.0 MiB a second), 3.0 MiB left, the guest writes 2.0 MiB a second"
        );
        let late = found.too_late(Duration::from_secs(600));
        assert!(late.starts_with("it had not arrived after 600 s (pass 4") && late.contains("--within"), "{late}");
        assert_eq!(Progress::of(&json!({"status": "setup"})), Progress::default());
    }
}
