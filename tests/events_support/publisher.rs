//! An engine's publisher on real sockets.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::PATIENCE;

#[derive(Clone, Copy, PartialEq)]
pub enum Framing {
    WithTopic,
    WithoutTopic,
}

#[derive(Clone, Copy, PartialEq)]
pub enum End {
    Sent,
    /// No reply at all, not even the end mark.
    Never,
}

enum Order {
    Publish { payload: Vec<u8>, lose: bool },
    Raw(Vec<Vec<u8>>),
    Keep(usize),
    End(End),
    Unbind,
    Bind,
    Forget,
    Quit,
}

/// Publishes like an engine: PUB for live batches, ROUTER for replays, one thread for both.
pub struct Publisher {
    commands: Sender<Order>,
    done: Receiver<()>,
    thread: Option<JoinHandle<()>>,
    pub events: String,
    pub replay: String,
    pub published: u64,
    clock: f64,
    to_lose: u32,
    rank: u64,
}

impl Publisher {
    pub fn start(framing: Framing) -> Publisher {
        let (commands, received) = channel();
        let (finished, done) = channel();
        let (addresses, bound) = channel();
        let thread = thread::spawn(move || {
            let context = zmq::Context::new();
            let (publisher, router) =
                (bind(&context, zmq::PUB, None), bind(&context, zmq::ROUTER, None));
            let (events, replay) = (address(&publisher), address(&router));
            addresses.send((events.clone(), replay.clone())).unwrap();
            Worker {
                context,
                publisher: Some(publisher),
                router: Some(router),
                events,
                replay,
                framing,
                end: End::Sent,
                buffer: VecDeque::new(),
                keep: usize::MAX,
                seq: 0,
            }
            .run(received, finished);
        });
        let (events, replay) = bound.recv().unwrap();
        Publisher {
            commands,
            done,
            thread: Some(thread),
            events,
            replay,
            published: 0,
            clock: 1e9,
            to_lose: 0,
            rank: 0,
        }
    }

    /// The blocks of a prompt from its start.
    pub fn store(&mut self, tokens: &[u32], size: u32) {
        self.extend(tokens, size, 0);
    }

    /// The blocks of a prompt after the first `held`.
    pub fn extend(&mut self, tokens: &[u32], size: u32, held: usize) {
        let hashes = engine_hashes(tokens, size);
        let parent = held.checked_sub(1).map(|at| hashes[at]);
        let from = held * size as usize;
        let until = hashes.len() * size as usize;
        self.publish(json!({"type": "BlockStored", "block_hashes": hashes[held..],
            "parent_block_hash": parent, "token_ids": tokens[from..until], "block_size": size,
            "lora_id": null, "medium": "GPU", "lora_name": null, "group_idx": 0,
            "kv_cache_spec_kind": "full_attention"}));
    }

    /// Takes away one block of a prompt.
    pub fn remove(&mut self, tokens: &[u32], size: u32, block: usize) {
        let hash = engine_hashes(tokens, size)[block];
        self.publish(json!({"type": "BlockRemoved", "block_hashes": [hash], "medium": "GPU"}));
    }

    pub fn clear(&mut self) {
        self.publish(json!({"type": "AllBlocksCleared"}));
    }

    fn publish(&mut self, event: Value) {
        self.clock += 0.5;
        let payload = rmp_serde::to_vec(&json!([self.clock, [event], self.rank])).unwrap();
        let lose = self.to_lose > 0;
        self.to_lose -= u32::from(lose);
        self.published += 1;
        self.tell(Order::Publish { payload, lose });
    }

    /// The next batches are kept for replays but reach no subscriber.
    pub fn lose(&mut self, batches: u32) {
        self.to_lose = batches;
    }

    pub fn raw(&self, frames: &[&[u8]]) {
        self.tell(Order::Raw(frames.iter().map(|frame| frame.to_vec()).collect()));
    }

    pub fn keep(&self, batches: usize) {
        self.tell(Order::Keep(batches));
    }

    pub fn end(&self, end: End) {
        self.tell(Order::End(end));
    }

    pub fn rank(&mut self, rank: u64) {
        self.rank = rank;
    }

    /// The sockets go and come back; meanwhile `then` happens.
    pub fn disconnect(&mut self, then: impl FnOnce(&mut Publisher)) {
        self.tell(Order::Unbind);
        then(self);
        self.tell(Order::Bind);
    }

    /// Another life: numbers from 0, an empty buffer.
    pub fn restart(&mut self, then: impl FnOnce(&mut Publisher)) {
        self.tell(Order::Unbind);
        self.tell(Order::Forget);
        self.published = 0;
        then(self);
        self.tell(Order::Bind);
    }

    fn tell(&self, command: Order) {
        self.commands.send(command).unwrap();
        self.done.recv().unwrap();
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        let _ = self.commands.send(Order::Quit);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Worker {
    context: zmq::Context,
    publisher: Option<zmq::Socket>,
    router: Option<zmq::Socket>,
    events: String,
    replay: String,
    framing: Framing,
    end: End,
    buffer: VecDeque<(u64, Vec<u8>)>,
    keep: usize,
    seq: u64,
}

impl Worker {
    fn run(&mut self, commands: Receiver<Order>, done: Sender<()>) {
        loop {
            self.serve_replay();
            match commands.recv_timeout(Duration::from_millis(5)) {
                Ok(Order::Quit) => return,
                Ok(command) => {
                    self.obey(command);
                    let _ = done.send(());
                }
                Err(_) => {}
            }
        }
    }

    fn obey(&mut self, command: Order) {
        match command {
            Order::Publish { payload, lose } => {
                if let Some(publisher) = self.publisher.as_ref().filter(|_| !lose) {
                    let seq = self.seq.to_be_bytes();
                    publisher.send_multipart([&b"kv"[..], &seq, &payload], 0).unwrap();
                }
                self.buffer.push_back((self.seq, payload));
                self.seq += 1;
                self.trim();
            }
            Order::Raw(frames) => {
                if let Some(publisher) = &self.publisher {
                    publisher.send_multipart(frames, 0).unwrap();
                }
            }
            Order::Keep(batches) => {
                self.keep = batches;
                self.trim();
            }
            Order::End(end) => self.end = end,
            Order::Unbind => (self.publisher, self.router) = (None, None),
            Order::Bind => {
                self.router = Some(bind(&self.context, zmq::ROUTER, Some(&self.replay)));
                self.publisher = Some(bind(&self.context, zmq::PUB, Some(&self.events)));
            }
            Order::Forget => {
                self.seq = 0;
                self.buffer.clear();
            }
            Order::Quit => {}
        }
    }

    fn trim(&mut self) {
        while self.buffer.len() > self.keep {
            self.buffer.pop_front();
        }
    }

    fn serve_replay(&self) {
        let Some(router) = &self.router else { return };
        let Ok(request) = router.recv_multipart(zmq::DONTWAIT) else { return };
        assert_eq!((request.len(), request[1].len()), (3, 0));
        if self.end == End::Never {
            return;
        }
        let start = u64::from_be_bytes(request[2].as_slice().try_into().unwrap());
        let batches = self.buffer.iter().filter(|(seq, _)| *seq >= start);
        let replies = batches.map(|(seq, payload)| (seq.to_be_bytes(), payload.as_slice()));
        for (seq, payload) in replies.chain([([0xff; 8], &b""[..])]) {
            let mut frames = vec![&request[0][..], b""];
            if self.framing == Framing::WithTopic {
                frames.push(if payload.is_empty() { b"" } else { b"kv" });
            }
            frames.extend([&seq[..], payload]);
            router.send_multipart(frames, 0).unwrap();
        }
    }
}

fn bind(context: &zmq::Context, kind: zmq::SocketType, to: Option<&str>) -> zmq::Socket {
    let started = Instant::now();
    loop {
        let socket = context.socket(kind).unwrap();
        socket.set_linger(0).unwrap();
        match socket.bind(to.unwrap_or("tcp://127.0.0.1:*")) {
            Ok(()) => return socket,
            Err(error) => assert!(started.elapsed() < PATIENCE, "{error}"),
        }
        // The port is still held by the socket that was closed just now.
        thread::sleep(Duration::from_millis(5));
    }
}

fn address(socket: &zmq::Socket) -> String {
    socket.get_last_endpoint().unwrap().unwrap()
}

/// Stand-ins for an engine's own chained hashes.
fn engine_hashes(tokens: &[u32], size: u32) -> Vec<u64> {
    let mut hash = 7u64;
    tokens
        .chunks_exact(size as usize)
        .map(|block| {
            for token in block {
                hash =
                    (hash ^ u64::from(*token)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(9);
            }
            hash
        })
        .collect()
}
