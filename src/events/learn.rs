//! What workers routed → the blocks that a server without events is believed to hold.
//!
//! What was routed to a server is taken as cached there for a while. It is kept apart from what
//! events tell, under [`ServerId::learned`], and counted by reference: a block goes with the last
//! prompt that used it. The ring of the zone is the memory of what is to be taken back, so a
//! change of the writer loses nothing.
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

use super::apply::{Applier, unix_ms};
use crate::index::Stored;
use crate::shared::Piece;
use crate::types::{BlockHash, EngineHash, MAX_SERVERS, ServerId, Tier};

/// How long a prompt is believed to stay in a server's cache.
const LIFETIME_MS: u64 = 120_000;
/// A message that is not finished by then never will be.
const PATIENCE: Duration = Duration::from_secs(1);
/// Slots taken, and slots freed, in a turn.
const TURN: usize = 2048;

#[derive(Default)]
pub struct Learner {
    waiting_since: Option<Instant>,
    /// The last block of a message whose end is still to come.
    before: Option<BlockHash>,
}

impl Learner {
    /// Takes in what workers have told; whether there was anything.
    pub fn work(&mut self, applier: &mut Applier<'_>) -> bool {
        self.work_at(applier, unix_ms(), Instant::now())
    }

    fn work_at(&mut self, applier: &mut Applier<'_>, now_ms: u64, now: Instant) -> bool {
        let ring = applier.zone.routed();
        let mut taken = 0;
        while taken < TURN {
            let Some(piece) = ring.take(now_ms) else { break };
            self.learn(applier, &piece);
            taken += 1;
        }
        self.pass_by(applier, taken > 0, now);
        for _ in 0..TURN {
            let Some(old) = ring.free(now_ms.saturating_sub(LIFETIME_MS)) else { break };
            if let Some(piece) = old {
                let engines: Vec<EngineHash> = piece.words.iter().map(|w| EngineHash(*w)).collect();
                applier.writer.remove(piece.server.learned(), Tier::Gpu, &engines);
            }
        }
        taken > 0
    }

    fn learn(&mut self, applier: &mut Applier<'_>, piece: &Piece) {
        let parent = if piece.first { None } else { self.before };
        let known = piece.first || parent.is_some();
        self.before = None;
        if known && piece.server.index() < MAX_SERVERS {
            let blocks: Vec<Stored> = piece
                .words
                .iter()
                .map(|word| Stored { engine: EngineHash(*word), block: BlockHash(*word) })
                .collect();
            applier.writer.store(piece.server.learned(), Tier::Gpu, parent, &blocks, true);
            self.before = piece.words.last().filter(|_| !piece.last).map(|word| BlockHash(*word));
        }
    }

    fn pass_by(&mut self, applier: &Applier<'_>, moved: bool, now: Instant) {
        let ring = applier.zone.routed();
        if moved || !ring.is_waiting() {
            self.waiting_since = None;
        } else if now.duration_since(*self.waiting_since.get_or_insert(now)) >= PATIENCE {
            ring.pass();
            self.before = None;
            self.waiting_since = None;
        }
    }
}

impl Applier<'_> {
    /// Forgets what was learned from what was routed to a server.
    pub fn unlearn(&mut self, id: ServerId) {
        self.writer.clear(id.learned());
        self.zone.routed().forget(id);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;
    use crate::blocks::HashKey;
    use crate::index::{Index, Writer};
    use crate::shared::{MIN_ZONE_BYTES, Zone};
    use crate::types::Overlap;

    const A: ServerId = ServerId(5);

    struct World<'z> {
        zone: Zone<'z>,
        applier: Applier<'z>,
        learner: Learner,
        start: Instant,
    }

    impl<'z> World<'z> {
        fn new(words: &'z [AtomicU64]) -> World<'z> {
            let zone = Zone::format(words, HashKey([1, 2])).unwrap();
            Index::format(zone.index_words()).unwrap();
            let (writer, _) = Writer::attach(zone.index_words()).unwrap();
            let applier = Applier::new(writer, zone);
            World { zone, applier, learner: Learner::default(), start: Instant::now() }
        }

        fn push(&self, server: ServerId, blocks: std::ops::Range<u64>) {
            assert!(self.zone.routed().push(server, &blocks.collect::<Vec<_>>()));
        }

        fn work(&mut self, ms: u64) {
            let now = self.start + Duration::from_millis(ms);
            while self.learner.work_at(&mut self.applier, 1_000_000 + ms, now) {}
        }

        fn held(&self, server: ServerId, blocks: std::ops::Range<u64>) -> u32 {
            let prompt: Vec<BlockHash> = blocks.map(BlockHash).collect();
            let mut out = vec![Overlap::default(); crate::index::MAX_SERVERS];
            Index::open(self.zone.index_words()).unwrap().lookup(&prompt, &mut out).unwrap();
            out[server.learned().index()].blocks
        }
    }

    fn words() -> Vec<AtomicU64> {
        (0..MIN_ZONE_BYTES / 8).map(|_| AtomicU64::new(0)).collect()
    }

    #[test]
    fn a_block_goes_with_the_last_prompt_that_used_it() {
        let words = words();
        let mut world = World::new(&words);
        world.push(A, 1..200);
        world.work(0);
        assert_eq!(world.held(A, 1..300), 199);
        assert_eq!(world.held(ServerId(6), 1..300), 0);
        world.push(A, 1..50);
        world.work(60_000);
        world.work(119_999);
        assert_eq!(world.held(A, 1..300), 199);
        world.work(120_000);
        assert_eq!(world.held(A, 1..300), 49);
        world.work(180_000);
        assert_eq!(world.held(A, 1..300), 0);
    }

    #[test]
    fn a_new_writer_takes_back_what_the_last_one_learned() {
        let words = words();
        let mut world = World::new(&words);
        world.push(A, 1..10);
        world.work(0);
        let (writer, _) = Writer::attach(world.zone.index_words()).unwrap();
        world.applier = Applier::new(writer, world.zone);
        world.learner = Learner::default();
        assert_eq!(world.held(A, 1..10), 9);
        world.work(120_000);
        assert_eq!(world.held(A, 1..10), 0);
    }

    #[test]
    fn what_is_unlearned_is_not_taken_back_again() {
        let words = words();
        let mut world = World::new(&words);
        world.push(A, 1..10);
        world.work(0);
        world.applier.unlearn(A);
        assert_eq!(world.held(A, 1..10), 0);
        world.push(A, 1..10);
        world.work(1000);
        world.work(120_000);
        assert_eq!(world.held(A, 1..10), 9);
        world.work(121_000);
        assert_eq!(world.held(A, 1..10), 0);
    }

    #[test]
    fn the_oldest_goes_early_where_room_is_short() {
        let words = words();
        let mut world = World::new(&words);
        for n in 0..4000 {
            world.push(A, n * 100..n * 100 + 60);
            world.work(n);
        }
        assert_eq!(world.zone.routed().lost(), 0);
        assert_eq!(world.held(A, 0..60), 0);
        assert_eq!(world.held(A, 399_900..399_960), 60);
    }
}
