//! The crates below `crates/` ("rooms"): their sizes and dependencies, cycles, arrows and numbers inside of them, and
//! long functions.

mod allowed;
mod arrows;
mod imports;
mod inside;
mod report;
mod rooms;
mod trees;

use std::path::Path;

use anyhow::{Context, Result};
use serde::Serialize;

use crate::{files, graph, rust};

pub use rooms::Room;

/// Largest share of all lines that one room may have, in percent.
const MOST_PERCENT: usize = 20;
/// Most lines that a function may have.
const MOST_LINES: usize = 50;

/// Sizes, dependencies and problems of the tree.
#[derive(Debug, Default, Serialize)]
pub struct Structure {
    /// Every crate below `crates/`, by name.
    pub rooms: Vec<Room>,
    /// Rooms that depend on each other, for tests or otherwise.
    pub cycles_between_rooms: Vec<Vec<String>>,
    /// Files of one room that name each other.
    pub cycles_of_files: Vec<FileCycle>,
    /// Counts inside of each room.
    pub counts: Vec<(String, inside::Counts)>,
    /// Functions of more than [`MOST_LINES`] lines, the longest first.
    pub long_functions: Vec<LongFunction>,
    /// Everything that has to be mended.
    pub problems: Vec<String>,
}

/// Files of one room that name each other.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct FileCycle {
    /// The room.
    pub room: String,
    /// The files, relative to its `src`.
    pub files: Vec<String>,
}

/// A function of too many lines.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct LongFunction {
    /// The room.
    pub room: String,
    /// The file, relative to the root.
    pub file: String,
    /// The line of `fn`.
    pub line: usize,
    /// The function's name.
    pub name: String,
    /// Lines from `fn` to the closing brace.
    pub lines: usize,
}

/// Reads the tree and finds its problems.
pub fn read(root: &Path) -> Result<Structure> {
    let mut structure = Structure { rooms: rooms::list(root)?, ..Structure::default() };
    let architecture = files::read(root, "ARCHITECTURE.md")?;
    let bans = arrows::bans(&architecture)?;
    let mut problems = Vec::new();
    for at in 0..structure.rooms.len() {
        problems.extend(structure.read_room(root, at, &bans)?);
    }
    problems.extend(inside::problems(&structure.counts, &inside::budgets(&architecture)?));
    structure.long_functions.sort_by(|a, b| (b.lines, &a.file, a.line).cmp(&(a.lines, &b.file, b.line)));
    structure.cycles_between_rooms = rooms::cycles(&structure.rooms);
    structure.problems = structure.problems(&allowed::parse(&architecture)?);
    structure.problems.extend(problems);
    structure.problems.extend(trees::problems(root, &trees::parse(&architecture)?)?);
    Ok(structure)
}

impl Structure {
    /// Counts what is in the files of one room. Returns the banned arrows that they have, as problems.
    fn read_room(&mut self, root: &Path, at: usize, bans: &[arrows::Ban]) -> Result<Vec<String>> {
        let room = &mut self.rooms[at];
        let mut sources = Vec::new();
        for file in files::below(root, &room.directory, "rs")? {
            let text = files::read(root, &file)?;
            room.lines += text.lines().count();
            let found = rust::parse(&text).with_context(|| format!("cannot read {file}"))?.functions;
            let long = found.into_iter().filter(|function| function.lines > MOST_LINES);
            self.long_functions.extend(long.map(|function| LongFunction {
                room: room.name.clone(),
                file: file.clone(),
                line: function.line,
                name: function.name,
                lines: function.lines,
            }));
            if let Some(inside) = file.strip_prefix(&format!("{}/src/", room.directory)) {
                sources.push((inside.to_string(), text));
            }
        }
        let (graph, streams) = imports::graph(&sources)?;
        let (cycles, mut counts, mut names) = (graph::cycles(&graph), inside::Counts::default(), graph::Graph::new());
        counts.circle = cycles.iter().map(Vec::len).max().unwrap_or(0);
        for (file, tokens) in streams {
            counts.add(&tokens.clone().into_iter().collect::<Vec<_>>());
            names.insert(file.to_string(), imports::words(tokens).collect());
        }
        let room = room.name.clone();
        let problems = arrows::problems(&room, &graph, &names, bans);
        self.counts.push((room.clone(), counts));
        self.cycles_of_files.extend(cycles.into_iter().map(|files| FileCycle { room: room.clone(), files }));
        Ok(problems)
    }

    fn problems(&self, allowed: &allowed::Allowed) -> Vec<String> {
        let total: usize = self.rooms.iter().map(|room| room.lines).sum();
        let mut problems = Vec::new();
        for room in self.rooms.iter().filter(|room| room.lines * 100 > total * MOST_PERCENT) {
            let percent = room.lines * 100 / total;
            problems.push(format!("{}: {percent}% of all lines; a room may have {MOST_PERCENT}%", room.name));
        }
        problems.extend(allowed::problems(&self.rooms, allowed));
        for cycle in &self.cycles_between_rooms {
            problems
                .push(format!("{}: these rooms depend on each other, perhaps by dev-dependencies", cycle.join(", ")));
        }
        for LongFunction { file, line, name, lines, .. } in &self.long_functions {
            problems.push(format!("{file}:{line}: `{name}` has {lines} lines; a function may have {MOST_LINES}"));
        }
        problems
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn room(name: &str, lines: usize) -> Room {
        Room { name: name.into(), lines, ..Room::default() }
    }

    #[test]
    fn a_room_may_have_a_fifth_of_all_lines() {
        let allowed =
            allowed::parse("## Rooms\n|crate|holds|may use|\n|-|-|-|\n|`a`|x|-|\n|`b`|x|-|\n|`c`|x|-|\n").unwrap();
        let mut structure =
            Structure { rooms: vec![room("a", 20), room("b", 19), room("c", 61)], ..Structure::default() };
        let problems = structure.problems(&allowed);
        assert_eq!(problems, ["c: 61% of all lines; a room may have 20%"]);
        structure.rooms[0].lines = 21;
        assert_eq!(structure.problems(&allowed).len(), 2);
    }

    #[test]
    fn long_functions_are_found_in_their_file() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(root.path().join("crates/a/src")).unwrap();
        let source = format!("fn short() {{\n{}}}\n\nfn long() {{\n{}}}\n", "\n".repeat(48), "\n".repeat(49));
        std::fs::write(root.path().join("crates/a/src/lib.rs"), source).unwrap();
        let rooms = vec![Room { name: "a".into(), directory: "crates/a".into(), ..Room::default() }];
        let mut structure = Structure { rooms, ..Structure::default() };
        structure.read_room(root.path(), 0, &[]).unwrap();
        assert_eq!(structure.rooms[0].lines, 102);
        let found: Vec<_> = structure.long_functions.iter().map(|f| (f.name.as_str(), f.line, f.lines)).collect();
        assert_eq!(found, [("long", 52, 51)]);
    }
}
