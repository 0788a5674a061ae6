//! What the configuration comes to.

use std::ffi::c_void;
use std::path::PathBuf;
use std::sync::Arc;

use nginx_sys::{
    ngx_conf_t, ngx_http_complex_value_t, ngx_http_conf_ctx_t, ngx_http_request_t,
    ngx_http_upstream_main_conf_t, ngx_http_upstream_srv_conf_t, ngx_msec_t, ngx_pool_cleanup_add,
    ngx_pool_t, ngx_shm_zone_t,
};

use super::module::ngx_http_kvc_aware_module;
use crate::prompt::{ModelSpec, Models};
use crate::remote::{Key, Source};
use crate::select::{Policy, Weights};

/// Where a directive stands, for what can be checked only later.
#[derive(Clone, Debug, Default)]
pub struct Place {
    pub file: String,
    pub line: usize,
}

/// `kvc_aware_zone`.
pub struct ZoneConf {
    pub name: String,
    pub shm: *mut ngx_shm_zone_t,
}

/// `kvc_aware_model name remote`: who is asked.
#[derive(Debug)]
pub struct RemoteConf {
    pub model: String,
    /// As `upstream=` names it; once the whole configuration is read, whose servers they are.
    pub upstream: Option<String>,
    pub key: Option<Key>,
    pub place: Place,
    /// The servers of the upstream that can be asked, once the whole configuration is read.
    pub servers: Vec<String>,
}

#[derive(Default)]
pub struct MainConf {
    pub zone: Option<ZoneConf>,
    pub specs: Vec<ModelSpec>,
    /// Those that `kvc_aware_tokenizer_dir` found; a `kvc_aware_model` of the same name wins.
    pub folders: Vec<ModelSpec>,
    pub remotes: Vec<RemoteConf>,
    pub tokenizer_dir: Option<PathBuf>,
    pub threads: Option<usize>,
    /// The closed map of names, once the whole configuration is read.
    pub models: Option<Arc<Models>>,
}

impl MainConf {
    pub const DEFAULT_THREADS: usize = 2;

    pub fn threads(&self) -> usize {
        self.threads.unwrap_or(MainConf::DEFAULT_THREADS)
    }

    /// Who is asked for the tokens of which model.
    pub fn sources(&self, models: &Models) -> Vec<Source> {
        let source = |remote: &RemoteConf| {
            let model = models.names().position(|name| name == remote.model)?;
            Some(Source { model, servers: remote.servers.clone(), key: remote.key.clone() })
        };
        self.remotes.iter().filter_map(source).collect()
    }
}

/// `kvc_aware_events`.
#[derive(Clone, Debug)]
pub enum EventsConf {
    Off,
    Ports { port: u16, replay_port: Option<u16>, topic: String, ranks: u32 },
}

/// Which engine a server runs, as the configuration says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Engine {
    #[default]
    Vllm,
    Sglang,
}

impl Engine {
    pub const ALL: [Engine; 2] = [Engine::Vllm, Engine::Sglang];

    pub fn name(self) -> &'static str {
        match self {
            Engine::Vllm => "vllm",
            Engine::Sglang => "sglang",
        }
    }
}

/// `kvc_aware_server`: what differs for one server.
#[derive(Clone, Debug)]
pub struct ServerConf {
    /// As written.
    pub address: String,
    /// As nginx prints the peers that it resolves to.
    pub names: Vec<String>,
    pub id: Option<String>,
    pub events: Option<String>,
    pub replay: Option<String>,
    pub ranks: Option<u32>,
    pub engine: Engine,
    pub place: Place,
}

pub struct UpstreamConf {
    /// Zone that `kvc_aware` names.
    pub zone: Option<String>,
    pub place: Place,
    pub events: Option<EventsConf>,
    pub servers: Vec<ServerConf>,
    /// `Some(None)` is `auto`.
    pub block_size: Option<Option<u32>>,
    pub named_policy: Option<Policy>,
    pub weights: Option<Weights>,
    /// The upstream's name.
    pub name: String,
    pub upstream: *mut ngx_http_upstream_srv_conf_t,
    /// Filled in when nginx sets the upstream up; `None` if that never came to us.
    pub peers: Option<Vec<String>>,
}

impl Default for UpstreamConf {
    fn default() -> Self {
        UpstreamConf {
            zone: None,
            place: Place::default(),
            events: None,
            servers: Vec::new(),
            block_size: None,
            named_policy: None,
            weights: None,
            name: String::new(),
            upstream: std::ptr::null_mut(),
            peers: None,
        }
    }
}

impl UpstreamConf {
    pub fn policy(&self) -> Policy {
        match (self.named_policy, self.weights) {
            (Some(Policy::Weighted(default)), weights) => {
                Policy::Weighted(weights.unwrap_or(default))
            }
            (Some(Policy::Cost), _) | (None, None) => Policy::Cost,
            (None, Some(weights)) => Policy::Weighted(weights),
        }
    }

    pub fn block_size(&self) -> Option<u32> {
        self.block_size.flatten()
    }

    /// Names of the peers, backups too, as nginx resolved them.
    pub fn peers(&self) -> &[String] {
        self.peers.as_deref().unwrap_or_default()
    }

    pub fn server(&self, peer: &str) -> Option<&ServerConf> {
        self.servers.iter().find(|server| server.names.iter().any(|name| name == peer))
    }
}

/// `kvc_aware_route`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Route {
    #[default]
    Off,
    On,
    /// All is computed and told, but load alone decides.
    Shadow,
}

/// `kvc_aware_index`.
#[derive(Clone, Copy, Debug, Default)]
pub struct IndexConf {
    pub explain: bool,
    pub tokens: bool,
}

pub struct LocationConf {
    pub route: Option<Route>,
    pub max_text: Option<usize>,
    pub deadline: Option<ngx_msec_t>,
    pub priority: Option<*mut ngx_http_complex_value_t>,
    pub priority_header: Option<bool>,
    pub index: Option<IndexConf>,
}

impl LocationConf {
    const DEFAULT_MAX_TEXT: usize = 4 << 20;
    const DEFAULT_DEADLINE: ngx_msec_t = 100;

    const UNSET: LocationConf = LocationConf {
        route: None,
        max_text: None,
        deadline: None,
        priority: None,
        priority_header: None,
        index: None,
    };

    pub fn route(&self) -> Route {
        self.route.unwrap_or_default()
    }

    pub fn max_text(&self) -> usize {
        self.max_text.unwrap_or(Self::DEFAULT_MAX_TEXT)
    }

    pub fn deadline(&self) -> ngx_msec_t {
        self.deadline.unwrap_or(Self::DEFAULT_DEADLINE)
    }

    pub fn priority_header(&self) -> bool {
        self.priority_header.unwrap_or(false)
    }

    /// What is not set here comes from the level above; an endpoint is not inherited.
    fn merge(&mut self, above: &LocationConf) {
        self.route = self.route.or(above.route);
        self.max_text = self.max_text.or(above.max_text);
        self.deadline = self.deadline.or(above.deadline);
        self.priority = self.priority.or(above.priority);
        self.priority_header = self.priority_header.or(above.priority_header);
    }
}

/// Puts a value under the care of a pool: it is dropped with it. Null if there is no memory.
///
/// # Safety
/// `pool` is a live pool.
pub unsafe fn keep<T>(pool: *mut ngx_pool_t, value: T) -> *mut T {
    unsafe extern "C" fn drop_value<T>(data: *mut c_void) {
        // SAFETY: `data` is what Box::into_raw gave below; nginx runs a cleanup once.
        drop(unsafe { Box::from_raw(data.cast::<T>()) });
    }
    // SAFETY: the caller's pool is live.
    unsafe {
        let cleanup = ngx_pool_cleanup_add(pool, 0);
        if cleanup.is_null() {
            return std::ptr::null_mut();
        }
        let value = Box::into_raw(Box::new(value));
        (*cleanup).handler = Some(drop_value::<T>);
        (*cleanup).data = value.cast();
        value
    }
}

pub unsafe extern "C" fn create_main(cf: *mut ngx_conf_t) -> *mut c_void {
    // SAFETY: nginx gives a configuration with a live pool.
    unsafe { keep((*cf).pool, MainConf::default()).cast() }
}

pub unsafe extern "C" fn create_upstream(cf: *mut ngx_conf_t) -> *mut c_void {
    // SAFETY: as above.
    unsafe { keep((*cf).pool, UpstreamConf::default()).cast() }
}

pub unsafe extern "C" fn create_location(cf: *mut ngx_conf_t) -> *mut c_void {
    // SAFETY: as above.
    unsafe { keep((*cf).pool, LocationConf::UNSET).cast() }
}

pub unsafe extern "C" fn merge_location(
    _cf: *mut ngx_conf_t,
    above: *mut c_void,
    here: *mut c_void,
) -> *mut std::ffi::c_char {
    // SAFETY: both were made by create_location.
    unsafe { (*here.cast::<LocationConf>()).merge(&*above.cast::<LocationConf>()) };
    std::ptr::null_mut()
}

fn index() -> usize {
    // SAFETY: nginx sets the index before it calls into the module and never changes it.
    unsafe { ngx_http_kvc_aware_module.ctx_index }
}

/// The main configuration while the file is being read.
///
/// # Safety
/// `cf` is inside `http`.
pub unsafe fn main_conf<'a>(cf: *mut ngx_conf_t) -> &'a mut MainConf {
    // SAFETY: the context of a directive in `http` is an ngx_http_conf_ctx_t; create_main filled
    // our slot.
    unsafe {
        let ctx = (*cf).ctx.cast::<ngx_http_conf_ctx_t>();
        &mut *(*(*ctx).main_conf.add(index())).cast()
    }
}

/// The configuration of one upstream.
///
/// # Safety
/// `upstream` is a live configuration of nginx; implicit upstreams (`proxy_pass` to an address)
/// have none.
pub unsafe fn upstream_conf<'a>(
    upstream: *mut ngx_http_upstream_srv_conf_t,
) -> Option<&'a UpstreamConf> {
    // SAFETY: the caller's; create_upstream filled the slot.
    unsafe { upstream_slot(upstream).as_ref() }
}

/// The same while the configuration is being read.
///
/// # Safety
/// As for [`upstream_conf`], and nothing else refers to it.
pub unsafe fn upstream_conf_mut<'a>(
    upstream: *mut ngx_http_upstream_srv_conf_t,
) -> Option<&'a mut UpstreamConf> {
    // SAFETY: as above.
    unsafe { upstream_slot(upstream).as_mut() }
}

unsafe fn upstream_slot(upstream: *mut ngx_http_upstream_srv_conf_t) -> *mut UpstreamConf {
    // SAFETY: an explicit upstream has a slot for each module.
    unsafe {
        let slots = (*upstream).srv_conf;
        if slots.is_null() { std::ptr::null_mut() } else { (*slots.add(index())).cast() }
    }
}

/// The location that a request is in.
///
/// # Safety
/// `r` is a live request.
pub unsafe fn location_conf<'a>(r: *mut ngx_http_request_t) -> &'a LocationConf {
    // SAFETY: each request has the location's slots, ours filled by create_location.
    unsafe { &*(*(*r).loc_conf.add(index())).cast::<LocationConf>() }
}

/// The main configuration of a request.
///
/// # Safety
/// `r` is a live request.
pub unsafe fn request_main_conf<'a>(r: *mut ngx_http_request_t) -> &'a MainConf {
    // SAFETY: as in location_conf.
    unsafe { &*(*(*r).main_conf.add(index())).cast::<MainConf>() }
}

/// All upstreams of the configuration that the module balances.
///
/// # Safety
/// `main` is the upstream module's main configuration of a live cycle.
pub unsafe fn balanced<'a>(
    main: *mut ngx_http_upstream_main_conf_t,
) -> impl Iterator<Item = &'a UpstreamConf> {
    // SAFETY: the array holds pointers to upstream configurations.
    let all = unsafe {
        let list = &(*main).upstreams;
        std::slice::from_raw_parts(
            list.elts.cast::<*mut ngx_http_upstream_srv_conf_t>(),
            list.nelts,
        )
    };
    // SAFETY: each is live as long as the cycle.
    all.iter()
        .filter_map(|upstream| unsafe { upstream_conf(*upstream) })
        .filter(|u| u.zone.is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_location_says_beats_what_it_inherits() {
        let above = LocationConf {
            route: Some(Route::Shadow),
            max_text: Some(7),
            index: Some(IndexConf::default()),
            ..LocationConf::UNSET
        };
        let mut here = LocationConf { route: Some(Route::Off), ..LocationConf::UNSET };
        here.merge(&above);
        assert_eq!(here.route(), Route::Off);
        assert_eq!(here.max_text(), 7);
        assert_eq!(here.deadline(), 100);
        assert!(here.index.is_none());
    }

    #[test]
    fn weights_mean_weighted_unless_a_policy_is_named() {
        let weights = Weights { cache: 1.0, tier: 0.0, load: 0.0 };
        let conf =
            |named_policy, weights| UpstreamConf { named_policy, weights, ..Default::default() };
        assert_eq!(conf(None, None).policy(), Policy::Cost);
        assert_eq!(conf(None, Some(weights)).policy(), Policy::Weighted(weights));
        assert_eq!(conf(Some(Policy::Cost), Some(weights)).policy(), Policy::Cost);
        let named = Some(Policy::Weighted(Weights::default()));
        assert_eq!(conf(named, None).policy(), Policy::Weighted(Weights::default()));
        assert_eq!(conf(named, Some(weights)).policy(), Policy::Weighted(weights));
    }
}
