//! The command line that boots an image's VM, for callers that start the VM themselves.

use crate::accel::trial;
use crate::cache::Cache;
use crate::error::{Error, Result};
use crate::image::{self, Boot, Workshop};
use crate::lab::Progress;
use crate::life::Mark;
use crate::qemu::{self, Accelerator, Disk, Machine};
use crate::spec::Spec;
use crate::state::Image;
use host::KvmTrial;
use std::path::{Path, PathBuf};

/// Placeholder in [`Recipe::words`] for the machine's directory.
pub const DIR: &str = "{dir}";
/// Placeholder for the machine's name.
pub const NAME: &str = "{name}";
/// Placeholder for the disk, a file in the format `raw` that the machine may write.
pub const DISK: &str = "{disk}";

/// Size of QEMU's cache of translated code, in MiB: the lab's arguments have 32, and a VM of `tiny` gets less, because
/// each clone has a cache of its own. With 4 MiB an answer takes ten times as long; with 8 it takes no longer than with
/// 32.
const CACHE: &str = "tb-size=32";
const TINY_CACHE: &str = "tb-size=8";

/// Everything that is needed to boot an image's VM.
#[derive(Clone, Debug)]
pub struct Recipe {
    /// QEMU's path and arguments, with [`DIR`], [`NAME`] and [`DISK`] in place of values. The sockets `qmp`, `console`
    /// and `agent` are in the directory.
    pub words: Vec<String>,
    /// File with the disk's first content, which other VMs may have, too.
    pub disk: Option<PathBuf>,
    /// RAM.
    pub memory_bytes: u64,
    /// Accelerator.
    pub accelerator: Accelerator,
}

impl Recipe {
    /// The recipe of an image's VM. It contains `append` and `qemu_args` of the request. The image is built if it is
    /// missing, and a kernel may be booted in `dir` to try KVM.
    ///
    /// # Errors
    /// The image is not one of a VM, or the host lacks something.
    pub fn prepare(spec: &Spec, cache: &Cache, dir: &Path, progress: &(dyn Fn(Progress) + Sync)) -> Result<Self> {
        if !spec.image.is_vm() {
            return Err(Error::usage("only VMs have a command line of QEMU's: take the image tiny or debian".into()));
        }
        spec.check()?;
        let building = |_: &str| progress(Progress::Building(spec.image));
        let mark = Mark::of_guest("recipe", &std::process::id().to_string());
        let workshop = Workshop { cache, mark: &mark, building: &building };
        let kernel = spec.kernel.as_deref();
        let is_debian = spec.image == Image::Debian;
        image::check_helper(&spec.append)?;
        let boot = if is_debian { image::debian(&workshop, kernel) } else { image::tiny(&workshop, kernel) }?;
        let accelerator = match trial(cache, &boot, dir, &mark)? {
            KvmTrial::Boots => Accelerator::Kvm,
            KvmTrial::Fails(why) => {
                progress(Progress::Emulated(&why));
                Accelerator::Tcg
            }
        };
        let disk = boot.disk.clone();
        let words = words(spec, &Boot { disk: None, ..boot }, accelerator, disk.is_some())?;
        Ok(Self { words, disk, memory_bytes: spec.memory_bytes(), accelerator })
    }
}

fn words(spec: &Spec, boot: &Boot, accelerator: Accelerator, has_disk: bool) -> Result<Vec<String>> {
    let root = if has_disk { " pagefold.root=/dev/vda" } else { "" };
    let command = qemu::command(&Machine {
        name: NAME,
        dir: Path::new(DIR),
        boot,
        accelerator,
        memory_bytes: spec.memory_bytes(),
        append: format!("{}{root}", spec.append).trim(),
        qemu_args: &spec.qemu_args,
        disk: has_disk.then_some(Disk::Own(Path::new(DISK))),
        state: None,
    })?;
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let smaller = |word: String| if spec.image == Image::Tiny { word.replace(CACHE, TINY_CACHE) } else { word };
    Ok(words.map(|word| smaller(word.to_string_lossy().into_owned())).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_line_has_places_for_what_is_chosen_later() {
        let spec = Spec { append: "pagefold.identity=/dev/ttyS2".into(), ..Spec::new(Image::Debian) };
        let boot = Boot { kernel: "k".into(), initramfs: "i".into(), disk: None };
        let line = words(&spec, &boot, Accelerator::Tcg, true).expect("a command").join(" ");
        for part in [
            "guest={name}",
            "path={dir}/qmp",
            "format=raw,file={disk}",
            "pagefold.identity=/dev/ttyS2 pagefold.root=/dev/vda",
        ] {
            assert!(line.contains(part), "{part} in {line}");
        }
    }
}
