//! The figures as a picture: a roofline above, a bar for each case below.

use benches::{Row, Unit};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::Outcome;

/// Least width; long labels make it more.
const WIDTH: i32 = 1100;
const MARGIN: i32 = 24;
/// Height of the roofline.
const ROOF_HEIGHT: u32 = 460;
/// Height of a bar with the space below it.
const BAR_STEP: i32 = 20;
/// Length of a bar of ratio 1, and the largest ratio that is drawn.
const BAR_LENGTH: f64 = 420.0;
const MOST_RATIO: f64 = 1.2;
/// Size of the text beside the bars, and the width to leave for a character, ample in any sans-serif font.
const TEXT_SIZE: u32 = 13;
const CHARACTER: f64 = 7.5;
/// Space between a bar and its texts.
const GAP: i32 = 8;
const HEADING: i32 = 34;
const INK: RGBColor = RGBColor(40, 40, 48);
const PALE: RGBColor = RGBColor(205, 205, 212);
/// A colour for each benchmark, in the order of their first rows.
const COLOURS: [RGBColor; 5] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(120, 94, 240),
];

type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;

/// `outcome` as SVG.
///
/// # Errors
/// If the drawing library fails.
pub fn draw(outcome: &Outcome<'_>) -> anyhow::Result<String> {
    let mut svg = String::new();
    let points = points(outcome.rows);
    let limits = outcome.limits;
    let measured = outcome.repeats.is_some() && limits.read > 0.0 && limits.matrix > 0.0;
    let roof = if measured && !points.is_empty() { ROOF_HEIGHT } else { 0 };
    let bars = outcome.rows.len() as i32 * BAR_STEP + 3 * HEADING;
    let columns = Columns::of(outcome.rows);
    {
        let area = SVGBackend::with_string(&mut svg, (columns.width, roof + bars as u32)).into_drawing_area();
        let failed = |error: &dyn std::fmt::Display| anyhow::anyhow!("cannot draw the plot: {error}");
        area.fill(&WHITE).map_err(|e| failed(&e))?;
        let (above, below) = area.split_vertically(roof);
        if roof > 0 {
            roofline(&above, outcome, &points).map_err(|e| failed(&e))?;
        }
        ratios(&below, outcome, columns.left).map_err(|e| failed(&e))?;
        area.present().map_err(|e| failed(&e))?;
    }
    Ok(svg)
}

/// Room for the texts beside the bars.
struct Columns {
    /// Where bars begin.
    left: i32,
    /// Width of the whole picture.
    width: u32,
}

impl Columns {
    fn of(rows: &[Row]) -> Self {
        let room = |text: &dyn Fn(&Row) -> String| {
            let longest = rows.iter().map(|row| text(row).chars().count()).max().unwrap_or(0);
            (longest as f64 * CHARACTER).ceil() as i32 + GAP + MARGIN
        };
        let left = room(&|row| row.label.to_string());
        let right = left + (BAR_LENGTH * MOST_RATIO) as i32;
        Self { left, width: (right + room(&value)).max(WIDTH) as u32 }
    }
}

/// The text behind a bar.
fn value(row: &Row) -> String {
    let Some(figures) = row.figures else { return "checked".to_owned() };
    let ratio = figures.limit.map(|limit| format!("{:.3}, ", limit.ratio)).unwrap_or_default();
    let places = if row.unit == Unit::Microseconds || figures.median < 100.0 { 2 } else { 0 };
    format!("{ratio}{:.places$} {}", figures.median, row.unit)
}

/// The benchmarks in order of their first rows.
fn benches(rows: &[Row]) -> Vec<&'static str> {
    let mut names = Vec::new();
    for row in rows {
        if !names.contains(&row.label.bench) {
            names.push(row.label.bench);
        }
    }
    names
}

fn colour(rows: &[Row], bench: &str) -> RGBColor {
    let at = benches(rows).iter().position(|name| *name == bench).unwrap_or(0);
    COLOURS[at % COLOURS.len()]
}

/// For each row that both moves bytes and multiplies: operations a byte, 10¹² operations a second, and its benchmark.
fn points(rows: &[Row]) -> Vec<(f64, f64, &'static str)> {
    rows.iter()
        .filter(|row| row.work.bytes > 0 && row.work.operations > 0)
        .filter_map(|row| {
            let seconds = row.figures?.seconds;
            let operations = row.work.operations as f64;
            Some((operations / row.work.bytes as f64, operations / seconds / 1e12, row.label.bench))
        })
        .collect()
}

fn roofline<'a>(
    area: &Area<'a>,
    outcome: &Outcome<'_>,
    points: &[(f64, f64, &'static str)],
) -> Result<(), Box<dyn std::error::Error>> {
    let (read, top) = (outcome.limits.read / 1e12, outcome.limits.matrix / 1e12);
    let ridge = top / read;
    let least = points.iter().fold(ridge, |m, p| m.min(p.0));
    let most = points.iter().fold(ridge, |m, p| m.max(p.0));
    let (left, right) = (least / 3.0, most * 4.0);
    let lowest = points.iter().fold(left * read, |m, p| m.min(p.1));
    let title = format!("{}: read {:.0} GB/s, mma.sync {:.0} TFLOP/s, as measured", outcome.device, read * 1e3, top);
    let mut chart = ChartBuilder::on(area)
        .margin(MARGIN)
        .caption(title, ("sans-serif", 18).into_font().color(&INK))
        .x_label_area_size(44)
        .y_label_area_size(64)
        .build_cartesian_2d((left..right).log_scale(), (lowest / 2.0..top * 2.0).log_scale())?;
    chart
        .configure_mesh()
        .x_desc("operations a byte")
        .y_desc("TFLOP/s")
        .bold_line_style(PALE)
        .light_line_style(TRANSPARENT)
        .label_style(("sans-serif", 13).into_font().color(&INK))
        .axis_style(INK)
        .draw()?;
    let roof = [(left, left * read), (ridge, top), (right, top)];
    chart.draw_series(std::iter::once(PathElement::new(roof.to_vec(), INK.stroke_width(2))))?;
    for bench in benches(outcome.rows) {
        let own: Vec<_> = points.iter().filter(|p| p.2 == bench).collect();
        if own.is_empty() {
            continue;
        }
        let fill = colour(outcome.rows, bench);
        chart
            .draw_series(own.iter().map(|p| Circle::new((p.0, p.1), 4, fill.mix(0.8).filled())))?
            .label(bench)
            .legend(move |(x, y)| Circle::new((x + 8, y), 4, fill.filled()));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::LowerRight)
        .background_style(WHITE.mix(0.8))
        .border_style(PALE)
        .label_font(("sans-serif", 14).into_font().color(&INK))
        .draw()?;
    Ok(())
}

fn ratios(area: &Area<'_>, outcome: &Outcome<'_>, left: i32) -> Result<(), Box<dyn std::error::Error>> {
    let font = ("sans-serif", TEXT_SIZE).into_font().color(&INK);
    let at_right = font.pos(Pos::new(HPos::Right, VPos::Center));
    let at_left = font.pos(Pos::new(HPos::Left, VPos::Center));
    let heading = match outcome.repeats {
        Some(_) => "the least possible time ÷ the measured one: 1 is the card's limit".to_owned(),
        None => format!("{}: checked, not timed", outcome.device),
    };
    let title = ("sans-serif", 16).into_font().color(&INK).pos(Pos::new(HPos::Left, VPos::Center));
    area.draw(&Text::new(heading, (MARGIN, HEADING / 2), title))?;
    let bottom = HEADING + outcome.rows.len() as i32 * BAR_STEP;
    if outcome.repeats.is_some() {
        for tenth in [0, 2, 4, 6, 8, 10] {
            let x = left + (BAR_LENGTH * f64::from(tenth) / 10.0) as i32;
            area.draw(&PathElement::new(vec![(x, HEADING - 4), (x, bottom)], PALE))?;
            let label = font.pos(Pos::new(HPos::Center, VPos::Top));
            area.draw(&Text::new(format!("{:.1}", f64::from(tenth) / 10.0), (x, bottom + 6), label))?;
        }
    }
    for (i, row) in outcome.rows.iter().enumerate() {
        let top = HEADING + i as i32 * BAR_STEP;
        let middle = top + BAR_STEP / 2 - 2;
        area.draw(&Text::new(row.label.to_string(), (left - GAP, middle), at_right.clone()))?;
        let ratio = row.figures.and_then(|f| f.limit).map(|limit| limit.ratio.clamp(0.0, MOST_RATIO));
        let end = left + (BAR_LENGTH * ratio.unwrap_or(0.0)) as i32;
        if ratio.is_some() {
            let fill = colour(outcome.rows, row.label.bench).filled();
            area.draw(&Rectangle::new([(left, top), (end, top + BAR_STEP - 5)], fill))?;
        }
        area.draw(&Text::new(value(row), (end + GAP, middle), at_left.clone()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use benches::{Figures, Label, Limit, LimitKind, Limits, Work};

    use super::*;

    fn row(bench: &'static str, name: &str, work: Work) -> Row {
        let limit = Some(Limit { value: 3000.0, kind: LimitKind::Read, ratio: 0.75 });
        Row {
            label: Label { bench, name: name.into(), size: "M < 8 & more".into() },
            unit: Unit::GigabytesPerSecond,
            work,
            figures: Some(Figures { seconds: 1e-5, median: 2250.0, spread: 0.01, repeats: 20, limit }),
        }
    }

    #[test]
    fn a_roofline_and_a_bar_for_each_case() {
        let limits = Limits { read: 3e12, matrix: 6e14, ..Limits::default() };
        let work = Work { bytes: 50_000_000, operations: 400_000_000 };
        let rows =
            [row("linear", "qkv", work), row("attention", "heads", work), row("ngram", "match", Work::default())];
        let svg = draw(&Outcome { device: "card", repeats: Some(20), limits, rows: &rows }).unwrap();
        assert_eq!(svg.matches("<circle").count(), 2 + 2, "two points, and two in the legend");
        assert!(svg.contains("TFLOP/s") && svg.contains("operations a byte"));
        assert_eq!(svg.matches("0.750, 2250 GB/s").count(), 3);
        assert!(svg.contains("M &lt; 8 &amp; more"));
    }

    /// The x and the text of each text that is anchored at `anchor`.
    fn texts(svg: &str, anchor: &str) -> Vec<(f64, String)> {
        let elements = svg.split("<text ").skip(1).filter(|text| text.contains(&format!("text-anchor=\"{anchor}\"")));
        let parts = elements.map(|element| {
            let (attributes, rest) = element.split_once('>').unwrap();
            let x = attributes.split("x=\"").nth(1).unwrap().split('"').next().unwrap().parse().unwrap();
            (x, rest.split("</text>").next().unwrap().trim().to_owned())
        });
        parts.collect()
    }

    #[test]
    fn long_labels_are_not_cut_off() {
        let limits = Limits { read: 3e12, matrix: 6e14, ..Limits::default() };
        let name = "a hundred characters of a name ".repeat(3);
        let mut rows = [row("token-copy", name.trim(), Work::default())];
        // A ratio beyond the largest that is drawn.
        rows[0].figures.as_mut().unwrap().limit.as_mut().unwrap().ratio = 3.0;
        let svg = draw(&Outcome { device: "card", repeats: Some(20), limits, rows: &rows }).unwrap();
        let width: f64 = svg.split("width=\"").nth(1).unwrap().split('"').next().unwrap().parse().unwrap();
        // The average width of a sans-serif character.
        let wide = |text: &str| text.chars().count() as f64 * f64::from(TEXT_SIZE) * 0.55;
        let label = texts(&svg, "end").into_iter().find(|(_, text)| text.contains("hundred")).unwrap();
        assert!(label.0 - wide(&label.1) >= 0.0, "{label:?}");
        let value = texts(&svg, "start").into_iter().find(|(_, text)| text.starts_with("3.000")).unwrap();
        assert!(value.0 + wide(&value.1) <= width, "{value:?} of {width}");
    }

    #[test]
    fn without_times_there_is_no_roofline() {
        let mut rows = [row("linear", "qkv", Work { bytes: 1, operations: 1 })];
        rows[0].figures = None;
        let svg = draw(&Outcome { device: "emulator", repeats: None, limits: Limits::default(), rows: &rows }).unwrap();
        assert!(svg.contains("checked") && !svg.contains("<circle"));
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
    }
}
