//! Chat templates: the checkpoint's own Jinja turns a conversation into a prompt.
//!
//! Templates are written for Python's Jinja2 as transformers sets it up; [`ChatTemplate`] gives them the same
//! surroundings: trimmed blocks, Python's string methods, `tojson` in the manner of `json.dumps`,
//! `raise_exception` and `strftime_now`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use minijinja::machinery::{eval, make_string_output};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, Value};
use minijinja::{AutoEscape, Environment, ErrorKind, context};
use serde_json::json;

use crate::Error;
use crate::config::parse_json;
use crate::text::shown;

mod answer;
mod limits;
mod message;
mod python;

pub use answer::{Answer, Piece, Splitter, ToolCall};
pub use message::{Message, Role};

/// What a chat template renders a prompt from.
#[derive(Debug, Clone, Copy)]
pub struct Conversation<'a> {
    /// The messages.
    pub messages: &'a [Message],
    /// Descriptions of the tools that the model may call: JSON objects, as OpenAI's clients send them.
    pub tools: &'a [serde_json::Value],
    /// Qwen3's switch. If false, the template closes the thinking part before the reply starts.
    pub enable_thinking: bool,
    /// Whether the prompt ends by opening the assistant's turn.
    pub add_generation_prompt: bool,
}

impl<'a> Conversation<'a> {
    /// A conversation without tools, whose prompt opens the assistant's turn.
    pub fn plain(messages: &'a [Message], enable_thinking: bool) -> Self {
        Self { messages, tools: &[], enable_thinking, add_generation_prompt: true }
    }
}

/// A chat template that is known to compile. Cloning shares it.
#[derive(Debug, Clone)]
pub struct ChatTemplate(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    /// The engine, with the filters, tests and functions that templates may use.
    environment: Environment<'static>,
    source: TemplateText,
    /// Special tokens by role, such as `eos_token`. Templates see them as variables of these names.
    special_tokens: BTreeMap<String, String>,
    path: PathBuf,
    /// Whether the arguments of earlier calls have to be objects.
    takes_objects: OnceLock<bool>,
}

/// The text of a chat template.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TemplateText {
    /// For chat.
    pub chat: String,
    /// For conversations with tools, if a model has a template of its own for them.
    pub tool_use: Option<String>,
}

impl From<String> for TemplateText {
    fn from(chat: String) -> Self {
        Self { chat, tool_use: None }
    }
}

const NAME: &str = "chat_template";
/// Bytes of stack for the thread that runs the engine. Parsing recurses before the nesting is checked, so it may go as
/// deep as the template is long.
const STACK: usize = 256 << 20;

impl ChatTemplate {
    /// Checks that a template compiles. `special_tokens` are variables that it may use; `path` is for error messages.
    ///
    /// # Errors
    /// [`Error::ChatTemplate`] if it does not compile, or goes beyond a limit of length or nesting.
    pub fn new(
        source: impl Into<TemplateText>,
        special_tokens: BTreeMap<String, String>,
        path: &Path,
    ) -> Result<Self, Error> {
        let (source, path) = (source.into(), path.to_owned());
        let takes_objects = OnceLock::new();
        let inner = Inner { environment: Environment::new(), source, special_tokens, path, takes_objects };
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        let mut environment = Environment::new();
        environment.set_syntax(syntax.map_err(|e| inner.failed(&e))?);
        limits::install(&mut environment);
        environment.add_filter("tojson", tojson);
        environment.add_function("raise_exception", |reason: String| -> Result<Value, minijinja::Error> {
            Err(minijinja::Error::new(ErrorKind::InvalidOperation, reason))
        });
        environment.add_function("strftime_now", |format: String| python::strftime_now(&format));
        let inner = Inner { environment, ..inner };
        for text in [Some(&inner.source.chat), inner.source.tool_use.as_ref()].into_iter().flatten() {
            inner.apart(|| limits::compiled(&inner.environment, NAME, text, |_| Ok(())))?;
        }
        Ok(ChatTemplate(Arc::new(inner)))
    }

    /// The prompt for messages without tools: [`render_conversation`](Self::render_conversation).
    ///
    /// # Errors
    /// [`Error::ChatTemplate`].
    pub fn render(
        &self,
        messages: &[Message],
        enable_thinking: bool,
        add_generation_prompt: bool,
    ) -> Result<String, Error> {
        self.render_conversation(Conversation { messages, tools: &[], enable_thinking, add_generation_prompt })
    }

    /// The prompt for a conversation. The arguments of a call may be an object or, as OpenAI's clients send them, JSON
    /// in a text.
    ///
    /// # Errors
    /// [`Error::ChatTemplate`] if rendering fails. The reason is the template's own message if it calls
    /// `raise_exception`, or the limit (of instructions, text or nesting) that it goes beyond.
    pub fn render_conversation(&self, conversation: Conversation<'_>) -> Result<String, Error> {
        let in_text =
            |message: &Message| message.tool_calls.iter().any(|call| call["function"]["arguments"].is_string());
        if conversation.messages.iter().any(in_text) && self.takes_objects() {
            let messages: Vec<Message> = conversation.messages.iter().cloned().map(Message::with_objects).collect();
            return self.rendered(Conversation { messages: &messages, ..conversation });
        }
        self.rendered(conversation)
    }

    /// Whether the template would write arguments that are a text as a JSON string. Found out by trying.
    fn takes_objects(&self) -> bool {
        *self.0.takes_objects.get_or_init(|| {
            let arguments = json!({"probe": 1}).to_string();
            let function = json!({"name": "f", "arguments": arguments});
            let call = json!({"id": "call_0", "type": "function", "function": function});
            let called = Message { tool_calls: vec![call], ..Message::new(Role::Assistant, "") };
            let messages = [Message::new(Role::User, "x"), called];
            let prompt = self.rendered(Conversation::plain(&messages, true));
            prompt.is_ok_and(|prompt| prompt.contains(r#"\"probe\""#))
        })
    }

    /// [`render_conversation`](Self::render_conversation), with arguments as they are.
    fn rendered(&self, conversation: Conversation<'_>) -> Result<String, Error> {
        let Inner { environment, source, special_tokens, .. } = &*self.0;
        let Conversation { messages, tools, enable_thinking, add_generation_prompt } = conversation;
        let source = source.tool_use.as_ref().filter(|_| !tools.is_empty()).unwrap_or(&source.chat);
        let render = || {
            limits::begin();
            let (messages, tokens) = (Value::from(Serde(messages)), Value::from(Serde(special_tokens)));
            // As in transformers, an empty list of tools is passed as `none`.
            let tools = if tools.is_empty() { Value::from(()) } else { Value::from(Serde(tools)) };
            let documents = ();
            let root = context! { messages, tools, documents, enable_thinking, add_generation_prompt, ..tokens };
            limits::compiled(environment, NAME, source, |code| {
                let (instructions, blocks) = code.finish();
                let mut text = String::new();
                let mut output = make_string_output(&mut text);
                eval(environment, &instructions, root, &blocks, &mut output, AutoEscape::None)?;
                Ok(text)
            })
        };
        self.0.apart(render)
    }

    /// Whether the answer to `conversation` begins with a thought. `prompt` is what this template made of
    /// `conversation`.
    ///
    /// - `None`: the answer has no thought.
    /// - `Some(true)`: the prompt has opened the thought.
    /// - `Some(false)`: the answer opens the thought itself.
    ///
    /// A model is taken to think if its template makes another prompt with `enable_thinking` off.
    ///
    /// # Errors
    /// [`Error::ChatTemplate`].
    pub fn thought(&self, conversation: Conversation<'_>, prompt: &str) -> Result<Option<bool>, Error> {
        if prompt.trim_end().ends_with(answer::THINK) {
            return Ok(Some(true));
        }
        if !conversation.enable_thinking {
            return Ok(None);
        }
        let without = self.render_conversation(Conversation { enable_thinking: false, ..conversation })?;
        Ok((without != prompt).then_some(false))
    }
}

impl Inner {
    /// Runs the engine in a thread of its own, which has the stack that it needs, and turns its panics into errors.
    fn apart<T: Send>(&self, run: impl FnOnce() -> Result<T, minijinja::Error> + Send) -> Result<T, Error> {
        let fails = |reason: String| Error::ChatTemplate { path: self.path.clone(), reason };
        let result = crate::quiet::apart("chat template", STACK, || run().map_err(|error| self.failed(&error)));
        match result.map_err(|e| fails(format!("no thread for it ({e})")))? {
            Some(result) => result,
            None => Err(fails("the template engine cannot go on with it".into())),
        }
    }

    fn failed(&self, error: &minijinja::Error) -> Error {
        Error::ChatTemplate { path: self.path.clone(), reason: reason_of(error) }
    }
}

/// The fields of `tokenizer_config.json` that a chat needs.
#[derive(Debug, Default)]
pub(crate) struct TokenizerConfig {
    /// Special tokens by role, such as `eos_token`.
    pub(crate) special_tokens: BTreeMap<String, String>,
    /// The chat template.
    pub(crate) chat_template: Option<TemplateText>,
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
        let chat_template = fields.get("chat_template").and_then(template_source);
        Ok(TokenizerConfig { special_tokens, chat_template })
    }
}

/// The chat template in the field `chat_template`, which is a text or a list of named templates. Of a list, the one
/// named `default` is meant for chat, and `tool_use` for chat with tools.
fn template_source(field: &serde_json::Value) -> Option<TemplateText> {
    if let Some(text) = field.as_str() {
        return Some(text.to_owned().into());
    }
    let all = field.as_array()?;
    let named = |name| Some(all.iter().find(|template| template["name"] == name)?["template"].as_str()?.to_owned());
    Some(TemplateText { chat: named("default")?, tool_use: named("tool_use") })
}

/// The engine's message with its line, made fit to be shown: templates and requests can put text into it.
fn reason_of(error: &minijinja::Error) -> String {
    let detail = match error.kind() {
        ErrorKind::OutOfFuel => "it takes more steps than any prompt needs".to_owned(),
        kind => error.detail().map_or_else(|| kind.to_string(), str::to_owned),
    };
    let detail = shown(&detail);
    match error.line() {
        Some(line) => format!("{detail} (line {line})"),
        None => detail,
    }
}

/// `tojson` as transformers defines it: `json.dumps(value, ensure_ascii=False)`, with the option `indent`.
fn tojson(value: Value, options: Kwargs) -> Result<Value, minijinja::Error> {
    let indent: Option<usize> = options.get("indent")?;
    // Templates of other families pass these options. They are ignored: the output is always that of their defaults.
    for ignored in ["ensure_ascii", "separators", "sort_keys"] {
        let _: Option<Value> = options.get(ignored)?;
    }
    options.assert_all_used()?;
    python::json_dumps(&value, indent).map(Value::from_safe_string)
}
