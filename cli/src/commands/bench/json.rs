//! The figures as JSON.

use serde::Serialize;

use super::Outcome;

/// What `--json` prints.
#[derive(Serialize)]
pub struct Json<'a> {
    device: &'a str,
    /// False on the emulator, where cases are only checked.
    timed: bool,
    repeats: Option<usize>,
    limits: Option<JsonLimits>,
    rows: Vec<JsonRow<'a>>,
}

#[derive(Serialize)]
struct JsonLimits {
    read_gb_per_second: f64,
    copy_gb_per_second: f64,
    to_device_gib_per_second: f64,
    to_host_gib_per_second: f64,
    mma_tflop_per_second: f64,
    launch_microseconds: f64,
}

#[derive(Serialize)]
struct JsonRow<'a> {
    bench: &'a str,
    name: &'a str,
    size: &'a str,
    /// Always true: a wrong result ends the run with an error.
    checked: bool,
    unit: String,
    median: Option<f64>,
    spread: Option<f64>,
    repeats: Option<usize>,
    microseconds: Option<f64>,
    limit: Option<f64>,
    limited_by: Option<String>,
    ratio: Option<f64>,
    bytes: u64,
    operations: u64,
}

/// `outcome` in the form that `--json` prints.
pub fn of<'a>(outcome: &Outcome<'a>) -> Json<'a> {
    let l = &outcome.limits;
    let rows = outcome.rows.iter().map(|row| {
        let limit = row.figures.and_then(|f| f.limit);
        JsonRow {
            bench: row.label.bench,
            name: &row.label.name,
            size: &row.label.size,
            checked: true,
            unit: row.unit.to_string(),
            median: row.figures.map(|f| f.median),
            spread: row.figures.map(|f| f.spread),
            repeats: row.figures.map(|f| f.repeats),
            microseconds: row.figures.map(|f| f.seconds * 1e6),
            limit: limit.map(|l| l.value),
            limited_by: limit.map(|l| l.kind.to_string()),
            ratio: limit.map(|l| l.ratio),
            bytes: row.work.bytes,
            operations: row.work.operations,
        }
    });
    Json {
        device: outcome.device,
        timed: outcome.repeats.is_some(),
        repeats: outcome.repeats,
        limits: outcome.repeats.map(|_| JsonLimits {
            read_gb_per_second: l.read / 1e9,
            copy_gb_per_second: l.copy / 1e9,
            to_device_gib_per_second: l.to_device / (1u64 << 30) as f64,
            to_host_gib_per_second: l.to_host / (1u64 << 30) as f64,
            mma_tflop_per_second: l.matrix / 1e12,
            launch_microseconds: l.launch * 1e6,
        }),
        rows: rows.collect(),
    }
}
