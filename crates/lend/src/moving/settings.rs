//! QEMU's settings for a migration, put back where the guest stays.

use super::Wanted;
use anyhow::bail;
use guest::Qmp;
use serde_json::{Value, json};

/// Capabilities with which memory goes another way, or a guest that stays stands still.
const OFF: [&str; 6] =
    ["postcopy-ram", "multifd", "x-ignore-shared", "background-snapshot", "pause-before-switchover", "x-colo"];
/// The capability by which the source waits for the destination's word.
const RETURN_PATH: &str = "return-path";

/// Settings before the migration.
#[derive(Debug)]
pub(super) struct Settings {
    capabilities: Vec<Value>,
    bandwidth: Option<u64>,
}

impl Settings {
    /// Makes the settings for a migration, and returns the former ones.
    pub(super) fn set(qmp: &mut Qmp, wanted: &Wanted) -> anyhow::Result<Self> {
        let found = qmp.execute("query-migrate-capabilities", json!({}))?;
        let state = |name: &str| {
            let one = found.as_array().into_iter().flatten().find(|one| one["capability"] == name)?;
            one["state"].as_bool()
        };
        let mut to_be = vec![(RETURN_PATH, true)];
        to_be.extend(OFF.map(|name| (name, false)));
        if let Some((name, _)) = to_be.iter().find(|(name, on)| *on && state(name).is_none()) {
            bail!("its QEMU knows no {name}");
        }
        let one = |name: &str, on: bool| json!({"capability": name, "state": on});
        let known = || to_be.iter().filter_map(|(name, on)| Some((*name, *on, state(name)?)));
        let before = Self {
            capabilities: known().map(|(name, _, was)| one(name, was)).collect(),
            bandwidth: match wanted.bandwidth {
                Some(_) => qmp.execute("query-migrate-parameters", json!({}))?["max-bandwidth"].as_u64(),
                None => None,
            },
        };
        let set: Vec<Value> = known().map(|(name, on, _)| one(name, on)).collect();
        qmp.execute("migrate-set-capabilities", json!({"capabilities": set}))?;
        if let Some(bytes) = wanted.bandwidth {
            qmp.execute("migrate-set-parameters", json!({"max-bandwidth": bytes}))?;
        }
        Ok(before)
    }

    /// Puts the former settings back. If QEMU refuses, it keeps the present ones.
    pub(super) fn put_back(self, qmp: &mut Qmp) {
        let _ = qmp.execute("migrate-set-capabilities", json!({"capabilities": self.capabilities}));
        if let Some(bytes) = self.bandwidth {
            let _ = qmp.execute("migrate-set-parameters", json!({"max-bandwidth": bytes}));
        }
    }
}

/// Whether a capability is on.
pub(super) fn has(qmp: &mut Qmp, name: &str) -> anyhow::Result<bool> {
    let found = qmp.execute("query-migrate-capabilities", json!({}))?;
    Ok(found.as_array().into_iter().flatten().any(|one| one["capability"] == name && one["state"] == true))
}
