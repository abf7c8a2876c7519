//! Draws each guest table of `benchmarks.md`: one panel per job, one bar per contender, one legend.
//!
//! The figures are read from the document, so a plot and its table always agree.

use std::fs;
use std::path::Path;

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::host::Result;
use crate::plan::{TABLES, Table};
use thruway_bench::series::number;

/// Width of a figure in pixels. A page shows it at about 900, where the smallest text is still readable.
const WIDTH: u32 = 1080;
/// Width of a figure with one panel: room for its title and for five names in one line of the legend.
const NARROW: u32 = 760;
/// Height of a panel in pixels: two lines of title above bars that are high enough to compare.
const PANEL_HEIGHT: u32 = 236;
/// Width of the axis and its labels in pixels: the [`MARGIN`] and seven characters of [`SMALL`].
const AXIS: u32 = 68;
/// Pixels around a figure and between panels.
const MARGIN: i32 = 14;
/// Font size of the title, in pixels.
const LARGE: i32 = 18;
/// Font size of the legend and of the panels' titles.
const MEDIUM: i32 = 14;
/// Font size of figures, units and labels.
const SMALL: i32 = 12;
/// Width of a bar, where bars are 1 apart.
const BAR: f64 = 0.74;
/// Side of a colour's square in the legend, in pixels.
const SQUARE: i32 = 14;

/// Each contender has one colour in all plots. virtiofsd's settings are shades of grey. The other colours are distinct
/// for colour-blind readers too (Okabe and Ito, Color Universal Design).
const COLOURS: [(&str, RGBColor); 14] = [
    ("virtiofsd", RGBColor(140, 140, 140)),
    ("virtiofsd, pool 0", RGBColor(176, 176, 176)),
    ("virtiofsd, pool 4", RGBColor(104, 104, 104)),
    ("virtiofsd, logging", RGBColor(204, 204, 204)),
    ("virtiofsd --writeback", RGBColor(72, 72, 72)),
    ("thruwayd", RGBColor(0, 114, 178)),
    ("thruwayd --writeback", RGBColor(86, 180, 233)),
    ("thruwayd, DAX", RGBColor(0, 158, 115)),
    ("thruwayd, passthrough", RGBColor(230, 159, 0)),
    ("thruwayd, passthrough, --xattr", RGBColor(213, 94, 0)),
    ("thruwayd, agent", RGBColor(0, 60, 60)),
    ("thruwayd, agent, --cache=always", RGBColor(240, 228, 66)),
    ("tmpfs", RGBColor(204, 121, 167)),
    ("ext4, RAM disk", RGBColor(120, 72, 40)),
];

/// The units in the tables, and how to read their figures.
const UNITS: [(&str, &str); 5] = [
    ("IOPS", "more is better"),
    ("ops/s", "more is better"),
    ("µs", "less is better"),
    ("ms", "less is better"),
    ("s", "less is better"),
];

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn = std::result::Result<(), Box<dyn std::error::Error>>;

/// What is drawn of one table.
#[derive(Debug, PartialEq)]
struct Figure {
    title: String,
    contenders: Vec<String>,
    panels: Vec<Panel>,
}

/// One row of the table.
#[derive(Debug, PartialEq)]
struct Panel {
    title: String,
    unit: String,
    /// In the order of the contenders.
    bars: Vec<Bar>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Bar {
    median: f64,
    lowest: f64,
    highest: f64,
}

pub fn file_name(table: &Table) -> String {
    format!("{}.svg", table.name)
}

/// Draws each guest's table in the text of `benchmarks.md`.
pub fn write(text: &str, directory: &Path) -> Result<()> {
    fs::create_dir_all(directory).map_err(|e| format!("cannot make {}: {e}", directory.display()))?;
    for section in text.split("\n## ").skip(1) {
        let title = section.lines().next().unwrap_or_default();
        let Some(table) = TABLES.iter().find(|table| table.title == title) else { continue };
        let figure = parse(section).map_err(|e| format!("cannot read the table '{title}': {e}"))?;
        let path = directory.join(file_name(table));
        draw(&figure, &path).map_err(|e| format!("cannot plot {}: {e}", path.display()))?;
    }
    Ok(())
}

/// Reads a section's first table. A row begins with `job, unit`; its cells are `median (lowest–highest)`.
fn parse(section: &str) -> Result<Figure> {
    let title = section.lines().next().unwrap_or_default().to_owned();
    let mut rows = section.lines().skip_while(|line| !line.starts_with('|')).map_while(cells);
    let mut contenders = rows.next().ok_or("there is none")?;
    contenders.remove(0);
    let panels = rows.skip(1).map(|row| panel(&row, contenders.len())).collect::<Result<_>>()?;
    Ok(Figure { title, contenders, panels })
}

/// Splits a line of a Markdown table into its cells.
fn cells(line: &str) -> Option<Vec<String>> {
    let inner = line.strip_prefix('|')?.strip_suffix('|')?;
    Some(inner.split('|').map(|cell| cell.trim().to_owned()).collect())
}

fn panel(row: &[String], contenders: usize) -> Result<Panel> {
    let (head, bars) = row.split_first().ok_or("an empty row")?;
    let known = head.rsplit_once(", ").filter(|(_, unit)| UNITS.iter().any(|(name, _)| name == unit));
    let (title, unit) = known.ok_or_else(|| format!("no unit in '{head}'"))?;
    if bars.len() != contenders {
        return Err(format!("{} figures of {contenders} in '{head}'", bars.len()));
    }
    let bars =
        bars.iter().map(|cell| bar(cell).ok_or_else(|| format!("'{cell}' is no figure"))).collect::<Result<_>>()?;
    Ok(Panel { title: title.to_owned(), unit: unit.to_owned(), bars })
}

/// Parses a cell. After a single round there is no range.
fn bar(cell: &str) -> Option<Bar> {
    let figure = |text: &str| text.replace(',', "").parse::<f64>().ok().filter(|value| value.is_finite());
    let Some((median, range)) = cell.split_once(" (") else {
        return figure(cell).map(|only| Bar { median: only, lowest: only, highest: only });
    };
    let (lowest, highest) = range.strip_suffix(')')?.split_once('–')?;
    Some(Bar { median: figure(median)?, lowest: figure(lowest)?, highest: figure(highest)? })
}

/// Panels side by side: three, or four if there are many panels with few bars, but no more than have room for their
/// titles.
fn columns(figure: &Figure) -> usize {
    let most = match figure.contenders.len() {
        // More bars need wider panels for their figures.
        7.. => 2,
        4.. => 3,
        _ if figure.panels.len() <= 9 => 3,
        _ => 4,
    };
    let widest = figure.panels.iter().map(|panel| text_width(&panel.title, MEDIUM)).max().unwrap_or_default();
    let room = (WIDTH as i32 - MARGIN) / (widest + MARGIN).max(1);
    figure.panels.len().clamp(1, most.min(room.max(1) as usize))
}

fn width(figure: &Figure) -> u32 {
    if figure.panels.len() == 1 { NARROW } else { WIDTH }
}

/// Estimates a text's width in pixels, for one of the wider sans-serif fonts.
fn text_width(text: &str, size: i32) -> i32 {
    (text.chars().count() as f64 * f64::from(size) * 0.62).ceil() as i32
}

/// Places the legend's entries from `top` downwards. Returns their upper left corners and the legend's height.
fn legend(names: &[String], width: i32, top: i32) -> (Vec<(i32, i32)>, i32) {
    let line = MEDIUM + 8;
    let (mut x, mut y) = (MARGIN, top);
    let mut places = Vec::new();
    for name in names {
        let entry = entry_width(name);
        if x > MARGIN && x + entry > width - MARGIN {
            (x, y) = (MARGIN, y + line);
        }
        places.push((x, y));
        x += entry;
    }
    (places, y + line - top)
}

/// Width of a square, its name and the gap to the next entry.
fn entry_width(name: &str) -> i32 {
    SQUARE + 6 + text_width(name, MEDIUM) + 18
}

/// A font of this size: plotters divides the size by 1.24 when it writes an SVG.
fn font<'a>(pixels: i32) -> TextStyle<'a> {
    ("sans-serif", f64::from(pixels) * 1.24).into_font().into()
}

fn bold<'a>(pixels: i32) -> TextStyle<'a> {
    ("sans-serif", f64::from(pixels) * 1.24).into_font().style(FontStyle::Bold).into()
}

fn colour(contender: &str) -> Result<RGBColor> {
    let found = COLOURS.iter().find(|(name, _)| *name == contender);
    found.map(|(_, colour)| *colour).ok_or_else(|| format!("'{contender}' has no colour"))
}

fn draw(figure: &Figure, path: &Path) -> Drawn {
    let (columns, width) = (columns(figure), width(figure));
    let rows = figure.panels.len().div_ceil(columns);
    let top = MARGIN + LARGE + 12;
    let (places, legend_height) = legend(&figure.contenders, width as i32, top);
    let note = top + legend_height + 2;
    let head = note + SMALL + 14;
    let size = (width, head as u32 + PANEL_HEIGHT * rows as u32);
    let area = SVGBackend::new(path, size).into_drawing_area();
    area.fill(&WHITE)?;
    area.draw(&Text::new(figure.title.as_str(), (MARGIN, MARGIN), bold(LARGE)))?;
    for (name, (x, y)) in figure.contenders.iter().zip(places) {
        area.draw(&Rectangle::new([(x, y), (x + SQUARE, y + SQUARE)], colour(name)?.filled()))?;
        let middle = Pos::new(HPos::Left, VPos::Center);
        area.draw(&Text::new(name.as_str(), (x + SQUARE + 6, y + SQUARE / 2), font(MEDIUM).pos(middle)))?;
    }
    let told = "Bar: median of the rounds. Line: from the lowest round to the highest.";
    area.draw(&Text::new(told, (MARGIN, note), font(SMALL).color(&GREY)))?;
    let (_, panels) = area.split_vertically(head);
    for (panel, place) in figure.panels.iter().zip(panels.split_evenly((rows, columns))) {
        draw_panel(panel, &figure.contenders, &place)?;
    }
    area.present()?;
    Ok(())
}

/// Colour of text beside the figures.
const GREY: RGBColor = RGBColor(90, 90, 90);

fn draw_panel(panel: &Panel, contenders: &[String], area: &Area) -> Drawn {
    let count = contenders.len() as f64;
    // Leave room for the figure above the highest bar.
    let top = panel.bars.iter().map(|bar| bar.highest).fold(0.0, f64::max) * 1.15;
    let better = UNITS.iter().find(|(name, _)| *name == panel.unit).map_or("", |(_, better)| better);
    let title = panel.title.as_str();
    area.draw(&Text::new(title, (MARGIN, 0), bold(MEDIUM)))?;
    let unit = format!("{}, {better}", panel.unit);
    area.draw(&Text::new(unit, (MARGIN, MEDIUM + 4), font(SMALL).color(&GREY)))?;
    let (_, area) = area.split_vertically(MEDIUM + SMALL + 14);
    let mut chart = ChartBuilder::on(&area)
        .margin_bottom(MARGIN)
        .margin_right(MARGIN)
        .y_label_area_size(AXIS)
        .build_cartesian_2d(-0.5..count - 0.5, 0.0..top)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .disable_x_axis()
        .bold_line_style(RGBColor(225, 225, 225))
        .light_line_style(TRANSPARENT)
        .axis_style(RGBColor(120, 120, 120))
        .y_labels(5)
        .y_label_style(font(SMALL).color(&GREY))
        .y_label_formatter(&|value| tick(*value))
        .draw()?;
    for (index, (name, bar)) in contenders.iter().zip(&panel.bars).enumerate() {
        let x = index as f64;
        let body = Rectangle::new([(x - BAR / 2.0, 0.0), (x + BAR / 2.0, bar.median)], colour(name)?.filled());
        chart.draw_series([body])?;
        if bar.lowest < bar.highest {
            chart.draw_series([PathElement::new([(x, bar.lowest), (x, bar.highest)], BLACK)])?;
        }
        let above = font(SMALL).pos(Pos::new(HPos::Center, VPos::Bottom));
        chart.draw_series([Text::new(number(bar.median), (x, bar.highest), above)])?;
    }
    Ok(())
}

/// An axis label: the figure without trailing zeroes.
fn tick(value: f64) -> String {
    let text = number(value);
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECTION: &str = "\
QEMU guest with one CPU

date: today; rounds: 3

| median (lowest–highest) | virtiofsd              | thruwayd, DAX |
| ----------------------- | ---------------------- | ------------- |
| read 4k, random, IOPS   | 2,449 (2,209–128,240)  | 0.95          |

| times virtiofsd | thruwayd, DAX |
| --------------- | ------------- |
| read 4k, random | 1.11          |
";

    #[test]
    fn a_table_is_parsed() {
        let bars = vec![
            Bar { median: 2449.0, lowest: 2209.0, highest: 128_240.0 },
            Bar { median: 0.95, lowest: 0.95, highest: 0.95 },
        ];
        let panel = Panel { title: "read 4k, random".into(), unit: "IOPS".into(), bars };
        let contenders = vec!["virtiofsd".into(), "thruwayd, DAX".into()];
        let figure = Figure { title: "QEMU guest with one CPU".into(), contenders, panels: vec![panel] };
        assert_eq!(parse(SECTION), Ok(figure));
    }

    #[test]
    fn a_malformed_table_is_an_error() {
        for (good, bad) in [("0.95", "-"), ("| 0.95 ", ""), ("2,209–", ""), (", IOPS", ""), ("|", "")] {
            assert!(parse(&SECTION.replace(good, bad)).is_err(), "{good} as {bad}");
        }
    }

    /// The plots in the repository are those of the tables in the repository.
    #[test]
    fn plots_match_the_document() {
        let text = fs::read_to_string(crate::host::root().join("docs/benchmarks.md")).unwrap();
        let directory = tempfile::tempdir().unwrap();
        write(&text, directory.path()).unwrap();
        for table in TABLES.iter().filter(|table| text.contains(&format!("\n## {}\n", table.title))) {
            let name = file_name(table);
            let drawn = fs::read_to_string(directory.path().join(&name)).unwrap();
            assert_eq!(
                drawn,
                fs::read_to_string(crate::host::root().join("docs/plots").join(&name)).unwrap(),
                "{name}"
            );
        }
    }

    #[test]
    fn each_contender_has_its_own_colour() {
        for (index, (name, colour)) in COLOURS.iter().enumerate() {
            assert!(COLOURS[..index].iter().all(|(other, used)| other != name && used != colour), "{name}");
        }
        for contender in TABLES.iter().flat_map(|table| table.contenders) {
            assert!(colour(contender.name).is_ok(), "{}", contender.name);
        }
    }

    #[test]
    fn legend_entries_do_not_overlap() {
        for table in TABLES {
            let names: Vec<String> = table.contenders.iter().map(|contender| contender.name.to_owned()).collect();
            for width in [NARROW, WIDTH] {
                let (places, height) = legend(&names, width as i32, 0);
                for (index, ((x, y), name)) in places.iter().zip(&names).enumerate() {
                    assert!(x + entry_width(name) <= width as i32 && y + SQUARE <= height, "{name}");
                    let next = places.get(index + 1);
                    let apart = next.is_none_or(|(after, line)| line > y || *after >= x + entry_width(name));
                    assert!(apart, "{name} in {}", table.name);
                }
            }
        }
    }

    #[test]
    fn titles_and_figures_do_not_overlap() {
        let text = fs::read_to_string(crate::host::root().join("docs/benchmarks.md")).unwrap();
        for section in text.split("\n## ").filter(|s| TABLES.iter().any(|t| s.starts_with(&format!("{}\n", t.title)))) {
            let figure = parse(section).unwrap();
            assert!(text_width(&figure.title, LARGE) <= width(&figure) as i32 - 2 * MARGIN, "{}", figure.title);
            let panel = width(&figure) as i32 / columns(&figure) as i32 - AXIS as i32 - MARGIN;
            let room = panel / figure.contenders.len() as i32;
            for title in figure.panels.iter().map(|panel| &panel.title) {
                let column = width(&figure) as i32 / columns(&figure) as i32;
                assert!(text_width(title, MEDIUM) <= column - MARGIN, "{title} in {}", figure.title);
            }
            for bar in figure.panels.iter().flat_map(|panel| &panel.bars) {
                assert!(text_width(&number(bar.median), SMALL) <= room, "{} in {}", bar.median, figure.title);
            }
        }
    }
}
