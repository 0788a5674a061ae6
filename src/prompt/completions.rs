//! `/v1/completions`.

use serde_json::{Map, Value};

use super::models::Prompt;
use crate::types::{Skip, TokenId};

pub(crate) fn prompt(request: &Map<String, Value>) -> Result<Prompt, Skip> {
    let add_special_tokens =
        request.get("add_special_tokens").and_then(Value::as_bool).unwrap_or(true);
    let text = |text: &str| Prompt::Text { text: text.to_owned(), add_special_tokens };
    match request.get("prompt") {
        Some(Value::String(prompt)) => Ok(text(prompt)),
        Some(Value::Array(items)) => match items.as_slice() {
            [Value::String(prompt)] => Ok(text(prompt)),
            _ => items
                .iter()
                .map(id)
                .collect::<Option<_>>()
                .map(Prompt::Ids)
                .ok_or(Skip::Unsupported),
        },
        _ => Err(Skip::Refused),
    }
}

fn id(value: &Value) -> Option<TokenId> {
    value.as_u64().and_then(|id| TokenId::try_from(id).ok())
}
