//! One server's connection: from sockets through [`Flow`] to the index and the server's row.
#![forbid(unsafe_code)]

mod effects;

use std::time::{Duration, Instant};

use zmq::{Context, PollItem};

use super::apply::{Applier, Habits};
use super::flow::{Flow, Message};
use super::log::{Kind, ServerLog};
use super::sequence::Mark;
use super::sockets::{Happened, Replay, Subscription, receive};
use super::wire::{self, Reply};
use super::{Level, ServerEndpoint};
use crate::shared::{Dropped, Mode, ServerError, ServerField, ServerRow};

/// Messages of one server that are taken in a turn, so that the others get theirs.
const TURN: usize = 256;
const FIRST_REOPEN: Duration = Duration::from_millis(100);
const LAST_REOPEN: Duration = Duration::from_secs(10);
/// After a connection was made: what was published before the engine knew of the subscription is
/// asked for again, in case that no later message shows the hole.
const VERIFY_AFTER: Duration = Duration::from_secs(1);
const PROBE_AFTER: Duration = Duration::from_secs(30);
/// A server that has to be learned again within this time of the last one waits for a while.
const CALM: Duration = Duration::from_secs(5);
/// What a server held when its events were lost is believed for this long.
const SILENT: Duration = Duration::from_secs(10);

pub struct Link<'z> {
    server: ServerEndpoint,
    /// Ranks share the address, so each connection must bring its own.
    strict: bool,
    row: ServerRow<'z>,
    log: ServerLog,
    flow: Flow,
    subscription: Option<Subscription>,
    connected: bool,
    connected_at: Instant,
    lost_at: Instant,
    reopen_at: Instant,
    reopen_after: Duration,
    replay: Option<Replay>,
    /// A replay that is to be asked for: from where, not before when.
    wanted: Option<(u64, Instant)>,
    verify_at: Option<Instant>,
    verified: bool,
    /// The replay that is asked for now is no sign of trouble, and not counted.
    verifying: bool,
    probe_at: Option<Instant>,
    cleared_at: Option<Instant>,
    pause: Duration,
    rank: Option<u64>,
    habits: Habits,
    /// The block size that the engine has and must not have; nothing of it is applied.
    other_block_size: Option<u32>,
    /// What the sequence has to be told once it is not in use: from where all is known.
    known_from: Option<u64>,
}

impl<'z> Link<'z> {
    pub fn new(
        server: ServerEndpoint,
        strict: bool,
        row: ServerRow<'z>,
        log: ServerLog,
        flow: Flow,
    ) -> Link<'z> {
        let now = Instant::now();
        row.set(ServerField::Connected, 0);
        row.set_error(ServerError::NotConnected);
        Link {
            server,
            strict,
            row,
            log,
            flow,
            subscription: None,
            connected: false,
            connected_at: now,
            lost_at: now,
            reopen_at: now,
            reopen_after: FIRST_REOPEN,
            replay: None,
            wanted: None,
            verify_at: None,
            verified: false,
            verifying: false,
            probe_at: None,
            cleared_at: None,
            pause: Duration::ZERO,
            rank: None,
            habits: Habits::default(),
            other_block_size: None,
            known_from: None,
        }
    }

    pub fn server(&self) -> &ServerEndpoint {
        &self.server
    }

    /// Adds the sockets to be waited for.
    pub fn poll_items<'s>(&'s self, items: &mut Vec<PollItem<'s>>) {
        if let Some(subscription) = &self.subscription {
            items.push(subscription.socket.as_poll_item(zmq::POLLIN));
        }
        if let Some(replay) = &self.replay {
            items.push(replay.socket.as_poll_item(zmq::POLLIN));
        }
    }

    pub fn is_replaying(&self) -> bool {
        self.replay.is_some()
    }

    /// Takes in what has come.
    pub fn receive(&mut self, applier: &mut Applier<'z>) {
        for _ in 0..TURN {
            self.watch(applier);
            let Some(subscription) = self.subscription.as_ref().filter(|_| self.connected) else {
                break;
            };
            match receive(&subscription.socket) {
                Some(frames) => self.live(frames, applier),
                None => break,
            }
        }
        for _ in 0..TURN {
            let Some(frames) = self.replay.as_ref().and_then(|r| receive(&r.socket)) else { break };
            self.reply(frames, applier);
        }
    }

    /// What the clock asks for. `may_replay`: whether one more replay may run.
    pub fn tick(&mut self, context: &Context, may_replay: bool, applier: &mut Applier<'z>) {
        let now = Instant::now();
        if self.subscription.is_none() && now >= self.reopen_at {
            self.open(context, now);
        }
        self.watch(applier);
        if !self.connected && now.duration_since(self.lost_at) >= SILENT {
            self.show(Mode::Approximate);
        }
        if self.replay.as_ref().is_some_and(|replay| now >= replay.deadline) {
            self.unanswered(now, applier);
        }
        if self.verify_at.is_some_and(|at| now >= at) {
            self.verify_at = None;
            self.verifying = true;
            self.flow(applier, |flow, mut act| flow.verify(&mut act));
            self.verifying = false;
        }
        if self.probe_at.is_some_and(|at| now >= at) && self.replay.is_none() && may_replay {
            self.probe_at = None;
            self.ask(context, 0, true, now, applier);
        }
        if let Some((from, at)) = self.wanted
            && may_replay
            && now >= at
        {
            self.wanted = None;
            self.ask(context, from, false, now, applier);
        }
    }

    fn open(&mut self, context: &Context, now: Instant) {
        let Some(endpoint) = &self.server.events else { return };
        self.reopen_at = now + self.reopen_after;
        self.reopen_after = (self.reopen_after * 2).min(LAST_REOPEN);
        match Subscription::open(context, endpoint, &self.server.topic) {
            Ok(subscription) => self.subscription = Some(subscription),
            Err(error) => {
                self.trouble(ServerError::BadAddress);
                let text = format!("events of {endpoint} cannot be subscribed to: {error}");
                self.log.seldom(Kind::Connection, Level::Error, &text, now);
            }
        }
    }

    /// Follows the connection. Its end also ends the socket: messages of a next connection, maybe
    /// to another life of the engine, can then never be taken for messages of this one.
    fn watch(&mut self, applier: &mut Applier<'z>) {
        while let Some(happened) = self.subscription.as_ref().and_then(Subscription::happened) {
            match happened {
                Happened::Connected => self.connected(applier),
                Happened::Refused if !self.connected => self.trouble(ServerError::NotConnected),
                Happened::Refused => {}
                Happened::Disconnected if !self.connected => {}
                Happened::Disconnected => {
                    if self.connected_at.elapsed() > CALM {
                        self.reopen_after = FIRST_REOPEN;
                    }
                    self.close();
                    self.trouble(ServerError::NotConnected);
                    self.say(Level::Notice, "events disconnected");
                }
                Happened::NotZmq => {
                    self.close();
                    self.trouble(ServerError::NotZmq);
                    let text = "the address for events does not speak zmtp";
                    self.log.seldom(Kind::Connection, Level::Warn, text, Instant::now());
                }
            }
        }
    }

    fn connected(&mut self, applier: &mut Applier<'z>) {
        self.connected = true;
        self.connected_at = Instant::now();
        self.verified = false;
        self.rank = None;
        self.row.set(ServerField::Connected, 1);
        if self.other_block_size.is_none() {
            self.row.set_error(ServerError::None);
        }
        self.say(Level::Notice, "events connected");
        let replays = self.server.replay.is_some();
        self.flow(applier, |flow, mut act| flow.connected(replays, &mut act));
    }

    fn close(&mut self) {
        self.subscription = None;
        self.connected = false;
        self.lost_at = Instant::now();
        self.reopen_at = Instant::now() + self.reopen_after;
        self.reopen_after = (self.reopen_after * 2).min(LAST_REOPEN);
        self.row.set(ServerField::Connected, 0);
        self.replay = None;
        self.wanted = None;
        self.verify_at = None;
        self.probe_at = None;
        self.flow.disconnected();
    }

    fn ask(
        &mut self,
        context: &Context,
        from: u64,
        probing: bool,
        now: Instant,
        applier: &mut Applier<'z>,
    ) {
        let Some(endpoint) = &self.server.replay else { return };
        match Replay::ask(context, endpoint, from, probing) {
            Ok(replay) => self.replay = Some(replay),
            Err(error) => {
                let text = format!("replay of {endpoint} cannot be asked for: {error}");
                self.log.seldom(Kind::Replay, Level::Error, &text, now);
                self.failed(now, applier);
            }
        }
    }

    fn unanswered(&mut self, now: Instant, applier: &mut Applier<'z>) {
        let probing = self.replay.take().is_some_and(|replay| replay.probing);
        if probing {
            self.probe_at = Some(now + PROBE_AFTER);
            return;
        }
        let text = "the replay of events was not answered";
        self.log.seldom(Kind::Replay, Level::Warn, text, now);
        self.failed(now, applier);
    }

    fn failed(&mut self, now: Instant, applier: &mut Applier<'z>) {
        self.trouble(ServerError::ReplayUnanswered);
        self.probe_at = Some(now + PROBE_AFTER);
        self.flow(applier, |flow, mut act| flow.replay_failed(&mut act));
    }

    fn live(&mut self, frames: Vec<Vec<u8>>, applier: &mut Applier<'z>) {
        match self.message(wire::live(&frames)) {
            Ok(message) => {
                self.readable();
                self.flow(applier, |flow, mut act| flow.live(message, &mut act));
            }
            Err(reason) => self.dropped(reason),
        }
    }

    fn reply(&mut self, frames: Vec<Vec<u8>>, applier: &mut Applier<'z>) {
        let reply = match wire::reply(&frames) {
            Ok(reply) => reply,
            Err(reason) => return self.dropped(reason),
        };
        let Some(replay) = &mut self.replay else { return };
        replay.progressed();
        let probing = std::mem::take(&mut replay.probing);
        if probing {
            self.flow(applier, |flow, mut act| flow.replay_answered(&mut act));
        }
        match reply {
            Reply::End => {
                self.replay = None;
                self.probe_at = None;
                if !std::mem::replace(&mut self.verified, true) {
                    self.verify_at = Some(Instant::now() + VERIFY_AFTER);
                }
                self.flow(applier, |flow, mut act| flow.replay_ended(&mut act));
            }
            Reply::Batch(numbered) => {
                let message = match self.message(Ok(numbered)) {
                    Ok(message) => message,
                    Err(Dropped::Rank) => return self.dropped(Dropped::Rank),
                    // It is what the engine said under this number, and there is no other copy.
                    Err(_) => unreadable(numbered),
                };
                self.flow(applier, |flow, mut act| flow.replayed(message, &mut act));
            }
        }
    }

    fn message(
        &mut self,
        numbered: Result<wire::Numbered<'_>, Dropped>,
    ) -> Result<Message, Dropped> {
        let wire::Numbered { seq, payload } = numbered?;
        let (timestamp, rank) = wire::outline(payload)?;
        if let Some(rank) = rank {
            let own = if self.strict { u64::from(self.server.rank) } else { rank };
            if *self.rank.get_or_insert(own) != rank {
                return Err(Dropped::Rank);
            }
        }
        let mark = Mark { seq, digest: wire::digest(payload), timestamp };
        Ok(Message { mark, payload: payload.to_vec() })
    }
}

/// Stands for a batch that cannot be read.
fn unreadable(numbered: wire::Numbered<'_>) -> Message {
    let wire::Numbered { seq, payload } = numbered;
    let mark = Mark { seq, digest: wire::digest(payload), timestamp: 0.0 };
    Message { mark, payload: payload.to_vec() }
}
