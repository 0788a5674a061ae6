//! The PUB socket, the buffer of what was published, and the ROUTER that replays from it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;

use crate::cache::Event;
use crate::options::Options;
use crate::wire::{Format, Framing, Wire};

/// How long a call of the ROUTER may wait; also how soon it sees a restart.
const POLL_MS: i64 = 100;

/// A restart binds an endpoint that the socket before it may still hold for a moment.
const BIND_ATTEMPTS: u32 = 200;

/// As in the engine; zmq's own 1,000 would drop messages while a subscriber is slow.
const HIGH_WATER_MARK: i32 = 100_000;

/// Ends a replay, in the place of a sequence number.
const END: [u8; 8] = [0xff; 8];

#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    /// That many batches are kept for replay but not sent.
    pub gap: u64,
    /// That many batches take a sequence number and vanish.
    pub drop: u64,
    /// Nothing is sent, no replay is answered.
    pub silence: bool,
}

pub struct Publisher {
    context: zmq::Context,
    events: Option<String>,
    topic: Vec<u8>,
    buffer_steps: usize,
    framing: Option<Framing>,
    inner: Mutex<Inner>,
}

struct Inner {
    socket: Option<zmq::Socket>,
    wire: Wire,
    faults: Faults,
    sequence: u64,
    buffer: VecDeque<(u64, Vec<u8>)>,
    /// How often the engine has started.
    generation: u64,
}

impl Publisher {
    pub fn start(options: &Options) -> Result<Arc<Publisher>, String> {
        let context = zmq::Context::new();
        let socket = match &options.events {
            Some(endpoint) => Some(bind(&context, zmq::PUB, endpoint)?),
            None => None,
        };
        let wire = Wire {
            format: options.format,
            hash: options.hash,
            block_size: options.block_size,
            rank: options.dp_rank,
            loras: options.loras.clone(),
        };
        let publisher = Arc::new(Publisher {
            context,
            events: options.events.clone(),
            topic: options.topic.clone().into_bytes(),
            buffer_steps: options.buffer_steps,
            framing: options.framing,
            inner: Mutex::new(Inner {
                socket,
                wire,
                faults: Faults::default(),
                sequence: 0,
                buffer: VecDeque::new(),
                generation: 0,
            }),
        });
        if let Some(endpoint) = options.replay.clone() {
            let router = bind(&publisher.context, zmq::ROUTER, &endpoint)?;
            let replaying = publisher.clone();
            let replay = move || replaying.replay(router, &endpoint);
            thread::Builder::new()
                .name("replay".to_owned())
                .spawn(move || {
                    if let Err(error) = replay() {
                        eprintln!("mock-engine: replay: {error}");
                    }
                })
                .map_err(|error| error.to_string())?;
        }
        Ok(publisher)
    }

    pub fn publish(&self, events: &[Event]) {
        if events.is_empty() || self.events.is_none() {
            return;
        }
        let time = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_secs_f64();
        let mut inner = self.inner.lock();
        let Ok(payload) = inner.wire.batch(time, events) else { return };
        let sequence = inner.sequence;
        inner.sequence += 1;
        if inner.faults.drop > 0 {
            inner.faults.drop -= 1;
            return;
        }
        if inner.faults.gap > 0 {
            inner.faults.gap -= 1;
        } else if let Some(socket) = inner.socket.as_ref().filter(|_| !inner.faults.silence) {
            let sequence = sequence.to_be_bytes();
            // A PUB socket never blocks; what it cannot send is lost, as in the engine.
            let _ = socket.send_multipart([&self.topic, &sequence[..], &payload], 0);
        }
        inner.buffer.push_back((sequence, payload));
        while inner.buffer.len() > self.buffer_steps {
            inner.buffer.pop_front();
        }
    }

    pub fn set_faults(&self, change: impl FnOnce(&mut Faults)) {
        change(&mut self.inner.lock().faults);
    }

    pub fn set_format(&self, format: Format) {
        self.inner.lock().wire.format = format;
    }

    /// The number that the next batch gets.
    pub fn sequence(&self) -> u64 {
        self.inner.lock().sequence
    }

    /// What an exit and a new start look like: connections end, sequence 0, nothing to replay.
    pub fn restart(&self) -> Result<(), String> {
        let mut inner = self.inner.lock();
        inner.socket = None;
        inner.sequence = 0;
        inner.buffer.clear();
        inner.generation += 1;
        if let Some(endpoint) = &self.events {
            inner.socket = Some(bind(&self.context, zmq::PUB, endpoint)?);
        }
        Ok(())
    }

    fn replay(&self, router: zmq::Socket, endpoint: &str) -> Result<(), String> {
        let mut router = router;
        let mut generation = 0;
        loop {
            let ready =
                router.poll(zmq::POLLIN, POLL_MS).map_err(|error| format!("poll: {error}"))? > 0;
            let now = self.inner.lock().generation;
            if now != generation {
                generation = now;
                drop(router);
                router = bind(&self.context, zmq::ROUTER, endpoint)?;
            } else if ready {
                let request = router.recv_multipart(0).map_err(|error| error.to_string())?;
                // A peer that has gone is no error of ours.
                let _ = self.answer(&router, &request);
            }
        }
    }

    fn answer(&self, router: &zmq::Socket, request: &[Vec<u8>]) -> Result<(), zmq::Error> {
        let [peer, empty, start] = request else { return Ok(()) };
        let Ok(start) = <[u8; 8]>::try_from(start.as_slice()).map(u64::from_be_bytes) else {
            return Ok(());
        };
        if !empty.is_empty() {
            return Ok(());
        }
        let inner = self.inner.lock();
        if inner.faults.silence {
            return Ok(());
        }
        let batches: Vec<_> =
            inner.buffer.iter().filter(|(sequence, _)| *sequence >= start).cloned().collect();
        let framing = self.framing.unwrap_or(inner.wire.format.framing());
        drop(inner);
        let send = |topic: &[u8], sequence: &[u8], payload: &[u8]| match framing {
            Framing::New => router.send_multipart([peer, &b""[..], topic, sequence, payload], 0),
            Framing::Old => router.send_multipart([peer, &b""[..], sequence, payload], 0),
        };
        for (sequence, payload) in &batches {
            send(&self.topic, &sequence.to_be_bytes(), payload)?;
        }
        send(b"", &END, b"")
    }
}

fn bind(
    context: &zmq::Context,
    kind: zmq::SocketType,
    endpoint: &str,
) -> Result<zmq::Socket, String> {
    let attempt = || {
        let socket = context.socket(kind)?;
        socket.set_linger(0)?;
        socket.set_sndhwm(HIGH_WATER_MARK)?;
        socket.set_ipv6(endpoint.contains('['))?;
        socket.bind(endpoint)?;
        Ok(socket)
    };
    let mut left = BIND_ATTEMPTS;
    loop {
        match attempt() {
            Err(zmq::Error::EADDRINUSE) if left > 0 => {
                left -= 1;
                thread::sleep(Duration::from_millis(10));
            }
            result => {
                return result.map_err(|error| format!("cannot bind {endpoint}: {error}"));
            }
        }
    }
}
