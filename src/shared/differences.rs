//! A ring of blocks that engines made of other tokens than were made here.

use std::sync::atomic::{AtomicU64, Ordering};

use super::{ModelKey, stamped};
use crate::types::{BlockHash, EngineHash, ServerId, TokenId};

const ROWS: usize = 16;
const ROW_WORDS: usize = 8 + KEPT;
const HEADER: usize = 8;
pub(super) const WORDS: usize = HEADER + ROWS * ROW_WORDS;

const WHO: usize = 0;
const MODEL: usize = 1;
const PLACE: usize = 2;
const OURS: usize = 3;
const THEIRS: usize = 4;
const LENGTHS: usize = 5;
const TOKENS: usize = 6;
/// Most token ids kept of each of the two blocks.
const KEPT: usize = 256;
const LIST_WORDS: usize = KEPT / 2;
const _: () = assert!(1 + TOKENS + 2 * LIST_WORDS <= ROW_WORDS);

/// The first block of a prompt that is not as it was foretold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    pub server: ServerId,
    pub model: ModelKey,
    /// Its place in the prompt, in blocks from 0, and the tokens in a block.
    pub block: u32,
    pub block_size: u32,
    pub hash: BlockHash,
    pub engine_hash: EngineHash,
    /// What was made here and what the engine made, at most 256 of each.
    pub tokens: Vec<TokenId>,
    pub engine_tokens: Vec<TokenId>,
}

#[derive(Clone, Copy, Debug)]
pub struct Differences<'a> {
    words: &'a [AtomicU64],
}

impl<'a> Differences<'a> {
    pub(super) fn new(words: &'a [AtomicU64]) -> Differences<'a> {
        Differences { words }
    }

    /// Keeps a difference in the place of the oldest. Only the holder of the lease calls this.
    pub fn push(&self, found: &Difference) {
        let next = self.words[0].fetch_add(1, Ordering::Relaxed) as usize % ROWS;
        let ours = &found.tokens[..found.tokens.len().min(KEPT)];
        let theirs = &found.engine_tokens[..found.engine_tokens.len().min(KEPT)];
        stamped::write(self.row(next), |row| {
            let (low, high) = row[TOKENS..].split_at(LIST_WORDS);
            for (at, word) in [
                (WHO, u64::from(found.server.0)),
                (MODEL, found.model.0),
                (PLACE, u64::from(found.block) << 32 | u64::from(found.block_size)),
                (OURS, found.hash.0),
                (THEIRS, found.engine_hash.0),
                (LENGTHS, (ours.len() as u64) << 32 | theirs.len() as u64),
            ] {
                row[at].store(word, Ordering::Relaxed);
            }
            stamped::set_tokens(low, ours);
            stamped::set_tokens(high, theirs);
        });
    }

    /// The newest first.
    pub fn newest(&self) -> impl Iterator<Item = Difference> + '_ {
        let pushed = self.words[0].load(Ordering::Relaxed) as usize;
        (0..ROWS.min(pushed)).filter_map(move |back| self.read((pushed - 1 - back) % ROWS))
    }

    fn read(&self, at: usize) -> Option<Difference> {
        stamped::read(self.row(at), |row| {
            let word = |at: usize| row[at].load(Ordering::Relaxed);
            let (low, high) = row[TOKENS..].split_at(LIST_WORDS);
            let length = |half: u64| KEPT.min((half & 0xffff_ffff) as usize);
            Some(Difference {
                server: ServerId(word(WHO) as u16),
                model: ModelKey(word(MODEL)),
                block: (word(PLACE) >> 32) as u32,
                block_size: word(PLACE) as u32,
                hash: BlockHash(word(OURS)),
                engine_hash: EngineHash(word(THEIRS)),
                tokens: stamped::tokens(low, length(word(LENGTHS) >> 32)),
                engine_tokens: stamped::tokens(high, length(word(LENGTHS))),
            })
        })
    }

    fn row(&self, at: usize) -> &'a [AtomicU64] {
        &self.words[HEADER + at * ROW_WORDS..HEADER + (at + 1) * ROW_WORDS]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn difference(n: u32, tokens: u32) -> Difference {
        Difference {
            server: ServerId(n as u16),
            model: ModelKey::of("a"),
            block: n,
            block_size: tokens,
            hash: BlockHash(1 << 40 | u64::from(n)),
            engine_hash: EngineHash(u64::MAX),
            tokens: (n..n + tokens).collect(),
            engine_tokens: (7..7 + tokens - 1).collect(),
        }
    }

    #[test]
    fn keeps_the_newest_whole() {
        let words: Vec<AtomicU64> = (0..WORDS).map(|_| AtomicU64::new(0)).collect();
        let ring = Differences::new(&words);
        assert_eq!(ring.newest().next(), None);
        for n in 0..20 {
            ring.push(&difference(n, 16 + n));
        }
        let kept: Vec<Difference> = ring.newest().collect();
        let expected: Vec<Difference> = (4..20).rev().map(|n| difference(n, 16 + n)).collect();
        assert_eq!(kept, expected);
    }

    #[test]
    fn long_blocks_are_cut() {
        let words: Vec<AtomicU64> = (0..WORDS).map(|_| AtomicU64::new(0)).collect();
        let ring = Differences::new(&words);
        let long = difference(1, 1000);
        ring.push(&long);
        let kept = ring.newest().next().unwrap();
        assert_eq!(kept.tokens, long.tokens[..KEPT]);
        assert_eq!(kept.engine_tokens, long.engine_tokens[..KEPT]);
        assert_eq!(kept.block_size, 1000);
    }
}
