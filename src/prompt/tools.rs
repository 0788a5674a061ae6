//! The `tools` of a request as the engine hands them to a template.

use super::python::{Dict, Json};
use super::request::as_bool;
use crate::types::Skip;

/// Tools in the order of the engine's fields; unknown fields are dropped.
pub(crate) fn tools(tools: &Json) -> Result<Json, Skip> {
    let tools = tools.as_list().filter(|tools| !tools.is_empty()).ok_or(Skip::Refused)?;
    tools.iter().map(tool).collect::<Result<_, _>>().map(Json::list)
}

fn tool(tool: &Json) -> Result<Json, Skip> {
    let tool = tool.as_dict().ok_or(Skip::Refused)?;
    if tool.get("type").is_some_and(|kind| kind.as_str() != Some("function")) {
        return Err(Skip::Refused);
    }
    let function = tool.get("function").and_then(Json::as_dict).ok_or(Skip::Refused)?;
    let deferred = flag(tool, "defer_loading")?;
    let mut own = Dict::default();
    own.set("name", typed(function, "name", |name| name.as_str().is_some())?.ok_or(Skip::Refused)?);
    let description = typed(function, "description", |text| text.as_str().is_some())?;
    own.set("description", description.unwrap_or(Json::Null));
    let parameters = typed(function, "parameters", |value| value.as_dict().is_some())?;
    own.set("parameters", parameters.unwrap_or(Json::Null));
    if let Some(strict) = flag(function, "strict")? {
        own.set("strict", strict);
    }
    if let Some(deferred) = flag(function, "defer_loading")?.or(deferred.clone()) {
        own.set("defer_loading", deferred);
    }
    let mut out = Dict::default();
    out.set("type", Json::str("function"));
    out.set("function", Json::dict(own));
    if let Some(deferred) = deferred {
        out.set("defer_loading", deferred);
    }
    Ok(Json::dict(out))
}

fn typed(dict: &Dict, name: &str, fits: fn(&Json) -> bool) -> Result<Option<Json>, Skip> {
    match dict.given(name) {
        Some(value) if !fits(value) => Err(Skip::Refused),
        value => Ok(value.cloned()),
    }
}

fn flag(dict: &Dict, name: &str) -> Result<Option<Json>, Skip> {
    let flag = dict.given(name);
    flag.map(|value| as_bool(value).map(Json::Bool).ok_or(Skip::Refused)).transpose()
}

/// Refuses what the engine refuses in `tool_choice`, which is there and not null.
pub(crate) fn check_choice(choice: &Json, tools: Option<&Json>) -> Result<(), Skip> {
    if choice.as_str() == Some("none") {
        return Ok(());
    }
    let tools = tools.and_then(Json::as_list).ok_or(Skip::Refused)?;
    if let Json::Dict(choice) = choice {
        let name = |dict: &Dict| dict.get("function")?.as_dict()?.get("name").cloned();
        let wanted = name(choice).ok_or(Skip::Refused)?;
        let wanted = wanted.as_str().filter(|name| !name.is_empty()).ok_or(Skip::Refused)?;
        let has = |tool: &Json| {
            tool.as_dict().and_then(name).is_some_and(|name| name.as_str() == Some(wanted))
        };
        return if tools.iter().any(has) { Ok(()) } else { Err(Skip::Refused) };
    }
    if matches!(choice.as_str(), Some("auto" | "required")) { Ok(()) } else { Err(Skip::Refused) }
}
