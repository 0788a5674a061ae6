//! The flow against a naive engine and a channel that loses, doubles and cuts.

use std::collections::{BTreeMap, VecDeque};

use proptest::prelude::*;

use super::*;

type Counts = BTreeMap<u8, u32>;

fn apply(counts: &mut Counts, payload: &[u8]) {
    for op in &payload[8..] {
        let count = counts.entry(op & 0x7f).or_default();
        *count = if op & 0x80 == 0 { *count + 1 } else { count.saturating_sub(1) };
    }
    counts.retain(|_, count| *count > 0);
}

#[derive(Default)]
struct Engine {
    log: Vec<Message>,
    holds: Counts,
    clock: u64,
    buffer: usize,
}

impl Engine {
    /// Each batch is another, even with the same changes: it has its time in it.
    fn publish(&mut self, ops: &[u8]) -> Message {
        self.clock += 1;
        let mut payload = self.clock.to_be_bytes().to_vec();
        payload.extend(ops.iter().filter(|op| {
            *op & 0x80 == 0 || self.holds.get(&(*op & 0x7f)).is_some_and(|count| *count > 9)
        }));
        apply(&mut self.holds, &payload);
        let mark =
            Mark { seq: self.log.len() as u64, digest: self.clock, timestamp: self.clock as f64 };
        self.log.push(Message { mark, payload: payload.clone() });
        Message { mark, payload }
    }

    fn restart(&mut self) {
        *self = Engine { clock: self.clock, buffer: self.buffer, ..Engine::default() };
    }

    fn replay(&self, from: u64) -> VecDeque<Message> {
        let first = self.log.len().saturating_sub(self.buffer).max(from as usize);
        self.log.iter().skip(first).cloned().collect()
    }
}

#[derive(Default)]
struct Gateway {
    flow: Flow,
    holds: Counts,
    connected: bool,
    asked: Option<u64>,
    dropped: Vec<Dropped>,
    /// What the zone would say of the last applied batch.
    noted: Option<(Mark, u64)>,
}

impl Gateway {
    fn with(&mut self, step: impl FnOnce(&mut Flow, &mut dyn FnMut(Action))) {
        let Gateway { flow, holds, asked, dropped, noted, .. } = self;
        step(flow, &mut |action| match action {
            Action::Apply { message, origin } => {
                apply(holds, &message.payload);
                *noted = Some((message.mark, origin));
            }
            Action::Clear(_) => {
                holds.clear();
                *noted = None;
            }
            Action::Replay(from) => *asked = Some(from),
            Action::Drop(reason) => dropped.push(reason),
            Action::Gap => {}
        });
    }
}

#[derive(Clone, Debug)]
enum Step {
    Publish(Vec<u8>),
    Lose(usize),
    Double(usize),
    Deliver(usize),
    Answer,
    Reply(usize),
    NoAnswer,
    Disconnect,
    Connect,
    Restart(usize),
    Takeover,
    Verify,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        12 => proptest::collection::vec(any::<u8>().prop_map(|b| b & 0x83), 0..4)
            .prop_map(Step::Publish),
        2 => (1usize..4).prop_map(Step::Lose),
        2 => (1usize..4).prop_map(Step::Double),
        6 => (1usize..6).prop_map(Step::Deliver),
        4 => Just(Step::Answer),
        5 => (1usize..6).prop_map(Step::Reply),
        1 => Just(Step::NoAnswer),
        1 => Just(Step::Disconnect),
        3 => Just(Step::Connect),
        1 => (0usize..9).prop_map(Step::Restart),
        1 => Just(Step::Takeover),
        1 => Just(Step::Verify),
    ];
    proptest::collection::vec(step, 0..120)
}

struct World {
    engine: Engine,
    gateway: Gateway,
    live: VecDeque<Message>,
    replies: Option<VecDeque<Message>>,
    replays: bool,
    unanswered: bool,
}

impl World {
    fn new(buffer: usize, replays: bool) -> World {
        World {
            engine: Engine { buffer, ..Engine::default() },
            gateway: Gateway::default(),
            live: VecDeque::new(),
            replies: None,
            replays,
            unanswered: false,
        }
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Publish(ops) => {
                let message = self.engine.publish(&ops);
                if self.gateway.connected {
                    self.live.push_back(message);
                }
            }
            Step::Lose(n) => {
                // Losses happen at the engine's end of the queue.
                let kept = self.live.len().saturating_sub(n);
                self.live.truncate(kept);
            }
            Step::Double(n) => {
                if let Some(message) = self.live.back().cloned() {
                    self.live.extend(std::iter::repeat_n(message, n));
                }
            }
            Step::Deliver(n) => self.deliver(n),
            Step::Answer => {
                if let Some(from) = self.gateway.asked.take() {
                    self.replies = Some(self.engine.replay(from));
                }
            }
            Step::Reply(n) => self.reply(n),
            Step::NoAnswer => {
                if self.gateway.asked.take().is_some() {
                    self.unanswered = true;
                    self.gateway.with(|flow, mut act| flow.replay_failed(&mut act));
                }
            }
            Step::Disconnect => self.disconnect(),
            Step::Connect => self.connect(),
            Step::Restart(batches) => {
                self.disconnect();
                self.engine.restart();
                for n in 0..batches {
                    self.engine.publish(&[n as u8]);
                }
            }
            Step::Takeover => self.takeover(),
            Step::Verify => {
                if self.gateway.connected {
                    self.gateway.with(|flow, mut act| flow.verify(&mut act));
                    self.drop_old_replies();
                }
            }
        }
    }

    fn deliver(&mut self, n: usize) {
        for _ in 0..n {
            if let Some(message) = self.live.pop_front() {
                self.gateway.with(|flow, mut act| flow.live(message, &mut act));
                self.drop_old_replies();
            }
        }
    }

    fn reply(&mut self, n: usize) {
        for _ in 0..n {
            let Some(replies) = &mut self.replies else { return };
            match replies.pop_front() {
                Some(message) => {
                    self.gateway.with(|flow, mut act| flow.replayed(message, &mut act));
                }
                None => {
                    self.replies = None;
                    self.gateway.with(|flow, mut act| flow.replay_ended(&mut act));
                }
            }
            self.drop_old_replies();
        }
    }

    /// A new request goes over a new connection: the old one's replies are never seen.
    fn drop_old_replies(&mut self) {
        if self.gateway.asked.is_some() {
            self.replies = None;
        }
    }

    fn disconnect(&mut self) {
        if self.gateway.connected {
            self.gateway.connected = false;
            self.gateway.flow.disconnected();
            self.gateway.asked = None;
            self.replies = None;
            self.live.clear();
        }
    }

    fn connect(&mut self) {
        if !self.gateway.connected {
            self.gateway.connected = true;
            let replays = self.replays;
            self.gateway.with(|flow, mut act| flow.connected(replays, &mut act));
        }
    }

    /// Another process goes on with what the zone says.
    fn takeover(&mut self) {
        self.disconnect();
        let noted = self.gateway.noted;
        let sequence = noted.map(|(mark, origin)| Sequence::resume(mark, origin));
        self.gateway.flow = Flow::new(sequence.unwrap_or_default());
    }

    fn settle(&mut self) {
        self.connect();
        for _ in 0..3 {
            self.step(Step::Publish(vec![1]));
            for _ in 0..20 {
                self.step(Step::Deliver(2000));
                self.step(Step::Answer);
                self.step(Step::Reply(2000));
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]
    #[test]
    fn what_is_held_is_the_engines_or_part_of_it(
        steps in steps(), buffer in prop_oneof![Just(usize::MAX), 0usize..8], replays: bool,
    ) {
        let mut world = World::new(buffer, replays);
        for step in steps {
            world.step(step);
        }
        world.settle();
        let (flow, engine) = (&world.gateway.flow, &world.engine);
        prop_assert!(!flow.is_replaying());
        prop_assert_eq!(flow.sequence().next(), engine.log.len() as u64);
        prop_assert_eq!(&world.gateway.dropped.iter().filter(|d| **d != Dropped::Stale).count(), &0);
        if flow.sequence().origin() == 0 {
            prop_assert_eq!(&world.gateway.holds, &engine.holds);
        }
        for (key, count) in &world.gateway.holds {
            prop_assert!(engine.holds.get(key).is_some_and(|held| held >= count), "key {}", key);
        }
        if replays && buffer == usize::MAX && !world.unanswered {
            prop_assert_eq!(flow.sequence().origin(), 0);
        }
    }
}

fn message(engine: &mut Engine, ops: &[u8]) -> Message {
    engine.publish(ops)
}

#[test]
fn live_messages_wait_in_order_and_past_the_bound_they_are_counted() {
    let mut world = World::new(usize::MAX, true);
    message(&mut world.engine, &[1]);
    world.connect();
    for _ in 0..MAX_WAITING + 3 {
        world.step(Step::Publish(vec![2]));
    }
    world.deliver(MAX_WAITING + 3);
    assert!(world.gateway.holds.is_empty());
    assert_eq!(world.gateway.dropped, [Dropped::Overflow; 3]);
    world.gateway.dropped.clear();
    world.settle();
    assert_eq!(world.gateway.holds, world.engine.holds);
}

#[test]
fn a_loss_that_nothing_follows_is_found_when_asked() {
    let mut world = World::new(usize::MAX, true);
    world.settle();
    world.step(Step::Publish(vec![3]));
    world.step(Step::Lose(1));
    world.step(Step::Verify);
    world.step(Step::Answer);
    world.step(Step::Reply(9));
    assert_eq!(world.gateway.holds, world.engine.holds);
    assert_eq!(world.gateway.holds.get(&3), Some(&1));
}

#[test]
fn an_engine_that_passed_the_old_number_is_found_out() {
    let mut world = World::new(usize::MAX, true);
    world.settle();
    world.step(Step::Publish(vec![3]));
    world.settle();
    world.step(Step::Restart(20));
    world.settle();
    assert_eq!(world.gateway.holds, world.engine.holds);
    assert!(!world.gateway.holds.contains_key(&127));
    assert_eq!(world.gateway.flow.sequence().origin(), 0);
}

#[test]
fn an_answer_after_all_replaces_what_was_learned_live() {
    let mut world = World::new(usize::MAX, true);
    message(&mut world.engine, &[5]);
    world.connect();
    world.step(Step::NoAnswer);
    world.step(Step::Publish(vec![6]));
    world.deliver(1);
    assert_eq!(world.gateway.flow.sequence().origin(), 1);
    world.gateway.with(|flow, mut act| flow.replay_answered(&mut act));
    world.replies = Some(world.engine.replay(0));
    world.step(Step::Reply(9));
    world.settle();
    assert_eq!(world.gateway.flow.sequence().origin(), 0);
    assert_eq!(world.gateway.holds, world.engine.holds);
}
