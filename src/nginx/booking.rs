//! What a choice changes: the loads, the counters, what is learned and looked out for.

use std::time::Duration;

use super::choice::Choice;
use super::context::{Context, Held, Picked};
use super::log::log;
use super::peers::Peer;
use super::plan::Seat;
use super::process::{self, Process};
use crate::lookup::{self, Match};
use crate::select::next_turn;
use crate::shared::{Counter, ServerField, UpstreamField};
use crate::types::ServerId;

impl Choice {
    /// Counts the request in at the peer that it goes to: one of the order, or one that nginx chose.
    ///
    /// # Safety
    /// The peer was chosen just now and holds a connection of this request, which is live.
    pub unsafe fn book(&self, peer: *mut Peer, seat: Option<usize>) {
        // SAFETY: the caller's.
        let (name, weight) = unsafe {
            let Some(peer) = peer.as_ref() else { return };
            (peer.name.as_bytes(), peer.weight.max(1) as u32)
        };
        // SAFETY: the request is live; its state is not borrowed elsewhere.
        let (process, context) = unsafe {
            match (process::get(), Context::find(self.request)) {
                (Some(process), Some(context)) => (process, context),
                _ => return,
            }
        };
        let seat = seat.or_else(|| self.seat_of(peer)).map(|at| &self.plan.seats[at]);
        let backup = || process.servers(self.conf, name).first().copied();
        let Some(id) = seat.map(|seat| seat.id).or_else(backup) else { return };
        let model = context.model.map(|model| process.key(model));
        let found = seat.map_or_else(Match::default, |seat| seat.found);
        if seat.is_some_and(|seat| self.is_loose(seat)) {
            process.warn_loose(&self.conf.name);
        }
        let picked = Picked {
            server: id,
            name: String::from_utf8_lossy(name).into_owned(),
            rank: seat.and_then(Seat::rank),
            mode: lookup::believed(&process.zone.server(id), model),
            matched_blocks: found.overlap.blocks,
            matched_tokens: found.matched_tokens(),
            prompt_blocks: found.prompt_blocks,
        };
        context.choice.get_or_insert_with(|| self.shadowed(process).unwrap_or(picked.clone()));
        self.reserve(process, context, id, &found);
        let ticket = context.prompt.as_ref().ok().and_then(|tokens| {
            lookup::learn(process.zone, tokens, id, &found);
            let (key, name) = (process.key(tokens.model), process.models.name(tokens.model));
            lookup::expect(process.zone, (tokens, key), name, id, &found)
        });
        context.expect(ticket);
        self.take_turn(process, id, weight);
        log!(
            DEBUG,
            unsafe { (*(*self.request).connection).log },
            "kvc_aware: {} matched {} of {} blocks",
            picked.name,
            picked.matched_blocks,
            picked.prompt_blocks
        );
        self.count(process, context, &picked);
        context.picked = Some(picked);
    }

    /// Where the request would have gone, in shadow mode.
    fn shadowed(&self, process: &Process) -> Option<Picked> {
        let seat = &self.plan.seats[self.plan.shadowed?];
        Some(Picked {
            server: seat.id,
            name: process.zone.server(seat.id).address(),
            rank: seat.rank(),
            mode: seat.found.mode,
            matched_blocks: seat.found.overlap.blocks,
            matched_tokens: seat.found.matched_tokens(),
            prompt_blocks: seat.found.prompt_blocks,
        })
    }

    /// Prompt tokens to prefill: known, or guessed from the body's length.
    fn queued(&self, context: &Context, found: &Match) -> u64 {
        const BYTES_PER_TOKEN: u64 = 4;
        match &context.prompt {
            Ok(tokens) => (tokens.ids.len() as u64).saturating_sub(found.matched_tokens().into()),
            // SAFETY: the request is live; the length is -1 where there is none.
            Err(_) => unsafe {
                (*self.request).headers_in.content_length_n.max(0) as u64 / BYTES_PER_TOKEN
            },
        }
    }

    /// Counts the request in at a seat.
    pub fn hold(&self, process: &Process, context: &mut Context, seat: usize) {
        let seat = &self.plan.seats[seat];
        self.reserve(process, context, seat.id, &seat.found);
    }

    fn reserve(&self, process: &Process, context: &mut Context, id: ServerId, found: &Match) {
        if context.held.as_ref().is_some_and(|held| held.reservation.server == id) {
            return;
        }
        let queued = self.queued(context, found);
        let now = process::now_ms();
        let before = process.loads.load(id).queued_tokens;
        let rate = self.plan.demand.rate;
        let prefill =
            (rate > 0.0).then(|| Duration::from_secs_f64((before + queued) as f64 / rate));
        // A place that is still held is given back first.
        context.release();
        let reservation = process.loads.reserve(id, queued, now);
        let upstream = process.upstream(&self.conf.name);
        context.hold(Held { reservation, upstream, since_ms: now }, prefill);
    }

    fn take_turn(&self, process: &Process, id: ServerId, weight: u32) {
        let Some(upstream) = process.upstream(&self.conf.name) else { return };
        let row = process.zone.server(id);
        let turn = row.get(ServerField::Turn);
        let now = upstream.get(UpstreamField::Turn);
        row.set(ServerField::Turn, next_turn(turn, now, weight));
        upstream.set(UpstreamField::Turn, now.max(turn));
    }

    fn count(&self, process: &Process, context: &mut Context, picked: &Picked) {
        let row = process.zone.server(picked.server);
        row.add(ServerField::Requests, 1);
        if let Some(model) = context.model {
            row.set(ServerField::Model, model as u64 + 1);
        }
        if std::mem::replace(&mut context.counted, true) {
            process.count(Counter::Retries, 1);
            return;
        }
        process.count(Counter::Balanced, 1);
        match &context.prompt {
            Err(skip) => process.zone.counters().add_skip(*skip),
            Ok(tokens) => {
                process.count(Counter::PromptTokens, tokens.ids.len() as u64);
                process.count(Counter::MatchedTokens, picked.matched_tokens.into());
                if let Some(choice) = context.choice.as_ref().filter(|_| context.shadow) {
                    let missed = choice.matched_tokens.saturating_sub(picked.matched_tokens);
                    process.count(Counter::Shadow, 1);
                    process.count(Counter::ShadowMissedTokens, missed.into());
                }
                process.count(
                    match (context.single, picked.matched_blocks) {
                        (true, _) => Counter::Single,
                        (_, 0) => Counter::Miss,
                        _ => Counter::Hit,
                    },
                    1,
                );
            }
        }
    }
}
