//! `/v1/responses`.

use std::collections::HashMap;
use std::sync::Arc;

use super::chat::flat_content;
use super::{Channel, Function, Harmony, Message, Preamble, has_control};
use crate::prompt::fields::{choice, object, required_text, text};
use crate::prompt::python::{Dict, Json};
use crate::prompt::request::Request;
use crate::prompt::{Job, Prompt, responses, tools};
use crate::types::Skip;

/// The functions that calls name, by the ids of the calls.
type Names = HashMap<Arc<str>, Arc<str>>;

impl Harmony {
    pub fn responses(&self, request: &Request<'_>, job: &Job) -> Result<Prompt, Skip> {
        responses::check(request)?;
        if let Some(kwargs) = request.value("chat_template_kwargs")?
            && object(&kwargs)?.given("chat_template").is_some()
        {
            return Err(Skip::Refused);
        }
        let tools = tool_list(request)?;
        responses::check_choice(request, tools.is_some())?;
        let input = request.value("input")?.ok_or(Skip::Refused)?;
        let mut items = match &input {
            Json::Str(_) => &[][..],
            list => list.as_list().ok_or(Skip::Refused)?,
        };
        let mut instructions = request.str("instructions")?.map(Arc::from);
        if instructions.is_none()
            && let Some((first, rest)) = items.split_first()
            && matches!(
                object(first)?.get("role").and_then(Json::as_str),
                Some("system" | "developer")
            )
        {
            check_message(object(first)?)?;
            instructions = object(first)?.get("content").map_or(Ok(None), flat_content)?;
            items = rest;
        }
        let effort = responses::effort(request)?.map(Arc::from);
        let mut messages = self.start(Preamble { instructions, tools, effort })?;
        if let Json::Str(text) = &input {
            messages.push(Message::User(vec![Arc::clone(text)]));
        }
        let mut names = Names::new();
        for item in items {
            messages.extend(self.item(object(item)?, &mut names)?);
        }
        self.prompt(&messages, job)
    }

    fn item(&self, item: &Dict, names: &mut Names) -> Result<Option<Message>, Skip> {
        match text(item, "type")?.map(|kind| &**kind) {
            None | Some("message") => self.said(item),
            Some("reasoning") => reasoning(item),
            Some("function_call") => {
                let name = required_text(item, "name")?;
                choice(item, "status", &responses::STATUSES)?;
                if has_control(name) {
                    return Err(Skip::Refused);
                }
                names.insert(required_text(item, "call_id")?.clone(), name.clone());
                let arguments = required_text(item, "arguments")?.clone();
                Ok(Some(Message::Call { name: name.to_string(), arguments }))
            }
            Some("function_call_output") => {
                let name = names.get(required_text(item, "call_id")?).ok_or(Skip::Refused)?;
                let text = required_text(item, "output")?.clone();
                Ok(Some(Message::Result { name: name.to_string(), text }))
            }
            Some(_) => Err(Skip::Refused),
        }
    }

    fn said(&self, item: &Dict) -> Result<Option<Message>, Skip> {
        let role = check_message(item)?;
        let content = item.get("content").ok_or(Skip::Refused)?;
        if matches!(role, "system" | "developer") {
            let text = flat_content(content)?.filter(|text| !text.is_empty());
            return Ok(text.map(|text| self.instruct(role, text)));
        }
        let texts = match content {
            Json::Str(text) => vec![Arc::clone(text)],
            list => {
                let text = |part: &Json| -> Result<Arc<str>, Skip> {
                    Ok(text(object(part)?, "text")?.map_or_else(|| Arc::from(""), Arc::clone))
                };
                list.as_list().unwrap_or_default().iter().map(text).collect::<Result<_, _>>()?
            }
        };
        Ok(Some(match role {
            "assistant" => Message::Assistant(Channel::Final, texts),
            _ => Message::User(texts),
        }))
    }
}

/// Refuses what is no message; gives its role.
fn check_message(item: &Dict) -> Result<&str, Skip> {
    let roles = ["user", "assistant", "system", "developer"];
    let role = choice(item, "role", &roles)?.ok_or(Skip::Refused)?;
    choice(item, "status", &responses::STATUSES)?;
    let is_typed = item.given("type").is_some();
    // One with all fields of an answer has parts.
    let is_answer = role == "assistant"
        && is_typed
        && ["id", "status"].iter().all(|name| item.given(name).is_some());
    let parts = match item.get("content").ok_or(Skip::Refused)? {
        Json::Str(text) if !is_answer || text.is_empty() => return Ok(role),
        parts => parts.as_list().ok_or(Skip::Refused)?,
    };
    let all = |known: &[&str]| parts.iter().all(|part| is_part(part, known));
    let of_answer = role == "assistant" && is_typed && all(&["output_text", "refusal"]);
    if of_answer || all(&["input_text", "input_image", "input_file", "input_audio"]) {
        Ok(role)
    } else {
        Err(Skip::Refused)
    }
}

fn is_part(part: &Json, known: &[&str]) -> bool {
    let Some(part) = part.as_dict() else { return false };
    let kind = part.get("type").and_then(Json::as_str).unwrap_or_default();
    let field = match kind {
        "refusal" => "refusal",
        "input_text" | "output_text" => "text",
        _ => return known.contains(&kind),
    };
    known.contains(&kind) && part.get(field).and_then(Json::as_str).is_some()
}

/// Reasoning of which only a summary is left is not shown.
fn reasoning(item: &Dict) -> Result<Option<Message>, Skip> {
    let texts = responses::texts(item.get("summary").ok_or(Skip::Refused)?, "summary_text").and(
        item.given("content")
            .map_or(Ok(Vec::new()), |content| responses::texts(content, "reasoning_text")),
    )?;
    let texts: Vec<&str> = texts.iter().filter_map(Json::as_str).collect();
    let said = || Message::Assistant(Channel::Analysis, vec![Arc::from(texts.join("\n"))]);
    Ok((!texts.is_empty()).then(said))
}

/// Tools that servers of the engine run are not known here.
fn tool_list(request: &Request<'_>) -> Result<Option<Arc<[Function]>>, Skip> {
    let Some(raw) = request.raw("tools") else { return Ok(None) };
    if raw == "null" {
        return Err(Skip::Refused);
    }
    let list = request.value("tools")?.ok_or(Skip::Refused)?;
    let list = list.as_list().ok_or(Skip::Refused)?;
    let function = |tool: &Json| {
        let tool = object(tool)?;
        match &**required_text(tool, "type")? {
            "function" => Function::of(&tools::function(tool)?),
            "custom" | "namespace" => Err(Skip::Refused),
            _ => Err(Skip::Unsupported),
        }
    };
    let functions: Arc<[Function]> = list.iter().map(function).collect::<Result<_, _>>()?;
    Ok(Some(functions).filter(|functions| !functions.is_empty()))
}
