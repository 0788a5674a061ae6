//! Figures of the prefix index: `cargo bench --no-default-features --bench index`.
//!
//! Wall-clock figures of one run on one machine; compare only what one run prints.
#![allow(clippy::unwrap_used)]

use std::collections::{HashMap, VecDeque};
use std::hint::black_box;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use ngx_http_kvc_aware_module::blocks::{self, HashKey};
use ngx_http_kvc_aware_module::index::{Index, Stored, Writer};
use ngx_http_kvc_aware_module::types::{BlockHash, EngineHash, Overlap, ServerId, Tier};

const SERVERS: usize = 512;
/// Blocks that one worker's cache holds.
const CACHE: usize = 6_700;

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() >> 33) as usize % end
    }
}

fn zone(megabytes: usize) -> Vec<AtomicU64> {
    (0..megabytes << 17).map(|_| AtomicU64::new(0)).collect()
}

fn chain(random: &mut Random, count: usize) -> Vec<BlockHash> {
    (0..count).map(|_| BlockHash(random.next() | 1)).collect()
}

fn stored(server: usize, blocks: &[BlockHash]) -> Vec<Stored> {
    blocks.iter().map(|block| Stored { engine: engine(server, *block), block: *block }).collect()
}

fn engine(server: usize, block: BlockHash) -> EngineHash {
    EngineHash(block.0.rotate_left(17) ^ (server as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

/// Time that this thread ran, which others on the machine do not lengthen. Wall clock where the
/// kernel does not tell.
fn thread_time(start: Instant) -> Duration {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let nanos = stat.split(' ').next().and_then(|nanos| nanos.parse().ok());
    nanos.map_or_else(|| start.elapsed(), Duration::from_nanos)
}

/// Best of some rounds, in nanoseconds for one call.
fn best(rounds: usize, calls: usize, mut call: impl FnMut()) -> f64 {
    let round = |_| {
        let start = Instant::now();
        (0..calls).for_each(|_| call());
        start.elapsed().as_nanos() as f64 / calls as f64
    };
    (0..rounds).map(round).fold(f64::MAX, f64::min)
}

fn hashing() {
    let key = HashKey([0x0123_4567_89ab_cdef, 0xfedc_ba98_7654_3210]);
    let tokens: Vec<u32> = (0..16 * 4096).collect();
    let mut hash = blocks::root(&key, 16, None);
    let nanos = best(20, 4, || {
        for block in tokens.chunks_exact(16) {
            hash = blocks::child(&key, hash, block, &[]);
        }
        black_box(hash);
    });
    println!("hash of a block of 16 tokens          {:8.1} ns", nanos / 4096.0);
}

/// Microseconds of a lookup: again and again, and with the caches full of something else.
fn hot_and_cold(index: &Index<'_>, hashes: &[BlockHash]) -> (f64, f64) {
    let mut out = vec![Overlap::default(); SERVERS];
    let hot = best(20, 200, || {
        index.lookup(black_box(hashes), &mut out).unwrap();
        black_box(&out);
    });
    let mut other = vec![1u64; 8 << 20];
    let mut cold: Vec<f64> = (0..25)
        .map(|_| {
            other.iter_mut().for_each(|word| *word += 1);
            let start = Instant::now();
            index.lookup(black_box(hashes), &mut out).unwrap();
            start.elapsed().as_nanos() as f64
        })
        .collect();
    cold.sort_by(f64::total_cmp);
    (hot / 1000.0, cold[cold.len() / 2] / 1000.0)
}

fn lookups() {
    let mut random = Random(1);
    for (blocks, servers) in [(375, 8), (8000, 512)] {
        let words = zone(256);
        Index::format(&words).unwrap();
        let (mut writer, _) = Writer::attach(&words).unwrap();
        let hashes = chain(&mut random, blocks);
        for server in 0..servers {
            let reach = if server == 0 { blocks } else { 1 + random.below(blocks) };
            let blocks = stored(server, &hashes[..reach]);
            writer.store(ServerId(server as u16), Tier::Gpu, None, &blocks, true);
        }
        let (hot, cold) = hot_and_cold(&writer.index(), &hashes);
        println!(
            "lookup, {blocks:4} blocks x {servers:3} ragged        {hot:8.2} us hot, {cold:.2} cold"
        );
    }
}

enum Op {
    Store { server: usize, parent: Option<BlockHash>, blocks: Vec<Stored> },
    Remove { server: usize, engine: EngineHash },
}

impl Op {
    fn blocks(&self) -> u64 {
        match self {
            Op::Store { blocks, .. } => blocks.len() as u64,
            Op::Remove { .. } => 1,
        }
    }

    fn apply(&self, writer: &mut Writer<'_>) {
        match self {
            Op::Store { server, parent, blocks } => {
                writer.store(ServerId(*server as u16), Tier::Gpu, *parent, blocks, true);
            }
            Op::Remove { server, engine } => {
                writer.remove(ServerId(*server as u16), Tier::Gpu, &[*engine]);
            }
        }
    }
}

/// Growing conversations on a few shared system prompts; each comes back to its worker or goes
/// to another. Workers drop their oldest conversations, tail first, one block an event.
struct Stream {
    random: Random,
    systems: Vec<Vec<BlockHash>>,
    conversations: Vec<Vec<BlockHash>>,
    workers: Vec<Worker>,
    homes: Vec<usize>,
}

#[derive(Default)]
struct Worker {
    held: HashMap<usize, usize>,
    order: VecDeque<usize>,
    systems: Vec<usize>,
    blocks: usize,
}

impl Stream {
    fn new() -> Stream {
        let mut random = Random(7);
        let systems = (0..32).map(|_| chain(&mut random, 60)).collect();
        let conversations: Vec<_> = (0..40_000).map(|_| Vec::new()).collect();
        let homes = conversations.iter().map(|_| random.below(SERVERS)).collect();
        let workers = (0..SERVERS).map(|_| Worker::default()).collect();
        Stream { random, systems, conversations, workers, homes }
    }

    fn turn(&mut self, ops: &mut Vec<Op>) {
        let random = &mut self.random;
        let id = random.below(self.conversations.len());
        if random.below(4) == 0 {
            self.homes[id] = random.below(SERVERS);
        }
        let server = self.homes[id];
        let (worker, system) = (&mut self.workers[server], id % self.systems.len());
        if !worker.systems.contains(&system) {
            worker.systems.push(system);
            let blocks = stored(server, &self.systems[system]);
            ops.push(Op::Store { server, parent: None, blocks });
            worker.blocks += 60;
        }
        let blocks = &mut self.conversations[id];
        if blocks.len() > 300 {
            blocks.clear();
            worker.held.remove(&id);
        }
        let more = 4 + random.below(40);
        blocks.extend(chain(random, more));
        let had = worker.held.insert(id, blocks.len()).unwrap_or(0);
        let parent = had.checked_sub(1).map_or(self.systems[system][59], |last| blocks[last]);
        let new = stored(server, &blocks[had..]);
        worker.blocks += new.len();
        worker.order.push_back(id);
        ops.push(Op::Store { server, parent: Some(parent), blocks: new });
        while worker.blocks > CACHE {
            let Some(old) = worker.order.pop_front() else { break };
            if worker.order.contains(&old) {
                continue;
            }
            let Some(had) = worker.held.remove(&old) else { continue };
            for block in self.conversations[old].iter().take(had).rev() {
                ops.push(Op::Remove { server, engine: engine(server, *block) });
            }
            worker.blocks -= had;
        }
    }

    fn turns(&mut self, count: usize) -> Vec<Op> {
        let mut ops = Vec::new();
        (0..count).for_each(|_| self.turn(&mut ops));
        ops
    }
}

/// Millions of block-ops for each second that the writer ran.
fn apply(writer: &mut Writer<'_>, ops: &[Op]) -> f64 {
    let blocks: u64 = ops.iter().map(Op::blocks).sum();
    let start = Instant::now();
    let before = thread_time(start);
    ops.iter().for_each(|op| op.apply(writer));
    blocks as f64 / (thread_time(start) - before).as_secs_f64() / 1e6
}

/// Applies `ops` while another thread looks prompts up. Block-ops and lookups in millions a
/// second, then the lookups' median and 99th percentile in microseconds, and how many were busy.
fn apply_under_lookups(writer: &mut Writer<'_>, ops: &[Op], prompts: &[Vec<BlockHash>]) {
    let (index, done) = (writer.index(), AtomicBool::new(false));
    let (speed, mut times, busy) = thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut out = vec![Overlap::default(); SERVERS];
            let (mut times, mut busy) = (Vec::with_capacity(1 << 22), 0);
            for prompt in prompts.iter().cycle() {
                if done.load(Ordering::Relaxed) {
                    break;
                }
                let start = Instant::now();
                busy += usize::from(index.lookup(prompt, &mut out).is_err());
                times.push(start.elapsed());
            }
            (times, busy)
        });
        let speed = apply(writer, ops);
        done.store(true, Ordering::Relaxed);
        let (times, busy) = reader.join().unwrap();
        (speed, times, busy)
    });
    times.sort_unstable();
    let micros = |at: usize| times[at.min(times.len() - 1)].as_nanos() as f64 / 1000.0;
    println!("the same while lookups go on          {speed:8.2} M block-ops/s");
    println!(
        "lookups meanwhile                     {:8.2} us p50, {:.2} p99; {busy} busy of {}",
        micros(times.len() / 2),
        micros(times.len() * 99 / 100),
        times.len()
    );
}

fn stream() {
    let mut stream = Stream::new();
    let words = zone(256);
    Index::format(&words).unwrap();
    let (mut writer, _) = Writer::attach(&words).unwrap();
    let empty = writer.index().stats().used_bytes;
    for op in stream.turns(220_000) {
        op.apply(&mut writer);
    }
    let stats = writer.index().stats();
    let each = (stats.used_bytes - empty) as f64 / stats.entries as f64;
    let distinct = 100.0 * stats.blocks as f64 / stats.entries as f64;
    println!(
        "stream of {SERVERS} workers                 {:8.2} M worker-blocks, {distinct:.0} % distinct, {} evicted",
        stats.entries as f64 / 1e6,
        stats.evicted
    );
    println!("used by each worker-block             {each:8.1} bytes");
    println!(
        "applied                               {:8.2} M block-ops/s",
        apply(&mut writer, &stream.turns(30_000))
    );
    let prompts: Vec<Vec<BlockHash>> = (0..4096)
        .map(|_| {
            let id = stream.random.below(stream.conversations.len());
            let system = &stream.systems[id % stream.systems.len()];
            system.iter().chain(&stream.conversations[id]).copied().collect()
        })
        .collect();
    let ops = stream.turns(60_000);
    apply_under_lookups(&mut writer, &ops, &prompts);
}

/// A zone that is much too small for the stream.
fn eviction() {
    let mut stream = Stream::new();
    let words = zone(48);
    Index::format(&words).unwrap();
    let (mut writer, _) = Writer::attach(&words).unwrap();
    let mut ops = VecDeque::from(stream.turns(120_000));
    let mut most = 0;
    while writer.index().stats().evicted == 0 {
        most = most.max(writer.index().stats().entries);
        ops.drain(..ops.len().min(100)).for_each(|op| op.apply(&mut writer));
    }
    println!("zone for each worker-block when full  {:8.1} bytes", (48 << 20) as f64 / most as f64);
    let start = Instant::now();
    let before = thread_time(start);
    let (mut worst, mut blocks) = (Duration::ZERO, 0);
    for op in &ops {
        let start = Instant::now();
        op.apply(&mut writer);
        worst = worst.max(start.elapsed());
        blocks += op.blocks();
    }
    let ran = thread_time(start) - before;
    println!(
        "applied while full                    {:8.2} M block-ops/s, {} evicted, longest call {:.1} ms",
        blocks as f64 / ran.as_secs_f64() / 1e6,
        writer.index().stats().evicted,
        worst.as_secs_f64() * 1e3
    );
}

/// Runs the parts that the arguments name, all without any; nothing as a test.
fn main() {
    if !std::env::args().any(|arg| arg == "--bench") {
        return;
    }
    let names: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    let parts: [(&str, fn()); 4] =
        [("hashing", hashing), ("lookups", lookups), ("stream", stream), ("eviction", eviction)];
    for (name, part) in parts {
        if names.is_empty() || names.iter().any(|wanted| wanted == name) {
            part();
        }
    }
}
