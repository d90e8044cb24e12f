//! Dependencies that are allowed, as ARCHITECTURE.md draws them in its section "Rooms".

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, ensure};

use super::Room;

/// Dependencies that a room may have.
#[derive(Debug, PartialEq, Eq)]
pub enum Uses {
    /// Every room.
    All,
    /// These rooms.
    These(BTreeSet<String>),
}

/// Allowed dependencies by room.
pub type Allowed = BTreeMap<String, Uses>;

/// Reads the table with the columns `crate` and `may use`.
pub fn parse(architecture: &str) -> Result<Allowed> {
    let rows = table(architecture, "Rooms", &["crate", "may use"])?;
    Ok(rows.into_iter().map(|row| (row[0].clone(), read_uses(&row[1]))).collect())
}

/// Reads the first table of a section. Returns these columns of each row.
pub fn table(architecture: &str, title: &str, columns: &[&str]) -> Result<Vec<Vec<String>>> {
    let section = architecture.split("\n## ").map(|section| section.trim_start_matches("## "));
    let section = section.into_iter().find(|section| section.lines().next() == Some(title));
    let section = section.with_context(|| format!("ARCHITECTURE.md has no section \"{title}\""))?;
    let mut rows =
        section.lines().skip_while(|line| !line.starts_with('|')).take_while(|line| line.starts_with('|')).map(cells);
    let head = rows.next().with_context(|| format!("section \"{title}\" of ARCHITECTURE.md has no table"))?;
    let column = |name: &&str| {
        let at = head.iter().position(|cell| cell == name);
        at.with_context(|| format!("the table in section \"{title}\" of ARCHITECTURE.md has no column \"{name}\""))
    };
    let columns: Vec<usize> = columns.iter().map(column).collect::<Result<_>>()?;
    let row = |row: Vec<String>| -> Result<Vec<String>> {
        ensure!(row.len() == head.len(), "the table \"{title}\" has a row that is no row: {}", row.join(" | "));
        Ok(columns.iter().map(|column| row[*column].clone()).collect())
    };
    rows.skip(1).map(row).collect()
}

/// The cells of a row, without backticks. `\|` is no border.
fn cells(row: &str) -> Vec<String> {
    const ESCAPED: &str = "\u{1f}";
    let row = row.trim().trim_matches('|').replace("\\|", ESCAPED);
    row.split('|').map(|cell| cell.replace(ESCAPED, "|").replace('`', "").trim().to_string()).collect()
}

fn read_uses(cell: &str) -> Uses {
    if cell == "all" {
        return Uses::All;
    }
    Uses::These(
        cell.split(',').map(|name| name.trim().to_string()).filter(|name| !name.is_empty() && name != "-").collect(),
    )
}

/// Finds dependencies that are not allowed, and rooms that the table lacks or invents.
pub fn problems(rooms: &[Room], allowed: &Allowed) -> Vec<String> {
    let mut problems = Vec::new();
    for room in rooms {
        match allowed.get(&room.name) {
            None => problems.push(format!("{}: not in the table of rooms in ARCHITECTURE.md", room.name)),
            Some(Uses::All) => {}
            Some(Uses::These(these)) => {
                for name in room.depends_on.iter().filter(|name| !these.contains(*name)) {
                    problems.push(format!("{}: depends on {name}, which ARCHITECTURE.md does not allow", room.name));
                }
            }
        }
    }
    let known: BTreeSet<&String> = rooms.iter().map(|room| &room.name).collect();
    let mentioned = allowed.iter().flat_map(|(name, uses)| {
        let these = if let Uses::These(these) = uses { Some(these) } else { None };
        std::iter::once(name).chain(these.into_iter().flatten())
    });
    let unknown: BTreeSet<&String> = mentioned.filter(|name| !known.contains(name)).collect();
    problems.extend(
        unknown.into_iter().map(|name| format!("{name}: in the table of rooms in ARCHITECTURE.md, but no room")),
    );
    problems
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# House\n\n## Rooms\n\n| crate | holds | may use |\n|---|---|---|\n| `a` | x \\| y | - |\n\
                        | `b` | x | a |\n| `c` | x | all |\n\nMore.\n\n## Next\n\n| d | e | f |\n";

    fn room(name: &str, depends_on: &[&str]) -> Room {
        Room {
            name: name.into(),
            depends_on: depends_on.iter().map(|name| name.to_string()).collect(),
            ..Room::default()
        }
    }

    #[test]
    fn table_of_rooms_is_read() {
        let allowed = parse(TEXT).unwrap();
        let these = |names: &[&str]| Uses::These(names.iter().map(|name| name.to_string()).collect());
        let expected = [("a", these(&[])), ("b", these(&["a"])), ("c", Uses::All)];
        assert_eq!(allowed, expected.into_iter().map(|(name, uses)| (name.to_string(), uses)).collect());
        assert!(parse("## Room\n").is_err());
        assert!(parse("## Rooms\n\n| crate | holds |\n|---|---|\n").is_err());
    }

    #[test]
    fn allowed_dependencies_are_no_problem() {
        let rooms = [room("a", &[]), room("b", &["a"]), room("c", &["a", "b"])];
        assert!(problems(&rooms, &parse(TEXT).unwrap()).is_empty());
    }

    #[test]
    fn other_dependencies_and_rooms_are_problems() {
        let rooms = [room("a", &["b"]), room("b", &["a"]), room("d", &[])];
        let found = problems(&rooms, &parse(TEXT).unwrap());
        let begins: Vec<&str> = found.iter().map(|problem| problem.split(',').next().unwrap()).collect();
        assert_eq!(begins[0], "a: depends on b");
        assert_eq!(begins[1], "d: not in the table of rooms in ARCHITECTURE.md");
        assert_eq!(begins[2], "c: in the table of rooms in ARCHITECTURE.md");
    }
}
