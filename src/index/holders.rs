//! Who holds which blocks of a run: a sorted list of intervals. Plain arithmetic on words.
//!
//! An interval is (server, tier, from, to), `to` exclusive and never 0. Intervals of one server
//! and tier neither overlap nor touch.
#![forbid(unsafe_code)]

use crate::types::{Overlap, Tier};

const TIER: u32 = 25;
const FROM: u32 = 13;

/// A server and a tier, as the list is sorted.
pub(super) fn key(server: u16, tier: u8) -> u64 {
    u64::from(server) << 2 | u64::from(tier)
}

fn interval(key: u64, from: u32, to: u32) -> u64 {
    key << TIER | u64::from(from) << FROM | u64::from(to)
}

fn key_of(word: u64) -> u64 {
    word >> TIER
}

pub(super) fn server(word: u64) -> u16 {
    (word >> (TIER + 2) & 0x7ff) as u16
}

pub(super) fn tier(word: u64) -> usize {
    (word >> TIER & 3) as usize
}

pub(super) fn from(word: u64) -> u32 {
    (word >> FROM & 0xfff) as u32
}

pub(super) fn to(word: u64) -> u32 {
    (word & 0x1fff) as u32
}

/// Index of the first interval that begins after `offset`, or belongs to a later key.
fn after(list: &[u64], key: u64, offset: u32) -> usize {
    let bound = interval(key, offset, 0x1fff);
    list.partition_point(|word| *word <= bound)
}

pub(super) fn holds(list: &[u64], key: u64, offset: u32) -> bool {
    after(list, key, offset)
        .checked_sub(1)
        .is_some_and(|before| key_of(list[before]) == key && to(list[before]) > offset)
}

/// Whether the server holds the block in any tier.
pub(super) fn server_holds(list: &[u64], server: u16, offset: u32) -> bool {
    (0..Tier::COUNT as u8).any(|tier| holds(list, key(server, tier), offset))
}

/// Adds a block that is not held.
pub(super) fn add(list: &mut Vec<u64>, key: u64, offset: u32) {
    let at = after(list, key, offset);
    let left = at.checked_sub(1).filter(|left| {
        let word = list[*left];
        key_of(word) == key && to(word) == offset
    });
    let right = list.get(at).copied().filter(|w| key_of(*w) == key && from(*w) == offset + 1);
    match (left, right) {
        (Some(left), Some(right)) => {
            list[left] = interval(key, from(list[left]), to(right));
            list.remove(at);
        }
        (Some(left), None) => list[left] += 1,
        (None, Some(right)) => list[at] = interval(key, offset, to(right)),
        (None, None) => list.insert(at, interval(key, offset, offset + 1)),
    }
}

/// Removes a block; false if it was not held.
pub(super) fn remove(list: &mut Vec<u64>, key: u64, offset: u32) -> bool {
    if !holds(list, key, offset) {
        return false;
    }
    let at = after(list, key, offset) - 1;
    let (from, to) = (from(list[at]), to(list[at]));
    match (from == offset, to == offset + 1) {
        (true, true) => drop(list.remove(at)),
        (true, false) => list[at] = interval(key, offset + 1, to),
        (false, true) => list[at] -= 1,
        (false, false) => {
            list[at] = interval(key, from, offset);
            list.insert(at + 1, interval(key, offset + 1, to));
        }
    }
    true
}

/// Cuts what a key holds at `offset`.
pub(super) fn truncate(list: &mut Vec<u64>, key: u64, offset: u32) {
    list.retain(|word| key_of(*word) != key || from(*word) < offset);
    for word in list.iter_mut().filter(|word| key_of(**word) == key && to(**word) > offset) {
        *word = interval(key, from(*word), offset);
    }
}

/// Offset after the last block that anybody holds.
pub(super) fn reach(list: &[u64]) -> u32 {
    list.iter().map(|word| to(*word)).max().unwrap_or(0)
}

/// Which of the 64 blocks from `at` on anybody holds.
fn window(list: &[u64], at: u32) -> u64 {
    list.iter().fold(0, |mask, word| {
        let from = from(*word).saturating_sub(at);
        let to = to(*word).saturating_sub(at).min(64);
        if from >= to { mask } else { mask | (u64::MAX >> (64 - (to - from)) << from) }
    })
}

/// How many of the blocks in `at..end` anybody holds, counted in steps of 64.
pub(super) fn held(list: &[u64], at: u32, end: u32) -> i64 {
    (at..end).step_by(64).map(|at| i64::from(window(list, at).count_ones())).sum()
}

/// Sum of all intervals.
pub(super) fn total(list: &[u64]) -> u64 {
    list.iter().map(|word| u64::from(to(*word) - from(*word))).sum()
}

/// Adds to a server's overlap what its intervals in one run give it, up to the block `end` of the
/// run: without a hole from the first block on, each block in its best tier.
pub(super) fn credit(group: &[u64], end: u32, overlap: &mut Overlap) {
    let mut next = [0; Tier::COUNT];
    let mut stop = [0; Tier::COUNT];
    for tier in 0..Tier::COUNT {
        next[tier] = group.partition_point(|word| self::tier(*word) < tier);
        stop[tier] = group.partition_point(|word| self::tier(*word) <= tier);
    }
    let mut at = 0;
    while at < end {
        let mut limit = end;
        let mut best = None;
        for tier in 0..Tier::COUNT {
            while next[tier] < stop[tier] && to(group[next[tier]]) <= at {
                next[tier] += 1;
            }
            if next[tier] == stop[tier] {
                continue;
            }
            let word = group[next[tier]];
            if from(word) <= at {
                limit = limit.min(to(word));
                best = Some(tier);
                break;
            }
            limit = limit.min(from(word));
        }
        let Some(tier) = best else { break };
        overlap.blocks += limit - at;
        overlap.tiers[tier] += limit - at;
        at = limit;
    }
}
