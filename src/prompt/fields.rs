//! Fields of an object, as pydantic checks their types. Null counts as absent.

use std::sync::Arc;

use super::python::{Dict, Json};
use super::request::as_bool;
use crate::types::Skip;

pub(crate) fn object(value: &Json) -> Result<&Dict, Skip> {
    value.as_dict().ok_or(Skip::Refused)
}

pub(crate) fn text<'a>(dict: &'a Dict, name: &str) -> Result<Option<&'a Arc<str>>, Skip> {
    match dict.given(name) {
        None => Ok(None),
        Some(Json::Str(text)) => Ok(Some(text)),
        Some(_) => Err(Skip::Refused),
    }
}

pub(crate) fn required_text<'a>(dict: &'a Dict, name: &str) -> Result<&'a Arc<str>, Skip> {
    text(dict, name)?.ok_or(Skip::Refused)
}

/// A text that is one of a few.
pub(crate) fn choice<'a>(
    dict: &'a Dict,
    name: &str,
    known: &[&str],
) -> Result<Option<&'a str>, Skip> {
    let text = text(dict, name)?.map(|text| &**text);
    if text.is_none_or(|text| known.contains(&text)) { Ok(text) } else { Err(Skip::Refused) }
}

pub(crate) fn dict<'a>(dict: &'a Dict, name: &str) -> Result<Option<&'a Json>, Skip> {
    match dict.given(name) {
        Some(value) if value.as_dict().is_none() => Err(Skip::Refused),
        value => Ok(value),
    }
}

pub(crate) fn flag(dict: &Dict, name: &str) -> Result<Option<bool>, Skip> {
    dict.given(name).map(|value| as_bool(value).ok_or(Skip::Refused)).transpose()
}
