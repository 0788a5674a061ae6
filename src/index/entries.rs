//! The entry table: (server, tier, engine's hash) → place, with references. Only the writer looks.
//!
//! Linear probing over pairs of words: the engine's hash, then everything else; a second word of
//! 0 is a free pair. Deleting closes the gap. A block that one server names twice in one tier has
//! an *alias* too, which counts the names but the first; its first word is the place.
#![forbid(unsafe_code)]

use std::hint;

use super::layout::{Map, NO_CELL, Place, spread};
use crate::types::EngineHash;

pub(super) const MOST_REFS: u32 = 0x7fff;
const TIER: u32 = 15;
const SERVER: u32 = 17;
const PLACE: u32 = 28;
const ALIAS: Place = Place { run: NO_CELL, offset: 0 };

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub engine: u64,
    pub place: Place,
    pub server: u16,
    pub tier: u8,
    pub refs: u32,
}

impl Entry {
    fn alias(server: u16, tier: u8, place: Place, refs: u32) -> Entry {
        Entry { engine: place.word(), place: ALIAS, server, tier, refs }
    }

    pub fn is_alias(&self) -> bool {
        self.place == ALIAS
    }

    /// The run that the entry, or the block an alias is for, lies in.
    pub fn run(&self) -> u32 {
        if self.is_alias() { Place::of(self.engine).run } else { self.place.run }
    }

    fn word(&self) -> u64 {
        self.place.word() << PLACE
            | u64::from(self.server) << SERVER
            | u64::from(self.tier) << TIER
            | u64::from(self.refs)
    }

    fn of(engine: u64, word: u64) -> Entry {
        Entry {
            engine,
            place: Place::of(word >> PLACE),
            server: (word >> SERVER & 0x7ff) as u16,
            tier: (word >> TIER & 3) as u8,
            refs: (word & u64::from(MOST_REFS)) as u32,
        }
    }

    fn same_name(&self, other: &Entry) -> bool {
        self.engine == other.engine
            && self.server == other.server
            && self.tier == other.tier
            && self.is_alias() == other.is_alias()
    }
}

impl Map<'_> {
    /// Tiers share a home, so that one probe finds all of them.
    fn home(&self, engine: u64, server: u16) -> usize {
        let key = engine ^ (u64::from(server) + 1).wrapping_mul(0xa24b_aed4_963e_e407);
        spread(key, self.layout.entries)
    }

    /// Loads where the search for these names begins, so that the misses overlap.
    pub fn warm_entries(&self, server: u16, engines: impl Iterator<Item = EngineHash>) {
        let first = |e: EngineHash| self.get(self.entry(self.home(e.0, server)) + 1);
        hint::black_box(engines.fold(0, |all, engine| all ^ first(engine)));
    }

    fn next_entry(&self, at: usize) -> usize {
        if at + 1 == self.layout.entries { 0 } else { at + 1 }
    }

    pub fn entry_at(&self, at: usize) -> Option<Entry> {
        let word = self.get(self.entry(at) + 1);
        (word != 0).then(|| Entry::of(self.get(self.entry(at)), word))
    }

    /// Live entries from the home of (engine, server) on, up to the first gap.
    fn cluster(&self, engine: u64, server: u16) -> impl Iterator<Item = (usize, Entry)> + '_ {
        let home = self.home(engine, server);
        (home..self.layout.entries).chain(0..home).map_while(|at| Some((at, self.entry_at(at)?)))
    }

    pub fn find_entry(&self, server: u16, tier: u8, engine: u64) -> Option<(usize, Entry)> {
        self.cluster(engine, server).find(|(_, e)| {
            e.engine == engine && e.server == server && e.tier == tier && !e.is_alias()
        })
    }

    /// The entry of the best tier.
    pub fn find_best_entry(&self, server: u16, engine: u64) -> Option<Entry> {
        self.cluster(engine, server)
            .map(|(_, entry)| entry)
            .filter(|e| e.engine == engine && e.server == server && !e.is_alias())
            .min_by_key(|entry| entry.tier)
    }

    fn find_alias(&self, server: u16, tier: u8, place: Place) -> Option<(usize, Entry)> {
        let wanted = Entry::alias(server, tier, place, 0);
        self.cluster(wanted.engine, server).find(|(_, entry)| entry.same_name(&wanted))
    }

    fn put_entry(&self, at: usize, entry: &Entry) {
        self.set(self.entry(at), entry.engine);
        self.set(self.entry(at) + 1, entry.word());
    }

    pub fn set_refs(&self, at: usize, mut entry: Entry, refs: u32) {
        entry.refs = refs;
        self.set(self.entry(at) + 1, entry.word());
    }

    fn count(&self, entry: &Entry, delta: i64) {
        if entry.is_alias() {
            self.count_alias(entry.server, delta);
        } else {
            self.count_entry(entry.server, entry.tier, delta);
        }
    }

    /// Puts in an entry that is not there. The caller sees to it that there is room.
    pub fn insert_entry(&self, entry: &Entry) {
        let mut at = self.home(entry.engine, entry.server);
        while self.entry_at(at).is_some() {
            at = self.next_entry(at);
        }
        self.put_entry(at, entry);
        self.count(entry, 1);
    }

    pub fn delete_entry(&self, at: usize, entry: &Entry) {
        self.set(self.entry(at) + 1, 0);
        let (mut gap, mut next) = (at, self.next_entry(at));
        while let Some(entry) = self.entry_at(next) {
            let home = self.home(entry.engine, entry.server);
            if self.distance(home, next) >= self.distance(gap, next) {
                self.put_entry(gap, &entry);
                self.set(self.entry(next) + 1, 0);
                gap = next;
            }
            next = self.next_entry(next);
        }
        self.count(entry, -1);
    }

    fn distance(&self, from: usize, to: usize) -> usize {
        if to >= from { to - from } else { to + self.layout.entries - from }
    }

    /// One more name for a block that the server already names in this tier.
    pub fn add_alias(&self, server: u16, tier: u8, place: Place) {
        match self.find_alias(server, tier, place) {
            Some((at, alias)) => self.set_refs(at, alias, (alias.refs + 1).min(MOST_REFS)),
            None => self.insert_entry(&Entry::alias(server, tier, place, 1)),
        }
    }

    /// Takes one name; false if the block had one only.
    pub fn take_alias(&self, server: u16, tier: u8, place: Place) -> bool {
        if self.aliases(server) == 0 {
            return false;
        }
        let Some((at, alias)) = self.find_alias(server, tier, place) else { return false };
        if alias.refs > 1 {
            self.set_refs(at, alias, alias.refs - 1);
        } else {
            self.delete_entry(at, &alias);
        }
        true
    }

    /// All pairs once, beginning behind a gap.
    fn all_entries(&self) -> impl Iterator<Item = usize> + use<> {
        let start = (0..self.layout.entries).find(|at| self.entry_at(*at).is_none()).unwrap_or(0);
        (start..self.layout.entries).chain(0..start)
    }

    /// Deletes the entries that `drop` says, aliases included. Looks at each pair until what
    /// closed the gap stays.
    pub fn sweep_entries(&self, mut drop: impl FnMut(&Entry) -> bool) {
        for at in self.all_entries() {
            while let Some(entry) = self.entry_at(at).filter(|entry| drop(entry)) {
                self.delete_entry(at, &entry);
            }
        }
    }

    /// After a crash: no entry beyond a gap, none twice. Counters are left alone.
    pub fn rehash_entries(&self) {
        let mut moved = true;
        while moved {
            moved = false;
            for at in self.all_entries() {
                let Some(entry) = self.entry_at(at) else { continue };
                let mut to = self.home(entry.engine, entry.server);
                let twin = loop {
                    match self.entry_at(to) {
                        _ if to == at => break None,
                        None => break Some(false),
                        Some(other) if other.same_name(&entry) => break Some(true),
                        Some(_) => to = self.next_entry(to),
                    }
                };
                let Some(twin) = twin else { continue };
                if !twin {
                    self.put_entry(to, &entry);
                }
                self.set(self.entry(at) + 1, 0);
                moved = true;
            }
        }
    }

    /// Counts all entries anew.
    pub fn recount_entries(&self) {
        self.clear_rows();
        for entry in (0..self.layout.entries).filter_map(|at| self.entry_at(at)) {
            self.count(&entry, 1);
        }
    }
}
