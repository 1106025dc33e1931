//! The figures as a table for people.

use std::fmt::Write;

use benches::Row;

use super::Outcome;

/// `outcome` as lines of text.
pub fn table(outcome: &Outcome<'_>) -> String {
    let mut text = String::new();
    let how = match outcome.repeats {
        Some(n) => format!("{}: medians of up to {n} measurements, each case checked first", outcome.device),
        None => format!("{}: each case ran once at a small size and was checked; nothing is timed", outcome.device),
    };
    let heading = ["", "size", "median", "", "spread", "µs", "limit", "", "ratio"].map(String::from);
    let lines: Vec<[String; COLUMNS]> = outcome.rows.iter().map(cells).collect();
    let mut widths = [0; COLUMNS];
    for line in lines.iter().chain([&heading]) {
        for (width, cell) in widths.iter_mut().zip(line) {
            *width = (*width).max(cell.chars().count());
        }
    }
    for row in outcome.rows {
        widths[0] = widths[0].max(row.label.bench.chars().count());
    }
    // Writing to a string does not fail.
    let _ = writeln!(text, "{how}");
    let mut bench = "";
    for (row, line) in outcome.rows.iter().zip(&lines) {
        if row.label.bench != bench {
            bench = row.label.bench;
            let mut first = heading.clone();
            first[0] = bench.into();
            if outcome.repeats.is_none() {
                first = std::array::from_fn(|i| if i < 2 { std::mem::take(&mut first[i]) } else { String::new() });
            }
            let _ = write!(text, "\n{}", layout(&first, &widths));
        }
        text.push_str(&layout(line, &widths));
    }
    if outcome.repeats.is_some() {
        text.push_str(
            "\nspread: 10th to 90th percentile ÷ median. ratio: the least possible time, by the limits measured here, ÷ the median.\n",
        );
    }
    text
}

const COLUMNS: usize = 9;
/// Which columns hold numbers, and are aligned on the right.
const RIGHT: [bool; COLUMNS] = [false, false, true, false, true, true, true, false, true];

fn cells(row: &Row) -> [String; COLUMNS] {
    let mut cells: [String; COLUMNS] = Default::default();
    cells[0] = format!("  {}", row.label.name);
    cells[1] = row.label.size.clone();
    match row.figures {
        None => cells[2] = "checked".into(),
        Some(figures) => {
            cells[2] = number(figures.median);
            cells[3] = row.unit.to_string();
            cells[4] = format!("{:.1} %", figures.spread * 100.0);
            cells[5] = number(figures.seconds * 1e6);
            if let Some(limit) = figures.limit {
                cells[6] = number(limit.value);
                cells[7] = limit.kind.to_string();
                cells[8] = format!("{:.3}", limit.ratio);
            }
        }
    }
    cells
}

fn layout(cells: &[String; COLUMNS], widths: &[usize; COLUMNS]) -> String {
    let mut line = String::new();
    for ((cell, width), right) in cells.iter().zip(widths).zip(RIGHT) {
        let pad = " ".repeat(width - cell.chars().count());
        let (before, after) = if right { (pad.as_str(), "") } else { ("", pad.as_str()) };
        let _ = write!(line, "{before}{cell}{after}  ");
    }
    line.truncate(line.trim_end().len());
    line.push('\n');
    line
}

/// A number with four significant figures.
fn number(value: f64) -> String {
    match value.abs() {
        v if v >= 1000.0 => format!("{value:.0}"),
        v if v >= 100.0 => format!("{value:.1}"),
        v if v >= 10.0 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}

#[cfg(test)]
mod tests {
    use benches::{Figures, Label, Limit, LimitKind, Limits, Unit, Work};

    use super::*;

    fn row(name: &str, figures: Option<Figures>) -> Row {
        let label = Label { bench: "linear", name: name.into(), size: "M = 8".into() };
        Row { label, unit: Unit::GigabytesPerSecond, work: Work::default(), figures }
    }

    #[test]
    fn columns_stand_below_one_another() {
        let limit = Some(Limit { value: 3000.0, kind: LimitKind::Read, ratio: 0.5 });
        let figures = |median| Some(Figures { seconds: 1e-5, median, spread: 0.004, repeats: 20, limit });
        let rows = [row("qkv", figures(1500.0)), row("gate, up", figures(2.5))];
        let text = table(&Outcome { device: "card", repeats: Some(20), limits: Limits::default(), rows: &rows });
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[2], "linear      size   median        spread     µs  limit        ratio");
        assert_eq!(lines[3], "  qkv       M = 8    1500  GB/s   0.4 %  10.00   3000  read  0.500");
        assert_eq!(lines[4], "  gate, up  M = 8   2.500  GB/s   0.4 %  10.00   3000  read  0.500");
    }

    #[test]
    fn what_is_not_timed_is_checked() {
        let rows = [row("qkv", None)];
        let text = table(&Outcome { device: "emulator", repeats: None, limits: Limits::default(), rows: &rows });
        assert!(text.ends_with("\nlinear  size\n  qkv   M = 8  checked\n"), "{text}");
    }
}
