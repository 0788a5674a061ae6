//! DeepSeek V3.2 and V4, whose prompts the engine makes by code of its own.

#[cfg(test)]
mod tests;
mod v32;
mod v4;

use std::sync::Arc;

use super::Job;
use super::completions::Gap;
use super::jinja::{ContentFormat, Rendered};
use super::python::{Dict, Json};
use super::repr::Dumps;
use crate::types::Skip;

const BOS: &str = "<｜begin▁of▁sentence｜>";
const EOS: &str = "<｜end▁of▁sentence｜>";
const USER: &str = "<｜User｜>";
const ASSISTANT: &str = "<｜Assistant｜>";
const THINK: &str = "<think>";
const THOUGHT: &str = "</think>";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DeepSeek {
    V32,
    V4,
}

impl DeepSeek {
    /// How the conversation is handed over.
    pub fn format(self) -> ContentFormat {
        match self {
            DeepSeek::V32 => ContentFormat::String,
            DeepSeek::V4 => ContentFormat::Parts,
        }
    }

    /// What a completion with a suffix is made with.
    pub fn gap(self) -> Option<Gap> {
        match self {
            DeepSeek::V32 => None,
            DeepSeek::V4 => Some(["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"]),
        }
    }

    /// The prompt of a conversation, at most `max_text` bytes of it.
    pub fn render(self, conversation: &[Dict], kwargs: &Dict, job: &Job) -> Result<Rendered, Skip> {
        let messages = conversation.iter().map(Message::of).collect::<Result<Vec<_>, _>>()?;
        let mut text = match self {
            DeepSeek::V32 => v32::prompt(messages, kwargs, job)?,
            DeepSeek::V4 => v4::prompt(messages, kwargs, job)?,
        };
        let kept = text.floor_char_boundary(job.limits.max_text);
        let cut = kept < text.len();
        text.truncate(kept);
        Ok(Rendered { text, cut, dated: false })
    }
}

/// A message of the conversation that templates are given.
#[derive(Clone, Debug, Default)]
struct Message {
    role: Arc<str>,
    text: String,
    reasoning: Option<Arc<str>>,
    calls: Vec<Call>,
    /// Of a system message or the developer's.
    tools: Option<Json>,
    /// The call that a tool answers.
    answers: Option<Arc<str>>,
    task: Option<Arc<str>>,
}

#[derive(Clone, Debug)]
struct Call {
    id: Arc<str>,
    name: Arc<str>,
    arguments: Json,
}

impl Message {
    fn of(message: &Dict) -> Result<Message, Skip> {
        let string = |name: &str| match message.get(name) {
            Some(Json::Str(text)) => Some(Arc::clone(text)),
            _ => None,
        };
        let reasoning = match message.get("reasoning").filter(|reasoning| reasoning.is_true()) {
            Some(Json::Str(text)) => Some(Arc::clone(text)),
            Some(_) => return Err(Skip::Unsupported),
            None => None,
        };
        let calls = message.get("tool_calls").and_then(Json::as_list).unwrap_or_default();
        let role = string("role").ok_or(Skip::Refused)?;
        Ok(Message {
            text: text(message.get("content"), &role)?,
            role,
            reasoning,
            calls: calls.iter().map(Call::of).collect::<Result<_, _>>()?,
            tools: message.get("tools").filter(|tools| tools.is_true()).cloned(),
            answers: string("tool_call_id"),
            task: string("task"),
        })
    }

    fn is(&self, role: &str) -> bool {
        *self.role == *role
    }

    fn asks(&self) -> bool {
        self.is("user") || self.is("developer")
    }
}

/// A content as one text; what is no text is named in a tool's and refused elsewhere.
fn text(content: Option<&Json>, role: &str) -> Result<String, Skip> {
    let part = |part: &Json| {
        let part = part.as_dict().ok_or(Skip::Refused)?;
        match (part.get("type").and_then(Json::as_str), part.get("text")) {
            (Some("text"), Some(Json::Str(text))) => Ok(text.to_string()),
            (Some(kind), _) if role == "tool" => Ok(format!("[Unsupported {kind}]")),
            _ => Err(Skip::Refused),
        }
    };
    match content {
        Some(Json::Str(text)) => Ok(text.to_string()),
        Some(Json::List(parts)) => {
            let texts: Vec<String> = parts.0.iter().map(part).collect::<Result<_, _>>()?;
            Ok(texts.join("\n\n"))
        }
        _ => Ok(String::new()),
    }
}

impl Call {
    fn of(call: &Json) -> Result<Call, Skip> {
        let call = call.as_dict().ok_or(Skip::Refused)?;
        let function = call.get("function").and_then(Json::as_dict).ok_or(Skip::Refused)?;
        let text = |dict: &Dict, name: &str| match dict.get(name) {
            Some(Json::Str(text)) => Ok(Arc::clone(text)),
            _ => Err(Skip::Refused),
        };
        let arguments = function.get("arguments").cloned().ok_or(Skip::Refused)?;
        Ok(Call { id: text(call, "id")?, name: text(function, "name")?, arguments })
    }

    /// As the model writes it.
    fn write(&self, out: &mut String) -> Result<(), Skip> {
        out.push_str(&format!("<｜DSML｜invoke name=\"{}\">\n", self.name));
        for (at, (name, value)) in self.arguments.as_dict().ok_or(Skip::Refused)?.iter().enumerate()
        {
            if at > 0 {
                out.push('\n');
            }
            let is_text = value.as_str().is_some();
            out.push_str(&format!("<｜DSML｜parameter name=\"{name}\" string=\"{is_text}\">"));
            match value {
                Json::Str(text) => out.push_str(text),
                value => out.push_str(&json(value)?),
            }
            out.push_str("</｜DSML｜parameter>");
        }
        out.push_str("\n</｜DSML｜invoke>");
        Ok(())
    }
}

/// Calls in a block of a name.
fn write_calls(calls: &[Call], block: &str, out: &mut String) -> Result<(), Skip> {
    out.push_str(&format!("\n\n<｜DSML｜{block}>\n"));
    for (at, call) in calls.iter().enumerate() {
        if at > 0 {
            out.push('\n');
        }
        call.write(out)?;
    }
    out.push_str(&format!("\n</｜DSML｜{block}>"));
    Ok(())
}

fn json(value: &Json) -> Result<String, Skip> {
    Dumps::default().text(&value.to_value()).map_err(|_| Skip::Unsupported)
}

/// The schemas of tools, one a line.
fn schemas(tools: &Json) -> Result<String, Skip> {
    let function = |tool: &Json| json(tool.as_dict()?.get("function")?).ok();
    let tools = tools.as_list().ok_or(Skip::Refused)?.iter();
    let lines: Option<Vec<String>> = tools.map(function).collect();
    Ok(lines.ok_or(Skip::Refused)?.join("\n"))
}

/// The place of the last message that asks for an answer, and one past all that come before it.
fn last_asking(messages: &[Message]) -> Option<usize> {
    messages.iter().rposition(Message::asks)
}

fn is_true(kwargs: &Dict, name: &str) -> bool {
    kwargs.get(name).is_some_and(Json::is_true)
}

/// Takes the reasoning from turns that have been answered, and drops messages of unknown roles
/// and the developer's among them.
fn without_reasoning(messages: Vec<Message>, kept: &[&str]) -> Vec<Message> {
    let last = last_asking(&messages).unwrap_or(0);
    let change = |(at, mut message): (usize, Message)| {
        if at >= last || kept.contains(&&*message.role) {
            return Some(message);
        }
        message.reasoning = None;
        message.is("assistant").then_some(message)
    };
    messages.into_iter().enumerate().filter_map(change).collect()
}
