//! Draws terminals as SVG: the screen at the end of a recording, or all of it as it came.
//!
//! The pictures need neither scripts nor fonts of their own, and have a background of their own.

use std::collections::BTreeMap;
use std::fmt::Write;

use avt::{Color, Line, Vt};

use crate::terminal::Recording;

/// Height of a line in pixels.
const LINE: f64 = 18.0;
/// Width of a character in pixels, and the size of the font. Most monospaced fonts have 0.6; `textLength` sees to it.
const CELL: f64 = 8.4;
const FONT: f64 = 14.0;
/// Pixels around the text.
const MARGIN: f64 = 14.0;
/// Height of the title in pixels.
const TITLE: f64 = 30.0;

const BACKGROUND: &str = "#0d1117";
const TEXT: &str = "#d5dce3";
/// The sixteen colours of a terminal, each readable on the background.
const COLOURS: [&str; 16] = [
    "#6e7681", "#ff7b72", "#3fb950", "#d29922", "#58a6ff", "#bc8cff", "#39c5cf", "#b1bac4", "#4d5661", "#ffa198",
    "#56d364", "#e3b341", "#79c0ff", "#d2a8ff", "#56d4dd", "#ffffff",
];

/// A wait of `gap` seconds is shown as `SHORTEST + gap * PACE`, and at most as `LONGEST`, if that is shorter.
const SHORTEST: f64 = 0.1;
const PACE: f64 = 0.06;
const LONGEST: f64 = 1.4;
/// What comes within so many seconds is one frame.
const FRAME: f64 = 0.05;
/// Seconds that the end is shown before it begins anew: long enough to read it.
const REST: f64 = 15.0;
/// Lines that a recording may have in all. It is replayed in a terminal with so many, which does not scroll.
const MOST_LINES: usize = 1000;

/// How cells look.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Style {
    text: &'static str,
    back: Option<&'static str>,
    bold: bool,
    dim: bool,
}

/// Neighbouring cells that look the same.
#[derive(Clone, Debug, PartialEq)]
struct Run {
    column: usize,
    text: String,
    /// In cells.
    width: usize,
    style: Style,
}

/// Draws the screen at the end.
pub fn still(recording: &Recording) -> String {
    let mut terminal = terminal(recording, recording.rows.into());
    recording.events.iter().for_each(|event| drop(terminal.feed_str(&event.text)));
    let mut body = String::new();
    terminal.view().enumerate().for_each(|(row, line)| draw(&runs(line), row, &mut body));
    framed(recording, recording.rows, "", &body)
}

fn terminal(recording: &Recording, rows: usize) -> Vt {
    Vt::builder().size(recording.columns.into(), rows).scrollback_limit(0).build()
}

/// Draws a recording whose lines come one after the other, as it came. The screen moves up with them.
pub fn moving(recording: &Recording) -> String {
    let film = Film::new(recording);
    let all = film.lines.len();
    let mut body = String::new();
    let mut styles = String::new();
    let hidden = |from: f64, to: Option<f64>| {
        let mut frames = vec![(0.0, "visibility:hidden".to_owned()), (from, "visibility:visible".to_owned())];
        frames.extend(to.map(|to| (to, "visibility:hidden".to_owned())));
        frames
    };
    let mut names = 0;
    for (row, versions) in film.lines.iter().enumerate() {
        for (n, (from, runs)) in versions.iter().enumerate().filter(|(_, (_, runs))| !runs.is_empty()) {
            let to = versions.get(n + 1).map(|(to, _)| *to);
            if versions.len() > 1 {
                names += 1;
                film.animate(&format!("v{names}"), hidden(*from, to), &mut styles);
                let rest = if to.is_some() { " visibility=\"hidden\"" } else { "" };
                let _ = write!(body, "<g class=\"v{names}\"{rest}>");
            }
            draw(runs, row, &mut body);
            body += if versions.len() > 1 { "</g>\n" } else { "" };
        }
    }
    let up = |lines: usize| lines.saturating_sub(recording.rows.into()) as f64 * LINE;
    let moved = |y: f64| format!("transform:translateY({}px)", short(y));
    let scroll = film.frames.iter().map(|(at, lines)| (*at, moved(-up(*lines)))).collect();
    film.animate("s", scroll, &mut styles);
    // What is not there yet is covered. At the end nothing is.
    let cover = film.frames.iter().map(|(at, lines)| (*at, moved(-((all - lines) as f64) * LINE))).collect();
    film.animate("c", cover, &mut styles);
    let (end, height) = (all as f64 * LINE, (all + usize::from(recording.rows)) as f64 * LINE);
    let body = format!(
        "<g class=\"s\" transform=\"translate(0 {})\">\n{body}\
         <rect class=\"c\" x=\"-2\" y=\"{end}\" width=\"100%\" height=\"{height}\" fill=\"{BACKGROUND}\"/>\n</g>\n",
        short(-up(all))
    );
    styles += "@media(prefers-reduced-motion:reduce){*{animation:none!important}}\n";
    framed(recording, recording.rows, &styles, &body)
}

/// A line: from when on it was what.
type Versions = Vec<(f64, Vec<Run>)>;

/// A recording whose lines stay where they are.
struct Film {
    /// When it ends, with the rest.
    seconds: f64,
    /// When there were how many lines.
    frames: Vec<(f64, usize)>,
    lines: Vec<Versions>,
}

impl Film {
    fn new(recording: &Recording) -> Self {
        let mut terminal = terminal(recording, MOST_LINES);
        let (mut frames, mut lines) = (vec![(0.0, 0)], Vec::<Versions>::new());
        let (mut at, mut before) = (0.0, 0.0);
        let mut events = recording.events.iter().peekable();
        while let Some(event) = events.next() {
            at += pace(event.at - before);
            before = event.at;
            terminal.feed_str(&event.text);
            if events.peek().is_some_and(|next| next.at - before < FRAME) {
                continue;
            }
            let shown = terminal.cursor().row + 1;
            lines.resize(lines.len().max(shown), Vec::new());
            for (versions, line) in lines.iter_mut().zip(terminal.view()) {
                let now = runs(line);
                if versions.last().is_none_or(|(_, last)| *last != now) {
                    versions.push((at, now));
                }
            }
            if frames.last().is_none_or(|(_, last)| *last != shown) {
                frames.push((at, shown));
            }
        }
        for versions in &mut lines {
            // An empty line is one that was not written to yet.
            if versions.len() > 1 && versions[0].1.is_empty() {
                versions.remove(0);
            }
        }
        Self { seconds: at + REST, frames, lines }
    }

    /// Adds the animation of a class: from each time on, this declaration holds.
    fn animate(&self, class: &str, frames: Vec<(f64, String)>, styles: &mut String) {
        let by_time: BTreeMap<u64, String> =
            frames.into_iter().map(|(at, what)| ((at / self.seconds * 1e4).round() as u64, what)).collect();
        let _ = write!(
            styles,
            ".{class}{{animation:{class} {}s step-end infinite}}@keyframes {class}{{",
            short(self.seconds)
        );
        for (at, what) in by_time {
            let _ = write!(styles, "{}%{{{what}}}", short(at as f64 / 100.0));
        }
        styles.push_str("}\n");
    }
}

/// How long a wait is shown.
fn pace(gap: f64) -> f64 {
    gap.min((SHORTEST + gap * PACE).min(LONGEST))
}

/// A line's cells. Blank ones at its end are left out.
fn runs(line: &Line) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for (column, cell) in line.cells().iter().enumerate().filter(|(_, cell)| cell.width() > 0) {
        let pen = cell.pen();
        let (mut text, mut back) = (pen.foreground().map_or(TEXT, colour), pen.background().map(colour));
        if pen.is_inverse() {
            (text, back) = (back.unwrap_or(BACKGROUND), Some(text));
        }
        let style = Style { text, back, bold: pen.is_bold(), dim: pen.is_faint() };
        match runs.last_mut() {
            Some(last) if last.style == style => {
                last.text.push(cell.char());
                last.width += usize::from(cell.width());
            }
            _ => runs.push(Run { column, text: cell.char().into(), width: cell.width().into(), style }),
        }
    }
    while runs.last().is_some_and(|run| run.style.back.is_none() && run.text.trim_end().is_empty()) {
        runs.pop();
    }
    runs
}

fn draw(runs: &[Run], row: usize, body: &mut String) {
    let top = row as f64 * LINE;
    for run in runs {
        let x = run.column as f64 * CELL;
        if let Some(fill) = run.style.back {
            let (x, width) = (short(x), short(run.width as f64 * CELL));
            let _ = write!(
                body,
                "<rect x=\"{x}\" y=\"{}\" width=\"{width}\" height=\"{LINE}\" fill=\"{fill}\"/>",
                short(top)
            );
        }
        draw_text(run, top, body);
        draw_shapes(run, top, body);
    }
    if !runs.is_empty() {
        body.push('\n');
    }
}

/// Words, each where it belongs even if the font has another width.
fn draw_text(run: &Run, top: f64, body: &mut String) {
    let letter = |c: char| !is_shape(c);
    let cells: Vec<char> = run.text.chars().collect();
    let mut at = 0;
    while at < cells.len() {
        if cells[at] == ' ' || !letter(cells[at]) {
            at += 1;
            continue;
        }
        // Up to two spaces or a shape.
        let ends = |n: usize| {
            !letter(cells[n]) || cells[n] == ' ' && cells.get(n + 1).is_none_or(|c| *c == ' ' || !letter(*c))
        };
        let end = (at..cells.len()).find(|n| ends(*n)).unwrap_or(cells.len());
        let text: String = cells[at..end].iter().map(|c| escaped(*c)).collect();
        let x = short((run.column + at) as f64 * CELL);
        let (y, length) = (short(top + 13.5), short((end - at) as f64 * CELL));
        let _ = write!(body, "<text x=\"{x}\" y=\"{y}\" textLength=\"{length}\"{}>{text}</text>", look(&run.style));
        at = end;
    }
}

fn look(style: &Style) -> String {
    let mut look = String::new();
    if style.text != TEXT {
        look += &format!(" fill=\"{}\"", style.text);
    }
    if style.bold {
        look += " font-weight=\"bold\"";
    }
    if style.dim {
        look += " opacity=\".7\"";
    }
    look
}

fn escaped(c: char) -> String {
    match c {
        '&' => "&amp;".into(),
        '<' => "&lt;".into(),
        '>' => "&gt;".into(),
        c => c.into(),
    }
}

/// Lines and blocks, which fonts draw in different heights and with gaps.
const fn is_shape(c: char) -> bool {
    matches!(c, '─' | '│' | '╭' | '╮' | '╰' | '╯' | '▁'..='█')
}

fn draw_shapes(run: &Run, top: f64, body: &mut String) {
    let fill = run.style.text;
    let cells: Vec<char> = run.text.chars().collect();
    let (mut path, mut at) = (String::new(), 0);
    while at < cells.len() {
        let same = cells[at..].iter().take_while(|c| **c == cells[at]).count();
        let left = (run.column + at) as f64 * CELL;
        let (right, middle) = (left + same as f64 * CELL, left + CELL / 2.0);
        let (half, bottom, round) = (top + LINE / 2.0, top + LINE, CELL / 2.0);
        let mut count = same;
        match cells[at] {
            '─' => path += &format!("M{} {}H{}", short(left), short(half), short(right)),
            '▁'..='█' => {
                let height = f64::from(u32::from(cells[at]) - 0x2580) / 8.0 * LINE;
                let (x, y) = (short(left), short(bottom - height));
                let (width, height) = (short(right - left), short(height));
                let _ =
                    write!(body, "<rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" fill=\"{fill}\"/>");
            }
            single => {
                count = 1;
                let (l, m, r) = (short(left), short(middle), short(left + CELL));
                let (t, h, b) = (short(top), short(half), short(bottom));
                path += &match single {
                    '│' => format!("M{m} {t}V{b}"),
                    '╭' => format!("M{m} {b}V{}Q{m} {h} {r} {h}", short(half + round)),
                    '╮' => format!("M{m} {b}V{}Q{m} {h} {l} {h}", short(half + round)),
                    '╰' => format!("M{m} {t}V{}Q{m} {h} {r} {h}", short(half - round)),
                    '╯' => format!("M{m} {t}V{}Q{m} {h} {l} {h}", short(half - round)),
                    _ => String::new(),
                };
            }
        }
        at += count;
    }
    if !path.is_empty() {
        let _ = write!(body, "<path d=\"{path}\" fill=\"none\" stroke=\"{fill}\"/>");
    }
}

/// Of the others our programs use none.
fn colour(colour: Color) -> &'static str {
    match colour {
        Color::Indexed(n) => COLOURS.get(usize::from(n)).copied().unwrap_or(TEXT),
        Color::RGB(_) => TEXT,
    }
}

/// At most two decimals.
fn short(value: f64) -> String {
    let rounded = (value * 100.0).round() / 100.0;
    // Not -0.
    format!("{}", rounded + 0.0)
}

/// The picture of a terminal with so many rows and what is on it.
fn framed(recording: &Recording, rows: u16, styles: &str, body: &str) -> String {
    let (width, height) = (f64::from(recording.columns) * CELL, f64::from(rows) * LINE);
    let (all, high) = (short(width + 2.0 * MARGIN), short(height + TITLE + 2.0 * MARGIN));
    let title: String = recording.title.chars().map(escaped).collect();
    let (middle, below) = (short(width / 2.0 + MARGIN), TITLE + MARGIN);
    let (width, height) = (short(width), short(height));
    // The border is for pages that are as dark.
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {all} {high}\" width=\"{all}\" height=\"{high}\"\
         \x20role=\"img\">\n\
         <title>{title}</title>\n\
         <style>text{{font-family:ui-monospace,'DejaVu Sans Mono',Menlo,Consolas,monospace;font-size:{FONT}px;\
         white-space:pre}}\n{styles}</style>\n\
         <rect x=\".5\" y=\".5\" width=\"{}\" height=\"{}\" rx=\"8\" fill=\"{BACKGROUND}\" stroke=\"#59636e\"/>\n\
         <text x=\"{middle}\" y=\"20\" text-anchor=\"middle\" fill=\"#9198a1\">{title}</text>\n\
         <path d=\"M1 {TITLE}H{}\" stroke=\"#30363d\"/>\n\
         <svg x=\"{MARGIN}\" y=\"{below}\" width=\"{width}\" height=\"{height}\" fill=\"{TEXT}\">\n\
         {body}</svg>\n</svg>\n",
        short(f64::from(recording.columns) * CELL + 2.0 * MARGIN - 1.0),
        short(f64::from(rows) * LINE + TITLE + 2.0 * MARGIN - 1.0),
        short(f64::from(recording.columns) * CELL + 2.0 * MARGIN - 1.0),
    )
}
