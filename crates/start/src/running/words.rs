//! Makes the command line for a second machine that is like one that runs.

use crate::machine::{DIR, NAME, QMP, memory_in_file};
use cli::exit::Stop;

/// The command line of a machine that runs, for a second one with its memory in a file.
///
/// # Errors
/// A second machine would not be the same, or would write to a file of the first one's.
pub(super) fn of_running(words: &[String], memory_bytes: u64) -> anyhow::Result<Vec<String>> {
    let mut made = Vec::with_capacity(words.len());
    let mut rest = words.iter().peekable();
    while let Some(word) = rest.next() {
        let option = word.trim_start_matches('-');
        let value =
            rest.peek().filter(|next| word.starts_with('-') && !next.starts_with('-')).map(|next| next.as_str());
        refuse(option, value.unwrap_or_default())?;
        match (option, value) {
            ("S" | "daemonize", _) => {}
            ("incoming" | "pidfile", Some(_)) => _ = rest.next(),
            ("name", Some(_)) => {
                rest.next();
                made.extend([word.clone(), format!("guest={NAME}")]);
            }
            ("chardev" | "qmp" | "qmp-pretty" | "monitor" | "serial", Some(value)) => {
                made.extend([word.clone(), in_own_dir(value)]);
                rest.next();
            }
            _ => made.push(word.clone()),
        }
    }
    if !made.iter().any(|word| word.contains(&format!("{DIR}/{QMP}"))) {
        let socket = format!("socket,id=pagefold-qmp,server=on,wait=off,path={DIR}/{QMP}");
        made.extend(["-chardev", &socket, "-mon", "chardev=pagefold-qmp,mode=control"].map(str::to_owned));
    }
    made.extend(memory_in_file(memory_bytes));
    Ok(made)
}

/// Fails for an option with which a second machine would not be the same, or would write to the first one's disk.
fn refuse(option: &str, value: &str) -> anyhow::Result<()> {
    let disk = ["drive", "blockdev", "hda", "hdb", "hdc", "hdd", "sd", "pflash", "mtdblock"].contains(&option);
    let read_only = value.contains("readonly=on") || value.contains("read-only=on");
    let is_block = "the guest's memory is no plain block";
    let why = match option {
        _ if disk && !read_only => "the guest may write this disk, and a template has the disk of the same instant",
        "readconfig" | "loadvm" => "its meaning is in another file",
        "numa" | "mem-path" => is_block,
        "machine" | "M" if value.contains("memory-backend") => is_block,
        "machine" | "M" if !is_pc(value) => "only machines pc and q35 are known",
        "object" if value.contains("memory-backend") => is_block,
        "device" if value.contains("vfio") => "a device of the host's cannot be copied",
        _ => return Ok(()),
    };
    Err(Stop::Usage(format!("no template can be made of this guest: -{option} {value}: {why}")).into())
}

/// Whether a machine type (or an option without a type) is one whose RAM block has the name `pc.ram`.
fn is_pc(machine: &str) -> bool {
    let kind = machine.split(',').next().unwrap_or_default();
    let kind = kind.strip_prefix("type=").unwrap_or(kind);
    kind.contains('=') || kind.starts_with("pc") || kind == "q35"
}

/// An option's value with the paths of its sockets and log files replaced by paths in the second machine's own
/// directory.
fn in_own_dir(value: &str) -> String {
    let moved = |part: &str| {
        let (key, path) = part.split_once("unix:").map(|(_, path)| ("unix", path)).or_else(|| part.split_once('='))?;
        let name = path.rsplit('/').next()?;
        match key {
            "path" | "logfile" => Some(format!("{key}={DIR}/{name}")),
            "unix" => Some(format!("unix:{DIR}/{name}")),
            _ => None,
        }
    };
    value.split(',').map(|part| moved(part).unwrap_or_else(|| part.to_owned())).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<String> {
        line.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn second_machine_of_a_running_one_has_sockets_of_its_own() {
        let line = "qemu -name guest=a -machine pc -m 128 -chardev socket,id=c,path=/run/lab/a/console,logfile=/run/lab/a/log \
                    -serial chardev:c -qmp unix:/run/a.sock,server=on -S -pidfile /run/pid -device virtio-rng-pci -no-reboot";
        let line = line.split_whitespace().collect::<Vec<_>>().join(" ");
        let made = of_running(&words(&line), 4096).expect("a second one").join(" ");
        for part in [
            "qemu -name guest={name} -machine pc -m 128 -chardev socket,id=c,path={dir}/console,logfile={dir}/log -serial chardev:c",
            "-qmp unix:{dir}/a.sock,server=on -device virtio-rng-pci -no-reboot -chardev socket,id=pagefold-qmp",
            "id=pc.ram,size=4096B,mem-path=/proc/self/fd/0,share=on -machine memory-backend=pc.ram",
        ] {
            assert!(made.contains(part), "{part} in {made}");
        }
        for bad in [
            "qemu -drive file=/disk,format=raw",
            "qemu -hda disk",
            "qemu -machine virt",
            "qemu -machine q35,memory-backend=m",
            "qemu -object memory-backend-ram,id=m,size=1G",
            "qemu -readconfig x",
            "qemu -device vfio-pci,host=1",
        ] {
            assert!(of_running(&words(bad), 4096).is_err(), "{bad}");
        }
        assert!(of_running(&words("qemu -drive file=/iso,readonly=on -machine type=q35,accel=kvm"), 4096).is_ok());
    }
}
