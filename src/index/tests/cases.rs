//! What random scripts do not come across.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};

use super::oracle::{words, words_of};
use crate::index::{Index, IndexError, MAX_SERVERS, StoreOutcome, Stored, Takeover, Writer};
use crate::types::{BlockHash, EngineHash, Overlap, ServerId, Tier};

const A: ServerId = ServerId(0);
const B: ServerId = ServerId(MAX_SERVERS as u16 - 1);

fn hashes(from: u64, count: u64) -> Vec<BlockHash> {
    (from..from + count).map(BlockHash).collect()
}

fn stored(blocks: &[BlockHash]) -> Vec<Stored> {
    blocks.iter().map(|block| Stored { engine: EngineHash(!block.0), block: *block }).collect()
}

fn store(
    writer: &mut Writer<'_>,
    server: ServerId,
    parent: Option<BlockHash>,
    blocks: &[BlockHash],
) -> StoreOutcome {
    writer.store(server, Tier::Gpu, parent, &stored(blocks), true)
}

fn overlap(writer: &Writer<'_>, server: ServerId, blocks: &[BlockHash]) -> u32 {
    let mut out = vec![Overlap::default(); MAX_SERVERS];
    writer.index().lookup(blocks, &mut out).unwrap();
    let overlap = out[server.index()];
    assert_eq!(overlap.tiers, [overlap.blocks, 0, 0, 0]);
    overlap.blocks
}

fn fresh(words: &[AtomicU64]) -> Writer<'_> {
    Index::format(words).unwrap();
    Writer::attach(words).unwrap().0
}

#[test]
fn a_hole_ends_the_overlap_and_is_filled_again() {
    let words = words(words_of(20));
    let mut writer = fresh(&words);
    let blocks = hashes(1, 20);
    store(&mut writer, A, None, &blocks);
    store(&mut writer, B, None, &blocks);
    writer.remove(A, Tier::Gpu, &[EngineHash(!blocks[4].0)]);
    assert_eq!(overlap(&writer, A, &blocks), 4);
    assert_eq!(overlap(&writer, B, &blocks), 20);
    store(&mut writer, A, Some(blocks[3]), &blocks[4..5]);
    assert_eq!(overlap(&writer, A, &blocks), 20);
}

#[test]
fn a_chain_of_several_runs_is_one_prefix() {
    let words = words(1 << 20);
    let mut writer = fresh(&words);
    let empty = writer.index().stats().used_bytes;
    let blocks = hashes(1, 9000);
    store(&mut writer, A, None, &blocks);
    store(&mut writer, B, None, &blocks[..5000]);
    store(&mut writer, B, Some(blocks[4999]), &hashes(20_000, 40));
    assert_eq!(overlap(&writer, A, &blocks), 9000);
    assert_eq!(overlap(&writer, B, &blocks), 5000);
    assert_eq!(overlap(&writer, A, &blocks[..4097]), 4097);
    for at in [0, 11, 12, 4095, 4096, 8191, 8192, 8999] {
        assert_eq!(writer.resolve(A, EngineHash(!blocks[at].0)), Some(blocks[at]));
    }
    writer.remove(A, Tier::Gpu, &[EngineHash(!blocks[4096].0)]);
    assert_eq!(overlap(&writer, A, &blocks), 4096);
    writer.clear(A);
    assert_eq!(overlap(&writer, B, &blocks), 5000);
    assert_eq!(writer.index().stats().blocks, 5040);
    writer.clear(B);
    assert_eq!(writer.index().stats().used_bytes, empty);
}

#[test]
fn what_contradicts_is_refused_with_all_after_it() {
    let words = words(words_of(20));
    let mut writer = fresh(&words);
    let (blocks, other) = (hashes(1, 4), hashes(11, 2));
    store(&mut writer, A, None, &blocks);
    // Block 3 comes after block 2, not after 12; and nothing comes after itself.
    let mixed = [other[0], other[1], blocks[2], blocks[3]];
    let refused = StoreOutcome { stored: 2, refused: 2, ..StoreOutcome::default() };
    assert_eq!(store(&mut writer, B, None, &mixed), refused);
    assert_eq!(overlap(&writer, B, &other), 2);
    let again = [BlockHash(31), BlockHash(31)];
    let refused = StoreOutcome { stored: 1, refused: 1, ..StoreOutcome::default() };
    assert_eq!(store(&mut writer, A, None, &again), refused);
    let nothing = StoreOutcome { refused: 1, ..StoreOutcome::default() };
    assert_eq!(store(&mut writer, A, None, &[BlockHash(0)]), nothing);
    assert_eq!(store(&mut writer, ServerId(MAX_SERVERS as u16), None, &blocks[..1]), nothing);
    assert_eq!(writer.index().server_blocks(ServerId(MAX_SERVERS as u16)), [0; 4]);
    assert_eq!(writer.clear(ServerId(MAX_SERVERS as u16)), 0);
}

#[test]
fn a_block_that_nobody_holds_stays_for_its_branch() {
    let words = words(words_of(8));
    let mut writer = fresh(&words);
    let empty = writer.index().stats().used_bytes;
    let (trunk, branch) = (hashes(1, 4), hashes(11, 2));
    let path = [&trunk[..3], &branch].concat();
    store(&mut writer, A, None, &trunk);
    store(&mut writer, A, Some(trunk[2]), &branch);
    let names: Vec<EngineHash> = trunk.iter().map(|block| EngineHash(!block.0)).collect();
    writer.remove(A, Tier::Gpu, &names);
    assert_eq!(overlap(&writer, A, &path), 0);
    assert_eq!(writer.parent(branch[0]), Some(Some(trunk[2])));
    store(&mut writer, A, None, &trunk[..3]);
    assert_eq!(overlap(&writer, A, &path), 5);
    writer.remove(A, Tier::Gpu, &names);
    let names: Vec<EngineHash> = branch.iter().map(|block| EngineHash(!block.0)).collect();
    writer.remove(A, Tier::Gpu, &names);
    assert_eq!(writer.index().stats().used_bytes, empty);
}

#[test]
fn without_the_parent_a_store_is_an_orphan() {
    let words = words(words_of(20));
    let mut writer = fresh(&words);
    let blocks = hashes(1, 4);
    store(&mut writer, A, None, &blocks);
    let orphan = StoreOutcome { orphan: 2, ..StoreOutcome::default() };
    assert_eq!(store(&mut writer, B, Some(blocks[1]), &blocks[2..]), orphan);
    writer.store(B, Tier::Remote, None, &stored(&blocks[..2]), true);
    assert_eq!(store(&mut writer, B, Some(blocks[1]), &blocks[2..]).stored, 2);
}

#[test]
fn hashes_that_do_not_begin_at_the_start_match_nothing() {
    let words = words(words_of(20));
    let mut writer = fresh(&words);
    let blocks = hashes(1, 8);
    store(&mut writer, A, None, &blocks);
    assert_eq!(overlap(&writer, A, &blocks[1..]), 0);
    assert_eq!(overlap(&writer, A, &[]), 0);
    assert_eq!(overlap(&writer, A, &[BlockHash(0)]), 0);
}

#[test]
fn a_full_zone_takes_a_part_and_makes_room_for_others() {
    let words = words(words_of(32));
    let mut writer = fresh(&words);
    let blocks = hashes(1, 400);
    let outcome = store(&mut writer, A, None, &blocks);
    assert_eq!(outcome.stored + outcome.full, 400);
    assert!(outcome.stored > 200 && outcome.full > 0, "{outcome:?}");
    assert_eq!(overlap(&writer, A, &blocks), outcome.stored);
    // The other chain is younger; the first goes as a whole.
    let other = hashes(1001, 100);
    assert_eq!(store(&mut writer, B, None, &other).stored, 100);
    assert_eq!(overlap(&writer, B, &other), 100);
    assert_eq!(overlap(&writer, A, &blocks), 0);
    assert_eq!(writer.index().stats().evicted, u64::from(outcome.stored));
}

#[test]
fn the_oldest_leaf_goes_first() {
    let words = words(words_of(16));
    let mut writer = fresh(&words);
    let trunk = hashes(1, 4);
    // A fifth block makes all that follows branches.
    store(&mut writer, A, None, &hashes(1, 5));
    let branches: Vec<_> = (1..10).map(|branch| hashes(branch * 100, 4)).collect();
    for branch in &branches {
        assert_eq!(store(&mut writer, A, Some(trunk[3]), branch).stored, 4);
    }
    let depth = |writer: &Writer<'_>, branch: &[_]| overlap(writer, A, &[&trunk, branch].concat());
    let mut gone = 0;
    for other in 1.. {
        assert_eq!(store(&mut writer, B, None, &hashes(other * 10_000, 4)).stored, 4);
        let left = branches.iter().skip_while(|branch| depth(&writer, branch) == 4);
        let left: Vec<u32> = left.map(|branch| depth(&writer, branch)).collect();
        // The trunk is the oldest of all, but it has branches.
        assert!(left.iter().all(|depth| *depth == 8), "{left:?}");
        gone = branches.len() - left.len();
        if gone > 5 {
            break;
        }
    }
    assert!(gone < branches.len(), "all went at once");
}

#[test]
fn holes_without_cells_cost_the_rest_of_the_run() {
    let words = words(words_of(8));
    let mut writer = fresh(&words);
    let blocks = hashes(1, 60);
    assert_eq!(store(&mut writer, A, None, &blocks).stored, 60);
    assert_eq!(store(&mut writer, B, None, &blocks[..20]).stored, 20);
    // Runs of one block leave a few cells only.
    for block in 100..103 {
        assert_eq!(store(&mut writer, B, None, &[BlockHash(block)]).stored, 1);
    }
    for at in (1..60).step_by(2).rev() {
        writer.remove(A, Tier::Gpu, &[EngineHash(!blocks[at].0)]);
    }
    let stats = writer.index().stats();
    assert!(stats.evicted > 0 && stats.entries + stats.evicted == 53, "{stats:?}");
    assert_eq!(overlap(&writer, A, &blocks), 1);
    assert_eq!(overlap(&writer, B, &blocks), 20);
    assert_eq!(writer.index().server_blocks(A)[0] + stats.evicted, 30);
}

#[test]
fn another_mapping_sees_the_same() {
    let here = words(words_of(20));
    let blocks = hashes(1, 20);
    store(&mut fresh(&here), A, None, &blocks);
    let there: Vec<AtomicU64> =
        here.iter().map(|word| AtomicU64::new(word.load(Ordering::Relaxed))).collect();
    drop(here);
    let (mut writer, takeover) = Writer::attach(&there).unwrap();
    assert_eq!(takeover, Takeover::default());
    assert_eq!(overlap(&writer, A, &blocks), 20);
    assert_eq!(store(&mut writer, A, Some(blocks[19]), &hashes(50, 5)).stored, 5);
}

#[test]
fn what_is_no_index_is_not_opened() {
    let error = |words: &[AtomicU64]| Index::open(words).map(|_| ()).unwrap_err();
    let zone = words(words_of(8));
    assert_eq!(error(&zone), IndexError::NotAnIndex);
    assert_eq!(error(&zone[..100]), IndexError::TooSmall(100));
    // One word less, and still enough for the least.
    let larger = words(words_of(9));
    Index::format(&larger).unwrap();
    let shorter = &larger[..larger.len() - 1];
    assert_eq!(
        error(shorter),
        IndexError::Size { found: larger.len() as u64, have: shorter.len() as u64 }
    );
    Index::format(&zone).unwrap();
    zone[1].store(77, Ordering::Relaxed);
    assert_eq!(error(&zone), IndexError::Layout { found: 77, expected: 3 });
    assert_eq!(Index::format(&zone[..1000]).map(|_| ()).unwrap_err(), IndexError::TooSmall(1000));
}
