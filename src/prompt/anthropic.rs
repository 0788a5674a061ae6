//! `/v1/messages`: the engine makes a chat request of it.

use super::chat::{self, Chat, arguments};
use super::fields::{choice, dict, flag, object, required_text, text};
use super::messages::BILLING_HEADER;
use super::model::Model;
use super::python::{Dict, Json, object as entries};
use super::repr::{self, Dumps};
use super::request::Request;
use super::{Job, Prompt, tools};
use crate::types::Skip;

const BLOCKS: [&str; 9] = [
    "text",
    "image",
    "tool_use",
    "tool_result",
    "tool_reference",
    "thinking",
    "redacted_thinking",
    "tool_addition",
    "tool_removal",
];

const EFFORTS: [&str; 5] = ["low", "medium", "high", "xhigh", "max"];

/// Fields that are checked and say nothing of the prompt.
const CHECKED: [&str; 6] = ["stream", "temperature", "top_p", "top_k", "cache_salt", "metadata"];

pub(crate) fn prompt(model: &Model, request: &Request<'_>, job: &Job) -> Result<Prompt, Skip> {
    let chat = read(model, request, job)?;
    if let Some(ids) = chat::forwarded_ids(request, &chat.messages)? {
        return Ok(ids);
    }
    chat::render(model, chat, job)
}

fn read(model: &Model, request: &Request<'_>, job: &Job) -> Result<Chat, Skip> {
    request.check_types_of(&CHECKED)?;
    let max_tokens = request.int("max_tokens")?.filter(|max| *max > 0).ok_or(Skip::Refused)?;
    let messages = request.value("messages")?.ok_or(Skip::Refused)?;
    let messages = messages.as_list().ok_or(Skip::Refused)?;
    messages.iter().try_for_each(check_message)?;
    let inline = messages.iter().any(is_system);
    let merge = inline && model.habits(job)?.system_first;
    let mut out = Vec::new();
    let system = request.value("system")?;
    system_message(system.as_ref(), if merge { messages } else { &[] }, &mut out)?;
    for message in messages {
        if !is_system(message) {
            convert(object(message)?, &mut out)?;
        } else if let Some(text) = system_text(message).filter(|_| !merge) {
            out.push(entries([("role", Json::str("system")), ("content", Json::str(&text))]));
        }
    }
    let effort = effort(model, request, max_tokens, job)?;
    check_choice(request)?;
    let tools = tool_list(request, messages)?;
    let own = arguments(request.value("chat_template_kwargs")?, effort.clone())?;
    Ok(Chat {
        messages: Json::list(out),
        tools: tools.clone(),
        effort,
        kwargs: chat::merge(&model.template_kwargs, tools, own),
        add_special_tokens: false,
        truncation: None,
    })
}

/// What of the engine's behaviour its own trials of the template decide.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Habits {
    /// The template refuses a system message that is not the first: those are put there.
    system_first: bool,
    /// The effort that stands for thinking that is disabled.
    quiet: &'static str,
}

impl Habits {
    pub fn of(model: &Model, job: &Job) -> Result<Habits, Skip> {
        let mut system_first = false;
        for with_tools in [false, true] {
            system_first |= match model.template(with_tools) {
                Ok(template) => !template.takes_late_system()?,
                Err(Skip::Refused) => true,
                Err(skip) => return Err(skip),
            };
        }
        let rendered = |effort: &str| -> Result<Option<String>, Skip> {
            let message = entries([("role", Json::str("user")), ("content", Json::str("Hi"))]);
            let own = arguments(None, Some(effort.to_owned()))?;
            let chat = Chat {
                messages: Json::list(vec![message]),
                tools: None,
                effort: Some(effort.to_owned()),
                kwargs: chat::merge(&model.template_kwargs, None, own),
                add_special_tokens: false,
                truncation: None,
            };
            match chat::render(model, chat, job) {
                Ok(Prompt::Text { text, .. }) => Ok(Some(text)),
                Ok(Prompt::Pieces { pieces, .. }) => Ok(Some(pieces.joined())),
                Ok(Prompt::Ids { .. }) | Err(Skip::Refused) => Ok(None),
                Err(skip) => Err(skip),
            }
        };
        let none = rendered("none")?;
        let mut heeded = none.is_some();
        for effort in EFFORTS {
            heeded = heeded && rendered(effort)? != none;
        }
        Ok(Habits { system_first, quiet: if heeded { "none" } else { "low" } })
    }
}

fn is_system(message: &Json) -> bool {
    message.as_dict().and_then(|dict| dict.get("role")).and_then(Json::as_str) == Some("system")
}

fn check_message(message: &Json) -> Result<(), Skip> {
    let message = object(message)?;
    let role = choice(message, "role", &["user", "assistant", "system"])?.ok_or(Skip::Refused)?;
    check_blocks(message.get("content").ok_or(Skip::Refused)?, role == "system")
}

/// A text or a list of blocks; tools change in system messages only.
fn check_blocks(content: &Json, changes: bool) -> Result<(), Skip> {
    let blocks = match content {
        Json::Str(_) => return Ok(()),
        content => content.as_list().ok_or(Skip::Refused)?,
    };
    for block in blocks {
        let block = object(block)?;
        let kind = choice(block, "type", &BLOCKS)?.ok_or(Skip::Refused)?;
        for name in
            ["text", "id", "tool_use_id", "name", "tool_name", "thinking", "signature", "data"]
        {
            text(block, name)?;
        }
        for name in ["source", "input"] {
            dict(block, name)?;
        }
        flag(block, "is_error")?;
        match block.given("content") {
            None | Some(Json::Str(_)) => {}
            Some(Json::List(items)) if items.0.iter().all(|item| item.as_dict().is_some()) => {}
            Some(_) => return Err(Skip::Refused),
        }
        let change = block.given("tool").map(check_change).transpose()?;
        if matches!(kind, "tool_addition" | "tool_removal") {
            let by_name = change.ok_or(Skip::Refused)?;
            if !changes || (kind == "tool_removal" && !by_name) {
                return Err(Skip::Refused);
            }
        }
    }
    Ok(())
}

/// Whether the tool that a block adds or removes is named; else it is defined.
fn check_change(change: &Json) -> Result<bool, Skip> {
    let change = object(change)?;
    match choice(change, "type", &["tool_reference", "tool_definition"])? {
        Some("tool_reference") => required_text(change, "name").map(|_| true),
        Some(_) => tool(change.get("definition").ok_or(Skip::Refused)?).map(|_| false),
        None => Err(Skip::Refused),
    }
}

/// The texts of a system content, without those that differ from request to request.
fn system_texts(content: &Json) -> Vec<&str> {
    let blocks = content.as_list().unwrap_or_default().iter().filter_map(Json::as_dict);
    let blocks = blocks.filter(|block| kind(block) == "text");
    let texts = blocks.filter_map(|block| block.get("text").and_then(Json::as_str));
    texts.filter(|text| !text.is_empty() && !text.starts_with(BILLING_HEADER)).collect()
}

/// The text of a system message within the conversation.
fn system_text(message: &Json) -> Option<String> {
    let content = message.as_dict()?.get("content")?;
    let text = match content.as_str() {
        Some(text) if text.starts_with(BILLING_HEADER) => return None,
        Some(text) => text.to_owned(),
        None => system_texts(content).concat(),
    };
    Some(text).filter(|text| !text.is_empty())
}

fn system_message(system: Option<&Json>, merged: &[Json], out: &mut Vec<Json>) -> Result<(), Skip> {
    let mut text = String::new();
    if let Some(system) = system {
        check_blocks(system, false)?;
        match system.as_str() {
            Some(whole) => text.push_str(whole),
            None => text.push_str(&system_texts(system).concat()),
        }
    }
    for message in merged.iter().filter(|message| is_system(message)) {
        text.push_str(&system_text(message).unwrap_or_default());
    }
    if !text.is_empty() {
        out.push(entries([("role", Json::str("system")), ("content", Json::str(&text))]));
    }
    Ok(())
}

fn kind(block: &Dict) -> &str {
    block.get("type").and_then(Json::as_str).unwrap_or_default()
}

/// One message of the user or the assistant: tool results become messages before it.
fn convert(message: &Dict, out: &mut Vec<Json>) -> Result<(), Skip> {
    let role = required_text(message, "role")?;
    let mut own = Dict::default();
    own.set("role", Json::Str(role.clone()));
    match message.get("content") {
        Some(text @ Json::Str(_)) => own.set("content", text.clone()),
        Some(Json::List(blocks)) => {
            let mut parts = Parts::default();
            for block in &blocks.0 {
                parts.add(object(block)?, &**role == "user", out)?;
            }
            parts.finish(&mut own);
        }
        _ => return Err(Skip::Refused),
    }
    if &**role != "user" || own.get("content").is_some() {
        out.push(Json::dict(own));
    }
    Ok(())
}

/// What the blocks of a message come down to.
#[derive(Default)]
struct Parts {
    /// And images, as a chat has them.
    texts: Vec<Json>,
    calls: Vec<Json>,
    reasoning: Option<String>,
}

impl Parts {
    fn add(&mut self, block: &Dict, user: bool, out: &mut Vec<Json>) -> Result<(), Skip> {
        match kind(block) {
            "text" => {
                if let Some(text) = text(block, "text")?.filter(|text| !text.is_empty()) {
                    self.texts.push(Json::Str(text.clone()));
                }
            }
            "image" if block.given("source").is_some_and(Json::is_true) => {
                self.texts.push(image(block)?);
            }
            "thinking" => {
                if let Some(text) = text(block, "thinking")? {
                    self.reasoning.get_or_insert_default().push_str(text);
                }
            }
            "tool_use" => self.calls.push(tool_call(block)?),
            "tool_result" if user => tool_result(block, out)?,
            "tool_result" => self.texts.push(Json::str(&echoed_result(block)?)),
            _ => {}
        }
        Ok(())
    }

    fn finish(mut self, message: &mut Dict) {
        if let Some(reasoning) = self.reasoning {
            message.set("reasoning", Json::str(&reasoning));
        }
        if !self.calls.is_empty() {
            message.set("tool_calls", Json::list(self.calls));
        }
        let part = |part: Json| match part {
            text @ Json::Str(_) => entries([("type", Json::str("text")), ("text", text)]),
            image => image,
        };
        match self.texts.as_slice() {
            [] => {}
            [Json::Str(_)] => message.set("content", self.texts.remove(0)),
            _ => message.set("content", Json::list(self.texts.into_iter().map(part).collect())),
        }
    }
}

/// An image, of which no more is looked at.
fn image(block: &Dict) -> Result<Json, Skip> {
    let source = block.given("source").and_then(Json::as_dict).ok_or(Skip::Refused)?;
    let is_url = source.get("type").and_then(Json::as_str) == Some("url");
    // The engine leaves some of those out that have none.
    if is_url && !source.given("url").is_some_and(Json::is_true) {
        return Err(Skip::Multimodal);
    }
    Ok(entries([("type", Json::str("image_url")), ("image_url", Json::dict(Dict::default()))]))
}

fn tool_call(block: &Dict) -> Result<Json, Skip> {
    // A call without an id gets one from the engine's clock.
    let id = text(block, "id")?.filter(|id| !id.is_empty()).ok_or(Skip::Unsupported)?;
    let name = text(block, "name")?.map_or(Json::str(""), |name| Json::Str(name.clone()));
    let input = dict(block, "input")?.map_or_else(|| Json::dict(Dict::default()), Json::clone);
    let dumps = Dumps { ascii: true, ..Dumps::default() };
    let input = dumps.text(&input.to_value()).map_err(|_| Skip::Unsupported)?;
    // In the order that the engine's request model gives them.
    let function = entries([("arguments", Json::str(&input)), ("name", name)]);
    Ok(entries([
        ("id", Json::Str(id.clone())),
        ("function", function),
        ("type", Json::str("function")),
    ]))
}

/// A tool's result in a message of the assistant.
fn echoed_result(block: &Dict) -> Result<String, Skip> {
    let mut text = "Tool result: ".to_owned();
    match block.given("content") {
        Some(Json::Str(result)) => text.push_str(result),
        Some(list) if list.is_true() => {
            repr::write_json(&mut text, list).map_err(|_| Skip::Failed)?;
        }
        _ => {}
    }
    Ok(text)
}

fn tool_result(block: &Dict, out: &mut Vec<Json>) -> Result<(), Skip> {
    let mut texts = Vec::new();
    let mut images = Vec::new();
    let mut references = Vec::new();
    match block.given("content") {
        Some(Json::Str(text)) => texts.push(&**text),
        Some(Json::List(items)) => {
            for item in items.0.iter().filter_map(Json::as_dict) {
                match kind(item) {
                    "text" => texts.push(match item.get("text") {
                        None => "",
                        Some(text) => text.as_str().ok_or(Skip::Refused)?,
                    }),
                    "image" => images.push(image(item)?),
                    "tool_reference" => {
                        let named = |name| item.get(name).filter(|name| name.is_true());
                        if let Some(name) = named("tool_name").or(named("name")) {
                            let kind = ("type", Json::str("tool_reference"));
                            references.push(entries([kind, ("name", name.clone())]));
                        }
                    }
                    _ => {}
                }
            }
        }
        _ => {}
    }
    let id = text(block, "tool_use_id")?.map_or(Json::str(""), |id| Json::Str(id.clone()));
    let message = |content| {
        entries([("role", Json::str("tool")), ("tool_call_id", id.clone()), ("content", content)])
    };
    out.push(message(Json::str(&texts.join("\n"))));
    if !images.is_empty() {
        out.push(entries([("role", Json::str("user")), ("content", Json::list(images))]));
    }
    if !references.is_empty() {
        out.push(message(Json::list(references)));
    }
    Ok(())
}

/// The reasoning effort that `thinking` and `output_config` ask for.
fn effort(
    model: &Model,
    request: &Request<'_>,
    max_tokens: i64,
    job: &Job,
) -> Result<Option<String>, Skip> {
    let mut effort = None;
    if let Some(config) = request.value("output_config")? {
        effort = choice(object(&config)?, "effort", &EFFORTS)?.map(str::to_owned);
    }
    let Some(thinking) = request.value("thinking")? else { return Ok(effort) };
    let thinking = object(&thinking)?;
    match choice(thinking, "type", &["enabled", "disabled", "adaptive"])?.ok_or(Skip::Refused)? {
        "disabled" => Ok(Some(model.habits(job)?.quiet.to_owned())),
        "enabled" => match thinking.get("budget_tokens").and_then(super::request::as_int) {
            Some(budget) if budget >= 1024 && budget < max_tokens => Ok(effort),
            _ => Err(Skip::Refused),
        },
        _ => Ok(effort),
    }
}

fn check_choice(request: &Request<'_>) -> Result<(), Skip> {
    let Some(given) = request.value("tool_choice")? else { return Ok(()) };
    let given = object(&given)?;
    let kind = choice(given, "type", &["auto", "any", "tool", "none"])?.ok_or(Skip::Refused)?;
    let named = text(given, "name")?.is_some_and(|name| !name.is_empty());
    if kind == "tool" && !named { Err(Skip::Refused) } else { Ok(()) }
}

/// The tools at the end of the conversation: blocks of it add and remove some.
fn tool_list(request: &Request<'_>, messages: &[Json]) -> Result<Option<Json>, Skip> {
    let given = request.value("tools")?;
    let given = given.as_ref().map(|list| list.as_list().ok_or(Skip::Refused)).transpose()?;
    let own = given.unwrap_or_default().iter().map(tool).collect::<Result<Vec<_>, Skip>>()?;
    let blocks = messages.iter().filter_map(|message| message.as_dict()?.get("content")?.as_list());
    let is_change = |block: &&Dict| matches!(kind(block), "tool_addition" | "tool_removal");
    let changes: Vec<&Dict> =
        blocks.flatten().filter_map(Json::as_dict).filter(is_change).collect();
    if changes.is_empty() {
        return Ok(given.map(|_| Json::list(own.into_iter().map(|(_, tool)| tool).collect())));
    }
    let mut all = Dict::default();
    own.into_iter().for_each(|(name, tool)| all.insert(name, tool));
    let mut removed: Vec<String> = Vec::new();
    for block in changes {
        let change = block.get("tool").and_then(Json::as_dict).ok_or(Skip::Refused)?;
        let name = match change.get("definition").filter(|_| kind(change) == "tool_definition") {
            Some(definition) => {
                let (name, tool) = tool(definition)?;
                all.insert(name.clone(), tool);
                name
            }
            None => {
                let name = required_text(change, "name")?.clone();
                let tool = all.get(&name).ok_or(Skip::Refused)?;
                if kind(block) == "tool_addition" {
                    let tool = tools::without_deferral(tool);
                    all.insert(name.clone(), tool);
                }
                name
            }
        };
        removed.retain(|known| **known != *name);
        if kind(block) == "tool_removal" {
            removed.push(name.to_string());
        }
    }
    let left = all.iter().filter(|(name, _)| !removed.iter().any(|known| **known == ***name));
    Ok(Some(Json::list(left.map(|(_, tool)| tool.clone()).collect())))
}

/// A tool as the template gets it, and its name.
fn tool(tool: &Json) -> Result<(std::sync::Arc<str>, Json), Skip> {
    let tool = object(tool)?;
    let name = required_text(tool, "name")?.clone();
    let schema = dict(tool, "input_schema")?.and_then(Json::as_dict).ok_or(Skip::Refused)?;
    let mut schema = schema.clone();
    if schema.get("type").is_none() {
        schema.set("type", Json::str("object"));
    }
    let mut function = Dict::default();
    function.set("name", Json::Str(name.clone()));
    function.set("parameters", Json::dict(schema));
    for field in ["description", "strict", "defer_loading"] {
        if let Some(value) = tool.get(field) {
            function.set(field, value.clone());
        }
    }
    tools::function(&function).map(|tool| (name, tool))
}
