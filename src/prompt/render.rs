//! A conversation through a chat template, as Hugging Face's `apply_chat_template` does it.

use std::sync::Arc;

use minijinja::Value;

use super::Job;
use super::jinja::{Rendered, Template};
use super::python::{Dict, Json};
use crate::types::Skip;

/// Put at the end of the last message to find where to cut.
const CUT_HERE: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

pub(crate) fn render(
    template: &Template,
    special_tokens: &Dict,
    mut messages: Vec<Dict>,
    kwargs: Dict,
    job: &Job,
) -> Result<Rendered, Skip> {
    if messages.is_empty() {
        return Err(Skip::Refused);
    }
    let is_true = |name: &str| kwargs.get(name).is_some_and(Json::is_true);
    let continued = match kwargs.get("continue_final_message") {
        Some(field) if field.is_true() => {
            if is_true("add_generation_prompt") {
                return Err(Skip::Refused);
            }
            let field = field.as_str().unwrap_or("content");
            Some(mark_end(template, &mut messages, field)?)
        }
        _ => None,
    };
    let messages = Json::list(messages.into_iter().map(Json::dict).collect());
    let generate = kwargs.get("add_generation_prompt").unwrap_or(&Json::Bool(false)).to_value();
    let mut variables: Vec<(&str, Value)> = Vec::new();
    for (name, value) in special_tokens.iter() {
        variables.push((name, value.to_value()));
    }
    for (name, value) in kwargs.iter().filter(|(name, _)| template.takes(name)) {
        variables.push((name, value.to_value()));
    }
    let given = |name: &str| kwargs.get(name).unwrap_or(&Json::Null).to_value();
    variables.push(("tools", given("tools")));
    variables.push(("documents", given("documents")));
    variables.push(("add_generation_prompt", generate));
    variables.push(("messages", messages.to_value()));
    let rendered = template.render(variables, job)?;
    match continued {
        Some(last) => cut(rendered, &last),
        None => Ok(rendered),
    }
}

/// Marks the end of the field of the last message that is to be continued, and gives its text.
fn mark_end(template: &Template, messages: &mut [Dict], field: &str) -> Result<Arc<str>, Skip> {
    if !template.mentions(field) {
        return Err(Skip::Refused);
    }
    let last = messages.last_mut().ok_or(Skip::Refused)?;
    match last.given(field).ok_or(Skip::Refused)?.clone() {
        Json::Str(text) => {
            last.set(field, Json::str(&format!("{text}{CUT_HERE}")));
            Ok(text)
        }
        Json::List(parts) => {
            let has_text =
                |part: &Json| part.as_dict().is_some_and(|part| part.get("text").is_some());
            let at = parts.0.iter().rposition(has_text).ok_or(Skip::Refused)?;
            let part = parts.0[at].as_dict().ok_or(Skip::Refused)?;
            let Some(Json::Str(text)) = part.get("text") else { return Err(Skip::Refused) };
            let mut marked = Dict::default();
            part.iter().for_each(|(key, value)| marked.insert(key.clone(), value.clone()));
            marked.set("text", Json::str(&format!("{text}{CUT_HERE}")));
            let mut items = parts.0.clone();
            items[at] = Json::dict(marked);
            last.set(field, Json::list(items));
            Ok(text.clone())
        }
        _ => Err(Skip::Refused),
    }
}

/// Cuts a text at the mark.
fn cut(mut rendered: Rendered, last: &str) -> Result<Rendered, Skip> {
    let text = &rendered.text;
    let is_space = super::jinja::is_space;
    let Some(at) = text.rfind(CUT_HERE.trim_end()) else {
        // Where text is missing the mark may be in that.
        return if rendered.cut { Ok(rendered) } else { Err(Skip::Refused) };
    };
    if !rendered.cut && !text.contains(last.trim_matches(is_space)) {
        return Err(Skip::Refused);
    }
    let spaced = text[at..].starts_with(CUT_HERE);
    let kept = &text[..at];
    let len = if spaced { kept.len() } else { kept.trim_end_matches(is_space).len() };
    rendered.text.truncate(len);
    rendered.cut = false;
    Ok(rendered)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prompt::{Limits, json};

    fn continued(template: &str, messages: &str) -> Result<String, Skip> {
        let template = Template::compile(template).unwrap();
        let messages = json::parse(messages).unwrap();
        let messages = messages.as_list().unwrap().iter();
        let messages = messages.map(|message| message.as_dict().unwrap().clone()).collect();
        let mut kwargs = Dict::default();
        kwargs.set("continue_final_message", Json::Bool(true));
        let limits = Limits { max_text: 1 << 20, deadline: None };
        let job = Job { limits, now: None };
        render(&template, &Dict::default(), messages, kwargs, &job).map(|rendered| rendered.text)
    }

    #[test]
    fn a_message_is_continued_where_its_text_ends() {
        let text = r#"[{"role":"assistant","content":"so far "}]"#;
        let parts = r#"[{"content":[{"type":"text","text":"one"},{"type":"other"}]}]"#;
        let whole = "<{{ messages[-1].content }}>";
        assert_eq!(continued(whole, text).as_deref(), Ok("<so far "));
        let trimmed = "<{{ messages[-1].content|trim }}>";
        assert_eq!(continued(trimmed, text).as_deref(), Ok("<so far"));
        let of_parts = "<{% for part in messages[-1].content %}{{ part.text }}{% endfor %}>";
        assert_eq!(continued(of_parts, parts).as_deref(), Ok("<one"));
    }

    #[test]
    fn what_cannot_be_continued_is_refused() {
        let text = r#"[{"role":"assistant","content":"so far"}]"#;
        let dropped = "{{ 'content' }}";
        assert_eq!(continued(dropped, text), Err(Skip::Refused));
        let changed = "{{ messages[-1].content[3:] }}";
        assert_eq!(continued(changed, text), Err(Skip::Refused));
        let unnamed = "{{ messages[-1]['con' ~ 'tent'] }}";
        assert_eq!(continued(unnamed, text), Err(Skip::Refused));
        let whole = "{{ messages[-1].content }}";
        assert_eq!(
            continued(whole, r#"[{"role":"assistant","content":null}]"#),
            Err(Skip::Refused)
        );
        assert_eq!(continued(whole, "[]"), Err(Skip::Refused));
    }
}
