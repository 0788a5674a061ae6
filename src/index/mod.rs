//! The prefix index: which server holds which blocks, in words of the shared zone.
//!
//! One writer at a time, readers in every worker process, no locks. Everything in the zone is an
//! offset, so that each process may map it elsewhere.
#![forbid(unsafe_code)]

mod entries;
mod evict;
mod holders;
mod layout;
mod reader;
mod repair;
mod runs;
mod seqlock;
mod store;
mod table;
#[cfg(test)]
mod tests;
mod writer;

use crate::types::{BlockHash, EngineHash, ServerId, Tier};

pub use reader::Index;
pub use writer::Writer;

/// Holders that an index can tell apart: each server twice, see [`crate::types::ServerId::learned`].
pub const MAX_SERVERS: usize = 2 * crate::types::MAX_SERVERS;

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum IndexError {
    #[error("{0} words are too few for the index")]
    TooSmall(usize),
    #[error("the words hold no index")]
    NotAnIndex,
    #[error("the index has layout {found}, expected {expected}")]
    Layout { found: u64, expected: u64 },
    #[error("the index was made for {found} words, the zone has {have}")]
    Size { found: u64, have: u64 },
}

/// The index changed faster than it could be read, or is being repaired.
#[derive(Debug, Clone, Copy, thiserror::Error, PartialEq, Eq)]
#[error("the index is busy")]
pub struct Busy;

/// One block of a store event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stored {
    pub engine: EngineHash,
    pub block: BlockHash,
}

/// What became of the blocks of one store; the counts add up to the blocks given.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StoreOutcome {
    /// New to this server and tier.
    pub stored: u32,
    /// Already there: one more reference if references are counted, else nothing.
    pub already: u32,
    /// The parent is not held by this server in any tier; dropped.
    pub orphan: u32,
    /// No room, even after eviction; dropped, with everything after it.
    pub full: u32,
    /// Contradicts what is known of the block (another parent); dropped, with everything after it.
    pub refused: u32,
    /// Of `stored`: engine hashes that named another block before. The last one wins.
    pub renamed: u32,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RemoveOutcome {
    /// Gone with this call.
    pub removed: u32,
    /// One reference less, still held.
    pub released: u32,
    /// Not held by this server in this tier; nothing done.
    pub unknown: u32,
}

/// What a writer found when it took over.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Takeover {
    /// Servers that the last writer was changing when it died. Their blocks are gone: replay.
    pub torn: Vec<ServerId>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    /// Distinct blocks held by anybody.
    pub blocks: u64,
    /// (server, tier, engine hash) entries.
    pub entries: u64,
    /// Entries dropped to make room, since the index was made.
    pub evicted: u64,
    pub used_bytes: u64,
    pub size_bytes: u64,
}

/// A holder of one block, with its best tier.
pub type Holder = (ServerId, Tier);
