//! Where everything lies in the words of the zone.
//!
//! ```text
//! header │ one row for each server │ block table │ entry table │ cells …
//! ```
//!
//! - The **block table** leads from a block's hash to its place: a run and an offset in it.
//! - A **run** is a stretch of blocks, each the parent of the next. Other runs may branch off at
//!   any of its blocks. It lists its holders as intervals (server, tier, from, to).
//! - The **entry table** leads from (server, tier, engine's hash) to the place, with references.
//!   Only the writer reads it.
//! - **Cells** of 8 words hold run headers and the chunks of their lists.
#![forbid(unsafe_code)]

use std::sync::atomic::AtomicU64;

use super::IndexError;
use super::MAX_SERVERS;
use super::seqlock::{self, Word};

const MAGIC: u64 = u64::from_le_bytes(*b"kvcindex");
const VERSION: u64 = 3;

/// Header words: what readers look at, then from 8 on what only the writer stores.
const H_MAGIC: usize = 0;
const H_VERSION: usize = 1;
const H_WORDS: usize = 2;
pub(super) const H_REPAIR: usize = 3;
pub(super) const H_JOURNAL: usize = 8;
pub(super) const H_ENTRIES: usize = 9;
pub(super) const H_KNOWN: usize = 10;
pub(super) const H_HELD: usize = 11;
pub(super) const H_EVICTED: usize = 12;
/// First free cell, first cell that was never used, and cells in use.
pub(super) const H_FREE: usize = 13;
pub(super) const H_FRESH: usize = 14;
pub(super) const H_CELLS: usize = 15;
/// Counts stores; what the age of runs is measured in.
pub(super) const H_CLOCK: usize = 16;
const HEADER: usize = 24;

/// A server's row: entries by tier, two tiers a word, then blocks named twice.
const ROW: usize = 4;
const ROW_ALIASES: usize = 2;

pub(super) const LINE_SLOTS: usize = 4;
pub(super) const SLOT: usize = 2;
pub(super) const CELL: usize = 8;

/// The zone is cut in the proportion of 3 lines of blocks, 16 entries and 2 cells: enough blocks
/// where three quarters of what is held are distinct, enough cells for runs of 8 blocks.
const UNIT_LINES: usize = 3;
const UNIT_ENTRIES: usize = 16;
const UNIT_CELLS: usize = 2;
const UNIT: usize = UNIT_LINES * LINE_SLOTS * SLOT + UNIT_ENTRIES * SLOT + UNIT_CELLS * CELL;
const LEAST_UNITS: usize = 8;
/// The cell numbers 0 and `NO_CELL` mean something else.
pub(super) const NO_CELL: u32 = (1 << 24) - 1;

/// Blocks in a run.
pub(super) const RUN_BLOCKS: u32 = 1 << 12;

/// A block's place: a run, named by its header's cell, and an offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    pub run: u32,
    pub offset: u32,
}

impl Place {
    pub const BITS: u32 = 36;

    pub fn word(self) -> u64 {
        u64::from(self.run) << 12 | u64::from(self.offset)
    }

    /// The place in the low bits of `word`; the other bits are the caller's.
    pub fn of(word: u64) -> Place {
        Place { run: (word >> 12 & 0xff_ffff) as u32, offset: (word & 0xfff) as u32 }
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    pub lines: usize,
    pub entries: usize,
    pub cells: u32,
    lines_at: usize,
    entries_at: usize,
    cells_at: usize,
}

impl Layout {
    fn of(words: usize) -> Result<Layout, IndexError> {
        let fixed = HEADER + MAX_SERVERS * ROW;
        let units = words.saturating_sub(fixed) / UNIT;
        if units < LEAST_UNITS {
            return Err(IndexError::TooSmall(words));
        }
        let (lines, entries) = (units * UNIT_LINES, units * UNIT_ENTRIES);
        let entries_at = fixed + lines * LINE_SLOTS * SLOT;
        let cells = (units * UNIT_CELLS).min(NO_CELL as usize) as u32;
        let cells_at = entries_at + entries * SLOT;
        Ok(Layout { lines, entries, cells, lines_at: fixed, entries_at, cells_at })
    }

    /// Blocks and entries beyond which the tables get slow.
    pub fn most_blocks(&self) -> u64 {
        (self.lines * LINE_SLOTS * 7 / 8) as u64
    }

    pub fn most_entries(&self) -> u64 {
        (self.entries * 13 / 16) as u64
    }
}

/// The words with their layout; what readers and the writer share.
#[derive(Clone, Copy)]
pub(super) struct Map<'z> {
    words: &'z [AtomicU64],
    pub layout: Layout,
}

impl<'z> Map<'z> {
    pub fn format(words: &'z [AtomicU64]) -> Result<Self, IndexError> {
        let map = Map { words, layout: Layout::of(words.len())? };
        for word in words {
            word.set(0);
        }
        map.set(H_VERSION, VERSION);
        map.set(H_WORDS, words.len() as u64);
        map.set(H_FRESH, 1);
        map.set(H_MAGIC, MAGIC);
        Ok(map)
    }

    pub fn open(words: &'z [AtomicU64]) -> Result<Self, IndexError> {
        let layout = Layout::of(words.len())?;
        let map = Map { words, layout };
        if map.get(H_MAGIC) != MAGIC {
            return Err(IndexError::NotAnIndex);
        }
        let found = map.get(H_VERSION);
        if found != VERSION {
            return Err(IndexError::Layout { found, expected: VERSION });
        }
        let (found, have) = (map.get(H_WORDS), words.len() as u64);
        if found != have {
            return Err(IndexError::Size { found, have });
        }
        Ok(map)
    }

    #[inline(always)]
    pub fn get(&self, at: usize) -> u64 {
        self.words[at].get()
    }

    #[inline(always)]
    pub fn set(&self, at: usize, value: u64) {
        self.words[at].set(value);
    }

    pub fn add(&self, at: usize, delta: i64) {
        self.set(at, self.get(at).wrapping_add_signed(delta));
    }

    #[inline(always)]
    pub fn word(&self, at: usize) -> &'z AtomicU64 {
        &self.words[at]
    }

    /// Bytes of the zone, and those that never hold blocks.
    pub fn bytes(&self) -> (u64, u64) {
        (self.words.len() as u64 * 8, self.layout.lines_at as u64 * 8)
    }

    /// First word of the line `line` of the block table.
    #[inline(always)]
    pub fn line(&self, line: usize) -> usize {
        self.layout.lines_at + line * LINE_SLOTS * SLOT
    }

    /// First word of a slot of the block table.
    #[inline(always)]
    pub fn slot(&self, slot: u32) -> usize {
        self.layout.lines_at + slot as usize * SLOT
    }

    /// First word of an entry.
    #[inline(always)]
    pub fn entry(&self, entry: usize) -> usize {
        self.layout.entries_at + entry * SLOT
    }

    /// First word of a cell that is known to be one.
    #[inline(always)]
    pub fn cell(&self, cell: u32) -> usize {
        self.layout.cells_at + cell as usize * CELL
    }

    /// Whether a number read without a guarantee is that of a cell.
    #[inline(always)]
    pub fn is_cell(&self, cell: u32) -> bool {
        cell != 0 && cell < self.layout.cells
    }

    /// The sequence word of a run.
    #[inline(always)]
    pub fn sequence(&self, run: u32) -> &'z AtomicU64 {
        &self.words[self.cell(run)]
    }

    /// Changes a run in a section.
    pub fn section<T>(&self, run: u32, change: impl FnOnce() -> T) -> T {
        let sequence = self.sequence(run);
        seqlock::enter(sequence);
        let value = change();
        seqlock::leave(sequence);
        value
    }

    pub fn server_entries(&self, server: u16, tier: u8) -> u64 {
        let at = HEADER + usize::from(server) * ROW + usize::from(tier / 2);
        self.get(at) >> (32 * (tier & 1)) & 0xffff_ffff
    }

    pub fn count_entry(&self, server: u16, tier: u8, delta: i64) {
        let at = HEADER + usize::from(server) * ROW + usize::from(tier / 2);
        self.add(at, delta << (32 * (tier & 1)));
        self.add(H_ENTRIES, delta);
    }

    pub fn aliases(&self, server: u16) -> u64 {
        self.get(HEADER + usize::from(server) * ROW + ROW_ALIASES)
    }

    pub fn count_alias(&self, server: u16, delta: i64) {
        self.add(HEADER + usize::from(server) * ROW + ROW_ALIASES, delta);
        self.add(H_ENTRIES, delta);
    }

    /// Empties all rows, for a recount.
    pub fn clear_rows(&self) {
        for at in HEADER..HEADER + MAX_SERVERS * ROW {
            self.set(at, 0);
        }
        self.set(H_ENTRIES, 0);
    }
}

/// Spreads a key over `range` places. The multiplications move every bit of the key up, where
/// the product's high half looks.
#[inline(always)]
pub(super) fn spread(key: u64, range: usize) -> usize {
    let mixed = (key ^ key >> 32).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mixed = (mixed ^ mixed >> 29).wrapping_mul(0xd1b5_4a32_d192_ed03);
    ((u128::from(mixed) * range as u128) >> 64) as usize
}
