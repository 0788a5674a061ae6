//! The steps between a request and its tokens, one at a time, for those who look for a difference.

use super::chat::Chat;
use super::jinja::ContentFormat;
use super::messages::conversation;
use super::python::{Dict, Json};
use super::request::Request;
use super::{Job, Limits, Models, json, render};
use crate::prompt::repr::Dumps;
use crate::types::Skip;

impl Models {
    /// What the chat template of a model makes of `input`, a JSON object with `messages` and other
    /// variables, which are handed over as they are.
    pub fn render_template(
        &self,
        model: usize,
        input: &[u8],
        limits: &Limits,
    ) -> Result<String, Skip> {
        let model = self.loaded(model)?;
        let text = std::str::from_utf8(input).map_err(|_| Skip::BadJson)?;
        let input = json::parse(text).map_err(super::request::skip)?;
        let input = input.as_dict().ok_or(Skip::BadJson)?;
        let mut kwargs = Dict::default();
        let rest = input.iter().filter(|(name, _)| &***name != "messages");
        rest.for_each(|(name, value)| kwargs.insert(name.clone(), value.clone()));
        let messages = input.get("messages").and_then(Json::as_list).ok_or(Skip::Refused)?;
        let messages = messages.iter().map(|message| message.as_dict().cloned());
        let messages = messages.collect::<Option<Vec<_>>>().ok_or(Skip::Refused)?;
        let template = model.template(kwargs.given("tools").is_some())?;
        let job = Job { limits: *limits, now: self.now() };
        render::render(template, &model.special_tokens, messages, kwargs, &job)
            .map(|rendered| rendered.text)
    }
}

/// What the template stage of a chat request is given, as JSON: `conversation`, `kwargs` (`tools`
/// among them) and `add_special_tokens`. `parts`: the template wants content as a list of parts.
pub fn prepare_chat(body: &[u8], parts: bool) -> Result<String, Skip> {
    let request = Request::read(body)?;
    super::chat::check(&request)?;
    super::chat::check_trusted(&request)?;
    let chat = Chat::read(&request, &Dict::default())?;
    let format = if parts { ContentFormat::Parts } else { ContentFormat::String };
    let messages = conversation(&chat.messages, format)?.into_iter().map(Json::dict).collect();
    let mut out = Dict::default();
    out.set("conversation", Json::list(messages));
    out.set("kwargs", Json::dict(chat.kwargs));
    out.set("add_special_tokens", Json::Bool(chat.add_special_tokens));
    Dumps::default().text(&Json::dict(out).to_value()).map_err(|_| Skip::Failed)
}
