//! The scheduler: requests wait, run and decode in steps, as in vLLM.
//!
//! A step takes the running requests first (one token each, or the next chunk of a prompt), then
//! admits waiting ones while tokens of the step's budget and blocks are left. Prompts are thus
//! prefilled one after another. What a step stores is published when it ends, before its tokens
//! are handed out.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use crossbeam_channel::Sender;
use parking_lot::{Condvar, Mutex};

use crate::answer::Answer;
use crate::cache::{BlockId, Cache, Chain};
use crate::options::Options;
use crate::publisher::Publisher;

/// What a request hears of itself. A closed channel means that the engine died.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// It runs; that many tokens of its prompt were cached.
    Admitted { cached: usize },
    /// Token `at` of the answer was decoded.
    Token { at: usize },
}

/// A request for the engine.
pub struct Job {
    pub prompt: Vec<u32>,
    pub answer: Arc<Answer>,
    pub lora: Option<String>,
    pub salt: Option<String>,
    pub output: Sender<Output>,
    /// Set by the client's going away.
    pub cancelled: Arc<AtomicBool>,
}

/// Counts for `/metrics` and `/mock/state`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Stats {
    pub running: usize,
    pub waiting: usize,
    pub blocks: usize,
    pub blocks_used: usize,
    /// Distinct hashes that a prompt can hit.
    pub cached_hashes: usize,
    /// Prompt tokens that were looked up, and those that were found.
    pub queries: u64,
    pub hits: u64,
    pub preemptions: u64,
    pub restarts: u64,
}

pub struct Engine {
    state: Mutex<State>,
    work: Condvar,
    publisher: Arc<Publisher>,
    limits: Limits,
}

#[derive(Clone, Copy)]
struct Limits {
    block_size: usize,
    blocks: usize,
    chunk: usize,
    max_seqs: usize,
    prefill_rate: Option<f64>,
    decode: Duration,
    /// Of the block names of this process.
    seed: u64,
}

struct State {
    cache: Cache,
    waiting: VecDeque<Sequence>,
    running: Vec<Sequence>,
    stats: Stats,
    slow: f64,
}

struct Sequence {
    job: Job,
    /// The prompt and what was decoded.
    tokens: Vec<u32>,
    decoded: usize,
    chain: Chain,
    blocks: Vec<BlockId>,
    /// Tokens whose KV is in the blocks.
    computed: usize,
    /// Full blocks that the cache knows.
    stored: usize,
    /// A preempted request comes back; it is counted once.
    admitted: bool,
}

impl Engine {
    pub fn new(options: &Options, publisher: Arc<Publisher>, seed: u64) -> Engine {
        let limits = Limits {
            block_size: options.block_size,
            blocks: options.blocks,
            chunk: options.chunk,
            max_seqs: options.max_seqs,
            prefill_rate: options.prefill_rate,
            decode: options.decode,
            seed,
        };
        let state = State {
            cache: Cache::new(limits.blocks),
            waiting: VecDeque::new(),
            running: Vec::new(),
            stats: Stats::default(),
            slow: 1.0,
        };
        Engine { state: Mutex::new(state), work: Condvar::new(), publisher, limits }
    }

    pub fn submit(&self, job: Job) {
        let mut state = self.state.lock();
        let seed = self.limits.seed.wrapping_add(state.stats.restarts);
        let sequence = Sequence::new(job, &self.limits, seed);
        state.waiting.push_back(sequence);
        self.work.notify_one();
    }

    /// Runs steps for ever.
    pub fn run(&self) {
        loop {
            let pause = {
                let mut state = self.state.lock();
                while state.running.is_empty() && state.waiting.is_empty() {
                    self.work.wait(&mut state);
                }
                state.schedule(&self.limits)
            };
            if !pause.is_zero() {
                thread::sleep(pause);
            }
            let mut state = self.state.lock();
            let events = state.cache.take_events();
            self.publisher.publish(&events);
            state.hand_out();
        }
    }

    pub fn stats(&self) -> Stats {
        let state = self.state.lock();
        Stats {
            running: state.running.len(),
            waiting: state.waiting.len(),
            blocks: state.cache.len(),
            blocks_used: state.cache.used(),
            cached_hashes: state.cache.cached(),
            ..state.stats
        }
    }

    /// Multiplies the time of every step.
    pub fn set_slow(&self, factor: f64) {
        self.state.lock().slow = factor;
    }

    /// Empties the cache; told with the next step. False while blocks are in use.
    pub fn clear(&self) -> bool {
        self.state.lock().cache.clear()
    }

    /// An exit and a new start: all requests end, the cache is empty, blocks get new names.
    pub fn restart(&self) -> Result<(), String> {
        let mut state = self.state.lock();
        state.running.clear();
        state.waiting.clear();
        state.cache = Cache::new(self.limits.blocks);
        state.stats = Stats { restarts: state.stats.restarts + 1, ..Stats::default() };
        self.publisher.restart()
    }
}

impl State {
    /// Plans one step: how long it takes. Blocks are taken and stored here.
    fn schedule(&mut self, limits: &Limits) -> Duration {
        self.drop_cancelled();
        let mut budget = limits.chunk;
        let (mut prefill, mut decoding) = (0, false);
        let preempted = self.advance_running(limits, &mut budget, &mut prefill, &mut decoding);
        while !preempted && budget > 0 && self.running.len() < limits.max_seqs {
            let Some(tokens) = self.admit(limits, budget) else { break };
            budget -= tokens;
            prefill += tokens;
        }
        let time = limits.prefill_rate.map_or(0.0, |rate| prefill as f64 / rate)
            + if decoding { limits.decode.as_secs_f64() } else { 0.0 };
        Duration::try_from_secs_f64(time * self.slow).unwrap_or_default()
    }

    fn drop_cancelled(&mut self) {
        let gone = |sequence: &Sequence| sequence.job.cancelled.load(Ordering::Relaxed);
        self.waiting.retain(|sequence| !gone(sequence));
        for sequence in self.running.extract_if(.., |sequence| gone(sequence)) {
            self.cache.release(&sequence.blocks);
        }
    }

    /// True where a request had to give way; nothing is admitted in such a step.
    fn advance_running(
        &mut self,
        limits: &Limits,
        budget: &mut usize,
        prefill: &mut usize,
        decoding: &mut bool,
    ) -> bool {
        let mut preempted = false;
        let mut at = 0;
        while at < self.running.len() && *budget > 0 {
            let sequence = &mut self.running[at];
            let tokens = (sequence.tokens.len() - sequence.computed).min(*budget);
            if sequence.grow(&mut self.cache, &[], tokens, limits) {
                *budget -= tokens;
                if sequence.decoded > 0 {
                    *decoding = true;
                } else {
                    *prefill += tokens;
                }
                at += 1;
            } else {
                preempted = true;
                self.preempt();
            }
        }
        preempted
    }

    /// The request that came last gives its blocks back and waits again, first in line.
    fn preempt(&mut self) {
        let Some(mut sequence) = self.running.pop() else { return };
        self.cache.release(&sequence.blocks);
        sequence.blocks.clear();
        self.stats.preemptions += 1;
        self.waiting.push_front(sequence);
    }

    /// Lets the first waiting request run: the tokens that it prefills in this step. None where
    /// nobody waits or there is no room.
    fn admit(&mut self, limits: &Limits, budget: usize) -> Option<usize> {
        let mut sequence = self.waiting.pop_front()?;
        let total = sequence.tokens.len();
        sequence.chain.extend(&sequence.tokens);
        // The last token is always computed: its logits are what the answer starts from.
        let longest = (total - 1) / limits.block_size;
        let hit = self.cache.lookup(&sequence.chain.keys[..longest]);
        let cached = hit.len() * limits.block_size;
        let tokens = (total - cached).min(budget);
        sequence.computed = cached;
        sequence.stored = hit.len();
        if !sequence.grow(&mut self.cache, &hit, tokens, limits) {
            self.waiting.push_front(sequence);
            return None;
        }
        if !sequence.admitted {
            sequence.admitted = true;
            self.stats.queries += total as u64;
            self.stats.hits += cached as u64;
            let _ = sequence.job.output.send(Output::Admitted { cached });
        }
        self.running.push(sequence);
        Some(tokens)
    }

    /// One token for each request whose tokens are all computed; the finished ones go.
    fn hand_out(&mut self) {
        for sequence in &mut self.running {
            if sequence.computed == sequence.tokens.len() {
                let at = sequence.decoded;
                sequence.tokens.push(sequence.job.answer.ids[at]);
                sequence.decoded += 1;
                // A client that has gone is seen by its flag.
                let _ = sequence.job.output.send(Output::Token { at });
            }
        }
        let done = |sequence: &mut Sequence| sequence.decoded == sequence.job.answer.ids.len();
        for sequence in self.running.extract_if(.., done) {
            self.cache.release(&sequence.blocks);
        }
    }
}

impl Sequence {
    fn new(job: Job, limits: &Limits, seed: u64) -> Sequence {
        Sequence {
            tokens: job.prompt.clone(),
            decoded: 0,
            chain: Chain::new(limits.block_size, seed, job.lora.clone(), job.salt.clone()),
            blocks: Vec::new(),
            computed: 0,
            stored: 0,
            admitted: false,
            job,
        }
    }

    /// Takes the blocks for `tokens` more tokens, on top of those that were hit, and stores what is
    /// full then. False, and no change, where there are not enough.
    fn grow(&mut self, cache: &mut Cache, hit: &[BlockId], tokens: usize, limits: &Limits) -> bool {
        let size = limits.block_size;
        let computed = self.computed + tokens;
        let have = self.blocks.len() + hit.len();
        let need = computed.div_ceil(size).saturating_sub(have);
        let Some(fresh) = cache.allocate(hit, need) else { return false };
        self.blocks.extend(hit.iter().copied().chain(fresh));
        self.computed = computed;
        self.chain.extend(&self.tokens);
        let full = computed / size;
        if full > self.stored {
            let tokens = &self.tokens[self.stored * size..full * size];
            cache.store(&self.blocks[self.stored..full], &self.chain, self.stored, tokens);
            self.stored = full;
        }
        true
    }
}

#[cfg(test)]
mod tests;
