//! The file of a frame of page cache: its inode, and its path as far as the guest's directory entries give it.
//!
//! ```text
//!   frame --> address_space --> inode --> directory entry --> parent entries ... --> root of the file system
//!                                                                                         |
//!             entry where the file system is mounted <------------------------------- mount
//! ```
//!
//! Each arrow is a pointer in the guest's memory, whose offset comes from BTF. Every step is a bounded read, and the
//! number of steps is bounded.

use crate::frames::FileNumber;
use crate::kernel::Kernel;
use std::collections::HashMap;

/// Most files that get a number of their own. Pages of further files have the number 0.
const MOST_FILES: usize = 1 << 20;
/// Most names in a path, over all file systems that it crosses.
const MOST_NAMES: usize = 128;
/// Most bytes that are read of a directory entry's name.
const MOST_NAME_BYTES: usize = 255;
/// Most mounts of one file system that are looked at.
const MOST_MOUNTS: usize = 64;

/// Offsets of the members by which an `address_space` is recognised.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FileLayout {
    host: u64,
    own_data: u64,
    own_mapping: u64,
}

impl FileLayout {
    fn new(kernel: &Kernel<'_>) -> Option<Self> {
        let btf = kernel.btf.as_ref()?;
        Some(Self {
            host: btf.offset("address_space.host")?,
            own_data: btf.offset("inode.i_data")?,
            own_mapping: btf.offset("inode.i_mapping")?,
        })
    }
}

/// The files that were found, numbered from 1 in the order in which they were found.
pub(crate) struct FileTable<'k, 'm> {
    kernel: &'k Kernel<'m>,
    layout: Option<FileLayout>,
    numbers: HashMap<u64, Option<FileNumber>>,
    files: Vec<u64>,
    /// The last `address_space` that was looked up, and its number: neighbouring frames are often of one file.
    last: (u64, Option<FileNumber>),
}

impl<'k, 'm> FileTable<'k, 'm> {
    pub(crate) fn new(kernel: &'k Kernel<'m>) -> Self {
        Self { kernel, layout: FileLayout::new(kernel), numbers: HashMap::new(), files: Vec::new(), last: (0, None) }
    }

    /// The number of the file with this `address_space`; `None` if this is no file's `address_space`. The number is 0
    /// if there are too many files.
    pub(crate) fn number(&mut self, mapping: u64) -> Option<FileNumber> {
        if self.last.0 == mapping {
            return self.last.1;
        }
        let number = match self.numbers.get(&mapping) {
            Some(number) => *number,
            None if self.numbers.len() >= MOST_FILES => Some(0),
            None => {
                let is_one = self.layout.is_none_or(|layout| self.is_address_space(mapping, layout));
                let number = is_one.then(|| {
                    self.files.push(mapping);
                    self.files.len() as FileNumber
                });
                self.numbers.insert(mapping, number);
                number
            }
        };
        self.last = (mapping, number);
        number
    }

    /// Whether this is the `address_space` of an inode: embedded in the inode, or the one that the inode uses. The swap
    /// cache's `address_space` has no inode, and is none.
    fn is_address_space(&self, mapping: u64, layout: FileLayout) -> bool {
        let tables = &self.kernel.tables;
        let Some(inode) = tables.u64(mapping.wrapping_add(layout.host)) else { return false };
        inode.wrapping_add(layout.own_data) == mapping
            || inode != 0 && tables.u64(inode.wrapping_add(layout.own_mapping)) == Some(mapping)
    }

    pub(crate) fn finish(self) -> Vec<u64> {
        self.files
    }
}

/// A file of the guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct File {
    /// Number of its inode in its file system.
    pub inode: u64,
    /// Device of its file system in the guest: major and minor number.
    pub device: (u32, u32),
    /// Type of its file system.
    pub filesystem: String,
    /// Its path; `None` if it has no name (any more).
    pub path: Option<String>,
}

impl Kernel<'_> {
    /// Looks up the file of an `address_space` out of [`crate::Frames::files`]. `None` without BTF, or if the file is
    /// gone.
    pub fn file(&self, mapping: u64) -> Option<File> {
        let at = |name: &str| self.btf.as_ref()?.offset(name);
        let tables = &self.tables;
        let inode = tables.u64(mapping.wrapping_add(at("address_space.host")?))?;
        let superblock = tables.u64(inode.wrapping_add(at("inode.i_sb")?))?;
        let device = tables.u32(superblock.wrapping_add(at("super_block.s_dev")?))?;
        let kind = tables.u64(superblock.wrapping_add(at("super_block.s_type")?))?;
        let filesystem = tables.u64(kind.wrapping_add(at("file_system_type.name")?))?;
        let mut file = File {
            inode: tables.u64(inode.wrapping_add(at("inode.i_ino")?))?,
            device: (device >> 20, device & 0xf_ffff),
            filesystem: self.text(filesystem, 32)?,
            path: None,
        };
        let number = tables.u32(inode.wrapping_add(at("inode.i_rdev")?))?;
        file.path = match file.filesystem.as_str() {
            "bdev" => Some(format!("block device {}:{}", number >> 20, number & 0xf_ffff)),
            _ => self.path(inode, superblock),
        };
        Some(file)
    }

    /// The path of an inode through the guest's first mount of its file system.
    fn path(&self, inode: u64, superblock: u64) -> Option<String> {
        let at = |name: &str| self.btf.as_ref()?.offset(name);
        let alias = self.tables.u64(inode.wrapping_add(at("inode.i_dentry")?)).filter(|node| *node != 0)?;
        let alias_at = at("dentry.d_u.d_alias").or_else(|| at("dentry.d_alias"))?;
        let mut names: Vec<String> = Vec::new();
        let mut entry = self.up(alias.wrapping_sub(alias_at), 0, &mut names)?;
        let mut mount = self.mount_of(superblock, entry);
        // Each round goes from the root of a file system to the place in the next one where it is mounted.
        while let Some(this) = mount {
            let parent = self.tables.u64(this.wrapping_add(at("mount.mnt_parent")?))?;
            if parent == this || names.len() >= MOST_NAMES {
                break;
            }
            let root = self.tables.u64(parent.wrapping_add(at("mount.mnt")?).wrapping_add(at("vfsmount.mnt_root")?))?;
            let place = self.tables.u64(this.wrapping_add(at("mount.mnt_mountpoint")?))?;
            names.push(String::new());
            entry = self.up(place, root, &mut names)?;
            mount = (entry == root).then_some(parent);
        }
        names.retain(|name| !name.is_empty());
        names.reverse();
        Some(format!("/{}", names.join("/")))
    }

    /// Climbs from a directory entry to the root of its file system, or to `end`, and adds the names on the way to
    /// `names`.
    fn up(&self, mut entry: u64, end: u64, names: &mut Vec<String>) -> Option<u64> {
        let at = |name: &str| self.btf.as_ref()?.offset(name);
        let (parent_at, name_at) = (at("dentry.d_parent")?, at("dentry.d_name")?);
        let (text_at, length_at) = (at("qstr.name")?, at("qstr.len")?);
        while entry != end {
            let parent = self.tables.u64(entry.wrapping_add(parent_at))?;
            if parent == entry {
                break;
            }
            if names.len() >= MOST_NAMES {
                return None;
            }
            let name = entry.wrapping_add(name_at);
            let length = self.tables.u32(name.wrapping_add(length_at))? as usize;
            let text = self.tables.u64(name.wrapping_add(text_at))?;
            names.push(self.text(text, length.min(MOST_NAME_BYTES))?);
            entry = parent;
        }
        Some(entry)
    }

    /// The first of a file system's mounts whose root is this entry.
    fn mount_of(&self, superblock: u64, root: u64) -> Option<u64> {
        let at = |name: &str| self.btf.as_ref()?.offset(name);
        let list = superblock.wrapping_add(at("super_block.s_mounts")?);
        let root_at = at("mount.mnt")?.wrapping_add(at("vfsmount.mnt_root")?);
        // Since Linux 6.17 the mounts are in a singly linked list, not in a ring.
        let (mut node, node_at, chained) = match at("mount.mnt_next_for_sb") {
            Some(next) => (self.tables.u64(list)?, next, true),
            None => (self.tables.u64(list)?, at("mount.mnt_instance")?, false),
        };
        for _ in 0..MOST_MOUNTS {
            if node == 0 || node == list {
                return None;
            }
            let mount = if chained { node } else { node.wrapping_sub(node_at) };
            if self.tables.u64(mount.wrapping_add(root_at)) == Some(root) {
                return Some(mount);
            }
            node = self.tables.u64(if chained { mount.wrapping_add(node_at) } else { node })?;
        }
        None
    }

    /// Text of at most `bytes` bytes, up to the first zero byte.
    fn text(&self, address: u64, bytes: usize) -> Option<String> {
        let mut text = vec![0; bytes];
        if !self.tables.read(address, &mut text) {
            // The text may end before a page that is not mapped. Then only the bytes on its first page are read.
            let here = bytes.min(4096 - address as usize % 4096);
            text.truncate(here);
            if !self.tables.read(address, &mut text) {
                return None;
            }
        }
        let text = text.split(|byte| *byte == 0).next().unwrap_or_default();
        Some(String::from_utf8_lossy(text).into_owned())
    }
}
