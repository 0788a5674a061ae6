//! Harmony, the format of gpt-oss: the engine makes the prompt of messages by code of its own, and
//! encodes each text apart from the control tokens around it.

mod chat;
mod items;
mod schema;
#[cfg(test)]
mod tests;

pub(crate) use chat::Conversation;

use std::sync::Arc;

use serde_json::Value;

use super::jinja::Moment;
use super::pieces::Pieces;
use super::python::{Dict, Json};
use super::repr::Dumps;
use super::tokenizer::Tokenizer;
use super::{Exact, Job, Prompt};
use crate::types::Skip;

/// Tokens that only a vocabulary for harmony has.
pub(crate) const TOKENS: [&str; 7] =
    [START, END, MESSAGE, CHANNEL, "<|constrain|>", "<|return|>", CALL];

const START: &str = "<|start|>";
const END: &str = "<|end|>";
const MESSAGE: &str = "<|message|>";
const CHANNEL: &str = "<|channel|>";
const CALL: &str = "<|call|>";

const IDENTITY: &str = "You are ChatGPT, a large language model trained by OpenAI.";

/// Says what a tokenizer lacks.
pub(crate) fn check(tokenizer: &Tokenizer) -> Result<(), String> {
    if !tokenizer.has_plain() {
        return Err("cannot be used for harmony".to_owned());
    }
    TOKENS.iter().try_for_each(|token| tokenizer.id(token).map(|_| ()))
}

/// What the engine's environment says of its prompts.
#[derive(Debug, Default)]
pub(crate) struct Harmony {
    /// Instead of today's date.
    start_date: Option<Arc<str>>,
    /// Instructions are a part of the system message.
    instructions_in_system: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Channel {
    Analysis,
    Commentary,
    Final,
}

impl Channel {
    fn name(self) -> &'static str {
        match self {
            Channel::Analysis => "analysis",
            Channel::Commentary => "commentary",
            Channel::Final => "final",
        }
    }
}

/// A message of the conversation as the engine's code has it.
#[derive(Clone, Debug)]
enum Message {
    System { instructions: Option<Arc<str>>, effort: &'static str },
    Developer { instructions: Option<Arc<str>>, tools: Option<Arc<[Function]>> },
    User(Vec<Arc<str>>),
    Assistant(Channel, Vec<Arc<str>>),
    Call { name: String, arguments: Arc<str> },
    Result { name: String, text: Arc<str> },
}

/// A function that the model is shown.
#[derive(Debug)]
struct Function {
    name: Arc<str>,
    description: Arc<str>,
    parameters: Option<Value>,
}

impl Function {
    /// Of a tool as templates get it.
    fn of(tool: &Json) -> Result<Function, Skip> {
        let function = tool.as_dict().and_then(|tool| tool.get("function")?.as_dict());
        let function = function.ok_or(Skip::Refused)?;
        let text = |name| match function.get(name) {
            Some(Json::Str(text)) => Arc::clone(text),
            _ => Arc::from(""),
        };
        let parameters = function.given("parameters").map(plain).transpose()?;
        Ok(Function { name: text("name"), description: text("description"), parameters })
    }
}

/// A value as the engine's renderer, a JSON library of its own, reads it: integers beyond 64 bits are
/// floats there, and what is no number is an error.
fn plain(value: &Json) -> Result<Value, Skip> {
    let text = Dumps::default().text(&value.to_value()).map_err(|_| Skip::Unsupported)?;
    serde_json::from_str(&text).map_err(|_| Skip::Refused)
}

fn functions(tools: &Json) -> Result<Arc<[Function]>, Skip> {
    tools.as_list().ok_or(Skip::Refused)?.iter().map(Function::of).collect()
}

/// The first messages of a request.
struct Preamble {
    instructions: Option<Arc<str>>,
    tools: Option<Arc<[Function]>>,
    effort: Option<Arc<str>>,
}

impl Harmony {
    /// `kwargs` are those that the configuration gives for the engine.
    pub fn new(kwargs: &Dict) -> Harmony {
        let start_date = match kwargs.get("VLLM_SYSTEM_START_DATE") {
            Some(Json::Str(date)) if !date.is_empty() => Some(Arc::clone(date)),
            _ => None,
        };
        let in_system = kwargs.get("VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS");
        Harmony { start_date, instructions_in_system: in_system.is_some_and(Json::is_true) }
    }

    fn start(&self, preamble: Preamble) -> Result<Vec<Message>, Skip> {
        let Preamble { instructions, tools, effort } = preamble;
        let effort = match effort.as_deref() {
            None | Some("medium") => "medium",
            Some("low") => "low",
            Some("high") => "high",
            Some(_) => return Err(Skip::Refused),
        };
        let (own, instructions) =
            if self.instructions_in_system { (instructions, None) } else { (None, instructions) };
        let mut messages = vec![Message::System { instructions: own, effort }];
        if tools.is_some() || instructions.as_ref().is_some_and(|text| !text.is_empty()) {
            messages.push(Message::Developer { instructions, tools });
        }
        Ok(messages)
    }

    /// A message of the system or developer within the conversation.
    fn instruct(&self, role: &str, text: Arc<str>) -> Message {
        if role == "system" && self.instructions_in_system {
            return Message::System { instructions: Some(text), effort: "medium" };
        }
        Message::Developer { instructions: Some(text), tools: None }
    }

    fn prompt(&self, messages: &[Message], job: &Job) -> Result<Prompt, Skip> {
        let mut out = Pieces::new(job.limits.max_text);
        let has_tools = messages
            .iter()
            .any(|message| matches!(message, Message::Developer { tools: Some(_), .. }));
        let is_final = |message: &Message| matches!(message, Message::Assistant(Channel::Final, _));
        let last_final = messages.iter().rposition(is_final).unwrap_or(0);
        for (at, message) in messages.iter().enumerate() {
            // What led to an answer is not shown once that is given.
            if at < last_final && matches!(message, Message::Assistant(Channel::Analysis, _)) {
                continue;
            }
            if job.limits.over() {
                return Err(Skip::Deadline);
            }
            self.message(message, has_tools, job, &mut out)?;
        }
        out.control(START);
        out.text("assistant");
        let exact = match (out.is_cut(), &self.start_date) {
            (true, _) => Exact::No("max_text"),
            (_, None) => Exact::No("date"),
            _ => Exact::Yes,
        };
        Ok(Prompt::Pieces { pieces: out, exact })
    }

    fn message(
        &self,
        message: &Message,
        has_tools: bool,
        job: &Job,
        out: &mut Pieces,
    ) -> Result<(), Skip> {
        out.control(START);
        match message {
            Message::System { instructions, effort } => {
                let date = self.date(job)?;
                body(out, "system", &[system(instructions.as_deref(), &date, effort, has_tools)]);
            }
            Message::Developer { instructions, tools } => {
                let text = developer(instructions.as_deref(), tools.as_deref(), out.room());
                body(out, "developer", &[text]);
            }
            Message::User(texts) => body(out, "user", texts),
            Message::Assistant(channel, texts) => {
                out.text("assistant");
                out.control(CHANNEL);
                body(out, channel.name(), texts);
            }
            Message::Call { name, arguments } => {
                out.text(&format!("assistant to=functions.{name}"));
                out.control(CHANNEL);
                out.text("commentary json");
                out.control(MESSAGE);
                out.text(arguments);
                out.control(CALL);
                return Ok(());
            }
            Message::Result { name, text } => {
                out.text(&format!("functions.{name}"));
                out.control(CHANNEL);
                body(out, "commentary to=assistant", std::slice::from_ref(text));
            }
        }
        out.control(END);
        Ok(())
    }

    fn date(&self, job: &Job) -> Result<Arc<str>, Skip> {
        if let Some(date) = &self.start_date {
            return Ok(Arc::clone(date));
        }
        let now = job.now.unwrap_or_else(Moment::now);
        now.strftime("%Y-%m-%d").map(Arc::from).map_err(|_| Skip::Failed)
    }
}

/// The end of a header and the texts after it, each of which is encoded apart.
fn body<T: AsRef<str>>(out: &mut Pieces, header: &str, texts: &[T]) {
    out.text(header);
    out.control(MESSAGE);
    texts.iter().for_each(|text| out.text(text.as_ref()));
}

fn system(instructions: Option<&str>, date: &str, effort: &str, has_tools: bool) -> String {
    let mut text = IDENTITY.to_owned();
    if let Some(instructions) = instructions {
        text.push('\n');
        text.push_str(instructions);
    }
    text.push_str(&format!("\nKnowledge cutoff: 2024-06\nCurrent date: {date}"));
    text.push_str(&format!("\n\nReasoning: {effort}"));
    text.push_str("\n\n# Valid channels: analysis, commentary, final.");
    text.push_str(" Channel must be included for every message.");
    if has_tools {
        text.push_str("\nCalls to these tools must go to the commentary channel: 'functions'.");
    }
    text
}

/// What is past about `max` bytes is missing.
fn developer(instructions: Option<&str>, tools: Option<&[Function]>, max: usize) -> String {
    let mut text = String::new();
    if let Some(instructions) = instructions {
        text.push_str("# Instructions\n\n");
        text.push_str(instructions);
    }
    let Some(tools) = tools else { return text };
    if !text.is_empty() {
        text.push_str("\n\n");
    }
    text.push_str("# Tools\n\n## functions\n\nnamespace functions {\n\n");
    for Function { name, description, parameters } in tools {
        if text.len() > max {
            return text;
        }
        description.lines().for_each(|line| text.push_str(&format!("// {line}\n")));
        text.push_str(&format!("type {name} = ("));
        if let Some(parameters) = parameters {
            text.push_str("_: ");
            text.push_str(&schema::Type::of(parameters, max));
        }
        text.push_str(") => any;\n\n");
    }
    text.push_str("} // namespace functions");
    text
}

/// Whether a text holds the name of a control token: the engine fails where the name of a function
/// does.
fn has_control(text: &str) -> bool {
    const NUMBERED: std::ops::RangeInclusive<u32> = 200_000..=201_088;
    let is_control = |at: usize| {
        let rest = &text[at..];
        let others = ["<|startoftext|>", "<|endoftext|>"];
        if TOKENS.iter().chain(&others).any(|token| rest.starts_with(token)) {
            return true;
        }
        let number = rest.strip_prefix("<|reserved_").and_then(|rest| rest.split_once("|>"));
        let number = number.filter(|(number, _)| number.len() == 6).and_then(|(number, _)| {
            number.bytes().all(|byte| byte.is_ascii_digit()).then(|| number.parse().ok())?
        });
        // Some of these numbers are those of tokens with a name.
        number.is_some_and(|number| {
            NUMBERED.contains(&number)
                && ![200_002, 200_003, 200_012].contains(&number)
                && !(200_005..=200_008).contains(&number)
        })
    };
    text.match_indices("<|").any(|(at, _)| is_control(at))
}
