//! `/v1/chat/completions`, and `/v1/messages` after it.

use std::collections::HashMap;
use std::sync::Arc;

use super::{Channel, Harmony, Message, Preamble, functions, has_control};
use crate::prompt::messages::{check_fields, is_media};
use crate::prompt::python::{Dict, Json};
use crate::prompt::{Job, Prompt};
use crate::types::Skip;

/// The functions that calls name, by the ids of the calls.
type Names = HashMap<Arc<str>, Arc<str>>;

/// A request for an answer, as far as it makes the prompt.
pub(crate) struct Conversation<'a> {
    pub messages: &'a Json,
    pub tools: Option<&'a Json>,
    pub effort: Option<&'a str>,
}

impl Harmony {
    pub fn chat(&self, request: &Conversation<'_>, job: &Job) -> Result<Prompt, Skip> {
        let list = request.messages.as_list().ok_or(Skip::Refused)?;
        let list = list.iter().map(|message| message.as_dict().ok_or(Skip::Refused));
        let list: Vec<&Dict> = list.collect::<Result<_, _>>()?;
        list.iter().try_for_each(|message| check(message))?;
        let (instructions, rest) = match list.split_first() {
            Some((first, rest)) if is_instruction(role(first)) => (flat(first)?, rest),
            _ => (None, list.as_slice()),
        };
        let mut messages = self.start(Preamble {
            instructions,
            tools: request.tools.map(functions).transpose()?,
            effort: request.effort.map(Arc::from),
        })?;
        let mut names = Names::new();
        for message in rest {
            for call in calls(message)? {
                names.insert(call.id, call.name.unwrap_or_else(|| Arc::from("None")));
            }
        }
        for message in rest {
            self.convert(message, &names, &mut messages)?;
        }
        self.prompt(&messages, job)
    }

    fn convert(&self, message: &Dict, names: &Names, out: &mut Vec<Message>) -> Result<(), Skip> {
        match role(message) {
            "assistant" => assistant(message, out),
            "tool" => {
                let id = message.get("tool_call_id").and_then(Json::as_str).unwrap_or_default();
                let name = names.get(id).map_or("", |name| name).to_owned();
                let text = flat(message)?.unwrap_or_else(|| Arc::from(""));
                out.push(Message::Result { name, text });
                Ok(())
            }
            "user" => {
                out.push(Message::User(texts(message)?));
                Ok(())
            }
            role if is_instruction(role) => {
                out.extend(flat(message)?.map(|text| self.instruct(role, text)));
                Ok(())
            }
            _ => Err(Skip::Refused),
        }
    }
}

fn role(message: &Dict) -> &str {
    message.get("role").and_then(Json::as_str).unwrap_or_default()
}

fn is_instruction(role: &str) -> bool {
    matches!(role, "system" | "developer")
}

fn assistant(message: &Dict, out: &mut Vec<Message>) -> Result<(), Skip> {
    let reasoning = message.given("reasoning").or(message.given("reasoning_content"));
    let reasoning = match reasoning.filter(|reasoning| reasoning.is_true()) {
        Some(Json::Str(text)) => Some(Message::Assistant(Channel::Analysis, vec![text.clone()])),
        Some(_) => return Err(Skip::Refused),
        None => None,
    };
    let calls = calls(message)?;
    if calls.is_empty() {
        out.extend(reasoning);
        let texts = texts(message)?;
        if !texts[0].is_empty() {
            out.push(Message::Assistant(Channel::Final, texts));
        }
        return Ok(());
    }
    if let Some(text) = flat(message)?.filter(|text| !text.is_empty()) {
        out.push(Message::Assistant(Channel::Commentary, vec![text]));
    }
    out.extend(reasoning);
    for Call { name, arguments, .. } in calls {
        let name = name.as_deref().unwrap_or_default().to_owned();
        if has_control(&name) {
            return Err(Skip::Refused);
        }
        out.push(Message::Call { name, arguments });
    }
    Ok(())
}

struct Call {
    id: Arc<str>,
    /// A call of no function has none.
    name: Option<Arc<str>>,
    arguments: Arc<str>,
}

/// The calls of a message that has been checked.
fn calls(message: &Dict) -> Result<Vec<Call>, Skip> {
    match message.get("tool_calls") {
        Some(Json::List(calls)) => calls.0.iter().map(call).collect(),
        Some(Json::Null) if role(message) != "assistant" => Err(Skip::Refused),
        _ => Ok(Vec::new()),
    }
}

fn call(call: &Json) -> Result<Call, Skip> {
    let call = call.as_dict().ok_or(Skip::Refused)?;
    let text = |dict: &Dict, name: &str| match dict.get(name) {
        Some(Json::Str(text)) => Ok(Arc::clone(text)),
        _ => Err(Skip::Refused),
    };
    let id = text(call, "id")?;
    let own = |kind: &str| {
        let is_kind = call.get("type").and_then(Json::as_str) == Some(kind);
        call.get(kind).and_then(Json::as_dict).filter(|_| is_kind)
    };
    if let Some(function) = own("function") {
        let arguments = text(function, "arguments")?;
        return Ok(Call { id, name: Some(text(function, "name")?), arguments });
    }
    let custom = own("custom").ok_or(Skip::Refused)?;
    text(custom, "name").and(text(custom, "input"))?;
    Ok(Call { id, name: None, arguments: Arc::from("") })
}

/// Refuses what is no message of the API.
fn check(message: &Dict) -> Result<(), Skip> {
    let role = message.get("role").and_then(Json::as_str).ok_or(Skip::Refused)?;
    check_fields(message, role)?;
    match message.get("content") {
        None | Some(Json::Str(_)) => {}
        Some(Json::List(parts)) => parts.0.iter().try_for_each(check_part)?,
        Some(Json::Null) if role == "assistant" => {
            if message.get("tool_calls").is_some_and(Json::is_null) {
                return Err(Skip::Refused);
            }
        }
        Some(_) => return Err(Skip::Refused),
    }
    match message.get("tool_calls") {
        Some(text @ (Json::Str(_) | Json::Dict(_))) if text.is_true() => Err(Skip::Refused),
        Some(Json::List(calls)) => calls.0.iter().try_for_each(|item| call(item).map(|_| ())),
        _ => Ok(()),
    }
}

/// A part of another kind than text is one without text: the model is never shown it.
fn check_part(part: &Json) -> Result<(), Skip> {
    let part = part.as_dict().ok_or(Skip::Refused)?;
    let has = |name: &str| matches!(part.get(name), Some(Json::Str(_)));
    let fits = match part.get("type").and_then(Json::as_str) {
        Some(kind @ ("text" | "refusal" | "thinking")) => has(kind),
        Some("tool_reference") => has("name"),
        _ => is_media(part),
    };
    if fits { Ok(()) } else { Err(Skip::Refused) }
}

/// The texts of a content, one at least.
fn texts(message: &Dict) -> Result<Vec<Arc<str>>, Skip> {
    match message.get("content") {
        Some(Json::Str(text)) => Ok(vec![Arc::clone(text)]),
        Some(Json::List(parts)) if !parts.0.is_empty() => {
            let text = |part: &Json| match part.as_dict().and_then(|part| part.get("text")) {
                Some(Json::Str(text)) => Ok(Arc::clone(text)),
                None => Ok(Arc::from("")),
                Some(_) => Err(Skip::Refused),
            };
            parts.0.iter().map(text).collect()
        }
        _ => Ok(vec![Arc::from("")]),
    }
}

/// A content as one text, where it has any.
fn flat(message: &Dict) -> Result<Option<Arc<str>>, Skip> {
    message.get("content").map_or(Ok(None), flat_content)
}

pub(super) fn flat_content(content: &Json) -> Result<Option<Arc<str>>, Skip> {
    let parts = match content {
        Json::Str(text) => return Ok(Some(Arc::clone(text))),
        Json::List(parts) => &parts.0,
        _ => return Ok(None),
    };
    let given = parts.iter().filter_map(|part| part.as_dict()?.given("text"));
    let texts = given.map(|text| text.as_str().ok_or(Skip::Refused));
    let texts: Vec<&str> = texts.collect::<Result<_, _>>()?;
    Ok((!texts.is_empty()).then(|| Arc::from(texts.concat())))
}
