//! What QEMU's command line says about a guest: its name, its RAM, and the blocks of memory that RAM is
//! made of. Both spellings are read: by hand (`-m 1G`) and libvirt's (`-object {"qom-type":...}`).

use crate::QemuFacts;
use crate::options::{Settings, options, parse_size};
use host::Process;

/// RAM that QEMU gives a guest if nothing is said.
const DEFAULT_RAM_BYTES: u64 = 128 << 20;

/// One QEMU guest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Config {
    /// `-name`
    pub name: Option<String>,
    /// All RAM that it has from the start.
    pub ram_bytes: u64,
    /// Blocks that the RAM consists of; each is one mapping when QEMU starts.
    pub blocks_bytes: Vec<u64>,
    /// What else is of interest.
    pub facts: QemuFacts,
}

/// Whether a process is a QEMU that runs a whole machine.
pub(crate) fn is_qemu(process: &Process) -> bool {
    // Some distributions wrap it: `.qemu-system-x86_64-wrapped`.
    let program = process.program().trim_start_matches('.');
    program.starts_with("qemu-system-") || matches!(program, "qemu-kvm" | "kvm")
}

/// What one memory backend (`-object memory-backend-...`) provides.
struct Backend {
    id: String,
    bytes: u64,
}

impl Config {
    /// Reads a command line, the program's name first.
    pub fn parse(args: &[String]) -> Self {
        let mut config = Self::default();
        let mut asked_bytes = None;
        let mut backends: Vec<Backend> = Vec::new();
        // Ids of backends that the machine's own RAM lies in, and that are plugged in beside it.
        let (mut main, mut plugged) = (Vec::new(), Vec::new());
        // Monitors that speak QMP, and sockets by name.
        let (mut monitors, mut sockets) = (Vec::new(), Vec::new());
        for (option, value) in options(args) {
            match option {
                "name" => config.name = Settings::parse(value, "guest").get("guest").map(str::to_owned),
                "m" => {
                    let size = Settings::parse(value, "size").get("size").and_then(|s| parse_size(s, 1 << 20));
                    asked_bytes = size.or(asked_bytes);
                }
                "object" => backends.extend(Backend::parse(&Settings::parse(value, "qom-type"))),
                "machine" | "M" => {
                    let machine = Settings::parse(value, "type");
                    main.extend(machine.get("memory-backend").map(str::to_owned));
                    config.facts.machine = machine.get("type").map(str::to_owned).or(config.facts.machine);
                    let below = machine.get("max-ram-below-4g").and_then(|size| parse_size(size, 1));
                    config.facts.max_below_4g_bytes = below.or(config.facts.max_below_4g_bytes);
                }
                "qmp" | "qmp-pretty" => {
                    let path = value.strip_prefix("unix:").and_then(|rest| rest.split(',').next());
                    config.facts.qmp_socket = path.map(str::to_owned).or(config.facts.qmp_socket);
                }
                "mon" => {
                    let monitor = Settings::parse(value, "chardev");
                    monitors.extend(
                        monitor.get("chardev").filter(|_| monitor.get("mode") == Some("control")).map(str::to_owned),
                    );
                }
                "chardev" => {
                    let socket = Settings::parse(value, "backend");
                    sockets.extend(
                        socket.get("id").zip(socket.get("path")).map(|(id, path)| (id.to_owned(), path.to_owned())),
                    );
                }
                "numa" => main.extend(Settings::parse(value, "type").get("memdev").map(str::to_owned)),
                "device" => {
                    let device = Settings::parse(value, "driver");
                    let is_ram = device.get("driver").is_some_and(|d| d == "pc-dimm" || d.starts_with("virtio-mem"));
                    plugged.extend(device.get("memdev").filter(|_| is_ram).map(str::to_owned));
                    if let Some(driver) = device.get("driver") {
                        config.facts.add_device(driver, device.get("free-page-reporting"));
                    }
                }
                _ => {}
            }
        }
        let sizes_of = |ids: &[String]| -> Vec<u64> {
            ids.iter().filter_map(|id| backends.iter().find(|b| b.id == *id)).map(|b| b.bytes).collect()
        };
        config.blocks_bytes = sizes_of(&main);
        if config.blocks_bytes.is_empty() {
            config.blocks_bytes.push(asked_bytes.filter(|b| *b > 0).unwrap_or(DEFAULT_RAM_BYTES));
        }
        let plugged = sizes_of(&plugged);
        config.facts.plugged_blocks = plugged.len();
        config.blocks_bytes.extend(plugged);
        if config.facts.qmp_socket.is_none() {
            let of_monitor = |(id, _): &&(String, String)| monitors.contains(id);
            config.facts.qmp_socket = sockets.iter().find(of_monitor).map(|(_, path)| path.clone());
        }
        config.ram_bytes = config.blocks_bytes.iter().fold(0, |sum: u64, b| sum.saturating_add(*b));
        config
    }
}

impl QemuFacts {
    fn add_device(&mut self, driver: &str, free_page_reporting: Option<&str>) {
        self.devices.push(driver.to_owned());
        if driver.starts_with("virtio-balloon") {
            self.balloon = true;
            self.free_page_reporting |= free_page_reporting.is_some_and(|on| matches!(on, "on" | "true" | "yes"));
        }
    }
}

impl Backend {
    fn parse(object: &Settings) -> Option<Self> {
        object.get("qom-type").filter(|kind| kind.starts_with("memory-backend-"))?;
        Some(Self { id: object.get("id")?.to_owned(), bytes: parse_size(object.get("size")?, 1)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Config {
        Config::parse(&line.split(' ').map(str::to_owned).collect::<Vec<_>>())
    }

    const M: u64 = 1 << 20;

    #[test]
    fn every_way_to_give_ram() {
        for (line, bytes) in [
            ("qemu-system-x86_64 -nodefaults", 128 * M),
            ("qemu-system-x86_64 -m 512", 512 * M),
            ("qemu-system-x86_64 -m 1G -S", 1024 * M),
            ("qemu-system-x86_64 --m 1.5G", 1536 * M),
            ("qemu-system-x86_64 -m size=512M,slots=4,maxmem=8G", 512 * M),
            ("qemu-system-x86_64 -m size=1048576k", 1024 * M),
            ("qemu-system-x86_64 -m slots=4,maxmem=8G", 128 * M),
            ("qemu-system-x86_64 -m 256 -m maxmem=1G,slots=2", 256 * M),
            ("qemu-system-x86_64 -m nonsense", 128 * M),
        ] {
            let config = parse(line);
            assert_eq!((config.ram_bytes, config.blocks_bytes), (bytes, vec![bytes]), "{line}");
        }
    }

    #[test]
    fn names() {
        for (line, name) in [
            ("kvm -name acme-1", Some("acme-1")),
            ("kvm -name guest=acme-1,debug-threads=on", Some("acme-1")),
            ("kvm -name acme-1,process=qemu", Some("acme-1")),
            ("kvm -name debug-threads=on", None),
            ("kvm", None),
        ] {
            assert_eq!(parse(line).name.as_deref(), name, "{line}");
        }
    }

    #[test]
    fn ram_in_one_named_backend() {
        let config = parse(
            "qemu-system-x86_64 -m 256 -object memory-backend-memfd,id=mem,size=256M,share=on -machine q35,memory-backend=mem",
        );
        assert_eq!((config.ram_bytes, config.blocks_bytes), (256 * M, vec![256 * M]));
    }

    #[test]
    fn libvirt_writes_json_and_one_backend_a_numa_node() {
        let args = [
            "/usr/bin/qemu-system-x86_64",
            "-name",
            "guest=db,debug-threads=on",
            "-m",
            "size=4194304k,slots=16,maxmem=8388608k",
            "-object",
            r#"{"qom-type":"memory-backend-ram","id":"ram-node0","size":1073741824}"#,
            "-numa",
            "node,nodeid=0,cpus=0-1,memdev=ram-node0",
            "-object",
            r#"{"qom-type":"memory-backend-ram","id":"ram-node1","size":3221225472}"#,
            "-numa",
            "node,nodeid=1,cpus=2-3,memdev=ram-node1",
            "-object",
            r#"{"qom-type":"memory-backend-ram","id":"memdimm0","size":536870912}"#,
            "-device",
            r#"{"driver":"pc-dimm","node":0,"memdev":"memdimm0","id":"dimm0"}"#,
        ];
        let config = Config::parse(&args.map(str::to_owned));
        assert_eq!(config.name.as_deref(), Some("db"));
        assert_eq!(config.blocks_bytes, [1024 * M, 3072 * M, 512 * M]);
        assert_eq!(config.ram_bytes, 4608 * M);
    }

    #[test]
    fn a_backend_of_a_shared_memory_device_is_not_ram() {
        let config = parse(
            "kvm -m 128 -object memory-backend-file,id=shm,size=4M,mem-path=/dev/shm/x,share=on -device ivshmem-plain,memdev=shm",
        );
        assert_eq!(config.blocks_bytes, [128 * M]);
    }

    #[test]
    fn machine_monitor_and_devices() {
        let facts = parse(
            "kvm -machine pc-q35-7.2,max-ram-below-4g=1G,accel=kvm -chardev socket,id=con,path=/run/c -chardev \
             socket,id=mon0,path=/run/a,,b/qmp,server=on -mon chardev=con -mon chardev=mon0,mode=control -device \
             virtio-balloon-pci,free-page-reporting=on -device qemu-xhci -m 64 -object \
             memory-backend-ram,id=d,size=1G -device pc-dimm,memdev=d",
        )
        .facts;
        assert_eq!(facts.machine.as_deref(), Some("pc-q35-7.2"));
        assert_eq!(facts.qmp_socket.as_deref(), Some("/run/a,b/qmp"));
        assert_eq!((facts.max_below_4g_bytes, facts.plugged_blocks), (Some(1 << 30), 1));
        assert!(facts.balloon && facts.free_page_reporting);
        assert_eq!(facts.devices, ["virtio-balloon-pci", "qemu-xhci", "pc-dimm"]);
        let other = parse("kvm -qmp unix:/run/q,server,nowait -device virtio-balloon-pci").facts;
        assert_eq!(
            (other.qmp_socket.as_deref(), other.balloon, other.free_page_reporting),
            (Some("/run/q"), true, false)
        );
    }

    #[test]
    fn programs_that_run_machines() {
        let program = |name: &str| {
            is_qemu(&Process { exe: Some(name.into()), cmdline: vec!["/bin/x".into()], ..Process::default() })
        };
        for yes in [
            "/usr/bin/qemu-system-x86_64",
            "/usr/libexec/qemu-kvm",
            "/usr/bin/kvm",
            "/x/qemu-system-arm (deleted)",
            "/nix/.qemu-system-x86_64-wrapped",
        ] {
            assert!(program(yes), "{yes}");
        }
        for no in ["/usr/bin/qemu-img", "/usr/bin/qemu-x86_64", "/usr/sbin/kvm-ok", "/usr/bin/vim"] {
            assert!(!program(no), "{no}");
        }
    }
}
