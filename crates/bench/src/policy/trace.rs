//! Traces as text: a line with the numbers of pages and of seconds between two looks, and a line for each look. That line has runs of
//! pages that were written: the gap since the run before, and the number of pages if it is not one.
//!
//! ```text
//! pages 4096 seconds 2
//! 0x64 17 3x2
//! ```

use std::fmt::Write;

/// The writes of a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace {
    /// Pages of the program that were watched. They are numbered from 0.
    pub pages: u64,
    /// Seconds between two looks.
    pub look_seconds: u32,
    /// Pages that were written, as ordered runs (first, number), by look.
    pub written: Vec<Vec<(u64, u64)>>,
}

impl Trace {
    /// Reads a trace.
    ///
    /// # Errors
    /// A line is malformed, or names a page that the trace does not have.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut lines = text.lines();
        let head: Vec<&str> = lines.next().unwrap_or_default().split(' ').collect();
        let ["pages", pages, "seconds", seconds] = head[..] else {
            return Err("a trace begins with \"pages N seconds N\"".to_string());
        };
        let number = |text: &str| text.parse::<u64>().map_err(|e| format!("{text:?} is no number of pages: {e}"));
        let pages = number(pages)?;
        let look_seconds = u32::try_from(number(seconds)?).ok().filter(|seconds| (1..=600).contains(seconds));
        let look_seconds = look_seconds.ok_or("looks are 1 to 600 seconds apart")?;
        let look = |line: &str| {
            let (mut at, mut runs) = (0_u64, Vec::new());
            for run in line.split(' ').filter(|run| !run.is_empty()) {
                let (gap, count) = run.split_once('x').unwrap_or((run, "1"));
                let (gap, count) = (number(gap)?, number(count)?);
                let first = at.saturating_add(gap);
                at = first.saturating_add(count);
                if at > pages {
                    return Err(format!("{run:?} is behind the last page"));
                }
                runs.push((first, count));
            }
            Ok(runs)
        };
        Ok(Self { pages, look_seconds, written: lines.map(look).collect::<Result<_, _>>()? })
    }

    /// The trace as text.
    pub fn to_text(&self) -> String {
        let mut text = format!("pages {} seconds {}\n", self.pages, self.look_seconds);
        for look in &self.written {
            let mut end = 0;
            for (n, (first, count)) in look.iter().enumerate() {
                let space = if n == 0 { "" } else { " " };
                let _ = write!(text, "{space}{}", first - end);
                if *count != 1 {
                    let _ = write!(text, "x{count}");
                }
                end = first + count;
            }
            text.push('\n');
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_read_as_it_was_written() {
        let trace = Trace {
            pages: 100,
            look_seconds: 2,
            written: vec![vec![(0, 64), (81, 1), (85, 2)], vec![], vec![(99, 1)]],
        };
        assert_eq!(trace.to_text(), "pages 100 seconds 2\n0x64 17 3x2\n\n99\n");
        assert_eq!(Trace::parse(&trace.to_text()), Ok(trace));
    }

    #[test]
    fn text_that_is_no_trace_is_refused() {
        for text in ["", "pages 10", "pages 10 seconds 0\n", "pages 10 seconds 2\n9x2\n", "pages 10 seconds 2\nx\n"] {
            assert!(Trace::parse(text).is_err(), "{text:?}");
        }
    }
}
