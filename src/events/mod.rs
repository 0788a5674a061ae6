//! Engine events: one thread that keeps the shared index equal to what the engines hold.
//!
//! ```text
//! engine ──PUB──▶ sockets ──▶ wire ──▶ flow, sequence ──▶ apply ──▶ index writer
//!        ◀─DEALER─▶ sockets ──▶ wire ──▲
//! ```
//!
//! | module | what it does |
//! | --- | --- |
//! | [`wire`] | frames and msgpack of every engine version → [`wire::Batch`] |
//! | `sequence` | which message comes next: apply, duplicate, gap, restart; pure |
//! | `flow` | live and replayed messages of one server, put in order; pure |
//! | `apply` | one batch → changes of the index and of the server's row |
//! | `checker` | which blocks prompts must leave, against which they do |
//! | `learn` | what workers routed → blocks of servers without events |
//! | `link` | one server's connection: sockets → flow → apply |
//! | `fleet` | all servers, which may come and go |
//! | `subscriber` | the thread: lease, turns, reaping |
#![forbid(unsafe_code)]

mod apply;
#[cfg(test)]
mod captures;
mod checker;
mod fleet;
mod flow;
mod learn;
mod link;
mod log;
mod sequence;
mod sockets;
mod subscriber;
pub mod wire;

use std::sync::Arc;

use crate::types::ServerId;

pub use subscriber::Subscriber;

/// Where one server (an address and a rank) publishes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerEndpoint {
    pub id: ServerId,
    /// The peer's address, for the log.
    pub address: String,
    pub rank: u32,
    /// `tcp://host:port` of the engine's PUB socket; `None`: this server sends no events.
    pub events: Option<String>,
    /// `tcp://host:port` of the engine's replay socket.
    pub replay: Option<String>,
    /// Prefix of the topics to take; empty takes all.
    pub topic: String,
    /// The configured block size; `None`: learned from the events.
    pub block_size: Option<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    Error,
    Warn,
    Notice,
}

/// Where the thread writes its log lines. Called on the subscriber's thread.
pub type Log = Arc<dyn Fn(Level, String) + Send + Sync>;

#[derive(Clone)]
pub struct SubscriberConfig {
    /// All servers of the configuration, those without events too: rows of the zone that are not
    /// among them are given back.
    pub servers: Vec<ServerEndpoint>,
    pub log: Log,
}

#[derive(Debug, thiserror::Error)]
pub enum EventsError {
    #[error("the event thread could not be started: {0}")]
    Thread(#[from] std::io::Error),
}
