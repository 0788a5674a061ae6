//! What a worker holds, from init_process to exit_process.

use std::cell::{Cell, RefCell, UnsafeCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

use nginx_sys::{
    NGX_OK, NGX_PROCESS_SINGLE, NGX_PROCESS_WORKER, ngx_current_msec, ngx_cycle_t, ngx_int_t,
    ngx_process, ngx_worker,
};
use ngx::http::HttpModuleConfExt;

use super::conf::{EventsConf, MainConf, UpstreamConf, balanced};
use super::guard;
use super::jobs::{Jobs, masked};
use super::log::{cycle_log, log};
use super::module::ngx_http_kvc_aware_module;
use super::zone;
use crate::events::{ServerEndpoint, Subscriber, SubscriberConfig};
use crate::index::Index;
use crate::load::LoadTable;
use crate::lookup::Scratch;
use crate::prompt::Models;
use crate::remote::Remotes;
use crate::shared::{Counter, ModelKey, ProcessId, UpstreamRow, Zone};
use crate::types::ServerId;

pub struct Process {
    pub zone: Zone<'static>,
    pub index: Index<'static>,
    pub loads: LoadTable<'static>,
    pub models: Arc<Models>,
    /// Each model's name as the zone keeps it.
    keys: Vec<ModelKey>,
    pub jobs: Jobs,
    pub scratch: RefCell<Scratch>,
    subscriber: RefCell<Option<Subscriber>>,
    /// Rows by peer name: asked for each peer of each request.
    servers: RefCell<HashMap<Vec<u8>, Rc<[ServerId]>>>,
    upstreams: RefCell<HashMap<String, UpstreamRow<'static>>>,
    /// It was said that ranks are not named.
    loose: Cell<bool>,
}

impl Process {
    /// The rows of a peer, one for each data-parallel rank; claimed if the name is new. Empty if
    /// the zone has no room left.
    pub fn servers(&self, conf: &UpstreamConf, peer: &[u8]) -> Rc<[ServerId]> {
        if let Some(ids) = self.servers.borrow().get(peer) {
            return Rc::clone(ids);
        }
        let name = String::from_utf8_lossy(peer);
        let ranks = endpoint_of(conf, &name).ranks;
        let claimed = (0..ranks).map(|rank| self.zone.servers().claim(&name, rank));
        let Ok(ids) = claimed.collect::<Result<Rc<[ServerId]>, _>>() else { return Rc::new([]) };
        self.servers.borrow_mut().insert(peer.to_vec(), Rc::clone(&ids));
        ids
    }

    /// Says once that nobody tells the servers of an upstream which rank was chosen.
    pub fn warn_loose(&self, upstream: &str) {
        if !self.loose.replace(true) {
            log!(
                WARN,
                cycle_log(),
                "kvc_aware: servers of upstream \"{upstream}\" have data-parallel ranks, but \
                 requests do not name the one that was chosen; it needs \"proxy_set_header \
                 X-data-parallel-rank $kvc_aware_rank\""
            );
        }
    }

    pub fn upstream(&self, name: &str) -> Option<UpstreamRow<'static>> {
        if let Some(row) = self.upstreams.borrow().get(name) {
            return Some(*row);
        }
        let row = self.zone.upstreams().claim(name).ok()?;
        self.upstreams.borrow_mut().insert(name.to_owned(), row);
        Some(row)
    }

    pub fn key(&self, model: usize) -> ModelKey {
        self.keys.get(model).copied().unwrap_or(ModelKey::of(""))
    }

    pub fn count(&self, counter: Counter, n: u64) {
        self.zone.counters().add(counter, n);
    }
}

struct Slot(UnsafeCell<Option<Process>>);

// SAFETY: only the main thread of a process touches the slot: nginx's callbacks all run there, and
// our own threads get what they need by value.
unsafe impl Sync for Slot {}

static PROCESS: Slot = Slot(UnsafeCell::new(None));

/// The process's state; `None` in the master and where the zone could not be used.
pub fn get() -> Option<&'static Process> {
    // SAFETY: see Slot; it changes in init and exit only, when no request is handled.
    unsafe { (*PROCESS.0.get()).as_ref() }
}

/// nginx's monotonic clock, in milliseconds: the same in all processes.
pub fn now_ms() -> u64 {
    // SAFETY: the event loop of this thread updates it.
    unsafe { ngx_current_msec as u64 }
}

pub fn panicked() {
    if let Some(process) = get() {
        process.count(Counter::Panics, 1);
    }
    log!(ERR, cycle_log(), "kvc_aware: an internal error was caught, the request goes on");
}

/// Runs in every worker, and in the one process of `master_process off`.
pub unsafe extern "C" fn init(cycle: *mut ngx_cycle_t) -> ngx_int_t {
    guard((), || {
        // SAFETY: set before init_process.
        let kind = unsafe { ngx_process } as u32;
        if kind != NGX_PROCESS_WORKER && kind != NGX_PROCESS_SINGLE {
            return;
        }
        // SAFETY: the cycle is the process's own, main configuration and all.
        let Some(conf) = (unsafe { main_of(cycle) }) else { return };
        let Some(declared) = &conf.zone else { return };
        // SAFETY: the cycle's zones are mapped.
        let Some(zone) = (unsafe { zone::open(declared.shm) }) else { return };
        match start(conf, zone) {
            // SAFETY: the main thread, before any request.
            Ok(process) => unsafe { *PROCESS.0.get() = Some(process) },
            Err(cause) => {
                log!(ERR, cycle_log(), "kvc_aware: {cause}; requests are balanced by round robin");
            }
        }
        // SAFETY: as above.
        if unsafe { ngx_worker } == 0 {
            // SAFETY: the cycle is live.
            subscribe(unsafe { peers_of_all(cycle) });
        }
    });
    NGX_OK as ngx_int_t
}

unsafe fn main_of<'a>(cycle: *mut ngx_cycle_t) -> Option<&'a MainConf> {
    // SAFETY: a cycle without http has no context there, which the call checks.
    unsafe {
        let module = &raw const ngx_http_kvc_aware_module;
        let conf = (*cycle).http_main_conf_unchecked::<MainConf>(&*module)?;
        Some(&*conf.as_ptr())
    }
}

fn start(conf: &MainConf, zone: Zone<'static>) -> Result<Process, String> {
    // SAFETY: no thread of this process has been started yet, so nobody reads the environment.
    unsafe { std::env::set_var("FASTOKENS_BPE_THREADS", "1") };
    let models = conf.models.clone().ok_or("no models")?;
    let index = Index::open(zone.index_words()).map_err(|e| e.to_string())?;
    let loads = LoadTable::claim(zone, ProcessId::current()).map_err(|e| e.to_string())?;
    let remotes = Arc::new(Remotes::new(conf.sources(&models)));
    let jobs = Jobs::start(conf.threads(), &models, &remotes)?;
    for remote in &conf.remotes {
        log!(
            NOTICE,
            cycle_log(),
            "kvc_aware: model \"{}\" is asked of upstream \"{}\"",
            remote.model,
            remote.upstream.as_deref().unwrap_or_default()
        );
    }
    let keys = models.names().map(ModelKey::of).collect();
    Ok(Process {
        zone,
        index,
        loads,
        models,
        keys,
        jobs,
        scratch: RefCell::default(),
        subscriber: RefCell::default(),
        servers: RefCell::default(),
        upstreams: RefCell::default(),
        loose: Cell::default(),
    })
}

/// Starts the thread that follows the engines' events. Each cycle's first worker does; the newest
/// gets the lease.
fn subscribe(peers: Vec<(&UpstreamConf, String)>) {
    let Some(process) = get() else { return };
    let servers = peers
        .into_iter()
        .flat_map(|(conf, address)| {
            let endpoint = endpoint_of(conf, &address);
            let ids = process.servers(conf, address.as_bytes());
            let ranks: Vec<(u32, ServerId)> = (0..).zip(ids.iter().copied()).collect();
            ranks.into_iter().map(move |(rank, id)| ServerEndpoint {
                id,
                address: address.clone(),
                rank,
                events: endpoint.events.as_ref().map(|events| at_rank(events, rank)),
                replay: endpoint.replay.as_ref().map(|replay| at_rank(replay, rank)),
                topic: endpoint.topic.clone(),
                block_size: conf.block_size(),
            })
        })
        .collect();
    let mailbox = process.jobs.mailbox();
    let log = Arc::new(move |level, text: String| mailbox.line(level, text));
    match masked(|| Subscriber::start(SubscriberConfig { servers, log }, process.zone)) {
        Ok(subscriber) => *process.subscriber.borrow_mut() = Some(subscriber),
        Err(error) => log!(ERR, cycle_log(), "kvc_aware: no events: {error}"),
    }
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

unsafe fn peers_of_all<'a>(cycle: *mut ngx_cycle_t) -> Vec<(&'a UpstreamConf, String)> {
    // SAFETY: the upstream module is part of every http; its main configuration is live.
    let upstreams = unsafe {
        let module = &raw const nginx_sys::ngx_http_upstream_module;
        match (*cycle).http_main_conf_unchecked(&*module) {
            Some(main) => balanced(main.as_ptr()),
            None => return Vec::new(),
        }
    };
    let mut found: Vec<(&UpstreamConf, String)> = Vec::new();
    for upstream in upstreams {
        for peer in upstream.peers() {
            if !found.iter().any(|(_, name)| name == peer) {
                found.push((upstream, peer.clone()));
            }
        }
    }
    found
}

pub unsafe extern "C" fn exit(_cycle: *mut ngx_cycle_t) {
    guard((), || {
        // SAFETY: the main thread, after the last request.
        let Some(mut process) = (unsafe { (*PROCESS.0.get()).take() }) else { return };
        if let Some(subscriber) = process.subscriber.take() {
            subscriber.stop();
        }
        process.jobs.stop();
        process.loads.release();
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nginx::conf::{Place, ServerConf};

    fn upstream(events: Option<EventsConf>) -> UpstreamConf {
        let server = ServerConf {
            address: "b".into(),
            names: vec!["10.0.0.2:8000".into()],
            id: None,
            events: Some("tcp://10.0.0.9:6001".into()),
            replay: None,
            ranks: None,
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
