//! Messages and tools of a request, as OpenAI's clients send them.

use model::form::Tool;
use model::{Message, Role};
use serde_json::{Map, Value, json};

use super::request::{Refusal, is_nothing, quoted};

/// What joins the texts of a message whose content has several parts, as in transformers' server.
const BETWEEN_PARTS: &str = " ";

/// The messages of a request.
pub fn messages(messages: &Value) -> Result<Vec<Message>, Refusal> {
    let messages = messages.as_array().filter(|messages| !messages.is_empty());
    let messages = messages.ok_or_else(|| Refusal::invalid("`messages` must be an array with a message or more"))?;
    messages.iter().map(message).collect()
}

fn message(message: &Value) -> Result<Message, Refusal> {
    let fields = message.as_object().ok_or_else(|| Refusal::invalid("each of `messages` must be an object"))?;
    let role = match fields.get("role").and_then(Value::as_str) {
        Some("system" | "developer") => Role::System,
        Some("user") => Role::User,
        Some("assistant") => Role::Assistant,
        Some("tool") => Role::Tool,
        _ => return Err(Refusal::invalid("a message's `role` must be system, developer, user, assistant or tool")),
    };
    let known = ["role", "content", "name", "reasoning_content", "tool_calls", "tool_call_id"];
    let is_asked = |(name, value): &(&String, &Value)| !known.contains(&name.as_str()) && !is_nothing(value);
    if let Some((name, _)) = fields.iter().find(is_asked) {
        let name = quoted(&Value::from(name.as_str()));
        return Err(Refusal::unsupported(format!("the field {name} in messages is not supported; leave it out")));
    }
    let only = |name: &str, owner: Role| match fields.get(name) {
        Some(value) if !is_nothing(value) && role != owner => {
            let owner = if owner == Role::Tool { "a tool" } else { "the assistant" };
            Err(Refusal::invalid(format!("`{name}` in messages is for those of {owner}")))
        }
        value => Ok(value.filter(|value| !value.is_null())),
    };
    let reasoning_content = only("reasoning_content", Role::Assistant)?;
    let tool_calls = only("tool_calls", Role::Assistant)?.map_or(Ok(Vec::new()), tool_calls)?;
    let tool_call_id = only("tool_call_id", Role::Tool)?;
    let text = |name: &str, value: Option<&Value>| match value {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(_) => Err(Refusal::invalid(format!("a message's `{name}` must be a text"))),
    };
    Ok(Message {
        role,
        content: content(fields.get("content"), role)?,
        reasoning_content: text("reasoning_content", reasoning_content)?,
        tool_calls,
        tool_call_id: text("tool_call_id", tool_call_id)?,
        name: text("name", fields.get("name"))?,
    })
}

/// A text, or the joined parts of one. The assistant's may be empty.
fn content(content: Option<&Value>, role: Role) -> Result<String, Refusal> {
    match content {
        Some(Value::String(text)) => Ok(text.clone()),
        Some(Value::Array(parts)) => {
            let text = |part: &'_ Value| {
                let is_text = part.get("type").and_then(Value::as_str) == Some("text");
                part.get("text").and_then(Value::as_str).filter(|_| is_text).map(str::to_owned)
            };
            let parts: Option<Vec<String>> = parts.iter().map(text).collect();
            parts
                .map(|parts| parts.join(BETWEEN_PARTS))
                .ok_or_else(|| Refusal::unsupported("a message's `content` may have parts of text alone"))
        }
        None | Some(Value::Null) if role == Role::Assistant => Ok(String::new()),
        _ => Err(Refusal::invalid("a message's `content` must be a text, or an array of parts of text")),
    }
}

/// Calls that the assistant has made, in the form that templates expect.
fn tool_calls(calls: &Value) -> Result<Vec<Value>, Refusal> {
    let calls = calls.as_array().ok_or_else(|| Refusal::invalid("`tool_calls` must be an array"))?;
    let check = |call: &Value| {
        let function = function(call, "each of `tool_calls`")?;
        match function.get("arguments") {
            Some(Value::String(_) | Value::Object(_)) => Ok(call.clone()),
            _ => Err(Refusal::invalid("the `arguments` of a call in `tool_calls` must be a text of JSON")),
        }
    };
    calls.iter().map(check).collect()
}

/// The field `function` of an object whose type is `function`.
fn function<'v>(object: &'v Value, what: &str) -> Result<&'v Map<String, Value>, Refusal> {
    if let Some(kind) = object.get("type").filter(|kind| *kind != "function") {
        let kind = quoted(kind);
        return Err(Refusal::unsupported(format!("{what} must be of the type \"function\", and one is {kind}")));
    }
    let function = object.get("function").and_then(Value::as_object);
    let named = function.filter(|function| function.get("name").is_some_and(Value::is_string));
    named.ok_or_else(|| Refusal::invalid(format!("{what} must have a `function` with a `name`")))
}

/// The tools that the model is told about: none if it must not call any.
pub fn tools<'v>(tools: Option<&'v Value>, choice: Option<&Value>) -> Result<&'v [Value], Refusal> {
    let wanted = choice.is_none_or(|choice| choice != "none");
    let Some(tools) = tools.filter(|tools| !is_nothing(tools)) else { return Ok(&[]) };
    let tools = tools.as_array().ok_or_else(|| Refusal::invalid("`tools` must be an array"))?;
    tools.iter().try_for_each(|tool| function(tool, "each of `tools`").map(|_| ()))?;
    Ok(if wanted { tools } else { &[] })
}

/// Those of `tools` of which the model has to call one; `None` if it may choose.
pub fn must_call(tools: &[Value], choice: Option<&Value>) -> Result<Option<Vec<Tool>>, Refusal> {
    let unknown = |choice: &Value| {
        let choice = quoted(choice);
        let message =
            format!("`tool_choice` must be \"auto\", \"none\", \"required\" or a named function, and is {choice}");
        Err(Refusal::unsupported(message))
    };
    let name = match choice {
        None => return Ok(None),
        Some(choice) if choice == "auto" || choice == "none" => return Ok(None),
        Some(choice) if choice == "required" => None,
        Some(choice @ Value::Object(_)) => {
            let function = function(choice, "`tool_choice`")?;
            function.get("name").and_then(Value::as_str)
        }
        Some(choice) => return unknown(choice),
    };
    let named = |tool: &&Value| name.is_none_or(|name| tool["function"]["name"] == name);
    let tools: Vec<Tool> = tools.iter().filter(named).map(tool).collect();
    match (tools.is_empty(), name) {
        (false, _) => Ok(Some(tools)),
        (true, None) => Err(Refusal::invalid("`tool_choice` is \"required\", and there are no `tools`")),
        (true, Some(name)) => {
            let name = quoted(&Value::from(name));
            Err(Refusal::invalid(format!("`tool_choice` names {name}, which is none of the `tools`")))
        }
    }
}

/// Converts a tool that was checked before.
fn tool(tool: &Value) -> Tool {
    let function = &tool["function"];
    let parameters = function.get("parameters").filter(|parameters| !parameters.is_null()).cloned();
    // As with OpenAI, a tool without `parameters` takes none.
    let parameters = parameters.unwrap_or_else(|| json!({"type": "object", "additionalProperties": false}));
    Tool { name: function["name"].as_str().unwrap_or_default().to_owned(), parameters }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn messages_are_taken_as_openai_s_clients_send_them() {
        let call = json!({"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{\"x\": 1}"}});
        let found = messages(&json!([
            {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "user", "content": "x", "name": "me"},
            {"role": "assistant", "content": null, "tool_calls": [call], "refusal": null, "annotations": [],
             "reasoning_content": "hm"},
            {"role": "tool", "content": "1", "tool_call_id": "c1"},
            {"role": "assistant"},
        ]));
        let expected = vec![
            Message::new(Role::System, "a b"),
            Message { name: Some("me".into()), ..Message::new(Role::User, "x") },
            Message {
                tool_calls: vec![call],
                reasoning_content: Some("hm".into()),
                ..Message::new(Role::Assistant, "")
            },
            Message { tool_call_id: Some("c1".into()), ..Message::new(Role::Tool, "1") },
            Message::new(Role::Assistant, ""),
        ];
        assert_eq!(found.unwrap(), expected);
    }

    #[test]
    fn what_is_not_one_is_refused_by_name() {
        for (message, part) in [
            (json!("x"), "each of `messages`"),
            (json!({"role": "king", "content": "x"}), "`role`"),
            (json!({"role": "user"}), "`content`"),
            (json!({"role": "tool", "content": null}), "`content`"),
            (json!({"role": "user", "content": [{"type": "image_url"}]}), "parts of text alone"),
            (json!({"role": "user", "content": "x", "tool_calls": [1]}), "`tool_calls` in messages is for"),
            (json!({"role": "user", "content": "x", "weight": 1}), "the field \"weight\" in messages"),
            (json!({"role": "user", "content": "x", "\u{1b}": 1}), "the field \"\\u001b\" in messages"),
            (json!({"role": "assistant", "tool_calls": {}}), "must be an array"),
            (json!({"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}), "with a `name`"),
            (json!({"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}), "`arguments`"),
            (json!({"role": "assistant", "reasoning_content": 5}), "`reasoning_content` must be a text"),
        ] {
            let refusal = messages(&json!([message])).unwrap_err();
            assert!(refusal.message.contains(part), "{message}: {}", refusal.message);
        }
    }

    #[test]
    fn a_call_may_be_asked_for() {
        let parameters = json!({"type": "object", "properties": {"x": {"type": "integer"}}});
        let two = json!([{"type": "function", "function": {"name": "f", "parameters": parameters}},
                         {"type": "function", "function": {"name": "g"}}]);
        let two = two.as_array().unwrap();
        let names = |choice: &Value| {
            let tools = must_call(two, Some(choice)).map_err(|refusal| refusal.message)?;
            Ok::<_, String>(tools.map(|tools| tools.into_iter().map(|tool| tool.name).collect::<Vec<_>>()))
        };
        assert_eq!(names(&json!("auto")), Ok(None));
        assert_eq!(names(&json!("required")), Ok(Some(vec!["f".into(), "g".into()])));
        let named = |name: &str| json!({"type": "function", "function": {"name": name}});
        assert_eq!(names(&named("g")), Ok(Some(vec!["g".into()])));
        assert_eq!(must_call(two, Some(&named("f"))).unwrap().unwrap()[0].parameters, parameters);
        for (choice, part) in [
            (named("h"), "names \"h\", which is none of the `tools`"),
            (json!({"type": "allowed_tools"}), "`tool_choice` must be of the type \"function\""),
            (json!("some"), "and is \"some\""),
        ] {
            assert!(names(&choice).unwrap_err().contains(part), "{choice}");
        }
        assert!(must_call(&[], Some(&json!("required"))).unwrap_err().message.contains("no `tools`"));
    }

    #[test]
    fn tools_are_functions_and_may_be_chosen_freely_or_not_at_all() {
        let one = json!([{"type": "function", "function": {"name": "f", "parameters": {}}}]);
        assert_eq!(tools(Some(&one), None).unwrap().len(), 1);
        assert_eq!(tools(Some(&one), Some(&json!("auto"))).unwrap().len(), 1);
        assert_eq!(tools(Some(&one), Some(&json!("none"))).unwrap().len(), 0);
        assert_eq!(tools(Some(&json!([])), None).unwrap().len(), 0);
        for (wrong, choice, part) in [
            (json!({"a": 1}), json!("auto"), "`tools` must be an array"),
            (json!([{"type": "custom"}]), json!("auto"), "and one is \"custom\""),
            (json!([{"type": "function"}]), json!("auto"), "each of `tools` must have a `function`"),
        ] {
            let refusal = tools(Some(&wrong), Some(&choice)).unwrap_err();
            assert!(refusal.message.contains(part), "{wrong}: {}", refusal.message);
        }
    }
}
