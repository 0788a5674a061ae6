//! The fields of a request, read as pydantic reads them.

use super::json::{self, Fault};
use super::python::Json;
use crate::types::Skip;

/// A field's type; what does not fit it makes the engine refuse the request.
#[derive(Clone, Copy)]
enum Kind {
    Bool,
    Int,
    Float,
    Str,
    Dict,
    /// Checked where it is used, or not at all.
    Any,
}

/// The fields that are read or whose type is checked, by name; `true`: may be null.
const FIELDS: [(&str, Kind, bool); 66] = [
    ("add_generation_prompt", Kind::Bool, false),
    ("add_special_tokens", Kind::Bool, false),
    ("background", Kind::Bool, true),
    ("cache_salt", Kind::Any, true),
    ("chat_template", Kind::Str, true),
    ("chat_template_kwargs", Kind::Dict, true),
    ("continue_final_message", Kind::Bool, false),
    ("documents", Kind::Any, true),
    ("echo", Kind::Bool, true),
    ("extra_key", Kind::Any, true),
    ("frequency_penalty", Kind::Float, true),
    ("ignore_eos", Kind::Bool, false),
    ("image_data", Kind::Any, true),
    ("include_reasoning", Kind::Bool, false),
    ("input", Kind::Any, true),
    ("input_embeds", Kind::Any, true),
    ("input_ids", Kind::Any, true),
    ("instructions", Kind::Str, true),
    ("kv_transfer_params", Kind::Dict, true),
    ("length_penalty", Kind::Float, false),
    ("logprob_token_ids", Kind::Any, true),
    ("logprobs", Kind::Any, true),
    ("lora_path", Kind::Any, true),
    ("max_completion_tokens", Kind::Int, true),
    ("max_output_tokens", Kind::Int, true),
    ("max_tokens", Kind::Int, true),
    ("media_io_kwargs", Kind::Any, true),
    ("messages", Kind::Any, true),
    ("metadata", Kind::Dict, true),
    ("min_p", Kind::Float, true),
    ("min_tokens", Kind::Int, false),
    ("mm_processor_kwargs", Kind::Any, true),
    ("model", Kind::Str, true),
    ("n", Kind::Int, true),
    ("output_config", Kind::Any, true),
    ("parallel_tool_calls", Kind::Bool, true),
    ("presence_penalty", Kind::Float, true),
    ("previous_input_messages", Kind::Any, true),
    ("previous_response_id", Kind::Str, true),
    ("priority", Kind::Int, false),
    ("prompt", Kind::Any, true),
    ("prompt_embeds", Kind::Any, true),
    ("prompt_logprobs", Kind::Int, true),
    ("reasoning", Kind::Any, true),
    ("reasoning_effort", Kind::Str, true),
    ("repetition_penalty", Kind::Float, true),
    ("response_format", Kind::Any, true),
    ("seed", Kind::Int, true),
    ("store", Kind::Bool, true),
    ("stream", Kind::Bool, true),
    ("stream_options", Kind::Any, true),
    ("suffix", Kind::Str, true),
    ("system", Kind::Any, true),
    ("temperature", Kind::Float, true),
    ("text", Kind::Any, true),
    ("thinking", Kind::Any, true),
    ("tool_choice", Kind::Any, true),
    ("tools", Kind::Any, true),
    ("top_k", Kind::Int, true),
    ("top_logprobs", Kind::Int, true),
    ("top_p", Kind::Float, true),
    ("truncate_prompt_tokens", Kind::Int, true),
    ("truncation", Kind::Str, true),
    ("truncation_side", Kind::Str, true),
    ("use_beam_search", Kind::Bool, false),
    ("user", Kind::Str, true),
];

const NAMES: [&str; FIELDS.len()] = {
    let mut names = [""; FIELDS.len()];
    let mut at = 0;
    while at < names.len() {
        names[at] = FIELDS[at].0;
        at += 1;
    }
    names
};

/// The fields' texts, each read when it is asked for.
pub(crate) struct Request<'a> {
    texts: [Option<&'a str>; FIELDS.len()],
}

impl<'a> Request<'a> {
    pub fn read(body: &'a [u8]) -> Result<Request<'a>, Skip> {
        let body = body.strip_prefix(b"\xef\xbb\xbf").unwrap_or(body);
        let text = std::str::from_utf8(body).map_err(|_| Skip::BadJson)?;
        Ok(Request { texts: json::fields(text, &NAMES).map_err(skip)? })
    }

    /// The text of a field that is there and not null.
    pub fn text(&self, name: &str) -> Option<&'a str> {
        self.raw(name).filter(|text| *text != "null")
    }

    /// The text of a field that is there, null or not.
    pub fn raw(&self, name: &str) -> Option<&'a str> {
        let at = NAMES.iter().position(|known| *known == name)?;
        self.texts[at]
    }

    pub fn is_given(&self, name: &str) -> bool {
        self.text(name).is_some()
    }

    /// A field that is there and not null.
    pub fn value(&self, name: &str) -> Result<Option<Json>, Skip> {
        self.text(name).map(json::parse).transpose().map_err(skip)
    }

    pub fn str(&self, name: &str) -> Result<Option<String>, Skip> {
        match self.value(name)? {
            None => Ok(None),
            Some(Json::Str(text)) => Ok(Some(text.to_string())),
            Some(_) => Err(Skip::Refused),
        }
    }

    pub fn flag(&self, name: &str, default: bool) -> Result<bool, Skip> {
        match self.value(name)? {
            None => Ok(default),
            Some(value) => as_bool(&value).ok_or(Skip::Refused),
        }
    }

    pub fn int(&self, name: &str) -> Result<Option<i64>, Skip> {
        self.value(name)?.map(|value| as_int(&value).ok_or(Skip::Refused)).transpose()
    }

    /// Refuses a request with a field of a wrong type.
    pub fn check_types(&self) -> Result<(), Skip> {
        self.check_types_where(|_| true)
    }

    /// The same for the fields that are named.
    pub fn check_types_of(&self, names: &[&str]) -> Result<(), Skip> {
        self.check_types_where(|name| names.contains(&name))
    }

    fn check_types_where(&self, checked: impl Fn(&str) -> bool) -> Result<(), Skip> {
        for ((name, kind, nullable), text) in FIELDS.iter().zip(self.texts) {
            let Some(text) = text.filter(|_| checked(name)) else { continue };
            if matches!(kind, Kind::Any) || (*nullable && text == "null") {
                continue;
            }
            let fits = match kind {
                Kind::Str => text.starts_with('"'),
                Kind::Dict => text.starts_with('{'),
                _ => fits(*kind, &json::parse(text).map_err(skip)?),
            };
            if !fits {
                return Err(Skip::Refused);
            }
        }
        Ok(())
    }

    /// What part of the key of the first block the request names.
    pub fn cache_salt(&self) -> Result<Option<String>, Skip> {
        let salt = self.str("cache_salt")?;
        let odd = |salt: &String| {
            salt.is_empty() || salt.chars().count() > 128 || salt.contains(['@', '/', '\\', '\0'])
        };
        if salt.as_ref().is_some_and(odd) { Err(Skip::Refused) } else { Ok(salt) }
    }
}

pub(crate) fn skip(fault: Fault) -> Skip {
    match fault {
        Fault::Syntax => Skip::BadJson,
        Fault::Depth | Fault::Surrogate | Fault::Dense => Skip::Unsupported,
    }
}

fn fits(kind: Kind, value: &Json) -> bool {
    match kind {
        Kind::Bool => as_bool(value).is_some(),
        Kind::Int => as_int(value).is_some(),
        Kind::Float => match value {
            Json::Str(text) => text.trim().parse::<f64>().is_ok(),
            value => matches!(value, Json::Bool(_) | Json::Int(_) | Json::Big(_) | Json::Float(_)),
        },
        Kind::Str => value.as_str().is_some(),
        Kind::Dict => value.as_dict().is_some(),
        Kind::Any => true,
    }
}

pub(crate) fn as_bool(value: &Json) -> Option<bool> {
    match value {
        Json::Bool(value) => Some(*value),
        Json::Int(value @ 0..=1) => Some(*value == 1),
        Json::Float(value) if *value == 0.0 || *value == 1.0 => Some(*value == 1.0),
        Json::Str(text) => match text.to_ascii_lowercase().as_str() {
            "1" | "true" | "t" | "yes" | "y" | "on" => Some(true),
            "0" | "false" | "f" | "no" | "n" | "off" => Some(false),
            _ => None,
        },
        _ => None,
    }
}

pub(crate) fn as_int(value: &Json) -> Option<i64> {
    match value {
        Json::Bool(value) => Some(i64::from(*value)),
        Json::Int(value) => Some(*value),
        Json::Float(value) if value.fract() == 0.0 && value.abs() < 9e15 => Some(*value as i64),
        Json::Str(text) => text.trim().parse().ok(),
        _ => None,
    }
}
