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

use super::conf::{MainConf, UpstreamConf, balanced};
use super::flag::Flag;
use super::following::{self, Following, endpoint_of};
use super::guard;
use super::jobs::Jobs;
use super::log::{cycle_log, log};
use super::module::ngx_http_kvc_aware_module;
use super::zone;
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
    /// In the process that follows the engines' events.
    pub following: RefCell<Option<Box<Following>>>,
    /// Rows by peer name: asked for each peer of each request.
    servers: RefCell<HashMap<Vec<u8>, Known>>,
    upstreams: RefCell<HashMap<String, UpstreamRow<'static>>>,
    /// It was said that ranks are not named.
    loose: Cell<bool>,
    /// Where nginx goes on with a request whose client has left.
    pub ignores_abort: Option<Flag>,
}

/// The rows of a peer, and what tells whether they are still its own.
struct Known {
    ids: Rc<[ServerId]>,
    keys: Vec<u64>,
}

impl Process {
    /// The rows of a peer, one for each data-parallel rank; claimed if there are none. Empty if the
    /// zone has no room left.
    pub fn servers(&self, conf: &UpstreamConf, peer: &[u8]) -> Rc<[ServerId]> {
        let rows = self.zone.servers();
        if let Some(known) = self.servers.borrow().get(peer) {
            let mut both = known.ids.iter().zip(&known.keys);
            if both.all(|(id, key)| rows.key(*id) == *key) {
                return Rc::clone(&known.ids);
            }
        }
        let name = String::from_utf8_lossy(peer);
        let claimed = (0..endpoint_of(conf, &name).ranks).map(|rank| rows.claim(&name, rank));
        let Ok(ids) = claimed.collect::<Result<Rc<[ServerId]>, _>>() else { return Rc::new([]) };
        let keys = ids.iter().map(|id| rows.key(*id)).collect();
        let known = Known { ids: Rc::clone(&ids), keys };
        self.servers.borrow_mut().insert(peer.to_vec(), known);
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
        // SAFETY: the cycle is live; it is a flag of locations.
        let ignores_abort = unsafe { Flag::of(cycle, b"proxy_ignore_client_abort") };
        match start(conf, zone, ignores_abort) {
            // SAFETY: the main thread, before any request.
            Ok(process) => unsafe { *PROCESS.0.get() = Some(process) },
            Err(cause) => {
                log!(ERR, cycle_log(), "kvc_aware: {cause}; requests are balanced by round robin");
            }
        }
        // SAFETY: as above.
        if unsafe { ngx_worker } == 0 {
            // SAFETY: the cycle is live.
            following::start(unsafe { upstreams(cycle) });
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

fn start(
    conf: &MainConf,
    zone: Zone<'static>,
    ignores_abort: Option<Flag>,
) -> Result<Process, String> {
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
        following: RefCell::default(),
        servers: RefCell::default(),
        upstreams: RefCell::default(),
        loose: Cell::default(),
        ignores_abort,
    })
}

/// All upstreams of the cycle that the module balances.
unsafe fn upstreams(cycle: *mut ngx_cycle_t) -> Vec<&'static UpstreamConf> {
    // SAFETY: the upstream module is part of every http; its main configuration is live as long
    // as the process handles requests.
    unsafe {
        let module = &raw const nginx_sys::ngx_http_upstream_module;
        let main = (*cycle).http_main_conf_unchecked(&*module);
        main.map_or_else(Vec::new, |main| balanced(main.as_ptr()).collect())
    }
}

pub unsafe extern "C" fn exit(_cycle: *mut ngx_cycle_t) {
    guard((), || {
        // SAFETY: the main thread, after the last request.
        let Some(mut process) = (unsafe { (*PROCESS.0.get()).take() }) else { return };
        drop(process.following.take());
        process.jobs.stop();
        process.loads.release();
    });
}
