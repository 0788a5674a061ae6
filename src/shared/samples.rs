//! A ring of lately stored blocks with their first token ids.

use std::sync::atomic::{AtomicU64, Ordering};

use super::stamped;
use crate::types::{BlockHash, Tier, TokenId};

const ROWS: usize = 256;
const ROW_WORDS: usize = 8;
pub(super) const WORDS: usize = 8 + ROWS * ROW_WORDS;

const BLOCK: usize = 0;
const SHAPE: usize = 1;
const TOKENS: usize = 2;
/// Token ids kept of each block.
const KEPT: usize = 8;

/// One block as it was stored: which, in what tier, how many tokens, and the first of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sample {
    pub block: BlockHash,
    pub tier: Tier,
    pub token_count: u32,
    /// At most the first 8.
    pub tokens: Vec<TokenId>,
}

#[derive(Clone, Copy, Debug)]
pub struct Samples<'a> {
    words: &'a [AtomicU64],
}

impl<'a> Samples<'a> {
    pub(super) fn new(words: &'a [AtomicU64]) -> Samples<'a> {
        Samples { words }
    }

    /// Puts a block in the place of the oldest. Only the holder of the lease calls this.
    pub fn push(&self, block: BlockHash, tier: Tier, tokens: &[TokenId]) {
        let next = self.words[0].fetch_add(1, Ordering::Relaxed) as usize % ROWS;
        stamped::write(self.row(next), |row| {
            row[BLOCK].store(block.0, Ordering::Relaxed);
            row[SHAPE].store((tokens.len() as u64) << 8 | tier as u64, Ordering::Relaxed);
            stamped::set_tokens(&row[TOKENS..], &tokens[..tokens.len().min(KEPT)]);
        });
    }

    /// The newest samples first; rows that change meanwhile are left out.
    pub fn newest(&self) -> impl Iterator<Item = Sample> + '_ {
        let pushed = self.words[0].load(Ordering::Relaxed) as usize;
        (0..ROWS.min(pushed)).filter_map(move |back| self.read((pushed - 1 - back) % ROWS))
    }

    fn read(&self, at: usize) -> Option<Sample> {
        stamped::read(self.row(at), |row| {
            let shape = row[SHAPE].load(Ordering::Relaxed);
            let token_count = (shape >> 8) as u32;
            Some(Sample {
                block: BlockHash(row[BLOCK].load(Ordering::Relaxed)),
                tier: *Tier::ALL.get((shape & 0xff) as usize)?,
                token_count,
                tokens: stamped::tokens(&row[TOKENS..], KEPT.min(token_count as usize)),
            })
        })
    }

    fn row(&self, at: usize) -> &'a [AtomicU64] {
        &self.words[8 + at * ROW_WORDS..8 + (at + 1) * ROW_WORDS]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeps_the_newest_rows_newest_first() {
        let words: Vec<AtomicU64> = (0..WORDS).map(|_| AtomicU64::new(0)).collect();
        let samples = Samples::new(&words);
        assert_eq!(samples.newest().count(), 0);
        for n in 0..300u32 {
            let tokens: Vec<TokenId> = (n..n + 9).collect();
            samples.push(BlockHash(u64::from(n)), Tier::Cpu, &tokens);
        }
        samples.push(BlockHash(7), Tier::Gpu, &[4, 5, 6]);
        let all: Vec<Sample> = samples.newest().collect();
        assert_eq!(all.len(), ROWS);
        let short =
            Sample { block: BlockHash(7), tier: Tier::Gpu, token_count: 3, tokens: vec![4, 5, 6] };
        assert_eq!(all[0], short);
        assert_eq!(all[1].tokens, (299..307).collect::<Vec<_>>());
        assert_eq!(all[1].token_count, 9);
        assert_eq!(all[255].block, BlockHash(45));
    }
}
