//! Messages of a conversation, as OpenAI's clients send them and templates take them.

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

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

/// One message of a conversation. Templates see each field that is present under its name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// Who says it.
    pub role: Role,
    /// The text; empty if the message only calls tools.
    #[serde(default, deserialize_with = "or_empty")]
    pub content: String,
    /// What the model thought before it said this.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// The tools that the model calls, each an object with `function`, which has `name` and `arguments`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<Value>,
    /// In a tool's result: the id of the call that it answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
    /// The name of who says it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

impl Message {
    /// A message of `role`.
    pub fn new(role: Role, content: impl Into<String>) -> Self {
        Message {
            role,
            content: content.into(),
            reasoning_content: None,
            tool_calls: Vec::new(),
            tool_call_id: None,
            name: None,
        }
    }

    /// The message with arguments of its calls as objects where they are texts of objects.
    pub(super) fn with_objects(mut self) -> Self {
        for call in &mut self.tool_calls {
            let Some(arguments) = call.pointer_mut("/function/arguments") else { continue };
            let object = arguments.as_str().and_then(|text| serde_json::from_str(text).ok()).filter(Value::is_object);
            *arguments = object.unwrap_or_else(|| arguments.take());
        }
        self
    }
}

fn or_empty<'de, D: Deserializer<'de>>(content: D) -> Result<String, D::Error> {
    Option::<String>::deserialize(content).map(Option::unwrap_or_default)
}
