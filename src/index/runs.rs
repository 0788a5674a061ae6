//! Runs: their headers, the slots of their blocks, their lists of holders, and the pool of cells.
//!
//! A header cell is: sequence, link, parent's slot │ children, chunks, base │ age, 3 intervals.
//! A chunk is: sequence, link, 6 words of payload. All but reading is the writer's.
#![forbid(unsafe_code)]

use super::layout::{CELL, H_CELLS, H_CLOCK, H_FREE, H_FRESH, Map, Place, RUN_BLOCKS};

const LINK: usize = 1;
const ORIGIN: usize = 2;
const CHUNKS: usize = 3;
const AGE: usize = 4;
const INLINE: usize = 5;

const INLINE_HOLDERS: usize = CELL - INLINE;
const CHUNK: usize = 2;
const CHUNK_HOLDERS: usize = CELL - CHUNK;
const CHUNK_SLOTS: u32 = 2 * (CELL - CHUNK) as u32;
/// Intervals of one run.
const MOST_HOLDERS: usize = 0xffff;

const LENGTH: u32 = 40;
const DOOMED: u64 = 1 << 61;
const KIND: u32 = 62;
const FREE: u64 = 0;
const RUN: u64 = 1;
const PART: u64 = 2;
const CELL_BITS: u64 = 0xff_ffff;

/// What a lookup needs of a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    /// Blocks.
    pub length: u32,
    /// The block before the first; none at the start of a prompt.
    pub parent: Option<Place>,
    /// Blocks of the prompt before the first.
    pub base: u32,
}

impl Map<'_> {
    /// The run of a cell, `None` if it holds something else now.
    pub fn run(&self, cell: u32) -> Option<Run> {
        if !self.is_cell(cell) {
            return None;
        }
        let at = self.cell(cell);
        let link = self.get(at + LINK);
        (link >> KIND == RUN).then(|| {
            let parent = Place::of(link);
            Run {
                length: (link >> LENGTH & 0x1fff) as u32,
                parent: (parent.run != 0).then_some(parent),
                base: self.get(at + AGE) as u32,
            }
        })
    }

    fn set_length(&self, run: u32, length: u32) {
        let at = self.cell(run) + LINK;
        let rest = self.get(at) & !(0x1fff << LENGTH);
        self.set(at, rest | u64::from(length) << LENGTH);
    }

    pub fn run_children(&self, run: u32) -> u64 {
        self.get(self.cell(run) + ORIGIN) >> 32
    }

    /// Counts a run that branches off at `slot`, a block of `run`.
    fn count_branch(&self, run: u32, slot: u32, delta: i64) {
        self.add(self.cell(run) + ORIGIN, delta << 32);
        self.count_child(slot, delta);
    }

    /// Marks a run whose entries are going, so that a repair goes on with it.
    pub fn doom(&self, run: u32) {
        let at = self.cell(run) + LINK;
        self.set(at, self.get(at) | DOOMED);
    }

    pub fn is_doomed(&self, run: u32) -> bool {
        self.get(self.cell(run) + LINK) & DOOMED != 0
    }

    /// Ticks since blocks were last stored in a run.
    pub fn age(&self, run: u32) -> u32 {
        (self.get(H_CLOCK) as u32).wrapping_sub((self.get(self.cell(run) + AGE) >> 32) as u32)
    }

    /// In the run's section.
    pub fn touch(&self, run: u32) {
        let at = self.cell(run) + AGE;
        self.set(at, self.get(at) & 0xffff_ffff | self.get(H_CLOCK) << 32);
    }

    pub fn free_cells(&self) -> u64 {
        u64::from(self.layout.cells) - 1 - self.get(H_CELLS)
    }

    fn take_cell(&self) -> Option<u32> {
        let free = self.get(H_FREE) as u32;
        let cell = if free != 0 {
            self.set(H_FREE, self.get(self.cell(free) + LINK) & CELL_BITS);
            free
        } else {
            let fresh = self.get(H_FRESH) as u32;
            if fresh >= self.layout.cells {
                return None;
            }
            self.set(H_FRESH, u64::from(fresh) + 1);
            fresh
        };
        self.add(H_CELLS, 1);
        Some(cell)
    }

    fn give_cell(&self, cell: u32) {
        self.set(self.cell(cell) + LINK, FREE << KIND | self.get(H_FREE));
        self.set(H_FREE, u64::from(cell));
        self.add(H_CELLS, -1);
    }

    fn take_chunk(&self, next: u32) -> Option<u32> {
        let cell = self.take_cell()?;
        self.set(self.cell(cell) + LINK, PART << KIND | u64::from(next));
        Some(cell)
    }

    fn next_chunk(&self, chunk: u32) -> u32 {
        (self.get(self.cell(chunk) + LINK) & CELL_BITS) as u32
    }

    /// An empty run after `parent`, a place and its slot.
    pub fn new_run(&self, parent: Option<(Place, u32)>) -> Option<u32> {
        let base = parent.and_then(|(place, _)| Some(self.run(place.run)?.base + place.offset + 1));
        let cell = self.take_cell()?;
        let at = self.cell(cell);
        self.section(cell, || {
            let (place, slot) = parent.map_or((0, 0), |(place, slot)| (place.word(), slot));
            self.set(at + ORIGIN, u64::from(slot));
            self.set(at + CHUNKS, 0);
            self.set(at + AGE, u64::from(base.unwrap_or(0)));
            self.touch(cell);
            self.set(at + LINK, RUN << KIND | place);
        });
        if let Some((place, slot)) = parent {
            self.count_branch(place.run, slot, 1);
        }
        Some(cell)
    }

    /// Frees a run without blocks; returns its parent.
    pub fn free_run(&self, run: u32) -> Option<Place> {
        let parent = self.run(run).and_then(|run| run.parent);
        let slot = self.get(self.cell(run) + ORIGIN) as u32;
        self.section(run, || self.give_cell(run));
        if let Some(parent) = parent {
            self.count_branch(parent.run, slot, -1);
        }
        parent
    }

    /// Word and shift of the slot number of block `offset`, which is in the last chunk.
    fn slot_at(&self, run: u32, offset: u32) -> (usize, u32) {
        let chunk = (self.get(self.cell(run) + CHUNKS) & CELL_BITS) as u32;
        let index = offset % CHUNK_SLOTS;
        (self.cell(chunk) + CHUNK + index as usize / 2, 32 * (index & 1))
    }

    fn set_last_chunk(&self, run: u32, chunk: u32) {
        let at = self.cell(run) + CHUNKS;
        self.set(at, self.get(at) & !CELL_BITS | u64::from(chunk));
    }

    /// Notes the slot of the block after the last, in the run's section. False without a cell.
    pub fn push_slot(&self, run: u32, offset: u32, slot: u32) -> bool {
        if offset.is_multiple_of(CHUNK_SLOTS) {
            let last = (self.get(self.cell(run) + CHUNKS) & CELL_BITS) as u32;
            let Some(chunk) = self.take_chunk(last) else { return false };
            self.set_last_chunk(run, chunk);
        }
        let (at, shift) = self.slot_at(run, offset);
        let rest = self.get(at) & !(0xffff_ffff << shift);
        self.set(at, rest | u64::from(slot) << shift);
        self.set_length(run, offset + 1);
        true
    }

    /// Appends a block, in the run's section; its slot. `None` without room.
    pub fn push_block(&self, run: u32, offset: u32, hash: u64) -> Option<u32> {
        if offset >= RUN_BLOCKS {
            return None;
        }
        if offset.is_multiple_of(CHUNK_SLOTS) && self.free_cells() == 0 {
            return None;
        }
        let slot = self.insert(hash, Place { run, offset })?;
        self.push_slot(run, offset, slot).then_some(slot)
    }

    pub fn last_slot(&self, run: u32, length: u32) -> u32 {
        let (at, shift) = self.slot_at(run, length - 1);
        (self.get(at) >> shift) as u32
    }

    /// The hash of a block, from the last one back.
    pub fn block_hash(&self, place: Place) -> Option<u64> {
        let mut at = self.run(place.run)?.length.checked_sub(1)? / CHUNK_SLOTS;
        let mut chunk = (self.get(self.cell(place.run) + CHUNKS) & CELL_BITS) as u32;
        while at > place.offset / CHUNK_SLOTS {
            chunk = self.next_chunk(chunk);
            at -= 1;
        }
        let index = place.offset % CHUNK_SLOTS;
        let word = self.get(self.cell(chunk) + CHUNK + index as usize / 2);
        Some(self.slot_hash((word >> (32 * (index & 1))) as u32))
    }

    /// Takes the last block out, in the run's section.
    pub fn pop_block(&self, run: u32, length: u32) {
        self.delete(self.last_slot(run, length));
        self.set_length(run, length - 1);
        if (length - 1).is_multiple_of(CHUNK_SLOTS) {
            let chunk = (self.get(self.cell(run) + CHUNKS) & CELL_BITS) as u32;
            let before = self.next_chunk(chunk);
            self.set_last_chunk(run, before);
            self.give_cell(chunk);
        }
    }

    /// First chunk of holders, and how many intervals there are.
    fn holder_chunks(&self, run: u32) -> (u32, usize) {
        let word = self.get(self.cell(run) + CHUNKS);
        ((word >> 24 & CELL_BITS) as u32, (word >> 48) as usize)
    }

    /// Calls `each` with every interval of a run. A reader does so in a section; false if what it
    /// met was no list.
    #[inline]
    pub fn each_holder(&self, run: u32, mut each: impl FnMut(u64)) -> bool {
        let (mut chunk, count) = self.holder_chunks(run);
        let inline = self.cell(run) + INLINE;
        for index in 0..count.min(INLINE_HOLDERS) {
            each(self.get(inline + index));
        }
        let mut left = count.saturating_sub(INLINE_HOLDERS);
        while left > 0 {
            if !self.is_cell(chunk) {
                return false;
            }
            let at = self.cell(chunk);
            let next = self.get(at + LINK);
            if next >> KIND != PART {
                return false;
            }
            for index in 0..left.min(CHUNK_HOLDERS) {
                each(self.get(at + CHUNK + index));
            }
            left = left.saturating_sub(CHUNK_HOLDERS);
            chunk = (next & CELL_BITS) as u32;
        }
        true
    }

    /// Replaces what `list` holds by the run's intervals.
    pub fn load_holders(&self, run: u32, list: &mut Vec<u64>) -> bool {
        list.clear();
        self.each_holder(run, |word| list.push(word))
    }

    /// Replaces the run's intervals, in its section. False without cells, nothing is changed then.
    pub fn store_holders(&self, run: u32, list: &[u64]) -> bool {
        let chunks = |count: usize| count.saturating_sub(INLINE_HOLDERS).div_ceil(CHUNK_HOLDERS);
        let (mut first, count) = self.holder_chunks(run);
        let (have, need) = (chunks(count), chunks(list.len()));
        if list.len() > MOST_HOLDERS || need as u64 > have as u64 + self.free_cells() {
            return false;
        }
        for _ in have..need {
            // There is one: the pool was asked above.
            first = self.take_chunk(first).unwrap_or(first);
        }
        for _ in need..have {
            let next = self.next_chunk(first);
            self.give_cell(first);
            first = next;
        }
        let at = self.cell(run);
        let (inline, rest) = list.split_at(list.len().min(INLINE_HOLDERS));
        self.store_changed(at + INLINE, inline);
        let mut chunk = first;
        for part in rest.chunks(CHUNK_HOLDERS) {
            self.store_changed(self.cell(chunk) + CHUNK, part);
            chunk = self.next_chunk(chunk);
        }
        let last = self.get(at + CHUNKS) & CELL_BITS;
        self.set(at + CHUNKS, last | u64::from(first) << 24 | (list.len() as u64) << 48);
        true
    }

    fn store_changed(&self, at: usize, words: &[u64]) {
        for (index, word) in words.iter().enumerate() {
            if self.get(at + index) != *word {
                self.set(at + index, *word);
            }
        }
    }

    /// After a crash: an empty pool but for the runs of `live`, sorted, which get empty lists.
    pub fn reset_cells(&self, live: &[u32]) {
        self.set(H_FREE, 0);
        self.set(H_CELLS, live.len() as u64);
        self.set(H_FRESH, u64::from(self.layout.cells));
        let mut live = live.iter().rev().copied().peekable();
        for cell in (1..self.layout.cells).rev() {
            if live.next_if_eq(&cell).is_some() {
                self.set_length(cell, 0);
                self.set(self.cell(cell) + CHUNKS, 0);
                let origin = self.cell(cell) + ORIGIN;
                self.set(origin, self.get(origin) & 0xffff_ffff);
            } else {
                self.set(self.cell(cell) + LINK, FREE << KIND | self.get(H_FREE));
                self.set(H_FREE, u64::from(cell));
            }
        }
    }

    /// Counts a live run at its parent, after [`Map::reset_cells`].
    pub fn recount_branch(&self, run: u32) {
        let slot = self.get(self.cell(run) + ORIGIN) as u32;
        if let Some(parent) = self.run(run).and_then(|run| run.parent) {
            self.count_branch(parent.run, slot, 1);
        }
    }
}
