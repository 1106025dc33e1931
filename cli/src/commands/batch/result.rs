//! A line of results, in OpenAI's batch form.

use host::Finish;
use host::batch::{Answer, Logprobs};
use model::{Tokenizer, chat};
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use super::identity::{Identity, Key, PREFIX};
use super::request::{Endpoint, Refusal};

/// What every line has in common.
pub struct Writer {
    /// The model, as the user named it.
    pub model: String,
    /// The fingerprint of the settings that shape answers.
    pub fingerprint: String,
    /// For the texts of tokens in log-probabilities.
    pub tokenizer: Tokenizer,
}

/// A request's name in its result.
#[derive(Clone, Debug)]
pub struct Name {
    /// The request's line.
    pub identity: Identity,
    /// Its `custom_id`, if any.
    pub key: Key,
}

#[derive(Serialize)]
struct Line<'a> {
    id: String,
    custom_id: Option<&'a str>,
    response: Option<Response>,
    error: Option<Value>,
}

#[derive(Serialize)]
struct Response {
    status_code: u16,
    request_id: String,
    body: Body,
}

#[derive(Serialize)]
struct Body {
    id: String,
    object: &'static str,
    /// Always 0, so that equal runs give equal bytes.
    created: u64,
    model: String,
    choices: [Value; 1],
    usage: Usage,
    system_fingerprint: String,
    seed: Option<u64>,
}

#[derive(Serialize)]
struct Usage {
    prompt_tokens: usize,
    completion_tokens: usize,
    total_tokens: usize,
}

impl Writer {
    /// The line for an answer, with its line break. `seed` is given if the answer was sampled.
    pub fn answer(&self, name: &Name, endpoint: &Endpoint, answer: &Answer, seed: Option<u64>) -> String {
        let Identity { line, digest } = name.identity;
        let finish = match answer.finish {
            Finish::Stop => "stop",
            Finish::Length | Finish::Interrupted => "length",
        };
        let (object, id, choice) = match endpoint {
            Endpoint::Chat(splitter) => {
                let parts = splitter.clone().answer(&answer.text);
                let finish = if finish == "stop" && !parts.tool_calls.is_empty() { "tool_calls" } else { finish };
                let message = message(parts, name.identity);
                let logprobs = self.chat_logprobs(answer);
                let choice = json!({"index": 0, "message": message, "logprobs": logprobs, "finish_reason": finish});
                ("chat.completion", "chatcmpl", choice)
            }
            Endpoint::Completion => {
                let logprobs = self.completion_logprobs(answer);
                let choice = json!({"index": 0, "text": answer.text, "logprobs": logprobs, "finish_reason": finish});
                ("text_completion", "cmpl", choice)
            }
        };
        let body = Body {
            id: format!("{id}-{line}-{digest:016x}"),
            object,
            created: 0,
            model: self.model.clone(),
            choices: [choice],
            usage: Usage {
                prompt_tokens: answer.prompt_tokens,
                completion_tokens: answer.tokens.len(),
                total_tokens: answer.prompt_tokens + answer.tokens.len(),
            },
            system_fingerprint: self.fingerprint.clone(),
            seed,
        };
        let response = Response { status_code: 200, request_id: format!("req_{line}_{digest:016x}"), body };
        line_of(name, Some(response), None)
    }

    fn chat_logprobs(&self, answer: &Answer) -> Value {
        if answer.logprobs.is_empty() {
            return Value::Null;
        }
        let one = |token: u32, logprob: f32| {
            let bytes = self.tokenizer.token_bytes(token);
            json!({"token": self.name(token), "logprob": finite(logprob), "bytes": bytes})
        };
        let each = |(&token, logprobs): (&u32, &Logprobs)| {
            let mut entry = one(token, logprobs.chosen);
            entry["top_logprobs"] = logprobs.top.iter().map(|&(token, logprob)| one(token, logprob)).collect();
            entry
        };
        let told = answer.tokens.iter().zip(&answer.logprobs).take(self.offsets(answer).len());
        json!({"content": told.map(each).collect::<Vec<_>>()})
    }

    fn completion_logprobs(&self, answer: &Answer) -> Value {
        if answer.logprobs.is_empty() {
            return Value::Null;
        }
        let offsets = self.offsets(answer);
        let (tokens, logprobs) = (&answer.tokens[..offsets.len()], &answer.logprobs[..offsets.len()]);
        let top = |logprobs: &Logprobs| -> Value {
            let mut top = serde_json::Map::new();
            for &(token, logprob) in &logprobs.top {
                let mut name = self.name(token);
                if top.contains_key(&name) {
                    name = by_id(token);
                }
                top.insert(name, finite(logprob));
            }
            top.into()
        };
        json!({
            "text_offset": offsets,
            "token_logprobs": logprobs.iter().map(|l| finite(l.chosen)).collect::<Vec<_>>(),
            "top_logprobs": logprobs.iter().map(top).collect::<Vec<_>>(),
            "tokens": tokens.iter().map(|&token| self.name(token)).collect::<Vec<_>>(),
        })
    }

    /// For each token that has a part in the text: where in the text it begins, in characters. Tokens of a stop text
    /// have no part in it and are left out. A special token takes no room. A token with a part of a character begins
    /// where the character does.
    fn offsets(&self, answer: &Answer) -> Vec<usize> {
        let mut stream = self.tokenizer.stream();
        let (mut bytes, mut chars) = (0, 0);
        let mut offsets = Vec::new();
        for &token in &answer.tokens {
            let has_text = !self.tokenizer.is_special(token) && !self.tokenizer.token_bytes(token).is_empty();
            if has_text && bytes >= answer.text.len() {
                break;
            }
            offsets.push(chars);
            if let Some(text) = stream.push(token) {
                bytes += text.len();
                chars += text.chars().count();
            }
        }
        offsets
    }

    /// A token's text. If it is no text by itself, its bytes, as OpenAI writes them.
    fn name(&self, token: u32) -> String {
        match str::from_utf8(self.tokenizer.token_bytes(token)) {
            Ok("") => by_id(token),
            Ok(text) => text.to_owned(),
            Err(_) => {
                let bytes = self.tokenizer.token_bytes(token).iter();
                "bytes:"
                    .chars()
                    .chain(bytes.flat_map(|byte| format!("\\x{byte:02x}").into_bytes()).map(char::from))
                    .collect()
            }
        }
    }
}

/// The name of a token that its text would not tell from others.
fn by_id(token: u32) -> String {
    format!("token_id:{token}")
}

/// The assistant's message.
fn message(answer: chat::Answer, identity: Identity) -> Value {
    let chat::Answer { reasoning_content, content, tool_calls } = answer;
    let mut message = serde_json::Map::new();
    message.insert("role".into(), "assistant".into());
    let is_silent = content.is_empty() && !tool_calls.is_empty();
    message.insert("content".into(), if is_silent { Value::Null } else { content.into() });
    if let Some(thought) = reasoning_content {
        message.insert("reasoning_content".into(), thought.into());
    }
    if !tool_calls.is_empty() {
        let Identity { line, digest } = identity;
        let call = |(i, chat::ToolCall { name, arguments }): (usize, chat::ToolCall)| {
            let function = json!({"name": name, "arguments": arguments});
            json!({"id": format!("call_{line}_{digest:016x}_{i}"), "type": "function", "function": function})
        };
        message.insert("tool_calls".into(), tool_calls.into_iter().enumerate().map(call).collect());
    }
    message.into()
}

/// A log-probability in JSON. An impossible token has minus infinity, which JSON cannot express; OpenAI writes -9999.
fn finite(logprob: f32) -> Value {
    json!(if logprob.is_finite() { logprob } else { -9999.0 })
}

/// The line for a request that cannot be answered, with its line break.
pub fn refusal(name: &Name, refusal: &Refusal) -> String {
    let Refusal { code, message } = refusal;
    let error = json!({"code": code, "message": message, "line": name.identity.line});
    line_of(name, None, Some(error))
}

fn line_of(name: &Name, response: Option<Response>, error: Option<Value>) -> String {
    let line = Line { id: name.identity.to_string(), custom_id: name.key.id(), response, error };
    // Text, numbers and arrays of them: this always serialises.
    let mut text = serde_json::to_string(&line).unwrap_or_default();
    let digest = xxh3_64(text.as_bytes());
    text.truncate(text.len() - 1);
    text + DIGEST + &format!("{digest:016x}\"}}\n")
}

/// What stands before the digest, which is a line's last field.
const DIGEST: &str = ",\"digest\":\"";

/// Whether a line is as it was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seal {
    /// Its digest is that of the rest of the line.
    Whole,
    /// Its digest is not that of the rest of the line.
    Broken,
    /// It has no digest: an older version wrote it.
    None,
}

impl Seal {
    /// The seal of a line without its line break.
    fn of(line: &[u8]) -> Self {
        let (digits, end) = (16, "\"}");
        let sealed = || {
            let rest = line.strip_suffix(end.as_bytes())?;
            let (rest, digest) = rest.split_at_checked(rest.len().checked_sub(digits)?)?;
            let digest = u64::from_str_radix(str::from_utf8(digest).ok()?, 16).ok()?;
            Some((rest.strip_suffix(DIGEST.as_bytes())?, digest))
        };
        let Some((rest, digest)) = sealed() else { return Seal::None };
        let mut hash = Xxh3::new();
        hash.update(rest);
        hash.update(b"}");
        if hash.digest() == digest { Seal::Whole } else { Seal::Broken }
    }
}

/// What must be known of a result to continue after it, or to merge it with others.
#[derive(Debug, PartialEq, Eq)]
pub struct Written {
    /// The request that it answers.
    pub identity: Identity,
    /// The fingerprint of the settings that made it; an error has none.
    pub fingerprint: Option<String>,
    /// Whether the line was changed since it was written.
    pub seal: Seal,
}

impl Written {
    /// Whether a line, of which there may be only the beginning, may be this program's.
    pub fn begins(line: &[u8]) -> bool {
        let begins = format!("{{\"id\":\"{PREFIX}");
        begins.bytes().zip(line).all(|(a, b)| a == *b)
    }

    /// Reads a line of results; `None` if it is not this program's.
    pub fn parse(line: &[u8]) -> Option<Self> {
        #[derive(Deserialize)]
        struct Line {
            id: String,
            response: Option<Response>,
            digest: Option<IgnoredAny>,
        }
        #[derive(Deserialize)]
        struct Response {
            body: Body,
        }
        #[derive(Deserialize)]
        struct Body {
            system_fingerprint: String,
        }
        let seal = Seal::of(line.trim_ascii_end());
        let line: Line = serde_json::from_slice(line).ok()?;
        // The digest is not the last field, so the line was written anew by something else.
        let seal = if seal == Seal::None && line.digest.is_some() { Seal::Broken } else { seal };
        let fingerprint = line.response.map(|response| response.body.system_fingerprint);
        Some(Self { identity: Identity::parse(&line.id)?, fingerprint, seal })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The choice that the writer makes of `text`, as the answer to a chat with this end of the prompt.
    fn chat(prompt: &str, text: &str, finish: Finish) -> Value {
        let tokenizer = model::Checkpoint::demo().unwrap().tokenizer;
        let tokens = tokenizer.encode(text).unwrap();
        let answer = Answer { text: text.into(), tokens, logprobs: Vec::new(), finish, prompt_tokens: 3 };
        let writer = Writer { model: "m".into(), fingerprint: "f".into(), tokenizer };
        let endpoint = Endpoint::Chat(chat::Splitter::new(prompt, true));
        let name = Name { identity: Identity { line: 2, digest: 10 }, key: Key::Line(2) };
        let line = writer.answer(&name, &endpoint, &answer, None);
        serde_json::from_str::<Value>(&line).unwrap()["response"]["body"]["choices"][0].take()
    }

    #[test]
    fn thoughts_and_calls_are_fields_of_their_own() {
        let call = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": 1}}\n</tool_call>";
        let choice = chat("…<think>\n", &format!("hm\n</think>\n\n{call}\n{call}"), Finish::Stop);
        let made = |i: usize| {
            let function = json!({"name": "f", "arguments": "{\"x\": 1}"});
            json!({"id": format!("call_2_000000000000000a_{i}"), "type": "function", "function": function})
        };
        let message =
            json!({"role": "assistant", "content": null, "reasoning_content": "hm", "tool_calls": [made(0), made(1)]});
        assert_eq!((&choice["message"], &choice["finish_reason"]), (&message, &json!("tool_calls")));
        let choice = chat("…", &format!("I look.\n{call}"), Finish::Length);
        assert_eq!((&choice["message"]["content"], &choice["finish_reason"]), (&json!("I look."), &json!("length")));
        let choice = chat("…", "Hi", Finish::Stop);
        assert_eq!(choice["message"], json!({"role": "assistant", "content": "Hi"}));
        assert_eq!(choice["finish_reason"], "stop");
    }

    #[test]
    fn each_token_has_its_place_and_a_name_of_its_own() {
        let tokenizer = model::Checkpoint::demo().unwrap().tokenizer;
        let id = |text: &str| *tokenizer.encode(text).unwrap().first().unwrap();
        let (end, crab) = (id("<|im_end|>"), tokenizer.encode("🦀").unwrap());
        assert!(crab.len() > 1 && tokenizer.is_special(end), "{crab:?}");
        // A special token in the middle, a character of several tokens, and a stop text, which is not in the answer.
        let tokens = [&[id("a"), end], crab.as_slice(), &[id("b"), id("!"), id("!")]].concat();
        let nameless = tokenizer.vocab_size() as u32;
        let top = vec![
            (id("a"), -1.0),
            (nameless, -2.0),
            (nameless + 1, -3.0),
            (crab[0], -4.0),
            (crab[1], f32::NEG_INFINITY),
        ];
        let logprobs = tokens.iter().map(|_| Logprobs { chosen: -1.0, top: top.clone() }).collect();
        let answer = Answer { text: "a🦀b".into(), tokens, logprobs, finish: Finish::Stop, prompt_tokens: 1 };
        let writer = Writer { model: "m".into(), fingerprint: "f".into(), tokenizer };
        let told = writer.completion_logprobs(&answer);
        let offsets: Vec<usize> = [&[0, 1][..], &vec![1; crab.len()], &[2]].concat();
        assert_eq!(told["text_offset"], json!(offsets));
        for field in ["tokens", "token_logprobs", "top_logprobs"] {
            assert_eq!(told[field].as_array().unwrap().len(), offsets.len(), "{field}");
        }
        let names: Vec<&String> = told["top_logprobs"][0].as_object().unwrap().keys().collect();
        assert_eq!(names[..3], ["a", &by_id(nameless), &by_id(nameless + 1)]);
        assert!(names.len() == 5 && names[3].starts_with("bytes:\\xf0"), "{names:?}");
        assert_eq!(told["top_logprobs"][0][names[4]], json!(-9999.0));
        assert_eq!(writer.chat_logprobs(&answer)["content"].as_array().unwrap().len(), offsets.len());
    }

    fn line() -> String {
        let name = Name { identity: Identity::of(3, b"{}"), key: Key::Id("a\"é".into()) };
        refusal(&name, &Refusal::new("invalid_request", "said"))
    }

    #[test]
    fn a_line_that_was_changed_is_told_from_one_that_was_not() {
        let line = line();
        let seal = |line: &str| Written::parse(line.as_bytes()).map(|written| written.seal);
        assert_eq!(seal(&line), Some(Seal::Whole));
        assert_eq!(seal(&line.replace('\n', "\r\n")), Some(Seal::Whole));
        let (rest, digest) = line.rsplit_once(DIGEST).unwrap();
        assert_eq!(seal(&format!("{rest}}}\n")), Some(Seal::None));
        let spaced = line.replace(",\"", ", \"");
        let turned = format!("{{\"digest\":\"{}\",{}}}", &digest[..16], &rest[1..]);
        for changed in [line.replace("said", "sald"), line.replace("_3_", "_4_"), spaced, turned] {
            assert_ne!(changed, line);
            assert_eq!(seal(&changed), Some(Seal::Broken), "{changed}");
        }
    }
}
