//! Writes `.maxntid`, `.minnctapersm` and `.reqnctapercluster` into kernel headers.
//!
//! rustc has no way to state a kernel's block size. Without it, the assembler may give a thread more registers than a
//! block of that size can have. `#[kernel(threads = …)]` leaves a comment, `//@launch_bounds NAME THREADS [MIN_BLOCKS
//! [CLUSTER]]`, where 0 means unspecified. This pass turns the comment into directives.

use std::collections::HashMap;
use std::fmt::Write;

/// Adds the directives that `ptx`'s comments ask for.
pub fn apply(ptx: &str) -> String {
    let bounds: HashMap<&str, Vec<&str>> = ptx
        .lines()
        .filter_map(|line| line.trim().strip_prefix("//@launch_bounds "))
        .filter_map(|rest| {
            let mut words = rest.split_whitespace();
            Some((words.next()?, words.collect()))
        })
        .collect();
    let mut out = String::with_capacity(ptx.len());
    let mut pending: Option<&Vec<&str>> = None;
    for line in ptx.lines() {
        if let Some(rest) = line.trim_start().strip_prefix(".visible .entry ") {
            let name = rest.split(['(', ' ']).next().unwrap_or_default();
            pending = bounds.get(name);
        }
        if line.starts_with('{')
            && let Some(words) = pending.take()
        {
            // With the cluster size in the header, the kernel needs no cluster attribute at launch.
            let directives = [".maxntid ", ".minnctapersm ", ".explicitcluster\n.reqnctapercluster "];
            for (directive, value) in directives.iter().zip(words).filter(|(_, value)| **value != "0") {
                let _ = writeln!(out, "{directive}{value}");
            }
        }
        out.push_str(line);
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    #[test]
    fn bounds_go_between_parameters_and_body() {
        let ptx = "//@launch_bounds add 288 0 2\n.visible .entry add(\n\t.param .u64 p\n)\n{\n\tret;\n}\n\
                   .visible .entry other()\n{\n\tret;\n}\n";
        let want = "//@launch_bounds add 288 0 2\n.visible .entry add(\n\t.param .u64 p\n)\n.maxntid 288\n\
                    .explicitcluster\n.reqnctapercluster 2\n{\n\tret;\n}\n\
                   .visible .entry other()\n{\n\tret;\n}\n";
        assert_eq!(super::apply(ptx), want);
    }
}
