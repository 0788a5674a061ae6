//! The closed map of model names, and the one call a job makes.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use serde_json::{Map, Value};

use super::model::{Model, ModelSpec};
use super::{Endpoint, Exact, Limits, Outcome, PromptError, Tokens, chat, completions};
use crate::types::{Skip, TokenId};

/// All models of one configuration. Immutable, shared by the job threads.
pub struct Models {
    entries: Vec<Entry>,
    /// Names, aliases and adapters to entries.
    names: HashMap<String, (usize, bool)>,
}

struct Entry {
    name: String,
    state: Result<Model, PromptError>,
    load_time: Duration,
    memory: u64,
}

/// What a name in a request stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found<'a> {
    pub model: usize,
    /// The adapter, where the name is one.
    pub lora: Option<&'a str>,
}

/// Whether a model can be used.
#[derive(Debug)]
pub enum State<'a> {
    Loaded,
    Unavailable(&'a PromptError),
}

/// One line of the start-up log.
#[derive(Debug)]
pub struct Info<'a> {
    pub name: &'a str,
    pub state: State<'a>,
    pub load_time: Duration,
    /// Growth of this process's resident memory while the model was loaded, in bytes.
    pub memory: u64,
}

impl Models {
    /// Loads every model. A folder that cannot be loaded leaves its model unavailable.
    pub fn load(specs: &[ModelSpec]) -> Models {
        let mut names = HashMap::new();
        let mut entries = Vec::with_capacity(specs.len());
        for (index, spec) in specs.iter().enumerate() {
            for (name, lora) in spec.names() {
                names.entry(name.to_owned()).or_insert((index, lora));
            }
            let before = resident();
            let start = Instant::now();
            let state = spec.load();
            entries.push(Entry {
                name: spec.name.clone(),
                state,
                load_time: start.elapsed(),
                memory: resident().saturating_sub(before),
            });
        }
        Models { entries, names }
    }

    pub fn len(&self) -> usize {
        self.entries.len()
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    pub fn find<'a>(&'a self, name: &str) -> Option<Found<'a>> {
        let (name, &(model, lora)) = self.names.get_key_value(name)?;
        Some(Found { model, lora: lora.then_some(name.as_str()) })
    }

    pub fn info(&self, model: usize) -> Option<Info<'_>> {
        let entry = self.entries.get(model)?;
        let state = match &entry.state {
            Ok(_) => State::Loaded,
            Err(error) => State::Unavailable(error),
        };
        Some(Info { name: &entry.name, state, load_time: entry.load_time, memory: entry.memory })
    }

    /// The prompt tokens of a request body, or why there are none.
    pub fn tokenize(
        &self,
        endpoint: Endpoint,
        body: &[u8],
        limits: &Limits,
        want_text: bool,
    ) -> Outcome {
        let request: Map<String, Value> = match serde_json::from_slice(body) {
            Ok(request) => request,
            Err(_) => return Outcome { model: None, result: Err(Skip::BadJson) },
        };
        let found = match request.get("model").and_then(Value::as_str) {
            Some(name) => self.find(name).ok_or(Skip::UnknownModel),
            None => Err(Skip::NoModel),
        };
        match found {
            Ok(found) => Outcome {
                model: Some(found.model),
                result: self.prompt(found, endpoint, &request, limits, want_text),
            },
            Err(skip) => Outcome { model: None, result: Err(skip) },
        }
    }

    fn prompt(
        &self,
        found: Found<'_>,
        endpoint: Endpoint,
        request: &Map<String, Value>,
        limits: &Limits,
        want_text: bool,
    ) -> Result<Tokens, Skip> {
        if found.lora.is_some() {
            return Err(Skip::Lora);
        }
        let entry = self.entries.get(found.model).ok_or(Skip::UnknownModel)?;
        let model = entry.state.as_ref().map_err(|_| Skip::ModelUnavailable)?;
        let prompt = match endpoint {
            Endpoint::Chat => chat::prompt(model, request)?,
            Endpoint::Completions => completions::prompt(request)?,
        };
        if limits.over() {
            return Err(Skip::Deadline);
        }
        let salt = request.get("cache_salt").and_then(Value::as_str).map(str::to_owned);
        let (ids, text_len, text) = match prompt {
            Prompt::Ids(ids) => (ids, 0, None),
            Prompt::Text { text, add_special_tokens } => {
                let ids =
                    model.tokenizer.encode(&text, add_special_tokens).map_err(|_| Skip::Failed)?;
                (ids, text.len(), want_text.then_some(text))
            }
        };
        Ok(Tokens { model: found.model, ids, exact: Exact::Yes, salt, lora: None, text_len, text })
    }
}

/// What a request comes down to.
pub(crate) enum Prompt {
    Ids(Vec<TokenId>),
    Text { text: String, add_special_tokens: bool },
}

impl ModelSpec {
    fn names(&self) -> impl Iterator<Item = (&str, bool)> {
        std::iter::once((self.name.as_str(), false))
            .chain(self.aliases.iter().map(|name| (name.as_str(), false)))
            .chain(self.loras.iter().map(|name| (name.as_str(), true)))
    }
}

/// The model that a body names, whatever else is in it.
pub fn model_name(body: &[u8]) -> Option<String> {
    #[derive(serde::Deserialize)]
    struct Named {
        model: String,
    }
    serde_json::from_slice::<Named>(body).ok().map(|named| named.model)
}

/// Resident memory of this process in bytes; 0 where it cannot be read.
fn resident() -> u64 {
    const PAGE: u64 = 4096;
    std::fs::read_to_string("/proc/self/statm")
        .ok()
        .and_then(|text| text.split(' ').nth(1)?.parse::<u64>().ok())
        .map_or(0, |pages| pages * PAGE)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn models() -> Models {
        Models::load(&[ModelSpec {
            name: "tiny".to_owned(),
            dir: concat!(env!("CARGO_MANIFEST_DIR"), "/t/models/tiny").into(),
            aliases: vec!["small".to_owned()],
            loras: vec!["support".to_owned()],
            ..ModelSpec::default()
        }])
    }

    fn run(endpoint: Endpoint, body: &str) -> Outcome {
        let limits = Limits { max_text: 1 << 22, deadline: None };
        models().tokenize(endpoint, body.as_bytes(), &limits, true)
    }

    #[test]
    fn a_chat_becomes_template_text_and_ids() {
        let outcome = run(
            Endpoint::Chat,
            r#"{"model":"small","messages":[{"role":"user","content":"Hi"}],"cache_salt":"s"}"#,
        );
        assert_eq!(outcome.model, Some(0));
        let tokens = outcome.result.unwrap();
        assert_eq!(
            tokens.text.as_deref(),
            Some("<|bos|><|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
        );
        assert_eq!(tokens.salt.as_deref(), Some("s"));
        assert_eq!(tokens.ids[..2], [436, 437]);
        assert_eq!(tokens.exact, Exact::Yes);
    }

    #[test]
    fn a_completion_gets_its_special_tokens() {
        let tokens =
            run(Endpoint::Completions, r#"{"model":"tiny","prompt":"Hi"}"#).result.unwrap();
        assert_eq!(tokens.ids[0], 436);
        let ids = run(Endpoint::Completions, r#"{"model":"tiny","prompt":[1,2,3]}"#);
        assert_eq!(ids.result.unwrap().ids, [1, 2, 3]);
    }

    #[test]
    fn names_outside_the_map_are_skipped_by_name() {
        let body = r#"{"model":"other","prompt":"Hi"}"#;
        assert_eq!(run(Endpoint::Completions, body).result, Err(Skip::UnknownModel));
        let body = r#"{"model":"support","prompt":"Hi"}"#;
        let outcome = run(Endpoint::Completions, body);
        assert_eq!((outcome.model, outcome.result), (Some(0), Err(Skip::Lora)));
        assert_eq!(run(Endpoint::Completions, "{}").result, Err(Skip::NoModel));
        assert_eq!(run(Endpoint::Completions, "{").result, Err(Skip::BadJson));
    }
}
