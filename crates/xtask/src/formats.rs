//! Tables of docs/formats.md, made from the types that are printed as JSON: `./x formats`.
//!
//! ```text
//!  crates/*/src: derive(Serialize), doc comments, #[serde(...)] --> types --.
//!                                                                          v
//!  docs/formats.md:    <!-- type: FILE NAME --> tables of it and of all that it holds <!-- end -->
//! ```
//!
//! FILE is seen from `crates`. `--check` writes nothing and fails where a table differs. A field without a comment is
//! an error, and so is a type whose JSON cannot be told from the source. Tests of the programs compare the tables with
//! real output (`assert_documented`), as a test here does with recorded output.

mod types;

use crate::{files, markers};
use anyhow::{Context, Result, bail, ensure};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use types::{Kind, Type};

/// The document with the tables.
const DOCUMENT: &str = "docs/formats.md";
/// Name of the markers around tables.
pub const KIND: &str = "type";

/// Makes every table of the document anew, and writes it unless it is only to be checked. Returns the names of the
/// tables that differed.
///
/// # Errors
/// A file cannot be read or written, or a table cannot be made.
pub fn update(root: &Path, only_check: bool) -> Result<Vec<String>> {
    let all = All::read(root)?;
    let text = files::read(root, DOCUMENT)?;
    let filled =
        markers::fill(&text, KIND, |name| all.tables(name)).with_context(|| format!("cannot use {DOCUMENT}"))?;
    if !only_check && !filled.stale.is_empty() {
        fs::write(root.join(DOCUMENT), &filled.text).with_context(|| format!("cannot write {DOCUMENT}"))?;
    }
    Ok(filled.stale)
}

/// The names in `stale` as lines of text.
pub fn told(stale: &[String], only_check: bool) -> String {
    let end = if only_check { "differs from the type: run ./x formats" } else { "is written" };
    match stale {
        [] => "All tables are as their types say.\n".into(),
        stale => stale.iter().map(|name| format!("{DOCUMENT}: {name} {end}\n")).collect(),
    }
}

/// All types, and the texts of their files.
struct All {
    types: Vec<Type>,
    texts: BTreeMap<String, String>,
}

impl All {
    fn read(root: &Path) -> Result<Self> {
        let mut all = Self { types: Vec::new(), texts: BTreeMap::new() };
        for file in files::below(root, "crates", "rs")? {
            let is_test = file.contains("/tests") || file.ends_with("_tests.rs");
            if is_test || !file.contains("/src/") || file.starts_with("crates/xtask/") {
                continue;
            }
            let text = files::read(root, &file)?;
            if text.contains("Serialize") {
                all.types.extend(types::of_file(&file, &text)?);
                all.texts.insert(file, text);
            }
        }
        Ok(all)
    }

    /// The tables of a type that is named `FILE NAME`, and of all types that it holds, each once.
    fn tables(&self, name: &str) -> Result<String> {
        let (file, name) = name.split_once(' ').context("the marker has no type")?;
        let is_it = |t: &&Type| t.name == name && t.file == format!("crates/{file}");
        let mut queue = vec![self.types.iter().find(is_it).context("there is no such type with derive(Serialize)")?];
        let (mut at, mut out) = (0, Vec::new());
        while let Some(next) = queue.get(at).copied() {
            out.push(self.table(next, &mut queue).with_context(|| format!("{}: {}", next.file, next.name))?);
            at += 1;
        }
        Ok(out.join("\n"))
    }

    fn table<'a>(&'a self, of: &'a Type, queue: &mut Vec<&'a Type>) -> Result<String> {
        let mut out = format!("**`{}`** - {}\n\n", self.shown(of), of.docs);
        if of.kind == Kind::Words {
            out += "| word | meaning |\n|---|---|\n";
            for part in &of.parts {
                ensure!(part.shape.is_empty(), "the variant {} has data", part.name);
                ensure!(!part.docs.is_empty(), "the variant {} has no comment", part.name);
                let _ = writeln!(out, "| `{}` | {} |", part.name, part.docs);
            }
        } else {
            out += "| field | is | meaning |\n|---|---|---|\n";
            self.rows(&mut out, of, queue)?;
        }
        Ok(out)
    }

    fn rows<'a>(&'a self, out: &mut String, of: &'a Type, queue: &mut Vec<&'a Type>) -> Result<()> {
        for part in &of.parts {
            if part.is_flat {
                let shape = &part.shape;
                let inner = shape.strip_prefix("Option<").and_then(|rest| rest.strip_suffix('>')).unwrap_or(shape);
                self.rows(out, self.find(inner, of)?, queue)?;
                continue;
            }
            ensure!(!part.docs.is_empty(), "the field {} has no comment", part.name);
            let shape = self.shape(&part.shape, of, queue).with_context(|| format!("the field {}", part.name))?;
            let absent = if part.may_lack { " Left out where there is none." } else { "" };
            let _ = writeln!(out, "| `{}` | {shape} | {}{absent} |", part.name, part.docs);
        }
        Ok(())
    }

    /// What a Rust type is in JSON, in words. `written` is the type as the source has it. Types that have tables are
    /// added to the queue.
    fn shape<'a>(&'a self, written: &str, of: &'a Type, queue: &mut Vec<&'a Type>) -> Result<String> {
        let mut inner = |written: &str| self.shape(written, of, queue);
        if let Some(items) = written.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            let (item, count) = items.split_once(';').unwrap_or((items, ""));
            let count = count.parse::<usize>().map_or(String::new(), |count| format!(" ({count})"));
            return Ok(format!("list{count} of {}", inner(item)?));
        }
        if let Some(items) = written.strip_prefix('(').and_then(|rest| rest.strip_suffix(')')) {
            let items: Result<Vec<String>> = arguments(items).into_iter().map(inner).collect();
            return Ok(format!("\\[{}\\]", items?.join(", ")));
        }
        let (path, rest) = written.split_once('<').unwrap_or((written, ""));
        let given = arguments(rest.strip_suffix('>').unwrap_or(""));
        let name = path.rsplit("::").next().unwrap_or(path);
        Ok(match (name, given.as_slice()) {
            ("Option", [value]) => format!("{} or null", inner(value)?),
            ("Vec" | "VecDeque" | "BTreeSet", [item]) => format!("list of {}", inner(item)?),
            ("Box" | "Rc" | "Arc" | "Cow", [.., value]) => inner(value)?,
            ("BTreeMap", [key, value]) => {
                let key = if *key == "String" || *key == "str" { "name".into() } else { inner(key)? };
                format!("object of {} by {key}", inner(value)?)
            }
            ("String" | "str" | "PathBuf" | "Path", []) => "text".into(),
            ("bool", []) => "true or false".into(),
            ("f32" | "f64", []) => "number".into(),
            ("Value", []) => "anything".into(),
            ("Map", _) => "object".into(),
            (name, []) if name.starts_with(['u', 'i']) && is_integer(name) => "integer".into(),
            _ => return self.shape_of_type(self.find(written, of)?, queue),
        })
    }

    fn shape_of_type<'a>(&'a self, of: &'a Type, queue: &mut Vec<&'a Type>) -> Result<String> {
        match of.kind {
            Kind::Text => Ok("text".into()),
            Kind::Any => {
                let shapes: Result<Vec<String>> =
                    of.parts.iter().map(|part| self.shape(&part.shape, of, queue)).collect();
                Ok(shapes?.join(" or "))
            }
            Kind::Struct | Kind::Words => {
                if !queue.iter().any(|known| std::ptr::eq(*known, of)) {
                    queue.push(of);
                }
                Ok(format!("`{}`", self.shown(of)))
            }
        }
    }

    /// The name of a type; with its module, where its crate has several types of that name.
    fn shown(&self, of: &Type) -> String {
        let is_alike = |t: &&Type| t.name == of.name && crate_of(&t.file) == crate_of(&of.file);
        let is_only = self.types.iter().filter(is_alike).count() == 1;
        if is_only { of.name.clone() } else { format!("{}::{}", stem(&of.file), of.name) }
    }

    /// The type that the name `written` means in the file of the type `from`.
    fn find(&self, written: &str, from: &Type) -> Result<&Type> {
        let path = written.split('<').next().unwrap_or(written);
        let (modules, name) = path.rsplit_once("::").unwrap_or(("", path));
        let called: Vec<&Type> = self.types.iter().filter(|t| t.name == name).collect();
        let used: Vec<&str> =
            if modules.is_empty() { self.used(&from.file, name) } else { modules.split("::").collect() };
        let own = crate_of(&from.file);
        let is_used = |t: &Type| {
            let first = used.first().copied().unwrap_or_default();
            let its = crate_of(&t.file);
            its == first || its == own && (["crate", "super", "self"].contains(&first) || used.contains(&stem(&t.file)))
        };
        let rules: [&dyn Fn(&Type) -> bool; 6] = [
            &|t| t.file == from.file && modules.is_empty(),
            &|t| is_used(t) && used.contains(&stem(&t.file)),
            &is_used,
            &|t| crate_of(&t.file) == own,
            &|t| crate_of(&t.file) == own && directory(&t.file) == directory(&from.file),
            &|_| true,
        ];
        for rule in rules {
            if let [only] = called.iter().filter(|t| rule(t)).collect::<Vec<_>>()[..] {
                return Ok(*only);
            }
        }
        bail!("cannot tell how {written} is written: {} types with derive(Serialize) have this name", called.len())
    }

    /// The words of the `use` that brings a name into a file.
    fn used(&self, file: &str, name: &str) -> Vec<&str> {
        let text = self.texts.get(file).map_or("", String::as_str);
        text.split(';').map(words_of_use).find(|words| words.contains(&name)).unwrap_or_default()
    }
}

/// The words of the last `use` of a text.
fn words_of_use(text: &str) -> Vec<&str> {
    let used = text.rfind("use ").map_or("", |at| &text[at + 4..]);
    used.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty()).collect()
}

fn is_integer(name: &str) -> bool {
    let size = &name[1..];
    size == "size" || size.parse::<u8>().is_ok()
}

/// The crate that a file is of.
fn crate_of(file: &str) -> &str {
    file.split('/').nth(1).unwrap_or_default()
}

/// The name of the module that a file holds.
fn stem(file: &str) -> &str {
    file.rsplit('/').next().and_then(|name| name.strip_suffix(".rs")).unwrap_or_default()
}

fn directory(file: &str) -> &str {
    file.rsplit_once('/').map_or("", |(directory, _)| directory)
}

/// Splits at commas that stand in no brackets.
fn arguments(text: &str) -> Vec<&str> {
    let (mut parts, mut depth, mut start) = (Vec::new(), 0, 0);
    for (at, c) in text.char_indices() {
        match c {
            '<' | '(' | '[' => depth += 1,
            '>' | ')' | ']' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(&text[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&text[start..]);
    parts.retain(|part| !part.is_empty());
    parts
}

#[cfg(test)]
#[path = "formats/tests.rs"]
mod tests;
