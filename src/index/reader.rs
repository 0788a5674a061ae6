//! Lookups: any process, any thread, no locks.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};

use super::{Busy, Holder, IndexError, Stats};
use crate::types::{BlockHash, Overlap, ServerId, Tier};

pub(super) const MAGIC: u64 = 0x6b76_635f_6964_7831;
pub(super) const LAYOUT: u64 = 1;
pub(super) const HEADER: usize = 8;
pub(super) const RECORD: usize = 4;

/// A view of an index in shared words.
#[derive(Clone, Copy)]
pub struct Index<'z> {
    pub(super) words: &'z [AtomicU64],
}

#[derive(Clone, Copy)]
pub(super) struct Record {
    pub engine: u64,
    pub block: u64,
    pub server: u16,
    pub tier: u8,
    pub refs: u32,
}

impl<'z> Index<'z> {
    /// Makes an empty index of all the words.
    pub fn format(words: &'z [AtomicU64]) -> Result<Self, IndexError> {
        if words.len() < HEADER + RECORD {
            return Err(IndexError::TooSmall(words.len()));
        }
        for word in words {
            word.store(0, Ordering::Relaxed);
        }
        words[1].store(LAYOUT, Ordering::Relaxed);
        words[2].store(words.len() as u64, Ordering::Relaxed);
        words[0].store(MAGIC, Ordering::Release);
        Ok(Index { words })
    }

    /// The index that [`Index::format`] made there, whichever process did.
    pub fn open(words: &'z [AtomicU64]) -> Result<Self, IndexError> {
        if words.len() < HEADER + RECORD {
            return Err(IndexError::TooSmall(words.len()));
        }
        if words[0].load(Ordering::Acquire) != MAGIC {
            return Err(IndexError::NotAnIndex);
        }
        let found = words[1].load(Ordering::Relaxed);
        if found != LAYOUT {
            return Err(IndexError::Layout { found, expected: LAYOUT });
        }
        let (found, have) = (words[2].load(Ordering::Relaxed), words.len() as u64);
        if found != have {
            return Err(IndexError::Size { found, have });
        }
        Ok(Index { words })
    }

    pub(super) fn records(&self) -> impl Iterator<Item = (usize, Record)> + '_ {
        (HEADER..self.words.len() + 1 - RECORD).step_by(RECORD).filter_map(|at| {
            let tag = self.words[at].load(Ordering::Acquire);
            (tag != 0).then(|| {
                let record = Record {
                    server: (tag >> 8) as u16,
                    tier: (tag & 3) as u8,
                    refs: (tag >> 32) as u32,
                    engine: self.words[at + 1].load(Ordering::Relaxed),
                    block: self.words[at + 2].load(Ordering::Relaxed),
                };
                (at, record)
            })
        })
    }

    /// The overlap of every server with a prompt; `out[i]` is server `i`, whatever `out` held.
    pub fn lookup(&self, hashes: &[BlockHash], out: &mut [Overlap]) -> Result<(), Busy> {
        out.fill(Overlap::default());
        for (index, hash) in hashes.iter().enumerate() {
            let mut holders = Vec::new();
            self.holders(*hash, &mut holders)?;
            for (server, tier) in holders {
                if let Some(overlap) = out.get_mut(server.index())
                    && overlap.blocks as usize == index
                {
                    overlap.blocks += 1;
                    overlap.tiers[tier as usize] += 1;
                }
            }
        }
        Ok(())
    }

    /// Who holds a block, each server once with its best tier, by server. Replaces what `out` holds.
    pub fn holders(&self, block: BlockHash, out: &mut Vec<Holder>) -> Result<(), Busy> {
        out.clear();
        for (_, record) in self.records().filter(|(_, record)| record.block == block.0) {
            out.push((ServerId(record.server), Tier::ALL[usize::from(record.tier)]));
        }
        out.sort();
        out.dedup_by_key(|holder| holder.0);
        Ok(())
    }

    /// Entries of one server by tier.
    pub fn server_blocks(&self, server: ServerId) -> [u64; Tier::COUNT] {
        let mut counts = [0; Tier::COUNT];
        for (_, record) in self.records().filter(|(_, record)| record.server == server.0) {
            counts[usize::from(record.tier)] += 1;
        }
        counts
    }

    pub fn stats(&self) -> Stats {
        let mut blocks: Vec<u64> = self.records().map(|(_, record)| record.block).collect();
        let entries = blocks.len() as u64;
        blocks.sort_unstable();
        blocks.dedup();
        Stats {
            blocks: blocks.len() as u64,
            entries,
            evicted: 0,
            used_bytes: entries * 8 * RECORD as u64,
            size_bytes: self.words.len() as u64 * 8,
        }
    }
}
