//! Measures the n-gram match on card 0. First checks exact equality with the serial algorithm at scale, then prints the
//! figures of docs/reference/kernels/ngram.md, as tables and as JSON.
//!
//! `cargo run --release --package benches --example ngram -- [file.json] [check|small|large|sweep|groups]...`

use std::error::Error;
use std::fmt::Write;
use std::time::Instant;

use benches::cases::ceilings;
use benches::ngram::measure::{self, LARGE, Measurement, SMALL};
use benches::ngram::{Batch, Hit, Inputs, Operator, Peer, Published, TokenId, Way};
use benches::{Arguments, Bench, Event, Figures};
use gpu_kernels::ngram::MOST_SEQUENCES;
use host::device::Device;

const REPEATS: usize = 21;
/// Replays of a graph of one call, between two events.
const REPLAYS: usize = 200;

/// Batch, longest text, number of seeds.
const CHECKED: [(usize, usize, u64); 12] = [
    (1, 1, 20),
    (1, 131_072, 12),
    (2, 70_001, 8),
    (7, 4096, 20),
    (31, 512, 20),
    (32, 513, 20),
    (64, 131_072, 4),
    (255, 131_072, 2),
    (300, 9000, 6),
    (1024, 700, 8),
    (1025, 3001, 6),
    (4096, 4096, 4),
];

fn main() -> Result<(), Box<dyn Error>> {
    let arguments = Arguments::read()?;
    let file = arguments.word(0);
    let steps: Vec<&String> = arguments.words.iter().skip(1).collect();
    let wanted = |step: &str| steps.is_empty() || steps.iter().any(|s| *s == step);
    let device = arguments.device()?;
    println!("{}", device.name());
    let mut json = vec![format!("\"device\": \"{}\"", device.name())];

    if wanted("check") {
        let start = Instant::now();
        let mut checked = 0;
        for (batch, longest, seeds) in CHECKED {
            for seed in 0..seeds {
                checked += check::<i64>(&device, batch, longest, seed)?;
                checked += check::<i32>(&device, batch, longest, seed + 1000)?;
            }
        }
        println!("{checked} launches equal the serial algorithm ({:.0} s)", start.elapsed().as_secs_f64());
        json.push(format!("\"checked\": {checked}"));
    }

    let mut watch = |_: Event<'_>| {};
    let mut bench = Bench::new(&device, REPEATS, &mut watch)?;
    ceilings::run(&mut bench, ceilings::CeilingSizes { bytes: 16 << 30, ..ceilings::CeilingSizes::PUBLISHED })?;
    let limits = *bench.limits();
    println!("read {:.0} GB/s, an empty launch in a graph {:.2} µs", limits.read / 1e9, limits.launch * 1e6);
    json.push(format!("\"read_gb_s\": {:.1}, \"launch_us\": {:.3}", limits.read / 1e9, limits.launch * 1e6));

    if wanted("small") {
        let m = measure::run(&mut bench, SMALL, true)?;
        let ways = [Way::Together, Way::Blocks(32), Way::Blocks(1)];
        let cached = measure::in_ways(&mut bench, SMALL, &ways, true)?;
        let (alone, empty) = alone(&device, SMALL)?;
        print_case("batch 32, length 512", &m);
        for (way, figures) in &cached {
            println!("  tokens in the cache, {way:?}: {}", figure(*figures));
        }
        println!("  a graph of one call, replayed: {alone:.2} µs");
        println!("  a graph of one empty launch, replayed: {empty:.2} µs");
        json.push(format!("\"ngram.b32_l512\": {}", case_json("", &m)));
        json.push(format!("\"ngram.b32_l512.us\": {:.3}", us(m.kernel)));
        json.push(format!("\"ngram.b32_l512.cached_us\": {:.3}", us(cached[0].1)));
        json.push(format!("\"ngram.b32_l512.one_call_graph_us\": {alone:.3}, \"empty_graph_us\": {empty:.3}"));
    }
    if wanted("large") {
        let m = measure::run(&mut bench, LARGE, true)?;
        let floor = LARGE.bytes() as f64 / limits.read * 1e6;
        print_case("batch 256, length 131072, no match", &m);
        println!("  floor {floor:.1} µs: {:.3} times that", us(m.kernel) / floor);
        json.push(format!("\"ngram.b256_l131072\": {}", case_json("", &m)));
        json.push(format!("\"ngram.b256_l131072.us\": {:.2}", us(m.kernel)));
        json.push(format!("\"ngram.b256_l131072.floor_us\": {floor:.2}"));
    }
    if wanted("sweep") {
        let late = |batch, length| Published { batch, length, threshold: 8192, hit: Hit::PromptLate };
        let mut rows = Vec::new();
        for (case, cached) in [
            (late(1, 1024), false),
            (late(1, 16_384), false),
            (late(8, 4096), false),
            (late(8, 16_384), false),
            (late(16, 16_384), false),
            (late(16, 32_768), false),
            (late(32, 512), false),
            (late(32, 512), true),
            (late(32, 16_384), false),
            (late(64, 16_384), false),
            (late(64, 32_768), false),
            (late(64, 131_072), false),
            (late(128, 512), false),
            (late(128, 16_384), false),
            (late(128, 32_768), false),
            (late(128, 131_072), false),
        ] {
            print!("batch {:>3}, length {:>6}{}:", case.batch, case.length, if cached { " cached" } else { "" });
            let mut ways = [1, 32, 66, 132].map(Way::Blocks).to_vec();
            ways.extend((case.batch <= MOST_SEQUENCES as usize).then_some(Way::Together));
            for (way, figures) in measure::in_ways(&mut bench, case, &ways, cached)? {
                let way = match way {
                    Way::Blocks(blocks) => blocks.to_string(),
                    Way::Together => "together".into(),
                };
                print!("  {way}: {:.2}", us(figures));
                rows.push(format!(
                    "{{\"batch\": {}, \"length\": {}, \"cached\": {cached}, \"blocks\": \"{way}\", \"us\": {:.3}}}",
                    case.batch,
                    case.length,
                    us(figures)
                ));
            }
            println!();
        }
        json.push(format!("\"blocks\": [{}]", rows.join(", ")));
    }
    if wanted("groups") {
        let mut groups = Vec::new();
        for group in measure::groups() {
            println!("{}", group.name);
            let mut rows = Vec::new();
            for (name, case) in &group.cases {
                let m = measure::run(&mut bench, *case, true)?;
                print_case(name, &m);
                rows.push(case_json(name, &m));
            }
            groups.push(format!("{{\"name\": \"{}\", \"cases\": [{}]}}", group.name, rows.join(", ")));
        }
        json.push(format!("\"groups\": [{}]", groups.join(", ")));
    }
    if let Some(file) = file {
        std::fs::write(file, format!("{{{}}}\n", json.join(",\n")))?;
    }
    Ok(())
}

/// Launches the operator on a random batch in several ways, and compares the results. Returns the number of launches.
fn check<T: TokenId>(device: &Device, batch: usize, longest: usize, seed: u64) -> Result<usize, Box<dyn Error>> {
    let inputs = Inputs::<T>::random(batch, longest, seed + (batch * 31 + longest) as u64);
    let expected = inputs.expected();
    let mut on_device = Batch::new(device, &inputs, 1)?;
    let mut ways = vec![on_device.way()];
    ways.extend([1, 3, 132, 500].map(Way::Blocks));
    ways.extend((batch <= MOST_SEQUENCES as usize).then_some(Way::Together));
    for &way in &ways {
        on_device.reset(&inputs)?;
        on_device.launch_with(0, way)?;
        if let Some(what) = on_device.check(0, &expected)? {
            return Err(format!("batch {batch}, longest {longest}, seed {seed}, {way:?}: {what}").into());
        }
    }
    if inputs.operator == Operator::Match && size_of::<T>() == 8 && seed < 4 {
        let inputs = Inputs::<i64>::random(batch, longest, seed + (batch * 31 + longest) as u64);
        let expected = inputs.expected();
        let mut on_device = Batch::new(device, &inputs, 1)?;
        for peer in [Peer::Plain, Peer::BlockScan] {
            on_device.reset(&inputs)?;
            on_device.launch_peer(0, peer)?;
            if let Some(what) = on_device.check(0, &expected)? {
                return Err(format!("batch {batch}, longest {longest}, seed {seed}, {peer:?}: {what}").into());
            }
        }
        return Ok(ways.len() + 2);
    }
    Ok(ways.len())
}

/// Microseconds of a graph with a single call, replayed back to back, and of a graph with an empty kernel.
fn alone(device: &Device, case: Published) -> Result<(f64, f64), Box<dyn Error>> {
    let batch = Batch::new(device, &case.inputs::<i64>(), 1)?;
    let timer = device.timer()?;
    let median = |work: &dyn Fn() -> Result<(), host::Error>| -> Result<f64, Box<dyn Error>> {
        let mut graph = device.capture(work)?;
        graph.launch()?;
        let mut times = Vec::new();
        for _ in 0..REPEATS {
            times.push(timer.time(|| (0..REPLAYS).try_for_each(|_| graph.launch()))? * 1e3 / REPLAYS as f64);
        }
        times.sort_by(f64::total_cmp);
        Ok(times[times.len() / 2])
    };
    let nothing = bench_kernels::ceilings::Nothing { nothing: 0 };
    Ok((
        median(&|| batch.launch(0))?,
        // SAFETY: it touches nothing.
        median(&|| unsafe { device.launch::<bench_kernels::ceilings::ceiling_launch>(1, 0, nothing) })?,
    ))
}

fn us(figures: Option<Figures>) -> f64 {
    figures.map_or(f64::NAN, |f| f.seconds * 1e6)
}

fn figure(figures: Option<Figures>) -> String {
    figures.map_or("-".into(), |f| format!("{:.2} µs ± {:.1} %", f.seconds * 1e6, f.spread * 50.0))
}

fn print_case(name: &str, m: &Measurement) {
    let seconds = |s: Option<f64>| s.map_or("-".into(), |s| format!("{:.0} µs", s * 1e6));
    println!(
        "  {name:<20} {}; plain {:.1}, block scan {:.1}; serial {}, over the host {} ({} copies)",
        figure(m.kernel),
        us(m.plain),
        us(m.block_scan),
        seconds(m.serial),
        seconds(m.over_host),
        m.sets
    );
}

fn case_json(name: &str, m: &Measurement) -> String {
    let p = m.published;
    let mut s = format!(
        "{{\"name\": \"{name}\", \"batch\": {}, \"length\": {}, \"threshold\": {}, \"hit\": \"{}\"",
        p.batch,
        p.length,
        p.threshold,
        p.hit.name()
    );
    let spread = m.kernel.map_or(0.0, |f| f.spread);
    let _ = write!(s, ", \"us\": {:.3}, \"spread\": {spread:.4}", us(m.kernel));
    let _ = write!(s, ", \"plain_us\": {:.3}, \"block_scan_us\": {:.3}", us(m.plain), us(m.block_scan));
    let host = |s: Option<f64>| s.map_or(f64::NAN, |s| s * 1e6);
    let _ = write!(s, ", \"serial_us\": {:.1}, \"over_host_us\": {:.1}}}", host(m.serial), host(m.over_host));
    s
}
