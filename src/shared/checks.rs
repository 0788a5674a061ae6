//! Prompts on their way, whose blocks the holder of the lease looks out for.
//!
//! A worker takes a slot before it sends a prompt to a server, and writes down which blocks the
//! server must store. It says when the answer begins. The holder of the lease reads the slot
//! before it applies the events that come next, so it misses none that the prompt causes.
//!
//! A slot's word says what state it is in and whose it is. Each taking of a slot has a number, so
//! a worker whose slot was given up by the holder of the lease cannot touch its next owner's.

use std::sync::atomic::{AtomicU64, Ordering};

use super::{ModelKey, stamped};
use crate::types::{BlockHash, ServerId, TokenId};

pub const SLOTS: usize = 64;
/// Slots of one server at most: many servers share them.
const EACH: usize = 4;
/// Most blocks, and most tokens, of a prompt that are looked out for.
pub const MAX_BLOCKS: usize = 64;
pub const MAX_TOKENS: usize = 1024;

const NAME_WORDS: usize = 16;
const KEY: usize = 0;
const SHAPE: usize = 1;
const START: usize = 2;
const NAME_LEN: usize = 3;
const NAME: usize = 4;
const HASHES: usize = NAME + NAME_WORDS;
const TOKENS: usize = HASHES + MAX_BLOCKS;
const SLOT_WORDS: usize = TOKENS + MAX_TOKENS / 2;

const PUSHED: usize = 0;
const STATES: usize = 8;
const HEADER: usize = STATES + SLOTS;
pub(super) const WORDS: usize = HEADER + SLOTS * SLOT_WORDS;

const FREE: u64 = 0;
const TAKEN: u64 = 1;
const SENT: u64 = 2;
const ANSWERED: u64 = 3;
const GIVEN_UP: u64 = 4;
const STATE_BITS: u32 = 8;
const SERVER_BITS: u32 = 16;

/// How far the prompt of a slot has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// It is being written down.
    Taken,
    Sent,
    /// Its first token is back.
    Answered,
    /// It will not be answered, or not by this server.
    GivenUp,
}

/// What a server must store of a prompt: blocks that follow `start`, which it holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expected {
    pub server: ServerId,
    pub model: ModelKey,
    /// At most 128 bytes of it.
    pub model_name: String,
    pub block_size: u32,
    /// The first block's place in the prompt.
    pub first: u32,
    pub start: BlockHash,
    /// 1 to 64 blocks, and their tokens.
    pub blocks: Vec<BlockHash>,
    pub tokens: Vec<TokenId>,
}

/// One taking of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket {
    slot: usize,
    /// The slot's word, its state apart.
    owner: u64,
}

#[derive(Clone, Copy, Debug)]
pub struct Checks<'a> {
    words: &'a [AtomicU64],
}

impl<'a> Checks<'a> {
    pub(super) fn new(words: &'a [AtomicU64]) -> Checks<'a> {
        Checks { words }
    }

    /// A slot for a prompt of this server, if one is free. [`Checks::send`] has to follow.
    pub fn take(&self, server: ServerId) -> Option<Ticket> {
        let (mut free, mut own) = (None, 0);
        for slot in 0..SLOTS {
            let word = self.state(slot).load(Ordering::Relaxed);
            if word & 0xff == FREE {
                free = free.or(Some((slot, word)));
            } else if word >> STATE_BITS & 0xffff == u64::from(server.0) {
                own += 1;
            }
        }
        let (slot, word) = free.filter(|_| own < EACH)?;
        let turn = (word >> (STATE_BITS + SERVER_BITS)).wrapping_add(1);
        let owner = turn << (STATE_BITS + SERVER_BITS) | u64::from(server.0) << STATE_BITS;
        let taken = self.state(slot).compare_exchange(
            word,
            owner | TAKEN,
            Ordering::Acquire,
            Ordering::Relaxed,
        );
        taken.ok().map(|_| Ticket { slot, owner })
    }

    /// Writes down what is expected. What finds no room is not looked out for.
    pub fn send(&self, ticket: Ticket, expected: &Expected) {
        let row = self.row(ticket.slot);
        let size = (expected.block_size as usize).max(1);
        let count = expected.blocks.len().min(MAX_BLOCKS).min(MAX_TOKENS / size);
        let name = &expected.model_name.as_bytes()[..expected.model_name.len().min(NAME_WORDS * 8)];
        let shape = (count as u64) << 56
            | u64::from(expected.first & 0xff_ffff) << 32
            | u64::from(expected.block_size);
        row[KEY].store(expected.model.0, Ordering::Relaxed);
        row[SHAPE].store(shape, Ordering::Relaxed);
        row[START].store(expected.start.0, Ordering::Relaxed);
        row[NAME_LEN].store(name.len() as u64, Ordering::Relaxed);
        for (word, chunk) in row[NAME..].iter().zip(name.chunks(8)) {
            let mut le = [0; 8];
            le[..chunk.len()].copy_from_slice(chunk);
            word.store(u64::from_le_bytes(le), Ordering::Relaxed);
        }
        for (word, block) in row[HASHES..].iter().zip(&expected.blocks[..count]) {
            word.store(block.0, Ordering::Relaxed);
        }
        let tokens = &expected.tokens[..expected.tokens.len().min(count * size)];
        stamped::set_tokens(&row[TOKENS..], tokens);
        if self.pass(ticket, TAKEN, SENT) {
            self.words[PUSHED].fetch_add(1, Ordering::Release);
        }
    }

    pub fn answered(&self, ticket: Ticket) {
        self.pass(ticket, SENT, ANSWERED);
    }

    pub fn give_up(&self, ticket: Ticket) {
        self.pass(ticket, SENT, GIVEN_UP);
    }

    /// Whether the slot was still its taker's, and in the state that it leaves.
    fn pass(&self, ticket: Ticket, from: u64, to: u64) -> bool {
        let (from, to) = (ticket.owner | from, ticket.owner | to);
        let word = self.state(ticket.slot);
        word.compare_exchange(from, to, Ordering::Release, Ordering::Relaxed).is_ok()
    }

    /// How many were ever sent: changes when there is something new to read.
    pub fn sent(&self) -> u64 {
        self.words[PUSHED].load(Ordering::Acquire)
    }

    /// The slots in use.
    pub fn in_use(&self) -> impl Iterator<Item = (Ticket, Progress)> + '_ {
        (0..SLOTS).filter_map(|slot| {
            let word = self.state(slot).load(Ordering::Acquire);
            let ticket = Ticket { slot, owner: word & !0xff };
            Some((ticket, progress(word)?))
        })
    }

    /// How far this taking of the slot is; `None` once it is over.
    pub fn progress(&self, ticket: Ticket) -> Option<Progress> {
        let word = self.state(ticket.slot).load(Ordering::Acquire);
        if word & !0xff == ticket.owner { progress(word) } else { None }
    }

    /// What was sent.
    pub fn read(&self, ticket: Ticket) -> Expected {
        let row = self.row(ticket.slot);
        let word = |at: usize| row[at].load(Ordering::Relaxed);
        let block_size = word(SHAPE) as u32;
        let count = MAX_BLOCKS.min((word(SHAPE) >> 56) as usize);
        let name: Vec<u8> = row[NAME..HASHES]
            .iter()
            .flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes())
            .take(word(NAME_LEN) as usize)
            .collect();
        let hashes = row[HASHES..].iter().take(count);
        Expected {
            server: ServerId((ticket.owner >> STATE_BITS) as u16),
            model: ModelKey(word(KEY)),
            model_name: String::from_utf8_lossy(&name).into_owned(),
            block_size,
            first: (word(SHAPE) >> 32 & 0xff_ffff) as u32,
            start: BlockHash(word(START)),
            blocks: hashes.map(|word| BlockHash(word.load(Ordering::Relaxed))).collect(),
            tokens: stamped::tokens(&row[TOKENS..], count * block_size as usize),
        }
    }

    /// Frees a slot. Only the holder of the lease calls this.
    pub fn free(&self, ticket: Ticket) {
        self.state(ticket.slot).store(ticket.owner | FREE, Ordering::Release);
    }

    fn state(&self, slot: usize) -> &'a AtomicU64 {
        &self.words[STATES + slot]
    }

    fn row(&self, slot: usize) -> &'a [AtomicU64] {
        &self.words[HEADER + slot * SLOT_WORDS..HEADER + (slot + 1) * SLOT_WORDS]
    }
}

fn progress(word: u64) -> Option<Progress> {
    match word & 0xff {
        TAKEN => Some(Progress::Taken),
        SENT => Some(Progress::Sent),
        ANSWERED => Some(Progress::Answered),
        GIVEN_UP => Some(Progress::GivenUp),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words() -> Vec<AtomicU64> {
        (0..WORDS).map(|_| AtomicU64::new(0)).collect()
    }

    fn expected(server: u16, first: u32, size: u32, blocks: u64) -> Expected {
        Expected {
            server: ServerId(server),
            model: ModelKey::of("org/name"),
            model_name: "org/name".into(),
            block_size: size,
            first,
            start: BlockHash(99),
            blocks: (1..=blocks).map(BlockHash).collect(),
            tokens: (0..size * blocks as u32).collect(),
        }
    }

    #[test]
    fn what_is_sent_is_read() {
        let words = words();
        let checks = Checks::new(&words);
        for n in 0..200 {
            let ticket = checks.take(ServerId(7)).unwrap();
            assert_eq!(checks.in_use().collect::<Vec<_>>(), [(ticket, Progress::Taken)]);
            let sent = expected(7, n, 16, 64);
            checks.send(ticket, &sent);
            assert_eq!(checks.sent(), u64::from(n) + 1);
            assert_eq!(checks.progress(ticket), Some(Progress::Sent));
            assert_eq!(checks.read(ticket), sent);
            checks.answered(ticket);
            checks.give_up(ticket);
            assert_eq!(checks.progress(ticket), Some(Progress::Answered));
            checks.free(ticket);
            assert_eq!(checks.progress(ticket), None);
        }
    }

    #[test]
    fn a_long_prompt_is_looked_out_for_in_part() {
        let words = words();
        let checks = Checks::new(&words);
        for (size, blocks) in [(1, 64), (16, 64), (17, 60), (128, 8), (1024, 1)] {
            let ticket = checks.take(ServerId(1)).unwrap();
            checks.send(ticket, &expected(1, 0, size, 100));
            assert_eq!(checks.read(ticket), expected(1, 0, size, blocks), "{size}");
            checks.free(ticket);
        }
    }

    #[test]
    fn a_server_has_few_slots_and_a_late_word_does_not_reach_the_next() {
        let words = words();
        let checks = Checks::new(&words);
        let tickets: Vec<Ticket> = std::iter::from_fn(|| checks.take(ServerId(1))).collect();
        assert_eq!(tickets.len(), EACH);
        assert!(checks.take(ServerId(2)).is_some());
        checks.send(tickets[0], &expected(1, 0, 16, 1));
        checks.free(tickets[0]);
        let next = checks.take(ServerId(1)).unwrap();
        checks.send(next, &expected(1, 0, 16, 1));
        checks.give_up(tickets[0]);
        assert_eq!(checks.progress(next), Some(Progress::Sent));
        assert_eq!(checks.progress(tickets[0]), None);
        assert_eq!((3..1000).filter_map(|n| checks.take(ServerId(n))).count(), SLOTS - EACH - 1);
    }

    #[test]
    fn takers_in_many_threads_tear_nothing() {
        const EACH_THREAD: u32 = 3000;
        let words = words();
        let checks = Checks::new(&words);
        let done = std::sync::atomic::AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for server in 0..3u16 {
                let done = &done;
                scope.spawn(move || {
                    let mut sent = 0;
                    while sent < EACH_THREAD {
                        let Some(ticket) = checks.take(ServerId(server)) else {
                            std::thread::yield_now();
                            continue;
                        };
                        checks.send(ticket, &expected(server, sent, 16, 1 + u64::from(sent % 64)));
                        checks.answered(ticket);
                        sent += 1;
                    }
                    done.fetch_add(1, Ordering::Release);
                });
            }
            let mut seen = [0; 3];
            while seen != [EACH_THREAD; 3] {
                let ended = done.load(Ordering::Acquire) == 3;
                let open: Vec<Ticket> = checks
                    .in_use()
                    .filter(|(_, progress)| *progress != Progress::Taken)
                    .map(|(ticket, _)| ticket)
                    .collect();
                assert!(!ended || !open.is_empty(), "{seen:?} of {EACH_THREAD} each");
                for ticket in open {
                    let read = checks.read(ticket);
                    let blocks = 1 + u64::from(read.first % 64);
                    assert_eq!(read, expected(read.server.0, read.first, 16, blocks));
                    checks.free(ticket);
                    seen[read.server.index()] += 1;
                }
            }
            assert_eq!(checks.sent(), 3 * u64::from(EACH_THREAD));
        });
    }
}
