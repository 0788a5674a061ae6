//! The thread: it waits for the lease, then follows all servers until another process wants it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::apply::Applier;
use super::fleet::Fleet;
use super::learn::Learner;
use super::{EventsError, Level, Log, ServerEndpoint, SubscriberConfig};
use crate::index::Writer;
use crate::load;
use crate::shared::{MAX_SERVERS, ProcessId, ServerError, Zone};
use crate::types::ServerId;

const LEASE_POLL: Duration = Duration::from_millis(50);
/// How often clocks, monitors, the lease and the stop flag are looked at.
const TICK: Duration = Duration::from_millis(100);
/// The same while workers route to servers without events, and for so many turns after.
const BUSY_TICK: Duration = Duration::from_millis(5);
const BUSY_TURNS: u32 = 20;
const REAP: Duration = Duration::from_secs(1);
const AFTER_PANIC: Duration = Duration::from_secs(1);

/// The running thread. Dropping it stops the thread too.
pub struct Subscriber {
    wish: Arc<Wish>,
    thread: Option<JoinHandle<()>>,
}

/// What others want of the thread.
struct Wish {
    stop: AtomicBool,
    servers: Mutex<Arc<[ServerEndpoint]>>,
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
        let SubscriberConfig { servers, log } = config;
        let wish =
            Arc::new(Wish { stop: AtomicBool::new(false), servers: Mutex::new(servers.into()) });
        let seen = Arc::clone(&wish);
        let thread = thread::Builder::new()
            .name("kvc_aware events".into())
            .spawn(move || Thread { wish: seen, log, zone, me }.run())?;
        Ok(Subscriber { wish, thread: Some(thread) })
    }

    /// The servers are others now: new ones are followed, what is known of missing ones goes.
    pub fn follow(&self, servers: Vec<ServerEndpoint>) {
        *self.wish.servers.lock() = servers.into();
    }

    /// Ends the thread, within a second, and gives the lease up.
    pub fn stop(self) {
        drop(self);
    }
}

impl Drop for Subscriber {
    fn drop(&mut self) {
        self.wish.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was caught and logged there.
            let _ = thread.join();
        }
    }
}

struct Thread {
    wish: Arc<Wish>,
    log: Log,
    zone: Zone<'static>,
    me: ProcessId,
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
                (self.log)(Level::Error, text);
                for server in self.servers().iter().filter(|s| s.events.is_some()) {
                    self.zone.server(server.id).set_error(ServerError::Panicked);
                }
                self.sleep(AFTER_PANIC);
            }
            lease.release(self.me);
        }
        lease.release(self.me);
    }

    fn stopping(&self) -> bool {
        self.wish.stop.load(Ordering::Acquire)
    }

    fn servers(&self) -> Arc<[ServerEndpoint]> {
        Arc::clone(&self.wish.servers.lock())
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
        let mut fleet = Fleet::new(self.zone, Arc::clone(&self.log));
        let mut servers = self.servers();
        fleet.follow(&mut applier, &servers, || self.stopping());
        let (mut ticked, mut reaped, mut busy) = (None, Instant::now(), 0u32);
        let mut learner = Learner::default();
        while !self.stopping() && !self.zone.lease().is_wanted_by_other(self.me) {
            fleet.wait(if busy > 0 { BUSY_TICK } else { TICK });
            busy = if learner.work(&mut applier) { BUSY_TURNS } else { busy.saturating_sub(1) };
            fleet.receive(&mut applier);
            let now = Instant::now();
            if ticked.is_none_or(|at| now - at >= TICK) {
                ticked = Some(now);
                let wanted = self.servers();
                if !Arc::ptr_eq(&wanted, &servers) {
                    servers = wanted;
                    fleet.follow(&mut applier, &servers, || self.stopping());
                }
                fleet.tick(&mut applier);
                self.check(&mut applier, now);
            }
            if now - reaped >= REAP {
                reaped = now;
                load::reap(self.zone, self.me);
                fleet.free(now);
            }
        }
        Ok(())
    }

    /// Tells which prompts have not left the blocks that they should.
    fn check(&self, applier: &mut Applier<'_>, now: Instant) {
        for found in applier.check(now) {
            let level = if found.trusted { Level::Notice } else { Level::Warn };
            let server = self.zone.server(found.server).address();
            (self.log)(level, format!("server {server}: {}", found.text));
        }
    }
}
