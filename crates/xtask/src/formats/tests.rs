use super::*;
use serde_json::Value;
use std::collections::BTreeSet;

const TYPES: &str = "use b::Shared;

/// All of it, as [`Other`] has it.
///
/// Not this.
#[derive(Clone, Serialize)]
pub(crate) struct Whole<'a> {
    /// A name; `None`: unknown. One of `a|b`.
    #[serde(rename = \"called\", skip_serializing_if = \"Option::is_none\")]
    name: Option<&'a str>,
    #[serde(flatten)]
    inner: Inner,
    /// Secret.
    #[serde(skip)]
    secret: u8,
    /// By name.
    pub shared: BTreeMap<String, Vec<Shared>>,
}

#[derive(Serialize)]
struct Inner {
    /// Pairs.
    pairs: Pairs,
    /// How.
    word: Word,
    /// Either.
    either: Either,
}

/// A word.
#[derive(Serialize)]
#[serde(rename_all = \"snake_case\")]
enum Word {
    /// The first.
    OneTwo,
    /// The last.
    Three = 3,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Either { Number(Wrapped), Text(String) }

#[derive(Serialize)]
struct Wrapped(u32);

type Pairs = [(u32, f64); 2];

struct Unwritten;
";
/// A file of the same crate with a type of the same name as one in [`TYPES`].
const WORD: &str = "#[derive(Serialize)]\nstruct Word {}\n";
const SHARED: &str = "/// Shared.\n#[derive(Serialize)]\npub struct Shared {\n    /// A.\n    a: bool }\n";
const MADE: &str = "
**`Whole`** - All of it, as `Other` has it.

| field | is | meaning |
|---|---|---|
| `called` | text or null | A name; `null`: unknown. One of `a\\|b`. Left out where there is none. |
| `pairs` | list (2) of \\[integer, number\\] | Pairs. |
| `word` | `lib::Word` | How. |
| `either` | integer or text | Either. |
| `shared` | object of list of `Shared` by name | By name. |

**`lib::Word`** - A word.

| word | meaning |
|---|---|
| `one_two` | The first. |
| `three` | The last. |

**`Shared`** - Shared.

| field | is | meaning |
|---|---|---|
| `a` | true or false | A. |
";

fn root(types: &str) -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    // A second type of that name, which the file does not use.
    let others = [("b", SHARED), ("c", "#[derive(Serialize)]\nstruct Shared { b: u8 }\n")];
    for (name, text) in [("a", types)].into_iter().chain(others) {
        let dir = root.path().join(format!("crates/{name}/src"));
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("lib.rs"), text).unwrap();
    }
    fs::write(root.path().join("crates/a/src/more.rs"), WORD).unwrap();
    fs::create_dir(root.path().join("docs")).unwrap();
    fs::write(root.path().join(DOCUMENT), "# A\n\n<!-- type: a/src/lib.rs Whole -->\n<!-- end -->\n").unwrap();
    root
}

#[test]
fn tables_say_how_types_are_written() {
    let root = root(TYPES);
    assert_eq!(update(root.path(), false).unwrap().len(), 1);
    let text = files::read(root.path(), DOCUMENT).unwrap();
    assert_eq!(text, format!("# A\n\n<!-- type: a/src/lib.rs Whole -->\n{MADE}\n<!-- end -->\n"));
    assert!(update(root.path(), true).unwrap().is_empty());
}

#[test]
fn changed_comment_fails_the_check() {
    let root = root(TYPES);
    update(root.path(), false).unwrap();
    fs::write(root.path().join("crates/b/src/lib.rs"), SHARED.replace("Shared.", "Other.")).unwrap();
    let before = files::read(root.path(), DOCUMENT).unwrap();
    let stale = update(root.path(), true).unwrap();
    assert!(told(&stale, true).contains("Whole differs from the type"), "{stale:?}");
    assert_eq!(files::read(root.path(), DOCUMENT).unwrap(), before);
}

#[test]
fn shape_that_cannot_be_told_is_an_error() {
    for types in [
        TYPES.replace("use b::Shared;", ""),
        TYPES.replace("secret: u8", "secret: u8,\n/// Further.\nfurther: Unwritten"),
        TYPES.replace("/// By name.", ""),
        TYPES.replace("OneTwo,", "OneTwo(u8),"),
    ] {
        assert!(update(root(&types).path(), false).is_err(), "{types}");
    }
}

/// Raw output of benches and studies that lies in the tree: each of its fields is in the section of its command.
#[test]
fn fields_of_recorded_output_are_documented() {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    let text = fs::read_to_string(docs.join("formats.md")).unwrap();
    let mut seen = 0;
    for directory in ["figures", "studies"] {
        for entry in fs::read_dir(docs.join(directory)).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_none_or(|end| end != "json") || path.ends_with("guard.json") {
                continue;
            }
            let file: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
            let (command, output) = match file["command"].as_str() {
                Some(command) => (command.split(' ').take(3).collect::<Vec<_>>().join(" "), &file["output"]),
                None => ("pagefold study".into(), &file),
            };
            let mut known = named(&text, &format!("`{command} --json`"));
            if command == "pagefold bench containers" {
                known.extend(named(&text, "`pagefold bench ksm --json`"));
            }
            let mut missing = BTreeSet::new();
            add_missing(output, &known, &mut missing);
            assert!(missing.is_empty(), "{}: {missing:?}", path.display());
            seen += 1;
        }
    }
    assert!(seen > 20, "{seen} files");
}

/// Words in code spans of the section with this heading.
fn named<'a>(text: &'a str, heading: &str) -> BTreeSet<&'a str> {
    let part = text.split("\n## ").find(|part| part.starts_with(heading)).unwrap_or_else(|| panic!("no {heading}"));
    let words = |span: &'a str| span.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    part.split('`').skip(1).step_by(2).flat_map(words).collect()
}

fn add_missing(value: &Value, known: &BTreeSet<&str>, missing: &mut BTreeSet<String>) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                if !known.contains(name.as_str()) {
                    missing.insert(name.clone());
                }
                add_missing(value, known, missing);
            }
        }
        Value::Array(items) => items.iter().for_each(|item| add_missing(item, known, missing)),
        _ => {}
    }
}
