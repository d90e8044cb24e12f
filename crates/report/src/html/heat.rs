//! The opportunity table as a heat map: the more superfluous copies, the darker the cell.

use super::text::Text;
use crate::words;
use census::{ByKinds, Findings};
use cli::size::mib;
use page::pages_to_bytes;
use std::io::{self, Write};

/// Number of shades above "nothing"; the style sheet has one class for each.
const SHADES: u64 = 6;

/// Writes the table of superfluous copies: a row for each place, a column for each pair of kinds, and totals.
pub fn write(out: &mut dyn Write, findings: &Findings) -> io::Result<()> {
    let o = &findings.opportunity;
    writeln!(
        out,
        "<section id=\"opportunity\"><h2>Opportunity</h2><p>Copies that are superfluous, by where the same bytes are held and by what \
         kind of memory holds them. Each copy counts once. Merging as the kernel does it reaches only \
         what is <b>anonymous on both sides</b>.</p><figure><div class=\"wide\" role=\"region\" tabindex=\"0\" \
         aria-label=\"Opportunity\"><table class=\"heat\"><caption>Superfluous copies in MiB</caption><thead><tr>\
         <td></td><th scope=\"col\">both anonymous</th><th scope=\"col\">both file</th>\
         <th scope=\"col\">one of each</th><th scope=\"col\">total</th></tr></thead><tbody>"
    )?;
    let places = [("within a guest", Some(o.within)), ("guest and host", o.host), ("between guests", Some(o.between))];
    let most = places.iter().filter_map(|(_, k)| k.as_ref()).flat_map(kinds).max().unwrap_or(0);
    for (place, pages) in places {
        write!(out, "<tr><th scope=\"row\">{place}</th>")?;
        let Some(pages) = pages else {
            writeln!(out, "<td colspan=\"4\">not counted</td></tr>")?;
            continue;
        };
        for n in kinds(&pages) {
            write!(out, "<td class=\"h{}\">{}</td>", shade(n, most), size(n))?;
        }
        writeln!(out, "<td class=\"sum\">{}</td></tr>", size(pages.total))?;
    }
    write!(out, "<tr class=\"sum\"><th scope=\"row\">total</th>")?;
    for n in kinds(&o.total) {
        write!(out, "<td class=\"sum\">{}</td>", size(n))?;
    }
    writeln!(out, "<td class=\"sum\">{}</td></tr></tbody></table></div></figure>", size(o.total.total))?;
    writeln!(out, "<p>{} The table leaves it out.</p></section>", Text(&words::already_shared(findings)))
}

fn kinds(pages: &ByKinds) -> [u64; 3] {
    [pages.anon_anon, pages.file_file, pages.anon_file]
}

/// The shade of a cell: 0 for nothing, [`SHADES`] for the most. A cell with any pages has a shade of at least 1.
fn shade(pages: u64, most: u64) -> u64 {
    if pages == 0 || most == 0 { 0 } else { (pages as f64 / most as f64 * SHADES as f64).ceil() as u64 }
}

fn size(pages: u64) -> String {
    Text(&mib(pages_to_bytes(pages))).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shades_run_from_nothing_to_the_most() {
        assert_eq!([0, 1, 50, 51, 100].map(|n| shade(n, 100)), [0, 1, 3, 4, SHADES]);
        assert_eq!(shade(0, 0), 0);
    }
}
