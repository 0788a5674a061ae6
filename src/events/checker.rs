//! Looks out for the blocks that prompts on their way must leave in a server's cache.
//!
//! A worker writes down what is expected before it sends a prompt ([`crate::shared::Checks`]). From
//! then on each stored block that is expected is ticked off, and one that is stored in the place of
//! an expected one is remembered. Some time after the first token all must be ticked off, or be
//! held for another reason; what was evicted meanwhile is ticked off all the same.
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

use super::apply::Applier;
use super::wire;
use crate::index::{self, Index};
use crate::shared::{
    Difference, Expected, Mode, Progress, ServerField, ServerRow, Ticket, TrustField, Zone,
};
use crate::trust::{self, Blocks, Verdict};
use crate::types::{BlockHash, EngineHash, ServerId, TokenId};

/// From the first token until all that it took must have been told. Events come mostly before it.
const PATIENCE: Duration = Duration::from_secs(1);
/// The same where nothing came in the place of what is missing: it may be late.
const LONG_PATIENCE: Duration = Duration::from_secs(5);
/// What is not answered by then is not waited for.
const LONGEST: Duration = Duration::from_secs(600);
/// A worker that takes so long to write down what is expected is gone.
const WRITING: Duration = Duration::from_secs(10);

/// What happened to a prompt's blocks, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    pub server: ServerId,
    pub text: String,
    pub trusted: bool,
}

pub struct Checker {
    sent: u64,
    open: Vec<Open>,
}

struct Open {
    ticket: Ticket,
    since: Instant,
    answered: Option<Instant>,
    /// `None` until it is written down.
    expected: Option<Expected>,
    /// Gaps in the server's events before.
    gaps: u64,
    /// A bit for each expected block that was stored.
    stored: u64,
    other: Option<Other>,
}

/// A block that was stored in the place of an expected one.
struct Other {
    at: usize,
    hash: EngineHash,
    tokens: Vec<TokenId>,
    /// Leading tokens that are the expected ones.
    alike: usize,
}

impl Checker {
    /// What was sent under an earlier holder of the lease is given up: nobody knows what of it was
    /// stored meanwhile.
    pub fn new(zone: Zone<'_>) -> Checker {
        let checks = zone.checks();
        let sent = checks.in_use().filter(|(_, progress)| *progress != Progress::Taken);
        sent.for_each(|(ticket, _)| checks.free(ticket));
        Checker { sent: 0, open: Vec::new() }
    }

    /// Takes in what workers sent meanwhile. Whoever applies events calls this before: what was
    /// sent before an event came is then known.
    pub fn look(&mut self, zone: Zone<'_>) {
        let sent = zone.checks().sent();
        if sent != self.sent {
            self.sent = sent;
            self.adopt(zone, Instant::now());
        }
    }

    fn adopt(&mut self, zone: Zone<'_>, now: Instant) {
        let checks = zone.checks();
        for (ticket, progress) in checks.in_use() {
            let known = self.open.iter().position(|open| open.ticket == ticket);
            let at = known.unwrap_or_else(|| {
                self.open.push(Open::new(ticket, now));
                self.open.len() - 1
            });
            let open = &mut self.open[at];
            if open.expected.is_none() && progress != Progress::Taken {
                let expected = checks.read(ticket);
                open.gaps = zone.server(expected.server).get(ServerField::Gaps);
                open.expected = Some(expected);
            }
            if progress == Progress::Answered {
                open.answered.get_or_insert(now);
            }
        }
    }

    /// A server stored a chain of blocks after `parent`.
    pub fn stored(
        &mut self,
        server: ServerId,
        parent: BlockHash,
        chain: &[index::Stored],
        event: &wire::Stored<'_>,
    ) {
        for open in &mut self.open {
            if open.expected.as_ref().is_some_and(|expected| expected.server == server) {
                open.stored(parent, chain, event);
            }
        }
    }

    /// A server's blocks were forgotten: nothing can be said of what is on its way there.
    pub fn forget(&mut self, server: ServerId, zone: Zone<'_>) {
        self.open.retain(|open| {
            let concerned = open.expected.as_ref().is_some_and(|e| e.server == server);
            if concerned {
                zone.checks().free(open.ticket);
            }
            !concerned
        });
    }

    /// Decides what is due, and tells what people should know.
    fn decide(&mut self, zone: Zone<'_>, index: &Index<'_>, now: Instant) -> Vec<Found> {
        self.adopt(zone, now);
        let mut found = Vec::new();
        self.open.retain(|open| {
            let Some(progress) = zone.checks().progress(open.ticket) else { return false };
            let age = now.duration_since(open.since);
            let due = open.is_due(index, now);
            let over = match progress {
                Progress::Taken => age >= WRITING,
                Progress::Sent => age >= LONGEST,
                Progress::Answered => due,
                Progress::GivenUp => true,
            };
            if over {
                zone.checks().free(open.ticket);
                if let (true, Some(expected)) = (due, &open.expected) {
                    found.extend(open.decide(expected, zone, index));
                }
            }
            !over
        });
        found
    }
}

impl Open {
    fn new(ticket: Ticket, since: Instant) -> Open {
        let (answered, expected, other) = (None, None, None);
        Open { ticket, since, answered, expected, gaps: 0, stored: 0, other }
    }

    fn stored(&mut self, parent: BlockHash, chain: &[index::Stored], event: &wire::Stored<'_>) {
        let Some(expected) = &self.expected else { return };
        // A block's hash covers all before it, so the chain meets what is expected at its start,
        // in its first block, or nowhere.
        let before = expected.blocks.iter().position(|block| *block == parent);
        let first = match before {
            Some(at) => at + 1,
            None if parent == expected.start => 0,
            None => return,
        };
        let size = expected.block_size as usize;
        for (n, stored) in chain.iter().enumerate() {
            let at = first + n;
            let Some(block) = expected.blocks.get(at) else { return };
            if stored.block == *block {
                self.stored |= 1 << at;
                continue;
            }
            let theirs = event.tokens.get(n * size..(n + 1) * size).unwrap_or_default();
            let ours = expected.tokens.get(at * size..(at + 1) * size).unwrap_or_default();
            let alike = ours.iter().zip(theirs).take_while(|(a, b)| a == b).count();
            // Other prompts branch off here too: the likeliest is the one most alike.
            if self.other.as_ref().is_none_or(|other| (at, alike) >= (other.at, other.alike)) {
                let (hash, tokens) = (stored.engine, theirs.to_vec());
                self.other = Some(Other { at, hash, tokens, alike });
            }
            return;
        }
    }

    /// The first block that was neither stored nor held for another reason, and what was stored in
    /// its place.
    fn missing(&self, expected: &Expected, index: &Index<'_>) -> Option<(usize, Option<&Other>)> {
        let mut holders = Vec::new();
        let mut held = |block: BlockHash| {
            let known = index.holders(block, &mut holders);
            known.is_err() || holders.iter().any(|(id, _)| *id == expected.server)
        };
        let at = (0..expected.blocks.len())
            .find(|at| self.stored >> at & 1 == 0 && !held(expected.blocks[*at]))?;
        Some((at, self.other.as_ref().filter(|other| other.at == at)))
    }

    fn is_due(&self, index: &Index<'_>, now: Instant) -> bool {
        let (Some(answered), Some(expected)) = (self.answered, &self.expected) else {
            return false;
        };
        let age = now.duration_since(answered);
        let is_absent = || matches!(self.missing(expected, index), Some((_, None)));
        age >= LONG_PATIENCE || age >= PATIENCE && !is_absent()
    }

    fn decide(&self, expected: &Expected, zone: Zone<'_>, index: &Index<'_>) -> Option<Found> {
        let row = zone.server(expected.server);
        let whole = row.mode() == Mode::Events
            && row.get(ServerField::Connected) == 1
            && row.get(ServerField::Gaps) == self.gaps;
        if !whole || expected.blocks.is_empty() {
            return None;
        }
        let missing = self.missing(expected, index);
        let seen = match missing {
            None => Blocks::Same,
            Some((_, Some(_))) => Blocks::Differ,
            Some((_, None)) => Blocks::Absent,
        };
        let verdict = trust::looked(&row, expected.model, seen);
        let line = match missing {
            Some((at, Some(other))) => keep(zone, &row, expected, at, other),
            _ => None,
        };
        let (server, name) = (expected.server, &expected.model_name);
        let text = match verdict {
            Verdict::Unchanged => line?,
            Verdict::Distrusted => {
                let line = line.map_or_else(String::new, |line| format!("{line}; "));
                format!(
                    "{line}prompts of model \"{name}\" do not leave the blocks that they should, \
                     events are not used for it"
                )
            }
            Verdict::Trusted => {
                format!(
                    "prompts of model \"{name}\" leave the blocks that they should, events are used"
                )
            }
        };
        Some(Found { server, text, trusted: verdict == Verdict::Trusted })
    }
}

/// Keeps the first block that differs for the index page; the line for the log, the first time.
fn keep(
    zone: Zone<'_>,
    row: &ServerRow<'_>,
    expected: &Expected,
    at: usize,
    other: &Other,
) -> Option<String> {
    let size = expected.block_size as usize;
    let difference = Difference {
        server: expected.server,
        model: expected.model,
        block: expected.first + at as u32,
        block_size: expected.block_size,
        hash: expected.blocks[at],
        engine_hash: other.hash,
        tokens: expected.tokens.get(at * size..(at + 1) * size).unwrap_or_default().to_vec(),
        engine_tokens: other.tokens.clone(),
    };
    zone.differences().push(&difference);
    let trust = row.trust(expected.model)?;
    (trust.swap(TrustField::Logged, 1) == 0).then(|| {
        format!(
            "block {} of a prompt of model \"{}\" differs from token {} of it on: {:016x} was \
             foretold, the engine stored {:016x}; the index page has more",
            difference.block,
            expected.model_name,
            other.alike,
            difference.hash.0,
            difference.engine_hash.0
        )
    })
}

impl Applier<'_> {
    /// Decides which prompts have left the blocks that they should.
    pub fn check(&mut self, now: Instant) -> Vec<Found> {
        let index = self.writer.index();
        self.checker.decide(self.zone, &index, now)
    }
}

#[cfg(test)]
mod tests;
