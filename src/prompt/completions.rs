//! `/v1/completions`.

use super::json;
use super::python::Json;
use super::request::{Request, skip};
use super::{Exact, Limits, Prompt, Truncation};
use crate::types::Skip;

pub(crate) fn prompt(request: &Request<'_>, limits: &Limits) -> Result<Prompt, Skip> {
    request.check_types()?;
    if request.is_given("prompt_embeds") {
        return Err(Skip::Unsupported);
    }
    // Only models of other renderers take a suffix.
    if request.is_given("suffix") {
        return Err(Skip::Refused);
    }
    let truncation = Truncation::read(request)?;
    let prompt = request.text("prompt").ok_or(Skip::Refused)?;
    prompt_of(request, prompt, truncation, limits)
}

/// A text, token ids, or a list of either, as JSON.
pub(crate) fn prompt_of(
    request: &Request<'_>,
    prompt: &str,
    truncation: Option<Truncation>,
    limits: &Limits,
) -> Result<Prompt, Skip> {
    if let Some(ids) = json::parse_ids(prompt) {
        return of_ids(ids, truncation, Exact::Yes);
    }
    match json::parse(prompt).map_err(skip)? {
        Json::Str(text) if text.is_empty() => Err(Skip::Refused),
        Json::Str(text) => of_text(request, &text, truncation, Exact::Yes, limits),
        // Several prompts are several requests to the engine; the first stands for them.
        Json::List(prompts) => {
            let exact = if prompts.0.len() > 1 { Exact::No("batch") } else { Exact::Yes };
            match prompts.0.first() {
                Some(Json::Str(text)) if prompts.0.iter().all(|item| item.as_str().is_some()) => {
                    of_text(request, text, truncation, exact, limits)
                }
                Some(Json::List(ids)) if prompts.0.iter().all(|item| item.as_list().is_some()) => {
                    let ids = ids.0.iter().map(id).collect::<Option<_>>().ok_or(Skip::Refused)?;
                    of_ids(ids, truncation, exact)
                }
                _ => Err(Skip::Refused),
            }
        }
        _ => Err(Skip::Refused),
    }
}

fn of_ids(ids: Vec<u32>, truncation: Option<Truncation>, exact: Exact) -> Result<Prompt, Skip> {
    if ids.is_empty() { Err(Skip::Refused) } else { Ok(Prompt::Ids { ids, truncation, exact }) }
}

fn of_text(
    request: &Request<'_>,
    text: &str,
    truncation: Option<Truncation>,
    exact: Exact,
    limits: &Limits,
) -> Result<Prompt, Skip> {
    let kept = &text[..text.floor_char_boundary(limits.max_text)];
    let exact = if kept.len() < text.len() { Exact::No("max_text") } else { exact };
    let add_special_tokens = request.flag("add_special_tokens", true)?;
    Ok(Prompt::Text { text: kept.to_owned(), add_special_tokens, truncation, exact })
}

fn id(value: &Json) -> Option<u32> {
    if let Json::Int(id) = value { u32::try_from(*id).ok() } else { None }
}
