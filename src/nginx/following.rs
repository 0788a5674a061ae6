//! Whose events are followed: the peers of all upstreams, as they are now.
//!
//! The first worker of each cycle follows them; the newest gets the lease. Peers in shared memory may
//! change while nginx runs (`resolve`), so it looks at them now and then.

use std::mem;
use std::sync::Arc;

use nginx_sys::{ngx_add_timer, ngx_del_timer, ngx_event_t, ngx_msec_t};

use super::conf::{EventsConf, UpstreamConf};
use super::jobs::masked;
use super::log::{cycle_log, log};
use super::process::{self, Process};
use super::{guard, peers};
use crate::events::{ServerEndpoint, Subscriber, SubscriberConfig};
use crate::types::ServerId;

/// How often peers that may change are looked at.
const LOOK_MS: ngx_msec_t = 250;

pub struct Following {
    subscriber: Subscriber,
    upstreams: Vec<&'static UpstreamConf>,
    servers: Vec<ServerEndpoint>,
    timer: ngx_event_t,
}

/// Starts the thread that follows the engines' events.
pub fn start(upstreams: Vec<&'static UpstreamConf>) {
    let Some(process) = process::get() else { return };
    let servers = endpoints(process, &upstreams);
    let mailbox = process.jobs.mailbox();
    let log = Arc::new(move |level, text: String| mailbox.line(level, text));
    let config = SubscriberConfig { servers: servers.clone(), log };
    let subscriber = match masked(|| Subscriber::start(config, process.zone)) {
        Ok(subscriber) => subscriber,
        Err(error) => {
            log!(ERR, cycle_log(), "kvc_aware: no events: {error}");
            return;
        }
    };
    // SAFETY: an event of zeros is one that is in no queue and no timer.
    let timer = unsafe { mem::zeroed::<ngx_event_t>() };
    let mut following = Box::new(Following { subscriber, upstreams, servers, timer });
    // SAFETY: the upstreams are live.
    if following.upstreams.iter().any(|conf| unsafe { peers::are_shared(conf.upstream) }) {
        following.look_later();
    }
    *process.following.borrow_mut() = Some(following);
}

impl Following {
    /// The timer lies in a box that is dropped with the process's state, and is stopped then.
    fn look_later(&mut self) {
        self.timer.handler = Some(look);
        // nginx's debug log reads a number in what a timer's data points to.
        self.timer.data = (&raw mut self.timer).cast();
        // A worker that shuts down need not wait for it.
        self.timer.set_cancelable(1);
        // SAFETY: the event is this process's own and in no timer.
        unsafe {
            self.timer.log = cycle_log();
            ngx_add_timer(&mut self.timer, LOOK_MS);
        }
    }

    fn look(&mut self, process: &Process) {
        let servers = endpoints(process, &self.upstreams);
        if servers != self.servers {
            self.servers.clone_from(&servers);
            self.subscriber.follow(servers);
        }
        self.look_later();
    }
}

impl Drop for Following {
    fn drop(&mut self) {
        if self.timer.timer_set() == 1 {
            // SAFETY: it is in the timer tree.
            unsafe { ngx_del_timer(&mut self.timer) };
        }
    }
}

unsafe extern "C" fn look(_event: *mut ngx_event_t) {
    guard((), || {
        let Some(process) = process::get() else { return };
        if let Some(following) = process.following.borrow_mut().as_mut() {
            following.look(process);
        }
    });
}

/// An endpoint for each rank of each peer; a peer in two upstreams publishes at one place.
fn endpoints(process: &Process, upstreams: &[&UpstreamConf]) -> Vec<ServerEndpoint> {
    let mut found: Vec<ServerEndpoint> = Vec::new();
    for conf in upstreams {
        // SAFETY: the upstream is live, and no list of it is locked here.
        let names = unsafe { peers::names(conf.upstream) };
        for address in names {
            let Endpoint { events, replay, topic, .. } = endpoint_of(conf, &address);
            let ids = process.servers(conf, address.as_bytes());
            let ranks: Vec<(u32, ServerId)> = (0..).zip(ids.iter().copied()).collect();
            found.extend(ranks.into_iter().map(|(rank, id)| ServerEndpoint {
                id,
                address: address.clone(),
                rank,
                events: events.as_ref().map(|events| at_rank(events, rank)),
                replay: replay.as_ref().map(|replay| at_rank(replay, rank)),
                topic: topic.clone(),
                block_size: conf.block_size(),
            }));
        }
    }
    found
}

/// Where one server publishes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// Of rank 0; `None` if nowhere.
    pub events: Option<String>,
    pub replay: Option<String>,
    pub topic: String,
    /// Data-parallel ranks, at least 1.
    pub ranks: u32,
}

/// Where a peer of an upstream publishes, as the configuration says.
pub fn endpoint_of(upstream: &UpstreamConf, peer: &str) -> Endpoint {
    let own = upstream.server(peer);
    let (port, replay_port, topic, ranks) = match &upstream.events {
        Some(EventsConf::Ports { port, replay_port, topic, ranks }) => {
            (Some(*port), *replay_port, topic.clone(), *ranks)
        }
        _ => (None, None, String::new(), 1),
    };
    let ranks = own.and_then(|server| server.ranks).unwrap_or(ranks);
    if let Some(server) = own.filter(|server| server.events.is_some()) {
        let (events, replay) = (server.events.clone(), server.replay.clone());
        return Endpoint { events, replay, topic, ranks };
    }
    // "10.0.0.1:8000" and "[fd00::1]:8000"; a unix socket has no port of its own.
    let host = peer.rsplit_once(':').map(|(host, _)| host).filter(|host| *host != "unix");
    let at = |port: Option<u16>| Some(format!("tcp://{}:{}", host?, port?));
    Endpoint { events: at(port), replay: at(replay_port), topic, ranks }
}

/// An endpoint of rank 0 as it is for another: engines count ports up.
fn at_rank(endpoint: &str, rank: u32) -> String {
    let counted = endpoint.rsplit_once(':').and_then(|(host, port)| {
        let port = port.parse::<u32>().ok().filter(|_| rank > 0)?;
        Some(format!("{host}:{}", port + rank))
    });
    counted.unwrap_or_else(|| endpoint.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nginx::conf::{Engine, Place, ServerConf};

    fn upstream(events: Option<EventsConf>) -> UpstreamConf {
        let server = ServerConf {
            address: "b".into(),
            names: vec!["10.0.0.2:8000".into()],
            id: None,
            events: Some("tcp://10.0.0.9:6001".into()),
            replay: None,
            ranks: None,
            engine: Engine::default(),
            place: Place::default(),
        };
        UpstreamConf { events, servers: vec![server], ..Default::default() }
    }

    #[test]
    fn endpoints_follow_the_peer_unless_a_server_says_otherwise() {
        let ports = EventsConf::Ports {
            port: 5557,
            replay_port: Some(5558),
            topic: "kv@".into(),
            ranks: 4,
        };
        let mut with = upstream(Some(ports));
        let of = |conf: &UpstreamConf, peer| {
            let Endpoint { events, replay, ranks, .. } = endpoint_of(conf, peer);
            (events, replay, ranks)
        };
        let tcp = |text: &str| Some(format!("tcp://{text}"));
        let both = |host: &str| (tcp(&format!("{host}:5557")), tcp(&format!("{host}:5558")), 4);
        assert_eq!(of(&with, "10.0.0.1:8000"), both("10.0.0.1"));
        assert_eq!(of(&with, "[fd00::1]:8000"), both("[fd00::1]"));
        assert_eq!(of(&with, "10.0.0.2:8000"), (tcp("10.0.0.9:6001"), None, 4));
        assert_eq!(of(&with, "unix:/run/a.sock"), (None, None, 4));
        with.servers[0].ranks = Some(2);
        assert_eq!(of(&with, "10.0.0.2:8000").2, 2);
        let without = upstream(Some(EventsConf::Off));
        assert_eq!(of(&without, "10.0.0.1:8000"), (None, None, 1));
        assert_eq!(of(&without, "10.0.0.2:8000"), (tcp("10.0.0.9:6001"), None, 1));
    }

    #[test]
    fn ranks_publish_on_the_next_ports() {
        assert_eq!(at_rank("tcp://[fd00::1]:5557", 0), "tcp://[fd00::1]:5557");
        assert_eq!(at_rank("tcp://[fd00::1]:5557", 3), "tcp://[fd00::1]:5560");
        assert_eq!(at_rank("ipc:///run/a", 0), "ipc:///run/a");
    }
}
