//! The report as a whole: well-formed, safe against hostile names, bounded, and complete.

use super::sample;

use census::{Findings, MapCell, Share};
use guest::Footprint;
use page::Region;
use report::html::{self, Report};
use roxmltree::{Document, Node, ParsingOptions};
use std::time::Duration;

/// Name that would run a script, close its element, load something, or reorder the line, if it were not escaped.
const HOSTILE: &str =
    "<script>alert(1)</script>\"'><img src=http://evil.example/x onerror=alert(2)>&amp;\u{202e}\u{1b}[2J";

fn render(findings: &Findings, footprints: &[Footprint]) -> String {
    let mut out = Vec::new();
    let report = Report { findings, footprints, title: "A census", made_at: "now & here" };
    html::write(&mut out, &report).unwrap();
    String::from_utf8(out).unwrap()
}

fn parse(html: &str) -> Document<'_> {
    let options = ParsingOptions { allow_dtd: true, ..ParsingOptions::default() };
    Document::parse_with_options(html, options).unwrap_or_else(|e| panic!("not well-formed: {e}"))
}

fn elements<'a>(document: &'a Document<'a>, name: &'static str) -> impl Iterator<Item = Node<'a, 'a>> {
    document.descendants().filter(move |node| node.has_tag_name(name))
}

/// Everything that a reader sees, blanks joined.
fn text_of(node: Node<'_, '_>) -> String {
    let text: Vec<_> = node.descendants().filter(Node::is_text).filter_map(|n| n.text()).collect();
    text.join(" ").split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn host_that_was_not_counted_is_not_shown_as_zero() {
    let mut findings = sample::findings(2);
    findings.host.host_resident_pages = None;
    findings.opportunity.host = None;
    findings.guests.iter_mut().for_each(|guest| guest.duplicates.host = None);
    let html = render(&findings, &sample::footprints(&findings));
    let document = parse(&html);
    let row = |name: &str| {
        let row = elements(&document, "tr").find(|row| text_of(*row).starts_with(name));
        text_of(row.unwrap_or_else(|| panic!("no row {name}")))
    };
    assert_eq!(row("guest and host"), "guest and host not counted");
    assert!(row("acme-1 acme qemu").contains(" \u{2013} "), "{}", row("acme-1 acme qemu"));
    assert!(text_of(document.root()).contains("own memory not counted"));
}

#[test]
fn a_report_is_well_formed_and_asks_for_nothing_from_outside() {
    let findings = sample::with_change_and_partial(sample::findings(2));
    let html = render(&findings, &sample::footprints(&findings));
    let document = parse(&html);
    for node in document.descendants().filter(Node::is_element) {
        for attribute in node.attributes() {
            let (name, value) = (attribute.name(), attribute.value());
            assert!(!name.starts_with("on"), "{name} would be a script");
            assert!(!matches!(name, "src" | "srcset" | "action" | "data" | "style"), "{name}={value}");
            assert!(name != "href" || value.starts_with('#'), "a link leaves the page: {value}");
        }
        assert!(!matches!(node.tag_name().name(), "link" | "img" | "iframe" | "object" | "base" | "use"));
    }
    assert!(!html.contains("://"), "an address of something outside");
    assert!(!html.contains("@import"));
    assert!(html.match_indices("url(").all(|(at, _)| html[at..].starts_with("url(#")));
    for link in elements(&document, "a") {
        let target = link.attribute("href").unwrap().trim_start_matches('#');
        assert!(document.descendants().any(|n| n.attribute("id") == Some(target)), "#{target} leads nowhere");
    }
}

#[test]
fn hostile_names_stay_text() {
    let mut findings = sample::with_change_and_partial(sample::findings(2));
    findings.guests[0].name = HOSTILE.into();
    findings.guests[0].group = HOSTILE.into();
    findings.guests[0].kind = HOSTILE.into();
    findings.groups[0].name = HOSTILE.into();
    findings.partial[0].guest = HOSTILE.into();
    findings.partial[0].reason = HOSTILE.into();
    let mut footprints = sample::footprints(&findings);
    footprints[0].guest.name = HOSTILE.into();
    footprints[0].guest.group = HOSTILE.into();
    let mut out = Vec::new();
    let report = Report { findings: &findings, footprints: &footprints, title: HOSTILE, made_at: HOSTILE };
    html::write(&mut out, &report).unwrap();
    let html = String::from_utf8(out).unwrap();
    let document = parse(&html);
    assert_eq!(elements(&document, "script").count(), 1, "only our own");
    assert_eq!(elements(&document, "img").count(), 0);
    assert!(document.descendants().flat_map(|n| n.attributes()).all(|a| !a.name().starts_with("on")));
    let shown = HOSTILE.replace(['\u{202e}', '\u{1b}'], "?");
    let whole = text_of(document.root());
    assert!(whole.matches(&shown).count() >= 10, "names are shown as they are, but for what steers a terminal");
    assert!(!html.contains(['\u{202e}', '\u{1b}']));
}

#[test]
fn headline_equals_findings() {
    let findings = sample::findings(2);
    let html = render(&findings, &[]);
    let document = parse(&html);
    let tiles = elements(&document, "dl").find(|n| n.attribute("class") == Some("tiles")).unwrap();
    let figures: Vec<_> =
        tiles.descendants().filter(|n| n.attribute("class") == Some("big")).map(|n| text_of(n)).collect();
    let pages = |n: u64| cli::bytes(n << 12);
    let resident: u64 = findings.guests.iter().map(|g| g.resident_pages).sum();
    let groups: u64 = findings.groups.iter().map(|g| g.saved_pages).sum();
    assert_eq!(
        figures,
        [
            pages(resident - findings.already_shared.saved_pages),
            pages(findings.opportunity.total.total),
            pages(groups + findings.across_groups_saved_pages),
            pages(findings.isolation_price_pages),
        ]
    );
}

/// A reader who cannot see a picture reads a description of it.
#[test]
fn every_picture_has_words_or_is_an_ornament() {
    let findings = sample::findings(2);
    let html = render(&findings, &sample::footprints(&findings));
    let document = parse(&html);
    for picture in elements(&document, "svg") {
        let told = picture.attribute("role") == Some("img") && picture.attribute("aria-label").is_some();
        assert!(told || picture.attribute("aria-hidden") == Some("true"));
    }
    let bars = elements(&document, "svg").filter_map(|n| n.attribute("aria-label")).collect::<Vec<_>>();
    assert!(bars.iter().any(|label| label.starts_with("acme-1: guest RAM 2")), "{bars:?}");
}

/// A colour class that the style sheet lacks would be drawn black.
#[test]
fn every_colour_class_is_in_the_style_sheet_and_the_script_knows_the_key() {
    let findings = sample::findings(2);
    let html = render(&findings, &sample::footprints(&findings));
    let document = parse(&html);
    let style = elements(&document, "style").next().unwrap().text().unwrap();
    let classes = elements(&document, "rect").chain(elements(&document, "path")).chain(elements(&document, "td"));
    for class in classes.filter_map(|n| n.attribute("class")).flat_map(str::split_whitespace) {
        assert!(style.contains(&format!(".{class} ")), "{class}");
    }
    let script = elements(&document, "script").next().unwrap().text().unwrap();
    let meanings = script.split("MEANINGS = [").nth(1).unwrap().split(']').next().unwrap();
    let meanings: Vec<_> = meanings.split('"').skip(1).step_by(2).collect();
    let map = elements(&document, "section").find(|n| n.attribute("id") == Some("maps")).unwrap();
    let legend: Vec<_> = map.descendants().filter(|n| n.has_tag_name("li")).map(text_of).collect();
    assert_eq!(legend, meanings);
    assert!(script.contains("const COLUMNS = 128;") && html.contains("viewBox=\"0 0 128 "));
}

/// The page map shows each page of the findings once.
#[test]
fn the_maps_hold_all_pages() {
    let findings = sample::findings(3);
    let html = render(&findings, &[]);
    let document = parse(&html);
    let (mut shown, mut last) = ([0u64; 7], String::new());
    for map in elements(&document, "svg").filter_map(|n| n.attribute("data-cells")) {
        for cell in map.split(' ') {
            if !cell.is_empty() {
                last = cell.to_owned();
            }
            let mut rest = last.as_str();
            while let Some(letter) = rest.chars().next() {
                let end = rest[1..].find(char::is_alphabetic).map_or(rest.len(), |n| n + 1);
                shown[letter as usize - 'a' as usize] += rest[1..end].parse::<u64>().unwrap();
                rest = &rest[end..];
            }
        }
    }
    let held = findings.guests.iter().flat_map(|g| &g.page_map);
    let held = held.fold([0u64; 7], |sum, cell| std::array::from_fn(|n| sum[n] + u64::from(cell.pages[n])));
    assert_eq!(shown, held);
}

#[test]
fn empty_census_makes_a_report() {
    let html = render(&Findings::default(), &[]);
    let document = parse(&html);
    let body = text_of(elements(&document, "main").next().unwrap());
    assert!(body.contains("held by 0 guests") && body.contains("nothing to merge"), "{body}");
    assert!(!body.contains("NaN") && !body.contains("inf"), "{body}");
    assert_eq!(elements(&document, "table").count(), 1, "no table without rows but the opportunity");
}

/// The findings have a map of empty cells for a guest whose pages could not be read.
#[test]
fn a_guest_without_pages_has_no_map() {
    let mut findings = sample::findings(2);
    findings.guests[0].page_map.fill(MapCell::default());
    let html = render(&findings, &[]);
    let document = parse(&html);
    assert_eq!(elements(&document, "h3").count(), findings.guests.len() - 1);
}

/// The worst case of a map: no square is like its neighbour.
fn restless(findings: &mut Findings, cells: u32) {
    for guest in &mut findings.guests {
        let cell = |n: u32| MapCell {
            pages: std::array::from_fn(|share| {
                (n * 7 + share as u32 * 13) % 31 + u32::from(n as usize % 7 == share) * 40
            }),
            region: Some(if n % 50 < 45 { Region::GuestRam } else { Region::Heap }),
        };
        guest.page_map = (0..cells).map(cell).collect();
    }
}

#[test]
fn eight_guests_take_less_than_two_mebibytes() {
    let mut findings = sample::findings(4);
    findings.guests.truncate(8);
    restless(&mut findings, 65_536);
    let html = render(&findings, &sample::footprints(&findings));
    parse(&html);
    assert!(html.len() < 2 << 20, "{} bytes", html.len());
}

#[test]
fn two_hundred_guests_are_listed_and_later_pictures_folded_away() {
    let mut findings = sample::findings(100);
    restless(&mut findings, 4096);
    let html = render(&findings, &sample::footprints(&findings));
    let document = parse(&html);
    assert!(html.len() < 4 << 20, "{} bytes", html.len());
    let maps = elements(&document, "section").find(|n| n.attribute("id") == Some("maps")).unwrap();
    let of = |node: Node<'_, '_>| node.descendants().filter(|n| n.has_tag_name("h3")).count();
    assert_eq!(of(maps), findings.guests.len());
    let folded = maps.descendants().find(|n| n.has_tag_name("details")).unwrap();
    assert_eq!(of(folded), findings.guests.len() - 24);
}

#[test]
fn a_thousand_guests_are_rendered_within_a_second() {
    let findings = sample::findings(500);
    let footprints = sample::footprints(&findings);
    let taken = || {
        let started = processor_time();
        let html = render(&findings, &footprints);
        let mut table = Vec::new();
        report::census_table::write(&mut table, &findings).unwrap();
        let taken = processor_time() - started;
        assert!(findings.guests.len() > 1000 && html.len() > 1 << 20 && table.len() > 100_000);
        taken
    };
    // A processor that another program heats or shares is slower: the best of some counts.
    let late: Vec<_> = (0..5).map(|_| taken()).take_while(|taken| *taken >= Duration::from_secs(1)).collect();
    assert!(late.len() < 5, "{late:?}");
}

/// Time for which this thread has had a processor.
fn processor_time() -> Duration {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").expect("read it");
    Duration::from_nanos(stat.split(' ').next().and_then(|ns| ns.parse().ok()).expect("nanoseconds"))
}

/// The sample must keep its claims, or the tests above prove little.
#[test]
fn the_sample_agrees_with_itself() {
    let findings = sample::findings(2);
    let groups: u64 = findings.groups.iter().map(|g| g.saved_pages).sum();
    assert_eq!(findings.all_saved_pages, groups + findings.across_groups_saved_pages + findings.isolation_price_pages);
    for guest in &findings.guests {
        let mapped: u32 = guest.page_map.iter().flat_map(|cell| cell.pages).sum();
        assert_eq!(u64::from(mapped), guest.resident_pages);
    }
    assert_eq!(Share::ALL.len(), 7);
}
