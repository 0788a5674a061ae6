//! All servers that the thread follows, which may come and go.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use zmq::Context;

use super::apply::Applier;
use super::flow::Flow;
use super::link::Link;
use super::log::ServerLog;
use super::{Log, ServerEndpoint};
use crate::load;
use crate::shared::{Mode, ServerError, ServerField, Zone};
use crate::types::ServerId;

/// Rows of servers that are gone are kept this long: a draining worker may still choose them.
const KEEP_ROWS: Duration = Duration::from_secs(10);
/// Replays that run at once; the others wait. Bounds sockets and the load of a mass restart.
const MAX_REPLAYS: usize = 32;
/// Servers of one ZMQ context, each with up to four of its 1023 sockets.
const CONTEXT_SERVERS: usize = 200;

pub struct Fleet {
    zone: Zone<'static>,
    log: Log,
    servers: Vec<ServerEndpoint>,
    // Before the contexts, which end once their sockets are closed.
    links: Vec<Link<'static>>,
    contexts: Vec<Context>,
    /// Rows to be freed, and since when they are not needed.
    gone: Vec<(ServerId, Instant)>,
}

impl Fleet {
    pub fn new(zone: Zone<'static>, log: Log) -> Fleet {
        let (servers, links, contexts, gone) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        Fleet { zone, log, servers, links, contexts, gone }
    }

    /// Follows these servers and no others. Forgets the blocks of all that are not among them.
    pub fn follow(
        &mut self,
        applier: &mut Applier<'static>,
        servers: &[ServerEndpoint],
        stopping: impl Fn() -> bool,
    ) {
        let servers = distinct(servers);
        self.links.retain(|link| servers.contains(link.server()));
        let wanted = |id| servers.iter().any(|server| server.id == id);
        self.gone.retain(|(id, _)| !wanted(*id));
        let rows = self.zone.servers();
        let unknown = rows.claimed().map(|(id, _)| id).filter(|id| !wanted(*id));
        for id in unknown.take_while(|_| !stopping()) {
            if !self.gone.iter().any(|(gone, _)| *gone == id) {
                applier.clear(id);
                applier.unlearn(id);
                self.zone.server(id).set_mode(Mode::Approximate);
                self.gone.push((id, Instant::now()));
            }
        }
        for server in servers.iter().take_while(|_| !stopping()) {
            if !self.servers.contains(server) {
                let link = self.link(applier, server, &servers);
                self.links.extend(link);
            }
        }
        self.servers = servers;
        while self.contexts.len() < self.links.len().div_ceil(CONTEXT_SERVERS) {
            self.contexts.push(Context::new());
        }
    }

    /// The connection to a server, which goes on where the last process stopped.
    fn link(
        &self,
        applier: &mut Applier<'static>,
        server: &ServerEndpoint,
        all: &[ServerEndpoint],
    ) -> Option<Link<'static>> {
        let row = self.zone.server(server.id);
        // A setting that was found wrong may be right by now: learn the server anew.
        let kept = server.events.is_some() && row.error() != ServerError::BlockSize;
        let sequence = applier.resume(server.id).filter(|_| kept).unwrap_or_default();
        if sequence.next() == 0 {
            applier.clear(server.id);
            row.set_mode(Mode::Approximate);
        }
        if server.events.is_none() {
            row.set(ServerField::Connected, 0);
            row.set_error(ServerError::None);
            row.set(ServerField::BlockSize, server.block_size.unwrap_or_default().into());
            return None;
        }
        let strict = all.iter().filter(|other| other.address == server.address).count() > 1;
        let log = ServerLog::new(Arc::clone(&self.log), server);
        Some(Link::new(server.clone(), strict, row, log, Flow::new(sequence)))
    }

    /// Waits until something comes.
    pub fn wait(&self, most: Duration) {
        let mut items = Vec::with_capacity(self.links.len() * 2);
        for link in &self.links {
            link.poll_items(&mut items);
        }
        // An interrupted wait is a short one.
        let _ = zmq::poll(&mut items, most.as_millis() as i64);
    }

    /// Takes in what has come.
    pub fn receive(&mut self, applier: &mut Applier<'static>) {
        for link in &mut self.links {
            link.receive(applier);
        }
    }

    /// What the clock asks for.
    pub fn tick(&mut self, applier: &mut Applier<'static>) {
        let mut replays = self.links.iter().filter(|link| link.is_replaying()).count();
        for (at, link) in self.links.iter_mut().enumerate() {
            let Some(context) = self.contexts.get(at / CONTEXT_SERVERS) else { continue };
            let before = link.is_replaying();
            link.tick(context, replays < MAX_REPLAYS, applier);
            if link.is_replaying() && !before {
                replays += 1;
            }
        }
    }

    /// Frees the rows that nobody needs any more.
    pub fn free(&mut self, now: Instant) {
        let zone = self.zone;
        self.gone.retain(|(id, since)| {
            let idle =
                now.duration_since(*since) >= KEEP_ROWS && load::load(zone, *id).in_flight == 0;
            if idle {
                zone.servers().free(*id);
            }
            !idle
        });
    }
}

/// One endpoint for each row: of a server in two upstreams, the one that has events.
fn distinct(servers: &[ServerEndpoint]) -> Vec<ServerEndpoint> {
    let mut places: HashMap<ServerId, usize> = HashMap::new();
    let mut kept: Vec<ServerEndpoint> = Vec::new();
    for server in servers {
        let place = *places.entry(server.id).or_insert(kept.len());
        match kept.get_mut(place) {
            None => kept.push(server.clone()),
            Some(first) if first.events.is_none() => *first = server.clone(),
            Some(_) => {}
        }
    }
    kept
}
