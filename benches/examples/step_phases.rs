//! Where the time of a decode step goes: the mean time, over blocks and layers, between the points that a step passes.
//!
//! `step_phases SIZE CONTEXT ROWS`, such as `step_phases 8B 128 1`. Random weights.

use std::collections::BTreeMap;

use benches::Arguments;
use gpu_kernels::step::{self, PlanDecode, STATE_WORDS, SequenceState};
use host::forward::Forward;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments = Arguments::read()?;
    let [size, context, rows] = arguments.words.as_slice() else {
        return Err("usage: step_phases SIZE CONTEXT ROWS".into());
    };
    let (context, rows): (u32, u32) = (context.parse()?, rows.parse()?);
    let (config, device) = arguments.subject(size)?;
    let mut forward = Forward::new(&device, &config, arguments.weights(&config, &device)?, context as usize)?;
    if !forward.prepare_decode()? {
        return Err("this card cannot stream".into());
    }
    let history = device.zeroed::<i32>(context as usize)?;
    let mut words = device.zeroed::<u32>(STATE_WORDS)?;
    words.write(0, &[context - rows + 1, 0, 0, 0])?;
    let (drafts, draft_rows) = (device.zeroed::<i32>(16)?, device.upload(&[rows as i32])?);
    forward.begin_trace()?;
    let mut sums: BTreeMap<(String, String), (u64, u64, u64)> = BTreeMap::new();
    let mut steps = Vec::new();
    for repeat in 0..6 {
        let plan = PlanDecode {
            rows: forward.rows(),
            state: SequenceState { history: history.ptr_mut(), words: words.ptr_mut() },
            drafts: drafts.ptr(),
            draft_rows: draft_rows.ptr(),
            counters: forward.counters(),
            cost: Default::default(),
        };
        // SAFETY: the history has the tokens, and rows have room for a step; the plan zeroes the counters.
        unsafe {
            device.launch::<step::plan_decode>(1, 0, plan)?;
            forward.enqueue_decode(rows, context)?;
        }
        let blocks = forward.take_trace()?;
        if repeat == 0 {
            continue;
        }
        let first = blocks.iter().filter_map(|b| b.first()).map(|p| p.1).min().unwrap_or(0);
        let last = blocks.iter().filter_map(|b| b.last()).map(|p| p.1).max().unwrap_or(0);
        steps.push((last - first) as f64 / 1e3);
        for block in &blocks {
            for (i, pair) in block.windows(2).enumerate() {
                let before = if i > 0 { format!("{:?}", block[i - 1].0) } else { String::new() };
                let name = (format!("{:?} > {:?}", pair[0].0, pair[1].0), before);
                let entry = sums.entry(name).or_default();
                let time = pair[1].1 - pair[0].1;
                *entry = (entry.0 + time, entry.1 + 1, entry.2.max(time));
            }
        }
    }
    println!("{size}, context {context}, {rows} rows: steps of {steps:.1?} µs");
    for ((name, before), (sum, count, most)) in sums {
        println!(
            "{before:>9} > {name:24} {:8.2} µs mean {:8.2} max  × {count}",
            sum as f64 / count as f64 / 1e3,
            most as f64 / 1e3
        );
    }
    Ok(())
}
