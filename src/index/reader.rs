//! Lookups: any process, any thread, no locks.
#![forbid(unsafe_code)]

use std::hint;
use std::sync::atomic::AtomicU64;

use super::holders;
use super::layout::{CELL, H_CELLS, H_EVICTED, H_HELD, H_KNOWN, H_REPAIR, Map, SLOT};
use super::seqlock::{read, same};
use super::{Busy, Holder, IndexError, MAX_SERVERS, Stats};
use crate::types::{BlockHash, Overlap, ServerId, Tier};

/// A section lasts a few microseconds; a writer that is away for longer was preempted or died.
const ATTEMPTS: u32 = 32;
/// Probes of one step of the search. They do not depend on each other, so their misses overlap.
const PROBES: usize = 11;

/// A view of an index in shared words.
#[derive(Clone, Copy)]
pub struct Index<'z> {
    pub(super) map: Map<'z>,
}

/// One run on the way from a block up to the start of the prompt.
struct Step {
    run: u32,
    sequence: u64,
    /// Blocks of the run that belong to the prompt.
    blocks: u32,
}

impl<'z> Index<'z> {
    /// Makes an empty index of all the words.
    pub fn format(words: &'z [AtomicU64]) -> Result<Self, IndexError> {
        Ok(Index { map: Map::format(words)? })
    }

    /// The index that [`Index::format`] made there, whichever process did.
    pub fn open(words: &'z [AtomicU64]) -> Result<Self, IndexError> {
        Ok(Index { map: Map::open(words)? })
    }

    /// The overlap of every server with a prompt, whose blocks `hashes` names from the first on;
    /// `out[i]` is server `i`, whatever `out` held.
    pub fn lookup(&self, hashes: &[BlockHash], out: &mut [Overlap]) -> Result<(), Busy> {
        let mut steps = Vec::new();
        self.attempt(|| self.try_lookup(hashes, out, &mut steps))
    }

    /// Who holds a block, each server once with its best tier, by server. Replaces what `out` holds.
    pub fn holders(&self, block: BlockHash, out: &mut Vec<Holder>) -> Result<(), Busy> {
        self.attempt(|| self.try_holders(block, out))
    }

    /// Tries until nothing changed meanwhile.
    fn attempt(&self, mut attempt: impl FnMut() -> Option<()>) -> Result<(), Busy> {
        let repair = self.map.word(H_REPAIR);
        for round in 0..ATTEMPTS {
            let number = read(repair).ok_or(Busy)?;
            if attempt().is_some() && same(repair, number) {
                return Ok(());
            }
            for _ in 0..1 << round.min(7) {
                hint::spin_loop();
            }
        }
        Err(Busy)
    }

    fn try_lookup(
        &self,
        hashes: &[BlockHash],
        out: &mut [Overlap],
        steps: &mut Vec<Step>,
    ) -> Option<()> {
        out.fill(Overlap::default());
        steps.clear();
        let Some((deepest, slot)) = self.deepest(hashes) else { return Some(()) };
        if !self.climb(hashes[deepest], slot, deepest as u32, steps)? {
            return Some(());
        }
        let mut base = 0;
        for step in steps.iter().rev() {
            self.credit(step, base, out)?;
            base += step.blocks;
        }
        let next = hashes.get(deepest + 1);
        let ended = next.is_none_or(|hash| self.map.find(hash.0).is_none());
        (ended && steps.iter().all(|step| self.unchanged(step))).then_some(())
    }

    /// The deepest block of the prompt that is known, with its slot. What is known of a prompt
    /// is a stretch from its start, so this is a search in a sorted sequence.
    fn deepest(&self, hashes: &[BlockHash]) -> Option<(usize, u32)> {
        let mut known = (0, self.map.find(hashes.first()?.0)?);
        let mut unknown = hashes.len();
        while known.0 + 1 < unknown {
            let (low, span) = (known.0, unknown - known.0);
            let probes = PROBES.min(span - 1);
            let mut found = [None; PROBES];
            for (index, found) in found.iter_mut().enumerate().take(probes) {
                *found = self.map.find(hashes[low + span * (index + 1) / (probes + 1)].0);
            }
            for (index, found) in found.iter().enumerate().take(probes) {
                let at = low + span * (index + 1) / (probes + 1);
                match found {
                    Some(slot) => known = (at, *slot),
                    None => {
                        unknown = at;
                        break;
                    }
                }
            }
        }
        Some(known)
    }

    fn unchanged(&self, step: &Step) -> bool {
        same(self.map.sequence(step.run), step.sequence)
    }

    /// The runs from block number `depth` of the prompt up to its start. False if the block lies
    /// at another depth: then `hashes` is no prompt from its first block on.
    fn climb(&self, hash: BlockHash, slot: u32, depth: u32, steps: &mut Vec<Step>) -> Option<bool> {
        let mut place = self.map.slot_place(slot);
        let mut end = depth + 1;
        loop {
            if !self.map.is_cell(place.run) {
                return None;
            }
            let sequence = read(self.map.sequence(place.run))?;
            let run = self.map.run(place.run)?;
            if place.offset >= run.length {
                return None;
            }
            if steps.is_empty() {
                let here = self.map.slot_hash(slot) == hash.0;
                if !here || self.map.slot_place(slot) != place {
                    return None;
                }
            }
            let blocks = place.offset + 1;
            steps.push(Step { run: place.run, sequence, blocks });
            if run.base + blocks != end {
                // From a child on this cannot be: only a state that is changing looks so.
                return if steps.len() == 1 { Some(false) } else { None };
            }
            end = run.base;
            match run.parent {
                Some(parent) => place = parent,
                None => return if end == 0 { Some(true) } else { None },
            }
        }
    }

    /// Adds what a run gives to the servers that hold all `base` blocks before it.
    fn credit(&self, step: &Step, base: u32, out: &mut [Overlap]) -> Option<()> {
        let mut group: Vec<u64> = Vec::new();
        let mut single = 0;
        let mut give = |single: u64, group: &[u64]| {
            let server = usize::from(holders::server(single));
            let Some(overlap) = out.get_mut(server).filter(|o| o.blocks == base) else { return };
            if !group.is_empty() {
                holders::credit(group, step.blocks, overlap);
            } else if holders::from(single) == 0 {
                let blocks = holders::to(single).min(step.blocks);
                overlap.blocks += blocks;
                overlap.tiers[holders::tier(single)] += blocks;
            }
        };
        // Most servers have one interval; only those of others are gathered.
        let whole = self.map.each_holder(step.run, |word| {
            if single != 0 && holders::server(single) == holders::server(word) {
                if group.is_empty() {
                    group.push(single);
                }
                group.push(word);
                return;
            }
            if single != 0 {
                give(single, &group);
                group.clear();
            }
            single = word;
        });
        if single != 0 {
            give(single, &group);
        }
        whole.then_some(())
    }

    fn try_holders(&self, block: BlockHash, out: &mut Vec<Holder>) -> Option<()> {
        out.clear();
        let Some(slot) = self.map.find(block.0) else { return Some(()) };
        let place = self.map.slot_place(slot);
        if !self.map.is_cell(place.run) {
            return None;
        }
        let sequence = read(self.map.sequence(place.run))?;
        let here = self.map.slot_hash(slot) == block.0 && self.map.slot_place(slot) == place;
        let whole = self.map.each_holder(place.run, |word| {
            if (holders::from(word)..holders::to(word)).contains(&place.offset) {
                let server = ServerId(holders::server(word));
                // Sorted by server and tier: the first of a server is its best.
                if out.last().is_none_or(|last| last.0 != server) {
                    out.push((server, Tier::ALL[holders::tier(word)]));
                }
            }
        });
        (here && whole && same(self.map.sequence(place.run), sequence)).then_some(())
    }

    /// Entries of one server by tier.
    pub fn server_blocks(&self, server: ServerId) -> [u64; Tier::COUNT] {
        let known = server.index() < MAX_SERVERS;
        Tier::ALL.map(|tier| if known { self.map.server_entries(server.0, tier as u8) } else { 0 })
    }

    /// Figures of about now.
    pub fn stats(&self) -> Stats {
        let servers = (0..MAX_SERVERS as u16).map(ServerId);
        let entries = servers.map(|id| self.server_blocks(id).iter().sum::<u64>()).sum();
        let (size, fixed) = self.map.bytes();
        let slots = self.map.get(H_KNOWN) + entries;
        let used = slots * 8 * SLOT as u64 + self.map.get(H_CELLS) * 8 * CELL as u64;
        Stats {
            blocks: self.map.get(H_HELD),
            entries,
            evicted: self.map.get(H_EVICTED),
            used_bytes: fixed + used,
            size_bytes: size,
        }
    }
}
