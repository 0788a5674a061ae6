//! Events against a consumer that only counts them.

use std::collections::HashMap;

use crossbeam_channel::{Receiver, unbounded};
use proptest::prelude::*;

use super::*;
use crate::cache::Event;

const SIZE: usize = 4;

fn limits() -> Limits {
    Limits {
        block_size: SIZE,
        blocks: 13,
        chunk: 10,
        max_seqs: 3,
        prefill_rate: None,
        decode: Duration::ZERO,
        seed: 5,
    }
}

fn state() -> State {
    let cache = Cache::new(limits().blocks);
    let (waiting, running) = Default::default();
    State { cache, waiting, running, stats: Stats::default(), slow: 1.0 }
}

fn submit(state: &mut State, prompt: &[u32], decode: usize) -> (Receiver<Output>, Arc<AtomicBool>) {
    let (output, receiver) = unbounded();
    let cancelled = Arc::new(AtomicBool::new(false));
    let answer = Arc::new(Answer { text: String::new(), ids: vec![7; decode] });
    let (prompt, flag) = (prompt.to_vec(), cancelled.clone());
    let job = Job { prompt, answer, lora: None, salt: None, output, cancelled: flag };
    state.waiting.push_back(Sequence::new(job, &limits(), 5));
    (receiver, cancelled)
}

/// What a consumer of the events holds: how often each hash is stored.
#[derive(Default)]
struct Consumer(HashMap<u64, usize>);

impl Consumer {
    fn apply(&mut self, events: Vec<Event>) {
        for event in events {
            match event {
                Event::Stored { keys, .. } => {
                    keys.iter().for_each(|key| *self.0.entry(*key).or_default() += 1);
                }
                Event::Removed(key) => {
                    let count = self.0.get_mut(&key).expect("a hash that was stored");
                    *count -= 1;
                    if *count == 0 {
                        self.0.remove(&key);
                    }
                }
                Event::Cleared => self.0.clear(),
            }
        }
    }

    fn foretell(&self, prompt: &[u32]) -> usize {
        let mut chain = Chain::new(SIZE, 5, None, None);
        chain.extend(prompt);
        let longest = (prompt.len() - 1) / SIZE;
        SIZE * chain.keys[..longest].iter().take_while(|key| self.0.contains_key(key)).count()
    }
}

/// Prompts of few different blocks, so that they share prefixes, and up to 9 decoded tokens.
fn requests() -> impl Strategy<Value = Vec<(Vec<u32>, usize)>> {
    let tokens = (1usize..24, 0u32..3, 0usize..24).prop_map(|(length, kind, branch)| {
        (0..length).map(|at| if at < branch { 0 } else { kind }).collect()
    });
    prop::collection::vec((tokens, 1usize..10), 1..30)
}

proptest! {
    #[test]
    fn events_foretell_what_the_next_request_hits(requests in requests()) {
        let (mut state, mut consumer) = (state(), Consumer::default());
        for (prompt, decode) in requests {
            let foretold = consumer.foretell(&prompt);
            let (output, _) = submit(&mut state, &prompt, decode);
            while !state.waiting.is_empty() || !state.running.is_empty() {
                state.schedule(&limits());
                consumer.apply(state.cache.take_events());
                state.hand_out();
            }
            prop_assert_eq!(output.recv(), Ok(Output::Admitted { cached: foretold }));
            prop_assert_eq!(output.try_iter().count(), decode);
        }
    }

    #[test]
    fn requests_at_once_end_and_leave_no_block_in_use(
        requests in requests(),
        gone in prop::collection::vec(any::<bool>(), 30),
    ) {
        let (mut state, mut consumer) = (state(), Consumer::default());
        let mut outputs = Vec::new();
        for ((prompt, decode), &gone) in requests.iter().zip(&gone) {
            let (output, cancelled) = submit(&mut state, prompt, *decode);
            state.schedule(&limits());
            consumer.apply(state.cache.take_events());
            state.hand_out();
            cancelled.store(gone, Ordering::Relaxed);
            outputs.push((output, *decode, gone));
        }
        while !state.waiting.is_empty() || !state.running.is_empty() {
            state.schedule(&limits());
            consumer.apply(state.cache.take_events());
            state.hand_out();
        }
        prop_assert_eq!(state.cache.used(), 0);
        prop_assert_eq!(state.cache.cached(), consumer.0.len());
        for (output, decode, gone) in outputs {
            prop_assert!(gone || output.try_iter().count() == decode + 1);
        }
    }
}
