//! The parts of an answer: what the model thought, what it says, and which tools it calls.
//!
//! Qwen3 writes `<think>…</think>` before what it says, and `<tool_call>{"name": …, "arguments": …}</tool_call>` for
//! each tool that it calls. Some templates open the thought in the prompt, so that the answer holds only the closing
//! tag. [`Splitter`] takes an answer apart, piece by piece while it is generated or as a whole.

use serde::Deserialize;
use serde_json::value::RawValue;

pub(super) const THINK: &str = "<think>";
const END_THINK: &str = "</think>";
const CALL: &str = "<tool_call>";
const END_CALL: &str = "</tool_call>";

/// A call of a tool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolCall {
    /// The tool's name.
    pub name: String,
    /// Its arguments: JSON, as the model wrote it.
    pub arguments: String,
}

impl ToolCall {
    /// Parses the JSON between the tags.
    fn parse(json: &str) -> serde_json::Result<Self> {
        #[derive(Deserialize)]
        struct Call<'a> {
            name: String,
            #[serde(borrow)]
            arguments: Option<&'a RawValue>,
        }
        let Call { name, arguments } = serde_json::from_str(json)?;
        let arguments = arguments.map_or("{}", RawValue::get);
        // Some models encode the arguments twice: as a string that holds JSON.
        let arguments = serde_json::from_str(arguments).unwrap_or_else(|_| arguments.to_owned());
        Ok(ToolCall { name, arguments })
    }
}

/// A part of an answer, of one kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Piece {
    /// Text that the model thinks.
    Thought(String),
    /// Text that it says.
    Content(String),
    /// A tool that it calls.
    ToolCall(ToolCall),
}

/// Takes an answer apart while it is generated.
///
/// Tags are removed, with the line breaks between them and the text. Text that may be the beginning of a tag is held
/// back until that is certain. A thought can only come first: what looks like a thought later is content.
#[derive(Debug, Clone)]
pub struct Splitter {
    state: State,
    tools: bool,
    /// Text about which nothing is decided yet.
    held: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Only white space has come so far. `opened`: the prompt has opened a thought.
    Start { opened: bool },
    /// In a thought. `begun`: some of its text has come.
    Thought { begun: bool },
    /// After a thought or a call, while only line breaks have come.
    Behind,
    /// In the content.
    Content,
    /// After the tag that begins a call. `held` begins with the line breaks before the tag, and the tag; the call's
    /// text begins at `from`.
    Call { from: usize },
}

impl Splitter {
    /// A splitter for the answer to `prompt`, as the template made it. `tools`: whether there are tools to call; if
    /// not, what looks like a call is content.
    pub fn new(prompt: &str, tools: bool) -> Self {
        let opened = prompt.trim_end().ends_with(THINK);
        Splitter { state: State::Start { opened }, tools, held: String::new() }
    }

    /// Takes the next text, and returns the pieces that are certain with it.
    pub fn push(&mut self, text: &str) -> Vec<Piece> {
        self.held.push_str(text);
        let mut pieces = Vec::new();
        while self.step(&mut pieces) {}
        pieces
    }

    /// Ends the answer, and returns what was held back. A call without its closing tag is content.
    pub fn finish(mut self) -> Vec<Piece> {
        let rest = std::mem::take(&mut self.held);
        match self.state {
            _ if rest.is_empty() => Vec::new(),
            State::Behind => Vec::new(),
            State::Start { opened: true } | State::Thought { .. } => vec![Piece::Thought(rest)],
            State::Start { opened: false } | State::Content | State::Call { .. } => vec![Piece::Content(rest)],
        }
    }

    /// Takes a whole answer apart.
    pub fn answer(mut self, text: &str) -> Answer {
        let mut pieces = self.push(text);
        pieces.extend(self.finish());
        pieces.into_iter().collect()
    }

    /// Decides about some of the held text. Returns false if all that is left depends on text still to come.
    fn step(&mut self, pieces: &mut Vec<Piece>) -> bool {
        match self.state {
            State::Start { opened } => {
                let text = self.held.trim_start();
                if let Some(rest) = text.strip_prefix(THINK) {
                    self.go(State::Thought { begun: false }, self.held.len() - rest.len());
                    true
                } else if THINK.starts_with(text) {
                    false
                } else {
                    self.state = if opened { State::Thought { begun: false } } else { State::Content };
                    true
                }
            }
            State::Thought { begun } => {
                if !begun {
                    self.skip_breaks();
                }
                let (until, ended) = match self.held.find(END_THINK) {
                    Some(at) => (without_breaks(&self.held[..at]), Some(at + END_THINK.len())),
                    None => (undecided(&self.held, END_THINK), None),
                };
                self.say(Piece::Thought, until, pieces);
                match ended {
                    Some(end) => self.go(State::Behind, end),
                    None => {
                        self.go(State::Thought { begun: begun || until > 0 }, until);
                        return false;
                    }
                }
                true
            }
            State::Behind => {
                self.skip_breaks();
                let more = !self.held.is_empty();
                if more {
                    self.state = State::Content;
                }
                more
            }
            State::Content => {
                let (until, call) = match self.held.find(CALL).filter(|_| self.tools) {
                    Some(at) => (without_breaks(&self.held[..at]), Some(at + CALL.len())),
                    None if self.tools => (undecided(&self.held, CALL), None),
                    None => (self.held.len(), None),
                };
                self.say(Piece::Content, until, pieces);
                let state = call.map_or(State::Content, |from| State::Call { from: from - until });
                self.go(state, until);
                call.is_some()
            }
            State::Call { from } => self.call(from, pieces),
        }
    }

    /// As `step`, within a call whose text begins at `from` in `held`.
    fn call(&mut self, from: usize, pieces: &mut Vec<Piece>) -> bool {
        let text = &self.held[from..];
        for (at, _) in text.match_indices(END_CALL) {
            let end = from + at + END_CALL.len();
            match ToolCall::parse(&text[..at]) {
                Ok(call) => {
                    pieces.push(Piece::ToolCall(call));
                    // A line break stands between two calls: `Behind` skips it.
                    self.go(State::Behind, end);
                    return true;
                }
                // This tag stands inside a string of the JSON.
                Err(error) if error.to_string().starts_with("EOF while parsing a string") => {}
                Err(_) => {
                    self.say(Piece::Content, end, pieces);
                    self.go(State::Content, end);
                    return true;
                }
            }
        }
        false
    }

    fn say(&self, kind: fn(String) -> Piece, until: usize, pieces: &mut Vec<Piece>) {
        if until > 0 {
            pieces.push(kind(self.held[..until].to_owned()));
        }
    }

    fn go(&mut self, state: State, behind: usize) {
        self.held.drain(..behind);
        self.state = state;
    }

    fn skip_breaks(&mut self) {
        let breaks = self.held.len() - self.held.trim_start_matches(BREAKS).len();
        self.held.drain(..breaks);
    }
}

/// The line breaks that templates write between tags and text.
const BREAKS: [char; 2] = ['\n', '\r'];

/// The length of `text` without the line breaks at its end.
fn without_breaks(text: &str) -> usize {
    text.trim_end_matches(BREAKS).len()
}

/// The length of the part of `text` that can belong neither to a `tag` still to come nor to the line breaks before that
/// tag.
fn undecided(text: &str, tag: &str) -> usize {
    let begun = (1..tag.len()).rev().find(|&n| text.ends_with(&tag[..n])).unwrap_or(0);
    without_breaks(&text[..text.len() - begun])
}

/// An answer, taken apart.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Answer {
    /// What the model thought, if it thought.
    pub reasoning_content: Option<String>,
    /// What it says.
    pub content: String,
    /// The tools that it calls.
    pub tool_calls: Vec<ToolCall>,
}

impl FromIterator<Piece> for Answer {
    fn from_iter<T: IntoIterator<Item = Piece>>(pieces: T) -> Self {
        let mut answer = Answer::default();
        for piece in pieces {
            match piece {
                Piece::Thought(text) => answer.reasoning_content.get_or_insert_default().push_str(&text),
                Piece::Content(text) => answer.content.push_str(&text),
                Piece::ToolCall(call) => answer.tool_calls.push(call),
            }
        }
        answer
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: &str = "<|im_start|>assistant\n";
    const OPENED: &str = "<|im_start|>assistant\n<think>\n";
    const CLOSED: &str = "<|im_start|>assistant\n<think>\n\n</think>\n\n";

    /// The parts of an answer. Checks that they do not depend on how its text is cut into pieces.
    fn answer(prompt: &str, text: &str, tools: bool) -> Answer {
        let whole = Splitter::new(prompt, tools).answer(text);
        for size in 1..=9 {
            let mut splitter = Splitter::new(prompt, tools);
            let chars: Vec<char> = text.chars().collect();
            let mut pieces: Vec<Piece> =
                chars.chunks(size).flat_map(|chunk| splitter.push(&chunk.iter().collect::<String>())).collect();
            pieces.extend(splitter.finish());
            assert_eq!(pieces.into_iter().collect::<Answer>(), whole, "{text:?} in pieces of {size}");
        }
        whole
    }

    fn said(content: &str) -> Answer {
        Answer { content: content.into(), ..Answer::default() }
    }

    fn thought(thought: &str, content: &str) -> Answer {
        Answer { reasoning_content: Some(thought.into()), ..said(content) }
    }

    fn calls(calls: &[(&str, &str)], rest: Answer) -> Answer {
        let call = |&(name, arguments): &(&str, &str)| ToolCall { name: name.into(), arguments: arguments.into() };
        Answer { tool_calls: calls.iter().map(call).collect(), ..rest }
    }

    #[test]
    fn thoughts_are_told_from_what_is_said_whoever_opens_them() {
        assert_eq!(answer(PLAIN, "<think>\nadd\n</think>\n\n2\n", false), thought("add", "2\n"));
        assert_eq!(answer(OPENED, "add\n</think>\n\n2", false), thought("add", "2"));
        assert_eq!(
            answer(OPENED, "\n<think>\nadd\n\nmore </thin\n</think>2", false),
            thought("add\n\nmore </thin", "2")
        );
        assert_eq!(answer(CLOSED, "2 é", false), said("2 é"));
        assert_eq!(answer(PLAIN, "<think>\n\n</think>\n\n2", false), said("2"));
        // Answers that a limit cut off.
        assert_eq!(answer(PLAIN, "<think>\nadd\n", false), thought("add\n", ""));
        assert_eq!(answer(OPENED, "add </thi", false), thought("add </thi", ""));
        assert_eq!(answer(PLAIN, "<thi", false), said("<thi"));
        assert_eq!(answer(PLAIN, "", false), said(""));
    }

    #[test]
    fn what_looks_like_a_thought_later_is_said() {
        let text = "\n Write <think>\nhere\n</think>\n\n, then\n\n";
        assert_eq!(answer(PLAIN, text, true), said(text));
        assert_eq!(answer(OPENED, "a\n</think>\n\nb</think>c", true), thought("a", "b</think>c"));
    }

    #[test]
    fn calls_are_taken_out_as_they_were_written() {
        let one = "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"b\":  2, \"a\": 1}}\n</tool_call>";
        let expected = [("add", "{\"b\":  2, \"a\": 1}")];
        assert_eq!(answer(PLAIN, one, true), calls(&expected, said("")));
        let text = format!("<think>\nx <tool_call>\n</think>\n\nLet me see.\n{one}\n{one}\n");
        let twice = [expected[0], expected[0]];
        assert_eq!(answer(PLAIN, &text, true), calls(&twice, thought("x <tool_call>", "Let me see.")));
        // Without tools, a call is content.
        assert_eq!(answer(PLAIN, one, false), said(one));
    }

    #[test]
    fn arguments_may_hold_the_tag_be_a_string_or_be_left_out() {
        let tag = r#"<tool_call>{"name": "f", "arguments": {"x": "</tool_call>"}}</tool_call>!"#;
        assert_eq!(answer(PLAIN, tag, true), calls(&[("f", r#"{"x": "</tool_call>"}"#)], said("!")));
        let string = r#"<tool_call>{"name": "f", "arguments": "{\"x\": 1}"}</tool_call>"#;
        assert_eq!(answer(PLAIN, string, true), calls(&[("f", r#"{"x": 1}"#)], said("")));
        let none = r#"<tool_call>{"name": "f"}</tool_call>"#;
        assert_eq!(answer(PLAIN, none, true), calls(&[("f", "{}")], said("")));
    }

    #[test]
    fn what_is_no_call_is_said_as_it_stands() {
        let good = r#"<tool_call>{"name": "f"}</tool_call>"#;
        for bad in [
            "<tool_call>nothing</tool_call>",
            r#"<tool_call>{"nam": 1}</tool_call>"#,
            r#"<tool_call>{"name": "g", "arguments": {}</tool_call>"#,
            "<tool_call></tool_call>",
        ] {
            assert_eq!(
                answer(PLAIN, &format!("a\n{bad}\n{good}"), true),
                calls(&[("f", "{}")], said(&format!("a\n{bad}")))
            );
        }
        for cut in ["a\n\n<tool_call>{\"name\": \"f", "a\n\n<tool_ca", "a\n\n"] {
            assert_eq!(answer(PLAIN, cut, true), said(cut));
        }
    }
}
