//! The messages of one server, live and replayed, put in order. Pure: what is to be done comes
//! out as [`Action`]s.
#![forbid(unsafe_code)]

use std::collections::VecDeque;

use super::sequence::{Begin, Live, Mark, REMEMBERED, Replayed, Sequence};
use crate::shared::Dropped;

/// Most live messages that wait while a replay runs.
const MAX_WAITING: usize = REMEMBERED;

/// A batch that can be read, whether it is to be applied or not.
#[derive(Clone, Debug, PartialEq)]
pub struct Message {
    pub mark: Mark,
    pub payload: Vec<u8>,
}

/// Why all blocks of a server are forgotten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The engine began a new life.
    Restart,
    /// Messages were lost that no replay brings back.
    Gap,
    /// Nothing proves that the engine still holds what was applied before.
    Unproved,
}

/// What the flow wants done, at once and in this order.
#[derive(Debug, PartialEq)]
pub enum Action {
    /// Apply this batch; all is known from number `origin` on.
    Apply {
        message: Message,
        origin: u64,
    },
    Clear(Cause),
    /// Ask for a replay from this number; the one that runs, if any, is over.
    Replay(u64),
    /// A live message that is not applied.
    Drop(Dropped),
    /// A gap, counted before it is known whether a replay fills it.
    Gap,
}

#[derive(Debug, Default)]
pub struct Flow {
    sequence: Sequence,
    waiting: VecDeque<Message>,
    replaying: bool,
    /// Whether the engine can be asked for a replay.
    replays: bool,
}

impl Flow {
    pub fn new(sequence: Sequence) -> Flow {
        Flow { sequence, ..Flow::default() }
    }

    pub fn sequence(&self) -> &Sequence {
        &self.sequence
    }

    pub fn is_replaying(&self) -> bool {
        self.replaying
    }

    /// Whether all that the engine holds is known, or will be with its next message.
    pub fn is_complete(&self) -> bool {
        if self.sequence.next() > 0 { self.sequence.origin() == 0 } else { self.replays }
    }

    /// What came before number `origin` does not matter any more, or is lost.
    pub fn known_from(&mut self, origin: u64) {
        self.sequence.known_from(origin);
    }

    /// A fresh connection: what was applied has to be proved. `replays`: whether the engine can
    /// be asked.
    pub fn connected(&mut self, replays: bool, act: &mut impl FnMut(Action)) {
        self.replays = replays;
        self.begin(act);
    }

    /// Asks the engine for what may have been missed, if it can be asked.
    pub fn verify(&mut self, act: &mut impl FnMut(Action)) {
        if self.replays && !self.replaying {
            self.begin(act);
        }
    }

    fn begin(&mut self, act: &mut impl FnMut(Action)) {
        match self.sequence.begin(self.replays) {
            Begin::Replay(from) => self.ask(from, act),
            Begin::Clear => {
                self.forget(Cause::Unproved, act);
                self.replaying = false;
            }
            Begin::Live => self.replaying = false,
        }
        self.work(act);
    }

    /// The connection is gone, with all that was under way on it.
    pub fn disconnected(&mut self) {
        self.waiting.clear();
        self.replaying = false;
    }

    pub fn live(&mut self, message: Message, act: &mut impl FnMut(Action)) {
        if self.waiting.len() == MAX_WAITING {
            // The oldest is what the replay most likely brings; if not, the hole shows once it
            // is over, and another replay fills it.
            self.waiting.pop_front();
            act(Action::Drop(Dropped::Overflow));
        }
        self.waiting.push_back(message);
        self.work(act);
    }

    pub fn replayed(&mut self, message: Message, act: &mut impl FnMut(Action)) {
        match self.sequence.replayed(message.mark) {
            Replayed::Apply => self.apply(message, act),
            Replayed::Skip => {}
            Replayed::Adopt => {
                act(Action::Clear(Cause::Gap));
                self.apply(message, act);
            }
            Replayed::Restart => self.begin_again(Cause::Restart, act),
            Replayed::Lost => self.begin_again(Cause::Gap, act),
        }
    }

    /// The engine's end mark.
    pub fn replay_ended(&mut self, act: &mut impl FnMut(Action)) {
        self.replaying = false;
        if self.sequence.replay_ended() {
            self.work(act);
        } else {
            self.begin_again(Cause::Restart, act);
        }
    }

    /// The engine does not answer: go on with live messages alone.
    pub fn replay_failed(&mut self, act: &mut impl FnMut(Action)) {
        self.replaying = false;
        self.replays = false;
        if !self.sequence.replay_ended() {
            self.forget(Cause::Unproved, act);
        }
        self.work(act);
    }

    /// A replay from the start, asked beside live messages, is being answered after all: learn
    /// everything from it.
    pub fn replay_answered(&mut self, act: &mut impl FnMut(Action)) {
        self.forget(Cause::Unproved, act);
        self.replays = true;
        self.replaying = true;
    }

    fn work(&mut self, act: &mut impl FnMut(Action)) {
        while !self.replaying
            && let Some(message) = self.waiting.pop_front()
        {
            let known = self.sequence.next() > 0;
            match self.sequence.live(message.mark, self.replays) {
                Live::Apply => self.apply(message, act),
                Live::Duplicate => act(Action::Drop(Dropped::Stale)),
                Live::Replay(from) => {
                    if known {
                        act(Action::Gap);
                    }
                    self.waiting.push_front(message);
                    self.ask(from, act);
                }
                Live::Restart => {
                    self.waiting.push_front(message);
                    self.begin_again(Cause::Restart, act);
                }
                Live::Unfilled => {
                    act(Action::Drop(Dropped::Stale));
                    self.begin_again(Cause::Gap, act);
                }
                Live::Adopt => {
                    if known {
                        act(Action::Gap);
                        act(Action::Clear(Cause::Gap));
                    }
                    self.apply(message, act);
                }
            }
        }
    }

    fn apply(&self, message: Message, act: &mut impl FnMut(Action)) {
        act(Action::Apply { message, origin: self.sequence.origin() });
    }

    fn begin_again(&mut self, cause: Cause, act: &mut impl FnMut(Action)) {
        self.forget(cause, act);
        self.replaying = false;
        if let Begin::Replay(from) = self.sequence.begin(self.replays) {
            self.ask(from, act);
        }
    }

    fn ask(&mut self, from: u64, act: &mut impl FnMut(Action)) {
        self.replaying = true;
        act(Action::Replay(from));
    }

    fn forget(&mut self, cause: Cause, act: &mut impl FnMut(Action)) {
        self.sequence.forget();
        act(Action::Clear(cause));
    }
}

#[cfg(test)]
mod tests;
