//! Chat messages as the engine hands them to a template.
//!
//! The engine checks each message against the shapes of the OpenAI client and takes from it what it
//! knows. A role that it does not know is checked less.

mod parts;
#[cfg(test)]
mod tests;

use super::jinja::ContentFormat;
use super::json::{self, Room};
use super::python::{Dict, Json};
use crate::types::Skip;

use parts::{Kind, Part, join, part};
pub(crate) use parts::{Media, is_media};

const CHECKED_ROLES: [&str; 5] = ["assistant", "developer", "system", "tool", "user"];

/// A system text that starts with this loses its first line, which differs from request to request.
pub(crate) const BILLING_HEADER: &str = "x-anthropic-billing-header";

/// The conversation of a request's `messages`, which hold nothing but text.
pub(crate) fn conversation(messages: &Json, format: ContentFormat) -> Result<Vec<Dict>, Skip> {
    conversation_with(messages, format, Media::Named)
}

/// The conversation of a request's `messages`.
pub(crate) fn conversation_with(
    messages: &Json,
    format: ContentFormat,
    media: Media<'_>,
) -> Result<Vec<Dict>, Skip> {
    let messages = messages.as_list().ok_or(Skip::Refused)?;
    let mut room = Room::default();
    messages
        .iter()
        .map(|message| convert(message.as_dict().ok_or(Skip::Refused)?, format, media, &mut room))
        .collect()
}

/// Whether a message has a part that is no text.
pub(crate) fn has_media(messages: &Json) -> bool {
    let mut messages = messages.as_list().into_iter().flatten().filter_map(Json::as_dict);
    messages.any(has_media_parts)
}

fn has_media_parts(message: &Dict) -> bool {
    let is_media = |part: &Json| part.as_dict().is_some_and(is_media);
    message.get("content").and_then(Json::as_list).is_some_and(|parts| parts.iter().any(is_media))
}

fn convert(
    message: &Dict,
    format: ContentFormat,
    media: Media<'_>,
    room: &mut Room,
) -> Result<Dict, Skip> {
    let role = message.get("role").and_then(Json::as_str).ok_or(Skip::Refused)?;
    check_fields(message, role)?;
    let mut out = Dict::default();
    out.set("role", Json::str(role));
    out.set("content", content(message, role, format, media)?);
    match role {
        "assistant" => {
            if let Some(calls) = message.given("tool_calls") {
                let calls = tool_calls(calls, room)?;
                if calls.as_list().is_some_and(|calls| !calls.is_empty()) {
                    out.set("tool_calls", calls);
                }
            }
            let reasoning = message.given("reasoning").or(message.given("reasoning_content"));
            if let Some(reasoning) = reasoning {
                out.set("reasoning", reasoning.clone());
                out.set("reasoning_content", reasoning.clone());
            }
        }
        "tool" => {
            if let Some(id) = message.get("tool_call_id") {
                out.set("tool_call_id", id.clone());
            }
        }
        _ => {}
    }
    for name in ["name", "task"] {
        if let Some(value @ Json::Str(_)) = message.get(name) {
            out.set(name, value.clone());
        }
    }
    if role == "developer" {
        out.set("tools", message.get("tools").cloned().unwrap_or(Json::Null));
    }
    Ok(out)
}

pub(crate) fn check_fields(message: &Dict, role: &str) -> Result<(), Skip> {
    let is_str = |name: &str, null: bool| match message.get(name) {
        None | Some(Json::Str(_)) => true,
        Some(Json::Null) => null,
        Some(_) => false,
    };
    let calls = message.given("tool_calls");
    let countable =
        calls.is_none_or(|calls| matches!(calls, Json::List(_) | Json::Dict(_) | Json::Str(_)));
    let plain = CHECKED_ROLES.contains(&role) || role == "function";
    let fits = match role {
        "tool" => is_str("tool_call_id", true),
        _ => is_str("name", false),
    };
    let custom_fits = plain
        || (is_str("task", true)
            && is_str("reasoning", true)
            && message.given("tools").is_none_or(|tools| tools.as_list().is_some()));
    if countable && fits && custom_fits { Ok(()) } else { Err(Skip::Refused) }
}

fn content(
    message: &Dict,
    role: &str,
    format: ContentFormat,
    media: Media<'_>,
) -> Result<Json, Skip> {
    let texts = match message.get("content") {
        None if matches!(role, "developer" | "function") => return Err(Skip::Refused),
        None => Vec::new(),
        Some(Json::Null) => {
            let calls_are_null = message.get("tool_calls").is_some_and(Json::is_null);
            if !matches!(role, "assistant" | "function") || calls_are_null {
                return Err(Skip::Refused);
            }
            Vec::new()
        }
        Some(text @ Json::Str(_)) => {
            vec![Part::text(text.clone())]
        }
        Some(Json::List(parts)) => parts
            .0
            .iter()
            .filter_map(|item| part(item, role, media).transpose())
            .collect::<Result<_, _>>()?,
        Some(_) => return Err(Skip::Refused),
    };
    let mut texts = if role == "system" { without_billing(texts) } else { texts };
    if let (Media::Front(mark), true) = (media, has_media_parts(message)) {
        texts.insert(0, Part::text(Json::str(mark)));
    }
    let has_others = texts.iter().any(|part| !matches!(part.kind, Kind::Text));
    // Parts of tool messages become one string, unless one of them is no text.
    match format {
        ContentFormat::Parts if role != "tool" || has_others => {
            Ok(Json::list(texts.into_iter().map(Part::into_json).collect()))
        }
        ContentFormat::Parts => Ok(join(&texts, false)),
        ContentFormat::String => Ok(join(&texts, true)),
    }
}

fn without_billing(parts: Vec<Part>) -> Vec<Part> {
    let strip = |mut part: Part| {
        if let Some(text) = part.text.as_str().filter(|text| text.starts_with(BILLING_HEADER)) {
            let (_, rest) = text.split_once('\n').filter(|(_, rest)| !rest.is_empty())?;
            part.text = Json::str(rest);
        }
        Some(part)
    };
    parts.into_iter().filter_map(strip).collect()
}

/// `messages` as the engine's request model has them: the fields of a tool call in its order.
pub(crate) fn ordered(messages: Json) -> Json {
    let order = |message: &Json| {
        let calls =
            |message: &Dict| message.get("tool_calls").and_then(Json::as_list).map(<[_]>::to_vec);
        let Some((message, calls)) = message.as_dict().and_then(|m| Some((m, calls(m)?))) else {
            return message.clone();
        };
        let mut message = message.clone();
        message.set("tool_calls", Json::list(calls.into_iter().map(ordered_call).collect()));
        Json::dict(message)
    };
    match &messages {
        Json::List(list) => Json::list(list.0.iter().map(order).collect()),
        _ => messages,
    }
}

fn ordered_call(call: Json) -> Json {
    let first = |dict: &Dict, names: &[&str]| {
        let mut own = Dict::default();
        for name in names {
            if let Some(value) = dict.get(name) {
                own.set(name, value.clone());
            }
        }
        copy_rest(dict, &mut own);
        own
    };
    let Some(given) = call.as_dict() else { return call };
    let mut own = first(given, &["id", "function", "type"]);
    if let Some(function) = given.get("function").and_then(Json::as_dict) {
        own.set("function", Json::dict(first(function, &["arguments", "name"])));
    }
    Json::dict(own)
}

/// Tool calls with their arguments read.
fn tool_calls(calls: &Json, room: &mut Room) -> Result<Json, Skip> {
    let empty = matches!(calls, Json::Dict(_) | Json::Str(_)) && !calls.is_true();
    if empty {
        return Ok(Json::list(Vec::new()));
    }
    let calls = calls.as_list().ok_or(Skip::Refused)?;
    calls.iter().map(|call| tool_call(call, room)).collect::<Result<_, _>>().map(Json::list)
}

fn tool_call(call: &Json, room: &mut Room) -> Result<Json, Skip> {
    let call = call.as_dict().ok_or(Skip::Refused)?;
    let function = call.get("function").and_then(Json::as_dict).ok_or(Skip::Refused)?;
    let named = [call.get("id"), function.get("name")];
    if named.iter().any(|value| !matches!(value, Some(Json::Str(_)))) {
        return Err(Skip::Refused);
    }
    let text = function.get("arguments").and_then(Json::as_str).ok_or(Skip::Refused)?;
    if call.get("type").and_then(Json::as_str) != Some("function") {
        return Err(Skip::Refused);
    }
    let mut own = function.clone();
    own.set("arguments", arguments(text, room)?);
    let mut out = call.clone();
    out.set("function", Json::dict(own));
    Ok(Json::dict(out))
}

fn copy_rest(from: &Dict, to: &mut Dict) {
    for (key, value) in from.iter() {
        if to.get(key).is_none() {
            to.insert(key.clone(), value.clone());
        }
    }
}

/// What is no JSON object becomes an empty one.
fn arguments(text: &str, room: &mut Room) -> Result<Json, Skip> {
    match room.parse(text) {
        Ok(value @ Json::Dict(_)) => Ok(value),
        Ok(_) | Err(json::Fault::Syntax) => Ok(Json::dict(Dict::default())),
        Err(_) => Err(Skip::Unsupported),
    }
}

/// Where a template has no `developer` role, such messages become `system`, and all of those one
/// message at the start.
pub(crate) fn without_developer(conversation: Vec<Dict>) -> Vec<Dict> {
    let role = |message: &Dict| message.get("role").and_then(Json::as_str).unwrap_or("").to_owned();
    let is_system = |message: &Dict| matches!(role(message).as_str(), "system" | "developer");
    let systems = conversation.iter().filter(|message| is_system(message)).count();
    let first = conversation.first().is_some_and(is_system);
    if systems == 1 && first {
        return conversation.into_iter().map(renamed).collect();
    }
    let (system, mut rest): (Vec<Dict>, Vec<Dict>) = conversation.into_iter().partition(is_system);
    let texts: Vec<String> =
        system.iter().map(plain_text).filter(|text| !text.is_empty()).collect();
    let mut merged = Dict::default();
    merged.set("role", Json::str("system"));
    merged.set("content", Json::str(&texts.join("\n\n")));
    rest.insert(0, merged);
    rest
}

fn renamed(message: Dict) -> Dict {
    if message.get("role").and_then(Json::as_str) != Some("developer") {
        return message;
    }
    let mut out = Dict::default();
    for (key, value) in message.iter().filter(|(key, _)| &***key != "tools") {
        let value = if &**key == "role" { Json::str("system") } else { value.clone() };
        out.insert(key.clone(), value);
    }
    out
}

fn plain_text(message: &Dict) -> String {
    match message.get("content") {
        Some(Json::Str(text)) => text.to_string(),
        Some(Json::List(parts)) => {
            let text = |part: &Json| part.as_dict()?.get("text")?.as_str().map(str::to_owned);
            parts.0.iter().filter_map(text).collect::<Vec<_>>().join("\n")
        }
        _ => String::new(),
    }
}
