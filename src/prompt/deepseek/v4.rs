//! DeepSeek V4.

use std::collections::HashMap;
use std::sync::Arc;

use super::{ASSISTANT, BOS, EOS, Message, THINK, THOUGHT, USER};
use super::{is_true, last_asking, schemas, without_reasoning, write_calls};
use crate::prompt::Job;
use crate::prompt::python::{Dict, Json};
use crate::types::Skip;

const REMINDER: &str = "<｜latest_reminder｜>";

const TASKS: [(&str, &str); 6] = [
    ("action", "<｜action｜>"),
    ("query", "<｜query｜>"),
    ("authority", "<｜authority｜>"),
    ("domain", "<｜domain｜>"),
    ("title", "<｜title｜>"),
    ("read_url", "<｜read_url｜>"),
];

/// What the model was taught to read before it thinks, by how hard it is to.
const HIGH: &str = "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n\
    You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.\n\
    Explicitly write out your entire deliberation process, documenting every intermediate step, considered alternative, and rejected hypothesis to ensure absolutely no assumption is left unchecked.\n\n";
const MAX: &str = "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n\
    You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose the problem into its most fundamental components, trace every causal chain to its root, and resolve the underlying cause rather than any surface symptom.\n\
    Do not stop reasoning until you have independently verified the solution from multiple angles and are certain that no assumption remains unchecked and no error remains undiscovered.\n\n";

/// The same before and after the schemas of tools.
const TOOLS: [&str; 2] = [
    r#"## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a "<｜DSML｜tool_calls>" block like the following:

<｜DSML｜tool_calls>
<｜DSML｜invoke name="$TOOL_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$TOOL_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜tool_calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside <think>...</think> BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

"#,
    "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n",
];

pub(super) fn prompt(mut messages: Vec<Message>, kwargs: &Dict, job: &Job) -> Result<String, Skip> {
    let is_given = |name| kwargs.get(name).is_some();
    let mut thinks = !is_given("thinking") && !is_given("enable_thinking");
    thinks |= is_true(kwargs, "thinking") || is_true(kwargs, "enable_thinking");
    let effort = match kwargs.get("reasoning_effort").and_then(Json::as_str) {
        None if thinks => HIGH,
        None => "",
        Some("none") => {
            thinks = false;
            ""
        }
        Some("max") => MAX,
        Some("low" | "minimal" | "medium") => "",
        Some(_) => HIGH,
    };
    if let Some(tools) = kwargs.get("tools").filter(|tools| tools.is_true()) {
        let system = messages.iter().position(|message| message.is("system"));
        if system.is_none() {
            messages.insert(0, Message { role: "system".into(), ..Message::default() });
        }
        messages[system.unwrap_or(0)].tools = Some(tools.clone());
    }
    let mut messages = with_results(messages);
    let has_tools = messages.iter().any(|message| message.tools.is_some());
    let drops = !has_tools && kwargs.get("drop_thinking").is_none_or(Json::is_true);
    if thinks && drops {
        messages = without_reasoning(messages, &KEPT);
    }
    let place = Place { last: last_asking(&messages), messages: &messages, thinks, drops };
    let mut out = BOS.to_owned();
    if thinks && !messages.is_empty() {
        out.push_str(effort);
    }
    for at in 0..messages.len() {
        if job.limits.over() {
            return Err(Skip::Deadline);
        }
        if out.len() > job.limits.max_text {
            break;
        }
        place.write(at, &mut out)?;
        place.open(at, &mut out)?;
    }
    Ok(out)
}

/// Roles whose messages stay, whatever follows.
const KEPT: [&str; 5] = ["user", "system", "tool", "latest_reminder", "direct_search_results"];

/// Results of tools are parts of the user's messages, in the order of the calls.
fn with_results(messages: Vec<Message>) -> Vec<Message> {
    let mut out: Vec<Message> = Vec::new();
    let mut parts: Vec<Part> = Vec::new();
    let mut order: HashMap<Arc<str>, usize> = HashMap::new();
    let close = |out: &mut Vec<Message>, parts: &mut Vec<Part>, order: &HashMap<_, _>| {
        if let Some(last) = out.last_mut().filter(|_| !parts.is_empty()) {
            last.text = joined(std::mem::take(parts), order);
        }
    };
    for mut message in messages {
        let is_result = message.is("tool");
        if !is_result && !message.is("user") {
            close(&mut out, &mut parts, &order);
            if !message.calls.is_empty() {
                let ids = message.calls.iter().map(|call| call.id.clone()).enumerate();
                order = ids.filter(|(_, id)| !id.is_empty()).map(|(at, id)| (id, at)).collect();
            }
            out.push(message);
            continue;
        }
        let text = std::mem::take(&mut message.text);
        // A message with a task takes results, but no more of the user's texts.
        let joins =
            !parts.is_empty() && (is_result || out.last().is_some_and(|last| last.task.is_none()));
        if !joins {
            close(&mut out, &mut parts, &order);
            let task = message.task.take().filter(|_| !is_result);
            out.push(Message { role: "user".into(), task, ..Message::default() });
        }
        parts.push(if is_result {
            Part::Result {
                call: message.answers,
                text: format!("<tool_result>{text}</tool_result>"),
            }
        } else {
            Part::Text(text)
        });
    }
    close(&mut out, &mut parts, &order);
    out
}

enum Part {
    Text(String),
    Result { call: Option<Arc<str>>, text: String },
}

fn joined(parts: Vec<Part>, order: &HashMap<Arc<str>, usize>) -> String {
    let place = |call: &Option<Arc<str>>| {
        call.as_ref().and_then(|call| order.get(call)).copied().unwrap_or(0)
    };
    let mut results: Vec<(usize, String)> = Vec::new();
    let mut texts: Vec<Option<String>> = Vec::new();
    for part in parts {
        texts.push(match part {
            Part::Text(text) => Some(text),
            Part::Result { call, text } => {
                results.push((place(&call), text));
                None
            }
        });
    }
    results.sort_by_key(|(place, _)| *place);
    let mut results = results.into_iter().map(|(_, text)| text);
    let texts = texts.into_iter().map(|text| text.or_else(|| results.next()).unwrap_or_default());
    texts.collect::<Vec<_>>().join("\n\n")
}

struct Place<'a> {
    messages: &'a [Message],
    /// The last message that asks for an answer.
    last: Option<usize>,
    thinks: bool,
    /// Reasoning of turns that have been answered is not shown.
    drops: bool,
}

impl Place<'_> {
    fn write(&self, at: usize, out: &mut String) -> Result<(), Skip> {
        let message = &self.messages[at];
        match &*message.role {
            "system" => out.push_str(&message.text),
            "developer" if message.text.is_empty() => return Err(Skip::Refused),
            "user" | "developer" => {
                out.push_str(USER);
                out.push_str(&message.text);
            }
            "latest_reminder" => {
                out.push_str(REMINDER);
                out.push_str(&message.text);
            }
            "assistant" => return self.answer(at, out),
            _ => return Err(Skip::Refused),
        }
        if let Some(tools) = &message.tools {
            out.push_str("\n\n");
            out.push_str(TOOLS[0]);
            out.push_str(&schemas(tools)?);
            out.push_str(TOOLS[1]);
        }
        Ok(())
    }

    fn answer(&self, at: usize, out: &mut String) -> Result<(), Skip> {
        let message = &self.messages[at];
        let is_task = at > 0 && self.messages[at - 1].task.is_some();
        let is_open = !self.drops || self.last.is_none_or(|last| at > last);
        if self.thinks && !is_task && is_open {
            out.push_str(message.reasoning.as_deref().unwrap_or_default());
            out.push_str(THOUGHT);
        }
        out.push_str(&message.text);
        if !message.calls.is_empty() {
            write_calls(&message.calls, "tool_calls", out)?;
        }
        out.push_str(EOS);
        Ok(())
    }

    /// What comes between a message and the answer to it.
    fn open(&self, at: usize, out: &mut String) -> Result<(), Skip> {
        let message = &self.messages[at];
        let next = self.messages.get(at + 1);
        if next.is_some_and(|next| !next.is("assistant") && !next.is("latest_reminder")) {
            return Ok(());
        }
        if let Some(task) = &message.task {
            let (name, token) =
                TASKS.iter().find(|(name, _)| **task == **name).ok_or(Skip::Refused)?;
            if *name == "action" {
                out.push_str(ASSISTANT);
                out.push_str(if self.thinks { THINK } else { THOUGHT });
            }
            out.push_str(token);
            return Ok(());
        }
        let opens = message.is("system") && next.is_none_or(|next| next.is("assistant"));
        if message.asks() || opens {
            let is_last = self.last.is_none_or(|last| at >= last);
            out.push_str(ASSISTANT);
            out.push_str(if self.thinks && (!self.drops || is_last) { THINK } else { THOUGHT });
        }
        Ok(())
    }
}
