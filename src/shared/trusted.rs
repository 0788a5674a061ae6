//! What is known of one model's tokens on one server: a part of the server's row.

use std::sync::atomic::{AtomicU64, Ordering};

/// A model's name, as the zone keeps it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ModelKey(pub u64);

impl ModelKey {
    pub fn of(name: &str) -> ModelKey {
        ModelKey(super::name_key(name))
    }
}

/// Models of one server that are followed: an engine serves one, and names that it does not serve
/// end here without an answer that could be compared.
pub(super) const MODELS: usize = 4;
pub(super) const WORDS: usize = 16;

/// A count or a state of one model on one server; see [`crate::trust`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum TrustField {
    /// Usage reports that count as many prompt tokens as were made here, and others.
    PromptSame = 1,
    PromptDiffers = 2,
    /// Of the former, those that report as many cached tokens as were foretold, more, or less.
    CachedSame = 3,
    CachedMore = 4,
    CachedLess = 5,
    /// Prompts whose blocks the engine stored as foretold, others, and prompts of which it stored
    /// neither those blocks nor others in their place.
    BlocksSame = 6,
    BlocksDiffer = 7,
    BlocksAbsent = 8,
    /// Doubts of usage reports and of blocks.
    UsageDoubt = 9,
    BlockDoubt = 10,
    /// 1 once a difference was written to the log.
    Logged = 11,
}

#[derive(Clone, Copy, Debug)]
pub struct TrustRow<'a> {
    words: &'a [AtomicU64],
}

impl<'a> TrustRow<'a> {
    pub(super) fn new(words: &'a [AtomicU64]) -> TrustRow<'a> {
        TrustRow { words }
    }

    pub(super) fn key(&self) -> &'a AtomicU64 {
        &self.words[0]
    }

    pub fn model(&self) -> ModelKey {
        ModelKey(self.key().load(Ordering::Acquire))
    }

    pub fn get(&self, field: TrustField) -> u64 {
        self.word(field).load(Ordering::Relaxed)
    }

    pub fn add(&self, field: TrustField) {
        self.word(field).fetch_add(1, Ordering::Relaxed);
    }

    /// Sets the field, and tells what it was.
    pub fn swap(&self, field: TrustField, value: u64) -> u64 {
        self.word(field).swap(value, Ordering::Relaxed)
    }

    /// Changes the field in one step, and tells what it was and what it is.
    pub fn change(&self, field: TrustField, step: impl Fn(u64) -> u64) -> (u64, u64) {
        let word = self.word(field);
        let mut before = word.load(Ordering::Relaxed);
        loop {
            let after = step(before);
            match word.compare_exchange(before, after, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return (before, after),
                Err(now) => before = now,
            }
        }
    }

    fn word(&self, field: TrustField) -> &'a AtomicU64 {
        &self.words[field as usize]
    }
}
