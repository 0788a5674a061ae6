//! Token ids from the engines themselves, for models whose prompts are not made here.
//!
//! | module | what it holds |
//! | --- | --- |
//! | `client` | one model's servers: which is asked, what becomes of one that fails |
//! | `answer` | what an engine answers, read |
//! | `cache` | prompts that were asked for, for a while |
//!
//! A server is asked to render the request, or to tokenize it where it does not render. What it
//! answers is taken as it is; what it does not answer is a named error, never a guess.
#![forbid(unsafe_code)]

mod answer;
mod cache;
mod client;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::types::{Skip, TokenId};
use cache::{Cache, Digests};
use client::Client;

/// How long one who sets no deadline waits for an answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// What is sent as the bearer of requests. Its text is shown nowhere.
#[derive(Clone, PartialEq, Eq)]
pub struct Key(String);

impl Key {
    /// The key in a file's text: one line of visible ASCII. `None` if it is anything else.
    pub fn read(text: &str) -> Option<Key> {
        let key = text.trim();
        let fits = !key.is_empty() && key.bytes().all(|byte| byte.is_ascii_graphic());
        fits.then(|| Key(key.to_owned()))
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(..)")
    }
}

/// Who is asked for the tokens of one model.
#[derive(Clone, Debug)]
pub struct Source {
    /// Index into the models.
    pub model: usize,
    /// `address:port`, IPv6 in brackets.
    pub servers: Vec<String>,
    pub key: Option<Key>,
}

/// The API that a question is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Api {
    /// Where a server renders its requests.
    pub render: &'static str,
    /// Whether `/tokenize` makes the same ids of this request.
    pub tokenize: bool,
}

/// Why there are no tokens.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RemoteError {
    #[error("no answer within the deadline")]
    Deadline,
    #[error("the engine refuses the request")]
    Refused,
    #[error("the prompt is not text alone")]
    Multimodal,
    #[error("{server} does not render, and its /tokenize makes no or other tokens of this request")]
    NoRender { server: String },
    #[error("{server} answers {path} with status {status}")]
    Status { server: String, path: &'static str, status: u16 },
    #[error("{server} answers {path} with no token ids")]
    Answer { server: String, path: &'static str },
    #[error("{server} cannot be asked: {cause}")]
    Connection { server: String, cause: String },
    #[error("no server to ask")]
    NoServer,
}

impl RemoteError {
    pub fn skip(&self) -> Skip {
        match self {
            RemoteError::Deadline => Skip::Deadline,
            RemoteError::Refused => Skip::Refused,
            RemoteError::Multimodal => Skip::Multimodal,
            RemoteError::NoRender { .. } => Skip::Unsupported,
            RemoteError::Status { .. }
            | RemoteError::Answer { .. }
            | RemoteError::Connection { .. }
            | RemoteError::NoServer => Skip::RemoteFailed,
        }
    }
}

/// All remote models of one worker and what they have answered.
pub struct Remotes {
    clients: HashMap<usize, Client>,
    digests: Digests,
    cache: Mutex<Cache>,
}

impl Remotes {
    pub fn new(sources: Vec<Source>) -> Remotes {
        let clients = sources.into_iter().map(|source| (source.model, Client::new(source)));
        Remotes { clients: clients.collect(), digests: Digests::default(), cache: Mutex::default() }
    }

    pub fn is_empty(&self) -> bool {
        self.clients.is_empty()
    }

    /// What this request has been answered before.
    pub fn cached(&self, model: usize, api: Api, body: &[u8]) -> Option<Arc<[TokenId]>> {
        let digest = self.digests.of(model, api, body);
        self.cache.lock().get(digest, Instant::now())
    }

    /// Asks the model's servers; blocks until one has answered, all have failed or the deadline is
    /// over.
    pub fn ask(
        &self,
        model: usize,
        api: Api,
        body: &[u8],
        deadline: Option<Instant>,
    ) -> Result<Arc<[TokenId]>, RemoteError> {
        let client = self.clients.get(&model).ok_or(RemoteError::NoServer)?;
        let deadline = deadline.unwrap_or_else(|| Instant::now() + PATIENCE);
        let ids: Arc<[TokenId]> = client.ask(api, body, deadline)?.into();
        let digest = self.digests.of(model, api, body);
        self.cache.lock().put(digest, ids.clone(), Instant::now());
        Ok(ids)
    }

    /// What is worth a line in the log: a model's failures, one at a time.
    pub fn worth_logging(&self, model: usize, error: &RemoteError) -> bool {
        let client = self.clients.get(&model);
        error.skip() == Skip::RemoteFailed && client.is_some_and(|client| client.may_log())
    }
}
