//! What the flow wants done to the index and to the server's row, and what people are told of it.

use std::time::{Duration, Instant};

use super::{CALM, FIRST_REOPEN, LAST_REOPEN, Link};
use crate::events::Level;
use crate::events::apply::{Applier, Habits};
use crate::events::flow::{Action, Cause, Flow, Message};
use crate::events::log::Kind;
use crate::events::wire;
use crate::shared::{Dropped, Mode, ServerError, ServerField};

impl<'z> Link<'z> {
    /// Runs a step of the flow, does what it asks for, and shows what has become of the server.
    pub(super) fn flow(
        &mut self,
        applier: &mut Applier<'z>,
        step: impl FnOnce(&mut Flow, &mut dyn FnMut(Action)),
    ) {
        let mut flow = std::mem::take(&mut self.flow);
        step(&mut flow, &mut |action| self.act(action, applier));
        if let Some(origin) = self.known_from.take() {
            flow.known_from(origin);
            self.row.set(ServerField::ReplayedFrom, origin);
        }
        self.flow = flow;
        self.show_mode();
    }

    fn act(&mut self, action: Action, applier: &mut Applier<'z>) {
        let now = Instant::now();
        match action {
            Action::Apply { message, origin } => self.apply(&message, origin, applier),
            Action::Clear(cause) => self.cleared(cause, now, applier),
            Action::Replay(from) => {
                self.row.add(ServerField::Replays, u64::from(!self.verifying));
                self.replay = None;
                self.wanted = Some((from, now + self.pause));
            }
            Action::Drop(reason) => {
                self.row.add_dropped(reason, 1);
            }
            Action::Gap => {
                self.row.add(ServerField::Gaps, 1);
            }
        }
    }

    fn apply(&mut self, message: &Message, origin: u64, applier: &mut Applier<'z>) {
        let id = self.server.id;
        let batch = match wire::batch(&message.payload) {
            Ok(batch) => batch,
            Err(reason) => {
                // Nobody knows what it stored or removed.
                self.dropped(reason);
                applier.clear(id);
                self.known_from = Some(message.mark.seq.max(1));
                wire::Batch { timestamp: message.mark.timestamp, rank: None, events: Vec::new() }
            }
        };
        if self.other_block_size.is_some() {
            self.row.add_dropped(Dropped::BlockSize, batch.events.len() as u64);
            let none = wire::Batch { events: Vec::new(), ..batch };
            applier.apply(id, None, &mut self.habits, &none, message.mark, origin);
            return;
        }
        let configured = self.server.block_size;
        let told = applier.apply(id, configured, &mut self.habits, &batch, message.mark, origin);
        if told.cleared {
            self.known_from = Some(0);
        }
        if let (Some(found), Some(configured)) = (told.other_block_size, configured) {
            self.other_block_size = Some(found);
            applier.distrust(id);
            self.row.set_error(ServerError::BlockSize);
            let text = format!(
                "blocks have {found} tokens, kvc_aware_block_size says {configured}; \
                 its events are not used"
            );
            self.log.line(Level::Error, &text);
        }
    }

    fn cleared(&mut self, cause: Cause, now: Instant, applier: &mut Applier<'z>) {
        applier.clear(self.server.id);
        self.habits = Habits::default();
        self.known_from = None;
        let hasty = self.cleared_at.is_some_and(|at| now.duration_since(at) < CALM);
        self.pause = match hasty {
            true => (self.pause * 2).clamp(FIRST_REOPEN, LAST_REOPEN),
            false => Duration::ZERO,
        };
        self.cleared_at = Some(now);
        match cause {
            Cause::Restart => {
                applier.unlearn(self.server.id);
                self.row.add(ServerField::Restarts, 1);
                self.other_block_size = None;
                self.say(Level::Notice, "the engine restarted, its blocks are learned again");
            }
            Cause::Gap => {
                self.trouble(ServerError::GapUnfilled);
                let text = "events were lost and could not be replayed, its blocks are learned \
                            again; a larger buffer_steps of the engine helps";
                self.log.seldom(Kind::Gap, Level::Warn, text, now);
            }
            Cause::Unproved => {}
        }
    }

    fn show_mode(&mut self) {
        if self.flow.is_replaying() || !self.connected {
            return;
        }
        let mode = match (self.other_block_size, self.flow.is_complete()) {
            (Some(_), _) => Mode::Approximate,
            (None, true) => Mode::Events,
            (None, false) => Mode::Partial,
        };
        let settled = [ServerError::GapUnfilled, ServerError::ReplayUnanswered];
        if mode == Mode::Events && settled.contains(&self.row.error()) {
            self.row.set_error(ServerError::None);
        }
        if !self.show(mode) {
            return;
        }
        let origin = self.flow.sequence().origin();
        if mode == Mode::Partial && origin > 0 && self.server.replay.is_some() {
            let text = format!(
                "the engine's replay begins at event {origin}, so its older blocks are not \
                 known; set buffer_steps of its kv-events-config above {}",
                self.flow.sequence().next()
            );
            self.log.seldom(Kind::Replay, Level::Warn, &text, Instant::now());
        }
    }

    /// Whether the mode is another one now.
    pub(super) fn show(&self, mode: Mode) -> bool {
        let before = self.row.mode();
        if mode != before {
            self.row.set_mode(mode);
            self.log.line(Level::Notice, &format!("mode {} (was {})", mode.name(), before.name()));
        }
        mode != before
    }

    pub(super) fn dropped(&mut self, reason: Dropped) {
        self.row.add_dropped(reason, 1);
        let garbage = [Dropped::BadFrames, Dropped::BadPayload, Dropped::TooLarge];
        if garbage.contains(&reason) {
            self.trouble(ServerError::Garbage);
        }
        let text = format!("a message of its events was dropped: {}", reason.name());
        self.log.seldom(Kind::Dropped, Level::Warn, &text, Instant::now());
    }

    pub(super) fn readable(&self) {
        if self.row.error() == ServerError::Garbage {
            self.row.set_error(ServerError::None);
        }
    }

    pub(super) fn trouble(&self, error: ServerError) {
        // A wrong setting outlives whatever happens to the connection.
        if self.other_block_size.is_none() {
            self.row.set_error(error);
        }
    }

    pub(super) fn say(&self, level: Level, text: &str) {
        self.log.line(level, text);
    }
}
