//! What a worker holds, from init_process to exit_process.

use std::cell::{RefCell, UnsafeCell};
use std::collections::HashMap;
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
    servers: RefCell<HashMap<Vec<u8>, ServerId>>,
    upstreams: RefCell<HashMap<String, UpstreamRow<'static>>>,
}

impl Process {
    /// The row of a peer; claimed if a name is new. `None` if the zone has no row left.
    pub fn server(&self, peer: &[u8]) -> Option<ServerId> {
        if let Some(id) = self.servers.borrow().get(peer) {
            return Some(*id);
        }
        let id = self.zone.servers().claim(&String::from_utf8_lossy(peer), 0).ok()?;
        self.servers.borrow_mut().insert(peer.to_vec(), id);
        Some(id)
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
            subscribe(unsafe { endpoints(cycle) });
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
    })
}

/// Starts the thread that follows the engines' events. Each cycle's first worker does; the newest
/// gets the lease.
fn subscribe(peers: Vec<(String, Option<Endpoint>, Option<u32>)>) {
    let Some(process) = get() else { return };
    let servers = peers
        .into_iter()
        .filter_map(|(address, endpoint, block_size)| {
            let id = process.server(address.as_bytes())?;
            let Endpoint { events, replay, topic } = endpoint.unwrap_or_default();
            Some(ServerEndpoint { id, address, rank: 0, events, replay, topic, block_size })
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
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Endpoint {
    pub events: Option<String>,
    pub replay: Option<String>,
    pub topic: String,
}

/// Where a peer of an upstream publishes, as the configuration says; `None` if nowhere.
pub fn endpoint_of(upstream: &UpstreamConf, peer: &str) -> Option<Endpoint> {
    let own = upstream.server(peer);
    let (port, replay_port, topic) = match &upstream.events {
        Some(EventsConf::Ports { port, replay_port, topic }) => {
            (Some(*port), *replay_port, topic.clone())
        }
        _ => (None, None, String::new()),
    };
    if let Some(server) = own.filter(|server| server.events.is_some()) {
        let (events, replay) = (server.events.clone(), server.replay.clone());
        return Some(Endpoint { events, replay, topic });
    }
    // "10.0.0.1:8000" and "[fd00::1]:8000"; a unix socket has no port of its own.
    let (host, _) = peer.rsplit_once(':').filter(|(host, _)| *host != "unix")?;
    let at = |port| format!("tcp://{host}:{port}");
    Some(Endpoint { events: Some(at(port?)), replay: replay_port.map(at), topic })
}

unsafe fn endpoints(cycle: *mut ngx_cycle_t) -> Vec<(String, Option<Endpoint>, Option<u32>)> {
    // SAFETY: the upstream module is part of every http; its main configuration is live.
    let upstreams = unsafe {
        let module = &raw const nginx_sys::ngx_http_upstream_module;
        match (*cycle).http_main_conf_unchecked(&*module) {
            Some(main) => balanced(main.as_ptr()),
            None => return Vec::new(),
        }
    };
    let mut found: Vec<(String, Option<Endpoint>, Option<u32>)> = Vec::new();
    for upstream in upstreams {
        for peer in upstream.peers() {
            if !found.iter().any(|(name, ..)| name == peer) {
                let endpoint = endpoint_of(upstream, peer);
                found.push((peer.clone(), endpoint, upstream.block_size()));
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
            place: Place::default(),
        };
        UpstreamConf { events, servers: vec![server], ..Default::default() }
    }

    #[test]
    fn endpoints_follow_the_peer_unless_a_server_says_otherwise() {
        let ports = EventsConf::Ports { port: 5557, replay_port: Some(5558), topic: "kv@".into() };
        let with = upstream(Some(ports));
        let of = |peer| endpoint_of(&with, peer).map(|e| (e.events, e.replay));
        let tcp = |text: &str| Some(format!("tcp://{text}"));
        assert_eq!(of("10.0.0.1:8000"), Some((tcp("10.0.0.1:5557"), tcp("10.0.0.1:5558"))));
        assert_eq!(of("[fd00::1]:8000"), Some((tcp("[fd00::1]:5557"), tcp("[fd00::1]:5558"))));
        assert_eq!(of("10.0.0.2:8000"), Some((tcp("10.0.0.9:6001"), None)));
        assert_eq!(of("unix:/run/a.sock"), None);
        let without = upstream(Some(EventsConf::Off));
        assert_eq!(endpoint_of(&without, "10.0.0.1:8000"), None);
        assert!(endpoint_of(&without, "10.0.0.2:8000").is_some());
    }
}
