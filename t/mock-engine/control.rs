//! `/mock/…`: faults on command, what the engine holds, what it received last.
//!
//! | path | what |
//! | --- | --- |
//! | `POST /mock/fault?name=value&…` | faults, each for itself; also as a JSON object in the body |
//! | `GET /mock/state` | cache, requests, sequence, faults |
//! | `GET /mock/last` | method, path, headers, body length and hash of the last request |
//! | `GET /mock/last/body` | its body, byte for byte |
//!
//! | fault | value | what |
//! | --- | --- | --- |
//! | `restart` | 1 | requests end, cache empty, sequence 0, event sockets bound anew |
//! | `clear` | 1 | empties the cache, told with the next step |
//! | `gap` | n | n batches are not sent, but kept for replay |
//! | `drop` | n | n batches take a sequence number and vanish |
//! | `silence` | 1, 0 | nothing is sent, no replay is answered; batches are kept |
//! | `slow` | factor | on the time of every step |
//! | `fail` | n | n requests get `status` (503) |
//! | `reset` | n | n requests get their connection closed and no answer |
//! | `render` | on, a status, garbage, hang | what requests for ids come to |
//! | `idle_close` | seconds | idle connections are closed after that |
//! | `format` | map, array, array-old | of the events from now on |
//! | `none` | 1 | ends all faults |

use std::io;
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::{Map, Value, json};

use crate::api::{Server, error, respond};
use crate::http::{Connection, Request};
use crate::publisher::Faults as EventFaults;
use crate::render::Rendering;

pub struct Control {
    faults: Mutex<Faults>,
    keepalive: Duration,
    last: Mutex<Request>,
}

#[derive(Clone, Copy)]
struct Faults {
    fail: u64,
    status: u16,
    reset: u64,
    keepalive: Duration,
    received: u64,
    rendering: Rendering,
    renders: u64,
    tokenizes: u64,
}

impl Control {
    pub fn new(keepalive: Duration) -> Control {
        let faults = Faults {
            fail: 0,
            status: 503,
            reset: 0,
            keepalive,
            received: 0,
            rendering: Rendering::On,
            renders: 0,
            tokenizes: 0,
        };
        Control { faults: Mutex::new(faults), keepalive, last: Mutex::new(Request::default()) }
    }

    pub fn keepalive(&self) -> Duration {
        self.faults.lock().keepalive
    }

    /// Notes a request; `length-hash` of its body, for the answer's header.
    pub fn received(&self, request: &Request) -> String {
        self.faults.lock().received += 1;
        *self.last.lock() = request.clone();
        digest(&request.body)
    }

    pub fn resets_now(&self) -> bool {
        count_down(&mut self.faults.lock().reset)
    }

    pub fn fails_now(&self) -> Option<u16> {
        let mut faults = self.faults.lock();
        count_down(&mut faults.fail).then_some(faults.status)
    }

    /// Notes a request to render; what becomes of it.
    pub fn renders(&self) -> Rendering {
        let mut faults = self.faults.lock();
        faults.renders += 1;
        faults.rendering
    }

    /// The same of `/tokenize`.
    pub fn tokenizes(&self) -> Rendering {
        let mut faults = self.faults.lock();
        faults.tokenizes += 1;
        faults.rendering
    }

    pub fn request(
        &self,
        server: &Server,
        connection: &mut Connection,
        request: &Request,
        path: &str,
    ) -> io::Result<()> {
        match (request.method.as_str(), path) {
            ("POST", "fault") => match self.fault(server, request) {
                Ok(()) => respond(connection, 200, &self.state(server)),
                Err(message) => error(connection, 400, &message),
            },
            ("GET", "state") => respond(connection, 200, &self.state(server)),
            ("GET", "last") => {
                let last = self.last.lock().clone();
                let headers: Vec<_> =
                    last.headers.iter().map(|(name, value)| json!([name, value])).collect();
                let answer = json!({
                    "method": last.method,
                    "path": last.path,
                    "query": last.query,
                    "headers": headers,
                    "body_length": last.body.len(),
                    "body": digest(&last.body),
                });
                respond(connection, 200, &answer)
            }
            ("GET", "last/body") => {
                let body = self.last.lock().body.clone();
                connection.respond(200, "application/octet-stream", &body)
            }
            _ => error(connection, 404, "no such path"),
        }
    }

    fn state(&self, server: &Server) -> Value {
        let stats = server.engine.stats();
        let faults = *self.faults.lock();
        json!({
            "cached_hashes": stats.cached_hashes,
            "blocks": stats.blocks,
            "blocks_used": stats.blocks_used,
            "running": stats.running,
            "waiting": stats.waiting,
            "in_flight": stats.running + stats.waiting,
            "requests": faults.received,
            "renders": faults.renders,
            "tokenizes": faults.tokenizes,
            "prompt_tokens": stats.queries,
            "cached_tokens": stats.hits,
            "preemptions": stats.preemptions,
            "restarts": stats.restarts,
            "sequence": server.publisher.sequence(),
            "ranks": server.engines.iter().map(|engine| engine.stats().queries).collect::<Vec<_>>(),
            "fail": faults.fail,
            "reset": faults.reset,
        })
    }

    fn fault(&self, server: &Server, request: &Request) -> Result<(), String> {
        let pairs = request.query.split('&').filter(|pair| !pair.is_empty());
        for pair in pairs {
            let (name, value) = pair.split_once('=').unwrap_or((pair, "1"));
            self.set(server, name, value)?;
        }
        if request.body.is_empty() {
            return Ok(());
        }
        let body: Map<String, Value> =
            serde_json::from_slice(&request.body).map_err(|error| error.to_string())?;
        for (name, value) in &body {
            match value {
                Value::String(text) => self.set(server, name, text)?,
                Value::Bool(on) => self.set(server, name, if *on { "1" } else { "0" })?,
                other => self.set(server, name, &other.to_string())?,
            }
        }
        Ok(())
    }

    fn set(&self, server: &Server, name: &str, value: &str) -> Result<(), String> {
        let bad = || format!("{name}: \"{value}\" is no value of it");
        let number = || value.parse::<f64>().ok().filter(|number| *number >= 0.0).ok_or_else(bad);
        let count = || value.parse::<u64>().map_err(|_| bad());
        let on = || count().map(|count| count > 0);
        let events = |change: &dyn Fn(&mut EventFaults)| server.publisher.set_faults(change);
        match name {
            "restart" if on()? => server.engine.restart()?,
            "clear" if on()? && !server.engine.clear() => {
                return Err("blocks are in use".to_owned());
            }
            "restart" | "clear" => {}
            "gap" => {
                let count = count()?;
                events(&|faults| faults.gap = count);
            }
            "drop" => {
                let count = count()?;
                events(&|faults| faults.drop = count);
            }
            "silence" => {
                let on = on()?;
                events(&|faults| faults.silence = on);
            }
            "slow" => server.engine.set_slow(number()?),
            "fail" => self.faults.lock().fail = count()?,
            "status" => self.faults.lock().status = value.parse().map_err(|_| bad())?,
            "reset" => self.faults.lock().reset = count()?,
            "render" => self.faults.lock().rendering = value.parse().map_err(|()| bad())?,
            "idle_close" => {
                let time = Duration::try_from_secs_f64(number()?).map_err(|_| bad())?;
                self.faults.lock().keepalive = time;
            }
            "format" => server.publisher.set_format(value.parse()?),
            "none" if on()? => {
                events(&|faults| *faults = EventFaults::default());
                server.engine.set_slow(1.0);
                let mut faults = self.faults.lock();
                faults.fail = 0;
                faults.reset = 0;
                faults.rendering = Rendering::On;
                faults.keepalive = self.keepalive;
            }
            "none" => {}
            _ => return Err(format!("unknown fault \"{name}\"")),
        }
        Ok(())
    }
}

fn count_down(count: &mut u64) -> bool {
    let some = *count > 0;
    *count = count.saturating_sub(1);
    some
}

/// Length and 64-bit FNV-1a hash of a body.
fn digest(body: &[u8]) -> String {
    let hash = body.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    format!("{}-{hash:016x}", body.len())
}
