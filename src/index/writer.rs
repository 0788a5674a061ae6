//! Changes: one writer at a time.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};

use super::reader::{HEADER, RECORD, Record};
use super::{Index, IndexError, RemoveOutcome, StoreOutcome, Stored, Takeover};
use crate::types::{BlockHash, EngineHash, ServerId, Tier};

/// The one that may change an index. The caller sees to it that there is one at a time.
pub struct Writer<'z> {
    index: Index<'z>,
}

impl<'z> Writer<'z> {
    /// Takes over an index, after the writer before it finished or died.
    pub fn attach(words: &'z [AtomicU64]) -> Result<(Self, Takeover), IndexError> {
        Ok((Writer { index: Index::open(words)? }, Takeover::default()))
    }

    pub fn index(&self) -> Index<'z> {
        self.index
    }

    fn find(
        &self,
        server: ServerId,
        tier: Option<Tier>,
        engine: EngineHash,
    ) -> Option<(usize, Record)> {
        self.index.records().find(|(_, record)| {
            record.server == server.0
                && record.engine == engine.0
                && tier.is_none_or(|tier| record.tier == tier as u8)
        })
    }

    fn put(&mut self, at: usize, record: Record) {
        let tag = u64::from(record.refs) << 32
            | u64::from(record.server) << 8
            | 4
            | u64::from(record.tier);
        let words = self.index.words;
        words[at + 1].store(record.engine, Ordering::Relaxed);
        words[at + 2].store(record.block, Ordering::Relaxed);
        words[at].store(if record.refs == 0 { 0 } else { tag }, Ordering::Release);
    }

    fn free(&self) -> Option<usize> {
        let words = self.index.words;
        (HEADER..words.len() + 1 - RECORD)
            .step_by(RECORD)
            .find(|at| words[*at].load(Ordering::Relaxed) == 0)
    }

    /// A chain of blocks that `server` now holds in `tier`; `parent` is the block before the first,
    /// `None` at the start of a prompt. Without `count_refs` a repeated store adds no reference.
    pub fn store(
        &mut self,
        server: ServerId,
        tier: Tier,
        parent: Option<BlockHash>,
        blocks: &[Stored],
        count_refs: bool,
    ) -> StoreOutcome {
        let mut outcome = StoreOutcome::default();
        if let Some(parent) = parent
            && !self.index.records().any(|(_, r)| r.server == server.0 && r.block == parent.0)
        {
            outcome.orphan = blocks.len() as u32;
            return outcome;
        }
        for (index, stored) in blocks.iter().enumerate() {
            let mut record = Record {
                engine: stored.engine.0,
                block: stored.block.0,
                server: server.0,
                tier: tier as u8,
                refs: 1,
            };
            match self.find(server, Some(tier), stored.engine) {
                Some((at, old)) if old.block == record.block => {
                    record.refs = old.refs + u32::from(count_refs);
                    self.put(at, record);
                    outcome.already += 1;
                }
                Some((at, _)) => {
                    self.put(at, record);
                    outcome.stored += 1;
                    outcome.renamed += 1;
                }
                None => match self.free() {
                    Some(at) => {
                        self.put(at, record);
                        outcome.stored += 1;
                    }
                    None => {
                        outcome.full = (blocks.len() - index) as u32;
                        break;
                    }
                },
            }
        }
        outcome
    }

    /// The block that an engine's hash names on this server, in any tier.
    pub fn resolve(&self, server: ServerId, engine: EngineHash) -> Option<BlockHash> {
        self.find(server, None, engine).map(|(_, record)| BlockHash(record.block))
    }

    /// Takes one reference from each; children stay, the engine names each block that goes.
    pub fn remove(
        &mut self,
        server: ServerId,
        tier: Tier,
        engines: &[EngineHash],
    ) -> RemoveOutcome {
        let mut outcome = RemoveOutcome::default();
        for engine in engines {
            let Some((at, mut record)) = self.find(server, Some(tier), *engine) else {
                outcome.unknown += 1;
                continue;
            };
            record.refs -= 1;
            if record.refs == 0 {
                outcome.removed += 1
            } else {
                outcome.released += 1
            }
            self.put(at, record);
        }
        outcome
    }

    /// Forgets all that a server holds, in every tier. Returns how many entries went.
    pub fn clear(&mut self, server: ServerId) -> u64 {
        let gone: Vec<usize> =
            self.index.records().filter(|(_, r)| r.server == server.0).map(|(at, _)| at).collect();
        for at in &gone {
            self.index.words[*at].store(0, Ordering::Release);
        }
        gone.len() as u64
    }
}
