//! What a new writer does after one that died in the middle of a call.
//!
//! Entries, and the slots of blocks with the parents of their runs, are whole at every instant
//! (see [`super::seqlock`]). All else is made anew from them: a pass over the zone, with 16 bytes
//! for each entry and block on the heap. Readers are told that the index is busy meanwhile.
#![forbid(unsafe_code)]

use super::layout::{H_EVICTED, H_HELD, H_JOURNAL, H_REPAIR, Map, Place};
use super::seqlock::{enter, leave, read};
use super::{Writer, holders};
use crate::types::ServerId;

impl Writer<'_> {
    /// Repairs the index if the writer before died in a call; the servers whose blocks went.
    /// A repair that is killed itself is done again from the start.
    pub(super) fn repair(&mut self) -> Vec<ServerId> {
        let map = self.map;
        let journal = map.get(H_JOURNAL);
        if journal == 0 && read(map.word(H_REPAIR)).is_some() {
            return Vec::new();
        }
        let torn = journal.checked_sub(1).map(|server| server as u16);
        enter(map.word(H_REPAIR));
        let runs = self.rebuild_runs();
        self.rebuild_holders(torn, &runs);
        self.bare.clear();
        for run in runs {
            self.prune(run);
        }
        leave(map.word(H_REPAIR));
        // Last: a kill before it is told of the torn server again.
        map.set(H_JOURNAL, 0);
        torn.map(ServerId).into_iter().collect()
    }

    /// Runs with their blocks and branches, no holders. The runs that are there, sorted.
    fn rebuild_runs(&mut self) -> Vec<u32> {
        let map = self.map;
        map.recount_slots();
        let mut slots: Vec<(Place, u32)> = (0..map.slots())
            .filter(|slot| map.slot_hash(*slot) != 0)
            .map(|slot| (map.slot_place(slot), slot))
            .collect();
        slots.sort_unstable();
        let mut runs: Vec<u32> = slots.iter().map(|(place, _)| place.run).collect();
        runs.dedup();
        map.close_sections();
        map.reset_cells(&runs);
        for (place, slot) in &slots {
            // There are as many cells as there were.
            map.push_slot(place.run, place.offset, *slot);
        }
        for run in &runs {
            map.recount_branch(*run);
        }
        runs
    }

    /// Intervals from entries. Those of the torn server and of runs that were being evicted go.
    fn rebuild_holders(&mut self, torn: Option<u16>, runs: &[u32]) {
        let map = self.map;
        map.rehash_entries();
        let doomed: Vec<u32> = runs.iter().copied().filter(|run| map.is_doomed(*run)).collect();
        map.sweep_entries(|entry| {
            torn == Some(entry.server) || doomed.binary_search(&entry.run()).is_ok()
        });
        map.recount_entries();
        map.set(H_HELD, 0);
        let mut held: Vec<(u32, u64, u32)> = (0..map.layout.entries)
            .filter_map(|at| map.entry_at(at))
            .filter(|entry| !entry.is_alias())
            .map(|e| (e.place.run, holders::key(e.server, e.tier), e.place.offset))
            .collect();
        held.sort_unstable();
        held.dedup();
        let mut lost = Vec::new();
        for part in held.chunk_by(|a, b| a.0 == b.0) {
            self.list.clear();
            for (_, key, offset) in part {
                holders::add(&mut self.list, *key, *offset);
            }
            if !self.replace_holders(part[0].0) {
                lost.push(part[0].0);
            }
        }
        self.lose(&lost);
    }

    /// Drops the entries of runs whose intervals found no cells.
    fn lose(&mut self, runs: &[u32]) {
        if runs.is_empty() {
            return;
        }
        let mut lost = 0;
        self.map.sweep_entries(|entry| {
            let drop = runs.binary_search(&entry.run()).is_ok();
            lost += i64::from(drop && !entry.is_alias());
            drop
        });
        self.map.add(H_EVICTED, lost);
    }
}

impl Map<'_> {
    /// Ends the sections that were left open.
    fn close_sections(&self) {
        for cell in 1..self.layout.cells {
            let sequence = self.sequence(cell);
            if read(sequence).is_none() {
                leave(sequence);
            }
        }
    }
}
