//! QEMU's settings for a migration, put back where the guest stays.

use super::Wanted;
use anyhow::bail;
use guest::Qmp;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// Migration capabilities that are switched off: with these, memory would be sent in another way, or a guest that stays
/// would stand still.
const OFF: [&str; 6] =
    ["postcopy-ram", "multifd", "x-ignore-shared", "background-snapshot", "pause-before-switchover", "x-colo"];
/// The capability by which the source waits until the destination confirms that it has read all.
const RETURN_PATH: &str = "return-path";

/// Those of QEMU's settings that a migration changes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Settings {
    /// Capabilities that this QEMU knows, as `migrate-set-capabilities` takes them.
    capabilities: Vec<Value>,
    /// Highest bandwidth of the stream, in bytes a second; 0: no limit.
    bandwidth: Option<u64>,
}

impl Settings {
    /// The present settings.
    pub(super) fn read(qmp: &mut Qmp) -> anyhow::Result<Self> {
        let found = qmp.execute("query-migrate-capabilities", json!({}))?;
        let all = found.as_array().cloned().unwrap_or_default();
        let is_meant =
            |one: &Value| one["capability"].as_str().is_some_and(|name| name == RETURN_PATH || OFF.contains(&name));
        let capabilities: Vec<Value> = all.into_iter().filter(is_meant).collect();
        if !capabilities.iter().any(|one| one["capability"] == RETURN_PATH) {
            bail!("its QEMU knows no {RETURN_PATH}");
        }
        let bandwidth = qmp.execute("query-migrate-parameters", json!({}))?["max-bandwidth"].as_u64();
        Ok(Self { capabilities, bandwidth })
    }

    /// Sets QEMU's settings as the migration needs them.
    pub(super) fn change(&self, qmp: &mut Qmp, wanted: &Wanted) -> anyhow::Result<()> {
        let name = |one: &Value| one["capability"].clone();
        let set: Vec<Value> = self
            .capabilities
            .iter()
            .map(|one| json!({"capability": name(one), "state": name(one) == RETURN_PATH}))
            .collect();
        qmp.execute("migrate-set-capabilities", json!({"capabilities": set}))?;
        if let Some(bytes) = wanted.bandwidth {
            qmp.execute("migrate-set-parameters", json!({"max-bandwidth": bytes}))?;
        }
        Ok(())
    }

    /// Puts the former settings back. If QEMU refuses, it keeps the present ones.
    pub(super) fn put_back(&self, qmp: &mut Qmp) {
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
