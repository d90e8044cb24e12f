//! A guest's name, RAM and blocks of memory from QEMU's command line. Both spellings are read: the usual one (`-m 1G`)
//! and libvirt's JSON (`-object {"qom-type":...}`). Files that `-readconfig` names are read where the option stands, as
//! QEMU does: LXD and Incus put everything but the guest's name into such a file.

use crate::QemuFacts;
use crate::options::{Settings, options, parse_size};
use crate::qemu_config;
use host::Process;

/// RAM that QEMU gives a guest by default, in bytes: 128 MiB.
const DEFAULT_RAM_BYTES: u64 = 128 << 20;

/// Longest configuration file that is read, in bytes: the file belongs to the guest's owner, who may be hostile.
pub(crate) const MAX_CONFIG_BYTES: u64 = 256 << 10;

/// The configuration of one QEMU guest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Config {
    /// The name by `-name`.
    pub name: Option<String>,
    /// All RAM that the guest has from the start.
    pub ram_bytes: u64,
    /// Blocks that the RAM consists of; each is one mapping when QEMU starts.
    pub blocks_bytes: Vec<u64>,
    /// Further facts.
    pub facts: QemuFacts,
}

/// Whether a process is a QEMU that runs a whole machine.
pub(crate) fn is_qemu(process: &Process) -> bool {
    // Some distributions wrap the program: `.qemu-system-x86_64-wrapped`.
    let program = process.program().trim_start_matches('.');
    program.starts_with("qemu-system-") || matches!(program, "qemu-kvm" | "kvm")
}

/// A memory backend (`-object memory-backend-...`).
struct Backend {
    id: String,
    bytes: u64,
}

/// What the options of a command line that were read so far say.
#[derive(Default)]
struct CommandLine {
    name: Option<String>,
    facts: QemuFacts,
    /// RAM by `-m`.
    asked_bytes: Option<u64>,
    backends: Vec<Backend>,
    /// Ids of backends that hold the machine's own RAM.
    main: Vec<String>,
    /// Ids of backends that are plugged in beside it.
    plugged: Vec<String>,
    /// Ids of character devices with a monitor that speaks QMP.
    monitors: Vec<String>,
    /// Id and path of character devices that are sockets.
    sockets: Vec<(String, String)>,
}

impl Config {
    /// Reads a command line, the program's name first. `read` returns the content of a file that the command line
    /// names.
    pub fn parse(args: &[String], read: &dyn Fn(&str) -> Option<Vec<u8>>) -> Self {
        let mut line = CommandLine::default();
        for (option, value) in options(args) {
            match option {
                "readconfig" => line.read_config(&read(value).unwrap_or_default()),
                "qmp" | "qmp-pretty" => line.read_qmp(value),
                _ => line.read(option, &Settings::parse(value, implied_key(option))),
            }
        }
        line.into_config()
    }
}

/// The key of an option's first value, if the value is given without a key.
fn implied_key(option: &str) -> &'static str {
    match option {
        "name" => "guest",
        "m" => "size",
        "object" => "qom-type",
        "mon" => "chardev",
        "chardev" => "backend",
        "device" => "driver",
        _ => "type",
    }
}

impl CommandLine {
    /// Reads the options of a configuration file. Each section of the file is one option, and has the option's name;
    /// only `-m` is called `memory` there.
    fn read_config(&mut self, content: &[u8]) {
        for section in qemu_config::sections(&String::from_utf8_lossy(content)) {
            let option = if section.name == "memory" { "m" } else { section.name.as_str() };
            self.read(option, &section.settings);
        }
    }

    fn read_qmp(&mut self, value: &str) {
        let path = value.strip_prefix("unix:").and_then(|rest| rest.split(',').next());
        self.facts.qmp_socket = path.map(str::to_owned).or(self.facts.qmp_socket.take());
    }

    fn read(&mut self, option: &str, settings: &Settings) {
        match option {
            "name" => self.name = settings.get("guest").map(str::to_owned),
            "m" => {
                let size = settings.get("size").and_then(|s| parse_size(s, 1 << 20));
                self.asked_bytes = size.or(self.asked_bytes);
            }
            "object" => self.backends.extend(Backend::parse(settings)),
            "machine" | "M" => self.read_machine(settings),
            "mon" => {
                let speaks_qmp = settings.get("mode") == Some("control");
                self.monitors.extend(settings.get("chardev").filter(|_| speaks_qmp).map(str::to_owned));
            }
            "chardev" => {
                let found = settings.get("id").zip(settings.get("path"));
                self.sockets.extend(found.map(|(id, path)| (id.to_owned(), path.to_owned())));
            }
            "numa" => self.main.extend(settings.get("memdev").map(str::to_owned)),
            "device" => self.read_device(settings),
            _ => {}
        }
    }

    fn read_machine(&mut self, machine: &Settings) {
        self.main.extend(machine.get("memory-backend").map(str::to_owned));
        self.facts.machine = machine.get("type").map(str::to_owned).or(self.facts.machine.take());
        let below = machine.get("max-ram-below-4g").and_then(|size| parse_size(size, 1));
        self.facts.max_below_4g_bytes = below.or(self.facts.max_below_4g_bytes);
    }

    fn read_device(&mut self, device: &Settings) {
        let is_ram = device.get("driver").is_some_and(|d| d == "pc-dimm" || d.starts_with("virtio-mem"));
        self.plugged.extend(device.get("memdev").filter(|_| is_ram).map(str::to_owned));
        if let Some(driver) = device.get("driver") {
            self.facts.add_device(driver, device.get("free-page-reporting"));
        }
    }

    /// Sizes of the backends with these ids, in the order of the ids.
    fn sizes_of(&self, ids: &[String]) -> Vec<u64> {
        ids.iter().filter_map(|id| self.backends.iter().find(|b| b.id == *id)).map(|b| b.bytes).collect()
    }

    /// Puts together the options that refer to each other.
    fn into_config(mut self) -> Config {
        let mut blocks_bytes = self.sizes_of(&self.main);
        if blocks_bytes.is_empty() {
            blocks_bytes.push(self.asked_bytes.filter(|b| *b > 0).unwrap_or(DEFAULT_RAM_BYTES));
        }
        let plugged = self.sizes_of(&self.plugged);
        self.facts.plugged_blocks = plugged.len();
        blocks_bytes.extend(plugged);
        if self.facts.qmp_socket.is_none() {
            let of_monitor = |(id, _): &&(String, String)| self.monitors.contains(id);
            self.facts.qmp_socket = self.sockets.iter().find(of_monitor).map(|(_, path)| path.clone());
        }
        let ram_bytes = blocks_bytes.iter().fold(0, |sum: u64, b| sum.saturating_add(*b));
        Config { name: self.name, ram_bytes, blocks_bytes, facts: self.facts }
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
        Config::parse(&line.split(' ').map(str::to_owned).collect::<Vec<_>>(), &|_| None)
    }

    const M: u64 = 1 << 20;

    #[test]
    fn ram_is_read_in_every_spelling() {
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
    fn name_is_read_with_or_without_key() {
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
    fn ram_may_be_one_named_backend() {
        let config = parse(
            "qemu-system-x86_64 -m 256 -object memory-backend-memfd,id=mem,size=256M,share=on -machine q35,memory-backend=mem",
        );
        assert_eq!((config.ram_bytes, config.blocks_bytes), (256 * M, vec![256 * M]));
    }

    #[test]
    fn backends_of_numa_nodes_and_dimms_are_blocks_of_ram() {
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
        let config = Config::parse(&args.map(str::to_owned), &|_| None);
        assert_eq!(config.name.as_deref(), Some("db"));
        assert_eq!(config.blocks_bytes, [1024 * M, 3072 * M, 512 * M]);
        assert_eq!(config.ram_bytes, 4608 * M);
    }

    #[test]
    fn backend_of_shared_memory_device_is_not_ram() {
        let config = parse(
            "kvm -m 128 -object memory-backend-file,id=shm,size=4M,mem-path=/dev/shm/x,share=on -device ivshmem-plain,memdev=shm",
        );
        assert_eq!(config.blocks_bytes, [128 * M]);
    }

    #[test]
    fn facts_about_machine_monitor_and_devices_are_read() {
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
    fn configuration_file_counts_in_its_place() {
        let file = r#"
# Machine
[machine]
type = "q35"

[memory]
size = "512M"
[device "qemu_balloon"]
driver = "virtio-balloon-pci"
free-page-reporting = "on"
[chardev "monitor"]
backend = "socket"
path = "/run/lxd/v1/qemu.monitor"
[mon]
chardev = "monitor"
mode = "control"
"#;
        let parse = |line: &str, file: &str| {
            let args: Vec<_> = line.split(' ').map(str::to_owned).collect();
            Config::parse(&args, &|path| (path == "/run/v1.conf").then(|| file.as_bytes().to_vec()))
        };
        let config = parse("qemu-system-x86_64 -S -name v1 -readconfig /run/v1.conf -nographic", file);
        assert_eq!((config.name.as_deref(), config.ram_bytes), (Some("v1"), 512 * M));
        assert_eq!(config.facts.qmp_socket.as_deref(), Some("/run/lxd/v1/qemu.monitor"));
        assert!(config.facts.balloon && config.facts.free_page_reporting);
        assert_eq!(config.facts.machine.as_deref(), Some("q35"));
        // The last one counts, wherever it stands.
        assert_eq!(parse("kvm -m 64 -readconfig /run/v1.conf", file).ram_bytes, 512 * M);
        assert_eq!(parse("kvm -readconfig /run/v1.conf -m 64", file).ram_bytes, 64 * M);
        assert_eq!(parse("kvm -readconfig /run/other.conf -m 64", file).ram_bytes, 64 * M);
        // As LXD has it where the RAM is a file.
        let backends = r#"
[memory]
size = "2G"
[object "mem0"]
qom-type = "memory-backend-memfd"
size = "1024M"
[numa]
type = "node"
memdev = "mem0"
[object "mem1"]
qom-type = "memory-backend-memfd"
size = "1024M"
[numa]
type = "node"
memdev = "mem1"
"#;
        assert_eq!(parse("kvm -readconfig /run/v1.conf", backends).blocks_bytes, [1024 * M; 2]);
    }

    #[test]
    fn qemu_is_told_from_other_programs() {
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
