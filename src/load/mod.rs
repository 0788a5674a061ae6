//! In-flight requests and queued prefill tokens of each server, shared by all workers.
//!
//! Each process counts in a row of its own, claimed by pid and start time, so that what a killed
//! process held can be told and zeroed; a sum goes over the rows of live processes. Both counts of
//! a server share one word: they change together, in one atomic step.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};

use crate::shared::{
    LOAD_ROW_WORDS, MAX_PROCESSES, ProcessId, ServerField, UpstreamField, UpstreamRow, Zone,
};
use crate::types::ServerId;

const OWNER: usize = 0;
const COUNTS_AT: usize = 8;
/// Requests in the high 24 bits, tokens in the low 40: sixteen million requests at once and a
/// million million tokens.
const TOKEN_BITS: u32 = 40;
const TOKEN_MASK: u64 = (1 << TOKEN_BITS) - 1;

/// What one server has to do at present.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    pub in_flight: u32,
    /// Estimated uncached prefill, in tokens, of requests that have no first token back yet.
    pub queued_tokens: u64,
}

impl Load {
    fn from_word(word: u64) -> Load {
        Load { in_flight: (word >> TOKEN_BITS) as u32, queued_tokens: word & TOKEN_MASK }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LoadError {
    #[error("all {MAX_PROCESSES} load rows of the zone are held by live processes")]
    RowsFull,
}

/// One process's right to count.
#[derive(Clone, Copy, Debug)]
pub struct LoadTable<'a> {
    zone: Zone<'a>,
    mine: usize,
}

impl<'a> LoadTable<'a> {
    /// Claims the row of process `me`, a fresh one or that of a process that is gone.
    pub fn claim(zone: Zone<'a>, me: ProcessId) -> Result<LoadTable<'a>, LoadError> {
        for mine in 0..MAX_PROCESSES {
            let owner = &row(zone, mine)[OWNER];
            let seen = owner.load(Ordering::Acquire);
            let free = ProcessId::from_word(seen).is_none_or(|p| p == me || !p.is_alive());
            if free
                && owner
                    .compare_exchange(seen, me.word(), Ordering::AcqRel, Ordering::Relaxed)
                    .is_ok()
            {
                zero_counts(row(zone, mine));
                return Ok(LoadTable { zone, mine });
            }
        }
        Err(LoadError::RowsFull)
    }

    /// Gives the row back. The process must hold no reservation any more.
    pub fn release(self) {
        let row = row(self.zone, self.mine);
        zero_counts(row);
        row[OWNER].store(0, Ordering::Release);
    }

    /// Counts a request and its uncached prefill in at `server`. What is returned must go back
    /// through [`LoadTable::prefilled`] and [`LoadTable::finish`], in whatever way it ends.
    ///
    /// `now_ms` is nginx's monotonic clock: if nothing was queued there, the new prompt is the
    /// head and starts to run now.
    pub fn reserve(&self, server: ServerId, tokens: u64, now_ms: u64) -> Reservation {
        if self.load(server).queued_tokens == 0 {
            self.zone.server(server).set(ServerField::HeadSinceMs, now_ms);
        }
        let queued = tokens.min(TOKEN_MASK >> 16);
        self.count(server).fetch_add(1 << TOKEN_BITS | queued, Ordering::Relaxed);
        Reservation { server, queued }
    }

    /// The first token came back: nothing of this request is queued any more.
    pub fn prefilled(&self, reservation: &mut Reservation, now_ms: u64) {
        let queued = std::mem::take(&mut reservation.queued);
        if queued > 0 {
            self.count(reservation.server).fetch_sub(queued, Ordering::Relaxed);
            self.zone.server(reservation.server).set(ServerField::HeadSinceMs, now_ms);
        }
    }

    /// The request left this server, answered or not.
    pub fn finish(&self, mut reservation: Reservation, now_ms: u64) {
        self.prefilled(&mut reservation, now_ms);
        self.count(reservation.server).fetch_sub(1 << TOKEN_BITS, Ordering::Relaxed);
    }

    /// The load of `server` over all processes. Rows of processes that died count until
    /// [`reap`] finds them.
    pub fn load(&self, server: ServerId) -> Load {
        load(self.zone, server)
    }

    /// When the prompt at the head of `server`'s queue started to run, on nginx's monotonic clock.
    pub fn head_since(&self, server: ServerId) -> u64 {
        self.zone.server(server).get(ServerField::HeadSinceMs)
    }

    fn count(&self, server: ServerId) -> &'a AtomicU64 {
        &row(self.zone, self.mine)[COUNTS_AT + server.index()]
    }
}

/// A request counted in at a server. Only [`LoadTable::finish`] ends it.
#[derive(Debug)]
#[must_use = "a reservation that is not finished stays in flight for ever"]
pub struct Reservation {
    pub server: ServerId,
    queued: u64,
}

impl Reservation {
    /// Tokens still queued for this request.
    pub fn queued(&self) -> u64 {
        self.queued
    }
}

/// The rows that processes hold now: what to sum over when many servers are asked at once.
pub struct Rows<'a>(Vec<&'a [AtomicU64]>);

impl<'a> Rows<'a> {
    /// Rows of processes that died are among them until [`reap`] finds them.
    pub fn held(zone: Zone<'a>) -> Rows<'a> {
        let rows = (0..MAX_PROCESSES).map(|n| row(zone, n));
        Rows(rows.filter(|row| row[OWNER].load(Ordering::Relaxed) != 0).collect())
    }

    pub fn load(&self, server: ServerId) -> Load {
        let sum = self.0.iter().fold(0u64, |sum, row| {
            sum.wrapping_add(row[COUNTS_AT + server.index()].load(Ordering::Relaxed))
        });
        Load::from_word(sum)
    }
}

/// The load of `server`, for those that count nothing themselves.
pub fn load(zone: Zone<'_>, server: ServerId) -> Load {
    Rows::held(zone).load(server)
}

/// Fewest tokens of a prefill that tell something of the speed: below, the time is not theirs.
const RATE_TOKENS: u64 = 256;
/// Weight of one more observation.
const RATE_STEP: f64 = 0.1;

/// Learns an upstream's prefill speed from one prompt: its uncached tokens, and the milliseconds
/// from when it was the head of its queue to its first token.
pub fn learn_rate(upstream: &UpstreamRow<'_>, tokens: u64, ms: u64) {
    if tokens < RATE_TOKENS || ms == 0 {
        return;
    }
    let seen = tokens as f64 * 1000.0 / ms as f64;
    let known = rate(upstream);
    let next = if known > 0.0 { known + RATE_STEP * (seen - known) } else { seen };
    // Two processes may lose one of two observations: it is an estimate.
    upstream.set(UpstreamField::PrefillRate, next.to_bits());
}

/// An upstream's prefill speed in tokens per second; 0 until learned.
pub fn rate(upstream: &UpstreamRow<'_>) -> f64 {
    f64::from_bits(upstream.get(UpstreamField::PrefillRate))
}

/// Frees the rows of processes that are gone; tells how many. The holder of the lease calls this
/// each second. The counts stay as they are: whoever claims the row next zeroes them.
pub fn reap(zone: Zone<'_>, me: ProcessId) -> usize {
    (0..MAX_PROCESSES)
        .map(|n| row(zone, n))
        .filter(|row| {
            let seen = row[OWNER].load(Ordering::Acquire);
            let gone = ProcessId::from_word(seen).is_some_and(|p| p != me && !p.is_alive());
            gone && row[OWNER]
                .compare_exchange(seen, 0, Ordering::AcqRel, Ordering::Relaxed)
                .is_ok()
        })
        .count()
}

fn row<'a>(zone: Zone<'a>, n: usize) -> &'a [AtomicU64] {
    &zone.load_words()[n * LOAD_ROW_WORDS..(n + 1) * LOAD_ROW_WORDS]
}

fn zero_counts(row: &[AtomicU64]) {
    for word in &row[COUNTS_AT..] {
        word.store(0, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blocks::HashKey;
    use crate::shared::MIN_ZONE_BYTES;

    fn words() -> Vec<AtomicU64> {
        (0..MIN_ZONE_BYTES / 8).map(|_| AtomicU64::new(0)).collect()
    }

    fn gone() -> ProcessId {
        ProcessId::from_word(ProcessId::current().word() ^ 1).unwrap()
    }

    #[test]
    fn counts_come_back_to_zero() {
        let words = words();
        let zone = Zone::format(&words, HashKey([1, 2])).unwrap();
        let table = LoadTable::claim(zone, ProcessId::current()).unwrap();
        let (a, b) = (ServerId(3), ServerId(4));
        let mut first = table.reserve(a, 6000, 100);
        let second = table.reserve(a, 50, 200);
        assert_eq!(table.load(a), Load { in_flight: 2, queued_tokens: 6050 });
        assert_eq!(table.load(b), Load::default());
        assert_eq!(zone.server(a).get(ServerField::HeadSinceMs), 100);
        table.prefilled(&mut first, 300);
        table.prefilled(&mut first, 400);
        assert_eq!(table.load(a), Load { in_flight: 2, queued_tokens: 50 });
        assert_eq!(zone.server(a).get(ServerField::HeadSinceMs), 300);
        table.finish(second, 500);
        table.finish(first, 600);
        assert_eq!(table.load(a), Load::default());
        assert_eq!(zone.server(a).get(ServerField::HeadSinceMs), 500);
    }

    #[test]
    fn rows_of_several_processes_add_up_and_the_dead_are_reaped() {
        let words = words();
        let zone = Zone::format(&words, HashKey([1, 2])).unwrap();
        let mine = LoadTable::claim(zone, ProcessId::current()).unwrap();
        let theirs = LoadTable::claim(zone, gone()).unwrap();
        let a = ServerId(0);
        let kept = mine.reserve(a, 10, 0);
        let lost = theirs.reserve(a, 20, 0);
        assert_eq!(load(zone, a), Load { in_flight: 2, queued_tokens: 30 });
        assert_eq!(reap(zone, ProcessId::current()), 1);
        assert_eq!(load(zone, a), Load { in_flight: 1, queued_tokens: 10 });
        let next = LoadTable::claim(zone, gone()).unwrap();
        assert_eq!(next.load(a), Load { in_flight: 1, queued_tokens: 10 });
        drop(lost);
        mine.finish(kept, 0);
        assert_eq!(load(zone, a), Load::default());
    }

    #[test]
    fn the_rate_follows_long_prefills_only() {
        let words = words();
        let zone = Zone::format(&words, HashKey([1, 2])).unwrap();
        let row = zone.upstreams().claim("a").unwrap();
        assert_eq!(rate(&row), 0.0);
        learn_rate(&row, 255, 10);
        learn_rate(&row, 1000, 0);
        assert_eq!(rate(&row), 0.0);
        learn_rate(&row, 1000, 100);
        assert_eq!(rate(&row), 10_000.0);
        learn_rate(&row, 1000, 50);
        assert_eq!(rate(&row), 11_000.0);
    }

    #[test]
    fn a_full_table_is_an_error() {
        let words = words();
        let zone = Zone::format(&words, HashKey([1, 2])).unwrap();
        for n in 0..MAX_PROCESSES {
            row(zone, n)[OWNER].store(ProcessId::current().word(), Ordering::Relaxed);
        }
        assert_eq!(LoadTable::claim(zone, gone()).unwrap_err(), LoadError::RowsFull);
    }
}
