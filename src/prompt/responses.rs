//! `/v1/responses`: its items become the messages of a chat.
//!
//! The engine reads items with the OpenAI client's types, dozens of them. Those of a conversation
//! are read here; a request with another, or of an odd shape, is not reproduced.

use super::chat::{self, Chat, arguments};
use super::fields::{choice, dict, flag, object, required_text, text};
use super::messages::BILLING_HEADER;
use super::model::Model;
use super::python::{Dict, Json, object as entries};
use super::repr::Dumps;
use super::request::Request;
use super::{Exact, Job, Prompt, tools};
use crate::types::Skip;

/// Fields that are checked and say nothing of the prompt.
const CHECKED: [&str; 6] = ["background", "max_output_tokens", "store", "stream", "top_k", "user"];

pub(crate) const STATUSES: [&str; 3] = ["in_progress", "completed", "incomplete"];

pub(crate) fn prompt(model: &Model, request: &Request<'_>, job: &Job) -> Result<Prompt, Skip> {
    let mut prompt = match model.harmony() {
        Some(harmony) => harmony.responses(request, job)?,
        None => {
            let chat = read(model, request)?;
            if let Some(ids) = chat::forwarded_ids(request, &chat.messages)? {
                return Ok(ids);
            }
            chat::render(model, chat, job)?
        }
    };
    if truncates(request)?
        && let exact @ Exact::Yes = prompt.exact_mut()
    {
        *exact = Exact::No("max_model_len");
    }
    Ok(prompt)
}

/// Whether the engine cuts what is longer than the model takes, which is not known here.
fn truncates(request: &Request<'_>) -> Result<bool, Skip> {
    match request.raw("truncation") {
        None | Some("\"disabled\"") => Ok(false),
        Some("\"auto\"" | "null") => Ok(true),
        Some(_) => Err(Skip::Refused),
    }
}

/// What is checked whatever makes the prompt.
pub(crate) fn check(request: &Request<'_>) -> Result<(), Skip> {
    request.check_types_of(&CHECKED)?;
    if request.is_given("prompt") {
        return Err(Skip::Refused);
    }
    // What came before is kept by one engine, or is in the shape of its own messages.
    if request.is_given("previous_response_id") || request.is_given("previous_input_messages") {
        return Err(Skip::Unsupported);
    }
    Ok(())
}

fn read(model: &Model, request: &Request<'_>) -> Result<Chat, Skip> {
    check(request)?;
    let input = request.value("input")?.ok_or(Skip::Refused)?;
    let mut messages = Messages::default();
    if let Some(text) = request.str("instructions")?.filter(|text| !text.is_empty()) {
        messages.push("system", Json::str(&text));
    }
    let mut continues = false;
    match &input {
        Json::Str(_) => messages.push("user", input.clone()),
        Json::List(items) => {
            items.0.iter().try_for_each(|item| messages.add(object(item)?))?;
            continues = items.0.last().and_then(Json::as_dict).is_some_and(is_partial);
        }
        _ => return Err(Skip::Refused),
    }
    let effort = effort(request)?;
    let mut own = arguments(request.value("chat_template_kwargs")?, effort.clone())?;
    own.set("add_generation_prompt", Json::Bool(!continues));
    own.set("continue_final_message", Json::Bool(continues));
    let tools = tool_list(request)?;
    check_choice(request, tools.is_some())?;
    Ok(Chat {
        messages: Json::list(messages.0.into_iter().map(Json::dict).collect()),
        tools: tools.clone(),
        effort,
        kwargs: chat::merge(&model.template_kwargs, tools, own),
        // Unlike in chats: a template that begins with a BOS gets a second one.
        add_special_tokens: true,
        truncation: None,
    })
}

/// Whether a last item is one that the answer continues.
fn is_partial(item: &Dict) -> bool {
    let field = |name| item.get(name).and_then(Json::as_str);
    matches!(field("type").unwrap_or("message"), "message" | "reasoning")
        && matches!(field("status"), Some("in_progress" | "incomplete"))
}

pub(crate) fn effort(request: &Request<'_>) -> Result<Option<String>, Skip> {
    let Some(reasoning) = request.value("reasoning")? else { return Ok(None) };
    Ok(text(object(&reasoning)?, "effort")?.map(|effort| effort.to_string()))
}

#[derive(Default)]
struct Messages(Vec<Dict>);

impl Messages {
    fn push(&mut self, role: &str, content: Json) {
        let mut message = Dict::default();
        message.set("role", Json::str(role));
        message.set("content", content);
        self.0.push(message);
    }

    fn add(&mut self, item: &Dict) -> Result<(), Skip> {
        let kind = text(item, "type").map_err(|_| Skip::Unsupported)?.map(|kind| &**kind);
        let role = text(item, "role").map_err(|_| Skip::Unsupported)?.map(|role| &**role);
        choice(item, "status", &STATUSES)?;
        match (kind, role) {
            (Some("function_call"), None) => self.call(function_call(item)?),
            (Some("custom_tool_call"), None) => self.call(custom_call(item)?),
            (Some("function_call_output" | "custom_tool_call_output"), None) => self.output(item),
            (Some("reasoning"), None) => {
                let text = reasoning(item)?;
                self.of_assistant("reasoning", text);
                Ok(())
            }
            (None | Some("message"), Some("assistant")) => {
                let text = own_text(item, kind.is_some())?;
                self.of_assistant("content", text);
                Ok(())
            }
            (None | Some("message"), Some(role @ ("user" | "system" | "developer"))) => {
                let content = item.get("content").ok_or(Skip::Refused)?;
                self.push(role, content_of(content)?);
                Ok(())
            }
            _ => Err(Skip::Unsupported),
        }
    }

    fn last_of_assistant(&mut self) -> Option<&mut Dict> {
        let last = self.0.last_mut()?;
        (last.get("role").and_then(Json::as_str) == Some("assistant")).then_some(last)
    }

    /// A field of the assistant's message; where the last one has it already, of a new one.
    fn of_assistant(&mut self, field: &str, text: Json) {
        if let Some(last) = self.last_of_assistant().filter(|last| last.get(field).is_none()) {
            last.set(field, text);
            return;
        }
        let mut message = Dict::default();
        message.set("role", Json::str("assistant"));
        message.set(field, text);
        self.0.push(message);
    }

    fn call(&mut self, call: Json) -> Result<(), Skip> {
        if let Some(last) = self.last_of_assistant() {
            let calls = last.get("tool_calls").and_then(Json::as_list).unwrap_or_default();
            let calls = calls.iter().cloned().chain([call]).collect();
            last.set("tool_calls", Json::list(calls));
        } else {
            self.of_assistant("tool_calls", Json::list(vec![call]));
        }
        Ok(())
    }

    fn output(&mut self, item: &Dict) -> Result<(), Skip> {
        let content = content_of(item.get("output").ok_or(Skip::Refused)?)?;
        let id = text(item, "call_id")?.map_or(Json::Null, |id| Json::Str(id.clone()));
        self.push("tool", content);
        if let Some(last) = self.0.last_mut() {
            last.set("tool_call_id", id);
        }
        Ok(())
    }
}

/// A text, or text parts as a chat has them.
fn content_of(content: &Json) -> Result<Json, Skip> {
    let part = |part: &Json| {
        let part = object(part)?;
        match text(part, "type")?.map(|kind| &**kind) {
            Some("input_text") => {
                let text = required_text(part, "text")?;
                // The engine leaves in such a part what it takes out of a chat's.
                if text.starts_with(BILLING_HEADER) {
                    return Err(Skip::Unsupported);
                }
                Ok(entries([("type", Json::str("text")), ("text", Json::Str(text.clone()))]))
            }
            Some("input_image" | "input_file" | "input_audio") => Err(Skip::Multimodal),
            _ => Err(Skip::Unsupported),
        }
    };
    match content {
        Json::Str(_) => Ok(content.clone()),
        Json::List(parts) => parts.0.iter().map(part).collect::<Result<_, _>>().map(Json::list),
        _ => Err(Skip::Refused),
    }
}

/// What the assistant said: of several parts the first.
fn own_text(item: &Dict, typed: bool) -> Result<Json, Skip> {
    let parts = match item.get("content").ok_or(Skip::Refused)? {
        text @ Json::Str(_) => return Ok(text.clone()),
        content => content.as_list().ok_or(Skip::Refused)?,
    };
    let mut kinds = Vec::new();
    for part in parts {
        let part = object(part)?;
        required_text(part, "text").map_err(|_| Skip::Unsupported)?;
        kinds.push(text(part, "type")?.map(|kind| &**kind));
    }
    let all = |wanted| kinds.iter().all(|kind| *kind == Some(wanted));
    // Without a type only parts of an input are parts.
    if !(all("input_text") || typed && all("output_text")) {
        return Err(Skip::Unsupported);
    }
    let first = parts.first().and_then(Json::as_dict).ok_or(Skip::Unsupported)?;
    Ok(Json::Str(required_text(first, "text")?.clone()))
}

fn reasoning(item: &Dict) -> Result<Json, Skip> {
    if text(item, "encrypted_content")?.is_some_and(|text| !text.is_empty()) {
        return Err(Skip::Refused);
    }
    let summary = texts(item.get("summary").ok_or(Skip::Refused)?, "summary_text")?;
    let content = match item.given("content") {
        Some(content) => texts(content, "reasoning_text")?,
        None => Vec::new(),
    };
    Ok(content.into_iter().chain(summary).next().unwrap_or_else(|| Json::str("")))
}

/// The texts of parts that are all of one kind.
pub(crate) fn texts(parts: &Json, kind: &str) -> Result<Vec<Json>, Skip> {
    let text = |part: &Json| {
        let part = object(part)?;
        choice(part, "type", &[kind])?.ok_or(Skip::Refused)?;
        Ok(Json::Str(required_text(part, "text")?.clone()))
    };
    parts.as_list().ok_or(Skip::Refused)?.iter().map(text).collect()
}

fn function_call(item: &Dict) -> Result<Json, Skip> {
    let name = required_text(item, "name")?;
    let name = match text(item, "namespace")?.filter(|namespace| !namespace.is_empty()) {
        Some(namespace) => Json::str(&format!("{namespace}__{name}")),
        None => Json::Str(name.clone()),
    };
    let arguments = Json::Str(required_text(item, "arguments")?.clone());
    Ok(call(Json::Str(required_text(item, "call_id")?.clone()), name, arguments))
}

/// The input of a custom tool is the one argument of a function.
fn custom_call(item: &Dict) -> Result<Json, Skip> {
    let input = entries([("input", Json::Str(required_text(item, "input")?.clone()))]);
    let arguments = Dumps::default().text(&input.to_value()).map_err(|_| Skip::Failed)?;
    let name = Json::Str(required_text(item, "name")?.clone());
    Ok(call(Json::Str(required_text(item, "call_id")?.clone()), name, Json::str(&arguments)))
}

/// A call as the engine makes it, which no request model orders anew.
fn call(id: Json, name: Json, arguments: Json) -> Json {
    let function = entries([("name", name), ("arguments", arguments)]);
    entries([("id", id), ("function", function), ("type", Json::str("function"))])
}

/// The functions that the model is shown; tools of other types are none.
fn tool_list(request: &Request<'_>) -> Result<Option<Json>, Skip> {
    let Some(text) = request.raw("tools") else { return Ok(None) };
    let list = if text == "null" { None } else { request.value("tools")? };
    let list = list.ok_or(Skip::Refused)?;
    let list = list.as_list().ok_or(Skip::Refused)?;
    let mut functions = Vec::new();
    for tool in list {
        let tool = object(tool)?;
        match text_of_kind(tool)? {
            "function" => functions.push(tools::function(tool)?),
            "custom" => functions.push(custom_tool(tool, None)?),
            "namespace" => namespace(tool, &mut functions)?,
            _ => return Err(Skip::Unsupported),
        }
    }
    Ok(Some(Json::list(functions)).filter(|_| !list.is_empty()))
}

fn text_of_kind(tool: &Dict) -> Result<&str, Skip> {
    required_text(tool, "type").map(|kind| &**kind)
}

/// A tool that takes any text is shown as a function of one argument.
fn custom_tool(tool: &Dict, name: Option<Json>) -> Result<Json, Skip> {
    if let Some(format) = dict(tool, "format")?.and_then(Json::as_dict)
        && choice(format, "type", &["text"]).is_err()
    {
        return Err(Skip::Refused);
    }
    flag(tool, "defer_loading")?;
    let input = entries([
        ("type", Json::str("string")),
        ("description", Json::str("The freeform text payload for this tool.")),
    ]);
    let parameters = entries([
        ("type", Json::str("object")),
        ("properties", entries([("input", input)])),
        ("required", Json::list(vec![Json::str("input")])),
        ("additionalProperties", Json::Bool(false)),
    ]);
    let mut function = Dict::default();
    let own = Json::Str(required_text(tool, "name")?.clone());
    function.set("name", name.unwrap_or(own));
    if let Some(description) = text(tool, "description")? {
        function.set("description", Json::Str(description.clone()));
    }
    function.set("parameters", parameters);
    tools::function(&function)
}

fn namespace(tool: &Dict, functions: &mut Vec<Json>) -> Result<(), Skip> {
    required_text(tool, "description")?;
    let namespace = required_text(tool, "name")?;
    for tool in tool.get("tools").and_then(Json::as_list).ok_or(Skip::Refused)? {
        let tool = object(tool)?;
        if text_of_kind(tool)? != "function" {
            return Err(Skip::Unsupported);
        }
        let mut function = tool.clone();
        let name = format!("{namespace}__{}", required_text(tool, "name")?);
        function.set("name", Json::str(&name));
        functions.push(tools::function(&function)?);
    }
    Ok(())
}

pub(crate) fn check_choice(request: &Request<'_>, tools: bool) -> Result<(), Skip> {
    match request.value("tool_choice")? {
        None => Ok(()),
        Some(Json::Str(choice)) => match &*choice {
            "none" | "auto" => Ok(()),
            "required" if tools => Ok(()),
            _ => Err(Skip::Refused),
        },
        Some(choice) if object(&choice)?.get("type").is_some() && tools => Ok(()),
        Some(_) => Err(Skip::Refused),
    }
}
