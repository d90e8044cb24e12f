//! A guest's name and RAM from Cloud Hypervisor's command line. Of a guest configured through the API, `/proc` shows
//! only the mappings; see [`crate::region::ram_by_mappings`].

use crate::options::{Settings, options, parse_size};
use host::Process;

/// Guest RAM below the hole that x86-64 leaves for devices under 4 GiB, in bytes: 3 GiB.
pub(crate) const RAM_BELOW_HOLE_BYTES: u64 = 3 << 30;

/// Whether a process is Cloud Hypervisor.
pub(crate) fn is_cloud_hypervisor(process: &Process) -> bool {
    matches!(process.program(), "cloud-hypervisor" | "cloud-hypervisor-static")
}

/// The guest's name: the file name of its API socket without the extension. The command line has no other name for it.
pub(crate) fn name(args: &[String]) -> Option<String> {
    let (_, socket) = options(args).find(|(option, _)| *option == "api-socket")?;
    let settings = Settings::parse(socket, "path");
    let file = settings.get("path")?.rsplit('/').next()?;
    let name = file.strip_suffix(".sock").or_else(|| file.strip_suffix(".socket")).unwrap_or(file);
    (!name.is_empty()).then(|| name.to_owned())
}

/// Blocks of RAM by `--memory size=...` and `--memory-zone size=...`, one for each zone. Empty if the command line
/// gives no size.
pub(crate) fn blocks_bytes(args: &[String]) -> Vec<u64> {
    let mut blocks = Vec::new();
    let mut option = "";
    for arg in args {
        let value = match arg.strip_prefix("--") {
            Some(name) => {
                let (name, value) = name.split_once('=').unwrap_or((name, ""));
                option = name;
                value
            }
            // `--memory-zone` takes several values.
            None => arg.as_str(),
        };
        if matches!(option, "memory" | "memory-zone") {
            blocks.extend(Settings::parse(value, "").get("size").and_then(|s| parse_size(s, 1)).filter(|b| *b > 0));
        }
    }
    blocks
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(line: &str) -> Vec<String> {
        line.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn name_is_that_of_api_socket() {
        assert_eq!(name(&args("cloud-hypervisor --api-socket /run/web.sock")).as_deref(), Some("web"));
        assert_eq!(name(&args("cloud-hypervisor --api-socket path=/run/vm/db")).as_deref(), Some("db"));
        assert_eq!(name(&args("cloud-hypervisor --api-socket=/run/x.socket")).as_deref(), Some("x"));
        assert_eq!(name(&args("cloud-hypervisor --api-socket fd=3 --kernel k")), None);
        assert_eq!(name(&args("cloud-hypervisor --kernel k")), None);
    }

    #[test]
    fn ram_is_size_of_memory_and_zones() {
        assert_eq!(blocks_bytes(&args("cloud-hypervisor --memory size=1G,shared=on --kernel k")), [1 << 30]);
        assert_eq!(blocks_bytes(&args("cloud-hypervisor --memory=size=512M")), [512 << 20]);
        let zones =
            "cloud-hypervisor --memory size=0 --memory-zone id=a,size=1G id=b,size=2G,file=/dev/shm --cpus boot=2";
        assert_eq!(blocks_bytes(&args(zones)), [1 << 30, 2 << 30]);
        assert!(blocks_bytes(&args("cloud-hypervisor --api-socket /x")).is_empty());
    }
}
