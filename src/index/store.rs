//! Stores: stretch by stretch, each in one section of its run.
#![forbid(unsafe_code)]

use super::entries::{Entry, MOST_REFS};
use super::layout::{H_CLOCK, H_HELD, Place, RUN_BLOCKS};
use super::table::MOST_CHILDREN;
use super::writer::Owner;
use super::{MAX_SERVERS, StoreOutcome, Stored, Writer, holders};
use crate::types::{BlockHash, EngineHash, ServerId, Tier};

/// Blocks that one section stores at most; readers of the run wait that long.
pub(super) const STRETCH: usize = 32;

/// A known block.
#[derive(Clone, Copy)]
struct Block {
    place: Place,
    slot: u32,
}

/// Blocks of one run, in order: known ones, then ones to be appended.
struct Stretch {
    run: u32,
    from: u32,
    known: usize,
    blocks: usize,
}

enum Stop {
    Refused,
    Full,
}

impl Writer<'_> {
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
        if server.index() >= MAX_SERVERS {
            outcome.refused = blocks.len() as u32;
            return outcome;
        }
        let mut last = None;
        if let Some(parent) = parent {
            last = self.held_block(server.0, parent);
            if last.is_none() {
                outcome.orphan = blocks.len() as u32;
                return outcome;
            }
        }
        let owner = Owner { server: server.0, tier: tier as u8 };
        self.begin(server);
        self.map.add(H_CLOCK, 1);
        let mut rest = blocks;
        while !rest.is_empty() {
            match self.store_stretch(owner, last, rest, count_refs, &mut outcome) {
                Ok((done, block)) => {
                    rest = &rest[done..];
                    last = Some(block);
                }
                Err(Stop::Full) => {
                    outcome.full = rest.len() as u32;
                    break;
                }
                Err(Stop::Refused) => {
                    outcome.refused = rest.len() as u32;
                    break;
                }
            }
        }
        self.end();
        outcome
    }

    fn held_block(&mut self, server: u16, hash: BlockHash) -> Option<Block> {
        let slot = self.map.find(hash.0)?;
        let place = self.map.slot_place(slot);
        self.map.load_holders(place.run, &mut self.list);
        holders::server_holds(&self.list, server, place.offset).then_some(Block { place, slot })
    }

    /// Stores as many of the first blocks as lie in one run. How many, and the last of them.
    fn store_stretch(
        &mut self,
        owner: Owner,
        parent: Option<Block>,
        blocks: &[Stored],
        count_refs: bool,
        outcome: &mut StoreOutcome,
    ) -> Result<(usize, Block), Stop> {
        let blocks = &blocks[..blocks.len().min(STRETCH)];
        if !self.make_room(blocks.len(), parent.map(|parent| parent.place.run)) {
            return Err(Stop::Full);
        }
        self.map.warm_slots(blocks.iter().map(|stored| stored.block));
        self.map.warm_entries(owner.server, blocks.iter().map(|stored| stored.engine));
        let stretch = self.plan(parent, blocks)?;
        self.drop_other_name(owner, blocks[0].engine, stretch.run, stretch.from, outcome);
        self.map.load_holders(stretch.run, &mut self.list);
        self.before.clone_from(&self.list);
        let counts = *outcome;
        let mut done = 0;
        for (offset, stored) in (stretch.from..).zip(&blocks[..stretch.blocks]) {
            let place = Place { run: stretch.run, offset };
            if !self.name_block(owner, place, stored.engine, count_refs, outcome) {
                break;
            }
            done += 1;
        }
        let Some(slot) = self.commit_stretch(&stretch, &blocks[..done]) else {
            *outcome = counts;
            self.shed(owner, Place { run: stretch.run, offset: stretch.from });
            return Err(Stop::Full);
        };
        let place = Place { run: stretch.run, offset: stretch.from + done as u32 - 1 };
        Ok((done, Block { place, slot }))
    }

    /// Finds out in which run the blocks after `parent` lie, and makes it if need be.
    fn plan(&mut self, parent: Option<Block>, blocks: &[Stored]) -> Result<Stretch, Stop> {
        let map = self.map;
        let first = blocks[0].block.0;
        if first == 0 {
            return Err(Stop::Refused);
        }
        let mut stretch = match map.find(first) {
            Some(slot) => {
                let Place { run, offset } = map.slot_place(slot);
                let before = match offset.checked_sub(1) {
                    Some(offset) => Some(Place { run, offset }),
                    None => map.run(run).and_then(|run| run.parent),
                };
                if before != parent.map(|parent| parent.place) {
                    return Err(Stop::Refused);
                }
                Stretch { run, from: offset, known: 1, blocks: 1 }
            }
            None => {
                let run = self.run_after(parent).ok_or(Stop::Full)?;
                let length = map.run(run).map_or(0, |run| run.length);
                Stretch { run, from: length, known: 0, blocks: 1 }
            }
        };
        let length = map.run(stretch.run).map_or(0, |run| run.length);
        for (index, stored) in blocks.iter().enumerate().skip(1) {
            let offset = stretch.from + index as u32;
            if offset >= RUN_BLOCKS || stored.block.0 == 0 {
                break;
            }
            match map.find(stored.block.0) {
                Some(slot) if map.slot_place(slot) == (Place { run: stretch.run, offset }) => {
                    stretch.known += 1;
                }
                None if offset >= length => {
                    if blocks[stretch.known..index].iter().any(|s| s.block == stored.block) {
                        break;
                    }
                }
                _ => break,
            }
            stretch.blocks += 1;
        }
        Ok(stretch)
    }

    /// The run that a new block after `parent` goes to, its own if the parent is a run's last.
    fn run_after(&self, parent: Option<Block>) -> Option<u32> {
        let Some(parent) = parent else { return self.map.new_run(None) };
        let next = parent.place.offset + 1;
        let length = self.map.run(parent.place.run)?.length;
        if next == length && next < RUN_BLOCKS {
            return Some(parent.place.run);
        }
        if self.map.children(parent.slot) == MOST_CHILDREN {
            return None;
        }
        self.map.new_run(Some((parent.place, parent.slot)))
    }

    /// If the engine's hash named another block before, that name is gone.
    fn drop_other_name(
        &mut self,
        owner: Owner,
        engine: EngineHash,
        run: u32,
        offset: u32,
        outcome: &mut StoreOutcome,
    ) {
        let found = self.map.find_entry(owner.server, owner.tier, engine.0);
        if let Some((at, entry)) = found.filter(|(_, e)| e.place != Place { run, offset }) {
            self.map.delete_entry(at, &entry);
            self.drop_hold(owner, entry.place);
            outcome.renamed += 1;
        }
    }

    /// Makes or refreshes the entry of a block of the run at hand. False if the engine's hash
    /// names another block: that has to be dropped first.
    fn name_block(
        &mut self,
        owner: Owner,
        place: Place,
        engine: EngineHash,
        count_refs: bool,
        outcome: &mut StoreOutcome,
    ) -> bool {
        let Owner { server, tier } = owner;
        match self.map.find_entry(server, tier, engine.0) {
            Some((_, entry)) if entry.place != place => return false,
            Some((at, entry)) => {
                if count_refs && entry.refs < MOST_REFS {
                    self.map.set_refs(at, entry, entry.refs + 1);
                }
                outcome.already += 1;
            }
            None => {
                self.map.insert_entry(&Entry { engine: engine.0, place, server, tier, refs: 1 });
                if holders::holds(&self.list, owner.key(), place.offset) {
                    self.map.add_alias(server, tier, place);
                } else {
                    holders::add(&mut self.list, owner.key(), place.offset);
                }
                outcome.stored += 1;
            }
        }
        true
    }

    /// Appends the new blocks and writes the holders, in one section. The last block's slot.
    fn commit_stretch(&mut self, stretch: &Stretch, blocks: &[Stored]) -> Option<u32> {
        let map = self.map;
        let (run, from) = (stretch.run, stretch.from);
        let mut slot = None;
        let whole = map.section(run, || {
            for (offset, stored) in (from..).zip(blocks).skip(stretch.known) {
                slot = map.push_block(run, offset, stored.block.0);
                if slot.is_none() {
                    return false;
                }
            }
            map.touch(run);
            self.list == self.before || map.store_holders(run, &self.list)
        });
        let last = blocks.last().filter(|_| whole)?;
        let held = |list: &[u64]| holders::held(list, from, from + blocks.len() as u32);
        map.add(H_HELD, held(&self.list) - held(&self.before));
        slot.or_else(|| map.find(last.block.0))
    }
}
