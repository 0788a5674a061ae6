//! The thread: it waits for the lease, then follows all servers until another process wants it.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use zmq::Context;

use super::apply::Applier;
use super::flow::Flow;
use super::learn::Learner;
use super::link::Link;
use super::log::ServerLog;
use super::{EventsError, Level, ServerEndpoint, SubscriberConfig};
use crate::index::Writer;
use crate::load;
use crate::shared::{MAX_SERVERS, Mode, ProcessId, ServerError, ServerField, Zone};
use crate::types::ServerId;

const LEASE_POLL: Duration = Duration::from_millis(50);
/// How often clocks, monitors, the lease and the stop flag are looked at.
const TICK: Duration = Duration::from_millis(100);
/// The same while workers route to servers without events, and for so many turns after.
const BUSY_TICK: Duration = Duration::from_millis(5);
const BUSY_TURNS: u32 = 20;
const REAP: Duration = Duration::from_secs(1);
/// Rows of servers that are not configured any more are kept this long: a draining worker may
/// still choose them.
const KEEP_ROWS: Duration = Duration::from_secs(10);
const AFTER_PANIC: Duration = Duration::from_secs(1);
/// Replays that run at once; the others wait. Bounds sockets and the load of a mass restart.
const MAX_REPLAYS: usize = 32;
/// Servers of one ZMQ context, each with up to four of its 1023 sockets.
const CONTEXT_SERVERS: usize = 200;

/// The running thread. Dropping it stops the thread too.
pub struct Subscriber {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Subscriber {
    /// Starts the thread; it takes over the index once no other live process writes it. The
    /// thread inherits the caller's signal mask.
    pub fn start(config: SubscriberConfig, zone: Zone<'static>) -> Result<Subscriber, EventsError> {
        Subscriber::start_as(config, zone, ProcessId::current())
    }

    /// Like [`Subscriber::start`], holding the lease in the name of `me`.
    pub fn start_as(
        config: SubscriberConfig,
        zone: Zone<'static>,
        me: ProcessId,
    ) -> Result<Subscriber, EventsError> {
        let stop = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&stop);
        let thread = thread::Builder::new()
            .name("kvc_aware events".into())
            .spawn(move || Thread { config, zone, me, stop: seen }.run())?;
        Ok(Subscriber { stop, thread: Some(thread) })
    }

    /// Ends the thread, within a second, and gives the lease up.
    pub fn stop(self) {
        drop(self);
    }
}

impl Drop for Subscriber {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was caught and logged there.
            let _ = thread.join();
        }
    }
}

struct Thread {
    config: SubscriberConfig,
    zone: Zone<'static>,
    me: ProcessId,
    stop: Arc<AtomicBool>,
}

impl Thread {
    fn run(&self) {
        let lease = self.zone.lease();
        lease.want(self.me);
        while !self.stopping() {
            if !lease.try_acquire(self.me) {
                thread::sleep(LEASE_POLL);
                continue;
            }
            // What a panic leaves in the index is found by the next attach, as after a crash.
            let held = catch_unwind(AssertUnwindSafe(|| self.hold()));
            if !matches!(held, Ok(Ok(()))) {
                let text = match held {
                    Ok(Err(error)) => error,
                    _ => "event handling failed, it begins again".to_owned(),
                };
                (self.config.log)(Level::Error, text);
                for server in self.config.servers.iter().filter(|s| s.events.is_some()) {
                    self.zone.server(server.id).set_error(ServerError::Panicked);
                }
                self.sleep(AFTER_PANIC);
            }
            lease.release(self.me);
        }
        lease.release(self.me);
    }

    fn stopping(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    fn sleep(&self, time: Duration) {
        let until = Instant::now() + time;
        while !self.stopping() && Instant::now() < until {
            thread::sleep(LEASE_POLL);
        }
    }

    /// Follows the servers while this process holds the lease.
    fn hold(&self) -> Result<(), String> {
        let (writer, takeover) = Writer::attach(self.zone.index_words())
            .map_err(|error| format!("the index cannot be written: {error}"))?;
        let mut applier = Applier::new(writer, self.zone);
        for torn in &takeover.torn {
            match torn.index() < MAX_SERVERS {
                true => applier.clear(*torn),
                false => applier.unlearn(ServerId(torn.0 - MAX_SERVERS as u16)),
            }
        }
        let servers = distinct(&self.config.servers);
        let contexts: Vec<Context> =
            (0..servers.len().div_ceil(CONTEXT_SERVERS)).map(|_| Context::new()).collect();
        let mut gone = self.unconfigured(&mut applier, &servers);
        let mut links: Vec<Link<'static>> = servers
            .iter()
            .take_while(|_| !self.stopping())
            .filter_map(|server| self.link(&mut applier, server, &servers))
            .collect();
        let started = Instant::now();
        let (mut ticked, mut reaped, mut busy) = (None, started, 0u32);
        let mut learner = Learner::default();
        while !self.stopping() && !self.zone.lease().is_wanted_by_other(self.me) {
            wait(&links, if busy > 0 { BUSY_TICK } else { TICK });
            busy = if learner.work(&mut applier) { BUSY_TURNS } else { busy.saturating_sub(1) };
            for link in &mut links {
                link.receive(&mut applier);
            }
            let now = Instant::now();
            if ticked.is_none_or(|at| now - at >= TICK) {
                ticked = Some(now);
                tick(&mut links, &contexts, &mut applier);
                self.check(&mut applier, now);
            }
            if now - reaped >= REAP {
                reaped = now;
                load::reap(self.zone, self.me);
                if now - started >= KEEP_ROWS {
                    gone.retain(|id| !self.freed(*id));
                }
            }
        }
        Ok(())
    }

    /// Tells which prompts have not left the blocks that they should.
    fn check(&self, applier: &mut Applier<'_>, now: Instant) {
        for found in applier.check(now) {
            let level = if found.trusted { Level::Notice } else { Level::Warn };
            let server = self.zone.server(found.server).address();
            (self.config.log)(level, format!("server {server}: {}", found.text));
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
        let log = ServerLog::new(Arc::clone(&self.config.log), server);
        Some(Link::new(server.clone(), strict, row, log, Flow::new(sequence)))
    }

    /// Forgets the blocks of servers that the configuration has no more, and tells which.
    fn unconfigured(
        &self,
        applier: &mut Applier<'static>,
        servers: &[ServerEndpoint],
    ) -> Vec<ServerId> {
        let configured = |id| servers.iter().any(|server| server.id == id);
        let rows = self.zone.servers();
        let gone: Vec<ServerId> =
            rows.claimed().map(|(id, _)| id).filter(|id| !configured(*id)).collect();
        for id in gone.iter().take_while(|_| !self.stopping()) {
            applier.clear(*id);
            applier.unlearn(*id);
            self.zone.server(*id).set_mode(Mode::Approximate);
        }
        gone
    }

    fn freed(&self, id: ServerId) -> bool {
        let idle = load::load(self.zone, id).in_flight == 0;
        if idle {
            self.zone.servers().free(id);
        }
        idle
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

fn wait(links: &[Link<'_>], most: Duration) {
    let mut items = Vec::with_capacity(links.len() * 2);
    for link in links {
        link.poll_items(&mut items);
    }
    // An interrupted wait is a short one.
    let _ = zmq::poll(&mut items, most.as_millis() as i64);
}

fn tick(links: &mut [Link<'static>], contexts: &[Context], applier: &mut Applier<'static>) {
    let mut replays = links.iter().filter(|link| link.is_replaying()).count();
    for (at, link) in links.iter_mut().enumerate() {
        let Some(context) = contexts.get(at / CONTEXT_SERVERS) else { continue };
        let before = link.is_replaying();
        link.tick(context, replays < MAX_REPLAYS, applier);
        if link.is_replaying() && !before {
            replays += 1;
        }
    }
}
