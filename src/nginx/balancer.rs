//! The load balancing method: peer.init ranks, peer.get takes the next of the order and counts the
//! request in, peer.free counts it out.
//!
//! nginx's round robin does the rest: it owns the peers, their failures and connections, and it
//! chooses where the order has nobody left, backups included.

use nginx_sys::{
    NGX_BUSY, NGX_ERROR, NGX_OK, NGX_PEER_FAILED, ngx_conf_t, ngx_http_request_t,
    ngx_http_upstream_free_round_robin_peer, ngx_http_upstream_get_round_robin_peer,
    ngx_http_upstream_init_round_robin, ngx_http_upstream_init_round_robin_peer,
    ngx_http_upstream_rr_peer_data_t, ngx_http_upstream_srv_conf_t, ngx_int_t,
    ngx_peer_connection_t, ngx_time, ngx_uint_t,
};

use super::conf::{UpstreamConf, keep, upstream_conf, upstream_conf_mut};
use super::context::Context;
use super::guard;
use super::peers::{self, Locked, Peer, Peers};
use super::plan::{self, Plan, Seat};
use super::process::{self, Process};
use crate::shared::UpstreamField;
use crate::types::Skip;

/// Stale connections that one request may meet before it is left to nginx's own rules.
const MAX_STALE: usize = 8;

/// Orders made for one request while other workers choose.
const MAX_ORDERS: usize = 4;

pub unsafe extern "C" fn init_upstream(
    cf: *mut ngx_conf_t,
    upstream: *mut ngx_http_upstream_srv_conf_t,
) -> ngx_int_t {
    guard(NGX_ERROR as ngx_int_t, || {
        // SAFETY: nginx calls this once all servers of the upstream are read.
        unsafe {
            if ngx_http_upstream_init_round_robin(cf, upstream) != NGX_OK as ngx_int_t {
                return NGX_ERROR as ngx_int_t;
            }
            (*upstream).peer.init = Some(init_peer);
            if let Some(conf) = upstream_conf_mut(upstream) {
                conf.peers = Some(names(peers::of(upstream)));
            }
        }
        NGX_OK as ngx_int_t
    })
}

unsafe fn names(first: *mut Peers) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    let mut list = first;
    while !list.is_null() {
        // SAFETY: fresh lists of this process, primaries and then backups.
        unsafe {
            for (_, peer) in peers::each(list) {
                let name = String::from_utf8_lossy((*peer).name.as_bytes()).into_owned();
                if !names.contains(&name) {
                    names.push(name);
                }
            }
            list = (*list).next;
        }
    }
    names
}

/// What a request carries through the choice; round robin's own part comes first, since its
/// functions get the same pointer.
#[repr(C)]
pub(super) struct PeerData {
    round_robin: ngx_http_upstream_rr_peer_data_t,
    pub(super) request: *mut ngx_http_request_t,
    pub(super) conf: *const UpstreamConf,
    pub(super) plan: Option<Plan>,
    /// Seats still to be tried, in order.
    order: Vec<usize>,
    next: usize,
    stale: usize,
}

unsafe extern "C" fn init_peer(
    r: *mut ngx_http_request_t,
    upstream: *mut ngx_http_upstream_srv_conf_t,
) -> ngx_int_t {
    // SAFETY: nginx gives a live request with its upstream part set up; an all-zero round robin
    // part is what its init fills in.
    unsafe {
        let data = keep(
            (*r).pool,
            PeerData {
                round_robin: std::mem::zeroed(),
                request: r,
                conf: std::ptr::null(),
                plan: None,
                order: Vec::new(),
                next: 0,
                stale: 0,
            },
        );
        if data.is_null() {
            return NGX_ERROR as ngx_int_t;
        }
        let peer = &mut (*(*r).upstream).peer;
        peer.data = data.cast();
        let rc = ngx_http_upstream_init_round_robin_peer(r, upstream);
        if rc != NGX_OK as ngx_int_t {
            return rc;
        }
        if guard(false, || prepare(&mut *data, upstream)) {
            peer.get = Some(get);
            peer.free = Some(free);
        }
        NGX_OK as ngx_int_t
    }
}

/// Ranks the servers; false where round robin has to do.
unsafe fn prepare(data: &mut PeerData, upstream: *mut ngx_http_upstream_srv_conf_t) -> bool {
    let started = std::time::Instant::now();
    // SAFETY: the request and the upstream are live.
    unsafe {
        let (Some(process), Some(conf)) = (process::get(), upstream_conf(upstream)) else {
            return false;
        };
        let Some(context) = Context::attach(data.request) else { return false };
        let peers = data.round_robin.peers;
        let tokens = context.prompt.as_ref().ok();
        let plan = plan::make(process, conf, peers, tokens, &context.tried);
        if plan.busy {
            context.prompt = Err(Skip::IndexBusy);
        }
        context.single = plan.seats.len() == 1;
        data.conf = conf;
        data.plan = Some(plan);
        data.settle(process, conf, context);
        context.spent += started.elapsed();
    }
    true
}

unsafe extern "C" fn get(pc: *mut ngx_peer_connection_t, data: *mut std::ffi::c_void) -> ngx_int_t {
    // SAFETY: nginx hands back what init_peer gave it, with a live request.
    unsafe {
        let ours = &mut *data.cast::<PeerData>();
        if guard(false, || ours.take_next(&mut *pc)) {
            return NGX_OK as ngx_int_t;
        }
        let rc = ngx_http_upstream_get_round_robin_peer(pc, data);
        if rc != NGX_BUSY as ngx_int_t {
            guard((), || ours.book(ours.round_robin.current));
        }
        rc
    }
}

impl PeerData {
    pub(super) fn seats(&self) -> &[Seat] {
        self.plan.as_ref().map_or(&[], |plan| &plan.seats)
    }

    /// Counts the request in at the first of the order. If another worker chose since the loads
    /// were read, its choice might have changed this one, and the order is made anew: of two that
    /// choose at the same time one sees the other.
    unsafe fn settle(&mut self, process: &Process, conf: &UpstreamConf, context: &mut Context) {
        for _ in 0..MAX_ORDERS {
            let Some(plan) = &self.plan else { return };
            self.order = plan.ranked.iter().map(|place| place.candidate).collect();
            let (Some(&best), Some(upstream)) = (self.order.first(), process.upstream(&conf.name))
            else {
                return;
            };
            let (id, found) = (plan.seats[best].id, plan.seats[best].found);
            let seen = plan.choices;
            // SAFETY: the request is live.
            let queued = unsafe { self.queued(context, &found) };
            self.hold(process, context, id, queued);
            if upstream.advance(UpstreamField::Choices, seen) {
                return;
            }
            context.release();
            if let Some(plan) = &mut self.plan {
                plan.rank_again(process, conf);
            }
        }
    }

    /// Takes the first of the order that nginx would still send to.
    unsafe fn take_next(&mut self, pc: &mut ngx_peer_connection_t) -> bool {
        let peers = self.round_robin.peers;
        // SAFETY: the list is live as long as the request's configuration; a peer of it is
        // followed under its lock only, and only while the list is the one that was ranked.
        unsafe {
            if (*peers).single() == 1 {
                // Round robin has rules of its own for a lone server.
                return false;
            }
            let lock = Locked::write(peers);
            #[cfg(nginx_1_27_3)]
            if !(*peers).config.is_null() && self.round_robin.config != *(*peers).config {
                return false;
            }
            while let Some(at) = self.order.get(self.next).copied() {
                self.next += 1;
                let (peer, index) = (self.seats()[at].peer, self.seats()[at].index);
                if !peers::usable(&*peer) || self.is_tried(index) {
                    continue;
                }
                self.connect(pc, peer, index);
                drop(lock);
                self.book(peer);
                return true;
            }
        }
        false
    }

    /// What round robin does when it chooses a peer. The list is locked.
    unsafe fn connect(&mut self, pc: &mut ngx_peer_connection_t, peer: *mut Peer, index: usize) {
        // SAFETY: the caller holds the list's lock.
        unsafe {
            let chosen = &mut *peer;
            pc.set_cached(0);
            pc.connection = std::ptr::null_mut();
            pc.sockaddr = chosen.sockaddr;
            pc.socklen = chosen.socklen;
            pc.name = &mut chosen.name;
            chosen.conns += 1;
            let now = ngx_time();
            if now - chosen.checked > chosen.fail_timeout {
                chosen.checked = now;
            }
            #[cfg(nginx_1_27_3)]
            {
                chosen.refs += 1;
            }
            self.round_robin.current = peer;
            let (word, bit) = tried_bit(index);
            *self.round_robin.tried.add(word) |= bit;
        }
    }

    unsafe fn is_tried(&self, index: usize) -> bool {
        let (word, bit) = tried_bit(index);
        // SAFETY: round robin's map has a bit for each peer.
        unsafe { *self.round_robin.tried.add(word) & bit != 0 }
    }
}

fn tried_bit(index: usize) -> (usize, usize) {
    const BITS: usize = usize::BITS as usize;
    (index / BITS, 1 << (index % BITS))
}

unsafe extern "C" fn free(
    pc: *mut ngx_peer_connection_t,
    data: *mut std::ffi::c_void,
    state: ngx_uint_t,
) {
    // SAFETY: nginx hands back what init_peer gave it, with a live request.
    unsafe {
        let ours = &mut *data.cast::<PeerData>();
        let stale = guard(false, || ours.left(&mut *pc, state));
        let state = if stale { state & !(NGX_PEER_FAILED as ngx_uint_t) } else { state };
        let single = (*ours.round_robin.peers).single() == 1;
        ngx_http_upstream_free_round_robin_peer(pc, data, state);
        if stale && single {
            // Round robin tries a lone server once only, which a stale connection should not cost.
            (*pc).tries = 1;
        }
    }
}

impl PeerData {
    /// The request leaves its server. Tells whether a stale connection was all that failed: one
    /// kept alive, closed by the server before it saw anything of the request. That says nothing
    /// about the server, which may be tried again after the others.
    unsafe fn left(&mut self, pc: &mut ngx_peer_connection_t, state: ngx_uint_t) -> bool {
        // SAFETY: the request is live.
        unsafe {
            let Some(context) = Context::find(self.request) else { return false };
            context.release();
            if state & NGX_PEER_FAILED as ngx_uint_t == 0 {
                return false;
            }
            let stale = self.stale < MAX_STALE && self.is_stale(pc);
            let Some(picked) = &context.picked else { return false };
            let seat = self.seats().iter().position(|seat| seat.id == picked.server);
            match seat.filter(|_| stale) {
                Some(at) => {
                    self.stale += 1;
                    self.order.push(at);
                    let (word, bit) = tried_bit(self.seats()[at].index);
                    *self.round_robin.tried.add(word) &= !bit;
                }
                None => context.tried.push(picked.server),
            }
            stale
        }
    }

    unsafe fn is_stale(&self, pc: &ngx_peer_connection_t) -> bool {
        // SAFETY: nginx closes the connection only after it has asked peer.free.
        unsafe {
            let Some(connection) = pc.connection.as_ref() else { return false };
            let timed_out =
                (*connection.read).timedout() == 1 || (*connection.write).timedout() == 1;
            let state = (*(*self.request).upstream).state.as_ref();
            pc.cached() == 1 && !timed_out && state.is_some_and(|state| state.bytes_received == 0)
        }
    }
}
