//! What workers tell the holder of the lease of the requests that they route: the block hashes of
//! prompts, from their start, that went to servers whose events do not tell. A ring of slots.
//!
//! Any process pushes, without a lock; one takes. A message fills one slot or several in a row.
//! Slots that were taken stay until the taker frees them, so that what was learned from them can
//! be taken back after any change of the taker.
//!
//! 1. A pusher reserves its slots with one swap, writes them, and stamps each last, with release:
//!    a taker that sees the stamp sees the slot.
//! 2. A pusher that dies in between leaves a slot without its stamp. The taker passes it by after
//!    a while; a pusher that was only slow may still write there, and nobody reads it.
//! 3. A slot is used again only after the taker freed it, with release, and a pusher has seen
//!    that, with acquire: no slot changes while it is read.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::types::ServerId;

const SLOT: usize = 64;
const STAMP: usize = 0;
const HEAD: usize = 1;
const TAKEN: usize = 2;
const WORDS_AT: usize = 4;
/// Words of a message that one slot takes.
const PIECE: usize = SLOT - WORDS_AT;

const RESERVED: usize = 0;
const TAKEN_TO: usize = 8;
const FREED_TO: usize = 16;
const LOST: usize = 24;
const HEADER: usize = 64;

/// One part in so many of the zone, and the most words of it.
const SHARE: usize = 16;
const MOST_WORDS: usize = 4 << 20;
/// A message takes at most one part in so many of the ring.
const MESSAGE_SHARE: u64 = 4;

/// Words of the ring in a zone of so many words.
pub(super) fn words_of(zone: usize) -> usize {
    HEADER + ((zone / SHARE).min(MOST_WORDS) / SLOT).max(1) * SLOT
}

/// One slot of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    pub server: ServerId,
    /// Whether the message begins and ends here.
    pub first: bool,
    pub last: bool,
    pub words: Vec<u64>,
}

#[derive(Clone, Copy, Debug)]
pub struct Routed<'a> {
    words: &'a [AtomicU64],
}

impl<'a> Routed<'a> {
    pub(super) fn new(words: &'a [AtomicU64]) -> Routed<'a> {
        Routed { words }
    }

    fn capacity(&self) -> u64 {
        ((self.words.len() - HEADER) / SLOT) as u64
    }

    fn slot(&self, at: u64) -> &'a [AtomicU64] {
        let first = HEADER + (at % self.capacity()) as usize * SLOT;
        &self.words[first..first + SLOT]
    }

    /// Leaves a message; false where there is no room for it.
    pub fn push(&self, server: ServerId, message: &[u64]) -> bool {
        let pieces = message.len().div_ceil(PIECE).max(1) as u64;
        let Some(first) = self.reserve(pieces) else {
            self.words[LOST].fetch_add(1, Ordering::Relaxed);
            return false;
        };
        for n in 0..pieces {
            let from = n as usize * PIECE;
            let piece = &message[from..message.len().min(from + PIECE)];
            let slot = self.slot(first + n);
            for (word, value) in slot[WORDS_AT..].iter().zip(piece) {
                word.store(*value, Ordering::Relaxed);
            }
            let head = u64::from(server.0)
                | (piece.len() as u64) << 16
                | u64::from(n == 0) << 32
                | u64::from(n + 1 == pieces) << 33;
            slot[HEAD].store(head, Ordering::Relaxed);
            slot[STAMP].store(first + n + 1, Ordering::Release);
        }
        true
    }

    fn reserve(&self, pieces: u64) -> Option<u64> {
        if pieces > self.capacity() / MESSAGE_SHARE {
            return None;
        }
        let mut at = self.words[RESERVED].load(Ordering::Relaxed);
        loop {
            let freed = self.words[FREED_TO].load(Ordering::Acquire);
            if at.wrapping_sub(freed) + pieces > self.capacity() {
                return None;
            }
            let word = &self.words[RESERVED];
            match word.compare_exchange(at, at + pieces, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return Some(at),
                Err(now) => at = now,
            }
        }
    }

    /// Messages that found no room.
    pub fn lost(&self) -> u64 {
        self.words[LOST].load(Ordering::Relaxed)
    }

    /// The next slot, noted as taken at `now_ms`. `None` if there is none, or its pusher is not
    /// done. Only the holder of the lease takes.
    pub fn take(&self, now_ms: u64) -> Option<Piece> {
        let at = self.words[TAKEN_TO].load(Ordering::Relaxed);
        let slot = self.slot(at);
        if !self.is_waiting() || slot[STAMP].load(Ordering::Acquire) != at + 1 {
            return None;
        }
        let piece = read(slot);
        // Taken before it is used: what a taker that dies leaves half done may be taken back
        // once too often, but is never kept for ever.
        slot[TAKEN].store(now_ms.max(1), Ordering::Relaxed);
        self.words[TAKEN_TO].store(at + 1, Ordering::Relaxed);
        Some(piece)
    }

    /// Whether a slot is reserved that was not taken.
    pub fn is_waiting(&self) -> bool {
        self.words[TAKEN_TO].load(Ordering::Relaxed) != self.words[RESERVED].load(Ordering::Relaxed)
    }

    /// Passes the next slot by: its pusher is gone.
    pub fn pass(&self) {
        let at = self.words[TAKEN_TO].load(Ordering::Relaxed);
        self.slot(at)[TAKEN].store(0, Ordering::Relaxed);
        self.words[TAKEN_TO].store(at + 1, Ordering::Relaxed);
    }

    /// Frees the oldest taken slot if it was taken at `until_ms` or before, or room is short, or
    /// there is nothing to take back. Tells what it held.
    pub fn free(&self, until_ms: u64) -> Option<Option<Piece>> {
        let at = self.words[FREED_TO].load(Ordering::Relaxed);
        if at == self.words[TAKEN_TO].load(Ordering::Relaxed) {
            return None;
        }
        let slot = self.slot(at);
        let taken = slot[TAKEN].load(Ordering::Relaxed);
        let piece = (taken > 0).then(|| read(slot));
        let used = self.words[RESERVED].load(Ordering::Relaxed).wrapping_sub(at);
        let short = used > self.capacity() - self.capacity() / MESSAGE_SHARE;
        if piece.is_some() && taken > until_ms && !short {
            return None;
        }
        self.words[FREED_TO].store(at + 1, Ordering::Release);
        Some(piece)
    }

    /// Nothing of what was taken of this server has to be taken back.
    pub fn forget(&self, server: ServerId) {
        let freed = self.words[FREED_TO].load(Ordering::Relaxed);
        let taken = self.words[TAKEN_TO].load(Ordering::Relaxed);
        for slot in (freed..taken).map(|at| self.slot(at)) {
            if read(slot).server == server {
                slot[TAKEN].store(0, Ordering::Relaxed);
            }
        }
    }
}

fn read(slot: &[AtomicU64]) -> Piece {
    let head = slot[HEAD].load(Ordering::Relaxed);
    let count = (head >> 16 & 0xff) as usize;
    let words = slot[WORDS_AT..].iter().take(count);
    Piece {
        server: ServerId(head as u16),
        first: head >> 32 & 1 == 1,
        last: head >> 33 & 1 == 1,
        words: words.map(|word| word.load(Ordering::Relaxed)).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(slots: usize) -> Vec<AtomicU64> {
        (0..HEADER + slots * SLOT).map(|_| AtomicU64::new(0)).collect()
    }

    fn message(from: u64, len: u64) -> Vec<u64> {
        (from..from + len).collect()
    }

    #[test]
    fn messages_come_out_in_order_and_whole() {
        let words = words(16);
        let ring = Routed::new(&words);
        assert_eq!(ring.take(1), None);
        for round in 0..20 {
            assert!(ring.push(ServerId(round), &message(1, 130)));
            assert!(ring.push(ServerId(900), &[7]));
            let pieces: Vec<Piece> = std::iter::from_fn(|| ring.take(5)).collect();
            let shape: Vec<_> = pieces.iter().map(|p| (p.server.0, p.first, p.last)).collect();
            assert_eq!(
                shape,
                [
                    (round, true, false),
                    (round, false, false),
                    (round, false, true),
                    (900, true, true),
                ]
            );
            let all: Vec<u64> = pieces[..3].iter().flat_map(|p| p.words.clone()).collect();
            assert_eq!(all, message(1, 130));
            assert_eq!(pieces[3].words, [7]);
            while ring.free(5).is_some() {}
        }
        assert_eq!(ring.lost(), 0);
    }

    #[test]
    fn what_finds_no_room_is_counted() {
        let words = words(16);
        let ring = Routed::new(&words);
        assert!(!ring.push(ServerId(1), &message(0, 241)));
        for _ in 0..4 {
            assert!(ring.push(ServerId(1), &message(0, 240)));
        }
        assert!(!ring.push(ServerId(1), &[1]));
        assert_eq!(ring.lost(), 2);
        // Short of room: freed whenever it was taken.
        while ring.take(100).is_some() {}
        let freed = std::iter::from_fn(|| ring.free(0)).count();
        assert_eq!(freed, 4);
        assert!(ring.push(ServerId(1), &message(0, 240)));
    }

    #[test]
    fn a_slot_is_kept_for_its_time() {
        let words = words(64);
        let ring = Routed::new(&words);
        ring.push(ServerId(1), &[1]);
        ring.push(ServerId(2), &[2]);
        ring.push(ServerId(1), &[3]);
        ring.take(100);
        ring.take(200);
        ring.take(300);
        assert_eq!(ring.free(99), None);
        assert_eq!(ring.free(100).flatten().map(|p| p.words), Some(vec![1]));
        assert_eq!(ring.free(199), None);
        ring.forget(ServerId(2));
        assert_eq!(ring.free(199), Some(None));
        assert_eq!(ring.free(299), None);
        assert_eq!(ring.free(300).flatten().map(|p| p.words), Some(vec![3]));
        assert_eq!(ring.free(u64::MAX), None);
    }

    #[test]
    fn a_dead_pusher_is_passed_by() {
        let words = words(64);
        let ring = Routed::new(&words);
        assert_eq!(ring.reserve(1), Some(0));
        ring.push(ServerId(1), &[1]);
        assert_eq!(ring.take(1), None);
        assert!(ring.is_waiting());
        ring.pass();
        assert_eq!(ring.take(1).map(|p| p.words), Some(vec![1]));
        assert!(!ring.is_waiting());
        assert_eq!(ring.free(0), Some(None));
    }

    #[test]
    fn pushers_in_many_threads_lose_and_tear_nothing() {
        const EACH: u64 = 2000;
        let words = words(64);
        let ring = Routed::new(&words);
        std::thread::scope(|scope| {
            for server in 0..3u16 {
                scope.spawn(move || {
                    for n in 0..EACH {
                        let len = 1 + n % 150;
                        let text = vec![u64::from(server) << 32 | n; len as usize];
                        while !ring.push(ServerId(server), &text) {
                            std::thread::yield_now();
                        }
                    }
                });
            }
            let mut next = [0u64; 3];
            let mut whole = Vec::new();
            while next.iter().sum::<u64>() < 3 * EACH {
                while ring.free(u64::MAX).is_some() {}
                let Some(piece) = ring.take(1) else {
                    std::thread::yield_now();
                    continue;
                };
                assert_eq!(piece.first, whole.is_empty());
                whole.extend(piece.words);
                if piece.last {
                    let n = &mut next[piece.server.index()];
                    let expected = u64::from(piece.server.0) << 32 | *n;
                    assert_eq!(whole, vec![expected; 1 + (*n % 150) as usize]);
                    *n += 1;
                    whole.clear();
                }
            }
        });
    }
}
