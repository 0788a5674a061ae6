//! A writer that is killed after any number of stores.
#![forbid(unsafe_code)]

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, panic_any};
use std::sync::atomic::{AtomicU64, Ordering};

use super::oracle::{
    self, BLOCKS, Op, Oracle, SERVERS, assert_equal, hash, overlap, path, step, tips,
};
use crate::index::layout::spread;
use crate::index::{Index, Stored, Takeover, Writer};
use crate::types::{BlockHash, EngineHash, Overlap, ServerId, Tier};

thread_local! {
    /// The store that is not done any more; none at 0.
    static KILL_AT: Cell<u64> = const { Cell::new(0) };
}

/// Called before each store.
pub fn tick() {
    KILL_AT.with(|at| match at.get() {
        0 => {}
        1 => {
            at.set(0);
            panic_any(Killed);
        }
        more => at.set(more - 1),
    });
}

struct Killed;

/// Runs `work` up to its `kill_at`th store. False if it was killed.
pub fn run_killed(kill_at: u64, work: impl FnOnce()) -> bool {
    KILL_AT.with(|at| at.set(kill_at));
    let done = catch_unwind(AssertUnwindSafe(work));
    KILL_AT.with(|at| at.set(0));
    match done {
        Ok(()) => true,
        Err(panic) if panic.is::<Killed>() => false,
        Err(panic) => std::panic::resume_unwind(panic),
    }
}

/// How many stores `work` does.
fn stores_of(work: impl FnOnce()) -> u64 {
    KILL_AT.with(|at| at.set(u64::MAX));
    work();
    u64::MAX - KILL_AT.with(|at| at.replace(0))
}

pub fn copy(words: &[AtomicU64]) -> Vec<AtomicU64> {
    words.iter().map(|word| AtomicU64::new(word.load(Ordering::Relaxed))).collect()
}

fn store(server: u16, tier: usize, to: usize, count: usize, name: u64) -> Op {
    Op::Store { server, tier, to, count, name, refs: true }
}

/// What is there before each of the calls: shared runs, branches, tiers, holes, a second name, a
/// second reference.
fn before() -> Vec<Op> {
    vec![
        store(0, 0, 12, 12, 0),
        store(1, 0, 30, 30, 0),
        store(1, 1, 12, 8, 0),
        store(1, 0, 19, 7, 0),
        store(2, 0, 24, 24, 0),
        store(2, 0, 24, 2, 1),
        store(0, 0, 43, 13, 0),
        store(2, 0, 39, 9, 0),
        store(2, 2, 39, 9, 0),
        store(0, 0, 43, 4, 0),
        Op::Discard { server: 2, tier: 0, from: 33, to: 35 },
    ]
}

fn calls() -> Vec<(u16, Op)> {
    vec![
        (0, store(0, 0, 24, 24, 0)),
        (3, store(3, 1, 60, 30, 0)),
        (0, store(0, 0, 49, 20, 1)),
        (1, store(1, 0, 72, 12, 0)),
        (1, Op::Discard { server: 1, tier: 0, from: 3, to: 19 }),
        (2, Op::Discard { server: 2, tier: 0, from: 13, to: 24 }),
        (0, Op::Discard { server: 0, tier: 0, from: 36, to: 43 }),
        (2, Op::Rename { server: 2, tier: 0, from: 24, to: 36 }),
        (0, Op::Rename { server: 0, tier: 0, from: 3, to: 13 }),
        (2, Op::Clear { server: 2 }),
        (1, Op::Clear { server: 1 }),
    ]
}

fn script(words: &[AtomicU64], ops: &[Op]) -> Oracle {
    let (mut writer, _) = Writer::attach(words).unwrap();
    let mut oracle = Oracle::default();
    for op in ops {
        let (want, got) = step(op, &mut oracle, &mut writer);
        assert_eq!(want, got, "{op:?}");
    }
    oracle
}

/// Whatever a reader gets between the kill and the repair was so before or after the call, or in
/// between; other servers did not change.
fn assert_no_lie(words: &[AtomicU64], server: u16, before: &Oracle, after: &Oracle) -> usize {
    let index = Index::open(words).unwrap();
    let (before, after) = (before.tiers(), after.tiers());
    let mut busy = 0;
    for tip in tips() {
        let path = path(tip);
        let hashes: Vec<BlockHash> = path.iter().map(|block| hash(*block)).collect();
        let mut out = vec![Overlap::default(); usize::from(SERVERS)];
        if index.lookup(&hashes, &mut out).is_err() {
            busy += 1;
            continue;
        }
        for (other, got) in (0..SERVERS).zip(&out) {
            let was = overlap(&before, other, &path);
            let most = was.blocks.max(overlap(&after, other, &path).blocks);
            if other == server {
                assert!(got.blocks <= most, "server {other} on the path to {tip}: {got:?}");
            } else {
                assert_eq!(*got, was, "server {other} on the path to {tip}");
            }
        }
    }
    busy
}

fn assert_repaired(words: &[AtomicU64], takeover: &Takeover, server: u16, before: &Oracle) {
    let (writer, again) = Writer::attach(words).unwrap();
    assert_eq!(again, Takeover::default());
    let mut want = before.clone();
    match takeover.torn.as_slice() {
        [] => {}
        torn => {
            assert_eq!(torn, [ServerId(server)]);
            want.entries.retain(|name, _| name.0 != server);
        }
    }
    assert_equal(&want, &writer);
}

#[test]
fn a_kill_at_any_store_costs_the_torn_server_only() {
    let start = oracle::words(oracle::words_of(12));
    Index::format(&start).unwrap();
    let empty = Index::open(&start).unwrap().stats().used_bytes;
    let before = script(&start, &before());
    let (mut kills, mut busy, mut torn) = (0, 0, 0);
    for (server, call) in calls() {
        let mut after = before.clone();
        step(&call, &mut after, &mut Writer::attach(&copy(&start)).unwrap().0);
        for kill_at in 1.. {
            let words = copy(&start);
            let (mut writer, _) = Writer::attach(&words).unwrap();
            let work = || drop(step(&call, &mut before.clone(), &mut writer));
            if run_killed(kill_at, work) {
                break;
            }
            kills += 1;
            busy += usize::from(assert_no_lie(&words, server, &before, &after) > 0);
            let (mut writer, takeover) = Writer::attach(&words).unwrap();
            torn += takeover.torn.len();
            assert_eq!(takeover.torn.is_empty(), kill_at == 1, "{call:?} killed at {kill_at}");
            assert_repaired(&words, &takeover, server, &before);
            for server in 0..SERVERS {
                writer.clear(ServerId(server));
            }
            assert_eq!(writer.index().stats().used_bytes, empty, "{call:?} killed at {kill_at}");
        }
    }
    // The script is long enough to be worth something, and sections were really torn open.
    assert!(kills > 1000 && torn > 1000 && busy > 100, "{kills} {torn} {busy}");
}

#[test]
fn a_repair_that_is_killed_is_done_again() {
    let start = oracle::words(oracle::words_of(12));
    Index::format(&start).unwrap();
    let before = script(&start, &before());
    let mut kills = 0;
    for (server, call) in calls() {
        let torn = copy(&start);
        let (mut writer, _) = Writer::attach(&torn).unwrap();
        assert!(!run_killed(5, || drop(step(&call, &mut before.clone(), &mut writer))));
        let all = stores_of(|| drop(Writer::attach(&copy(&torn)).unwrap()));
        // Samples, and each of the last: there the order of two words matters.
        for kill_at in (1..all - 8).step_by(61).chain(all - 8..=all) {
            let words = copy(&torn);
            assert!(!run_killed(kill_at, || drop(Writer::attach(&words).unwrap())));
            kills += 1;
            let (_, takeover) = Writer::attach(&words).unwrap();
            assert_eq!(takeover.torn, [ServerId(server)], "{call:?} killed at {kill_at}");
            assert_repaired(&words, &takeover, server, &before);
        }
    }
    assert!(kills > 500, "{kills}");
}

/// In the smallest zone that holds what is there before, a call makes room, which others pay for.
/// Blocks have two names each, so that a run whose entries go in part would keep wrong counts.
#[test]
fn a_kill_while_room_is_made_invents_nothing() {
    let tips = tips();
    let stores = |name| tips[..tips.len() - 1].iter().map(move |tip| store(0, 0, *tip, 72, name));
    let mut fill: Vec<Op> = stores(0).chain(stores(1)).collect();
    fill.push(store(1, 0, 12, 12, 0));
    let (start, empty, before) = (8..)
        .map(|units| {
            let words = oracle::words(oracle::words_of(units));
            Index::format(&words).unwrap();
            let empty = Index::open(&words).unwrap().stats().used_bytes;
            let oracle = script(&words, &fill);
            (words, empty, oracle)
        })
        .find(|(words, _, _)| Index::open(words).unwrap().stats().evicted == 0)
        .unwrap();
    let entries = before.entries.len() as u64;
    let call = store(2, 0, 24, 17, 0);
    let mut evicted = 0;
    for kill_at in 1.. {
        let words = copy(&start);
        let (mut writer, _) = Writer::attach(&words).unwrap();
        let work = || drop(step(&call, &mut before.clone(), &mut writer));
        if run_killed(kill_at, work) {
            assert!(writer.index().stats().evicted > 0, "nothing was evicted");
            break;
        }
        let (mut writer, _) = Writer::attach(&words).unwrap();
        evicted += u32::from(writer.index().stats().entries < entries);
        let tiers = before.tiers();
        for tip in &tips {
            let path = path(*tip);
            let got = oracle::lookup(&writer.index(), &path);
            for (server, got) in (0..2).zip(got) {
                let want = overlap(&tiers, server, &path);
                assert!(got.blocks <= want.blocks, "killed at {kill_at}: {got:?} {want:?}");
            }
        }
        let names: Vec<EngineHash> = (1..=BLOCKS as u64)
            .flat_map(|block| [block * 10, block * 10 + 1])
            .map(EngineHash)
            .collect();
        for server in 0..SERVERS {
            // Each was stored up to `tips.len()` times.
            for _ in &tips {
                writer.remove(ServerId(server), Tier::Gpu, &names);
            }
        }
        let stats = writer.index().stats();
        assert_eq!((stats.blocks, stats.entries), (0, 0), "killed at {kill_at}");
        assert_eq!(stats.used_bytes, empty, "killed at {kill_at}");
    }
    assert!(evicted > 20, "{evicted}");
}

fn store_all(writer: &mut Writer<'_>, server: u16, parent: Option<u64>, blocks: &[u64]) {
    let stored: Vec<Stored> =
        blocks.iter().map(|b| Stored { engine: EngineHash(*b), block: BlockHash(*b) }).collect();
    let parent = parent.map(BlockHash);
    let outcome = writer.store(ServerId(server), Tier::Gpu, parent, &stored, true);
    assert_eq!(outcome.stored, blocks.len() as u32, "{outcome:?}");
}

fn remove_all(writer: &mut Writer<'_>, server: u16, blocks: &[u64]) {
    let names: Vec<EngineHash> = blocks.iter().map(|block| EngineHash(*block)).collect();
    writer.remove(ServerId(server), Tier::Gpu, &names);
}

/// `None` if the index is busy.
fn overlap_of(writer: &Writer<'_>, server: u16, blocks: &[u64]) -> Option<u32> {
    let hashes: Vec<BlockHash> = blocks.iter().map(|block| BlockHash(*block)).collect();
    let mut out = [Overlap::default(); 2];
    writer.index().lookup(&hashes, &mut out).ok()?;
    Some(out[usize::from(server)].blocks)
}

/// A run that lost its last holder in the torn section stays for its branch, and its section ends.
#[test]
fn a_section_left_open_ends_where_nobody_holds_the_run() {
    let start = oracle::words(oracle::words_of(8));
    Index::format(&start).unwrap();
    let (mut writer, _) = Writer::attach(&start).unwrap();
    store_all(&mut writer, 0, None, &[1, 2, 3, 4]);
    store_all(&mut writer, 1, None, &[1, 2, 3]);
    store_all(&mut writer, 1, Some(3), &[10, 11]);
    remove_all(&mut writer, 1, &[1, 2, 3]);
    let mut busy = 0;
    for kill_at in 1.. {
        let words = copy(&start);
        let (mut writer, _) = Writer::attach(&words).unwrap();
        if run_killed(kill_at, || remove_all(&mut writer, 0, &[4, 3, 2, 1])) {
            break;
        }
        busy += u32::from(overlap_of(&writer, 1, &[1, 2, 3, 10, 11]).is_none());
        let (mut writer, _) = Writer::attach(&words).unwrap();
        assert_eq!(overlap_of(&writer, 1, &[1, 2, 3, 10, 11]), Some(0), "killed at {kill_at}");
        store_all(&mut writer, 1, None, &[1, 2, 3]);
        assert_eq!(overlap_of(&writer, 1, &[1, 2, 3, 10, 11]), Some(5), "killed at {kill_at}");
    }
    assert!(busy > 0, "no section was torn");
}

/// Blocks beyond full lines of the table are found again, and leave no count behind.
#[test]
fn a_repair_counts_the_full_lines_anew() {
    let start = oracle::words(oracle::words_of(8));
    Index::format(&start).unwrap();
    let (mut writer, _) = Writer::attach(&start).unwrap();
    let map = writer.index().map;
    // More than fit into the lines that they belong in.
    let crowded = |block: &u64| spread(*block, map.layout.lines) < 5;
    let blocks: Vec<u64> = (1..).filter(crowded).take(28).collect();
    store_all(&mut writer, 0, None, &blocks);
    store_all(&mut writer, 1, None, &blocks[..10]);
    let passed = |writer: &Writer<'_>| {
        let map = writer.index().map;
        (0..map.layout.lines).map(|line| map.get(map.line(line) + 1) >> 56).sum::<u64>()
    };
    assert!(passed(&writer) >= 8, "few lines are full");
    for kill_at in [3, 10, 30] {
        let words = copy(&start);
        let (mut writer, _) = Writer::attach(&words).unwrap();
        assert!(!run_killed(kill_at, || remove_all(&mut writer, 1, &blocks[..10])));
        let (mut writer, takeover) = Writer::attach(&words).unwrap();
        assert_eq!(takeover.torn, [ServerId(1)]);
        assert_eq!(overlap_of(&writer, 0, &blocks), Some(28));
        remove_all(&mut writer, 0, &blocks);
        assert_eq!(passed(&writer), 0);
    }
}
