//! Requests → ids, on the module's own prompt path, so that both sides have equal ids.

use std::collections::HashMap;

use ngx_http_kvc_aware_module::prompt::{Endpoint, Limits, ModelSpec, Models, Outcome, Tokens};
use ngx_http_kvc_aware_module::types::Skip;
use serde_json::{Map, Value, json};

use crate::answer::WORDS;
use crate::options::Options;

pub struct Tokenizer {
    models: Models,
    model: String,
    loras: Vec<String>,
    /// Tokens that a word of an answer adds at most.
    costs: HashMap<&'static str, usize>,
}

impl Tokenizer {
    pub fn load(options: &Options) -> Result<Tokenizer, String> {
        let models = Models::new(vec![ModelSpec {
            name: options.model.clone(),
            dir: options.tokenizer.clone(),
            ..ModelSpec::default()
        }]);
        let mut failed = None;
        models.load_all(|_, result| failed = result.err().map(ToString::to_string));
        if let Some(error) = failed {
            return Err(error);
        }
        let mut tokenizer = Tokenizer {
            models,
            model: options.model.clone(),
            loras: options.loras.clone(),
            costs: HashMap::new(),
        };
        tokenizer.costs = WORDS
            .iter()
            .map(|word| {
                let first = tokenizer.text(word).len();
                (*word, first.max(tokenizer.text(&format!(" {word}")).len()))
            })
            .collect();
        Ok(tokenizer)
    }

    pub fn word_cost(&self, word: &str) -> usize {
        self.costs.get(word).copied().unwrap_or(1).max(1)
    }

    /// The ids of a text, without special tokens.
    pub fn text(&self, text: &str) -> Vec<u32> {
        let body = json!({ "model": self.model, "prompt": text, "add_special_tokens": false });
        let body = body.to_string();
        self.run(Endpoint::Completions, body.as_bytes())
            .result
            .map(|tokens| tokens.ids)
            .unwrap_or_default()
    }

    /// The prompt of a request: `raw`, which reads as `body`. An adapter's prompt is the base model's, under another key.
    pub fn request(
        &self,
        endpoint: Endpoint,
        raw: &[u8],
        body: &Map<String, Value>,
    ) -> Result<Tokens, Skip> {
        let name = body.get("model").and_then(Value::as_str);
        let lora = self.loras.iter().find(|lora| Some(lora.as_str()) == name);
        if lora.is_none() && name.is_some() {
            return self.run(endpoint, raw).result;
        }
        let mut base = body.clone();
        base.insert("model".to_owned(), self.model.as_str().into());
        let raw = serde_json::to_vec(&base).map_err(|_| Skip::BadJson)?;
        let tokens = self.run(endpoint, &raw).result?;
        Ok(Tokens { lora: lora.cloned(), ..tokens })
    }

    fn run(&self, endpoint: Endpoint, body: &[u8]) -> Outcome {
        let limits = Limits { max_text: usize::MAX, deadline: None };
        self.models.tokenize(endpoint, body, &limits, false, |_| {})
    }
}
