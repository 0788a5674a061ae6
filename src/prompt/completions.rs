//! `/v1/completions`.

use super::json;
use super::python::Json;
use super::request::{Request, skip};
use super::{Exact, Limits, Prompt, Truncation};
use crate::types::Skip;

/// What a model puts before a text with a gap, in the gap and after it.
pub(crate) type Gap = [&'static str; 3];

/// Only models with a `gap` take a suffix.
pub(crate) fn prompt(
    request: &Request<'_>,
    gap: Option<Gap>,
    limits: &Limits,
) -> Result<Prompt, Skip> {
    request.check_types()?;
    if request.is_given("prompt_embeds") {
        return Err(Skip::Unsupported);
    }
    if let Some(suffix) = request.str("suffix")? {
        return around_gap(request, &suffix, gap.ok_or(Skip::Refused)?, limits);
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

fn around_gap(
    request: &Request<'_>,
    suffix: &str,
    gap: Gap,
    limits: &Limits,
) -> Result<Prompt, Skip> {
    if request.flag("echo", false)? || request.is_given("truncate_prompt_tokens") {
        return Err(Skip::Refused);
    }
    let prompt = request.value("prompt")?.ok_or(Skip::Refused)?;
    let texts = match &prompt {
        text @ Json::Str(_) if text.is_true() => std::slice::from_ref(text),
        prompts => prompts.as_list().ok_or(Skip::Refused)?,
    };
    let exact = if texts.len() > 1 { Exact::No("batch") } else { Exact::Yes };
    match texts.first() {
        Some(Json::Str(text)) if texts.iter().all(|item| item.as_str().is_some()) => {
            let [before, between, after] = gap;
            let text = [before, text, between, suffix, after].concat();
            of_text(request, &text, None, exact, limits)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gap_is_for_models_that_fill_it() {
        let run = |gap, rest: &str| {
            let body = format!("{{{rest}}}");
            let limits = Limits { max_text: 100, deadline: None };
            let request = Request::read(body.as_bytes())?;
            match prompt(&request, gap, &limits)? {
                Prompt::Text { text, exact, .. } => Ok((text, exact)),
                other => panic!("{:?}", matches!(other, Prompt::Ids { .. })),
            }
        };
        let gap = Some(["<", "_", ">"]);
        let text = r#""prompt":"a","suffix":"b""#;
        assert_eq!(run(gap, text), Ok(("<a_b>".to_owned(), Exact::Yes)));
        assert_eq!(run(None, text), Err(Skip::Refused));
        let several = r#""prompt":["a","c"],"suffix":"""#;
        assert_eq!(run(gap, several), Ok(("<a_>".to_owned(), Exact::No("batch"))));
        for rest in [
            r#""prompt":[1],"suffix":"b""#,
            r#""prompt":"","suffix":"b""#,
            r#""prompt":"a","suffix":"b","echo":true"#,
            r#""prompt":"a","suffix":"b","truncate_prompt_tokens":3"#,
        ] {
            assert_eq!(run(gap, rest), Err(Skip::Refused), "{rest}");
        }
    }
}
