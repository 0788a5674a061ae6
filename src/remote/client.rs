//! One model's servers: which is asked, what becomes of one that fails.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use ureq::Agent;
use ureq::config::Config;
use ureq::http::Uri;
use ureq::unversioned::resolver::{ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::{DefaultConnector, NextTimeout};

use super::answer::{self, Fault};
use super::{Api, Key, RemoteError, Source};
use crate::types::{Skip, TokenId};

const TOKENIZE: &str = "/tokenize";

/// Of an answer, in bytes: more than two million ids.
const MAX_ANSWER: u64 = 16 << 20;

/// Engines close connections that idle for five seconds.
const IDLE: Duration = Duration::from_secs(4);

/// A server that failed is asked after all others for this long, and for twice as long each time that
/// it fails again, as that may cost a request its deadline.
const PENANCE: Duration = Duration::from_secs(5);
const MOST_DOUBLINGS: u32 = 6;

/// A server that does not render is asked to again after this.
const RENDER_AGAIN: Duration = Duration::from_secs(60);

/// Between two log lines of one model.
const QUIET: Duration = Duration::from_secs(60);

pub struct Client {
    agent: Agent,
    servers: Vec<Server>,
    bearer: Option<String>,
    /// Questions so far: each begins with another server.
    turn: AtomicUsize,
    start: Instant,
    quiet: Until,
}

struct Server {
    address: String,
    failed: Until,
    /// Failures since the last answer, each after the penance of the one before.
    failures: AtomicU32,
    no_render: Until,
}

impl Server {
    fn fail(&self, now: u64) {
        // Questions that were out together fail together.
        if self.failed.is_over(now) {
            let before = self.failures.fetch_add(1, Ordering::Relaxed);
            self.failed.set(now, PENANCE * (1 << before.min(MOST_DOUBLINGS)));
        }
    }

    fn answered(&self) {
        self.failures.store(0, Ordering::Relaxed);
    }
}

/// A moment that threads share, in milliseconds after the client's start.
#[derive(Default)]
struct Until(AtomicU64);

impl Until {
    fn is_over(&self, now: u64) -> bool {
        self.0.load(Ordering::Relaxed) <= now
    }

    fn set(&self, now: u64, time: Duration) {
        self.0.store(now + time.as_millis() as u64, Ordering::Relaxed);
    }
}

impl Client {
    pub fn new(source: Source) -> Client {
        let config = Config::builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .proxy(None)
            .user_agent("ngx-kvc-aware")
            .max_idle_age(IDLE)
            .build();
        let server = |address| Server {
            address,
            failed: Until::default(),
            failures: AtomicU32::new(0),
            no_render: Until::default(),
        };
        Client {
            agent: Agent::with_parts(config, DefaultConnector::default(), Addresses),
            servers: source.servers.into_iter().map(server).collect(),
            bearer: source.key.map(|Key(key)| format!("Bearer {key}")),
            turn: AtomicUsize::new(0),
            start: Instant::now(),
            quiet: Until::default(),
        }
    }

    pub fn ask(
        &self,
        api: Api,
        body: &[u8],
        deadline: Instant,
    ) -> Result<Vec<TokenId>, RemoteError> {
        let mut last = RemoteError::NoServer;
        for server in self.order() {
            match self.ask_one(server, api, body, deadline) {
                Err(error) if error.skip() == Skip::Unsupported => last = error,
                Err(error) if error.skip() == Skip::RemoteFailed => {
                    server.fail(self.now());
                    last = error;
                }
                Err(RemoteError::Deadline) => {
                    server.fail(self.now());
                    return Err(RemoteError::Deadline);
                }
                done => {
                    server.answered();
                    return done;
                }
            }
        }
        Err(last)
    }

    /// Whether a failure may be logged now; the next may after a while.
    pub fn may_log(&self) -> bool {
        let now = self.now();
        let may = self.quiet.is_over(now);
        if may {
            self.quiet.set(now, QUIET);
        }
        may
    }

    fn now(&self) -> u64 {
        self.start.elapsed().as_millis() as u64
    }

    /// The servers in the order in which they are asked.
    fn order(&self) -> Vec<&Server> {
        let (now, turn) = (self.now(), self.turn.fetch_add(1, Ordering::Relaxed));
        let (before, after) = self.servers.split_at(turn % self.servers.len().max(1));
        let mut order: Vec<&Server> = after.iter().chain(before).collect();
        order.sort_by_key(|server| !server.failed.is_over(now));
        order
    }

    fn ask_one(
        &self,
        server: &Server,
        api: Api,
        body: &[u8],
        deadline: Instant,
    ) -> Result<Vec<TokenId>, RemoteError> {
        let (address, path) = (&server.address, api.render);
        if server.no_render.is_over(self.now()) {
            let (status, answer) = self.post(address, path, body, deadline)?;
            match status {
                200 => return read(address, path, answer::rendered(&answer)),
                400 => return Err(RemoteError::Refused),
                // Not built in, or not switched on.
                403 | 405 | 501 => server.no_render.set(self.now(), RENDER_AGAIN),
                404 if answer::names_an_error(&answer) => {}
                404 => server.no_render.set(self.now(), RENDER_AGAIN),
                status => {
                    return Err(RemoteError::Status { server: address.clone(), path, status });
                }
            }
        }
        if !api.tokenize {
            return Err(RemoteError::NoRender { server: address.clone() });
        }
        match self.post(address, TOKENIZE, body, deadline)? {
            (200, answer) => read(address, TOKENIZE, answer::tokenized(&answer)),
            // It takes less than the request's own path, so this is no refusal of the request.
            (400 | 422, _) => Err(RemoteError::NoRender { server: address.clone() }),
            (status, _) => {
                Err(RemoteError::Status { server: address.clone(), path: TOKENIZE, status })
            }
        }
    }

    /// Status and body of an answer. A connection that broke is tried once more: it may have been an
    /// idle one that the server had just closed.
    fn post(
        &self,
        server: &str,
        path: &str,
        body: &[u8],
        deadline: Instant,
    ) -> Result<(u16, Vec<u8>), RemoteError> {
        let answer = self.post_once(server, path, body, deadline);
        let answer = match answer {
            Err(ureq::Error::Io(_)) => self.post_once(server, path, body, deadline),
            answer => answer,
        };
        answer.map_err(|error| match error {
            ureq::Error::Timeout(ureq::Timeout::Connect) => RemoteError::Connection {
                server: server.to_owned(),
                cause: "no connection".to_owned(),
            },
            ureq::Error::Timeout(_) => RemoteError::Deadline,
            error => {
                RemoteError::Connection { server: server.to_owned(), cause: error.to_string() }
            }
        })
    }

    fn post_once(
        &self,
        server: &str,
        path: &str,
        body: &[u8],
        deadline: Instant,
    ) -> Result<(u16, Vec<u8>), ureq::Error> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ureq::Error::Timeout(ureq::Timeout::Global));
        }
        let mut request = self
            .agent
            .post(format!("http://{server}{path}"))
            .config()
            .timeout_global(Some(left))
            // What is left then is for another server.
            .timeout_connect(Some(left / 2))
            .build()
            .content_type("application/json");
        if let Some(bearer) = &self.bearer {
            request = request.header("Authorization", bearer);
        }
        let mut answer = request.send(body)?;
        let body = answer.body_mut().with_config().limit(MAX_ANSWER).read_to_vec()?;
        Ok((answer.status().as_u16(), body))
    }
}

fn read(
    server: &str,
    path: &'static str,
    ids: Result<Vec<TokenId>, Fault>,
) -> Result<Vec<TokenId>, RemoteError> {
    ids.map_err(|fault| match fault {
        Fault::Garbage => RemoteError::Answer { server: server.to_owned(), path },
        Fault::Multimodal => RemoteError::Multimodal,
        Fault::Other => RemoteError::NoRender { server: server.to_owned() },
    })
}

/// The servers are addresses, so that nothing has to be looked up.
#[derive(Debug)]
struct Addresses;

impl Resolver for Addresses {
    fn resolve(
        &self,
        uri: &Uri,
        _config: &Config,
        _timeout: NextTimeout,
    ) -> Result<ResolvedSocketAddrs, ureq::Error> {
        let address = uri.authority().and_then(|authority| authority.as_str().parse().ok());
        let address: SocketAddr = address.ok_or(ureq::Error::HostNotFound)?;
        let mut found = self.empty();
        found.push(address);
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn penance_grows_until_an_answer() {
        let server = Server {
            address: String::new(),
            failed: Until::default(),
            failures: AtomicU32::new(0),
            no_render: Until::default(),
        };
        let mut now = 0;
        for seconds in [5, 10, 20, 40, 80, 160, 320, 320] {
            server.fail(now);
            // One that failed together with it.
            server.fail(now + 1);
            assert!(!server.failed.is_over(now + 1000 * seconds - 1), "{seconds}");
            now += 1000 * seconds;
            assert!(server.failed.is_over(now), "{seconds}");
        }
        server.answered();
        server.fail(now);
        assert!(server.failed.is_over(now + 5000));
    }
}
