//! Mappings of a group's pool. In them lie the pages that a member has folded. All members that have folded an
//! identical page share one page frame.

use host::Mapping;
use page::NOT_GROUPS;

/// The group whose pool a mapping maps, by the file's name. This is no proof, because any process may give a file
/// this name.
pub fn pool_group(mapping: &Mapping) -> Option<&str> {
    pool_name(&mapping.name)
}

/// The group whose pool has this file name, as the kernel shows it.
pub fn pool_name(file: &str) -> Option<&str> {
    let name = file.strip_prefix("/memfd:pagefold-")?;
    let name = name.strip_suffix(" (deleted)").unwrap_or(name);
    (!name.is_empty() && !NOT_GROUPS.contains(&name)).then_some(name)
}

/// Whether the pages of a mapping are folded, except for pages that the kernel calls anonymous, which were written
/// since. This is so for private mappings of a pool; a shared one is the worker's own.
pub fn holds_folded_pages(mapping: &Mapping) -> bool {
    !mapping.shared && pool_group(mapping).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_private_mappings_of_pool_hold_folded_pages() {
        let group = |rights: &str, name: &str| {
            let line = format!("7f0000000000-7f0000001000 {rights} 00000000 00:01 9 {name}\n");
            let mapping = Mapping::parse_all(&line).unwrap().remove(0);
            (pool_group(&mapping).map(str::to_owned), holds_folded_pages(&mapping))
        };
        assert_eq!(group("rw-p", "/memfd:pagefold-acme (deleted)"), (Some("acme".into()), true));
        assert_eq!(group("rw-s", "/memfd:pagefold-acme (deleted)"), (Some("acme".into()), false));
        assert_eq!(group("---s", "/memfd:pagefold-lease (deleted)"), (None, false));
        for name in ["/memfd:pagefold- (deleted)", "/memfd:other (deleted)", "/tmp/memfd:pagefold-acme", ""] {
            assert_eq!(group("rw-p", name), (None, false), "{name}");
        }
    }
}
