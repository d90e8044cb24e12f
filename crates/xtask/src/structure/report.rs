//! The structure as text for people.

use std::fmt;

use super::Structure;

impl fmt::Display for Structure {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        self.rooms(f)?;
        if !self.cycles_of_files.is_empty() {
            writeln!(f, "\nFiles that name each other:")?;
        }
        for cycle in &self.cycles_of_files {
            writeln!(f, "  {}: {}", cycle.room, cycle.files.join(", "))?;
        }
        if self.problems.is_empty() {
            return writeln!(f, "\nThe structure is as it should be.");
        }
        writeln!(f, "\nTo be mended:")?;
        self.problems.iter().try_for_each(|problem| writeln!(f, "  {problem}"))
    }
}

impl Structure {
    fn rooms(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let total: usize = self.rooms.iter().map(|room| room.lines).sum();
        writeln!(f, "{:<12}{:>8}{:>7}  depends on", "room", "lines", "share")?;
        for room in &self.rooms {
            let percent = 100.0 * room.lines as f64 / total.max(1) as f64;
            let mut uses = room.depends_on.join(", ");
            if !room.dev_depends_on.is_empty() {
                uses += &format!(" (tests: {})", room.dev_depends_on.join(", "));
            }
            writeln!(f, "{}", format!("{:<12}{:>8}{percent:>6.1}%  {uses}", room.name, room.lines).trim_end())?;
        }
        writeln!(f, "{:<12}{total:>8}", "all")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::structure::Room;

    #[test]
    fn text_shows_rooms_and_problems() {
        let room = Room { name: "host".into(), lines: 3, depends_on: vec!["page".into()], ..Room::default() };
        let structure = Structure { rooms: vec![room], problems: vec!["x".into()], ..Structure::default() };
        let text = structure.to_string();
        assert!(text.contains("\nhost               3 100.0%  page\n"), "{text}");
        assert!(text.ends_with("To be mended:\n  x\n"), "{text}");
    }
}
