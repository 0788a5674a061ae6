//! `/v1/chat/completions`: the checks, the conversation and the template's arguments.

use super::harmony::{Conversation, Harmony};
use super::jinja::{ContentFormat, Rendered, Template};
use super::messages::{
    Media, conversation, conversation_with, has_media, ordered, without_developer,
};
use super::model::Model;
use super::python::{Dict, Json};
use super::request::Request;
use super::{Exact, Job, Prompt, Truncation, json, media, render, tools};
use crate::types::Skip;

/// What the engine's template function takes for itself.
const TAKEN: [&str; 8] = [
    "tokenize",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
];

/// No template has as many arguments; more only cost time.
const MAX_KWARGS: usize = 256;

/// A request on its way to the template.
pub(crate) struct Chat {
    pub messages: Json,
    /// What the request itself says, whatever the template is given.
    pub tools: Option<Json>,
    pub effort: Option<String>,
    /// Arguments of the template, `tools` among them.
    pub kwargs: Dict,
    pub add_special_tokens: bool,
    pub truncation: Option<Truncation>,
}

pub(crate) fn prompt(model: &Model, request: &Request<'_>, job: &Job) -> Result<Prompt, Skip> {
    check(request)?;
    if let Some(harmony) = model.harmony() {
        return without_template(harmony, request, job);
    }
    check_trusted(request)?;
    let chat = Chat::read(request, &model.template_kwargs)?;
    if let Some(ids) = forwarded_ids(request, &chat.messages)? {
        return Ok(ids);
    }
    if job.limits.over() {
        return Err(Skip::Deadline);
    }
    render(model, chat, job)
}

/// Of a model to which the arguments of templates and the settings of tokenizers say nothing.
fn without_template(harmony: &Harmony, request: &Request<'_>, job: &Job) -> Result<Prompt, Skip> {
    let messages = request.value("messages")?.ok_or(Skip::Refused)?;
    let tools = request.value("tools")?.map(|list| tools::tools(&list)).transpose()?;
    let effort = request.str("reasoning_effort")?;
    if let Some(documents) = request.value("documents")? {
        check_documents(&documents)?;
    }
    Truncation::check(request)?;
    let conversation =
        Conversation { messages: &messages, tools: tools.as_ref(), effort: effort.as_deref() };
    match forwarded_ids(request, &messages)? {
        Some(ids) => Ok(ids),
        None => harmony.chat(&conversation, job),
    }
}

/// Renders a conversation: the text is the prompt, or what of it is known.
pub(crate) fn render(model: &Model, chat: Chat, job: &Job) -> Result<Prompt, Skip> {
    if let Some(harmony) = model.harmony() {
        let Chat { messages, tools, effort, .. } = &chat;
        let (tools, effort) = (tools.as_ref(), effort.as_deref());
        return harmony.chat(&Conversation { messages, tools, effort }, job);
    }
    let rendered = match model.deepseek() {
        Some(deepseek) => {
            let messages = conversation(&chat.messages, deepseek.format())?;
            deepseek.render(&messages, &chat.kwargs, job)?
        }
        None if has_media(&chat.messages) => return media::prompt(model, &chat, job),
        None => rendered(model, &chat, Media::Named, job)?,
    };
    Ok(chat.into_prompt(rendered))
}

/// The text that the template makes of a conversation.
pub(crate) fn rendered(
    model: &Model,
    chat: &Chat,
    media: Media<'_>,
    job: &Job,
) -> Result<Rendered, Skip> {
    let template = chat.template(model)?;
    let mut messages = conversation_with(&chat.messages, template.format, media)?;
    let is_developer =
        |message: &Dict| message.get("role").and_then(Json::as_str) == Some("developer");
    let mentions = || template.mentions("'developer'") || template.mentions("\"developer\"");
    if messages.iter().any(is_developer) && !mentions() {
        messages = without_developer(messages);
    }
    if job.limits.over() {
        return Err(Skip::Deadline);
    }
    render::render(template, &model.special_tokens, messages, chat.kwargs.clone(), job)
}

impl Chat {
    pub fn template<'a>(&self, model: &'a Model) -> Result<&'a Template, Skip> {
        model.template(self.kwargs.given("tools").is_some())
    }

    pub fn into_prompt(self, rendered: Rendered) -> Prompt {
        let Rendered { text, cut, dated } = rendered;
        let exact = match (cut, dated) {
            (true, _) => Exact::No("max_text"),
            (_, true) => Exact::No("date"),
            _ => Exact::Yes,
        };
        let Chat { add_special_tokens, truncation, .. } = self;
        Prompt::Text { text, add_special_tokens, truncation, exact }
    }

    pub fn read(request: &Request<'_>, defaults: &Dict) -> Result<Chat, Skip> {
        let messages = request.value("messages")?.ok_or(Skip::Refused)?;
        let tools = request.value("tools")?.map(|list| tools::tools(&list)).transpose()?;
        Ok(Chat {
            messages: ordered(messages),
            tools: tools.clone(),
            effort: request.str("reasoning_effort")?,
            kwargs: merge(defaults, tools, own_kwargs(request)?),
            add_special_tokens: request.flag("add_special_tokens", false)?,
            truncation: Truncation::read(request)?,
        })
    }
}

/// The request's own arguments of the template: fields of the request beat `chat_template_kwargs`.
fn own_kwargs(request: &Request<'_>) -> Result<Dict, Skip> {
    let effort = request.str("reasoning_effort")?;
    let mut kwargs = arguments(request.value("chat_template_kwargs")?, effort)?;
    if let Some(documents) = request.value("documents")? {
        check_documents(&documents)?;
        kwargs.set("documents", documents);
    }
    for (name, default) in [("add_generation_prompt", true), ("continue_final_message", false)] {
        kwargs.set(name, Json::Bool(request.flag(name, default)?));
    }
    Ok(kwargs)
}

/// `chat_template_kwargs`, the reasoning effort, and a prompt for an answer.
pub(crate) fn arguments(given: Option<Json>, effort: Option<String>) -> Result<Dict, Skip> {
    let given = match given {
        Some(Json::Dict(given)) => given,
        Some(_) => return Err(Skip::Refused),
        None => Default::default(),
    };
    if given.given("chat_template").is_some() || given.get("messages").is_some() {
        return Err(Skip::Refused);
    }
    let taken = TAKEN.iter().any(|name| given.given(name).is_some());
    if taken || given.len() > MAX_KWARGS {
        return Err(Skip::Unsupported);
    }
    let mut kwargs = Dict::default();
    given.iter().for_each(|(key, value)| kwargs.insert(key.clone(), value.clone()));
    if let Some(effort) = effort {
        if !["none", "minimal", "low", "medium", "high", "xhigh", "max"].contains(&effort.as_str())
        {
            return Err(Skip::Refused);
        }
        if given.get("enable_thinking").is_none() {
            kwargs.set("enable_thinking", Json::Bool(effort != "none"));
        }
        kwargs.set("reasoning_effort", Json::str(&effort));
    }
    for (name, value) in [("add_generation_prompt", true), ("continue_final_message", false)] {
        kwargs.set(name, Json::Bool(value));
    }
    Ok(kwargs)
}

fn check_documents(documents: &Json) -> Result<(), Skip> {
    let fits = |document: &Json| {
        document.as_dict().is_some_and(|dict| dict.iter().all(|(_, text)| text.as_str().is_some()))
    };
    let list = documents.as_list().ok_or(Skip::Refused)?;
    if list.iter().all(fits) { Ok(()) } else { Err(Skip::Refused) }
}

/// The server's defaults, the tools, and what the request says unless that is null or `auto`.
pub(crate) fn merge(defaults: &Dict, tools: Option<Json>, own: Dict) -> Dict {
    let mut kwargs = Dict::default();
    defaults.iter().for_each(|(key, value)| kwargs.insert(key.clone(), value.clone()));
    if let Some(tools) = tools {
        kwargs.set("tools", tools);
    }
    for (key, value) in own.iter() {
        if !value.is_null() && value.as_str() != Some("auto") {
            kwargs.insert(key.clone(), value.clone());
        }
    }
    kwargs
}

/// Refuses what the engine refuses before it looks at the messages.
pub(crate) fn check(request: &Request<'_>) -> Result<(), Skip> {
    request.check_types()?;
    let is_true = |name: &str| -> Result<bool, Skip> {
        Ok(request.value(name)?.is_some_and(|value| value.is_true()))
    };
    let contradicts = is_true("continue_final_message")? && is_true("add_generation_prompt")?;
    if contradicts || (is_true("stream_options")? && !is_true("stream")?) {
        return Err(Skip::Refused);
    }
    let tools = request.value("tools")?;
    if let Some(choice) = request.value("tool_choice")? {
        tools::check_choice(&choice, tools.as_ref())?;
    }
    if let Some(Json::Dict(format)) = request.value("response_format")? {
        let is_schema = format.get("type").and_then(Json::as_str) == Some("json_schema");
        if is_schema && format.given("json_schema").is_none() {
            return Err(Skip::Refused);
        }
    }
    check_logprobs(request)
}

/// Refuses what a request is not trusted with.
pub(crate) fn check_trusted(request: &Request<'_>) -> Result<(), Skip> {
    let untrusted = request.is_given("chat_template")
        || request.value("mm_processor_kwargs")?.is_some_and(|value| value.is_true())
        || request.value("media_io_kwargs")?.is_some_and(|value| value.is_true());
    if untrusted { Err(Skip::Refused) } else { Ok(()) }
}

fn check_logprobs(request: &Request<'_>) -> Result<(), Skip> {
    let logprobs = request.value("logprobs")?.is_some_and(|value| value.is_true());
    match request.int("top_logprobs")? {
        Some(top) if top < -1 || (top != 0 && !logprobs) => Err(Skip::Refused),
        _ => Ok(()),
    }
}

/// Token ids that an earlier stage of the engine hands on: the engine takes them for the prompt.
pub(crate) fn forwarded_ids(
    request: &Request<'_>,
    messages: &Json,
) -> Result<Option<Prompt>, Skip> {
    let Some(params) = request.text("kv_transfer_params") else { return Ok(None) };
    let [ids] = json::fields(params, &["prompt_token_ids"]).map_err(super::request::skip)?;
    let Some(ids) = ids.filter(|ids| *ids != "null") else { return Ok(None) };
    if request.flag("echo", false)? || has_media(messages) {
        return Ok(None);
    }
    // The messages are checked all the same.
    conversation(messages, ContentFormat::String)?;
    let ids = json::parse_ids(ids).filter(|ids| !ids.is_empty()).ok_or(Skip::Refused)?;
    Ok(Some(Prompt::Ids { ids, truncation: None, exact: Exact::Yes }))
}
