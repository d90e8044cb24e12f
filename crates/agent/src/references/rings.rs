//! Files that are registered with an `io_uring`, or were opened in one (direct descriptors). They may be in no table of
//! descriptors, and still be read. Only the kernel's text about the ring (`fdinfo`) names them.

/// The registered files that the kernel names; `None` if it does not name them all.
///
/// From Linux 6.14 on, the text has paths, but nothing about files while another thread uses the ring. Before, it
/// always has their number, and while the ring is not in use also entries, with the last part of each name.
pub fn registered(text: &str) -> Option<Vec<&str>> {
    let (number, rest) = text.split_once("UserFiles:")?.1.split_once('\n')?;
    let entries = rest.lines().take_while(|line| line.starts_with(' '));
    let names: Vec<&str> = entries.filter_map(|line| Some(line.split_once(':')?.1.trim())).collect();
    // A list without any entry may be empty, or be left out because the ring is in use.
    let is_told = number.trim().parse::<u64>().ok()? == 0 || !names.is_empty();
    is_told.then(|| names.into_iter().filter(|name| *name != "<none>").collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEFORE: &str = "CQEs:\t0\nSqThread:\t-1\n";

    #[test]
    fn registered_files_are_named_or_said_to_be_unknown() {
        let read = |text: &str| registered(text).map(|names| names.join(" "));
        assert_eq!(read(&format!("{BEFORE}UserFiles:\t0\nUserBufs:\t0\n")).as_deref(), Some(""));
        let all =
            format!("{BEFORE}UserFiles:\t5\n    0: /etc/hostname\n    2: socket:[6]\nUserBufs:\t1\n    0: 0x1/2\n");
        assert_eq!(read(&all).as_deref(), Some("/etc/hostname socket:[6]"));
        let old = format!("{BEFORE}UserFiles:\t2\n    0: hostname\n    1: <none>\nUserBufs:\t0\n");
        assert_eq!(read(&old).as_deref(), Some("hostname"));
        for hidden in [format!("{BEFORE}UserFiles:\t2\nUserBufs:\t0\n"), BEFORE.into(), "UserFiles:\t".into()] {
            assert_eq!(read(&hidden), None, "{hidden}");
        }
    }
}
