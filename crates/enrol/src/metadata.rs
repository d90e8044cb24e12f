//! Reads which group and member's name the metadata of a libvirt domain ask for, from libvirt's file of the running
//! domain.
//!
//! ```text
//!   <metadata>
//!     <pagefold:member xmlns:pagefold="urn:pagefold:domain:1" group="acme" name="web1"/>
//!   </metadata>
//! ```
//!
//! As long as a domain runs, libvirt keeps its `NAME.pid` and `NAME.xml` in a directory that root alone can write. The
//! XML file counts only if it names the process's pid, too. A guest cannot change its metadata: only users who may
//! define domains can.

use crate::facts::Asked;
use api::name;
use roxmltree::{Document, Node, ParsingOptions};
use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The directory in which libvirt keeps the files of running domains.
const DOMAINS: &str = "/run/libvirt/qemu";
/// The XML namespace of the element `pagefold:member`.
const NAMESPACE: &str = "urn:pagefold:domain:1";
/// Longest `NAME.xml` that is read, in bytes.
const MOST_BYTES: u64 = 1 << 20;
/// Longest `NAME.pid` that is read, in bytes.
const MOST_PID_BYTES: u64 = 32;
/// Most XML nodes that a `NAME.xml` may have.
const MOST_NODES: u32 = 100_000;
/// Most running domains that are known at a time. Further ones are treated as domains without metadata.
const MOST_DOMAINS: usize = 10_000;
/// Most characters of a member's name that is made from a domain's name. The rest is cut off.
const MOST_NAME: usize = 48;

/// The XML files of running domains, by the pid of the process.
#[derive(Debug, Default)]
pub struct Domains {
    files: Option<HashMap<u32, PathBuf>>,
}

impl Domains {
    /// Forgets which domains run, so that the directory is read again.
    pub fn look_anew(&mut self) {
        self.files = None;
    }

    /// The group and name that the metadata of the domain which process `pid` runs ask for; `None` if they ask for
    /// none.
    pub fn of(&mut self, pid: u32) -> Option<Asked> {
        let file = self.files.get_or_insert_with(|| files(Path::new(DOMAINS))).get(&pid)?;
        let text = host::read_plain_file(file, MOST_BYTES).ok()?;
        asked(std::str::from_utf8(&text).ok()?, pid)
    }
}

/// The XML files of running domains by pid. Files and directory count only if root owns them and alone can write them.
fn files(dir: &Path) -> HashMap<u32, PathBuf> {
    let is_roots = |path: &Path| path.symlink_metadata().is_ok_and(|of| of.uid() == 0 && of.mode() & 0o022 == 0);
    let entries = fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
    let entries = entries.filter(|path| path.extension().is_some_and(|extension| extension == "pid"));
    let file = |path: PathBuf| {
        let text = host::read_plain_file(&path, MOST_PID_BYTES).ok()?;
        let xml = path.with_extension("xml");
        is_roots(&xml).then_some((std::str::from_utf8(&text).ok()?.trim().parse().ok()?, xml))
    };
    if is_roots(dir) { entries.filter_map(file).take(MOST_DOMAINS).collect() } else { HashMap::new() }
}

/// The group and name in the XML of a running domain; `None` if it has none, or if process `pid` does not run this
/// domain.
fn asked(text: &str, pid: u32) -> Option<Asked> {
    let options = ParsingOptions { nodes_limit: MOST_NODES, ..ParsingOptions::default() };
    let document = Document::parse_with_options(text, options).ok()?;
    let status = document.root_element();
    if status.attribute("pid")?.parse() != Ok(pid) {
        return None;
    }
    let domain = child(status, "domain")?;
    let metadata = child(domain, "metadata")?;
    let mut members = metadata.children().filter(|node| node.has_tag_name((NAMESPACE, "member")));
    // Two `member` elements contradict each other, so neither counts.
    let (member, None) = (members.next()?, members.next()) else { return None };
    let given = member.attribute("name").or_else(|| child(domain, "name")?.text());
    Some(Asked { group: member.attribute("group")?.to_owned(), name: given.and_then(member_name) })
}

fn child<'a, 'i>(node: Node<'a, 'i>, name: &str) -> Option<Node<'a, 'i>> {
    node.children().find(|child| child.has_tag_name(name))
}

/// A valid member's name made from a domain's name: other characters become `-`. `None` if nothing valid is left.
pub fn member_name(of: &str) -> Option<String> {
    let plain = |c: char| if c.is_ascii_alphanumeric() || "_.-".contains(c) { c } else { '-' };
    let made: String = of.chars().map(plain).collect();
    let made: String = made.trim_start_matches(['-', '.']).chars().take(MOST_NAME).collect();
    name::check("member", &made).is_ok().then_some(made)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(metadata: &str) -> String {
        format!(
            "<!-- WARNING -->\n<domstatus state='running' pid='1897'>\n  <vcpus/>\n  <domain type='qemu' id='1'>\n    \
             <name>web 1</name>\n    <metadata>{metadata}</metadata>\n    <memory>1</memory>\n  </domain>\n</domstatus>\n"
        )
    }

    fn group_and_name(metadata: &str) -> Option<(String, Option<String>)> {
        asked(&status(metadata), 1897).map(|asked| (asked.group, asked.name))
    }

    #[test]
    fn element_of_our_namespace_in_metadata_counts() {
        let ours = |more: &str| format!("<p:member xmlns:p='{NAMESPACE}' {more}/>");
        let found = |group: &str, name: &str| Some((group.to_owned(), Some(name.to_owned())));
        let other = "<a:member xmlns:a='http://a.example/1' group='beta'/>";
        for (metadata, expected) in [
            (ours("group='acme'"), found("acme", "web-1")),
            (ours("group='acme' name='db'"), found("acme", "db")),
            (format!("{other}{}", ours("group='acme'")), found("acme", "web-1")),
            (ours("name='db'"), None),
            (other.to_owned(), None),
            (ours("group='acme'") + &ours("group='beta'"), None),
            (format!("<a:x xmlns:a='http://a.example/1'>{}</a:x>", ours("group='acme'")), None),
            (String::new(), None),
        ] {
            assert_eq!(group_and_name(&metadata), expected, "{metadata}");
        }
        let text = status(&ours("group='acme'"));
        assert_eq!(asked(&text, 1898), None, "it is another process's");
        assert_eq!(asked(&text[..text.len() / 2], 1897), None, "it is being written");
        assert_eq!(asked("<!DOCTYPE x [<!ENTITY a 'b'>]><x pid='1'/>", 1), None);
    }

    #[test]
    fn names_of_domains_become_names_of_members() {
        for (domain, expected) in
            [("web 1", Some("web-1")), ("..a/b\u{1b}", Some("a-b-")), ("--", None), ("\u{e4}b", Some("b"))]
        {
            assert_eq!(member_name(domain).as_deref(), expected, "{domain}");
        }
        assert_eq!(member_name(&"x".repeat(500)).map(|name| name.len()), Some(MOST_NAME));
    }

    #[test]
    fn files_of_others_than_root_count_nothing() {
        if !rustix::process::geteuid().is_root() {
            return eprintln!("skipped: files of root's are needed");
        }
        let dir = tempfile::tempdir().unwrap();
        let (pid, xml) = (dir.path().join("web1.pid"), dir.path().join("web1.xml"));
        fs::write(&pid, "1897\n").unwrap();
        fs::write(&xml, status("")).unwrap();
        assert_eq!(files(dir.path()), HashMap::from([(1897, xml.clone())]));
        std::os::unix::fs::chown(&xml, Some(65534), None).unwrap();
        assert_eq!(files(dir.path()), HashMap::new());
        std::os::unix::fs::chown(&xml, Some(0), None).unwrap();
        std::os::unix::fs::chown(dir.path(), Some(65534), None).unwrap();
        assert_eq!(files(dir.path()), HashMap::new());
    }
}
