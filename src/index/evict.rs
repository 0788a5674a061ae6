//! Room: blocks that nobody holds go at once, the oldest runs go when the zone is full.
#![forbid(unsafe_code)]

use super::Writer;
use super::holders;
use super::layout::{H_ENTRIES, H_EVICTED, H_FRESH, H_KNOWN};

/// A pass looks at every entry, so it makes room for more than the call at hand.
const PASS: u64 = 16;
/// Blocks that one section takes out at most.
const POPS: u32 = 32;

impl Writer<'_> {
    fn has_room(&self, blocks: usize) -> bool {
        let (map, blocks) = (self.map, blocks as u64);
        // A new run, chunks for its slots, and intervals for each block in the worst case.
        let cells = 4 + blocks / 4;
        map.get(H_KNOWN) + blocks <= map.layout.most_blocks()
            && map.get(H_ENTRIES) + 2 * blocks <= map.layout.most_entries()
            && map.free_cells() >= cells
    }

    /// Makes room for `blocks` more, without the run `keep`. False if there is none to be made.
    pub(super) fn make_room(&mut self, blocks: usize, keep: Option<u32>) -> bool {
        while !self.has_room(blocks) {
            if !self.evict(keep) {
                return false;
            }
        }
        true
    }

    /// Runs without children, the longest ago stored into first: enough of them to hold a
    /// sixteenth of all entries. Ancestors of `keep` have a child.
    fn victims(&mut self, keep: Option<u32>) -> Vec<u32> {
        let map = self.map;
        let mut leaves: Vec<(u32, u32)> = (1..map.get(H_FRESH) as u32)
            .filter(|cell| map.run(*cell).is_some())
            .filter(|run| map.run_children(*run) == 0 && keep != Some(*run))
            .map(|run| (map.age(run), run))
            .collect();
        leaves.sort_unstable_by(|a, b| b.cmp(a));
        let (mut freed, wanted) = (0, map.get(H_ENTRIES) / PASS);
        let enough = leaves.iter().position(|(_, run)| {
            map.load_holders(*run, &mut self.list);
            freed += holders::total(&self.list);
            freed > wanted
        });
        leaves.truncate(enough.map_or(leaves.len(), |last| last + 1));
        leaves.into_iter().map(|(_, run)| run).collect()
    }

    /// Drops the oldest leaves. False if there are none.
    fn evict(&mut self, keep: Option<u32>) -> bool {
        let map = self.map;
        let victims = self.victims(keep);
        let mut doomed = vec![0u64; map.layout.cells as usize / 64 + 1];
        for run in &victims {
            doomed[*run as usize / 64] |= 1 << (run % 64);
            map.doom(*run);
        }
        let mut dropped = 0;
        map.sweep_entries(|entry| {
            let run = entry.run();
            let drop = doomed[run as usize / 64] >> (run % 64) & 1 == 1;
            dropped += i64::from(drop && !entry.is_alias());
            drop
        });
        map.add(H_EVICTED, dropped);
        for run in &victims {
            self.list.clear();
            self.replace_holders(*run);
            self.prune(*run);
        }
        !victims.is_empty()
    }

    /// Takes out the last blocks of a run that nobody holds and no run branches off from, and
    /// the run with its last block; then its parent's.
    pub(super) fn prune(&mut self, run: u32) {
        let map = self.map;
        let mut next = Some(run);
        while let Some(run) = next.take() {
            let Some(mut length) = map.run(run).map(|run| run.length) else { return };
            map.load_holders(run, &mut self.list);
            let reach = holders::reach(&self.list);
            let bare = |length| length > reach && map.children(map.last_slot(run, length)) == 0;
            while bare(length) {
                map.section(run, || {
                    for _ in 0..POPS {
                        if !bare(length) {
                            break;
                        }
                        map.pop_block(run, length);
                        length -= 1;
                    }
                });
            }
            if length == 0 {
                next = map.free_run(run).map(|parent| parent.run);
            }
        }
    }
}
