//! SGLang's `/generate`: a text or token ids, or a list of either.

use super::completions::prompt_of;
use super::request::Request;
use super::{Limits, Prompt};
use crate::types::Skip;

/// Fields that change what is cached under which key.
const NOT_REPRODUCED: [&str; 3] = ["extra_key", "input_embeds", "lora_path"];

pub(crate) fn prompt(request: &Request<'_>, limits: &Limits) -> Result<Prompt, Skip> {
    if NOT_REPRODUCED.iter().any(|name| request.is_given(name)) {
        return Err(Skip::Unsupported);
    }
    if request.is_given("image_data") {
        return Err(Skip::Multimodal);
    }
    let given = (request.text("text"), request.text("input_ids"));
    let (prompt, ids) = match given {
        (Some(text), None) => (text, false),
        (None, Some(ids)) => (ids, true),
        _ => return Err(Skip::Refused),
    };
    let prompt = prompt_of(request, prompt, None, limits)?;
    if matches!(prompt, Prompt::Ids { .. }) == ids { Ok(prompt) } else { Err(Skip::Refused) }
}
