//! Request JSON → prompt → text → token ids, exactly as the engine makes them.
//!
//! | module | what it holds |
//! | --- | --- |
//! | [`model`] | one served model: its folder, template, tokenizer |
//! | `models` | the closed map of names to models, and the one call a job makes: [`Models::tokenize`] |
//! | `chat` | `/v1/chat/completions` |
//! | `completions` | `/v1/completions` |
//! | `anthropic` | `/v1/messages` |
//! | `responses` | `/v1/responses` |
//! | `generate` | SGLang's `/generate` |
//! | `deepseek` | DeepSeek V3.2 and V4, whose prompts no template makes |
//! | `harmony` | gpt-oss, whose prompts no template makes |
//! | `media` | what is known of a prompt with images |
//! | `jinja` | a chat template, compiled once |
//! | `question` | requests of models whose prompts an engine makes |
//! | `tokenizer` | the one seam to the tokenizer crates |
//!
//! The reference is vLLM's Python server: a request that it would refuse is [`Skip::Refused`], and
//! one whose tokens cannot be told is a named skip. Nothing here guesses.
#![forbid(unsafe_code)]

mod anthropic;
mod chat;
mod completions;
mod deepseek;
mod fields;
mod generate;
mod harmony;
mod inspect;
mod jinja;
mod json;
mod media;
mod messages;
pub mod model;
mod models;
mod pieces;
mod python;
mod question;
mod render;
mod repr;
mod request;
mod responses;
mod tokenizer;
mod tools;
mod truncation;

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::types::{Skip, TokenId};

pub use inspect::prepare_chat;
pub use model::ModelSpec;
pub use models::{Info, Models, Step};
pub use question::Question;

use pieces::Pieces;
use truncation::Truncation;

/// Why a model cannot be served. The text names the file and the cause.
#[derive(Debug, thiserror::Error)]
pub enum PromptError {
    #[error("\"{}\": {cause}", path.display())]
    File { path: PathBuf, cause: String },
    #[error("model \"{name}\": {cause}")]
    Model { name: String, cause: String },
}

impl PromptError {
    /// Of a cause that goes on for lines, such as an excerpt of a template, the first is kept: an
    /// error is one line in the log.
    pub(crate) fn file(path: &Path, cause: impl ToString) -> PromptError {
        let cause = cause.to_string().lines().next().unwrap_or_default().to_owned();
        PromptError::File { path: path.to_owned(), cause }
    }
}

/// An API whose requests can be turned into tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Endpoint {
    Chat,
    Completions,
    Messages,
    Responses,
    Generate,
}

impl Endpoint {
    /// The endpoint of a request path without its query, whatever prefix a location puts before it.
    pub fn from_path(path: &str) -> Option<Endpoint> {
        const PATHS: [(&str, Endpoint); 5] = [
            ("/v1/chat/completions", Endpoint::Chat),
            ("/v1/completions", Endpoint::Completions),
            ("/v1/messages", Endpoint::Messages),
            ("/v1/responses", Endpoint::Responses),
            ("/generate", Endpoint::Generate),
        ];
        PATHS.iter().find(|(known, _)| path.ends_with(known)).map(|(_, endpoint)| *endpoint)
    }
}

/// What one request may cost.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Bytes of prompt text; what is past them is not tokenized, what is before them is.
    pub max_text: usize,
    pub deadline: Option<Instant>,
}

impl Limits {
    pub(crate) fn over(&self) -> bool {
        self.over_after(Duration::ZERO)
    }

    /// Whether what takes this long ends too late.
    pub(crate) fn over_after(&self, time: Duration) -> bool {
        self.deadline.is_some_and(|deadline| Instant::now() + time >= deadline)
    }
}

/// Whether the tokens are the whole prompt as the engine sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exact {
    Yes,
    /// They are not, for the reason that is named.
    No(&'static str),
}

impl Exact {
    pub fn reason(self) -> Option<&'static str> {
        match self {
            Exact::Yes => None,
            Exact::No(reason) => Some(reason),
        }
    }
}

/// The value of `$kvc_aware_exact`.
impl fmt::Display for Exact {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.reason().unwrap_or("1"))
    }
}

/// The prompt of one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tokens {
    /// Index into [`Models`].
    pub model: usize,
    pub ids: Vec<TokenId>,
    pub exact: Exact,
    /// Part of the cache key of the first block.
    pub salt: Option<String>,
    /// Adapter name; part of the cache key.
    pub lora: Option<String>,
    /// Bytes of the prompt text; 0 where the request carries token ids.
    pub text_len: usize,
    /// The prompt text, where the caller asked for it.
    pub text: Option<String>,
    /// Whether the client asked for a stream.
    pub stream: bool,
}

/// What became of one request body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The model that the body names, if it is in the map.
    pub model: Option<usize>,
    pub result: Result<Tokens, Skip>,
}

/// What one request's rendering is given beside the request.
pub(crate) struct Job {
    pub limits: Limits,
    /// Instead of the clock's time.
    pub now: Option<jinja::Moment>,
}

/// What a request comes down to.
pub(crate) enum Prompt {
    Ids { ids: Vec<TokenId>, truncation: Option<Truncation>, exact: Exact },
    Text { text: String, add_special_tokens: bool, truncation: Option<Truncation>, exact: Exact },
    Pieces { pieces: Pieces, exact: Exact },
}

impl Prompt {
    fn exact_mut(&mut self) -> &mut Exact {
        match self {
            Prompt::Ids { exact, .. }
            | Prompt::Text { exact, .. }
            | Prompt::Pieces { exact, .. } => exact,
        }
    }
}
