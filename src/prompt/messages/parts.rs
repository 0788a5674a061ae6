//! The parts of a message's content.

use std::sync::Arc;

use super::CHECKED_ROLES;
use crate::prompt::python::{Dict, Json};
use crate::types::Skip;

/// What the engine reads of a content part: these fields are not handed on with its text.
const PART_FIELDS: [&str; 18] = [
    "audio_embeds",
    "audio_url",
    "closed",
    "data",
    "file",
    "image_embeds",
    "image_pil",
    "image_url",
    "input_audio",
    "name",
    "prompt_cache_breakpoint",
    "refusal",
    "text",
    "thinking",
    "type",
    "uuid",
    "video_embeds",
    "video_url",
];

/// Fields and types of parts that are no text.
const MEDIA: [&str; 12] = [
    "audio_embeds",
    "audio_url",
    "file",
    "image_embeds",
    "image_pil",
    "image_url",
    "input_audio",
    "input_image",
    "prompt_embeds",
    "video_embeds",
    "video_url",
    "input_file",
];

/// The parts that a template is told of, and as what.
const ITEMS: [(&str, &str); 8] = [
    ("audio_embeds", "audio"),
    ("audio_url", "audio"),
    ("image_embeds", "image"),
    ("image_url", "image"),
    ("input_audio", "audio"),
    ("input_image", "image"),
    ("video_embeds", "video"),
    ("video_url", "video"),
];

/// What becomes of parts that are no text.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Media<'a> {
    /// There are to be none.
    Named,
    /// They are handed over without what they hold, where a content is a list of parts.
    Items,
    /// A text stands for each of them, where it is.
    Inline(&'a str),
    /// A text stands for those of a message, before its own.
    Front(&'a str),
}

pub(crate) fn is_media(part: &Dict) -> bool {
    let kind = part.get("type").and_then(Json::as_str);
    MEDIA.iter().any(|field| part.get(field).is_some() || kind == Some(field))
}

pub(super) fn join(parts: &[Part], skip_empty: bool) -> Json {
    if let [Part { text, .. }] = parts {
        return text.clone();
    }
    let texts = parts.iter().filter_map(|part| part.text.as_str());
    let texts: Vec<&str> = texts.filter(|text| !(skip_empty && text.is_empty())).collect();
    Json::str(&texts.join("\n"))
}

/// A part of a content.
pub(super) struct Part {
    pub text: Json,
    /// Fields that the engine does not know.
    extra: Vec<(Arc<str>, Json)>,
    pub kind: Kind,
}

pub(super) enum Kind {
    Text,
    /// The text is the name of the tool that is referred to.
    Tool,
    Item(&'static str),
}

impl Part {
    pub fn text(text: Json) -> Part {
        Part { text, extra: Vec::new(), kind: Kind::Text }
    }

    /// What stands for a part that is no text; none where that is elsewhere.
    fn media(part: &Dict, media: Media<'_>) -> Result<Option<Part>, Skip> {
        let kind = part.get("type").and_then(Json::as_str).ok_or(Skip::Multimodal)?;
        let (_, item) = ITEMS.iter().find(|(name, _)| *name == kind).ok_or(Skip::Multimodal)?;
        // Which of several things it is depends on more.
        if MEDIA.iter().any(|field| part.get(field).is_some() && *field != kind) {
            return Err(Skip::Multimodal);
        }
        match media {
            Media::Named => Err(Skip::Multimodal),
            Media::Items => Ok(Some(Part {
                text: Json::Null,
                extra: unknown_fields(part),
                kind: Kind::Item(item),
            })),
            Media::Inline(mark) => Ok(Some(Part::text(Json::str(mark)))),
            Media::Front(_) => Ok(None),
        }
    }

    pub fn into_json(self) -> Json {
        let mut dict = Dict::default();
        match self.kind {
            Kind::Tool => {
                dict.set("type", Json::str("tool_reference"));
                dict.set("name", self.text);
            }
            Kind::Text => {
                dict.set("type", Json::str("text"));
                dict.set("text", self.text);
            }
            Kind::Item(item) => dict.set("type", Json::str(item)),
        }
        self.extra.into_iter().for_each(|(key, value)| dict.insert(key, value));
        Json::dict(dict)
    }
}

fn unknown_fields(part: &Dict) -> Vec<(Arc<str>, Json)> {
    let unknown = |(key, _): &(&Arc<str>, &Json)| !PART_FIELDS.contains(&&***key);
    part.iter().filter(unknown).map(|(key, value)| (key.clone(), value.clone())).collect()
}

/// One content part; none where nothing stands for it here, or where it is without text and its role
/// is checked less.
pub(super) fn part(part: &Json, role: &str, media: Media<'_>) -> Result<Option<Part>, Skip> {
    let checked = CHECKED_ROLES.contains(&role);
    let dict = match part {
        Json::Str(_) if !checked => {
            return Ok(Some(Part::text(part.clone())));
        }
        Json::Dict(dict) => dict,
        _ => return Err(Skip::Refused),
    };
    if is_media(dict) {
        return Part::media(dict, media);
    }
    let kind = dict.get("type").and_then(Json::as_str).ok_or(Skip::Refused)?;
    let field = match kind {
        "text" => "text",
        "refusal" => "refusal",
        "thinking" => "thinking",
        "input_text" | "output_text" if !checked => "text",
        "tool_reference" => {
            let name = dict.get("name").cloned().unwrap_or(Json::Null);
            return Ok(Some(Part { text: name, extra: Vec::new(), kind: Kind::Tool }));
        }
        _ => return Err(Skip::Refused),
    };
    if dict.given("uuid").is_some() {
        return Err(Skip::Refused);
    }
    match dict.get(field) {
        Some(text @ Json::Str(_)) => {
            let extra = unknown_fields(dict);
            Ok(Some(Part { text: text.clone(), extra, kind: Kind::Text }))
        }
        None | Some(Json::Null) if !checked && kind != "thinking" => Ok(None),
        _ => Err(Skip::Refused),
    }
}
