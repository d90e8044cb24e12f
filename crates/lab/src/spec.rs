//! The request to a lab: the number of guests, their groups, image and resources.

use crate::error::{Error, Result};
use crate::name;
use crate::state::Image;
use std::env;
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

/// Most guests in one request: a thread waits for each of them.
const MOST_GUESTS: usize = 1000;

/// A service that folds the guests, each as a member of its group.
#[derive(Clone, Debug)]
pub struct Fold {
    /// Path of `pagefold`: its command `run` makes a program a member, and its command `attach` the processes of a
    /// container.
    pub pagefold: PathBuf,
    /// Directory of the service. `None` for the service that `pagefold` finds by itself, or starts for a VM or process.
    pub service: Option<PathBuf>,
}

/// Guests to bring up.
#[derive(Clone, Debug)]
pub struct Spec {
    /// Image of the guests.
    pub image: Image,
    /// Number of guests.
    pub guests: usize,
    /// Groups among which the guests are divided evenly.
    pub groups: Vec<String>,
    /// RAM of a VM (default 256 MiB, `debian` 512 MiB), data of a process (default 64 MiB).
    pub memory_bytes: Option<u64>,
    /// Kernel of VMs; `None` for the newest installed cloud kernel.
    pub kernel: Option<PathBuf>,
    /// Words added to the kernel's command line, for VMs.
    pub append: String,
    /// Words added to QEMU's command line: devices, for example.
    pub qemu_args: Vec<String>,
    /// Whether VMs are restored from saved states. Guests that have none are booted and saved first.
    pub saved: bool,
    /// Number of the first saved guest to restore: guests with other numbers were booted separately. The number of
    /// guests of the image that the lab has already is added to it.
    pub first_saved: usize,
    /// Program and first arguments of guests that are plain processes. The program also gets `--name NAME --group GROUP
    /// --memory-bytes N`, and must call [`crate::live`] with these values.
    pub process_program: Vec<OsString>,
    /// Service that the guests join as members; `None` for guests that are not folded.
    pub fold: Option<Fold>,
    /// Time-out for a guest to become ready.
    pub patience: Duration,
}

impl Spec {
    /// One guest of this image, with defaults for everything else.
    pub fn new(image: Image) -> Self {
        let program = env::current_exe().unwrap_or_else(|_| PathBuf::from("pagefold"));
        Self {
            image,
            guests: 1,
            groups: vec!["lab".into()],
            memory_bytes: None,
            kernel: None,
            append: String::new(),
            qemu_args: Vec::new(),
            saved: false,
            first_saved: 0,
            process_program: vec![program.into(), "lab".into(), "hold".into()],
            fold: None,
            patience: Duration::from_secs(300),
        }
    }

    /// Memory of a guest in bytes, given or by default; without meaning for containers.
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.memory_bytes.unwrap_or(match self.image {
            Image::Debian => 512 << 20,
            Image::Process => 64 << 20,
            _ => 256 << 20,
        })
    }

    /// Memory that a guest may take, in bytes; `None` for a container, which has no size.
    pub fn known_bytes(&self) -> Option<u64> {
        (!self.image.is_container()).then(|| self.memory_bytes())
    }

    /// Checks that the request makes sense on this host.
    pub(crate) fn check(&self) -> Result<()> {
        name::check_groups(&self.groups)?;
        let for_vms = self.kernel.is_some() || !self.append.is_empty() || !self.qemu_args.is_empty() || self.saved;
        if for_vms && !self.image.is_vm() {
            let text = "a kernel, its command line, QEMU's arguments and saved states are for VMs only";
            return Err(Error::usage(text.into()));
        }
        if self.memory_bytes.is_some() && self.image.is_container() {
            return Err(Error::usage("a container takes the memory that it needs: no size can be given".into()));
        }
        if self.guests == 0 {
            return Err(Error::usage("no guest is wanted".into()));
        }
        if self.guests > MOST_GUESTS {
            return Err(Error::usage(format!("{} guests are too many at a time: {MOST_GUESTS} at most", self.guests)));
        }
        let host_bytes = host::ram_bytes();
        if self.memory_bytes() > host_bytes {
            let text = format!("a guest of {} bytes does not fit: this host has {host_bytes}", self.memory_bytes());
            return Err(Error::host_lacks(text));
        }
        Ok(())
    }
}
