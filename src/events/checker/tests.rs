use std::sync::atomic::AtomicU64;

use serde_json::{Value, json};

use super::*;
use crate::blocks::{HashKey, hash_whole, root};
use crate::events::apply::Habits;
use crate::events::sequence::Mark;
use crate::index::Writer;
use crate::shared::{MIN_ZONE_BYTES, ModelKey};

const A: ServerId = ServerId(3);
const PROMPT: [TokenId; 8] = [1, 2, 3, 4, 5, 6, 7, 8];

struct World {
    zone: Zone<'static>,
    applier: Applier<'static>,
    now: Instant,
}

impl World {
    fn new() -> World {
        let words: Vec<AtomicU64> = (0..MIN_ZONE_BYTES / 8).map(|_| AtomicU64::new(0)).collect();
        let zone = Zone::format(words.leak(), HashKey([1, 2])).unwrap();
        Index::format(zone.index_words()).unwrap();
        let (writer, _) = Writer::attach(zone.index_words()).unwrap();
        zone.server(A).set_mode(Mode::Events);
        zone.server(A).set(ServerField::Connected, 1);
        zone.server(A).set(ServerField::BlockSize, 2);
        World { zone, applier: Applier::new(writer, zone), now: Instant::now() }
    }

    /// Expects the blocks of a prompt from the `first` on.
    fn send(&self, prompt: &[TokenId], first: usize) -> Ticket {
        let key = self.zone.hash_key();
        let mut blocks = Vec::new();
        hash_whole(&key, 2, None, None, prompt, &mut blocks);
        let start = if first == 0 { root(&key, 2, None) } else { blocks[first - 1] };
        let ticket = self.zone.checks().take(A).unwrap();
        let expected = Expected {
            server: A,
            model: ModelKey::of("m"),
            model_name: "m".into(),
            block_size: 2,
            first: first as u32,
            start,
            blocks: blocks.split_off(first),
            tokens: prompt[2 * first..].to_vec(),
        };
        self.zone.checks().send(ticket, &expected);
        ticket
    }

    fn apply(&mut self, events: Value) {
        let payload = rmp_serde::to_vec(&json!([1.5, events])).unwrap();
        let batch = wire::batch(&payload).unwrap();
        let mark = Mark { seq: 0, digest: 0, timestamp: 1.5 };
        self.applier.apply(A, None, &mut Habits::default(), &batch, mark, 0);
    }

    /// What is found so many milliseconds after the last time.
    fn after(&mut self, ms: u64) -> Vec<String> {
        self.now += Duration::from_millis(ms);
        let found = self.applier.check(self.now);
        found.into_iter().map(|found| found.text).collect()
    }

    /// The prompt's answer begins, and a second is over.
    fn end(&mut self, ticket: Ticket) -> Vec<String> {
        self.end_after(ticket, 1000)
    }

    fn end_after(&mut self, ticket: Ticket, ms: u64) -> Vec<String> {
        self.zone.checks().answered(ticket);
        assert_eq!(self.after(0), [""; 0]);
        assert_eq!(self.after(ms - 1), [""; 0]);
        assert_eq!(self.zone.checks().progress(ticket), Some(Progress::Answered));
        let found = self.after(1);
        assert_eq!(self.zone.checks().in_use().count(), 0);
        found
    }

    /// How many prompts left the same blocks, others, none.
    fn counts(&self) -> [u64; 3] {
        let trust = self.zone.server(A).trust(ModelKey::of("m")).unwrap();
        [TrustField::BlocksSame, TrustField::BlocksDiffer, TrustField::BlocksAbsent]
            .map(|field| trust.get(field))
    }
}

fn store(hashes: &[u64], parent: Option<u64>, tokens: &[u32]) -> Value {
    json!({"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent,
           "token_ids": tokens, "block_size": 2})
}

#[test]
fn blocks_that_come_are_as_foretold_even_if_they_go_at_once() {
    let mut world = World::new();
    let ticket = world.send(&PROMPT, 0);
    world.apply(json!([store(&[10, 11], None, &PROMPT[..4])]));
    world.apply(json!([store(&[12, 13, 14], Some(11), &[5, 6, 7, 8, 9, 10])]));
    let remove = |hash| json!({"type": "BlockRemoved", "block_hashes": [hash]});
    world.apply(json!([remove(14), remove(13), remove(12)]));
    assert_eq!(world.end(ticket), [""; 0]);
    assert_eq!(world.counts(), [1, 0, 0]);
    // What is held already need not come.
    let ticket = world.send(&PROMPT[..4], 0);
    assert_eq!(world.end(ticket), [""; 0]);
    assert_eq!(world.counts(), [2, 0, 0]);
}

#[test]
fn the_first_block_that_differs_is_found() {
    let mut world = World::new();
    world.apply(json!([store(&[10], None, &PROMPT[..2])]));
    let ticket = world.send(&PROMPT, 1);
    // Another prompt branches off at the same place; ours goes on, and then differs.
    world.apply(json!([store(&[20, 21], Some(10), &[9, 9, 5, 6])]));
    world.apply(json!([store(&[11, 12, 13], Some(10), &[3, 4, 5, 7, 7, 8])]));
    world.apply(json!([store(&[22], Some(11), &[9, 9])]));
    let found = world.end(ticket);
    let difference = world.zone.differences().newest().next().unwrap();
    assert_eq!((difference.block, difference.block_size), (2, 2));
    assert_eq!((&difference.tokens, &difference.engine_tokens), (&vec![5, 6], &vec![5, 7]));
    assert_eq!(difference.engine_hash, EngineHash(12));
    let text = format!(
        "block 2 of a prompt of model \"m\" differs from token 1 of it on: {:016x} was \
         foretold, the engine stored 000000000000000c; the index page has more",
        difference.hash.0
    );
    assert_eq!(found, [text]);
    assert_eq!(world.counts(), [0, 1, 0]);
}

#[test]
fn trust_ends_and_comes_back_and_each_is_told_once() {
    let mut world = World::new();
    let mut told = Vec::new();
    for n in 0..10 {
        let prompt = [100 + n, 2];
        let ticket = world.send(&prompt, 0);
        match n {
            0..4 | 9 => world.apply(json!([store(&[10 + u64::from(n)], None, &[100 + n, 3])])),
            4 => {}
            _ => world.apply(json!([store(&[20 + u64::from(n)], None, &prompt)])),
        }
        let ms = if n == 4 { 5000 } else { 1000 };
        told.push(world.end_after(ticket, ms).pop().unwrap_or_default());
    }
    let ends = "prompts of model \"m\" do not leave the blocks that they should, events are \
                not used for it";
    let returns = "prompts of model \"m\" leave the blocks that they should, events are used";
    assert!(told[0].starts_with("block 0 of a prompt"), "{told:?}");
    assert_eq!(told[1..9], ["", ends, "", "", "", "", returns, ""]);
    assert!(told[9].starts_with("block 0 of a prompt"), "{told:?}");
    assert_eq!(world.counts(), [4, 5, 1]);
}

#[test]
fn nothing_is_said_of_prompts_that_fail_or_of_events_with_holes() {
    let mut world = World::new();
    let ticket = world.send(&PROMPT, 0);
    world.zone.checks().give_up(ticket);
    assert_eq!(world.after(0), [""; 0]);
    assert_eq!(world.zone.checks().in_use().count(), 0);
    let row = world.zone.server(A);
    for spoil in [ServerField::Gaps, ServerField::Connected, ServerField::Mode] {
        let ticket = world.send(&PROMPT, 0);
        world.after(0);
        let before = row.get(spoil);
        row.set(spoil, before ^ 1);
        assert_eq!(world.end_after(ticket, 5000), [""; 0]);
        row.set(spoil, before);
    }
    let ticket = world.send(&PROMPT, 0);
    world.apply(json!([["AllBlocksCleared"]]));
    assert_eq!(world.zone.checks().progress(ticket), None);
    let ticket = world.send(&PROMPT, 0);
    assert_eq!(world.after(599_000), [""; 0]);
    assert!(world.zone.checks().progress(ticket).is_some());
    assert_eq!(world.after(600_000), [""; 0]);
    assert_eq!(world.zone.checks().progress(ticket), None);
    assert_eq!(world.counts(), [0, 0, 0]);
}

#[test]
fn a_new_holder_of_the_lease_begins_with_nothing() {
    let world = World::new();
    let (sent, taken) = (world.send(&PROMPT, 0), world.zone.checks().take(A).unwrap());
    Checker::new(world.zone);
    let left: Vec<Ticket> = world.zone.checks().in_use().map(|(ticket, _)| ticket).collect();
    assert_eq!(left, [taken]);
    assert_ne!(left, [sent]);
}
