//! Workers, each with a connection of its own, that do one request after another.

use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use parking_lot::Mutex;

use crate::client::Client;
use crate::report::Record;
use crate::text::Random;

/// Requests in the order in which they are due.
pub trait Schedule: Send {
    type Item: Send;

    /// None: nothing to do now, or (if `left` is 0) ever.
    fn next(&mut self) -> Option<Self::Item>;

    /// Requests that have not ended.
    fn left(&self) -> usize;

    /// Takes back what was done.
    fn done(&mut self, item: Self::Item, record: &Record);
}

pub struct Pace {
    pub url: String,
    pub concurrency: usize,
    /// Requests a second, at random intervals; none: as soon as a worker is free.
    pub rate: Option<f64>,
    pub seed: u64,
    /// Once there is such a file, nothing more is sent.
    pub until: Option<PathBuf>,
    pub progress: Option<String>,
}

struct Shared<S> {
    schedule: Mutex<(S, Arrivals)>,
    records: Mutex<Vec<Record>>,
    done: AtomicUsize,
    failed: AtomicUsize,
    over: AtomicBool,
    until: Option<PathBuf>,
    start: Instant,
}

/// Poisson arrivals.
struct Arrivals {
    rate: Option<f64>,
    random: Random,
    next: Instant,
}

impl Arrivals {
    fn take(&mut self) -> Instant {
        let due = self.next;
        if let Some(rate) = self.rate {
            self.next += Duration::from_secs_f64(-(1.0 - self.random.unit()).ln() / rate);
        }
        due
    }
}

/// Every request's record, by id, and how long it all took.
pub fn run<S: Schedule + 'static>(
    pace: &Pace,
    schedule: S,
    act: fn(&mut Client, &mut S::Item) -> Record,
) -> io::Result<(Vec<Record>, Duration)> {
    let start = Instant::now();
    let total = schedule.left();
    let arrivals =
        Arrivals { rate: pace.rate, random: Random::new(pace.seed, u64::MAX), next: start };
    let shared = Arc::new(Shared {
        schedule: Mutex::new((schedule, arrivals)),
        records: Mutex::new(Vec::new()),
        done: AtomicUsize::new(0),
        failed: AtomicUsize::new(0),
        over: AtomicBool::new(false),
        until: pace.until.clone(),
        start,
    });
    let mut workers = Vec::new();
    for _ in 0..pace.concurrency {
        let (shared, mut client) = (shared.clone(), Client::new(&pace.url));
        workers.push(thread::Builder::new().spawn(move || work(&shared, &mut client, act))?);
    }
    let reporter = pace.progress.clone().map(|label| {
        let shared = shared.clone();
        thread::Builder::new().spawn(move || progress(&shared, &label, total))
    });
    for worker in workers {
        worker.join().map_err(|_| io::Error::other("a worker panicked"))?;
    }
    let elapsed = start.elapsed();
    shared.over.store(true, Ordering::Relaxed);
    if let Some(reporter) = reporter.transpose()? {
        let _ = reporter.join();
    }
    let mut records = std::mem::take(&mut *shared.records.lock());
    records.sort_by_key(|record| record.id);
    Ok((records, elapsed))
}

fn work<S: Schedule>(
    shared: &Shared<S>,
    client: &mut Client,
    act: fn(&mut Client, &mut S::Item) -> Record,
) {
    while !shared.until.as_ref().is_some_and(|file| file.exists()) {
        let (item, due) = {
            let mut schedule = shared.schedule.lock();
            if schedule.0.left() == 0 {
                return;
            }
            match schedule.0.next() {
                Some(item) => (item, schedule.1.take()),
                None => {
                    drop(schedule);
                    // Others hold what is left; one of them may come back.
                    thread::sleep(Duration::from_millis(1));
                    continue;
                }
            }
        };
        thread::sleep(due.saturating_duration_since(Instant::now()));
        let mut item = item;
        let mut record = act(client, &mut item);
        record.ended = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_secs_f64();
        record.at = shared.start.elapsed().as_secs_f64();
        shared.done.fetch_add(1, Ordering::Relaxed);
        shared.failed.fetch_add(usize::from(record.error.is_some()), Ordering::Relaxed);
        shared.schedule.lock().0.done(item, &record);
        shared.records.lock().push(record);
    }
}

/// On a terminal one line that is written over, else a line now and then.
fn progress<S>(shared: &Shared<S>, label: &str, total: usize) {
    let (terminal, mut last) = (io::stderr().is_terminal(), 0);
    loop {
        thread::sleep(Duration::from_millis(200));
        let over = shared.over.load(Ordering::Relaxed);
        let done = shared.done.load(Ordering::Relaxed);
        let failed = shared.failed.load(Ordering::Relaxed);
        let line = format!("   {label}: {done} of {total} requests, {failed} failed");
        if terminal {
            eprint!("\r{line} ");
            let _ = io::stderr().flush();
        } else if over || done >= last + total.div_ceil(4) {
            last = done;
            eprintln!("{line}");
        }
        if over {
            if terminal {
                eprintln!();
            }
            return;
        }
    }
}
