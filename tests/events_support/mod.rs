//! An engine's publisher on real sockets, and a zone to watch.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use ngx_http_kvc_aware_module::blocks::{HashKey, hash_prompt};
use ngx_http_kvc_aware_module::events::{Level, ServerEndpoint, Subscriber, SubscriberConfig};
use ngx_http_kvc_aware_module::index::Index;
use ngx_http_kvc_aware_module::shared::{MIN_ZONE_BYTES, ProcessId, ServerField, ServerRow, Zone};
use ngx_http_kvc_aware_module::types::{Overlap, ServerId};
use serde_json::{Value, json};

const PATIENCE: Duration = Duration::from_secs(20);
const SETTLE: Duration = Duration::from_millis(500);

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
    published: u64,
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

/// A zone, and what was logged.
pub struct Bench {
    zone: Zone<'static>,
    log: Arc<Mutex<Vec<(Level, String)>>>,
}

impl Bench {
    pub fn new() -> Bench {
        let words: Vec<AtomicU64> = (0..MIN_ZONE_BYTES / 8).map(|_| AtomicU64::new(0)).collect();
        let zone = Zone::format(words.leak(), HashKey([3, 5])).unwrap();
        Index::format(zone.index_words()).unwrap();
        Bench { zone, log: Arc::default() }
    }

    pub fn zone(&self) -> Zone<'static> {
        self.zone
    }

    pub fn server(&self, address: &str, rank: u32) -> ServerId {
        self.zone.servers().claim(address, rank).unwrap()
    }

    pub fn endpoint(&self, id: ServerId, publisher: &Publisher) -> ServerEndpoint {
        ServerEndpoint {
            id,
            address: self.row(id).address(),
            rank: 0,
            events: Some(publisher.events.clone()),
            replay: Some(publisher.replay.clone()),
            topic: String::new(),
            block_size: None,
        }
    }

    pub fn subscribe(&self, servers: &[ServerEndpoint]) -> Subscriber {
        self.subscribe_as(servers, ProcessId::current())
    }

    pub fn subscribe_as(&self, servers: &[ServerEndpoint], me: ProcessId) -> Subscriber {
        let sink = Arc::clone(&self.log);
        let log = Arc::new(move |level, line| sink.lock().unwrap().push((level, line)));
        let config = SubscriberConfig { servers: servers.to_vec(), log };
        Subscriber::start_as(config, self.zone, me).unwrap()
    }

    /// Another live process, to hold a lease in its name.
    pub fn other_process(&self) -> OtherProcess {
        let child = Command::new("sleep").arg("600").stdin(Stdio::null()).spawn().unwrap();
        OtherProcess(child)
    }

    pub fn row(&self, id: ServerId) -> ServerRow<'static> {
        self.zone.server(id)
    }

    pub fn next_seq(&self, id: ServerId) -> u64 {
        self.row(id).get(ServerField::NextSeq)
    }

    /// Blocks of the prompt that the server would be credited with.
    pub fn matched(&self, id: ServerId, size: u32, tokens: &[u32]) -> u32 {
        let mut hashes = Vec::new();
        hash_prompt(&self.zone.hash_key(), size, None, None, tokens, &mut hashes);
        let mut overlaps = vec![Overlap::default(); id.index() + 1];
        let index = Index::open(self.zone.index_words()).unwrap();
        while index.lookup(&hashes, &mut overlaps).is_err() {}
        overlaps[id.index()].blocks
    }

    pub fn lines(&self, level: Level, part: &str) -> usize {
        let log = self.log.lock().unwrap();
        log.iter().filter(|(found, line)| *found == level && line.contains(part)).count()
    }

    pub fn until(&self, what: &str, mut holds: impl FnMut() -> bool) {
        let started = Instant::now();
        while !holds() {
            let log = self.log.lock().unwrap();
            assert!(started.elapsed() < PATIENCE, "never: {what}; log: {log:#?}");
            drop(log);
            thread::sleep(Duration::from_millis(2));
        }
    }

    /// Until live batches come through: publishes until one does.
    pub fn settle(&self, id: ServerId, publisher: &mut Publisher, size: u32) {
        let row = self.row(id);
        self.until("connected", || row.get(ServerField::Connected) == 1);
        let started = Instant::now();
        let mut seed = 900;
        while self.next_seq(id) != publisher.published || seed == 900 {
            assert!(started.elapsed() < PATIENCE, "no live batches");
            seed += 1;
            // The first ones may come before the publisher knows of the subscription.
            publisher.store(&vec![seed; size as usize], size);
            let asked = Instant::now();
            while self.next_seq(id) != publisher.published && asked.elapsed() < SETTLE {
                thread::sleep(Duration::from_millis(2));
            }
        }
    }
}

pub struct OtherProcess(Child);

impl OtherProcess {
    pub fn id(&self) -> ProcessId {
        ProcessId::of(self.0.id()).unwrap()
    }
}

impl Drop for OtherProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Answers like a web server to whatever it is sent.
pub fn http_server() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let mut stream = stream;
            let _ = stream.read(&mut [0; 64]);
            let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n");
        }
    });
    address
}
