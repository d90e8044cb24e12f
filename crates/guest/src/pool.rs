//! Mappings of a group's pool: pages that a member has folded, and that are one frame for all of its group.

use host::Mapping;

/// Memory of Pagefold that is no pool is called so; no group is.
pub const NOT_GROUPS: [&str; 3] = ["donation", "lease", "probe"];

/// The group whose pool a mapping maps, by the name that the kernel shows; names are not proof: anybody may call a file so.
pub fn pool_group(mapping: &Mapping) -> Option<&str> {
    pool_name(&mapping.name)
}

/// The group by whose pool's name the kernel calls a file.
pub fn pool_name(file: &str) -> Option<&str> {
    let name = file.strip_prefix("/memfd:pagefold-")?;
    let name = name.strip_suffix(" (deleted)").unwrap_or(name);
    (!name.is_empty() && !NOT_GROUPS.contains(&name)).then_some(name)
}

/// Whether pages of a mapping that the kernel does not call anonymous are folded ones. A worker maps its own pool shared.
pub fn holds_folded_pages(mapping: &Mapping) -> bool {
    !mapping.shared && pool_group(mapping).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn private_mappings_of_a_pool_and_no_others() {
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
