//! Which message comes next. Pure: numbers and digests in, verdicts out.
//!
//! The rules: every batch is applied once and in order; a number that goes back, or the same
//! number with other contents, is another life of the engine; what a replay does not prove is
//! forgotten.
#![forbid(unsafe_code)]

use std::collections::VecDeque;

/// Digests of the latest applied batches that are kept, to tell a second copy from a restart: as
/// many as live messages may wait while a replay brings them too.
pub const REMEMBERED: usize = 1024;

/// A message as far as its order matters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mark {
    pub seq: u64,
    pub digest: u64,
    /// Unix time in seconds, by the engine's clock.
    pub timestamp: f64,
}

/// What to do with a live message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Live {
    /// Apply it; the sequence counts it as applied.
    Apply,
    /// Applied before.
    Duplicate,
    /// Keep it, and replay from this number, inclusive.
    Replay(u64),
    /// Another life of the engine: clear, keep it, begin again.
    Restart,
    /// Something before it is lost for good: clear, begin again without it.
    Unfilled,
    /// The same, and nothing can be replayed: clear, then apply it as the first that is known.
    Adopt,
}

/// What to do with a replayed message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replayed {
    Apply,
    /// Applied before, or older than what was asked for.
    Skip,
    /// What is before it is lost for good: clear, then apply it as the first that is known.
    Adopt,
    /// Another life of the engine: clear, begin again.
    Restart,
    /// The replay does not reach back to what was applied: clear, begin again.
    Lost,
}

/// How to go on, at the start of a connection or after [`Sequence::forget`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Begin {
    /// Replay from this number, inclusive.
    Replay(u64),
    /// What was applied cannot be proved: clear, then take live messages as they come.
    Clear,
    /// Take live messages as they come.
    Live,
}

#[derive(Clone, Debug, Default)]
pub struct Sequence {
    /// Last applied number plus one; 0 before the first.
    next: u64,
    /// Digests of `next - digests.len() .. next`.
    digests: VecDeque<u64>,
    timestamp: f64,
    /// The first number that is known; 0: all that the engine ever said.
    origin: u64,
    /// The replay that runs has to bring the last applied batch first.
    unproved: bool,
    /// Digest of the live message for which a replay was asked already: one message causes one.
    asked_for: Option<u64>,
}

impl Sequence {
    /// Takes up what another process left: its last applied batch.
    pub fn resume(last: Mark, origin: u64) -> Sequence {
        Sequence {
            next: last.seq + 1,
            digests: VecDeque::from([last.digest]),
            timestamp: last.timestamp,
            origin,
            ..Sequence::default()
        }
    }

    /// Last applied number plus one; 0 before the first.
    pub fn next(&self) -> u64 {
        self.next
    }

    /// The first number that is known; 0: all that the engine ever said.
    pub fn origin(&self) -> u64 {
        self.origin
    }

    /// What came before `origin` does not matter any more, or is lost.
    pub fn known_from(&mut self, origin: u64) {
        self.origin = origin;
    }

    /// Nothing is applied any more.
    pub fn forget(&mut self) {
        *self = Sequence { asked_for: self.asked_for, ..Sequence::default() };
    }

    /// A new connection, a takeover, or a doubt. `replays`: whether the engine can be asked.
    pub fn begin(&mut self, replays: bool) -> Begin {
        match (replays, self.next) {
            (true, 0) => Begin::Replay(0),
            (true, next) => {
                self.unproved = true;
                Begin::Replay(next - 1)
            }
            (false, 0) => Begin::Live,
            (false, _) => Begin::Clear,
        }
    }

    /// A live message, while no replay runs.
    pub fn live(&mut self, message: Mark, replays: bool) -> Live {
        if message.seq < self.next {
            let copy = match self.remembered(message.seq) {
                Some(digest) => digest == message.digest,
                // It waited while a long replay went past it.
                None => message.timestamp <= self.timestamp,
            };
            if copy || self.asked_for.replace(message.digest) == Some(message.digest) {
                return Live::Duplicate;
            }
            return Live::Restart;
        }
        let first_time = replays && self.asked_for != Some(message.digest);
        // An engine that restarted unseen may have come to the very number that is expected.
        let doubtful = self.next > 0 && message.timestamp < self.timestamp;
        if message.seq == self.next && !(doubtful && first_time) {
            self.apply(message);
            return Live::Apply;
        }
        if first_time {
            self.asked_for = Some(message.digest);
            self.unproved = self.next > 0;
            return Live::Replay(self.next.saturating_sub(1));
        }
        if replays && self.next > 0 {
            return Live::Unfilled;
        }
        self.forget();
        self.apply(message);
        Live::Adopt
    }

    /// A message of the replay that runs.
    pub fn replayed(&mut self, message: Mark) -> Replayed {
        if self.next == 0 {
            self.apply(message);
            return Replayed::Apply;
        }
        if message.seq < self.next {
            return match self.remembered(message.seq) {
                Some(digest) if digest != message.digest => Replayed::Restart,
                known => {
                    self.unproved &= known.is_none() || message.seq + 1 != self.next;
                    Replayed::Skip
                }
            };
        }
        if self.unproved {
            return Replayed::Lost;
        }
        if message.seq > self.next {
            self.forget();
            self.apply(message);
            return Replayed::Adopt;
        }
        self.apply(message);
        Replayed::Apply
    }

    /// No more of the replay comes. False if it did not bring what was applied last. If the
    /// engine said that this is the end, it has come less far than what was applied, so this is
    /// another life of it.
    #[must_use]
    pub fn replay_ended(&mut self) -> bool {
        !std::mem::take(&mut self.unproved)
    }

    fn apply(&mut self, message: Mark) {
        if self.next == 0 {
            self.origin = message.seq;
        }
        self.next = message.seq + 1;
        self.timestamp = message.timestamp;
        if self.digests.len() == REMEMBERED {
            self.digests.pop_front();
        }
        self.digests.push_back(message.digest);
    }

    fn remembered(&self, seq: u64) -> Option<u64> {
        let back = usize::try_from(self.next.checked_sub(seq)?).ok()?;
        self.digests.len().checked_sub(back).and_then(|at| self.digests.get(at)).copied()
    }
}

#[cfg(test)]
mod tests;
