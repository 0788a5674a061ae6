use std::sync::atomic::AtomicU64;

use serde_json::{Value, json};

use super::*;
use crate::blocks::hash_prompt;
use crate::index::Index;
use crate::shared::MIN_ZONE_BYTES;
use crate::types::Overlap;

const ID: ServerId = ServerId(2);

struct Bench {
    zone: Zone<'static>,
    applier: Applier<'static>,
    habits: Habits,
    configured: Option<u32>,
    seq: u64,
}

impl Bench {
    fn new() -> Bench {
        let words: Vec<AtomicU64> = (0..MIN_ZONE_BYTES / 8).map(|_| AtomicU64::new(0)).collect();
        let zone = Zone::format(words.leak(), HashKey([1, 2])).unwrap();
        Index::format(zone.index_words()).unwrap();
        let (writer, _) = Writer::attach(zone.index_words()).unwrap();
        let applier = Applier::new(writer, zone);
        Bench { zone, applier, habits: Habits::default(), configured: None, seq: 0 }
    }

    fn apply(&mut self, events: Value) -> Told {
        let payload = rmp_serde::to_vec(&json!([1.5, events])).unwrap();
        let batch = wire::batch(&payload).unwrap();
        let mark = Mark { seq: self.seq, digest: 77 + self.seq, timestamp: 1.5 };
        self.seq += 1;
        self.applier.apply(ID, self.configured, &mut self.habits, &batch, mark, 0)
    }

    fn overlap(&self, tokens: &[u32], lora: Option<&str>, salt: Option<&str>) -> Overlap {
        let mut hashes = Vec::new();
        hash_prompt(&self.zone.hash_key(), 2, lora, salt, tokens, &mut hashes);
        let mut overlaps = [Overlap::default(); 3];
        let index = Index::open(self.zone.index_words()).unwrap();
        index.lookup(&hashes, &mut overlaps).unwrap();
        overlaps[ID.index()]
    }

    fn matched(&self, tokens: &[u32]) -> u32 {
        self.overlap(tokens, None, None).blocks
    }

    fn dropped(&self, reason: Dropped) -> u64 {
        self.zone.server(ID).dropped(reason)
    }
}

fn store(hashes: &[u64], parent: Option<u64>, tokens: &[u32]) -> Value {
    json!({"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent,
           "token_ids": tokens, "block_size": 2, "medium": "GPU"})
}

fn remove(hash: u64) -> Value {
    json!({"type": "BlockRemoved", "block_hashes": [hash], "medium": "GPU"})
}

fn with(mut event: Value, field: &str, value: Value) -> Value {
    event[field] = value;
    event
}

const PROMPT: [u32; 7] = [1, 2, 3, 4, 5, 6, 7];

#[test]
fn chains_grow_by_the_engines_own_parents() {
    let mut bench = Bench::new();
    bench.apply(json!([store(&[10, 11], None, &PROMPT[..4])]));
    bench.apply(json!([store(&[12], Some(11), &PROMPT[4..6])]));
    assert_eq!(bench.matched(&PROMPT), 3);
    assert_eq!(bench.matched(&PROMPT[..6]), 2);
    bench.apply(json!([store(&[13, 14], Some(99), &[8, 9, 10, 11])]));
    assert_eq!(bench.dropped(Dropped::Orphan), 2);
    bench.apply(json!([remove(11), remove(98)]));
    assert_eq!(bench.matched(&PROMPT), 1);
    // The engine names each block that goes: the child is still there.
    bench.apply(json!([store(&[11], Some(10), &PROMPT[2..4])]));
    assert_eq!(bench.matched(&PROMPT), 3);
    assert_eq!(bench.applier.writer.index().server_blocks(ID), [3, 0, 0, 0]);
    assert!(bench.apply(json!([["AllBlocksCleared"]])).cleared);
    assert_eq!(bench.matched(&PROMPT), 0);
}

#[test]
fn references_are_counted() {
    let mut bench = Bench::new();
    bench.apply(json!([store(&[10, 11], None, &PROMPT[..4])]));
    bench.apply(json!([store(&[11], Some(10), &PROMPT[2..4])]));
    bench.apply(json!([remove(11)]));
    assert_eq!(bench.matched(&PROMPT), 2);
    bench.apply(json!([remove(11)]));
    assert_eq!(bench.matched(&PROMPT), 1);
    // A prompt of one block that fills it exactly, twice.
    let mut bench = Bench::new();
    bench.apply(json!([store(&[10], None, &PROMPT[..2])]));
    bench.apply(json!([store(&[10], None, &PROMPT[..2])]));
    bench.apply(json!([remove(10)]));
    assert_eq!(bench.matched(&PROMPT), 1);
}

#[test]
fn what_is_announced_again_is_not_counted() {
    let mut bench = Bench::new();
    bench.apply(json!([store(&[10, 11], None, &PROMPT[..4])]));
    bench.apply(json!([store(&[10, 11], None, &PROMPT[..4])]));
    bench.apply(json!([remove(11)]));
    assert_eq!(bench.matched(&PROMPT), 1);
    // By now it is known to announce, so this is not a second copy either.
    bench.apply(json!([store(&[10], None, &PROMPT[..2])]));
    bench.apply(json!([remove(10)]));
    assert_eq!(bench.matched(&PROMPT), 0);
    let mut bench = Bench::new();
    bench.apply(json!([store(&[10], None, &PROMPT[..2])]));
    bench.apply(json!([with(store(&[10], None, &PROMPT[..2]), "origin", json!("REUSED"))]));
    bench.apply(json!([remove(10)]));
    assert_eq!(bench.matched(&PROMPT), 0);
}

#[test]
fn adapters_salts_and_the_base_are_kept_apart() {
    let mut bench = Bench::new();
    let adapter = with(store(&[10], None, &PROMPT[..2]), "lora_name", json!("a"));
    let salted = with(store(&[20], None, &PROMPT[..2]), "extra_keys", json!([["s"]]));
    let picture = with(store(&[30], None, &PROMPT[..2]), "extra_keys", json!([[["m", 1]]]));
    let nameless = with(store(&[40], None, &PROMPT[..2]), "lora_id", json!(1));
    bench.apply(json!([adapter, picture, nameless]));
    assert_eq!(bench.matched(&PROMPT), 0);
    assert_eq!(bench.overlap(&PROMPT, Some("a"), None).blocks, 1);
    assert_eq!(bench.overlap(&PROMPT, None, Some("s")).blocks, 0);
    bench.apply(json!([salted]));
    assert_eq!(bench.overlap(&PROMPT, None, Some("s")).blocks, 1);
    assert_eq!(bench.overlap(&PROMPT, None, Some("t")).blocks, 0);
    assert_eq!(bench.matched(&PROMPT), 0);
    // The chain carries both on without telling them again.
    bench.apply(json!([store(&[21], Some(20), &PROMPT[2..4])]));
    bench.apply(json!([store(&[11], Some(10), &PROMPT[2..4])]));
    assert_eq!(bench.overlap(&PROMPT, None, Some("s")).blocks, 2);
    assert_eq!(bench.overlap(&PROMPT, Some("a"), None).blocks, 2);
}

#[test]
fn one_full_attention_group_gives_credit() {
    let mut bench = Bench::new();
    let of = |event, group: u64, kind: &str| {
        with(with(event, "group_idx", json!(group)), "kv_cache_spec_kind", json!(kind))
    };
    let full = store(&[10, 11, 12], None, &PROMPT[..6]);
    bench.apply(json!([
        of(store(&[12], None, &PROMPT[..6]), 0, "sliding_window"),
        of(full.clone(), 1, "full_attention"),
        of(full, 2, "full_attention"),
    ]));
    assert_eq!(bench.matched(&PROMPT), 3);
    assert_eq!(bench.dropped(Dropped::Group), 2);
    let removed = |group: u64| with(remove(12), "group_idx", json!(group));
    bench.apply(json!([removed(0), removed(2)]));
    assert_eq!((bench.matched(&PROMPT), bench.dropped(Dropped::Group)), (3, 4));
    bench.apply(json!([removed(1)]));
    assert_eq!(bench.matched(&PROMPT), 2);
    let hybrid = |bench: &Bench| bench.zone.server(ID).get(ServerField::Hybrid);
    assert_eq!(hybrid(&bench), 1);
    bench.applier.clear(ID);
    assert_eq!(hybrid(&bench), 0);
}

#[test]
fn shapes_that_do_not_fit_are_dropped() {
    let mut bench = Bench::new();
    bench.apply(json!([
        store(&[10, 11], None, &PROMPT[..5]),
        store(&[10], None, &PROMPT[..4]),
        with(store(&[10], None, &[]), "block_size", json!(2)),
        with(store(&[10], None, &PROMPT[..2]), "block_size", json!(0)),
        with(store(&[10], None, &PROMPT[..2]), "block_size", json!(u64::MAX)),
    ]));
    assert_eq!(bench.dropped(Dropped::Shape), 5);
    assert_eq!(bench.zone.server(ID).get(ServerField::BlockSize), 0);
}

#[test]
fn lower_tiers_are_credited_where_they_hold_the_same_blocks() {
    let mut bench = Bench::new();
    let bare = |hashes: Value, medium: &str| {
        json!({"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": null,
               "token_ids": [], "block_size": 0, "medium": medium})
    };
    bench.apply(json!([store(&[10, 11], None, &PROMPT[..4])]));
    bench.apply(json!([bare(json!([11, 10, 99]), "CPU")]));
    assert_eq!(bench.dropped(Dropped::NoTokens), 1);
    bench.apply(json!([remove(10), remove(11)]));
    let overlap = bench.overlap(&PROMPT, None, None);
    assert_eq!((overlap.blocks, overlap.tiers), (2, [0, 2, 0, 0]));
    let gone = json!({"type": "BlockRemoved", "block_hashes": [11], "medium": "CPU"});
    bench.apply(json!([gone]));
    assert_eq!(bench.matched(&PROMPT), 1);
    // A tier that keeps larger pieces.
    let piece = json!({"type": "BlockStored", "block_hashes": [50], "parent_block_hash": null,
                       "token_ids": [1, 2, 3, 4], "block_size": 4, "medium": "CPU"});
    bench.apply(json!([piece]));
    assert_eq!(bench.dropped(Dropped::BlockSize), 1);
}

#[test]
fn a_block_size_other_than_the_configured_stores_nothing() {
    let mut bench = Bench::new();
    bench.configured = Some(16);
    let told = bench.apply(json!([store(&[10], None, &PROMPT[..2])]));
    assert_eq!(told, Told { cleared: false, other_block_size: Some(2) });
    assert_eq!(bench.matched(&PROMPT), 0);
    assert_eq!(bench.dropped(Dropped::BlockSize), 1);
}

#[test]
fn a_batch_applied_in_part_is_not_gone_on_from() {
    let mut bench = Bench::new();
    bench.apply(json!([store(&[10], None, &PROMPT[..2])]));
    assert_eq!(bench.applier.resume(ID).unwrap().next(), 1);
    let row = bench.zone.server(ID);
    row.set(ServerField::Applying, 1);
    assert!(bench.applier.resume(ID).is_none());
    bench.applier.clear(ID);
    assert_eq!(row.get(ServerField::Applying), 0);
    assert!(bench.applier.resume(ID).is_none());
    assert_eq!(bench.matched(&PROMPT), 0);
}

#[test]
fn stored_blocks_are_sampled() {
    let mut bench = Bench::new();
    bench.apply(json!([store(&[10, 11], None, &PROMPT[..4])]));
    let samples: Vec<_> = bench.zone.samples().newest().map(|sample| sample.tokens).collect();
    assert_eq!(samples, [[3, 4], [1, 2]]);
}
