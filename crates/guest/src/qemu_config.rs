//! Files for QEMU's option `-readconfig`. Each section is what one option would be:
//!
//! ```text
//! # comment
//! [chardev "monitor"]
//!   backend = "socket"
//!   path = "/run/monitor"
//! ```
//!
//! is `-chardev socket,id=monitor,path=/run/monitor`. QEMU refuses a file with a line that it does not understand; here
//! the line is skipped.

use crate::options::Settings;

/// A section: the option's name, and its settings, with the `id` first.
pub(crate) struct Section {
    pub name: String,
    pub settings: Settings,
}

/// The sections of a file, in order.
pub(crate) fn sections(text: &str) -> Vec<Section> {
    let mut sections: Vec<(String, Vec<(String, String)>)> = Vec::new();
    for line in text.lines().map(str::trim).filter(|line| !line.starts_with('#')) {
        if let Some(head) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            let (name, id) = head.split_once(' ').map_or((head, None), |(name, id)| (name, unquote(id)));
            sections.push((name.to_owned(), id.map(|id| ("id".to_owned(), id)).into_iter().collect()));
        } else if let Some((key, value)) = line.split_once('=')
            && let Some((_, settings)) = sections.last_mut()
        {
            settings.extend(unquote(value).map(|value| (key.trim().to_owned(), value)));
        }
    }
    sections.into_iter().map(|(name, pairs)| Section { name, settings: Settings::of(pairs) }).collect()
}

/// The text between the first two double quotes; `None` if it does not begin with one. QEMU knows no escape for a quote
/// in it.
fn unquote(text: &str) -> Option<String> {
    let word = text.trim().strip_prefix('"')?;
    word.split_once('"').map(|(word, _)| word.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_have_their_settings() {
        let text = "key = \"before any\"\n# [not]\n[memory]\n  size = \"512M\"\nnonsense\n\n[device \"b\"]\r\ndriver=\"x=y\"\n\
                    bare = word\n[open\n[mon]\n";
        let sections = sections(text);
        let names: Vec<_> = sections.iter().map(|section| section.name.as_str()).collect();
        assert_eq!(names, ["memory", "device", "mon"]);
        assert_eq!((sections[0].settings.get("size"), sections[0].settings.get("key")), (Some("512M"), None));
        let device = &sections[1].settings;
        assert_eq!((device.get("id"), device.get("driver"), device.get("bare")), (Some("b"), Some("x=y"), None));
        assert_eq!(sections[2].settings.get("id"), None);
    }
}
