//! The closed map of model names, and the one call a job makes.

use std::collections::HashMap;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use super::jinja::Moment;
use super::model::{Model, ModelSpec};
use super::question::{Asked, Question};
use super::request::Request;
use super::{
    Endpoint, Job, Limits, Outcome, Prompt, PromptError, Tokens, anthropic, chat, completions,
    generate, json, responses, tokenizer,
};
use crate::types::Skip;

/// All models of one configuration, shared by the threads of one worker.
///
/// The names are known at once; each model is usable from the moment it is loaded.
pub struct Models {
    entries: Vec<Entry>,
    /// Names, aliases and adapters to entries.
    names: HashMap<String, Named>,
    /// Instead of the clock's time.
    now: Option<Moment>,
}

struct Entry {
    spec: ModelSpec,
    state: OnceLock<Result<Model, PromptError>>,
}

#[derive(Clone, Copy)]
struct Named {
    model: usize,
    is_adapter: bool,
}

/// What a request comes to.
pub enum Step {
    Done(Outcome),
    /// The model is a remote one, and one of its servers has to be asked.
    Ask(Question),
}

/// What loading one model took.
#[derive(Clone, Copy, Debug)]
pub struct Info {
    pub time: Duration,
    /// Growth of this process's resident memory, in bytes.
    pub memory: u64,
}

impl Models {
    /// Reads no file. Of two specs that share a name the first has it.
    pub fn new(specs: Vec<ModelSpec>) -> Models {
        let mut names = HashMap::new();
        for (model, spec) in specs.iter().enumerate() {
            for (name, is_adapter) in spec.names() {
                names.entry(name.to_owned()).or_insert(Named { model, is_adapter });
            }
        }
        let entries =
            specs.into_iter().map(|spec| Entry { spec, state: OnceLock::new() }).collect();
        Models { entries, names, now: None }
    }

    /// Gives templates that ask for the time this one, in Unix seconds, instead of the clock's.
    #[must_use]
    pub fn at_time(self, seconds: i64) -> Models {
        Models { now: Some(Moment::from_unix(seconds)), ..self }
    }

    /// Loads each model in turn and reports it; those already loaded are left alone.
    pub fn load_all(&self, mut report: impl FnMut(&str, Result<Info, &PromptError>)) {
        for entry in self.entries.iter().filter(|entry| !entry.spec.remote) {
            let (before, start) = (resident(), Instant::now());
            let mut fresh = false;
            let state = entry.state.get_or_init(|| {
                fresh = true;
                entry.spec.load()
            });
            if fresh {
                let memory = resident().saturating_sub(before);
                let info = Info { time: start.elapsed(), memory };
                report(&entry.spec.name, state.as_ref().map(|_| info));
            }
        }
    }

    pub fn len(&self) -> usize {
        self.entries.len()
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The name of a model, which is empty past the end.
    pub fn name(&self, model: usize) -> &str {
        self.entries.get(model).map_or("", |entry| &entry.spec.name)
    }

    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.iter().map(|entry| entry.spec.name.as_str())
    }

    /// The model that a body names.
    pub fn named_by(&self, body: &[u8]) -> Option<usize> {
        let text = std::str::from_utf8(body).ok()?;
        let [name] = json::fields(text, &["model"]).ok()?;
        let name = json::parse(name?).ok()?;
        self.names.get(name.as_str()?).map(|named| named.model)
    }

    /// The prompt tokens of a request body, or why there are none. `known` is called with the model
    /// as soon as that is known. A remote model, which [`Models::step`] tells apart, has none here.
    pub fn tokenize(
        &self,
        endpoint: Endpoint,
        body: &[u8],
        limits: &Limits,
        want_text: bool,
        known: impl FnOnce(usize),
    ) -> Outcome {
        match self.step(endpoint, body, limits, want_text, known) {
            Step::Done(outcome) => outcome,
            Step::Ask(question) => {
                Outcome { model: Some(question.model()), result: Err(Skip::ModelUnavailable) }
            }
        }
    }

    /// The same, up to where an engine must be asked.
    pub fn step(
        &self,
        endpoint: Endpoint,
        body: &[u8],
        limits: &Limits,
        want_text: bool,
        known: impl FnOnce(usize),
    ) -> Step {
        let none = |skip| Step::Done(Outcome { model: None, result: Err(skip) });
        let request = match Request::read(body) {
            Ok(request) => request,
            Err(skip) => return none(skip),
        };
        let name = match (request.str("model"), self.entries.as_slice()) {
            (Ok(Some(name)), _) => name,
            // Such a request names no model.
            (Ok(None), [only]) if endpoint == Endpoint::Generate => only.spec.name.clone(),
            _ => return none(Skip::NoModel),
        };
        let Some((name, &named)) = self.names.get_key_value(&name) else {
            return none(Skip::UnknownModel);
        };
        known(named.model);
        let lora = named.is_adapter.then(|| name.clone());
        let model = named.model;
        let result = if self.entries[model].spec.remote {
            match Question::read(model, lora, endpoint, &request, limits, body.len()) {
                Ok(Asked::There(question)) => return Step::Ask(question),
                Ok(Asked::Here(tokens)) => Ok(tokens),
                Err(skip) => Err(skip),
            }
        } else {
            self.prompt(model, lora, endpoint, &request, limits, want_text)
        };
        Step::Done(Outcome { model: Some(model), result })
    }

    fn prompt(
        &self,
        index: usize,
        lora: Option<String>,
        endpoint: Endpoint,
        request: &Request<'_>,
        limits: &Limits,
        want_text: bool,
    ) -> Result<Tokens, Skip> {
        let model = self.loaded(index)?;
        let salt = request.cache_salt()?;
        let job = Job { limits: *limits, now: self.now };
        let prompt = match endpoint {
            Endpoint::Chat => chat::prompt(model, request, &job)?,
            Endpoint::Completions => completions::prompt(request, model.gap(), limits)?,
            Endpoint::Messages => anthropic::prompt(model, request, &job)?,
            Endpoint::Responses => responses::prompt(model, request, &job)?,
            Endpoint::Generate => generate::prompt(request, limits)?,
        };
        if limits.over() {
            return Err(Skip::Deadline);
        }
        let stream = request.flag("stream", false)?;
        let (ids, exact, text) = match prompt {
            Prompt::Ids { ids, truncation, exact } => {
                let ids = match truncation {
                    None => ids,
                    Some(cut) => cut.cut(ids),
                };
                (ids, exact, None)
            }
            Prompt::Text { text, add_special_tokens, truncation, exact } => {
                if limits.over_after(tokenizer::least_time(&text)) {
                    return Err(Skip::Deadline);
                }
                let ids = match truncation {
                    None => model.tokenizer.encode(&text, add_special_tokens),
                    Some(cut) => cut.encode(&model.tokenizer, &text, add_special_tokens),
                };
                (ids.map_err(|_| Skip::Failed)?, exact, Some(text))
            }
            Prompt::Pieces { pieces, exact } => {
                let text = pieces.joined();
                if limits.over_after(tokenizer::least_time(&text)) {
                    return Err(Skip::Deadline);
                }
                (pieces.encode(&model.tokenizer).map_err(|_| Skip::Failed)?, exact, Some(text))
            }
        };
        let text_len = text.as_ref().map_or(0, String::len);
        let text = text.filter(|_| want_text);
        Ok(Tokens { model: index, ids, exact, salt, lora, text_len, text, stream })
    }

    pub(super) fn now(&self) -> Option<Moment> {
        self.now
    }

    pub(super) fn loaded(&self, model: usize) -> Result<&Model, Skip> {
        let entry = self.entries.get(model).ok_or(Skip::UnknownModel)?;
        if entry.spec.remote {
            return Err(Skip::Unsupported);
        }
        match entry.state.get() {
            None => Err(Skip::Starting),
            Some(Err(_)) => Err(Skip::ModelUnavailable),
            Some(Ok(model)) => Ok(model),
        }
    }
}

impl ModelSpec {
    fn names(&self) -> impl Iterator<Item = (&str, bool)> {
        std::iter::once((self.name.as_str(), false))
            .chain(self.aliases.iter().map(|name| (name.as_str(), false)))
            .chain(self.loras.iter().map(|name| (name.as_str(), true)))
    }
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
    use crate::prompt::Exact;

    fn spec() -> ModelSpec {
        ModelSpec {
            name: "tiny".to_owned(),
            dir: concat!(env!("CARGO_MANIFEST_DIR"), "/t/models/tiny").into(),
            aliases: vec!["small".to_owned()],
            loras: vec!["support".to_owned()],
            ..ModelSpec::default()
        }
    }

    fn models(spec: ModelSpec) -> Models {
        let models = Models::new(vec![spec]);
        models.load_all(|_, _| ());
        models
    }

    fn run_on(models: &Models, endpoint: Endpoint, body: &str) -> Outcome {
        let limits = Limits { max_text: 1 << 22, deadline: None };
        models.tokenize(endpoint, body.as_bytes(), &limits, true, |_| ())
    }

    fn run(endpoint: Endpoint, body: &str) -> Outcome {
        run_on(&models(spec()), endpoint, body)
    }

    #[test]
    fn a_chat_becomes_template_text_and_ids() {
        let outcome = run(
            Endpoint::Chat,
            r#"{"model":"small","messages":[{"role":"user","content":"Hi"}],"cache_salt":"s","stream":true}"#,
        );
        assert_eq!(outcome.model, Some(0));
        let tokens = outcome.result.unwrap();
        assert_eq!(
            tokens.text.as_deref(),
            Some("<|bos|><|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
        );
        assert_eq!(tokens.salt.as_deref(), Some("s"));
        assert_eq!(tokens.ids[..2], [436, 437]);
        assert_eq!((tokens.exact, tokens.stream), (Exact::Yes, true));
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
    fn truncation_keeps_the_tail_and_the_first_special_token() {
        let ids = |body: &str| run(Endpoint::Completions, body).result.map(|tokens| tokens.ids);
        let all = ids(r#"{"model":"tiny","prompt":"one two three four"}"#).unwrap();
        let (first, len) = (all[0], all.len());
        let cut = |rest: &str| {
            ids(&format!(r#"{{"model":"tiny","prompt":"one two three four",{rest}}}"#))
        };
        let tail = cut(r#""truncate_prompt_tokens":4"#).unwrap();
        assert_eq!((tail[0], &tail[1..]), (first, &all[len - 3..]));
        let left = cut(r#""truncate_prompt_tokens":4,"truncation_side":"left""#).unwrap();
        assert_eq!(left, all[len - 4..]);
        let right = cut(r#""truncate_prompt_tokens":4,"truncation_side":"right""#).unwrap();
        assert_eq!(right, all[..4]);
        assert_eq!(cut(r#""truncate_prompt_tokens":999"#).unwrap(), all);
        assert_eq!(cut(r#""truncate_prompt_tokens":0"#), Err(Skip::Refused));
        assert_eq!(cut(r#""truncate_prompt_tokens":-1"#), Err(Skip::Unsupported));
        let body = r#"{"model":"tiny","prompt":[1,2,3,4],"truncate_prompt_tokens":2}"#;
        assert_eq!(ids(body).unwrap(), [3, 4]);
    }

    #[test]
    fn a_request_that_the_engine_refuses_is_refused() {
        let chat = |rest: &str| {
            let messages = r#""messages":[{"role":"user","content":"a"}]"#;
            let body = format!(r#"{{"model":"tiny",{messages},{rest}}}"#);
            run(Endpoint::Chat, &body).result.map(|tokens| tokens.text.unwrap_or_default())
        };
        for rest in [
            r#""tools":[]"#,
            r#""tools":{}"#,
            r#""tools":[{"type":"function","function":{}}]"#,
            r#""tool_choice":"auto""#,
            r#""continue_final_message":true"#,
            r#""chat_template":"x""#,
            r#""chat_template_kwargs":{"messages":[]}"#,
            r#""cache_salt":"""#,
            r#""cache_salt":"a/b""#,
            r#""temperature":"warm""#,
            r#""stream":3"#,
            r#""reasoning_effort":"huge""#,
            r#""stream_options":{"include_usage":true}"#,
            r#""top_logprobs":3"#,
        ] {
            assert_eq!(chat(rest), Err(Skip::Refused), "{rest}");
        }
        assert_eq!(chat(r#""chat_template_kwargs":{"tokenize":true}"#), Err(Skip::Unsupported));
        let quiet = chat(r#""reasoning_effort":"none""#).unwrap();
        assert!(quiet.ends_with("<think>\n\n</think>\n\n"), "{quiet}");
        let ids = r#""kv_transfer_params":{"prompt_token_ids":[5,6]}"#;
        let body = format!(r#"{{"model":"tiny","messages":[{{"role":"user"}}],{ids}}}"#);
        assert_eq!(run(Endpoint::Chat, &body).result.unwrap().ids, [5, 6]);
    }

    #[test]
    fn a_prefill_is_left_open() {
        let last = |content: &str| {
            let body = format!(
                r#"{{"model":"tiny","messages":[{{"role":"user","content":"q"}},
                {{"role":"assistant","content":"{content}"}}],
                "add_generation_prompt":false,"continue_final_message":true}}"#
            );
            run(Endpoint::Chat, &body).result.unwrap().text.unwrap()
        };
        for content in ["The answer", "The answer "] {
            let text = last(content);
            assert!(text.ends_with(&format!("<|im_start|>assistant\n{content}")), "{text}");
        }
    }

    #[test]
    fn a_text_past_the_limit_is_cut_and_said_to_be() {
        let limits = Limits { max_text: 11, deadline: None };
        let models = models(spec());
        let run = |endpoint, body: &str| {
            models.tokenize(endpoint, body.as_bytes(), &limits, true, |_| ()).result.unwrap()
        };
        let tokens = run(Endpoint::Completions, r#"{"model":"tiny","prompt":"0123456789é"}"#);
        assert_eq!(tokens.text.as_deref(), Some("0123456789"));
        assert_eq!(tokens.exact.reason(), Some("max_text"));
        let chat = r#"{"model":"tiny","messages":[{"role":"user","content":"Hi"}]}"#;
        let tokens = run(Endpoint::Chat, chat);
        assert_eq!(tokens.text.as_deref(), Some("<|bos|><|im"));
        assert_eq!((tokens.text_len, tokens.exact.to_string().as_str()), (11, "max_text"));
    }

    #[test]
    fn names_outside_the_map_are_skipped_by_name() {
        let body = r#"{"model":"other","prompt":"Hi"}"#;
        assert_eq!(run(Endpoint::Completions, body).result, Err(Skip::UnknownModel));
        let body = r#"{"model":"support","prompt":"Hi"}"#;
        let outcome = run(Endpoint::Completions, body);
        assert_eq!(outcome.result.unwrap().lora.as_deref(), Some("support"));
        assert_eq!(run(Endpoint::Completions, "{}").result, Err(Skip::NoModel));
        assert_eq!(run(Endpoint::Completions, "{").result, Err(Skip::BadJson));
    }

    #[test]
    fn a_model_is_usable_from_the_moment_it_is_loaded() {
        let body = r#"{"model":"small","prompt":"Hi"}"#;
        let models = Models::new(vec![spec()]);
        assert_eq!(models.named_by(body.as_bytes()), Some(0));
        let mut seen = None;
        let limits = Limits { max_text: 1 << 22, deadline: None };
        let endpoint = Endpoint::Completions;
        let outcome =
            models.tokenize(endpoint, body.as_bytes(), &limits, false, |model| seen = Some(model));
        assert_eq!((outcome.result, seen), (Err(Skip::Starting), Some(0)));
        models.load_all(|name, result| assert!(name == "tiny" && result.is_ok()));
        models.load_all(|_, _| panic!("a loaded model is reported again"));
        assert!(run_on(&models, endpoint, body).result.is_ok());
    }

    #[test]
    fn a_remote_model_is_asked_for() {
        let models = models(ModelSpec { remote: true, dir: "/nonexistent".into(), ..spec() });
        let limits = Limits { max_text: 1 << 22, deadline: None };
        let step = |body: &str| {
            models.step(Endpoint::Completions, body.as_bytes(), &limits, false, |_| ())
        };
        let Step::Ask(question) = step(r#"{"model":"support","prompt":"Hi"}"#) else {
            panic!("nobody is asked")
        };
        assert_eq!(question.model(), 0);
        assert_eq!(question.answer(&[1]).lora.as_deref(), Some("support"));
        let Step::Done(outcome) = step(r#"{"model":"tiny","prompt":[7]}"#) else {
            panic!("ids are asked for")
        };
        assert_eq!(outcome.result.unwrap().ids, [7]);
        let body = r#"{"model":"tiny","prompt":"Hi"}"#;
        let outcome = run_on(&models, Endpoint::Completions, body);
        assert_eq!(outcome.result, Err(Skip::ModelUnavailable));
    }

    #[test]
    fn a_folder_that_cannot_be_loaded_is_named_and_skipped() {
        let spec = ModelSpec { dir: "/nonexistent".into(), ..spec() };
        let error = spec.check().unwrap_err().to_string();
        assert!(error.starts_with("\"/nonexistent/tokenizer.json\": "), "{error}");
        let body = r#"{"model":"tiny","prompt":"Hi"}"#;
        let outcome = run_on(&models(spec), Endpoint::Completions, body);
        assert_eq!(outcome.result, Err(Skip::ModelUnavailable));
    }
}
