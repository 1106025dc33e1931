//! The Markdown pages: which there are, what tables of figures they hold, and where their links lead.
//!
//! A page asks for a table in a comment, a line for each row, `label | name of a figure`, with `| value` behind it
//! where the ratio says nothing beside the other card's. What follows, to the end mark, is made from `docs/benchmarks`:
//!
//! ```text
//! <!-- figures
//! one sequence, greedy | decode.m1.tok_s
//! -->
//! (the table)
//! <!-- end of figures -->
//! ```
//!
//! In the same way `batch-time` works out how long a million requests take, from lines of
//! `card name-of-a-figure tokens-of-an-answer`. `UPDATE_DOCS=1 cargo test -p integration-tests --test docs` writes the
//! pages anew.

use std::fmt::Write as _;
use std::process::Command;

use serde::Deserialize;

use crate::repository;

/// The files of figures, and what their cards are called.
const FILES: [(&str, &str); 2] = [("H100", "docs/benchmarks/h100.json"), ("H200", "docs/benchmarks/h200.json")];

/// A measured figure, as a line of `docs/benchmarks` has it.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Figure {
    /// What pages call it.
    pub name: String,
    /// What was measured, in `unit`.
    pub value: f64,
    /// The unit; `ratio` for a figure without one.
    pub unit: String,
    /// How it was made, and what `ratio` is to.
    pub reference: String,
    /// The figure beside its reference, if it has one.
    pub ratio: Option<f64>,
    /// The build that it was measured with.
    pub commit: String,
    /// The day, as `2026-11-23`.
    pub date: String,
}

/// The figures of one card.
#[derive(Debug, Clone)]
pub struct Card {
    /// The card's name.
    pub name: &'static str,
    /// Its figures, in the order of the file.
    pub figures: Vec<Figure>,
}

impl Card {
    fn figure(&self, name: &str) -> Option<&Figure> {
        self.figures.iter().find(|figure| figure.name == name)
    }
}

/// The figures of all cards.
///
/// # Panics
/// If a file is missing, is not a list of figures, or holds one twice.
#[must_use]
pub fn cards() -> Vec<Card> {
    let read = |(name, file): (&'static str, &str)| {
        let text = std::fs::read_to_string(repository().join(file)).unwrap_or_else(|error| panic!("{file}: {error}"));
        let figures: Vec<Figure> = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{file}: {error}"));
        for (i, figure) in figures.iter().enumerate() {
            let twice = figures[..i].iter().any(|other| other.name == figure.name);
            assert!(!twice, "{file}: `{}` is there twice", figure.name);
        }
        Card { name, figures }
    };
    FILES.map(read).to_vec()
}

/// The tracked files whose names match, and new ones that git does not ignore, relative to the root.
///
/// # Panics
/// If git does not list them.
#[must_use]
pub fn files(patterns: &[&str]) -> Vec<String> {
    // A clone that belongs to another user is listed all the same.
    let output = Command::new("git")
        .args(["-c", "safe.directory=*", "ls-files", "--cached", "--others", "--exclude-standard", "--"])
        .args(patterns)
        .current_dir(repository())
        .output()
        .unwrap_or_else(|error| panic!("git, which lists the files to check: {error}"));
    assert!(output.status.success(), "git ls-files: {}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).expect("names of files are UTF-8");
    // One that was removed and not committed yet is still listed.
    text.lines().filter(|file| repository().join(file).exists()).map(str::to_string).collect()
}

/// The page with its tables made anew.
///
/// # Errors
/// A sentence about the first block that is not closed, or asks for a figure that no file has.
pub fn rendered(page: &str, cards: &[Card]) -> Result<String, String> {
    let mut text = String::new();
    let mut lines = page.lines();
    let mut fenced = false;
    while let Some(line) = lines.next() {
        let _ = writeln!(text, "{line}");
        fenced ^= line.trim_start().starts_with("```");
        let Some(kind @ ("figures" | "batch-time")) = line.strip_prefix("<!-- ").filter(|_| !fenced) else { continue };
        let mut rows = Vec::new();
        loop {
            let line = lines.next().ok_or_else(|| format!("a comment `{kind}` has no line `-->`"))?;
            let _ = writeln!(text, "{line}");
            if line == "-->" {
                break;
            }
            rows.push(line);
        }
        text += &if kind == "figures" { table(&rows, cards)? } else { times(&rows, cards)? };
        let end = format!("<!-- end of {kind} -->");
        lines.by_ref().find(|line| *line == end).ok_or_else(|| format!("a block has no line `{end}`"))?;
        let _ = writeln!(text, "{end}");
    }
    Ok(text)
}

/// The names of the figures that a page shows.
#[must_use]
pub fn shown(page: &str) -> Vec<&str> {
    let blocks = page.split("\n<!-- figures\n").skip(1).map(|rest| rest.split("-->").next().unwrap_or_default());
    blocks.flat_map(str::lines).filter_map(|line| line.split(" | ").nth(1)).collect()
}

/// A table with a row for each line `label | name`.
fn table(rows: &[&str], cards: &[Card]) -> Result<String, String> {
    let mut text = String::from("|");
    cards.iter().for_each(|card| text += &format!(" | {}", card.name));
    text += " | unit | measured at |\n| --- |";
    text += &" ---: |".repeat(cards.len());
    text += " --- | --- |\n";
    for row in rows {
        let fields: Vec<&str> = row.split(" | ").collect();
        let (label, name, ratios) = match fields[..] {
            [label, name] => (label, name, true),
            [label, name, "value"] => (label, name, false),
            _ => return Err(format!("`{row}` is not `label | name of a figure`")),
        };
        let found: Vec<Option<&Figure>> = cards.iter().map(|card| card.figure(name)).collect();
        let unit =
            found.iter().flatten().next().ok_or_else(|| format!("no file has the figure `{name}`"))?.unit.clone();
        let unit = if unit == "us" { "µs".into() } else { unit };
        let mut commits: Vec<&str> = found.iter().flatten().map(|figure| &*figure.commit).collect();
        commits.dedup();
        let _ = write!(text, "| {label} |");
        for figure in &found {
            match figure {
                None => text += " |",
                Some(Figure { value, ratio: Some(ratio), unit, .. }) if ratios && unit != "ratio" => {
                    let _ = write!(text, " {} ({ratio}) |", number(*value));
                }
                Some(figure) => {
                    let _ = write!(text, " {} |", number(figure.value));
                }
            }
        }
        let _ = writeln!(text, " {unit} | {} |", commits.join(", "));
    }
    Ok(text)
}

/// How long a million requests take, for lines of `card name tokens-of-an-answer`.
fn times(rows: &[&str], cards: &[Card]) -> Result<String, String> {
    const REQUESTS: f64 = 1e6;
    const CARDS: f64 = 8.0;
    let mut text = String::from("```text\n");
    for row in rows {
        let wrong = || format!("`{row}` is not `card name-of-a-figure tokens`, with a figure of that card in tokens/s");
        let [card, name, tokens] = row.split(' ').collect::<Vec<_>>()[..] else { return Err(wrong()) };
        let card = cards.iter().find(|found| found.name == card).ok_or_else(wrong)?;
        let rate = card.figure(name).filter(|figure| figure.unit == "tokens/s").ok_or_else(wrong)?.value;
        let tokens: f64 = tokens.parse().map_err(|_| wrong())?;
        let seconds = REQUESTS * tokens / rate;
        let _ = writeln!(
            text,
            "{}: {} × {tokens} tokens ÷ {} tokens/s = {} s = {} on one card, {} on eight",
            card.name,
            number(REQUESTS),
            number(rate),
            number(seconds.round()),
            hours(seconds),
            hours(seconds / CARDS)
        );
    }
    text += "```\n";
    Ok(text)
}

/// Hours and minutes.
fn hours(seconds: f64) -> String {
    let minutes = (seconds / 60.0).round() as u64;
    format!("{} h {:02} min", minutes / 60, minutes % 60)
}

/// A number with commas between thousands, and the decimals that it has.
fn number(value: f64) -> String {
    let text = value.to_string();
    let (whole, decimals) = text.split_once('.').map_or((&*text, None), |(whole, decimals)| (whole, Some(decimals)));
    let mut grouped = String::new();
    for (i, digit) in whole.chars().enumerate() {
        if i > 0 && (whole.len() - i).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    decimals.map_or(grouped.clone(), |decimals| format!("{grouped}.{decimals}"))
}

/// The targets of a page's links and pictures, outside of code.
#[must_use]
pub fn links(page: &str) -> Vec<String> {
    let mut found = Vec::new();
    for line in prose(page) {
        let mut rest = line.as_str();
        while let Some((_, after)) = rest.split_once("](") {
            let Some((target, after)) = after.split_once(')') else { break };
            found.push(target.to_string());
            rest = after;
        }
    }
    found
}

/// The anchors of a page's headings, as GitHub makes them.
#[must_use]
pub fn anchors(page: &str) -> Vec<String> {
    let outside = outside_fences(page);
    let headings = outside.iter().filter(|line| line.starts_with('#')).map(|line| line.trim_start_matches('#').trim());
    let anchor = |heading: &str| {
        let kept = heading.to_lowercase();
        let kept = kept.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
        kept.map(|c| if c == ' ' { '-' } else { c }).collect()
    };
    headings.map(anchor).collect()
}

/// The lines that are not in a fenced block.
fn outside_fences(page: &str) -> Vec<&str> {
    let mut fenced = false;
    let outside = |line: &&str| {
        let fence = line.trim_start().starts_with("```");
        fenced ^= fence;
        !fenced && !fence
    };
    page.lines().filter(outside).collect()
}

/// Those lines without what stands between backticks.
fn prose(page: &str) -> impl Iterator<Item = String> + '_ {
    outside_fences(page).into_iter().map(|line| line.split('`').step_by(2).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn card(name: &'static str, value: f64, ratio: Option<f64>) -> Card {
        let figure = Figure {
            name: "a.tok_s".into(),
            value,
            unit: "tokens/s".into(),
            reference: String::new(),
            ratio,
            commit: "0123456".into(),
            date: "2026-11-23".into(),
        };
        Card { name, figures: vec![figure] }
    }

    #[test]
    fn a_table_shows_both_cards() {
        let cards = [card("H100", 12345.5, Some(0.5)), card("H200", 999.0, None)];
        let page = "<!-- figures\none | a.tok_s\n-->\nold\n<!-- end of figures -->\n";
        let text = rendered(page, &cards).unwrap();
        assert!(text.contains("| one | 12,345.5 (0.5) | 999 | tokens/s | 0123456 |\n"), "{text}");
        assert!(!text.contains("old"), "{text}");
        assert_eq!(rendered(&text, &cards).unwrap(), text);
        assert_eq!(shown(&format!("\n{text}")), ["a.tok_s"]);
    }

    #[test]
    fn what_no_file_has_is_an_error() {
        let cards = [card("H100", 1.0, None)];
        let missing = rendered("<!-- figures\none | b.tok_s\n-->\n<!-- end of figures -->\n", &cards);
        assert_eq!(missing.unwrap_err(), "no file has the figure `b.tok_s`");
        assert!(rendered("<!-- figures\none | a.tok_s\n-->\n", &cards).is_err());
    }

    #[test]
    fn a_million_requests_take_their_time() {
        let cards = [card("H100", 9775.0, None)];
        let page = "<!-- batch-time\nH100 a.tok_s 262\n-->\n<!-- end of batch-time -->\n";
        let text = rendered(page, &cards).unwrap();
        assert!(text.contains("= 26,803 s = 7 h 27 min on one card, 0 h 56 min on eight\n"), "{text}");
    }

    #[test]
    fn code_has_no_links() {
        let page = "[a](b.md#c) `[x](y)` ![p](q.svg)\n```\n[m](n)\n```\n## One `two`, three\n";
        assert_eq!(links(page), ["b.md#c", "q.svg"]);
        assert_eq!(anchors(page), ["one-two-three"]);
    }
}
