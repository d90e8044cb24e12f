//! What is asked of a lab: which guests, how many, made how.

use crate::error::{Error, Result};
use crate::name;
use crate::state::Image;
use std::env;
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

/// Guests that are started at a time, each waited for by a thread.
const MOST_GUESTS: usize = 1000;

/// A service that folds the guests, each as a member of its group.
#[derive(Clone, Debug)]
pub struct Fold {
    /// The program whose `run` makes a member of what it executes.
    pub pagefold: PathBuf,
    /// The service's directory; without, the one that `pagefold run` finds or starts.
    pub service: Option<PathBuf>,
}

/// What guests to bring up.
#[derive(Clone, Debug)]
pub struct Spec {
    /// What they are made of.
    pub image: Image,
    /// How many.
    pub guests: usize,
    /// The groups that they are dealt out to.
    pub groups: Vec<String>,
    /// RAM of a VM (default 256 MiB, `debian` 512 MiB), data of a process (default 64 MiB).
    pub memory_bytes: Option<u64>,
    /// Another kernel than the newest cloud kernel installed, for VMs.
    pub kernel: Option<PathBuf>,
    /// Added to the kernel's command line, for VMs.
    pub append: String,
    /// Added to QEMU's command line: devices, for example.
    pub qemu_args: Vec<String>,
    /// Program and first arguments of process guests, which must call [`crate::live`] with what follows:
    /// `--name NAME --group GROUP --memory-bytes N`.
    pub process_program: Vec<OsString>,
    /// Whose members they are to be; nobody's without.
    pub fold: Option<Fold>,
    /// How long a guest may take until it is ready.
    pub patience: Duration,
}

impl Spec {
    /// One guest of this kind, with everything else as usual.
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
            process_program: vec![program.into(), "lab".into(), "hold".into()],
            fold: None,
            patience: Duration::from_secs(180),
        }
    }

    /// The memory that a guest gets; without meaning for containers.
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.memory_bytes.unwrap_or(match self.image {
            Image::Debian => 512 << 20,
            Image::Process => 64 << 20,
            _ => 256 << 20,
        })
    }

    /// Whether it can mean anything on this host.
    pub(crate) fn check(&self) -> Result<()> {
        name::check_groups(&self.groups)?;
        let for_vms = self.kernel.is_some() || !self.append.is_empty() || !self.qemu_args.is_empty();
        if for_vms && !self.image.is_vm() {
            return Err(Error::Usage("a kernel, its command line and QEMU's arguments are for VMs only".into()));
        }
        if self.memory_bytes.is_some() && self.image.is_container() {
            return Err(Error::Usage("a container takes the memory that it needs: no size can be given".into()));
        }
        if self.fold.is_some() && self.image.is_container() {
            return Err(Error::Usage(
                "a container has many programs, and none of them can be made a member alone".into(),
            ));
        }
        if self.guests == 0 {
            return Err(Error::Usage("no guest is wanted".into()));
        }
        if self.guests > MOST_GUESTS {
            return Err(Error::Usage(format!("{} guests are too many at a time: {MOST_GUESTS} at most", self.guests)));
        }
        let host_bytes = host::ram_bytes();
        if self.memory_bytes() > host_bytes {
            let text = format!("a guest of {} bytes does not fit: this host has {host_bytes}", self.memory_bytes());
            return Err(Error::HostLacks(text));
        }
        Ok(())
    }
}
