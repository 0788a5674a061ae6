//! The `tools` of a request as the engine hands them to a template.

use super::fields::{dict, flag, required_text, text};
use super::python::{Dict, Json};
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
    let own = tool.get("function").and_then(Json::as_dict).ok_or(Skip::Refused)?;
    let deferred = flag(tool, "defer_loading")?.map(Json::Bool);
    wrapped(own, deferred)
}

/// The tool that a function is.
pub(crate) fn function(function: &Dict) -> Result<Json, Skip> {
    wrapped(function, None)
}

fn wrapped(function: &Dict, deferred: Option<Json>) -> Result<Json, Skip> {
    let mut own = Dict::default();
    own.set("name", Json::Str(required_text(function, "name")?.clone()));
    let description = text(function, "description")?;
    own.set("description", description.map_or(Json::Null, |text| Json::Str(text.clone())));
    own.set("parameters", dict(function, "parameters")?.cloned().unwrap_or(Json::Null));
    if let Some(strict) = flag(function, "strict")? {
        own.set("strict", Json::Bool(strict));
    }
    if let Some(deferred) =
        flag(function, "defer_loading")?.map(Json::Bool).or_else(|| deferred.clone())
    {
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

/// A tool that is no longer deferred.
pub(crate) fn without_deferral(tool: &Json) -> Json {
    let kept = |dict: &Dict, change: &dyn Fn(&Json) -> Json| {
        let mut out = Dict::default();
        for (key, value) in dict.iter().filter(|(key, _)| &***key != "defer_loading") {
            let value = if &**key == "function" { change(value) } else { value.clone() };
            out.insert(key.clone(), value);
        }
        Json::dict(out)
    };
    let function =
        |function: &Json| function.as_dict().map_or(Json::Null, |dict| kept(dict, &Json::clone));
    tool.as_dict().map_or(Json::Null, |dict| kept(dict, &function))
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
