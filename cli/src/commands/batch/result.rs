//! A line of results, in OpenAI's batch form.

use host::Finish;
use host::batch::{Answer, Logprobs};
use model::Tokenizer;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::identity::{Identity, Key, PREFIX};
use super::request::{Form, Refusal};

/// What is the same in every line.
pub struct Writer {
    /// The model, as the user named it.
    pub model: String,
    /// Of the settings that shape answers.
    pub fingerprint: String,
    /// For the texts of tokens in log-probabilities.
    pub tokenizer: Tokenizer,
}

/// A request's name in its result.
#[derive(Clone, Debug)]
pub struct Name {
    /// Which line.
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
    /// Always 0: equal runs give equal bytes.
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
    /// The line for an answer, with its end; `seed` if the answer was sampled.
    pub fn answer(&self, name: &Name, form: Form, answer: &Answer, seed: Option<u64>) -> String {
        let finish = match answer.finish {
            Finish::Stop => "stop",
            Finish::Length | Finish::Interrupted => "length",
        };
        let (object, id, choice) = match form {
            Form::Chat => {
                let message = json!({"role": "assistant", "content": answer.text});
                let logprobs = self.chat_logprobs(answer);
                let choice = json!({"index": 0, "message": message, "logprobs": logprobs, "finish_reason": finish});
                ("chat.completion", "chatcmpl", choice)
            }
            Form::Completion => {
                let logprobs = self.completion_logprobs(answer);
                let choice = json!({"index": 0, "text": answer.text, "logprobs": logprobs, "finish_reason": finish});
                ("text_completion", "cmpl", choice)
            }
        };
        let Identity { line, digest } = name.identity;
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
        let one = |token: u32, logprob: f32| json!({"token": self.text(token), "logprob": finite(logprob), "bytes": self.tokenizer.token_bytes(token)});
        let each = |(&token, logprobs): (&u32, &Logprobs)| {
            let mut entry = one(token, logprobs.chosen);
            entry["top_logprobs"] = logprobs.top.iter().map(|&(token, logprob)| one(token, logprob)).collect();
            entry
        };
        json!({"content": answer.tokens.iter().zip(&answer.logprobs).map(each).collect::<Vec<_>>()})
    }

    fn completion_logprobs(&self, answer: &Answer) -> Value {
        if answer.logprobs.is_empty() {
            return Value::Null;
        }
        let texts: Vec<String> = answer.tokens.iter().map(|&token| self.text(token)).collect();
        let offset = |at: &mut usize, text: &String| {
            let here = *at;
            *at += text.chars().count();
            Some(here)
        };
        let top = |logprobs: &Logprobs| -> Value {
            logprobs
                .top
                .iter()
                .map(|&(token, logprob)| (self.text(token), finite(logprob)))
                .collect::<serde_json::Map<_, _>>()
                .into()
        };
        json!({
            "text_offset": texts.iter().scan(0, offset).collect::<Vec<_>>(),
            "token_logprobs": answer.logprobs.iter().map(|l| finite(l.chosen)).collect::<Vec<_>>(),
            "top_logprobs": answer.logprobs.iter().map(top).collect::<Vec<_>>(),
            "tokens": texts,
        })
    }

    /// A token's text: what is not UTF-8 by itself in U+FFFD.
    fn text(&self, token: u32) -> String {
        self.tokenizer.decode_with_special(&[token])
    }
}

/// A token that cannot be has minus infinity, which JSON cannot say; OpenAI says -9999.
fn finite(logprob: f32) -> Value {
    json!(if logprob.is_finite() { logprob } else { -9999.0 })
}

/// The line for a request that cannot be answered, with its end.
pub fn refusal(name: &Name, refusal: &Refusal) -> String {
    let Refusal { code, message } = refusal;
    let error = json!({"code": code, "message": message, "line": name.identity.line});
    line_of(name, None, Some(error))
}

fn line_of(name: &Name, response: Option<Response>, error: Option<Value>) -> String {
    let line = Line { id: name.identity.to_string(), custom_id: name.key.id(), response, error };
    // Text, numbers and arrays of them: it always writes.
    serde_json::to_string(&line).unwrap_or_default() + "\n"
}

/// What of a result must be known to go on behind it, or to put it with others.
#[derive(Debug, PartialEq, Eq)]
pub struct Written {
    /// Whose it is.
    pub identity: Identity,
    /// The settings that made it; an error has none.
    pub fingerprint: Option<String>,
}

impl Written {
    /// Whether a line, of which there may be only the beginning, may be one of this program's.
    pub fn begins(line: &[u8]) -> bool {
        let begins = format!("{{\"id\":\"{PREFIX}");
        begins.bytes().zip(line).all(|(a, b)| a == *b)
    }

    /// Reads a line of results; none if it is not one of this program's.
    pub fn parse(line: &[u8]) -> Option<Self> {
        #[derive(Deserialize)]
        struct Line {
            id: String,
            response: Option<Response>,
        }
        #[derive(Deserialize)]
        struct Response {
            body: Body,
        }
        #[derive(Deserialize)]
        struct Body {
            system_fingerprint: String,
        }
        let line: Line = serde_json::from_slice(line).ok()?;
        let fingerprint = line.response.map(|response| response.body.system_fingerprint);
        Some(Self { identity: Identity::parse(&line.id)?, fingerprint })
    }
}
