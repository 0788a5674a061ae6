//! A model of the index that knows no better than to list everything, and scripts for both.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;

use crate::index::{Index, MAX_SERVERS, RemoveOutcome, Stats, StoreOutcome, Stored, Writer};
use crate::types::{BlockHash, EngineHash, Overlap, ServerId, Tier};
use proptest::prelude::*;
use proptest::sample::Index as Pick;

pub const BLOCKS: usize = 72;
pub const SERVERS: u16 = 4;

/// Block `b`'s parent in a fixed forest: chains that branch off one another. 0 is no block.
pub fn parent(block: usize) -> usize {
    match block {
        0 | 1 | 31 | 61 => 0,
        13 => 5,
        20 => 12,
        25 => 5,
        40 => 35,
        44 => 35,
        50 => 33,
        64 => 61,
        _ => block - 1,
    }
}

pub fn path(block: usize) -> Vec<usize> {
    let mut path: Vec<usize> =
        std::iter::successors(Some(block), |b| Some(parent(*b))).take_while(|b| *b != 0).collect();
    path.reverse();
    path
}

pub fn hash(block: usize) -> BlockHash {
    BlockHash((block as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1 << 63)
}

#[derive(Debug, Clone)]
pub enum Op {
    /// The last `count` blocks of the path to `to`; names of block `b` are 10 b and up.
    Store {
        server: u16,
        tier: usize,
        to: usize,
        count: usize,
        name: u64,
        refs: bool,
    },
    /// Block `from` under a name that another block may have.
    Rename {
        server: u16,
        tier: usize,
        from: usize,
        to: usize,
    },
    Remove {
        server: u16,
        tier: usize,
        picks: Vec<(Pick, bool)>,
    },
    /// The first names of blocks `from` to `to`, the last first.
    Discard {
        server: u16,
        tier: usize,
        from: usize,
        to: usize,
    },
    Clear {
        server: u16,
    },
}

pub fn op(renames: bool) -> impl Strategy<Value = Op> {
    let server = 0..SERVERS;
    let tier = prop_oneof![6 => Just(0usize), 2 => Just(1), 1 => Just(2), 1 => Just(3)];
    let store = (server.clone(), tier.clone(), 1..=BLOCKS, 1..30usize, 0..10u64, any::<bool>())
        .prop_map(|(server, tier, to, count, name, refs)| Op::Store {
            server,
            tier,
            to,
            count,
            name: name.saturating_sub(8),
            refs,
        });
    let picks = prop::collection::vec((any::<Pick>(), prop::bool::weighted(0.9)), 1..6);
    let remove = (server.clone(), tier.clone(), picks)
        .prop_map(|(server, tier, picks)| Op::Remove { server, tier, picks });
    let rename = (server.clone(), tier, 1..=BLOCKS, 1..=BLOCKS)
        .prop_map(|(server, tier, from, to)| Op::Rename { server, tier, from, to });
    let clear = server.prop_map(|server| Op::Clear { server });
    prop_oneof![10 => store, 10 => remove, u32::from(renames) => rename, 1 => clear]
}

type Name = (u16, usize, u64);
pub type Tiers = [[Option<usize>; BLOCKS + 1]; SERVERS as usize];

pub fn overlap(tiers: &Tiers, server: u16, path: &[usize]) -> Overlap {
    let mut overlap = Overlap::default();
    for tier in path.iter().map_while(|block| tiers[usize::from(server)][*block]) {
        overlap.blocks += 1;
        overlap.tiers[tier] += 1;
    }
    overlap
}

/// (server, tier, engine's hash) → (block, references).
#[derive(Default, Clone)]
pub struct Oracle {
    pub entries: BTreeMap<Name, (usize, u32)>,
}

impl Oracle {
    fn holds(&self, server: u16, block: usize) -> Option<usize> {
        let held = self.entries.iter().filter(|(name, value)| name.0 == server && value.0 == block);
        held.map(|(name, _)| name.1).min()
    }

    fn store(&mut self, name: Name, block: usize, refs: bool, out: &mut StoreOutcome) {
        match self.entries.get_mut(&name) {
            Some(value) if value.0 == block => {
                value.1 += u32::from(refs);
                out.already += 1;
            }
            old => {
                out.stored += 1;
                out.renamed += u32::from(old.is_some());
                self.entries.insert(name, (block, 1));
            }
        }
    }

    fn remove(&mut self, name: Name, out: &mut RemoveOutcome) {
        match self.entries.get_mut(&name) {
            None => out.unknown += 1,
            Some(value) if value.1 > 1 => {
                value.1 -= 1;
                out.released += 1;
            }
            Some(_) => {
                self.entries.remove(&name);
                out.removed += 1;
            }
        }
    }

    /// Best tier by server and block.
    pub fn tiers(&self) -> Tiers {
        let mut tiers = [[None; BLOCKS + 1]; SERVERS as usize];
        // In the order of tiers downwards, so that the best stays.
        for (name, value) in self.entries.iter().rev() {
            tiers[usize::from(name.0)][value.0] = Some(name.1);
        }
        tiers
    }

    fn held(&self) -> usize {
        let mut held: Vec<usize> = self.entries.values().map(|value| value.0).collect();
        held.sort_unstable();
        held.dedup();
        held.len()
    }
}

fn remove(
    server: u16,
    tier: usize,
    names: &[u64],
    oracle: &mut Oracle,
    writer: &mut Writer<'_>,
) -> (RemoveOutcome, RemoveOutcome) {
    let mut want = RemoveOutcome::default();
    for name in names {
        oracle.remove((server, tier, *name), &mut want);
    }
    let names: Vec<EngineHash> = names.iter().map(|name| EngineHash(*name)).collect();
    (want, writer.remove(ServerId(server), Tier::ALL[tier], &names))
}

/// Runs one step on both; the outcomes as comparable text.
pub fn step(op: &Op, oracle: &mut Oracle, writer: &mut Writer<'_>) -> (String, String) {
    let text = |o: &dyn std::fmt::Debug| format!("{o:?}");
    match op {
        Op::Store { server, tier, to, count, name, refs } => {
            let path = path(*to);
            let blocks = &path[path.len().saturating_sub(*count)..];
            let names: Vec<u64> = blocks.iter().map(|b| *b as u64 * 10 + name).collect();
            let mut want = StoreOutcome::default();
            let before = parent(blocks[0]);
            if before != 0 && oracle.holds(*server, before).is_none() {
                want.orphan = blocks.len() as u32;
            } else {
                for (block, name) in blocks.iter().zip(&names) {
                    oracle.store((*server, *tier, *name), *block, *refs, &mut want);
                }
            }
            let stored: Vec<Stored> = blocks
                .iter()
                .zip(&names)
                .map(|(b, name)| Stored { engine: EngineHash(*name), block: hash(*b) })
                .collect();
            let before = (before != 0).then(|| hash(before));
            let got = writer.store(ServerId(*server), Tier::ALL[*tier], before, &stored, *refs);
            (text(&want), text(&got))
        }
        Op::Rename { server, tier, from, to } => {
            let mut want = StoreOutcome::default();
            let before = parent(*to);
            if before != 0 && oracle.holds(*server, before).is_none() {
                want.orphan = 1;
            } else {
                oracle.store((*server, *tier, *from as u64 * 10), *to, true, &mut want);
            }
            let stored = Stored { engine: EngineHash(*from as u64 * 10), block: hash(*to) };
            let before = (before != 0).then(|| hash(before));
            let got = writer.store(ServerId(*server), Tier::ALL[*tier], before, &[stored], true);
            (text(&want), text(&got))
        }
        Op::Remove { server, tier, picks } => {
            let there: Vec<u64> = oracle
                .entries
                .keys()
                .filter(|name| name.0 == *server && name.1 == *tier)
                .map(|name| name.2)
                .collect();
            let names: Vec<u64> = picks
                .iter()
                .map(|(pick, known)| match *known && !there.is_empty() {
                    true => *pick.get(&there),
                    false => pick.index(BLOCKS * 10) as u64,
                })
                .collect();
            let (want, got) = remove(*server, *tier, &names, oracle, writer);
            (text(&want), text(&got))
        }
        Op::Discard { server, tier, from, to } => {
            let names: Vec<u64> = (*from..=*to).rev().map(|block| block as u64 * 10).collect();
            let (want, got) = remove(*server, *tier, &names, oracle, writer);
            (text(&want), text(&got))
        }
        Op::Clear { server } => {
            let before = oracle.entries.len();
            oracle.entries.retain(|name, _| name.0 != *server);
            let gone = (before - oracle.entries.len()) as u64;
            (text(&gone), text(&writer.clear(ServerId(*server))))
        }
    }
}

pub fn lookup(index: &Index<'_>, path: &[usize]) -> Vec<Overlap> {
    let hashes: Vec<BlockHash> = path.iter().map(|block| hash(*block)).collect();
    let mut out = vec![Overlap { blocks: 7, tiers: [7; 4] }; usize::from(SERVERS)];
    index.lookup(&hashes, &mut out).unwrap();
    out
}

/// The ends of all branches.
pub fn tips() -> Vec<usize> {
    (1..=BLOCKS).filter(|block| (1..=BLOCKS).all(|child| parent(child) != *block)).collect()
}

pub fn assert_equal(oracle: &Oracle, writer: &Writer<'_>) {
    let index = writer.index();
    let tiers = oracle.tiers();
    for tip in tips() {
        let path = path(tip);
        let got = lookup(&index, &path);
        for server in 0..SERVERS {
            let want = overlap(&tiers, server, &path);
            assert_eq!(got[usize::from(server)], want, "server {server} on the path to {tip}");
        }
    }
    let mut holders = Vec::new();
    for block in (0..=BLOCKS).skip(1) {
        let want: Vec<_> = (0..SERVERS)
            .filter_map(|s| Some((ServerId(s), Tier::ALL[tiers[usize::from(s)][block]?])))
            .collect();
        index.holders(hash(block), &mut holders).unwrap();
        assert_eq!(holders, want, "holders of {block}");
    }
    for server in 0..SERVERS {
        let count = |tier| oracle.entries.keys().filter(|n| n.0 == server && n.1 == tier).count();
        let want = [count(0), count(1), count(2), count(3)].map(|count| count as u64);
        assert_eq!(index.server_blocks(ServerId(server)), want, "entries of server {server}");
    }
    for name in oracle.entries.keys() {
        let best = (0..4).find_map(|tier| oracle.entries.get(&(name.0, tier, name.2)));
        let got = writer.resolve(ServerId(name.0), EngineHash(name.2));
        assert_eq!(got, best.map(|value| hash(value.0)), "block that {name:?} names");
    }
    let stats = index.stats();
    let (blocks, entries) = (oracle.held() as u64, oracle.entries.len() as u64);
    assert_eq!(stats, Stats { blocks, entries, evicted: 0, ..stats });
}

/// Words of a zone with 6 cells for each 3 lines of blocks; the least is 8 such units.
pub fn words_of(units: usize) -> usize {
    24 + MAX_SERVERS * 4 + 72 * units
}

pub fn words(count: usize) -> Vec<AtomicU64> {
    (0..count).map(|_| AtomicU64::new(0)).collect()
}
