//! Kinds of pages by the host kernel's view, and regions of a guest's memory.

use serde::Serialize;

/// The backing of a page, as the host's kernel sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum PageKind {
    /// Private memory with no file behind it, including a copy-on-write copy of a file's page.
    Anon = 0,
    /// Page cache of a file.
    File = 1,
    /// Page cache of memory that only looks like a file: memfd, tmpfs, System V, shared anonymous memory.
    Shmem = 2,
    /// A page of a group's pool in a private mapping: a member's page that was folded.
    Folded = 3,
}

impl PageKind {
    /// Every kind, in the order of its number.
    pub const ALL: [Self; 4] = [Self::Anon, Self::File, Self::Shmem, Self::Folded];

    /// The name used in JSON and tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Anon => "anon",
            Self::File => "file",
            Self::Shmem => "shmem",
            Self::Folded => "folded",
        }
    }

    /// Whether a page of this kind can be folded: guest RAM, and of other guests than VMs anonymous memory.
    pub fn can_be_folded(self, region: Region, is_vm: bool) -> bool {
        region == Region::GuestRam || self == Self::Anon && !is_vm
    }
}

/// The part of a guest's footprint that a mapping belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum Region {
    /// The memory a VM sees as its RAM.
    GuestRam = 0,
    /// Heap and other private anonymous memory; in a VMM, its own and that of its devices.
    Heap = 1,
    /// The main thread's stack.
    Stack = 2,
    /// Translated code of an emulator without KVM (QEMU's TCG).
    TranslationCache = 3,
    /// Mapped files: programs, libraries and data, including private copies of their pages.
    Files = 4,
    /// Shared memory that is not guest RAM.
    Shared = 5,
    /// Everything else: vDSO, devices.
    Other = 6,
    /// Page cache that no process maps (host side only).
    PageCache = 7,
}

impl Region {
    /// Every region, in the order of its number.
    pub const ALL: [Self; 8] = [
        Self::GuestRam,
        Self::Heap,
        Self::Stack,
        Self::TranslationCache,
        Self::Files,
        Self::Shared,
        Self::Other,
        Self::PageCache,
    ];

    /// The name used in JSON and tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::GuestRam => "guest_ram",
            Self::Heap => "heap",
            Self::Stack => "stack",
            Self::TranslationCache => "translation_cache",
            Self::Files => "files",
            Self::Shared => "shared",
            Self::Other => "other",
            Self::PageCache => "page_cache",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_json_names_agree_with_the_tables() {
        for (n, r) in Region::ALL.iter().enumerate() {
            assert_eq!(*r as usize, n);
            assert_eq!(serde_json::to_string(r).unwrap(), format!("\"{}\"", r.name()));
        }
        for (n, k) in PageKind::ALL.iter().enumerate() {
            assert_eq!(*k as usize, n);
            assert_eq!(serde_json::to_string(k).unwrap(), format!("\"{}\"", k.name()));
        }
    }
}
