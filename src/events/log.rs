//! Log lines of one server, seldom.
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

use super::{Level, Log, ServerEndpoint};

/// Least time between two warnings of one kind about one server.
const PAUSE: Duration = Duration::from_secs(60);

/// Warnings that may come often.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Kind {
    Gap,
    Replay,
    Dropped,
    Connection,
}

const KINDS: usize = Kind::Connection as usize + 1;

#[derive(Clone, Copy, Default)]
struct Line {
    written: Option<Instant>,
    left_out: u64,
}

pub struct ServerLog {
    log: Log,
    name: String,
    lines: [Line; KINDS],
}

impl ServerLog {
    pub fn new(log: Log, server: &ServerEndpoint) -> ServerLog {
        let rank = if server.rank > 0 { format!(" rank {}", server.rank) } else { String::new() };
        let name = format!("server {}{rank}", server.address);
        ServerLog { log, name, lines: Default::default() }
    }

    pub fn line(&self, level: Level, text: &str) {
        (self.log)(level, format!("{}: {text}", self.name));
    }

    /// Writes the line if none of its kind was written lately; else counts it.
    pub fn seldom(&mut self, kind: Kind, level: Level, text: &str, now: Instant) {
        let line = &mut self.lines[kind as usize];
        if line.written.is_some_and(|written| now.duration_since(written) < PAUSE) {
            line.left_out += 1;
            return;
        }
        line.written = Some(now);
        let left_out = std::mem::take(&mut line.left_out);
        let more =
            if left_out > 0 { format!(", {left_out} more like this") } else { String::new() };
        self.line(level, &format!("{text}{more}"));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::types::ServerId;

    #[test]
    fn a_kind_is_written_once_in_a_while_and_the_rest_counted() {
        let lines = Arc::new(Mutex::new(Vec::new()));
        let sink = Arc::clone(&lines);
        let server = ServerEndpoint {
            id: ServerId(0),
            address: "a:1".into(),
            rank: 2,
            events: None,
            replay: None,
            topic: String::new(),
            block_size: None,
        };
        let log: Log = Arc::new(move |_, line| sink.lock().unwrap().push(line));
        let mut log = ServerLog::new(log, &server);
        let start = Instant::now();
        for second in [0, 1, 2, 59, 60] {
            log.seldom(Kind::Gap, Level::Warn, "gap", start + Duration::from_secs(second));
        }
        log.seldom(Kind::Dropped, Level::Warn, "dropped", start);
        let expected = [
            "server a:1 rank 2: gap",
            "server a:1 rank 2: gap, 3 more like this",
            "server a:1 rank 2: dropped",
        ];
        assert_eq!(*lines.lock().unwrap(), expected);
    }
}
