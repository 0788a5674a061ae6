//! The map of the shared zone.
//!
//! One stretch of 64-bit words, mapped by every process of nginx. Every part is addressed by its
//! word offset, never by a pointer, and is made of atomics that no process ever locks: a process
//! killed at any instant leaves nothing that another has to wait for.
//!
//! ```text
//! header │ counters │ server rows │ upstream rows │ load rows │ samples │ differences │ checks │
//! routed │ index words …
//! ```
#![forbid(unsafe_code)]

mod checks;
mod counters;
mod differences;
mod lease;
mod process;
mod routed;
mod samples;
mod servers;
mod stamped;
mod trusted;
mod upstreams;
mod words;

use std::sync::atomic::{AtomicU64, Ordering};

pub use checks::{Checks, Expected, MAX_BLOCKS, MAX_TOKENS, Progress, Ticket};
pub use counters::{Counter, Counters};
pub use differences::{Difference, Differences};
pub use lease::Lease;
pub use process::ProcessId;
pub use routed::{Piece, Routed};
pub use samples::{Sample, Samples};
pub use servers::{ServerField, ServerRow, Servers};
pub use trusted::{ModelKey, TrustField, TrustRow};
pub use upstreams::{UpstreamField, UpstreamRow, Upstreams};
pub use words::{Dropped, Mode, ServerError};

use crate::blocks::HashKey;
pub use crate::types::MAX_SERVERS;
use crate::types::ServerId;

/// Most upstreams that a zone can hold.
pub const MAX_UPSTREAMS: usize = 64;
/// Most nginx processes that can hold requests at once: the workers and those still draining.
pub const MAX_PROCESSES: usize = 64;
/// Smallest zone in bytes; the fixed parts take about 2.5 MB of it.
pub const MIN_ZONE_BYTES: usize = 8 << 20;

const MAGIC: u64 = u64::from_le_bytes(*b"kvcaware");
/// Raised by every change of any layout below, the index's own apart: it has its own version.
const LAYOUT_VERSION: u64 = 3;

const HEADER_WORDS: usize = 64;
const H_MAGIC: usize = 0;
const H_VERSION: usize = 1;
const H_WORDS: usize = 2;
const H_KEY: usize = 3;
const H_LEASE: usize = 8;

const COUNTERS_AT: usize = HEADER_WORDS;
const SERVERS_AT: usize = COUNTERS_AT + counters::WORDS;
const UPSTREAMS_AT: usize = SERVERS_AT + servers::WORDS;
const LOADS_AT: usize = UPSTREAMS_AT + upstreams::WORDS;
const SAMPLES_AT: usize = LOADS_AT + LOAD_WORDS;
const DIFFERENCES_AT: usize = SAMPLES_AT + samples::WORDS;
const CHECKS_AT: usize = DIFFERENCES_AT + differences::WORDS;
const ROUTED_AT: usize = CHECKS_AT + checks::WORDS;

/// Where the index begins in a zone of so many words.
fn index_at(words: usize) -> usize {
    ROUTED_AT + routed::words_of(words)
}

/// Words of one process's load row: its owner, then one word for each server.
pub(crate) const LOAD_ROW_WORDS: usize = 8 + MAX_SERVERS;
const LOAD_WORDS: usize = LOAD_ROW_WORDS * MAX_PROCESSES;

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SharedError {
    #[error("zone is too small: {words} words, at least {least} needed")]
    TooSmall { words: usize, least: usize },
    #[error("zone has another layout")]
    Layout,
    #[error("all {MAX_SERVERS} server rows of the zone are in use")]
    ServersFull,
    #[error("all {MAX_UPSTREAMS} upstream rows of the zone are in use")]
    UpstreamsFull,
}

/// The zone as every process sees it. Copying it copies the view, not the memory.
#[derive(Clone, Copy, Debug)]
pub struct Zone<'a> {
    words: &'a [AtomicU64],
}

impl<'a> Zone<'a> {
    /// Lays out fresh memory. `words` must be zero but for what an earlier, other layout left.
    /// Nobody else may see the words yet.
    pub fn format(words: &'a [AtomicU64], key: HashKey) -> Result<Zone<'a>, SharedError> {
        let least = MIN_ZONE_BYTES / 8 / 2;
        if words.len() < least {
            return Err(SharedError::TooSmall { words: words.len(), least });
        }
        for word in words.iter().take(index_at(words.len())) {
            word.store(0, Ordering::Relaxed);
        }
        words[H_VERSION].store(LAYOUT_VERSION, Ordering::Relaxed);
        words[H_WORDS].store(words.len() as u64, Ordering::Relaxed);
        words[H_KEY].store(key.0[0], Ordering::Relaxed);
        words[H_KEY + 1].store(key.0[1], Ordering::Relaxed);
        words[H_MAGIC].store(MAGIC, Ordering::Release);
        Ok(Zone { words })
    }

    /// Takes up memory that [`Zone::format`] laid out, maybe in an earlier cycle of nginx.
    pub fn open(words: &'a [AtomicU64]) -> Result<Zone<'a>, SharedError> {
        let fits = words.len() > index_at(words.len())
            && words[H_MAGIC].load(Ordering::Acquire) == MAGIC
            && words[H_VERSION].load(Ordering::Relaxed) == LAYOUT_VERSION
            && words[H_WORDS].load(Ordering::Relaxed) == words.len() as u64;
        if fits { Ok(Zone { words }) } else { Err(SharedError::Layout) }
    }

    /// The key of our block hashes: random, so that a client cannot make prompts that collide.
    pub fn hash_key(&self) -> HashKey {
        HashKey([
            self.words[H_KEY].load(Ordering::Relaxed),
            self.words[H_KEY + 1].load(Ordering::Relaxed),
        ])
    }

    /// Who may write the index.
    pub fn lease(&self) -> Lease<'a> {
        Lease::new(&self.words[H_LEASE..H_LEASE + lease::WORDS])
    }

    pub fn counters(&self) -> Counters<'a> {
        Counters::new(&self.words[COUNTERS_AT..SERVERS_AT])
    }

    pub fn servers(&self) -> Servers<'a> {
        Servers::new(&self.words[SERVERS_AT..UPSTREAMS_AT])
    }

    pub fn server(&self, id: ServerId) -> ServerRow<'a> {
        self.servers().row(id)
    }

    pub fn upstreams(&self) -> Upstreams<'a> {
        Upstreams::new(&self.words[UPSTREAMS_AT..LOADS_AT])
    }

    /// The words of the load table; [`crate::load`] knows what they mean.
    pub(crate) fn load_words(&self) -> &'a [AtomicU64] {
        &self.words[LOADS_AT..SAMPLES_AT]
    }

    /// A ring of lately stored blocks, for people who compare token ids.
    pub fn samples(&self) -> Samples<'a> {
        Samples::new(&self.words[SAMPLES_AT..DIFFERENCES_AT])
    }

    /// Blocks that engines made of other tokens than were made here.
    pub fn differences(&self) -> Differences<'a> {
        Differences::new(&self.words[DIFFERENCES_AT..CHECKS_AT])
    }

    /// Prompts on their way, whose blocks are looked out for.
    pub fn checks(&self) -> Checks<'a> {
        Checks::new(&self.words[CHECKS_AT..ROUTED_AT])
    }

    /// What workers tell of the requests that they route.
    pub fn routed(&self) -> Routed<'a> {
        Routed::new(&self.words[ROUTED_AT..index_at(self.words.len())])
    }

    /// The words of the prefix index; [`crate::index`] knows what they mean.
    pub fn index_words(&self) -> &'a [AtomicU64] {
        &self.words[index_at(self.words.len())..]
    }

    /// Size of the zone in bytes.
    pub fn bytes(&self) -> usize {
        self.words.len() * 8
    }

    /// Bytes of the zone that are not the index's.
    pub fn fixed_bytes(&self) -> usize {
        index_at(self.words.len()) * 8
    }
}

/// A key for a name in a table of at most a few thousand: FNV-1a with a final mix, never 0.
fn name_key(name: &str) -> u64 {
    let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    let mixed = (hash ^ hash >> 32).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed ^ mixed >> 29).max(1)
}
