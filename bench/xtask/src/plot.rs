//! A plot of each table: a panel for each job, in it a bar for each contender.

use std::fs;
use std::path::Path;

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::Results;
use crate::host::Result;
use crate::plan::{Job, Table};
use thruway_bench::series::number;

/// Panels side by side: three are read at the width of a page.
const COLUMNS: usize = 3;
/// Pixels of a panel: room for a bar's figures above it and a title of 35 letters.
const PANEL: (u32, u32) = (320, 260);
/// plotters writes four fifths of these into an SVG without fonts: 13 and 11 pixels.
const FONTS: [(&str, u32); 2] = [("sans-serif", 16), ("sans-serif", 14)];
/// Half of a bar, where bars are 1 apart.
const HALF: f64 = 0.35;
/// Contender by contender; distinct to the colour-blind too (Okabe and Ito).
const COLOURS: [RGBColor; 5] = [
    RGBColor(153, 153, 153),
    RGBColor(86, 180, 233),
    RGBColor(0, 158, 115),
    RGBColor(230, 159, 0),
    RGBColor(204, 121, 167),
];

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

pub fn file_name(table: &Table) -> String {
    format!("{}.svg", table.name)
}

pub fn write(results: &Results, directory: &Path) -> Result<()> {
    fs::create_dir_all(directory).map_err(|e| format!("cannot make {}: {e}", directory.display()))?;
    for table in results.tables() {
        let path = directory.join(file_name(table));
        draw(results, table, &path).map_err(|e| format!("cannot plot {}: {e}", path.display()))?;
    }
    Ok(())
}

type Drawn = std::result::Result<(), Box<dyn std::error::Error>>;

fn draw(results: &Results, table: &Table, path: &Path) -> Drawn {
    let rows = table.jobs.len().div_ceil(COLUMNS);
    let size = (PANEL.0 * COLUMNS as u32, PANEL.1 * rows as u32);
    let area = SVGBackend::new(path, size).into_drawing_area();
    area.fill(&WHITE)?;
    for (panel, job) in area.split_evenly((rows, COLUMNS)).iter().zip(table.jobs) {
        draw_job(results, table, job, panel)?;
    }
    area.present()?;
    Ok(())
}

fn draw_job(results: &Results, table: &Table, job: &Job, panel: &Area) -> Drawn {
    let count = table.contenders.len() as f64;
    let all = table.contenders.iter().map(|contender| results.series(table, contender, job));
    // A fifth more than the highest, for the figure above its bar.
    let top = all.map(|series| series.max()).fold(0.0, f64::max) * 1.2;
    let title = format!("{}, {}", job.title, job.measure.unit());
    let mut chart = ChartBuilder::on(panel)
        .caption(title, FONTS[0])
        .margin(6)
        .x_label_area_size(22)
        .y_label_area_size(54)
        .build_cartesian_2d(-0.5..count - 0.5, 0.0..top)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .disable_x_axis()
        .light_line_style(TRANSPARENT)
        .y_labels(5)
        .y_label_style(FONTS[1])
        .y_label_formatter(&|value| number(*value))
        .draw()?;
    for (index, contender) in table.contenders.iter().enumerate() {
        let (x, series) = (index as f64, results.series(table, contender, job));
        let colour = COLOURS[index % COLOURS.len()];
        let bar = Rectangle::new([(x - HALF, 0.0), (x + HALF, series.median())], colour.filled());
        chart.draw_series([bar])?;
        // The spread.
        chart.draw_series([PathElement::new([(x, series.min()), (x, series.max())], BLACK)])?;
        let style = |position| TextStyle::from(FONTS[1]).pos(position);
        let above = style(Pos::new(HPos::Center, VPos::Bottom));
        chart.draw_series([Text::new(number(series.median()), (x, series.max()), above)])?;
        let below = chart.backend_coord(&(x, 0.0));
        let origin = panel.get_base_pixel();
        let at = (below.0 - origin.0, below.1 - origin.1 + 6);
        panel.draw(&Text::new(contender.name, at, style(Pos::new(HPos::Center, VPos::Top))))?;
    }
    Ok(())
}
