//! One batch → changes of the index, of the server's counters and of the samples.
#![forbid(unsafe_code)]

use std::sync::atomic::{Ordering, fence};
use std::time::{SystemTime, UNIX_EPOCH};

use super::checker::Checker;
use super::sequence::{Mark, Sequence};
use super::wire::{self, Attention, KvEvent, Removed};
use crate::blocks::{self, HashKey};
use crate::index::{self, Writer};
use crate::shared::{Dropped, ServerField, ServerRow, Zone};
use crate::types::{BlockHash, ServerId, Tier};

/// The index's one writer and what goes with it.
pub struct Applier<'z> {
    pub(super) writer: Writer<'z>,
    pub(super) zone: Zone<'z>,
    pub(super) checker: Checker,
    key: HashKey,
}

/// What is known of one server's blocks beside the index and the row.
#[derive(Clone, Copy, Debug, Default)]
pub struct Habits {
    /// It announces again what it has (`kv_cache_report_mode=full`), without a removal for that.
    reports: bool,
    /// It has groups that are not full attention: what it computes again, it stores again.
    hybrid: bool,
}

/// What a batch tells beside its blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Told {
    /// Everything was cleared: from here on all is known.
    pub cleared: bool,
    /// Its block size is not the configured one; nothing was stored.
    pub other_block_size: Option<u32>,
}

/// One server's part of an [`Applier`].
struct Target<'a, 'z> {
    writer: &'a mut Writer<'z>,
    checker: &'a mut Checker,
    zone: Zone<'z>,
    key: HashKey,
    id: ServerId,
    row: ServerRow<'z>,
    configured: Option<u32>,
    habits: &'a mut Habits,
    told: Told,
}

impl<'z> Applier<'z> {
    pub fn new(writer: Writer<'z>, zone: Zone<'z>) -> Applier<'z> {
        Applier { writer, zone, checker: Checker::new(zone), key: zone.hash_key() }
    }

    /// Applies a batch and notes `mark` as the last one. `configured` is the block size that the
    /// server must have.
    pub fn apply(
        &mut self,
        id: ServerId,
        configured: Option<u32>,
        habits: &mut Habits,
        batch: &wire::Batch<'_>,
        mark: Mark,
        origin: u64,
    ) -> Told {
        let row = self.zone.server(id);
        row.set(ServerField::Applying, 1);
        let Applier { writer, zone, checker, key } = self;
        checker.look(*zone);
        let mut target = Target {
            writer,
            checker,
            zone: *zone,
            key: *key,
            id,
            row,
            configured,
            habits,
            told: Told::default(),
        };
        for event in &batch.events {
            target.event(event);
        }
        let told = target.told;
        note(row, mark, origin);
        row.add(ServerField::Batches, 1);
        row.set(ServerField::LastEventMs, unix_ms());
        // The mark goes last: who sees it gone sees the batch applied and noted.
        fence(Ordering::Release);
        row.set(ServerField::Applying, 0);
        told
    }

    /// Forgets all that the server holds, and what was applied of it.
    pub fn clear(&mut self, id: ServerId) {
        let row = self.zone.server(id);
        row.set(ServerField::Applying, 1);
        self.writer.clear(id);
        // The engine may come back with another model.
        for field in
            [ServerField::NextSeq, ServerField::BlockSize, ServerField::Group, ServerField::Hybrid]
        {
            row.set(field, 0);
        }
        row.forget_trust();
        self.checker.forget(id, self.zone);
        fence(Ordering::Release);
        row.set(ServerField::Applying, 0);
    }

    /// Forgets the server's blocks, but not how far it was followed.
    pub fn distrust(&mut self, id: ServerId) {
        self.writer.clear(id);
    }

    /// What an earlier process applied of this server, if it is whole.
    pub fn resume(&self, id: ServerId) -> Option<Sequence> {
        let row = self.zone.server(id);
        let next = row.get(ServerField::NextSeq);
        if next == 0 || row.get(ServerField::Applying) != 0 {
            return None;
        }
        let last = Mark {
            seq: next - 1,
            digest: row.get(ServerField::LastDigest),
            timestamp: f64::from_bits(row.get(ServerField::LastTimestamp)),
        };
        Some(Sequence::resume(last, row.get(ServerField::ReplayedFrom)))
    }
}

/// Writes the last applied batch down for the next process.
fn note(row: ServerRow<'_>, mark: Mark, origin: u64) {
    row.set(ServerField::LastDigest, mark.digest);
    row.set(ServerField::LastTimestamp, mark.timestamp.to_bits());
    row.set(ServerField::ReplayedFrom, origin);
    row.set(ServerField::NextSeq, mark.seq + 1);
}

impl Target<'_, '_> {
    fn event(&mut self, event: &Result<KvEvent<'_>, Dropped>) {
        let done = match event {
            Ok(KvEvent::Stored(stored)) => self.stored(stored),
            Ok(KvEvent::Removed(removed)) => self.removed(removed),
            Ok(KvEvent::Cleared) => {
                self.writer.clear(self.id);
                self.checker.forget(self.id, self.zone);
                self.told.cleared = true;
                Ok(())
            }
            Err(reason) => Err(*reason),
        };
        if let Err(reason) = done {
            self.row.add_dropped(reason, 1);
        }
    }

    fn stored(&mut self, event: &wire::Stored<'_>) -> Result<(), Dropped> {
        self.credited(event)?;
        if event.tokens.is_empty() && event.block_size == 0 {
            return self.copies(event);
        }
        let size = event.block_size as usize;
        if size == 0 || event.hashes.len().checked_mul(size) != Some(event.tokens.len()) {
            return Err(Dropped::Shape);
        }
        self.block_size(event)?;
        let parent = match event.parent {
            None => None,
            Some(engine) => match self.writer.resolve(self.id, engine) {
                Some(block) => Some(block),
                None => {
                    self.row.add_dropped(Dropped::Orphan, event.hashes.len() as u64);
                    return Ok(());
                }
            },
        };
        let start = parent
            .unwrap_or_else(|| blocks::root(&self.key, event.block_size, event.lora.as_deref()));
        let chain = self.chain(event, start);
        self.checker.stored(self.id, start, &chain, event);
        let counted = self.counts_references(event, &chain);
        self.store(event.tier, parent, &chain, counted);
        for (stored, tokens) in chain.iter().zip(event.tokens.chunks_exact(size)) {
            self.zone.samples().push(stored.block, event.tier, tokens);
        }
        Ok(())
    }

    /// Only one full-attention group gives credit: the first one seen, for every group has all
    /// positions. Removals name the group but not its kind, so it is kept in the row.
    fn credited(&mut self, event: &wire::Stored<'_>) -> Result<(), Dropped> {
        let group = event.group.unwrap_or(0);
        let known = self.row.get(ServerField::Group);
        let fits = match event.attention {
            Attention::Other => {
                self.habits.hybrid = true;
                self.row.set(ServerField::Hybrid, 1);
                false
            }
            Attention::Full => known == 0 || known == group + 1,
            Attention::Unstated => known == group + 1 || known == 0 && group == 0,
        };
        if !fits {
            return Err(Dropped::Group);
        }
        self.row.set(ServerField::Group, group + 1);
        Ok(())
    }

    /// The size is learned from the blocks that the engine computes. Lower tiers may keep theirs
    /// in other pieces, which match nothing here.
    fn block_size(&mut self, event: &wire::Stored<'_>) -> Result<(), Dropped> {
        let known = self.row.get(ServerField::BlockSize);
        let size = u64::from(event.block_size);
        if known == 0 && event.tier == Tier::Gpu {
            self.row.set(ServerField::BlockSize, size);
        } else if known != size {
            return Err(Dropped::BlockSize);
        }
        if self.configured.is_some_and(|configured| configured != event.block_size) {
            self.told.other_block_size = Some(event.block_size);
            return Err(Dropped::BlockSize);
        }
        Ok(())
    }

    fn chain(&self, event: &wire::Stored<'_>, start: BlockHash) -> Vec<index::Stored> {
        let mut block = start;
        let pieces = event.tokens.chunks_exact(event.block_size as usize);
        let numbered = event.hashes.iter().zip(pieces).enumerate();
        numbered
            .map(|(at, (engine, tokens))| {
                let extra = event.extras.get(at).map_or(&[][..], Vec::as_slice);
                block = blocks::child(&self.key, block, tokens, extra);
                index::Stored { engine: *engine, block }
            })
            .collect()
    }

    /// An engine that stores a block again has a second copy, and removes both. But it may also
    /// only announce what it has: then a chain comes from its start, all of it held already. A
    /// single block of that kind is a prompt that fills it exactly, unless the engine is known to
    /// announce. When in doubt the block counts once: too little is believed, never too much.
    fn counts_references(&mut self, event: &wire::Stored<'_>, chain: &[index::Stored]) -> bool {
        if event.reused {
            self.habits.reports = true;
            return false;
        }
        if event.parent.is_some() || self.habits.hybrid {
            return true;
        }
        let held = |stored: &index::Stored| {
            self.writer.resolve(self.id, stored.engine) == Some(stored.block)
        };
        if chain.len() > 1 && chain.iter().all(held) {
            self.habits.reports = true;
        }
        !self.habits.reports
    }

    /// Blocks that a connector names by hash alone: known if this server holds them elsewhere.
    fn copies(&mut self, event: &wire::Stored<'_>) -> Result<(), Dropped> {
        for engine in &event.hashes {
            let block = self.writer.resolve(self.id, *engine);
            match block.and_then(|block| Some((block, self.writer.parent(block)?))) {
                Some((block, parent)) => {
                    let copy = index::Stored { engine: *engine, block };
                    self.store(event.tier, parent, &[copy], true);
                }
                None => self.row.add_dropped(Dropped::NoTokens, 1),
            }
        }
        Ok(())
    }

    fn store(
        &mut self,
        tier: Tier,
        parent: Option<BlockHash>,
        chain: &[index::Stored],
        counted: bool,
    ) {
        let outcome = self.writer.store(self.id, tier, parent, chain, counted);
        for (reason, count) in [
            (Dropped::Orphan, outcome.orphan),
            (Dropped::Full, outcome.full),
            (Dropped::Contradiction, outcome.refused),
        ] {
            if count > 0 {
                self.row.add_dropped(reason, u64::from(count));
            }
        }
    }

    fn removed(&mut self, event: &Removed) -> Result<(), Dropped> {
        let known = self.row.get(ServerField::Group);
        if known != 0 && event.group.is_some_and(|group| group + 1 != known) {
            return Err(Dropped::Group);
        }
        self.writer.remove(self.id, event.tier, &event.hashes);
        Ok(())
    }
}

pub(super) fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
