//! A guest's name and RAM from Firecracker's command line and configuration file. Of a microVM configured through the
//! API, `/proc` shows only the mappings; see [`crate::region::ram_by_mappings`].

use crate::options::options;
use host::Process;
use serde_json::Value;
use std::path::Path;

/// Guest RAM below the hole that x86-64 leaves for devices under 4 GiB, in bytes: 3.25 GiB.
pub(crate) const RAM_BELOW_HOLE_BYTES: u64 = 3328 << 20;

/// Longest configuration file that is read, in bytes: the file belongs to the guest's owner, who may be hostile.
pub(crate) const MAX_CONFIG_BYTES: u64 = 1 << 20;

/// Whether a process is Firecracker, inside a jail or not. Releases are named `firecracker-v1.7.0-x86_64`.
pub(crate) fn is_firecracker(process: &Process) -> bool {
    let program = process.program();
    program == "firecracker" || program.starts_with("firecracker-v")
}

/// The value of `--id`, which the jailer passes on.
pub(crate) fn name(args: &[String]) -> Option<String> {
    options(args).find(|(option, value)| *option == "id" && !value.is_empty()).map(|(_, id)| id.to_owned())
}

/// The path after `--config-file`, as the process names it: its root directory may be a jail.
pub(crate) fn config_file(args: &[String]) -> Option<&Path> {
    let (_, file) = options(args).find(|(option, value)| *option == "config-file" && !value.is_empty())?;
    Some(Path::new(file))
}

/// RAM that a configuration file gives the guest.
pub(crate) fn ram_bytes_of_config(content: &[u8]) -> Option<u64> {
    let config: Value = serde_json::from_slice(content).ok()?;
    config.get("machine-config")?.get("mem_size_mib")?.as_u64()?.checked_mul(1 << 20)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(line: &str) -> Vec<String> {
        line.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn firecracker_is_recognised_jailed_or_not() {
        let is = |exe: &str| is_firecracker(&Process { exe: Some(exe.into()), ..Process::default() });
        assert!(is("/usr/local/bin/firecracker"));
        assert!(is("/opt/release-v1.7.0/firecracker-v1.7.0-x86_64"));
        assert!(is("/srv/jailer/firecracker/551e7604/root/firecracker"));
        assert!(!is("/usr/local/bin/jailer"));
        assert!(!is("/usr/local/bin/firecracker-containerd"));
    }

    #[test]
    fn name_and_configuration_file_are_found() {
        let jailed = args("firecracker --id=551e7604 --start-time-us 1 --config-file vm.json");
        assert_eq!(name(&jailed).as_deref(), Some("551e7604"));
        assert_eq!(config_file(&jailed), Some(Path::new("vm.json")));
        let plain = args("firecracker --api-sock /tmp/fc.sock --config-file /etc/vm.json --id web");
        assert_eq!(name(&plain).as_deref(), Some("web"));
        assert_eq!(config_file(&plain), Some(Path::new("/etc/vm.json")));
        assert_eq!(name(&args("firecracker --api-sock /x")), None);
    }

    #[test]
    fn ram_is_read_from_configuration() {
        let text = r#"{"boot-source":{}, "machine-config": {"vcpu_count": 2, "mem_size_mib": 1024, "smt": false}}"#;
        assert_eq!(ram_bytes_of_config(text.as_bytes()), Some(1 << 30));
        for bad in [
            "",
            "{}",
            r#"{"machine-config": {"mem_size_mib": "1"}}"#,
            r#"{"machine-config": {"mem_size_mib": 18446744073709551615}}"#,
        ] {
            assert_eq!(ram_bytes_of_config(bad.as_bytes()), None, "{bad}");
        }
    }
}
