//! Requests of models whose prompts an engine makes: what is read of them here, and what is asked.

use super::messages::has_media;
use super::request::Request;
use super::{Endpoint, Exact, Limits, Prompt, Tokens, completions, generate};
use crate::remote::Api;
use crate::types::{Skip, TokenId};

/// Fields of a chat request that make the prompt another, but that `/tokenize` does not know.
const BEYOND_TOKENIZE: [&str; 8] = [
    "documents",
    "kv_transfer_params",
    "prompt",
    "reasoning_effort",
    "response_format",
    "tool_choice",
    "truncate_prompt_tokens",
    "chat_template",
];

/// A request whose token ids an engine has to tell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    pub api: Api,
    /// All but the ids.
    tokens: Tokens,
}

/// What a request comes to before anyone is asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Asked {
    /// It carries its ids.
    Here(Tokens),
    There(Question),
}

impl Question {
    pub fn model(&self) -> usize {
        self.tokens.model
    }

    /// The prompt, once its ids are known.
    #[must_use]
    pub fn answer(self, ids: &[TokenId]) -> Tokens {
        Tokens { ids: ids.to_vec(), ..self.tokens }
    }

    /// `body` is the length of the request's body in bytes.
    pub(crate) fn read(
        model: usize,
        lora: Option<String>,
        endpoint: Endpoint,
        request: &Request<'_>,
        limits: &Limits,
        body: usize,
    ) -> Result<Asked, Skip> {
        let mut tokens = Tokens {
            model,
            ids: Vec::new(),
            exact: Exact::Yes,
            salt: request.cache_salt()?,
            lora,
            text_len: 0,
            text: None,
            stream: request.flag("stream", false)?,
        };
        let found = match endpoint {
            Endpoint::Chat => chat(request)?,
            Endpoint::Completions => completion(request, limits)?,
            Endpoint::Messages => rendered(request, "messages", "/v1/messages/render")?,
            Endpoint::Responses => rendered(request, "input", "/v1/responses/render")?,
            Endpoint::Generate => generated(request, limits)?,
        };
        let api = match found {
            Found::Ids(ids, exact) => return Ok(Asked::Here(Tokens { ids, exact, ..tokens })),
            Found::Text(api, exact) => {
                tokens.exact = exact;
                api
            }
        };
        // An engine tokenizes all of a text.
        if body > limits.max_text {
            return Err(Skip::Unsupported);
        }
        Ok(Asked::There(Question { api, tokens }))
    }
}

enum Found {
    Ids(Vec<TokenId>, Exact),
    Text(Api, Exact),
}

fn chat(request: &Request<'_>) -> Result<Found, Skip> {
    let messages = request.value("messages")?.ok_or(Skip::Refused)?;
    if has_media(&messages) {
        return Err(Skip::Multimodal);
    }
    let tokenize = !BEYOND_TOKENIZE.iter().any(|name| request.is_given(name));
    let api = Api { render: "/v1/chat/completions/render", tokenize };
    Ok(Found::Text(api, Exact::Yes))
}

/// An API whose requests `/tokenize` does not take.
fn rendered(request: &Request<'_>, needed: &str, render: &'static str) -> Result<Found, Skip> {
    if !request.is_given(needed) {
        return Err(Skip::Refused);
    }
    // What it refers to is with the server that gave it.
    if request.is_given("previous_response_id") {
        return Err(Skip::Unsupported);
    }
    Ok(Found::Text(Api { render, tokenize: false }, Exact::Yes))
}

fn completion(request: &Request<'_>, limits: &Limits) -> Result<Found, Skip> {
    let api = |tokenize| Api { render: "/v1/completions/render", tokenize };
    // Some renderers take a suffix; it is for them to say.
    if request.is_given("suffix") {
        return Ok(Found::Text(api(false), Exact::Yes));
    }
    Ok(match completions::prompt(request, None, &whole(limits))? {
        Prompt::Ids { ids, truncation: None, exact } => Found::Ids(ids, exact),
        Prompt::Ids { ids, truncation: Some(cut), exact } => Found::Ids(cut.cut(ids), exact),
        Prompt::Text { truncation, exact, .. } => {
            let is_text = request.text("prompt").is_some_and(|prompt| prompt.starts_with('"'));
            let tokenize = is_text && truncation.is_none() && !request.is_given("messages");
            Found::Text(api(tokenize), exact)
        }
        Prompt::Pieces { exact, .. } => Found::Text(api(false), exact),
    })
}

/// No server renders these: only ids are known.
fn generated(request: &Request<'_>, limits: &Limits) -> Result<Found, Skip> {
    match generate::prompt(request, &whole(limits))? {
        Prompt::Ids { ids, exact, .. } => Ok(Found::Ids(ids, exact)),
        Prompt::Text { .. } | Prompt::Pieces { .. } => Err(Skip::Unsupported),
    }
}

/// An engine cuts nothing.
fn whole(limits: &Limits) -> Limits {
    Limits { max_text: usize::MAX, ..*limits }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(endpoint: Endpoint, rest: &str) -> Result<Asked, Skip> {
        let body = format!(r#"{{"model":"m",{rest}}}"#);
        let limits = Limits { max_text: 200, deadline: None };
        let request = Request::read(body.as_bytes())?;
        Question::read(2, Some("l".to_owned()), endpoint, &request, &limits, body.len())
    }

    fn question(endpoint: Endpoint, rest: &str) -> Question {
        match read(endpoint, rest) {
            Ok(Asked::There(question)) => question,
            other => panic!("{rest}: {other:?}"),
        }
    }

    #[test]
    fn a_chat_is_asked_with_its_keys() {
        let messages = r#""messages":[{"role":"user","content":"a"}]"#;
        let rest = format!(r#"{messages},"cache_salt":"s","stream":true"#);
        let question = question(Endpoint::Chat, &rest);
        assert_eq!((question.model(), question.api.render), (2, "/v1/chat/completions/render"));
        assert!(question.api.tokenize);
        let tokens = question.answer(&[4, 5]);
        assert_eq!((tokens.ids, tokens.exact, tokens.stream), (vec![4, 5], Exact::Yes, true));
        assert_eq!((tokens.salt.as_deref(), tokens.lora.as_deref()), (Some("s"), Some("l")));
    }

    #[test]
    fn tokenize_is_asked_only_where_it_knows_all_that_matters() {
        let messages = r#""messages":[{"role":"user","content":"a"}]"#;
        for more in BEYOND_TOKENIZE {
            let rest = format!(r#"{messages},"{more}":"low""#);
            assert!(!question(Endpoint::Chat, &rest).api.tokenize, "{more}");
        }
        for (rest, expected) in [
            (r#""prompt":"a""#, true),
            (r#""prompt":["a"]"#, false),
            (r#""prompt":"a","truncate_prompt_tokens":3"#, false),
            (r#""prompt":"a","suffix":"b""#, false),
            (r#""prompt":"a","messages":[]"#, false),
        ] {
            let api = question(Endpoint::Completions, rest).api;
            assert_eq!((api.render, api.tokenize), ("/v1/completions/render", expected), "{rest}");
        }
    }

    #[test]
    fn a_prompt_of_ids_is_not_asked_for() {
        let ids = |rest: &str| match read(Endpoint::Completions, rest) {
            Ok(Asked::Here(tokens)) => (tokens.ids, tokens.exact),
            other => panic!("{rest}: {other:?}"),
        };
        assert_eq!(ids(r#""prompt":[1,2,3]"#), (vec![1, 2, 3], Exact::Yes));
        let cut = r#""prompt":[1,2,3],"truncate_prompt_tokens":2"#;
        assert_eq!(ids(cut), (vec![2, 3], Exact::Yes));
        assert_eq!(ids(r#""prompt":[[1],[2]]"#), (vec![1], Exact::No("batch")));
        let texts = question(Endpoint::Completions, r#""prompt":["a","b"]"#);
        assert_eq!(texts.answer(&[1]).exact, Exact::No("batch"));
    }

    #[test]
    fn other_apis_are_rendered_or_not_at_all() {
        for (endpoint, rest, render) in [
            (Endpoint::Messages, r#""messages":[]"#, "/v1/messages/render"),
            (Endpoint::Responses, r#""input":"a""#, "/v1/responses/render"),
        ] {
            assert_eq!(question(endpoint, rest).api, Api { render, tokenize: false });
            assert_eq!(read(endpoint, r#""prompt":"a""#), Err(Skip::Refused));
        }
        let follows = r#""input":"a","previous_response_id":"r""#;
        assert_eq!(read(Endpoint::Responses, follows), Err(Skip::Unsupported));
        assert_eq!(read(Endpoint::Generate, r#""text":"a""#), Err(Skip::Unsupported));
        let Ok(Asked::Here(tokens)) = read(Endpoint::Generate, r#""input_ids":[5]"#) else {
            panic!("ids are asked for")
        };
        assert_eq!(tokens.ids, [5]);
    }

    #[test]
    fn what_need_not_be_asked_is_named() {
        let image = r#""messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"a"}}]}]"#;
        assert_eq!(read(Endpoint::Chat, image), Err(Skip::Multimodal));
        assert_eq!(read(Endpoint::Chat, r#""prompt":"a""#), Err(Skip::Refused));
        assert_eq!(read(Endpoint::Chat, r#""messages":[],"cache_salt":"""#), Err(Skip::Refused));
        let long = format!(r#""prompt":"{}""#, "a".repeat(200));
        assert_eq!(read(Endpoint::Completions, &long), Err(Skip::Unsupported));
    }
}
