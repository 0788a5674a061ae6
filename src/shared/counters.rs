//! Counters of the whole zone.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::types::Skip;

pub(super) const WORDS: usize = 64;
const SKIPS_AT: usize = 16;

/// What is counted once for each request, beside the skip reasons.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Counter {
    /// Requests balanced by the module, routed or not.
    Balanced = 0,
    Hit = 1,
    Miss = 2,
    /// Upstreams with one usable server: nothing to choose.
    Single = 3,
    PromptTokens = 4,
    MatchedTokens = 5,
    /// Choices made again after a peer failed.
    Retries = 6,
    /// Panics of our own code that were caught.
    Panics = 7,
    /// Requests in shadow mode whose prompt was known.
    Shadow = 8,
    /// Of their prompts, tokens that the server of our choice held and the one that answered not.
    ShadowMissedTokens = 9,
}

#[derive(Clone, Copy, Debug)]
pub struct Counters<'a> {
    words: &'a [AtomicU64],
}

impl<'a> Counters<'a> {
    pub(super) fn new(words: &'a [AtomicU64]) -> Counters<'a> {
        Counters { words }
    }

    pub fn add(&self, counter: Counter, n: u64) {
        self.words[counter as usize].fetch_add(n, Ordering::Relaxed);
    }

    pub fn get(&self, counter: Counter) -> u64 {
        self.words[counter as usize].load(Ordering::Relaxed)
    }

    pub fn add_skip(&self, reason: Skip) {
        self.words[SKIPS_AT + reason as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub fn skips(&self, reason: Skip) -> u64 {
        self.words[SKIPS_AT + reason as usize].load(Ordering::Relaxed)
    }
}

const _: () = assert!(SKIPS_AT + Skip::ALL.len() <= WORDS);
