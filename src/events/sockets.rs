//! ZMQ sockets: the subscription with its monitor, and the replay.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use zmq::{Context, DONTWAIT, Socket, SocketEvent};

use super::wire;

/// Largest frame that is taken in; a peer that sends a larger one is disconnected.
const MAX_FRAME: i64 = 64 << 20;
/// Messages that may wait in a socket; what is past that the engine drops, which shows as a gap.
const HIGH_WATER: i32 = 4096;
/// No message that is of use has more frames.
const MAX_FRAMES: usize = 5;
const RECONNECT_MS: i32 = 100;
const MAX_RECONNECT_MS: i32 = 2000;
const HANDSHAKE_MS: i32 = 5000;
/// A peer that vanished without a word is noticed after the heartbeat's time-out.
const HEARTBEAT_MS: i32 = 5000;
const HEARTBEAT_TIMEOUT_MS: i32 = 15000;

/// Something that became of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Happened {
    Connected,
    Disconnected,
    /// Somebody listens there who does not speak ZMTP.
    NotZmq,
    /// Nobody listens there.
    Refused,
}

/// A SUB socket to one engine.
pub struct Subscription {
    pub socket: Socket,
    monitor: Socket,
}

impl Subscription {
    pub fn open(context: &Context, endpoint: &str, topic: &str) -> zmq::Result<Subscription> {
        static NAMES: AtomicU64 = AtomicU64::new(0);
        let socket = prepared(context, zmq::SUB)?;
        socket.set_subscribe(topic.as_bytes())?;
        let name = format!("inproc://monitor-{}", NAMES.fetch_add(1, Ordering::Relaxed));
        let watched = [
            SocketEvent::HANDSHAKE_SUCCEEDED,
            SocketEvent::DISCONNECTED,
            SocketEvent::HANDSHAKE_FAILED_NO_DETAIL,
            SocketEvent::HANDSHAKE_FAILED_PROTOCOL,
            SocketEvent::HANDSHAKE_FAILED_AUTH,
            SocketEvent::CONNECT_RETRIED,
        ];
        let mask = watched.iter().fold(0, |mask, event| mask | i32::from(event.to_raw()));
        socket.monitor(&name, mask)?;
        let monitor = context.socket(zmq::PAIR)?;
        monitor.set_linger(0)?;
        monitor.connect(&name)?;
        socket.connect(endpoint)?;
        Ok(Subscription { socket, monitor })
    }

    /// The next thing that became of the connection. Asked before each message is taken: a
    /// connection's end is reported before the messages of the one after it.
    pub fn happened(&self) -> Option<Happened> {
        loop {
            let frames = receive(&self.monitor)?;
            let raw = frames.first().and_then(|frame| frame.first_chunk())?;
            let raw = u16::from_ne_bytes(*raw);
            let is = |event: SocketEvent| raw == event.to_raw();
            if is(SocketEvent::HANDSHAKE_SUCCEEDED) {
                return Some(Happened::Connected);
            } else if is(SocketEvent::DISCONNECTED) {
                return Some(Happened::Disconnected);
            } else if is(SocketEvent::CONNECT_RETRIED) {
                return Some(Happened::Refused);
            } else if is(SocketEvent::HANDSHAKE_FAILED_NO_DETAIL)
                || is(SocketEvent::HANDSHAKE_FAILED_PROTOCOL)
                || is(SocketEvent::HANDSHAKE_FAILED_AUTH)
            {
                return Some(Happened::NotZmq);
            }
        }
    }
}

/// A DEALER socket for one replay. A late reply goes away with it.
pub struct Replay {
    pub socket: Socket,
    pub deadline: Instant,
    /// Asked beside live messages, which are applied meanwhile.
    pub probing: bool,
}

impl Replay {
    /// Longest silence before a replay counts as not answered.
    const PATIENCE: Duration = Duration::from_secs(3);

    pub fn ask(context: &Context, endpoint: &str, from: u64, probing: bool) -> zmq::Result<Replay> {
        let socket = prepared(context, zmq::DEALER)?;
        socket.connect(endpoint)?;
        socket.send_multipart(wire::replay_request(from), DONTWAIT)?;
        Ok(Replay { socket, deadline: Instant::now() + Replay::PATIENCE, probing })
    }

    pub fn progressed(&mut self) {
        self.deadline = Instant::now() + Replay::PATIENCE;
    }
}

/// The frames of one message, if there is one; of a message with too many, the first ones.
pub fn receive(socket: &Socket) -> Option<Vec<Vec<u8>>> {
    let mut frames = vec![socket.recv_bytes(DONTWAIT).ok()?];
    while socket.get_rcvmore().unwrap_or(false) {
        let frame = socket.recv_bytes(DONTWAIT).ok()?;
        if frames.len() < MAX_FRAMES {
            frames.push(frame);
        }
    }
    Some(frames)
}

fn prepared(context: &Context, kind: zmq::SocketType) -> zmq::Result<Socket> {
    let socket = context.socket(kind)?;
    socket.set_linger(0)?;
    socket.set_ipv6(true)?;
    socket.set_rcvhwm(HIGH_WATER)?;
    socket.set_maxmsgsize(MAX_FRAME)?;
    socket.set_reconnect_ivl(RECONNECT_MS)?;
    socket.set_reconnect_ivl_max(MAX_RECONNECT_MS)?;
    socket.set_handshake_ivl(HANDSHAKE_MS)?;
    socket.set_heartbeat_ivl(HEARTBEAT_MS)?;
    socket.set_heartbeat_timeout(HEARTBEAT_TIMEOUT_MS)?;
    Ok(socket)
}
