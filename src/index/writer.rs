//! Changes: one writer at a time.
#![forbid(unsafe_code)]

use std::sync::atomic::AtomicU64;

use super::holders;
use super::layout::{H_EVICTED, H_HELD, H_JOURNAL, Map, Place};
use super::store::STRETCH;
use super::{Index, IndexError, MAX_SERVERS, RemoveOutcome, Takeover};
use crate::types::{BlockHash, EngineHash, ServerId, Tier};

/// The one that may change an index. The caller sees to it that there is one at a time.
pub struct Writer<'z> {
    pub(super) map: Map<'z>,
    /// Intervals of the run at hand.
    pub(super) list: Vec<u64>,
    pub(super) before: Vec<u64>,
    /// Runs whose last blocks may be held by nobody.
    pub(super) bare: Vec<u32>,
}

/// Whose blocks a call is about.
#[derive(Clone, Copy)]
pub(super) struct Owner {
    pub server: u16,
    pub tier: u8,
}

impl Owner {
    pub(super) fn key(self) -> u64 {
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

    pub(super) fn begin(&self, server: ServerId) {
        self.map.set(H_JOURNAL, u64::from(server.0) + 1);
    }

    pub(super) fn end(&mut self) {
        while let Some(run) = self.bare.pop() {
            self.prune(run);
        }
        self.map.set(H_JOURNAL, 0);
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
    pub(super) fn drop_hold(&mut self, owner: Owner, place: Place) {
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
    pub(super) fn shed(&mut self, owner: Owner, place: Place) {
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
