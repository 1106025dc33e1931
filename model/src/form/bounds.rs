//! Bounds of what is compiled. The engine recurses into a form: as it compiles it, into rules, references and brackets;
//! as it computes masks, into tokens and conditions. A form must not overflow the stack, whoever sends it.

use llguidance::derivre::{ExprRef, RegexBuilder};
use llguidance::earley::CGrammar;
use serde_json::Value;

/// Bytes of stack for the thread that compiles. Each part of a grammar or a schema takes at most 5 KiB, so that
/// [`MOST_PARTS`] take half of it.
pub const STACK: usize = 512 << 20;
/// Most rules and brackets of a grammar, and most objects and arrays of a schema. The engine refuses schemas that are
/// about as large.
const MOST_PARTS: usize = 50_000;
/// Most brackets of the conditions in a line (`%if`). A mask evaluates conditions, in a thread with 2 MiB of stack or
/// more, and many times.
const MOST_IN_CONDITIONS: usize = 1_000;
/// Deepest nesting of tokens. A mask takes up to 740 bytes of stack for each level.
const MOST_NESTED: usize = 1_000;

/// Refuses a grammar in Lark's notation that is too large.
pub fn lark(grammar: &str) -> Result<(), String> {
    let brackets = |text: &str| text.bytes().filter(|byte| b"([{".contains(byte)).count();
    // Every rule and every token has a line of its own, and so has every condition.
    let rules = grammar.lines().filter(|line| line.contains(':')).count();
    within(rules + brackets(grammar), MOST_PARTS, "the grammar has", "rules and brackets")?;
    let conditions = |line: &str| line.split_once("%if").map_or(0, |(_, conditions)| brackets(conditions));
    let most = grammar.lines().map(conditions).max().unwrap_or(0);
    within(most, MOST_IN_CONDITIONS, "a line of the grammar has", "brackets in its conditions (`%if`)")
}

/// Refuses a JSON Schema that is too large.
pub fn schema(schema: &Value) -> Result<(), String> {
    let (mut parts, mut todo) = (0, vec![schema]);
    while let Some(value) = todo.pop() {
        match value {
            Value::Object(fields) => todo.extend(fields.values()),
            Value::Array(values) => todo.extend(values),
            _ => continue,
        }
        parts += 1;
    }
    within(parts, MOST_PARTS, "the schema has", "objects and arrays")
}

/// Refuses a grammar whose tokens are nested too deeply. It is compiled already, since only then is this known.
pub fn tokens(grammar: &CGrammar) -> Result<(), String> {
    // The engine does not recurse into the rest of a sequence.
    let sequence = |regex: &str| {
        let mut samples = RegexBuilder::new();
        samples.mk_regex(regex).map(|sample| samples.exprset().get_tag(sample))
    };
    let sequences = [sequence("[ab][cd]"), sequence("ab")].map(Result::ok);
    let regexes = grammar.lexer_spec().regex_builder.exprset();
    let mut depths = vec![0usize; regexes.len()];
    // A regex comes after its parts.
    for id in 1..regexes.len() {
        let regex = ExprRef::new(id as u32);
        let is_sequence = sequences.contains(&Some(regexes.get_tag(regex)));
        let (last, others) = match regexes.get_args(regex) {
            [others @ .., last] if is_sequence => (Some(last), others),
            parts => (None, parts),
        };
        let within = others.iter().map(|part| depths[part.as_usize()] + 1).max();
        let after = last.map(|rest| depths[rest.as_usize()]);
        depths[id] = within.max(after).unwrap_or(0);
    }
    let deepest = depths.into_iter().max().unwrap_or(0);
    within(deepest, MOST_NESTED, "its tokens are nested", "deep")
}

fn within(found: usize, most: usize, has: &str, what: &str) -> Result<(), String> {
    if found <= most { Ok(()) } else { Err(format!("{has} {found} {what}, and the most is {most}")) }
}
