//! Shows the picture in the terminal and handles keys, while another thread asks the services.

use crate::draw::{self, Paint};
use crate::frame::Frame;
use crate::keys::{self, Act};
use crate::look::{self, Look};
use crate::plain::{MOST_TEXT, harmless};
use crate::view::{GroupKey, View};
use anyhow::Context;
use api::change::Change;
use api::place::Meant;
use cli::exit::in_words;
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyEventKind};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

/// Shortest time between two rounds of questions to the services: 200 ms.
pub const LEAST_INTERVAL: Duration = Duration::from_millis(200);
/// Longest wait for a key, after which new answers are shown: 200 ms.
const WAIT: Duration = Duration::from_millis(200);

/// A message of the thread that asks the services.
enum Answer {
    /// The facts, or why there are none.
    Frame(anyhow::Result<Frame>),
    /// The outcome of a change, in words.
    Changed(String),
}

type Wanted = (GroupKey, Change);

/// Asks the services again and again, with `every` in between, and has them make the changes that are `wanted`. It ends
/// when the receiver of its messages is gone.
fn ask(meant: &Meant, every: Duration, wanted: &Receiver<Wanted>, tell: &Sender<Answer>) {
    let began = Instant::now();
    let mut before: Option<Look> = None;
    loop {
        let due = Instant::now() + every.max(LEAST_INTERVAL);
        let look = Look::take(meant, began);
        let frame = look.as_ref().map(|look| Frame::of(look, before.as_ref()));
        if tell.send(Answer::Frame(frame.map_err(|e| anyhow::anyhow!(in_words(e))))).is_err() {
            return;
        }
        before = look.ok().or(before);
        match wanted.recv_timeout(due.saturating_duration_since(Instant::now())) {
            Ok(((service, group), change)) => {
                let done = look::change(&service, &group, change);
                let words = done.map_or_else(
                    |e| format!("group {group} was not changed: {}", in_words(&e)),
                    |_| format!("group {group} is changed"),
                );
                _ = tell.send(Answer::Changed(harmless(&words, MOST_TEXT)));
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

/// Shows the picture until the user quits.
///
/// # Errors
/// No service answers at first, or the terminal cannot be used.
pub fn run(meant: &Meant, every: Duration, paint: Paint) -> anyhow::Result<()> {
    let ((want, wanted), (tell, answers)) = (channel(), channel());
    let meant = meant.clone();
    std::thread::Builder::new()
        .name("look".to_owned())
        .spawn(move || ask(&meant, every, &wanted, &tell))
        .context("cannot start a thread")?;
    // The first answer is awaited before the terminal is switched to full screen, so that an error can still be read
    // afterwards.
    let Answer::Frame(first) = answers.recv().context("the thread that asks has ended")? else {
        anyhow::bail!("the thread that asks answers what was not asked");
    };
    let first = first?;
    host::note_interrupts().context("cannot take signals")?;
    let mut terminal = ratatui::try_init().context("cannot use the terminal")?;
    let shown = show(&mut terminal, first, &want, &answers, paint);
    ratatui::try_restore().context("cannot give the terminal back")?;
    shown
}

fn show(
    terminal: &mut DefaultTerminal,
    mut frame: Frame,
    want: &Sender<Wanted>,
    answers: &Receiver<Answer>,
    paint: Paint,
) -> anyhow::Result<()> {
    let mut view = View::default();
    let mut is_changed = true;
    while host::interrupted().is_none() {
        if std::mem::take(&mut is_changed) {
            let draw = |out: &mut ratatui::Frame<'_>| {
                let area = out.area();
                draw::picture(&frame, &mut view, area, out.buffer_mut(), paint);
            };
            terminal.draw(draw).context("cannot write to the terminal")?;
        }
        // A signal interrupts the wait; the loop then ends.
        if event::poll(WAIT).unwrap_or(false) {
            match event::read().context("cannot read from the terminal")? {
                Event::Key(key) if key.kind != KeyEventKind::Release => match keys::press(&mut view, &frame, key) {
                    Some(Act::Quit) => break,
                    Some(Act::Change(group, change)) => want.send((group, change)).context("cannot ask")?,
                    None => {}
                },
                _ => {}
            }
            is_changed = true;
        }
        for answer in answers.try_iter() {
            is_changed |= take(answer, &mut frame, &mut view);
        }
    }
    Ok(())
}

/// Handles a message of the thread that asks. Returns whether the picture has to be drawn anew.
fn take(answer: Answer, frame: &mut Frame, view: &mut View) -> bool {
    match answer {
        Answer::Frame(_) if view.paused => return false,
        Answer::Frame(Ok(new)) => *frame = new,
        Answer::Frame(Err(e)) => {
            let since = frame.unix_s % 86_400;
            let since = format!("{:02}:{:02}:{:02}", since / 3600, since / 60 % 60, since % 60);
            view.said = Some(harmless(&format!("no answer since {since}: {}", in_words(&e)), MOST_TEXT));
        }
        Answer::Changed(words) => view.said = Some(words),
    }
    true
}
