//! Calls of the writer between any two loads of a reader, one after another, so that what fails once
//! fails each time. Other orders of memory are the models' matter.
#![forbid(unsafe_code)]

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::atomic::AtomicU64;

use super::crash::{copy, run_killed};
use super::oracle;
use crate::index::layout::spread;
use crate::index::{Busy, Index, Stored, Writer};
use crate::types::{BlockHash, EngineHash, Overlap, ServerId, Tier};

type Work = Box<dyn FnOnce()>;

thread_local! {
    /// What comes after so many loads.
    static MEANWHILE: RefCell<Option<(u64, Work)>> = const { RefCell::new(None) };
}

/// Called before each load.
pub fn tick() {
    let due = MEANWHILE.with_borrow_mut(|meanwhile| match meanwhile {
        Some((0, _)) => meanwhile.take(),
        Some((left, _)) => {
            *left -= 1;
            None
        }
        None => None,
    });
    if let Some((_, work)) = due {
        work();
    }
}

#[derive(Clone, Debug)]
enum Call {
    Store(u16, Option<u64>, Vec<u64>),
    Remove(u16, Vec<u64>),
}
use Call::{Remove, Store};

fn apply(writer: &mut Writer<'_>, call: &Call) {
    match call {
        Store(server, parent, blocks) => {
            let stored = |b: &u64| Stored { engine: EngineHash(*b), block: BlockHash(*b) };
            let blocks: Vec<Stored> = blocks.iter().map(stored).collect();
            let parent = parent.map(BlockHash);
            writer.store(ServerId(*server), Tier::Gpu, parent, &blocks, false);
        }
        Remove(server, blocks) => {
            let names: Vec<EngineHash> = blocks.iter().map(|block| EngineHash(*block)).collect();
            writer.remove(ServerId(*server), Tier::Gpu, &names);
        }
    }
}

/// Blocks that each of three servers holds of a prompt, and who holds the last one.
type State = ([u32; 3], Vec<u16>);

fn try_look(index: &Index<'_>, path: &[u64]) -> Result<[u32; 3], Busy> {
    let hashes: Vec<BlockHash> = path.iter().map(|block| BlockHash(*block)).collect();
    let mut out = [Overlap::default(); 3];
    index.lookup(&hashes, &mut out)?;
    Ok(out.map(|overlap| overlap.blocks))
}

fn look(index: &Index<'_>, path: &[u64]) -> [u32; 3] {
    try_look(index, path).unwrap()
}

fn last_holders(index: &Index<'_>, path: &[u64]) -> Vec<u16> {
    let mut out = Vec::new();
    index.holders(BlockHash(path[path.len() - 1]), &mut out).unwrap();
    out.iter().map(|(server, _)| server.0).collect()
}

fn state(index: &Index<'_>, path: &[u64]) -> State {
    (look(index, path), last_holders(index, path))
}

/// Reads with `meanwhile` done after the `at`th load; nothing if there are fewer.
fn read_with<T>(
    start: &[AtomicU64],
    at: u64,
    meanwhile: impl FnOnce(&[AtomicU64]) + 'static,
    read: impl FnOnce(&Index<'_>) -> T,
) -> Option<T> {
    let words: Rc<[AtomicU64]> = copy(start).into();
    let index = Index::open(&words).unwrap();
    let theirs = Rc::clone(&words);
    MEANWHILE.set(Some((at, Box::new(move || meanwhile(&theirs)))));
    let got = read(&index);
    MEANWHILE.take().is_none().then_some(got)
}

fn calls(calls: &Rc<[Call]>) -> impl FnOnce(&[AtomicU64]) + 'static {
    let calls = Rc::clone(calls);
    move |words| {
        let (mut writer, _) = Writer::attach(words).unwrap();
        calls.iter().for_each(|call| apply(&mut writer, call));
    }
}

/// Whatever the load at which the calls come, the answer is that of a moment before, between or
/// after them.
fn assert_moments(start: &[AtomicU64], path: &[u64], meanwhile: &[Call]) {
    let words = copy(start);
    let (mut writer, _) = Writer::attach(&words).unwrap();
    let mut states = vec![state(&writer.index(), path)];
    for call in meanwhile {
        apply(&mut writer, call);
        states.push(state(&writer.index(), path));
    }
    let meanwhile: Rc<[Call]> = meanwhile.into();
    let mut loads = 0;
    while let Some(got) = read_with(start, loads, calls(&meanwhile), |index| look(index, path)) {
        assert!(
            states.iter().any(|state| state.0 == got),
            "at load {loads}: {got:?} of {states:?}"
        );
        loads += 1;
    }
    assert!(loads > 10, "{loads}");
    let mut loads = 0;
    while let Some(got) =
        read_with(start, loads, calls(&meanwhile), |index| last_holders(index, path))
    {
        assert!(
            states.iter().any(|state| state.1 == got),
            "at load {loads}: {got:?} of {states:?}"
        );
        loads += 1;
    }
    assert!(loads > 5, "{loads}");
}

fn zone(calls: &[Call]) -> Vec<AtomicU64> {
    let words = oracle::words(oracle::words_of(8));
    Index::format(&words).unwrap();
    let (mut writer, _) = Writer::attach(&words).unwrap();
    calls.iter().for_each(|call| apply(&mut writer, call));
    drop(writer);
    words
}

/// Blocks from `from` on that belong in the line of `block`, or not.
fn blocks(from: u64, block: u64, same_line: bool) -> impl Iterator<Item = u64> {
    let words = oracle::words(oracle::words_of(8));
    let lines = Index::format(&words).unwrap().map.layout.lines;
    let line = spread(block, lines);
    (from..).filter(move |other| (spread(*other, lines) == line) == same_line)
}

#[test]
fn the_runs_of_a_path_are_of_one_moment() {
    let all = vec![1, 2, 11, 12];
    let start = zone(&[
        Store(1, None, vec![1, 2, 3]),
        Store(0, None, all.clone()),
        Store(2, None, all.clone()),
    ]);
    // The parent's run changes first, then the branch's.
    assert_moments(&start, &all, &[Remove(1, vec![2]), Remove(0, vec![12])]);
    assert_moments(&start, &all, &[Remove(0, vec![12]), Remove(1, vec![2])]);
}

#[test]
fn a_block_that_comes_meanwhile_is_not_overlooked_by_half() {
    let start = zone(&[Store(0, None, vec![1, 2])]);
    assert_moments(&start, &[1, 2, 3], &[Store(0, Some(2), vec![3]), Store(1, None, vec![1])]);
}

#[test]
fn a_slot_goes_to_another_block_at_the_same_depth() {
    let path = [1, 2, 3];
    let other = blocks(100, 3, true).next().unwrap();
    let mut apart = blocks(200, 3, false);
    let before: Vec<u64> = apart.by_ref().take(2).collect();
    let start = zone(&[Store(0, None, path.to_vec()), Store(1, None, before.clone())]);
    assert_moments(&start, &path, &[Remove(0, vec![3]), Store(1, Some(before[1]), vec![other])]);
}

#[test]
fn a_block_comes_back_in_another_run_while_its_old_one_is_reused() {
    let path = [1, 2, 3];
    let others: Vec<u64> = blocks(200, 3, false).take(3).collect();
    let start = zone(&[Store(0, None, path.to_vec())]);
    let all = [Remove(0, path.to_vec()), Store(1, None, others), Store(0, None, path.to_vec())];
    assert_moments(&start, &path, &all);
}

/// A repair takes runs apart and puts them together again; what is between is never an answer.
#[test]
fn nothing_is_read_while_an_index_is_repaired() {
    let path = [1, 2, 11, 12];
    let start = zone(&[
        Store(0, None, vec![1, 2, 3]),
        Store(0, Some(2), vec![11, 12]),
        Store(1, None, vec![1, 2, 3]),
    ]);
    let (mut writer, _) = Writer::attach(&start).unwrap();
    // Torn before its first section.
    assert!(!run_killed(2, || apply(&mut writer, &Store(2, None, vec![21]))));
    let (mut busy, mut read) = (0, 0);
    for store in (1..700).step_by(3) {
        let repair = move |words: &[AtomicU64]| {
            run_killed(store, || drop(Writer::attach(words).unwrap()));
        };
        let mut loads = 0;
        while let Some(got) = read_with(&start, loads, repair, |index| try_look(index, &path)) {
            match got {
                Ok(got) => assert_eq!(got, [4, 2, 0], "killed at {store}, at load {loads}"),
                Err(Busy) => busy += 1,
            }
            read += 1;
            loads += 1;
        }
    }
    assert!(busy > 1000 && busy < read, "{busy} of {read}");
}
