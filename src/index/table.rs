//! The block table: a block's hash → its slot → its place.
//!
//! Lines of 4 slots, a cache line each. A slot is (hash, place │ runs that branch off here); hash
//! 0 is a free slot. The first slot of a line also counts the keys that found the line full.
#![forbid(unsafe_code)]

use std::hint;

use super::layout::{H_KNOWN, LINE_SLOTS, Map, Place, SLOT, spread};
use super::seqlock;
use crate::types::BlockHash;

const CHILDREN: u32 = Place::BITS;
pub(super) const MOST_CHILDREN: u64 = (1 << 20) - 1;
const PASSED: u32 = 56;
/// A line passed this often keeps its count until the next repair.
const MOST_PASSED: u64 = 255;

impl Map<'_> {
    #[inline]
    fn next_line(&self, line: usize) -> usize {
        if line + 1 == self.layout.lines { 0 } else { line + 1 }
    }

    #[inline]
    fn passed(&self, line: usize) -> u64 {
        self.get(self.line(line) + 1) >> PASSED
    }

    fn pass(&self, line: usize, delta: i64) {
        if self.passed(line) < MOST_PASSED {
            self.add(self.line(line) + 1, delta << PASSED);
        }
    }

    /// The slot of a block. Any process.
    #[inline]
    pub fn find(&self, hash: u64) -> Option<u32> {
        if hash == 0 {
            return None;
        }
        let mut line = spread(hash, self.layout.lines);
        for _ in 0..self.layout.lines {
            let at = self.line(line);
            for slot in 0..LINE_SLOTS {
                if self.get(at + slot * SLOT) == hash {
                    return Some((line * LINE_SLOTS + slot) as u32);
                }
            }
            if self.passed(line) == 0 {
                return None;
            }
            line = self.next_line(line);
        }
        None
    }

    /// Loads the lines where these blocks belong, so that the misses overlap.
    pub fn warm_slots(&self, blocks: impl Iterator<Item = BlockHash>) {
        let first = |b: BlockHash| self.get(self.line(spread(b.0, self.layout.lines)));
        hint::black_box(blocks.fold(0, |all, block| all ^ first(block)));
    }

    #[inline]
    pub fn slot_hash(&self, slot: u32) -> u64 {
        self.get(self.slot(slot))
    }

    #[inline]
    pub fn slot_place(&self, slot: u32) -> Place {
        Place::of(self.get(self.slot(slot) + 1))
    }

    /// Runs that branch off at a block.
    pub fn children(&self, slot: u32) -> u64 {
        self.get(self.slot(slot) + 1) >> CHILDREN & MOST_CHILDREN
    }

    pub fn count_child(&self, slot: u32, delta: i64) {
        self.add(self.slot(slot) + 1, delta << CHILDREN);
    }

    /// Puts in a block that is not there, in the section of its run. `None` without a free slot.
    pub fn insert(&self, hash: u64, place: Place) -> Option<u32> {
        let mut line = spread(hash, self.layout.lines);
        for _ in 0..self.layout.lines {
            let free = (0..LINE_SLOTS).find(|slot| self.get(self.line(line) + slot * SLOT) == 0);
            if let Some(free) = free {
                let slot = (line * LINE_SLOTS + free) as u32;
                let at = self.slot(slot);
                let passed = self.get(at + 1) >> PASSED << PASSED;
                seqlock::publish(self.word(at), self.word(at + 1), hash, passed | place.word());
                self.add(H_KNOWN, 1);
                return Some(slot);
            }
            self.pass(line, 1);
            line = self.next_line(line);
        }
        None
    }

    /// Takes a block out, in the section of its run.
    pub fn delete(&self, slot: u32) {
        let hash = self.slot_hash(slot);
        self.set(self.slot(slot), 0);
        let mut line = spread(hash, self.layout.lines);
        while line != slot as usize / LINE_SLOTS {
            self.pass(line, -1);
            line = self.next_line(line);
        }
        self.add(H_KNOWN, -1);
    }

    pub fn slots(&self) -> u32 {
        (self.layout.lines * LINE_SLOTS) as u32
    }

    /// Makes all counts of lines anew, and forgets all children.
    pub fn recount_slots(&self) {
        for slot in 0..self.slots() {
            self.set(self.slot(slot) + 1, self.slot_place(slot).word());
        }
        let mut known = 0;
        for slot in (0..self.slots()).filter(|slot| self.slot_hash(*slot) != 0) {
            known += 1;
            let mut line = spread(self.slot_hash(slot), self.layout.lines);
            while line != slot as usize / LINE_SLOTS {
                self.pass(line, 1);
                line = self.next_line(line);
            }
        }
        self.set(H_KNOWN, known);
    }
}
