//! Parses a line of requests.

use std::sync::OnceLock;

use host::encode_prompt;
use model::chat::{Conversation, Splitter};
use model::text::shown;
use model::tokenizer::Around;
use model::{ChatTemplate, Checkpoint, Forms, GenerationConfig, Sampling, Shape, Tokenizer};
use serde_json::{Map, Value};

use super::identity::Key;
use super::{form, messages};
use crate::form::behind_thought;
use crate::json::{self, Wrong};
use crate::resolve::batch::Defaults;

/// What it takes to turn requests into jobs.
pub struct Reader {
    tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
    generation: GenerationConfig,
    defaults: Defaults,
    /// Most tokens of prompt and answer together: here, and (`most`) in the model.
    context: usize,
    most: usize,
    vocab_size: usize,
    /// Made when a request first asks for a form; the refusal if the model can have none.
    forms: OnceLock<Result<Forms, Refusal>>,
}

/// A request that can be answered, as far as can be told without the model.
#[derive(Debug)]
pub struct Wanted {
    /// The request, for the engine.
    pub request: host::Request,
    /// For how many of the likeliest tokens log-probabilities are wanted, if any are.
    pub logprobs: Option<u32>,
    /// Which endpoint it is for.
    pub endpoint: Endpoint,
}

/// The endpoints that a request may be for.
#[derive(Clone, Debug)]
pub enum Endpoint {
    /// A prompt: `/v1/completions`.
    Completion,
    /// Messages: `/v1/chat/completions`. The splitter takes the answer apart.
    Chat(Splitter),
}

/// Why a request cannot be answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// A code, for programs.
    pub code: &'static str,
    /// A sentence, for people.
    pub message: String,
}

impl Refusal {
    /// A refusal with this code and message.
    pub fn new(code: &'static str, message: impl Into<String>) -> Self {
        Refusal { code, message: message.into() }
    }

    /// A refusal of a request for something that is not supported.
    pub fn unsupported(message: impl Into<String>) -> Self {
        Self::new("unsupported", message)
    }

    /// A refusal of a request that is wrong in itself.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new("invalid_request", message)
    }
}

impl From<host::Error> for Refusal {
    fn from(error: host::Error) -> Self {
        let code = match error {
            host::Error::PromptTooLong { .. } | host::Error::PromptFarTooLong { .. } => "context_length_exceeded",
            host::Error::NotFinite { .. } => "not_finite",
            host::Error::FormLost { .. } => "unsupported_form",
            _ => "invalid_request",
        };
        Refusal::new(code, error.to_string())
    }
}

/// Fields of a body that shape an answer.
const KNOWN: &[&str] = &[
    "best_of",
    "chat_template_kwargs",
    "custom_id",
    "frequency_penalty",
    "guided_choice",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "ignore_eos",
    "logprobs",
    "max_completion_tokens",
    "max_tokens",
    "messages",
    "min_p",
    "n",
    "presence_penalty",
    "prompt",
    "repetition_penalty",
    "response_format",
    "seed",
    "stop",
    "structured_outputs",
    "temperature",
    "tool_choice",
    "tools",
    "top_k",
    "top_logprobs",
    "top_p",
];

/// Fields that do not shape an answer, whatever their values are.
const NOT_LOOKED_AT: &[&str] = &[
    "metadata",
    "model",
    "parallel_tool_calls",
    "priority",
    "prompt_cache_key",
    "prompt_cache_retention",
    "request_id",
    "safety_identifier",
    "service_tier",
    "store",
    "stream_options",
    "user",
];

/// Fields that would shape an answer, but are not supported. Each has the values (as JSON) that are accepted since they
/// ask for what is done anyway; empty values are accepted too.
const UNSUPPORTED: &[(&str, &[&str])] = &[
    ("add_generation_prompt", &["true"]),
    ("add_special_tokens", &[]),
    ("allowed_token_ids", &[]),
    ("audio", &[]),
    ("bad_words", &[]),
    ("continue_final_message", &["false"]),
    ("documents", &[]),
    ("echo", &["false"]),
    ("function_call", &["\"none\"", "\"auto\""]),
    ("functions", &[]),
    ("include_stop_str_in_output", &["false"]),
    ("length_penalty", &["1", "1.0"]),
    ("logit_bias", &[]),
    ("max_new_tokens", &[]),
    ("min_tokens", &["0"]),
    ("modalities", &["[\"text\"]"]),
    ("prediction", &[]),
    ("prompt_logprobs", &["0", "false"]),
    ("reasoning_effort", &[]),
    ("skip_special_tokens", &["true"]),
    ("stop_token_ids", &[]),
    ("stream", &["false"]),
    ("suffix", &[]),
    ("truncate_prompt_tokens", &[]),
    ("typical_p", &["1", "1.0"]),
    ("use_beam_search", &["false"]),
    ("verbosity", &["\"medium\""]),
    ("web_search_options", &[]),
];

impl Reader {
    /// A reader for a checkpoint, with room for `context` tokens of prompt and answer together.
    pub fn new(checkpoint: &Checkpoint, defaults: Defaults, context: usize) -> Self {
        Self {
            tokenizer: checkpoint.tokenizer.clone(),
            template: checkpoint.chat_template.clone(),
            generation: checkpoint.generation.clone(),
            defaults,
            context,
            most: checkpoint.config.max_position_embeddings,
            vocab_size: checkpoint.config.vocab_size,
            forms: OnceLock::new(),
        }
    }

    /// Parses a line. `key` is what the request is known by.
    ///
    /// # Errors
    /// If anything is wrong with the line.
    pub fn read(&self, bytes: &[u8], key: &Key) -> Result<Wanted, Refusal> {
        let text = std::str::from_utf8(bytes).map_err(|error| {
            let at = error.valid_up_to();
            Refusal::new("invalid_utf8", format!("the line is not UTF-8 text (byte {at}, counted from 0)"))
        })?;
        let line = json::parse(text).map_err(|wrong| match wrong {
            Wrong::Twice(name) => Refusal::invalid(format!("`{}` is there twice", shown(&name))),
            Wrong::Syntax(what) => Refusal::new("invalid_json", format!("the line is not JSON: {what}")),
        })?;
        let Value::Object(mut line) = line else {
            return Err(Refusal::new("invalid_json", "the line is not a JSON object"));
        };
        if let Some(id) = line.get("custom_id").filter(|id| !id.is_string() && !id.is_null()) {
            return Err(Refusal::invalid(format!("`custom_id` must be a text, and is {}", quoted(id))));
        }
        let body = match line.shift_remove("body") {
            None => line,
            Some(Value::Object(body)) => {
                check_envelope(&line, &body)?;
                body
            }
            Some(_) => return Err(Refusal::invalid("`body` must be an object")),
        };
        self.body(&Fields(body), key)
    }

    fn body(&self, fields: &Fields, key: &Key) -> Result<Wanted, Refusal> {
        fields.check_known()?;
        for name in ["n", "best_of"] {
            if fields.whole(name, 0)?.is_some_and(|n| n != 1) {
                return Err(Refusal::new("unsupported", format!("`{name}` must be 1; send a line for each answer")));
            }
        }
        let Prompt { endpoint, tokens: prompt, shaped } = self.prompt(fields)?;
        let answer = &self.defaults.answer;
        // `Batch::submit` refuses such a prompt too. Here it does not get into the queue, whose memory is bounded in
        // prompts that fit.
        if prompt.len() >= self.context {
            let Self { context, most, .. } = *self;
            return Err(host::Error::PromptTooLong { prompt: prompt.len(), context, most }.into());
        }
        let names = ["max_completion_tokens", "max_tokens"];
        let [most, or] = names.map(|name| fields.whole(name, 1));
        let given = [most?, or?];
        let max_tokens = match given[0].or(given[1]) {
            Some(most) => usize::try_from(most).unwrap_or(usize::MAX),
            None if matches!(endpoint, Endpoint::Chat(_)) => self.defaults.chat_tokens,
            None => self.defaults.prompt_tokens,
        };
        // An answer must not depend on which device it comes from, and one may have a longer context than another.
        let max_tokens = max_tokens.min(self.context - prompt.len());
        let request = host::Request {
            prompt,
            max_tokens,
            sampling: self.sampling(fields, key)?,
            draft: None,
            stop: fields.stop()?.unwrap_or_else(|| answer.stop.clone()),
            // A default that is meant for all requests does not apply to those whose answers have a form.
            ignore_end: fields.truth("ignore_eos")?.unwrap_or(answer.ignore_eos && shaped.is_none()),
            form: shaped,
        };
        Ok(Wanted { request, logprobs: logprobs(fields, &endpoint)?, endpoint })
    }

    fn sampling(&self, fields: &Fields, key: &Key) -> Result<Sampling, Refusal> {
        let neutral = self.defaults.answer.sampling(&self.generation);
        let seed = match fields.get("seed") {
            None => key.hash(neutral.seed) & u64::from(u32::MAX),
            Some(value) => value.as_i64().map(i64::cast_unsigned).or_else(|| unsigned(value)).ok_or_else(|| {
                Refusal::invalid(format!("`seed` must be a whole number of at most 64 bits, and is {}", quoted(value)))
            })?,
        };
        let top_k = match fields.get("top_k").and_then(Value::as_i64) {
            // Other engines write -1 to keep all.
            Some(-1) => Some(0),
            _ => fields.whole("top_k", 0)?.map(|k| u32::try_from(k).unwrap_or(u32::MAX)),
        };
        Ok(Sampling {
            temperature: fields.number("temperature")?.unwrap_or(neutral.temperature),
            top_k: top_k.unwrap_or(neutral.top_k),
            top_p: fields.number("top_p")?.unwrap_or(neutral.top_p),
            min_p: fields.number("min_p")?.unwrap_or(neutral.min_p),
            repetition_penalty: fields.number("repetition_penalty")?.unwrap_or(neutral.repetition_penalty),
            presence_penalty: fields.number("presence_penalty")?.unwrap_or(neutral.presence_penalty),
            frequency_penalty: fields.number("frequency_penalty")?.unwrap_or(neutral.frequency_penalty),
            seed,
        })
    }

    /// The form of `shape`, which the field `name` asks for.
    fn shaped(&self, name: &str, shape: &Shape) -> Result<model::Form, Refusal> {
        let refusal = |error: model::Error| Refusal::new("unsupported_form", format!("`{name}`: {error}"));
        let make = || Forms::of(&self.tokenizer, self.vocab_size, &self.generation.eos_token_ids).map_err(refusal);
        self.forms.get_or_init(make).as_ref().map_err(Clone::clone)?.compile(shape).map_err(refusal)
    }

    fn prompt(&self, fields: &Fields) -> Result<Prompt, Refusal> {
        let encode = |text: &str, around| {
            encode_prompt(&self.tokenizer, text, around, self.context, self.most).map_err(Refusal::from)
        };
        let asked = form::shape(|name| fields.get(name))?;
        let shaped = |asked: Option<(&str, Shape)>| asked.map(|(name, shape)| self.shaped(name, &shape)).transpose();
        let tools = messages::tools(fields.get("tools"), fields.get("tool_choice"))?;
        let calls = messages::must_call(tools, fields.get("tool_choice"))?;
        let asked = match (asked, calls) {
            (Some((name, _)), Some(_)) => {
                let message = format!("`{name}` and `tool_choice` both say the form of the answer; give one");
                return Err(Refusal::invalid(message));
            }
            (asked, calls) => asked.or(calls.map(|tools| ("tool_choice", Shape::Call(tools)))),
        };
        let completion = |tokens| Ok(Prompt { endpoint: Endpoint::Completion, tokens, shaped: shaped(asked.clone())? });
        let text_completion = |text: &str| completion(encode(text, Around::Special)?);
        match (fields.get("messages"), fields.get("prompt")) {
            (None, Some(_)) if !tools.is_empty() => {
                Err(Refusal::unsupported("`tools` are for `messages`; leave them out"))
            }
            (Some(_), Some(_)) => Err(Refusal::invalid("give `messages` or `prompt`, not both")),
            (None, None) => Err(Refusal::invalid("`messages` or `prompt` is needed")),
            (None, Some(Value::String(text))) => text_completion(text),
            (None, Some(Value::Array(ids))) => match ids.as_slice() {
                [Value::String(text)] => text_completion(text),
                _ => {
                    let ids: Option<Vec<u32>> =
                        ids.iter().map(|id| id.as_u64().and_then(|i| i.try_into().ok())).collect();
                    completion(
                        ids.ok_or_else(|| Refusal::invalid("`prompt` must be one text, or the ids of its tokens"))?,
                    )
                }
            },
            (None, Some(_)) => Err(Refusal::invalid("`prompt` must be one text, or the ids of its tokens")),
            (Some(messages), None) => {
                let messages = messages::messages(messages)?;
                let enable_thinking = fields.think()?.unwrap_or(self.defaults.think);
                let template = self.template.as_ref().ok_or_else(|| {
                    Refusal::unsupported("the model has no chat template, so `messages` have no meaning; use `prompt`")
                })?;
                let conversation =
                    Conversation { messages: &messages, tools, enable_thinking, add_generation_prompt: true };
                let text = template.render_conversation(conversation).map_err(of_template)?;
                let shaped = shaped(asked)?
                    .map(|form| behind_thought(&form, Some(template), conversation, &text).map_err(of_template))
                    .transpose()?;
                let endpoint = Endpoint::Chat(Splitter::new(&text, !tools.is_empty()));
                Ok(Prompt { endpoint, tokens: encode(&text, Around::Nothing)?, shaped })
            }
        }
    }
}

/// A request's prompt, and the form of its answer.
struct Prompt {
    endpoint: Endpoint,
    tokens: Vec<u32>,
    shaped: Option<model::Form>,
}

/// The refusal if a template makes no prompt, or a form cannot follow it.
fn of_template(error: model::Error) -> Refusal {
    match error {
        // The template's path depends on the machine; results must not.
        model::Error::ChatTemplate { reason, .. } => Refusal::invalid(format!("the chat template fails: {reason}")),
        model::Error::Form { .. } => Refusal::new("unsupported_form", error.to_string()),
        other => Refusal::invalid(other.to_string()),
    }
}

/// Checks what is around the body in OpenAI's format.
fn check_envelope(line: &Map<String, Value>, body: &Map<String, Value>) -> Result<(), Refusal> {
    if let Some(name) = line.keys().find(|name| !["custom_id", "method", "url"].contains(&name.as_str())) {
        return Err(Refusal::invalid(format!("`{}` stands beside `body`, and belongs into it", shown(name))));
    }
    if body.contains_key("custom_id") {
        return Err(Refusal::invalid("`custom_id` stands in `body`, and belongs beside it"));
    }
    if let Some(method) = line.get("method").filter(|method| *method != "POST") {
        return Err(Refusal::invalid(format!("`method` must be \"POST\", and is {}", quoted(method))));
    }
    let needed = match line.get("url") {
        None => return Ok(()),
        Some(url) if url == "/v1/chat/completions" => "messages",
        Some(url) if url == "/v1/completions" => "prompt",
        Some(url) => {
            return Err(Refusal::new(
                "unsupported",
                format!("`url` must be \"/v1/chat/completions\" or \"/v1/completions\", and is {}", quoted(url)),
            ));
        }
    };
    if body.contains_key(needed) {
        Ok(())
    } else {
        Err(Refusal::invalid(format!("`body` must have `{needed}` for this `url`")))
    }
}

/// How many log-probabilities are wanted: by `logprobs` and `top_logprobs` for messages, by a number in `logprobs` for
/// a prompt.
fn logprobs(fields: &Fields, endpoint: &Endpoint) -> Result<Option<u32>, Refusal> {
    const MOST: u64 = 20;
    let top = match endpoint {
        Endpoint::Completion => {
            if fields.get("top_logprobs").is_some() {
                return Err(Refusal::invalid(
                    "`top_logprobs` is for `messages`; for a prompt, `logprobs` is the number",
                ));
            }
            fields.whole("logprobs", 0)?
        }
        Endpoint::Chat(_) => {
            let top = fields.whole("top_logprobs", 0)?;
            if !fields.truth("logprobs")?.unwrap_or(false) {
                return match top {
                    Some(1..) => Err(Refusal::invalid("`top_logprobs` needs `logprobs` to be true")),
                    _ => Ok(None),
                };
            }
            Some(top.unwrap_or(0))
        }
    };
    match top {
        Some(top) if top > MOST => {
            Err(Refusal::invalid(format!("at most {MOST} likeliest tokens can be asked for, not {top}")))
        }
        top => Ok(top.map(|top| top as u32)),
    }
}

/// A value as messages quote it: on one line, and cut if it is long.
pub fn quoted(value: &Value) -> String {
    shown(&value.to_string())
}

/// Whether a field asks for nothing.
pub fn is_nothing(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(array) => array.is_empty(),
        Value::Object(object) => object.is_empty(),
        Value::Bool(_) | Value::Number(_) => false,
    }
}

/// The fields of a body. A field that is null counts as absent.
struct Fields(Map<String, Value>);

impl Fields {
    /// Refuses fields that are not known: the answer would be made as if nobody had asked for what they say.
    fn check_known(&self) -> Result<(), Refusal> {
        for (name, value) in &self.0 {
            if value.is_null() || KNOWN.contains(&name.as_str()) || NOT_LOOKED_AT.contains(&name.as_str()) {
                continue;
            }
            let unsupported =
                |why: &str| Err(Refusal::new("unsupported", format!("`{}` {why}; leave it out", shown(name))));
            match UNSUPPORTED.iter().find(|(unsupported, _)| unsupported == name) {
                Some((_, done)) if is_nothing(value) || done.contains(&value.to_string().as_str()) => {}
                Some(_) => return unsupported("is not supported"),
                None => return unsupported("is no known field"),
            }
        }
        Ok(())
    }

    /// Whether the model should think first, if the request says.
    fn think(&self) -> Result<Option<bool>, Refusal> {
        let Some(kwargs) = self.get("chat_template_kwargs") else { return Ok(None) };
        let kwargs = kwargs.as_object().ok_or_else(|| Refusal::invalid("`chat_template_kwargs` must be an object"))?;
        let mut think = None;
        for (name, value) in kwargs {
            if name != "enable_thinking" {
                let message = format!("`chat_template_kwargs` may have `enable_thinking` alone, not `{}`", shown(name));
                return Err(Refusal::new("unsupported", message));
            }
            let wrong = || Refusal::invalid("`enable_thinking` must be true or false");
            think = Some(value.as_bool().ok_or_else(wrong)?);
        }
        Ok(think)
    }

    fn get(&self, name: &str) -> Option<&Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    fn number(&self, name: &str) -> Result<Option<f32>, Refusal> {
        let number = |value: &Value| {
            value
                .as_f64()
                .map(|n| n as f32)
                .ok_or_else(|| Refusal::invalid(format!("`{name}` must be a number, and is {}", quoted(value))))
        };
        self.get(name).map(number).transpose()
    }

    fn whole(&self, name: &str, least: u64) -> Result<Option<u64>, Refusal> {
        let whole = |value: &Value| {
            let number = unsigned(value).filter(|n| *n >= least);
            let must =
                || format!("`{name}` must be a whole number, {least} or more and below 2^64, and is {}", quoted(value));
            number.ok_or_else(|| Refusal::invalid(must()))
        };
        self.get(name).map(whole).transpose()
    }

    fn truth(&self, name: &str) -> Result<Option<bool>, Refusal> {
        let truth = |value: &Value| {
            value
                .as_bool()
                .ok_or_else(|| Refusal::invalid(format!("`{name}` must be true or false, and is {}", quoted(value))))
        };
        self.get(name).map(truth).transpose()
    }

    fn stop(&self) -> Result<Option<Vec<String>>, Refusal> {
        let text = |value: &Value| value.as_str().filter(|text| !text.is_empty()).map(str::to_owned);
        let texts = match self.get("stop") {
            None => return Ok(None),
            Some(Value::Array(texts)) => texts.iter().map(text).collect(),
            Some(value) => text(value).map(|text| vec![text]),
        };
        texts
            .map(Some)
            .ok_or_else(|| Refusal::invalid("`stop` must be a text or an array of texts, none of them empty"))
    }
}

/// A whole number from 0 on. Some programs write 16 as 16.0.
fn unsigned(value: &Value) -> Option<u64> {
    const BEYOND: f64 = 18_446_744_073_709_551_616.0;
    let float = value.as_f64().filter(|n| n.fract() == 0.0 && (0.0..BEYOND).contains(n));
    value.as_u64().or(float.map(|n| n as u64))
}
