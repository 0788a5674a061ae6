//! Changes: one writer at a time.
#![forbid(unsafe_code)]

use std::sync::atomic::AtomicU64;

use super::entries::{Entry, MOST_REFS};
use super::holders;
use super::layout::{H_CLOCK, H_EVICTED, H_HELD, H_JOURNAL, Map, Place, RUN_BLOCKS};
use super::table::MOST_CHILDREN;
use super::{Index, IndexError, MAX_SERVERS, RemoveOutcome, StoreOutcome, Stored, Takeover};
use crate::types::{BlockHash, EngineHash, ServerId, Tier};

/// Blocks that one section stores at most; readers of the run wait that long.
const STRETCH: usize = 32;

/// The one that may change an index. The caller sees to it that there is one at a time.
pub struct Writer<'z> {
    pub(super) map: Map<'z>,
    /// Intervals of the run at hand.
    pub(super) list: Vec<u64>,
    before: Vec<u64>,
    /// Runs whose last blocks may be held by nobody.
    pub(super) bare: Vec<u32>,
}

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

/// Whose blocks a call is about.
#[derive(Clone, Copy)]
struct Owner {
    server: u16,
    tier: u8,
}

impl Owner {
    fn key(self) -> u64 {
        holders::key(self.server, self.tier)
    }
}

impl<'z> Writer<'z> {
    /// Takes over an index, after the writer before it finished or died.
    pub fn attach(words: &'z [AtomicU64]) -> Result<(Self, Takeover), IndexError> {
        let map = Map::open(words)?;
        let (list, before, bare) = (Vec::new(), Vec::new(), Vec::new());
        let mut writer = Writer { map, list, before, bare };
        let torn = writer.repair();
        Ok((writer, Takeover { torn }))
    }

    pub fn index(&self) -> Index<'z> {
        Index { map: self.map }
    }

    fn begin(&self, server: ServerId) {
        self.map.set(H_JOURNAL, u64::from(server.0) + 1);
    }

    fn end(&mut self) {
        while let Some(run) = self.bare.pop() {
            self.prune(run);
        }
        self.map.set(H_JOURNAL, 0);
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

    /// The block that an engine's hash names on this server, in any tier.
    pub fn resolve(&self, server: ServerId, engine: EngineHash) -> Option<BlockHash> {
        if server.index() >= MAX_SERVERS {
            return None;
        }
        let entry = self.map.find_best_entry(server.0, engine.0)?;
        self.map.block_hash(entry.place).map(BlockHash)
    }

    /// The block before `block`, `Some(None)` at the start of a prompt; `None` if `block` is not
    /// known.
    pub fn parent(&self, block: BlockHash) -> Option<Option<BlockHash>> {
        let Place { run, offset } = self.map.slot_place(self.map.find(block.0)?);
        let before = match offset.checked_sub(1) {
            Some(offset) => Some(Place { run, offset }),
            None => self.map.run(run)?.parent,
        };
        match before {
            Some(place) => Some(Some(BlockHash(self.map.block_hash(place)?))),
            None => Some(None),
        }
    }

    /// Takes one reference from each; children stay, the engine names each block that goes.
    pub fn remove(
        &mut self,
        server: ServerId,
        tier: Tier,
        engines: &[EngineHash],
    ) -> RemoveOutcome {
        let mut outcome = RemoveOutcome::default();
        if server.index() >= MAX_SERVERS {
            outcome.unknown = engines.len() as u32;
            return outcome;
        }
        let owner = Owner { server: server.0, tier: tier as u8 };
        self.begin(server);
        self.map.warm_entries(server.0, engines.iter().take(STRETCH).copied());
        for engine in engines {
            match self.map.find_entry(owner.server, owner.tier, engine.0) {
                None => outcome.unknown += 1,
                Some((at, entry)) if entry.refs > 1 => {
                    self.map.set_refs(at, entry, entry.refs - 1);
                    outcome.released += 1;
                }
                Some((at, entry)) => {
                    self.map.delete_entry(at, &entry);
                    self.drop_hold(owner, entry.place);
                    outcome.removed += 1;
                }
            }
        }
        self.end();
        outcome
    }

    /// A block has one name less.
    fn drop_hold(&mut self, owner: Owner, place: Place) {
        let map = self.map;
        if map.take_alias(owner.server, owner.tier, place) {
            return;
        }
        map.load_holders(place.run, &mut self.list);
        let held = holders::held(&self.list, place.offset, place.offset + 1);
        if !holders::remove(&mut self.list, owner.key(), place.offset) {
            return;
        }
        if !map.section(place.run, || map.store_holders(place.run, &self.list)) {
            return self.shed(owner, place);
        }
        map.add(H_HELD, holders::held(&self.list, place.offset, place.offset + 1) - held);
        if map.run(place.run).is_some_and(|run| run.length == place.offset + 1) {
            self.bare.push(place.run);
        }
    }

    /// No cell is left for one more interval: the owner loses the rest of the run, too.
    fn shed(&mut self, owner: Owner, place: Place) {
        let map = self.map;
        let mut shed = 0;
        map.sweep_entries(|entry| {
            let at = if entry.is_alias() { Place::of(entry.engine) } else { entry.place };
            let same_owner = entry.server == owner.server && entry.tier == owner.tier;
            let drop = same_owner && at.run == place.run && at.offset >= place.offset;
            shed += i64::from(drop && !entry.is_alias());
            drop
        });
        map.add(H_EVICTED, shed);
        map.load_holders(place.run, &mut self.list);
        holders::truncate(&mut self.list, owner.key(), place.offset);
        self.replace_holders(place.run);
    }

    /// Writes the intervals at hand to their run. False without cells for them, which cannot be
    /// where they are no more than before; nothing is changed then.
    pub(super) fn replace_holders(&mut self, run: u32) -> bool {
        let map = self.map;
        map.load_holders(run, &mut self.before);
        let length = map.run(run).map_or(0, |run| run.length);
        let whole = map.section(run, || map.store_holders(run, &self.list));
        if whole {
            let held = |list: &[u64]| holders::held(list, 0, length);
            map.add(H_HELD, held(&self.list) - held(&self.before));
            self.bare.push(run);
        }
        whole
    }

    /// Forgets all that a server holds, in every tier. Returns how many entries went.
    pub fn clear(&mut self, server: ServerId) -> u64 {
        if server.index() >= MAX_SERVERS {
            return 0;
        }
        let gone = self.index().server_blocks(server).iter().sum();
        if gone == 0 {
            // The sweep below goes over the whole index.
            return 0;
        }
        self.begin(server);
        let mut runs = Vec::new();
        self.map.sweep_entries(|entry| {
            let drop = entry.server == server.0;
            if drop && runs.last() != Some(&entry.run()) {
                runs.push(entry.run());
            }
            drop
        });
        runs.sort_unstable();
        runs.dedup();
        for run in runs {
            self.map.load_holders(run, &mut self.list);
            self.list.retain(|word| holders::server(*word) != server.0);
            self.replace_holders(run);
        }
        self.end();
        gone
    }
}
