//! A record of one run of a bench: its raw output, and where it comes from.

use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use serde_json::Value;

/// A file in `docs/figures`.
#[derive(Deserialize)]
pub struct Record {
    /// Day of the run.
    date: String,
    /// Command that repeats the run.
    command: String,
    /// Machine of the run: processor, memory, kernel.
    machine: String,
    /// The JSON that the bench printed, curves thinned.
    output: Value,
}

impl Record {
    /// Whether it is a record of `pagefold bench ksm --churn`, whose output alone has `minutes`.
    pub fn has_minutes(&self) -> bool {
        self.output.get("minutes").is_some()
    }

    /// Whether the guests of the run are containers.
    pub fn has_containers(&self) -> bool {
        self.output.get("containers").is_some()
    }

    /// Whether the guests of the run worked without pauses.
    pub fn is_flat_out(&self) -> bool {
        self.output.get("pause_s").and_then(Value::as_u64) == Some(0)
    }

    /// The line above the table.
    pub fn caption(&self) -> String {
        let rounds = self.rounds().map_or(0, Vec::len);
        let plural = if rounds == 1 { "" } else { "s" };
        format!("{}, {rounds} round{plural}, {}: `{}`", self.date, self.machine, self.command)
    }

    fn rounds(&self) -> Option<&Vec<Value>> {
        self.output.get("rounds")?.as_array()
    }

    /// One number of each round, by its JSON pointer within the round; `None` for a round that did not reach the state
    /// that the number is about.
    pub fn numbers(&self, pointer: &str) -> Result<Vec<Option<f64>>> {
        let rounds = self.rounds().filter(|rounds| !rounds.is_empty()).context("there are no rounds")?;
        let numbers: Vec<Option<f64>> =
            rounds.iter().map(|round| round.pointer(pointer).and_then(Value::as_f64)).collect();
        let is_null = |round: &Value| round.pointer(pointer).is_some_and(Value::is_null);
        ensure!(numbers.iter().any(Option::is_some) || rounds.iter().any(is_null), "no round has {pointer}");
        Ok(numbers)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_found_in_every_round() {
        let json = r#"{"date": "d", "command": "c", "machine": "m",
            "output": {"rounds": [{"a": {"b": 1}, "n": null}, {"a": {"b": 2.5}}]}}"#;
        let record: Record = serde_json::from_str(json).unwrap();
        assert_eq!(record.numbers("/a/b").unwrap(), [Some(1.0), Some(2.5)]);
        assert_eq!(record.numbers("/n").unwrap(), [None, None]);
        assert!(record.numbers("/a/c").is_err());
        assert_eq!(record.caption(), "d, 2 rounds, m: `c`");
        assert!(!record.has_minutes() && !record.is_flat_out());
    }
}
