//! Readers against a writer that makes, frees and reuses runs all the time.
#![forbid(unsafe_code)]

use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use super::oracle;
use crate::index::{Index, Stored, Writer};
use crate::types::{BlockHash, EngineHash, Overlap, ServerId, Tier};

const READERS: usize = 2;
/// Lookups that have to succeed for each reader.
const LOOKUPS: usize = 20_000;
const NOISE: ServerId = ServerId(3);

type Seen = Vec<(Overlap, Overlap)>;

/// A trunk, and a branch in the middle of it.
struct Paths {
    trunk: Vec<BlockHash>,
    branch: Vec<BlockHash>,
}

impl Paths {
    fn new() -> Paths {
        let hashes = |from: u64, count| (from..from + count).map(BlockHash).collect::<Vec<_>>();
        let trunk = hashes(100, 20);
        let branch = [&trunk[..10], &hashes(200, 8)].concat();
        Paths { trunk, branch }
    }

    fn all(&self) -> [&[BlockHash]; 2] {
        [&self.trunk, &self.branch]
    }
}

fn store(writer: &mut Writer<'_>, server: u16, tier: Tier, path: &[BlockHash], from: usize) {
    let blocks: Vec<Stored> =
        path[from..].iter().map(|b| Stored { engine: EngineHash(b.0), block: *b }).collect();
    let parent = from.checked_sub(1).map(|last| path[last]);
    let outcome = writer.store(ServerId(server), tier, parent, &blocks, false);
    assert_eq!(outcome.stored + outcome.already, blocks.len() as u32, "{outcome:?}");
}

/// One call after another, each of which readers see as a whole: it changes one run once. `each`
/// is told after every call.
fn round(writer: &mut Writer<'_>, paths: &Paths, number: u64, mut each: impl FnMut(&Writer<'_>)) {
    let (trunk, branch) = (&paths.trunk, &paths.branch);
    let remove = |writer: &mut Writer<'_>, server: u16, tier, block: BlockHash| {
        writer.remove(ServerId(server), tier, &[EngineHash(block.0)]);
    };
    store(writer, 0, Tier::Gpu, &trunk[..10], 0);
    each(writer);
    store(writer, 1, Tier::Gpu, trunk, 0);
    each(writer);
    // Other runs take the cells and slots that this one's branch had in the last round.
    let noise: Vec<BlockHash> = (0..9).map(|at| BlockHash(1000 + number * 16 + at)).collect();
    store(writer, NOISE.0, Tier::Gpu, &noise, 0);
    store(writer, 0, Tier::Cpu, branch, 10);
    each(writer);
    store(writer, 0, Tier::Gpu, &branch[..14], 10);
    each(writer);
    remove(writer, 1, Tier::Gpu, trunk[4]);
    each(writer);
    store(writer, 1, Tier::Gpu, &trunk[..5], 4);
    each(writer);
    writer.clear(NOISE);
    for block in branch[10..].iter().rev() {
        for tier in [Tier::Gpu, Tier::Cpu] {
            remove(writer, 0, tier, *block);
            each(writer);
        }
    }
    for (server, end) in [(1, 20), (0, 10)] {
        for block in trunk[..end].iter().rev() {
            remove(writer, server, Tier::Gpu, *block);
            each(writer);
        }
    }
}

fn look(index: &Index<'_>, path: &[BlockHash], seen: &mut Seen) -> bool {
    let mut out = [Overlap::default(); 2];
    let done = index.lookup(path, &mut out).is_ok();
    if done {
        seen.push((out[0], out[1]));
    }
    done
}

fn words(seen: &[(Overlap, Overlap)]) -> HashSet<[u32; 10]> {
    let flat = |o: &Overlap| [o.blocks, o.tiers[0], o.tiers[1], o.tiers[2], o.tiers[3]];
    seen.iter()
        .map(|(a, b)| {
            let mut word = [0; 10];
            word[..5].copy_from_slice(&flat(a));
            word[5..].copy_from_slice(&flat(b));
            word
        })
        .collect()
}

#[test]
fn readers_see_states_that_existed() {
    let paths = Paths::new();
    let zone = oracle::words(oracle::words_of(8));
    Index::format(&zone).unwrap();
    let (mut writer, _) = Writer::attach(&zone).unwrap();
    let mut states = [Seen::new(), Seen::new()];
    round(&mut writer, &paths, 0, |writer| {
        for (path, states) in paths.all().iter().zip(&mut states) {
            assert!(look(&writer.index(), path, states), "busy without a writer");
        }
    });
    let states = states.map(|seen| words(&seen));
    // Two dozen states and more, or the rest says little.
    assert!(states.iter().all(|states| states.len() > 24));

    let running = AtomicUsize::new(READERS);
    thread::scope(|scope| {
        for _ in 0..READERS {
            scope.spawn(|| {
                let index = Index::open(&zone).unwrap();
                for (path, states) in paths.all().iter().zip(&states) {
                    let mut seen = Seen::new();
                    while seen.len() < LOOKUPS {
                        look(&index, path, &mut seen);
                    }
                    let odd: Vec<_> = words(&seen).difference(states).copied().collect();
                    running.fetch_sub(usize::from(!odd.is_empty()) * READERS, Ordering::Relaxed);
                    assert!(odd.is_empty(), "states that never were: {odd:?}");
                }
                running.fetch_sub(1, Ordering::Relaxed);
            });
        }
        let mut number = 1;
        while (1..=READERS).contains(&running.load(Ordering::Relaxed)) {
            round(&mut writer, &paths, number, |_| {});
            number += 1;
        }
    });
}
