//! One row for each upstream: what its servers have in common.

use std::sync::atomic::{AtomicU64, Ordering};

use super::{MAX_UPSTREAMS, SharedError};

const ROW_WORDS: usize = 16;
pub(super) const WORDS: usize = ROW_WORDS * MAX_UPSTREAMS;
const KEY: usize = 0;
const FIELDS_AT: usize = 1;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum UpstreamField {
    /// Prefill speed in tokens per second, the bits of an `f64`; 0 until learned.
    PrefillRate = 0,
    /// Turn of the server that was picked last, see [`crate::select::next_turn`].
    Turn = 1,
    /// Choices made so far, see [`UpstreamRow::advance`].
    Choices = 2,
}

#[derive(Clone, Copy, Debug)]
pub struct Upstreams<'a> {
    words: &'a [AtomicU64],
}

impl<'a> Upstreams<'a> {
    pub(super) fn new(words: &'a [AtomicU64]) -> Upstreams<'a> {
        Upstreams { words }
    }

    /// The row of the upstream of this name, claimed if there was none. Rows are never freed:
    /// a row is found again by name after any number of reloads.
    pub fn claim(&self, name: &str) -> Result<UpstreamRow<'a>, SharedError> {
        let key = super::name_key(name);
        for row in self.words.chunks_exact(ROW_WORDS) {
            let seen = row[KEY].compare_exchange(0, key, Ordering::AcqRel, Ordering::Acquire);
            if seen.is_ok() || seen == Err(key) {
                return Ok(UpstreamRow { words: row });
            }
        }
        Err(SharedError::UpstreamsFull)
    }
}

#[derive(Clone, Copy, Debug)]
pub struct UpstreamRow<'a> {
    words: &'a [AtomicU64],
}

impl UpstreamRow<'_> {
    pub fn get(&self, field: UpstreamField) -> u64 {
        self.words[FIELDS_AT + field as usize].load(Ordering::Acquire)
    }

    pub fn set(&self, field: UpstreamField, value: u64) {
        self.words[FIELDS_AT + field as usize].store(value, Ordering::Relaxed);
    }

    /// Counts one up from `seen`, unless another process did since it was read. Whoever reads the
    /// new count also sees what this process wrote before.
    pub fn advance(&self, field: UpstreamField, seen: u64) -> bool {
        let word = &self.words[FIELDS_AT + field as usize];
        word.compare_exchange(seen, seen.wrapping_add(1), Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_keeps_its_row() {
        let words: Vec<AtomicU64> = (0..WORDS).map(|_| AtomicU64::new(0)).collect();
        let upstreams = Upstreams::new(&words);
        upstreams.claim("qwen").unwrap().set(UpstreamField::Turn, 2);
        upstreams.claim("llama").unwrap().set(UpstreamField::Turn, 5);
        assert_eq!(upstreams.claim("qwen").unwrap().get(UpstreamField::Turn), 2);
        for n in 2..MAX_UPSTREAMS {
            upstreams.claim(&n.to_string()).unwrap();
        }
        assert_eq!(upstreams.claim("more").unwrap_err(), SharedError::UpstreamsFull);
    }

    #[test]
    fn one_of_two_that_saw_the_same_count_advances_it() {
        let words: Vec<AtomicU64> = (0..WORDS).map(|_| AtomicU64::new(0)).collect();
        let row = Upstreams::new(&words).claim("qwen").unwrap();
        let seen = row.get(UpstreamField::Choices);
        assert!(row.advance(UpstreamField::Choices, seen));
        assert!(!row.advance(UpstreamField::Choices, seen));
        assert!(row.advance(UpstreamField::Choices, seen + 1));
        assert_eq!(row.get(UpstreamField::Choices), 2);
    }
}
