//! Finds functions of the C libraries that a process has loaded, by the ELF tables in the memory of that process.
//!
//! The process may have written anything into these tables. Each answer is an address in code of a file, or none.
//! Nothing is read that could wait for a user ([`Memory`]).

use crate::memory::Memory;
use host::Mapping;
use object::LittleEndian;
use object::elf::{DT_STRSZ, DT_STRTAB, DT_SYMTAB, Dyn64, FileHeader64, PT_DYNAMIC, PT_LOAD, STT_FUNC, Sym64};
use object::pod::{Pod, slice_from_bytes};
use object::read::StringTable;
use object::read::elf::{FileHeader, ProgramHeader, Sym};
use page::PAGE_BYTES;

/// Largest part of a library that is read at once (headers, symbols, names), in bytes: 4 MiB. A larger table counts as
/// damaged.
const MOST_BYTES: u64 = 4 << 20;
/// Byte order of numbers in the tables.
const ENDIAN: LittleEndian = LittleEndian;
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

/// The first mapping of each C library, which holds its ELF header.
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

/// The symbol table of a library, and the names of its symbols.
struct Library {
    /// The difference between its addresses and those in its file.
    base: u64,
    symbols: Vec<u8>,
    names: Vec<u8>,
}

impl Library {
    fn read(memory: &Reader<'_>, start: u64) -> Option<Self> {
        let header = read(memory, start, PAGE_BYTES as u64)?;
        let file = FileHeader64::<LittleEndian>::parse(&*header).ok()?;
        file.endian().ok()?;
        // The headers must lie in the first page.
        let headers = file.program_headers(ENDIAN, &*header).ok()?;
        let of_kind = |kind| headers.iter().filter(move |part| part.p_type(ENDIAN) == kind);
        let first = of_kind(PT_LOAD).find(|part| part.p_offset(ENDIAN) == 0)?;
        let base = start.checked_sub(first.p_vaddr(ENDIAN))?;
        let dynamic = of_kind(PT_DYNAMIC).next()?;
        let dynamic = read(memory, base.checked_add(dynamic.p_vaddr(ENDIAN))?, dynamic.p_memsz(ENDIAN))?;
        let entries = table::<Dyn64<LittleEndian>>(&dynamic);
        let value =
            |tag| entries.iter().find(|entry| entry.d_tag.get(ENDIAN) == tag).map(|entry| entry.d_val.get(ENDIAN));
        // glibc replaces the file's addresses in these entries by addresses in memory, musl does not.
        let address = |tag| value(tag).map(|at| if at < base { at.saturating_add(base) } else { at });
        let (symbols_at, names_at) = (address(DT_SYMTAB)?, address(DT_STRTAB)?);
        // Linkers put the names behind the symbols.
        let symbols = read(memory, symbols_at, names_at.checked_sub(symbols_at)?)?;
        Some(Self { base, symbols, names: read(memory, names_at, value(DT_STRSZ)?)? })
    }

    fn function(&self, name: &str) -> Option<Function> {
        let names = StringTable::new(&*self.names, 0, self.names.len() as u64);
        let is_named = |symbol: &Sym64<_>| symbol.name(ENDIAN, names) == Ok(name.as_bytes());
        let is_function = |symbol: &Sym64<_>| symbol.st_type() == STT_FUNC && !symbol.is_undefined(ENDIAN);
        let symbols = table::<Sym64<LittleEndian>>(&self.symbols);
        let symbol = symbols.iter().find(|symbol| is_function(symbol) && is_named(symbol))?;
        Some(Function { start: self.base.checked_add(symbol.st_value(ENDIAN))?, bytes: symbol.st_size(ENDIAN) })
    }
}

/// The whole entries of a table. Bytes behind the last whole entry are left out.
fn table<T: Pod>(bytes: &[u8]) -> &[T] {
    slice_from_bytes(bytes, bytes.len() / size_of::<T>()).map_or(&[], |(entries, _)| entries)
}

/// Reads memory; `None` if that is more than [`MOST_BYTES`], or cannot be read.
fn read(memory: &Reader<'_>, start: u64, bytes: u64) -> Option<Vec<u8>> {
    let mut all = vec![0; usize::try_from(bytes).ok().filter(|_| bytes <= MOST_BYTES)?];
    memory(start, &mut all).map(|()| all)
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
