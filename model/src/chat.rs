//! Chat templates: the checkpoint's own Jinja turns a conversation into a prompt.
//!
//! Templates are written for Python's Jinja2 as transformers sets it up; [`ChatTemplate`] gives them the same
//! surroundings: trimmed blocks, Python's string methods, `tojson` in the manner of `json.dumps`,
//! `raise_exception` and `strftime_now`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, Value};
use minijinja::{Environment, ErrorKind, context};
use serde::{Deserialize, Serialize};

use crate::Error;
use crate::config::parse_json;

mod answer;
mod python;

pub use answer::{Answer, Piece, Splitter, ToolCall};

/// Who says a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Instructions before the conversation.
    System,
    /// The person.
    User,
    /// The model.
    Assistant,
    /// The result of a tool call.
    Tool,
}

/// One message of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// Who says it.
    pub role: Role,
    /// What is said.
    pub content: String,
}

impl Message {
    /// A message of `role`.
    pub fn new(role: Role, content: impl Into<String>) -> Self {
        Message { role, content: content.into() }
    }
}

/// A compiled chat template. Cloning shares it.
#[derive(Debug, Clone)]
pub struct ChatTemplate {
    environment: Arc<Environment<'static>>,
    /// Special tokens by role (`eos_token`), which templates may write.
    special_tokens: BTreeMap<String, String>,
    path: PathBuf,
}

const NAME: &str = "chat_template";

impl ChatTemplate {
    /// Compiles a template. `special_tokens` are variables that it may use; `path` is for error messages.
    ///
    /// # Errors
    /// [`Error::ChatTemplate`].
    pub fn new(source: String, special_tokens: BTreeMap<String, String>, path: &Path) -> Result<Self, Error> {
        let broken = |e: &minijinja::Error| Error::ChatTemplate { path: path.to_owned(), reason: reason_of(e) };
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|e| broken(&e))?);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_filter("tojson", tojson);
        environment.add_function("raise_exception", |reason: String| -> Result<Value, minijinja::Error> {
            Err(minijinja::Error::new(ErrorKind::InvalidOperation, reason))
        });
        environment.add_function("strftime_now", |format: String| python::strftime_now(&format));
        environment.add_template_owned(NAME, source).map_err(|e| broken(&e))?;
        Ok(ChatTemplate { environment: Arc::new(environment), special_tokens, path: path.to_owned() })
    }

    /// The prompt for a conversation.
    ///
    /// `enable_thinking` is Qwen3's switch: without it, the template closes the thinking part before the reply starts.
    /// `add_generation_prompt` opens the assistant's turn at the end.
    ///
    /// # Errors
    /// [`Error::ChatTemplate`], with the template's own words if it calls `raise_exception`.
    pub fn render(
        &self,
        messages: &[Message],
        enable_thinking: bool,
        add_generation_prompt: bool,
    ) -> Result<String, Error> {
        let failed = |e: minijinja::Error| Error::ChatTemplate { path: self.path.clone(), reason: reason_of(&e) };
        let template = self.environment.get_template(NAME).map_err(failed)?;
        let (messages, tokens) = (Value::from(Serde(messages)), Value::from(Serde(&self.special_tokens)));
        template.render(context! { messages, enable_thinking, add_generation_prompt, ..tokens }).map_err(failed)
    }
}

/// What a chat needs of `tokenizer_config.json`.
#[derive(Debug, Default)]
pub(crate) struct TokenizerConfig {
    /// Special tokens by role, such as `eos_token`.
    pub(crate) special_tokens: BTreeMap<String, String>,
    /// The chat template's source.
    pub(crate) chat_template: Option<String>,
}

impl TokenizerConfig {
    pub(crate) fn parse(json: &[u8], path: &Path) -> Result<Self, Error> {
        let fields: serde_json::Map<String, serde_json::Value> = parse_json(json, path)?;
        let mut special_tokens = BTreeMap::new();
        for (key, value) in &fields {
            // A special token is its text, or an object that holds it.
            let text = value.as_str().or_else(|| value.get("content").and_then(|c| c.as_str()));
            if let (true, Some(text)) = (key.ends_with("_token"), text) {
                special_tokens.insert(key.clone(), text.to_owned());
            }
        }
        let chat_template = fields.get("chat_template").and_then(default_template);
        Ok(TokenizerConfig { special_tokens, chat_template })
    }
}

/// The field `chat_template` is the template, or a list of named ones of which `default` is meant for chat.
fn default_template(field: &serde_json::Value) -> Option<String> {
    if let Some(text) = field.as_str() {
        return Some(text.to_owned());
    }
    let named = |t: &&serde_json::Value| t.get("name").and_then(|n| n.as_str()) == Some("default");
    field.as_array()?.iter().find(named)?.get("template")?.as_str().map(str::to_owned)
}

/// The engine's message with its line, and the error underneath where there is one.
fn reason_of(error: &minijinja::Error) -> String {
    let detail = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    match error.line() {
        Some(line) => format!("{detail} (line {line})"),
        None => detail,
    }
}

/// `tojson` as transformers defines it: `json.dumps(value, ensure_ascii=False)`, with its `indent`.
fn tojson(value: Value, options: Kwargs) -> Result<Value, minijinja::Error> {
    let indent: Option<usize> = options.get("indent")?;
    // Options that the templates of other families pass; their defaults are what is done here.
    for ignored in ["ensure_ascii", "separators", "sort_keys"] {
        let _: Option<Value> = options.get(ignored)?;
    }
    options.assert_all_used()?;
    python::json_dumps(&value, indent).map(Value::from_safe_string)
}
