//! Writes scripts by which somebody else can start the machine of a clone: by a plain command line, libvirt, or Proxmox
//! VE.
//!
//! Each script contains the template's command line, and starts a process that holds the memory ([`Clones::wait_for`])
//! before QEMU is started. The memory is a link to a sealed memory file, by a descriptor of the process that waits:
//!
//! | QEMU | opens the file of a private mapping |
//! |---|---|
//! | 6.0 to 8.1 | for writing; so it must be one that can be opened so and never be written: sealed |
//! | 8.2 and newer | the same, or for reading with `readonly=on,rom=off` |

use crate::clones::{Clones, MEMORY, Wanted};
use crate::folding::Folding;
use crate::machine::Places;
use crate::names;
use crate::saving::quoted;
use anyhow::Context;
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::Path;

/// Who starts a clone's machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Starter {
    /// A person, or a script.
    Command,
    /// libvirt.
    Libvirt,
    /// Proxmox VE.
    Proxmox,
}

impl Clones {
    /// A script of the shell that starts one clone's machine in this way.
    ///
    /// # Errors
    /// The name is not valid, or this program's own file is not known.
    pub fn snippet(&self, wanted: &Wanted, starter: Starter) -> anyhow::Result<String> {
        names::deal(wanted.names, 1, &BTreeSet::new())?;
        let script = Script::new(self, wanted)?;
        Ok(match starter {
            Starter::Command => script.command(),
            Starter::Libvirt => script.libvirt(),
            Starter::Proxmox => script.proxmox(),
        })
    }
}

/// Parts of all scripts.
struct Script<'a> {
    name: &'a str,
    /// First line of the comment: which clone it is.
    title: String,
    /// Variables that the commands need, one a line.
    exports: String,
    /// This program.
    pagefold: String,
    /// The command that holds the memory, and waits.
    waits: String,
    /// `pagefold run ... -- `, if a service folds the clone.
    run: String,
    /// A shell test that is true once the memory can be opened.
    ready: String,
    memory_bytes: u64,
    words: Vec<String>,
}

impl<'a> Script<'a> {
    fn new(clones: &Clones, wanted: &'a Wanted) -> anyhow::Result<Self> {
        let (template, name) = (wanted.template, wanted.names);
        let dir = std::path::absolute(clones.dir_of(name))?;
        let places = Places { dir: &dir, name, disk: &wanted.dir.join("disk") };
        let in_dir = format!("mem-path={},", dir.join(MEMORY).display().to_string().replace(',', ",,"));
        let words = places.fill(&template.words);
        // Proxmox VE has a character device `qmp` of its own.
        let renamed = |word: &String| {
            let word = word.replace("id=qmp,", "id=pagefold-qmp,").replace("chardev=qmp,", "chardev=pagefold-qmp,");
            word.replace("mem-path=/proc/self/fd/0,", &in_dir)
        };
        let words = words.iter().map(renamed).collect();
        let own = std::env::current_exe().context("cannot tell where this program lies")?;
        let (pagefold, group) = (shell(&own.to_string_lossy()), &template.group);
        let service = wanted.folding.map(|folding: &Folding| shell(&folding.dir().to_string_lossy()));
        let folds = service.as_ref().map_or_else(|| "--no-fold".to_owned(), |dir| format!("--service {dir}"));
        let unconfirmed = if wanted.allow_unconfirmed { " --allow-unconfirmed" } else { "" };
        let run = service.map(|dir| format!("{pagefold} run --group {group} --name {name} --service {dir} -- "));
        Ok(Self {
            name,
            title: format!("Clone {name} of template {} of group {group}", template.name),
            exports: exports(),
            waits: format!(
                "{pagefold} clone {} --group {group} --name {name} --await {folds}{unconfirmed} --timeout {}",
                template.name,
                wanted.patience.as_secs()
            ),
            pagefold,
            run: run.unwrap_or_default(),
            ready: format!("[ -e {} ]", quoted(&dir.join(MEMORY))),
            memory_bytes: template.memory.bytes,
            words,
        })
    }

    /// Lines that start the process that holds the memory, and wait until it does. `before` is put before that command,
    /// `after` behind it.
    fn held(&self, before: &str, after: &str, failed: &str) -> String {
        let Self { waits, ready, .. } = self;
        format!(
            "{before}{waits}{after} &\nuntil {ready}; do kill -0 $! 2>/dev/null || {{ {failed}exit 1; }}; sleep 0.1; done\n"
        )
    }

    fn command(&self) -> String {
        let Self { title, exports, run, words, .. } = self;
        let held = self.held("", "", "");
        let on_its_line = |word: &String| {
            let begin = if word.starts_with('-') { "\\\n    " } else { "" };
            format!("{begin}{}", shell(word))
        };
        let line = words.iter().map(on_its_line).collect::<Vec<_>>().join(" ");
        format!("#!/bin/sh -e\n# {title}: this script becomes its QEMU.\n{exports}{held}exec {run}{line}\n")
    }

    fn libvirt(&self) -> String {
        let Self { name, title, exports, run, words, .. } = self;
        // libvirt drops all capabilities of its QEMU. A process without capabilities can only follow a `/proc` link of
        // another process without.
        let held = self.held("setpriv --bounding-set=-all ", "", "");
        let (qemu, domain) = (shell(&words[0]), self.domain());
        format!(
            r#"#!/bin/sh -e
# {title}, as a domain of libvirt. Its QEMU is root's: nobody else may see a template.
{exports}mkdir -p /etc/pagefold/qemu
cat > /etc/pagefold/qemu/{name} <<'END'
#!/bin/sh
# QEMU with the template's memory in place of that which libvirt gives it.
for word; do
    shift
    case $word in *memory-backend-ram*) word=$(printf %s "$word" | sed 's/pc\.ram/unused/') ;; esac
    set -- "$@" "$word"
done
case " $* " in *" -incoming "*) exec {run}{qemu} "$@" ;; *) exec {qemu} "$@" ;; esac
END
chmod 755 /etc/pagefold/qemu/{name}
{held}virsh create --paused /dev/stdin <<'END'
{domain}END
wait $!
"#
        )
    }

    /// The value of an option of QEMU's; empty if it is not there.
    fn value(&self, option: &str) -> &str {
        self.words.iter().skip_while(|word| *word != option).nth(1).map_or("", String::as_str)
    }

    fn has_kvm(&self) -> bool {
        self.value("-accel").starts_with("kvm")
    }

    fn processors(&self) -> u32 {
        self.value("-smp").split(',').next().and_then(|count| count.parse().ok()).unwrap_or(1)
    }

    /// The kind of machine.
    fn machine(&self) -> &str {
        let machine = self.value("-machine").split(',').next().unwrap_or_default();
        machine.strip_prefix("type=").unwrap_or(machine)
    }

    /// The XML of a domain. Options that libvirt gives a machine by itself are named again.
    fn domain(&self) -> String {
        let Self { name, memory_bytes, words, .. } = self;
        let machine = escaped(self.machine());
        let kind = if self.has_kvm() { "kvm" } else { "qemu" };
        let processors = self.processors();
        let mut arguments = String::new();
        let mut rest = words[1..].iter();
        while let Some(word) = rest.next() {
            // libvirt gives the machine a name by itself.
            if word == "-name" {
                rest.next();
                continue;
            }
            let _ = writeln!(arguments, "    <qemu:arg value='{}'/>", escaped(word));
        }
        format!(
            "<domain type='{kind}' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>
  <name>{name}</name>
  <memory unit='b'>{memory_bytes}</memory>
  <vcpu>{processors}</vcpu>
  <os><type arch='x86_64' machine='{machine}'>hvm</type></os>
  <features><acpi/><apic/></features>
  <on_reboot>destroy</on_reboot>
  <devices>
    <emulator>/etc/pagefold/qemu/{name}</emulator>
    <controller type='usb' model='none'/>
    <memballoon model='none'/>
    <video><model type='none'/></video>
  </devices>
  <seclabel type='static' model='dac' relabel='no'><label>+0:+0</label></seclabel>
  <qemu:commandline>
{arguments}  </qemu:commandline>
</domain>
"
        )
    }

    fn proxmox(&self) -> String {
        let Self { name, title, exports, pagefold, words, memory_bytes, .. } = self;
        let log = format!("/run/pagefold-{name}.log");
        let held = self.held("setsid ", &format!(" >{log} 2>&1 </dev/null"), &format!("cat {log} >&2; "));
        let arguments = words[1..].iter().map(|word| shell(word)).collect::<Vec<_>>().join(" ");
        let (machine, processors, has_kvm) = (self.machine(), self.processors(), u8::from(self.has_kvm()));
        let memory = memory_bytes >> 20;
        format!(
            r#"#!/bin/sh -e
# {title}, as a VM of Proxmox VE: sh SCRIPT VMID. Proxmox starts QEMU by itself, without pagefold run: nothing of it is folded.
vm=${{1:?the id of a VM that there is not}}
cat > /var/lib/vz/snippets/pagefold-{name} <<'END'
#!/bin/sh
# Holds the template's memory for QEMU, and ends what is left of the clone.
{exports}case $2 in
pre-start)
{held};;
post-stop) {pagefold} clones end {name} 2>/dev/null || true ;;
esac
END
chmod 755 /var/lib/vz/snippets/pagefold-{name}
cat > /etc/pve/qemu-server/$vm.conf <<'END'
name: {name}
machine: {machine}
cores: {processors}
memory: {memory}
kvm: {has_kvm}
vga: none
balloon: 0
tablet: 0
hookscript: local:snippets/pagefold-{name}
args: {arguments}
END
qm start $vm
"#
        )
    }
}

/// Lines that set the variables by which templates and clones are found elsewhere.
fn exports() -> String {
    let line = |name: &str| {
        let value = std::env::var(name).ok().filter(|value| !value.is_empty())?;
        Some(format!("export {name}={}\n", shell(&value)))
    };
    ["PAGEFOLD_TEMPLATES", "PAGEFOLD_CLONES"].into_iter().filter_map(line).collect()
}

/// A text as one word of the shell, quoted if necessary.
fn shell(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "/._-=,:+".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) { word.to_owned() } else { quoted(Path::new(word)) }
}

/// A text as a value in XML.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('\'', "&apos;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_quoted_where_they_must_be() {
        assert_eq!(shell("tcg,tb-size=8"), "tcg,tb-size=8");
        assert_eq!(shell("it's $x"), r"'it'\''s $x'");
        assert_eq!(shell(""), "''");
        assert_eq!(escaped("a<'&'"), "a&lt;&apos;&amp;&apos;");
    }
}
