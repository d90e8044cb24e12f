//! Finds functions of the C libraries that a process has loaded, by the ELF tables in the memory of that process.
//!
//! The process may have written anything into these tables. Each answer is an address in code of a file, or none.
//! Nothing is read that could wait for a user ([`Memory`]).

use crate::memory::Memory;
use host::Mapping;
use linux_raw_sys::elf::{Elf_Dyn, Elf_Ehdr, Elf_Phdr};
use page::PAGE_BYTES;
use std::mem::offset_of;

/// Most bytes of a table that are read.
const MOST_BYTES: u64 = 4 << 20;
/// `PT_LOAD`, `PT_DYNAMIC`.
const LOAD: u64 = 1;
const DYNAMIC: u64 = 2;
/// `DT_STRTAB`, `DT_SYMTAB`, `DT_STRSZ`.
const NAMES: u64 = 5;
const SYMBOLS: u64 = 6;
const NAMES_BYTES: u64 = 10;
/// Size of a symbol (`Elf64_Sym`), and where its kind, its section, its value and its size lie.
const SYMBOL_BYTES: usize = 24;
const KIND: usize = 4;
const SECTION: usize = 6;
const VALUE: usize = 8;
const SIZE: usize = 16;
/// `STT_FUNC`.
const FUNCTION: u64 = 2;

/// A function in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Function {
    /// Its first address.
    pub start: u64,
    /// Its bytes.
    pub bytes: u64,
}

/// Functions of these names, in each C library that has all of them.
pub fn find<const N: usize>(memory: &Memory, names: [&str; N]) -> Vec<[Function; N]> {
    let mappings = memory.mappings();
    let read = |at: u64, bytes: &mut [u8]| memory.read(at, bytes);
    let found = libraries(mappings).filter_map(|mapping| find_in(&read, mapping.start.0, names));
    let is_code = |function: &Function| {
        let end = function.start.saturating_add(function.bytes);
        let holds = |mapping: &Mapping| mapping.start.0 <= function.start && end <= mapping.end.0;
        mappings.iter().any(|mapping| mapping.execute && mapping.has_file() && !mapping.shared && holds(mapping))
    };
    found.filter(|functions| functions.iter().all(is_code)).collect()
}

/// The name of a C library whose file may keep readers waiting (FUSE, network), if not all of these functions are found
/// without reading it.
pub fn out_of_reach(memory: &Memory, names: [&str; 2]) -> Option<String> {
    let read = |at: u64, bytes: &mut [u8]| memory.read(at, bytes);
    let mut foreign = libraries(memory.mappings()).filter(|mapping| !memory.is_local(mapping));
    foreign.find(|mapping| find_in(&read, mapping.start.0, names).is_none()).map(|mapping| mapping.name.clone())
}

/// Where C libraries begin.
fn libraries(mappings: &[Mapping]) -> impl Iterator<Item = &Mapping> {
    mappings.iter().filter(|mapping| mapping.offset == 0 && mapping.has_file() && mapping.is_c_library())
}

/// Reads memory, all of it or nothing.
type Reader<'a> = dyn Fn(u64, &mut [u8]) -> Option<()> + 'a;

fn find_in<const N: usize>(memory: &Reader<'_>, start: u64, names: [&str; N]) -> Option<[Function; N]> {
    let library = Library::read(memory, start)?;
    let found = names.map(|name| library.function(name));
    found.iter().all(Option::is_some).then(|| found.map(|function| function.unwrap_or(Function { start: 0, bytes: 0 })))
}

/// The tables of a library.
struct Library {
    /// The difference between its addresses and those in its file.
    base: u64,
    symbols: Vec<u8>,
    names: Vec<u8>,
}

impl Library {
    fn read(memory: &Reader<'_>, start: u64) -> Option<Self> {
        let header = read(memory, start, PAGE_BYTES as u64)?;
        if !header.starts_with(b"\x7fELF\x02\x01") {
            return None;
        }
        let table = number(&header, offset_of!(Elf_Ehdr, e_phoff), 8)?;
        let count = number(&header, offset_of!(Elf_Ehdr, e_phnum), 2)?;
        let headers = (0..count).map_while(|n| {
            let at = usize::try_from(table).ok()?.checked_add(usize::try_from(n).ok()? * size_of::<Elf_Phdr>())?;
            let field = |offset, bytes| number(&header, at.checked_add(offset)?, bytes);
            let (kind, offset) = (field(offset_of!(Elf_Phdr, p_type), 4)?, field(offset_of!(Elf_Phdr, p_offset), 8)?);
            let place = field(offset_of!(Elf_Phdr, p_vaddr), 8)?;
            Some((kind, offset, place, field(offset_of!(Elf_Phdr, p_memsz), 8)?))
        });
        let headers: Vec<_> = headers.collect();
        let (.., first, _) = headers.iter().find(|(kind, offset, ..)| (*kind, *offset) == (LOAD, 0))?;
        let base = start.checked_sub(*first)?;
        let (.., place, bytes) = headers.iter().find(|(kind, ..)| *kind == DYNAMIC)?;
        let dynamic = read(memory, base.checked_add(*place)?, *bytes)?;
        let entries = dynamic.chunks_exact(size_of::<Elf_Dyn>());
        let value = |tag: u64| {
            let mut of_tag = entries.clone().filter(|entry| number(entry, 0, 8) == Some(tag));
            number(of_tag.next()?, 8, 8)
        };
        // glibc has made addresses of them, musl has not.
        let address = |tag: u64| value(tag).map(|at| if at < base { at.saturating_add(base) } else { at });
        let (symbols_at, names_at) = (address(SYMBOLS)?, address(NAMES)?);
        // Linkers put the names behind the symbols.
        let symbols = read(memory, symbols_at, names_at.checked_sub(symbols_at)?)?;
        Some(Self { base, symbols, names: read(memory, names_at, value(NAMES_BYTES)?)? })
    }

    fn function(&self, name: &str) -> Option<Function> {
        let is_it = |symbol: &&[u8]| {
            let at = number(symbol, 0, 4).and_then(|at| self.names.get(usize::try_from(at).ok()?..));
            let is_defined = number(symbol, SECTION, 2) != Some(0);
            let is_function = number(symbol, KIND, 1).is_some_and(|kind| kind & 0xf == FUNCTION);
            let its = at.and_then(|rest| rest.get(..=name.len()));
            is_defined && is_function && its.is_some_and(|its| its.strip_suffix(b"\0") == Some(name.as_bytes()))
        };
        let symbol = self.symbols.chunks_exact(SYMBOL_BYTES).find(is_it)?;
        let start = self.base.checked_add(number(symbol, VALUE, 8)?)?;
        Some(Function { start, bytes: number(symbol, SIZE, 8)? })
    }
}

/// Bytes of memory, if there are not too many.
fn read(memory: &Reader<'_>, start: u64, bytes: u64) -> Option<Vec<u8>> {
    let mut all = vec![0; usize::try_from(bytes).ok().filter(|_| bytes <= MOST_BYTES)?];
    memory(start, &mut all).map(|()| all)
}

/// A number of up to eight bytes.
fn number(all: &[u8], at: usize, bytes: usize) -> Option<u64> {
    let mut number = [0_u8; 8];
    number.get_mut(..bytes)?.copy_from_slice(all.get(at..at.checked_add(bytes)?)?);
    Some(u64::from_le_bytes(number))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    fn own() -> Memory {
        Memory::open(std::process::id()).unwrap()
    }

    #[test]
    fn functions_of_own_c_library_are_found() {
        let memory = own();
        let found = find(&memory, ["mremap", "__errno_location"]);
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(found[0][0].start, libc::mremap as *const () as u64);
        assert_eq!(found[0][1].start, libc::__errno_location as *const () as u64);
        assert!(find(&memory, ["mremap", "no_such_function"]).is_empty());
        assert_eq!(out_of_reach(&memory, ["mremap", "no_such_function"]), None, "it is local");
    }

    #[test]
    fn damaged_library_has_no_functions_and_does_no_harm() {
        let memory = own();
        let start = libraries(memory.mappings()).next().unwrap();
        let whole = read(&|at, bytes| memory.read(at, bytes), start.start.0, PAGE_BYTES as u64).unwrap();
        let file = tempfile::tempfile().unwrap();
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] = !damaged[at];
            file.write_all_at(&damaged, 0).unwrap();
            // All tables lie behind the end of this file.
            assert!(find_in(&|at, bytes| file.read_exact_at(bytes, at).ok(), 0, ["mremap"]).is_none());
        }
    }
}
