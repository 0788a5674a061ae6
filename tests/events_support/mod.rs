//! An engine's publisher on real sockets, and a zone to watch.

mod publisher;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use ngx_http_kvc_aware_module::blocks::{HashKey, hash_prompt};
use ngx_http_kvc_aware_module::events::{Level, ServerEndpoint, Subscriber, SubscriberConfig};
use ngx_http_kvc_aware_module::index::Index;
use ngx_http_kvc_aware_module::shared::{MIN_ZONE_BYTES, ProcessId, ServerField, ServerRow, Zone};
use ngx_http_kvc_aware_module::types::{Overlap, ServerId};

pub use publisher::{End, Framing, Publisher};

const PATIENCE: Duration = Duration::from_secs(20);
const SETTLE: Duration = Duration::from_millis(500);

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
