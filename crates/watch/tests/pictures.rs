//! Pictures of captured looks, as terminals of two sizes show them.
//!
//! `frames/two_guests.jsonl` was printed by `pagefold top --raw --interval 4`. The service balanced memory, and folded two tiny
//! guests and a program that writes 4 MiB of its 64 MiB all the time. Pictures are compared with files of `pictures`; with
//! `PAGEFOLD_DRAW=1` these are written anew.

use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::buffer::Buffer;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use ratatui::style::Color;
use std::fs;
use watch::columns::{Item, Level};
use watch::draw::{self, Paint};
use watch::frame::Frame;
use watch::keys::{self, Act};
use watch::look::Look;
use watch::view::{Mode, View};

const CAPTURED: &str = include_str!("frames/two_guests.jsonl");
const PLAIN: Paint = Paint { colour: false };

fn looks() -> [Look; 2] {
    let looks: Vec<Look> = CAPTURED.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    looks.try_into().expect("two looks")
}

fn frame() -> Frame {
    let [before, look] = looks();
    Frame::of(&look, Some(&before))
}

fn drawn(frame: &Frame, view: &mut View, (width, height): (u16, u16), paint: Paint) -> Buffer {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    let draw = |out: &mut ratatui::Frame<'_>| {
        let area = out.area();
        draw::picture(frame, view, area, out.buffer_mut(), paint);
    };
    terminal.draw(draw).unwrap();
    terminal.backend().buffer().clone()
}

/// Takes keys; returns what the last one asks for.
fn press(view: &mut View, frame: &Frame, keys: &[KeyCode]) -> Option<Act> {
    keys.iter().fold(None, |_, code| keys::press(view, frame, KeyEvent::new(*code, KeyModifiers::NONE)))
}

fn typed(text: &str) -> Vec<KeyCode> {
    text.chars().map(KeyCode::Char).collect()
}

/// Asserts that a picture is the one that was saved.
fn assert_saved(name: &str, picture: &str) {
    let path = format!("{}/tests/pictures/{name}.txt", env!("CARGO_MANIFEST_DIR"));
    if std::env::var_os("PAGEFOLD_DRAW").is_some() {
        fs::write(&path, picture).unwrap();
    }
    let saved = fs::read_to_string(&path).unwrap_or_default();
    assert!(saved == picture, "{name} was\n{saved}\nand is\n{picture}");
}

#[test]
fn pictures_of_captured_looks_stay_as_they_were_saved() {
    let frame = frame();
    for size in [(80, 24), (160, 50)] {
        let name = |what: &str| format!("{what}-{}x{}", size.0, size.1);
        let mut view = View::default();
        let steps: [(&str, &[KeyCode]); 8] = [
            ("groups", &[]),
            ("members", &[KeyCode::Enter]),
            ("processes", &[KeyCode::Enter]),
            ("all-processes", &[KeyCode::Esc, KeyCode::Esc, KeyCode::Tab, KeyCode::Tab]),
            ("filter", &[KeyCode::Char('/'), KeyCode::Char('p'), KeyCode::Char('l')]),
            ("help", &[KeyCode::Esc, KeyCode::Char('?')]),
            ("fold", &[KeyCode::Esc, KeyCode::Char('f'), KeyCode::Down, KeyCode::Down]),
            ("confirm", &[KeyCode::Enter]),
        ];
        for (what, keys) in steps {
            press(&mut view, &frame, keys);
            assert_saved(&name(what), &draw::lines(&drawn(&frame, &mut view, size, PLAIN)));
        }
    }
    assert_saved("once", &draw::text(&frame, 120));
}

#[test]
fn only_colour_brings_colours() {
    let is_plain =
        |buffer: &Buffer| buffer.content().iter().all(|cell| cell.fg == Color::Reset && cell.bg == Color::Reset);
    let (frame, mut view) = (frame(), View::default());
    for keys in [&[][..], &[KeyCode::Enter], &[KeyCode::Char('?')]] {
        press(&mut view, &frame, keys);
        assert!(is_plain(&drawn(&frame, &mut view, (80, 24), PLAIN)));
        assert!(!is_plain(&drawn(&frame, &mut view, (80, 24), Paint { colour: true })));
    }
}

#[test]
fn facts_are_those_of_the_answers() {
    let ([before, look], frame) = (looks(), frame());
    let state = &look.services[0].states[0];
    let group = frame.group(&look.services[0].dir, &state.name).unwrap();
    assert_eq!(group.figures.saved_bytes, Some(state.report.savings.saved_bytes()));
    let of_group: Vec<_> = frame.members.iter().filter(|member| member.group == state.name).collect();
    assert!(of_group.len() >= 3 && frame.processes.len() > of_group.len());
    let sum = |of: fn(&watch::frame::Member) -> Option<u64>| of_group.iter().filter_map(|one| of(one)).sum::<u64>();
    assert_eq!(Some(sum(|one| one.figures.anonymous_bytes)), group.figures.anonymous_bytes);
    // Each member's part of the pool is rounded down to whole pages, and agents tell what they fold a moment later.
    let (parts, whole) = (sum(|one| one.figures.proportional_bytes), group.figures.proportional_bytes.unwrap());
    assert!(parts <= whole && whole - parts <= whole / 100, "{parts} {whole}");
    let seconds = (look.at_ms - before.at_ms) as f64 / 1000.0;
    let cpu = |look: &Look| {
        let bill = &look.services[0].states[0].report.bill;
        bill.worker_cpu_s + bill.agent_cpu_s
    };
    let percent = (cpu(&look) - cpu(&before)) / seconds * 100.0;
    assert!((group.figures.cpu_percent.unwrap() - percent).abs() < 0.01);
    assert!(Frame::of(&look, None).groups.iter().all(|group| group.figures.cpu_percent.is_none()));
}

#[test]
fn cursor_follows_its_row_and_comes_back_to_it() {
    let (frame, mut view) = (frame(), View::default());
    let under = |view: &mut View| {
        let rows = view.rows(&frame);
        let at = view.cursor(&rows);
        rows.get(at).map(|item| item.name().to_owned())
    };
    press(&mut view, &frame, &[KeyCode::Enter, KeyCode::Down]);
    let second = under(&mut view);
    assert!(view.level == Level::Members && second.is_some());
    for key in [KeyCode::Char('>'), KeyCode::Char('i'), KeyCode::Char('<')] {
        press(&mut view, &frame, &[key]);
        assert_eq!(under(&mut view), second);
    }
    press(&mut view, &frame, &[KeyCode::Enter]);
    assert!(
        view.rows(&frame).iter().all(|item| matches!(item, Item::Process(p) if Some(&p.member) == second.as_ref()))
    );
    press(&mut view, &frame, &[KeyCode::Esc]);
    assert_eq!(under(&mut view), second);
    let group = view.group.clone().unwrap().1;
    press(&mut view, &frame, &[KeyCode::Esc]);
    assert_eq!((view.level, under(&mut view)), (Level::Groups, Some(group)));
}

#[test]
fn group_changes_only_when_that_is_confirmed() {
    let (frame, mut view) = (frame(), View::default());
    let rate = [&[KeyCode::Char('r')][..], &typed("adaptive:5%"), &[KeyCode::Enter]].concat();
    assert_eq!(press(&mut view, &frame, &rate), None);
    assert!(matches!(view.mode, Mode::Confirm(..)));
    assert_eq!(press(&mut view, &frame, &[KeyCode::Enter]), None);
    assert_eq!(view.mode, Mode::Rows);
    press(&mut view, &frame, &rate);
    let Some(Act::Change(group, change)) = press(&mut view, &frame, &[KeyCode::Char('y')]) else { panic!("{view:?}") };
    let rows = view.rows(&frame);
    assert_eq!((group.1.as_str(), change.scan_rate.is_some(), change.fold), (rows[0].name(), true, None));
    // A rate that is none is not confirmed; the reason is shown.
    press(&mut view, &frame, &[&[KeyCode::Char('r')][..], &typed("fast"), &[KeyCode::Enter]].concat());
    assert!(matches!(&view.mode, Mode::Rate(_, _, Some(why)) if why.contains("use auto")), "{view:?}");
    press(&mut view, &frame, &[KeyCode::Esc, KeyCode::Char('f'), KeyCode::Down, KeyCode::Down, KeyCode::Enter]);
    let Some(Act::Change(_, change)) = press(&mut view, &frame, &[KeyCode::Char('y')]) else { panic!("{view:?}") };
    assert_eq!(change.fold, Some(api::control::Fold::Unfold));
}

#[test]
fn words_of_strangers_are_shown_harmlessly_in_each_view_and_size() {
    let hostile = format!("\u{1b}[2J\0\u{202e}\u{5e9}\u{9b}e\u{301}\r\n{}", "x".repeat(4096));
    let mut look = looks()[1].clone();
    let service = &mut look.services[0];
    service.troubles.push(api::ask::Trouble { trouble: "x".to_owned(), detail: hostile.clone() });
    service.members.iter_mut().for_each(|member| member.domain = Some(hostile.clone()));
    for state in &mut service.states {
        state.report.waits_for_room = Some(hostile.clone());
        for member in &mut state.report.members {
            (member.state, member.detail, member.fix) = (hostile.clone(), hostile.clone(), Some(hostile.clone()));
        }
    }
    service.groups.push(api::ask::GroupLine { name: "silent".to_owned(), ..service.groups[0].clone() });
    service.silent.push(("silent".to_owned(), hostile));
    let (frame, mut view) = (Frame::of(&look, None), View::default());
    assert!(serde_json::to_string(&frame).unwrap().len() < 200_000);
    for keys in [
        &[][..],
        &[KeyCode::Enter],
        &[KeyCode::Enter],
        &[KeyCode::Tab, KeyCode::Char('?')],
        &[KeyCode::Char('x'), KeyCode::Char('f')],
    ] {
        press(&mut view, &frame, keys);
        for size in [(1, 1), (7, 3), (20, 5), (80, 24), (160, 50), (300, 4)] {
            let picture = draw::lines(&drawn(&frame, &mut view, size, PLAIN));
            let steers =
                |c: char| c != '\n' && (c.is_control() || matches!(c, '\u{590}'..='\u{8ff}' | '\u{202e}' | '\u{301}'));
            assert!(!picture.chars().any(steers), "{picture:?}");
            assert!(picture.lines().all(|line| line.chars().count() <= usize::from(size.0)), "{picture}");
        }
    }
    assert!(!draw::text(&frame, 120).chars().any(|c| c != '\n' && c.is_control()));
}

#[test]
fn filter_shows_rows_with_its_text_alone() {
    let (frame, mut view) = (frame(), View::default());
    press(&mut view, &frame, &[KeyCode::Tab]);
    let all = view.rows(&frame).len();
    let wanted = view.rows(&frame)[0].name().to_owned();
    press(&mut view, &frame, &[&[KeyCode::Char('/')][..], &typed(&wanted.to_uppercase()), &[KeyCode::Enter]].concat());
    let rows = view.rows(&frame);
    assert!(rows.len() < all && rows.iter().any(|item| item.name() == wanted), "{rows:?}");
    assert!(rows.iter().all(|item| item.name().contains(&wanted)), "{rows:?}");
    press(&mut view, &frame, &[KeyCode::Esc]);
    assert_eq!(view.rows(&frame).len(), all);
}
