//! `/v1/chat/completions`.

use serde_json::{Map, Value};

use super::model::Model;
use super::models::Prompt;
use crate::types::Skip;

pub(crate) fn prompt(model: &Model, request: &Map<String, Value>) -> Result<Prompt, Skip> {
    let template = model.template.as_ref().ok_or(Skip::Refused)?;
    let mut variables = model.special_tokens.clone();
    variables.extend(model.template_kwargs.clone());
    if let Some(Value::Object(kwargs)) = request.get("chat_template_kwargs") {
        variables.extend(kwargs.clone());
    }
    let messages = request.get("messages").ok_or(Skip::Refused)?;
    variables.insert("messages".to_owned(), messages.clone());
    if let Some(tools) = request.get("tools") {
        variables.insert("tools".to_owned(), tools.clone());
    }
    let generate = request.get("add_generation_prompt").unwrap_or(&Value::Bool(true));
    variables.insert("add_generation_prompt".to_owned(), generate.clone());
    let text = template.render(&variables).map_err(|_| Skip::Refused)?;
    Ok(Prompt::Text { text, add_special_tokens: false })
}
