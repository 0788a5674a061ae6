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

use super::choice::Choice;
use super::conf::{keep, upstream_conf_mut};
use super::context::Context;
use super::guard;
use super::peers::{self, Locked, Peer};

/// Stale connections that one request may meet before it is left to nginx's own rules.
const MAX_STALE: usize = 8;

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
                conf.peers = Some(peers::names(upstream));
            }
        }
        NGX_OK as ngx_int_t
    })
}

/// What a request carries through the choice; round robin's own part comes first, since its
/// functions get the same pointer.
#[repr(C)]
struct PeerData {
    round_robin: ngx_http_upstream_rr_peer_data_t,
    request: *mut ngx_http_request_t,
    choice: Option<Box<Choice>>,
    stale: usize,
}

unsafe extern "C" fn init_peer(
    r: *mut ngx_http_request_t,
    upstream: *mut ngx_http_upstream_srv_conf_t,
) -> ngx_int_t {
    // SAFETY: nginx gives a live request with its upstream part set up; an all-zero round robin
    // part is what its init fills in.
    unsafe {
        let round_robin = std::mem::zeroed();
        let data = keep((*r).pool, PeerData { round_robin, request: r, choice: None, stale: 0 });
        if data.is_null() {
            return NGX_ERROR as ngx_int_t;
        }
        let peer = &mut (*(*r).upstream).peer;
        peer.data = data.cast();
        let rc = ngx_http_upstream_init_round_robin_peer(r, upstream);
        if rc != NGX_OK as ngx_int_t {
            return rc;
        }
        (*data).choice = guard(None, || choose(r, upstream));
        if (*data).choice.is_some() {
            peer.get = Some(get);
            peer.free = Some(free);
        }
        NGX_OK as ngx_int_t
    }
}

/// The order of servers; `None` where round robin has to do.
unsafe fn choose(
    r: *mut ngx_http_request_t,
    upstream: *mut ngx_http_upstream_srv_conf_t,
) -> Option<Box<Choice>> {
    // SAFETY: the request and the upstream are live.
    unsafe {
        let early = Context::find(r).and_then(|context| context.early.take());
        match early.filter(|choice| choice.is_of(upstream)) {
            Some(choice) => Some(choice),
            None => Choice::make(r, upstream).map(Box::new),
        }
    }
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
            guard((), || ours.book(ours.round_robin.current, None));
        }
        rc
    }
}

impl PeerData {
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
            while let Some((at, peer, index)) = self.next_seat() {
                if !peers::usable(&*peer) || self.is_tried(index) {
                    continue;
                }
                self.connect(pc, peer, index);
                drop(lock);
                self.book(peer, Some(at));
                return true;
            }
        }
        false
    }

    fn next_seat(&mut self) -> Option<(usize, *mut Peer, usize)> {
        let choice = self.choice.as_mut()?;
        let at = choice.next()?;
        let seat = &choice.plan.seats[at];
        Some((at, seat.peer, seat.index))
    }

    unsafe fn book(&self, peer: *mut Peer, seat: Option<usize>) {
        if let Some(choice) = &self.choice {
            // SAFETY: the peer was chosen just now and holds a connection of this request.
            unsafe { choice.book(peer, seat) };
        }
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
            let (Some(picked), Some(choice)) = (&context.picked, &mut self.choice) else {
                return false;
            };
            let seats = &choice.plan.seats;
            let seat = seats.iter().position(|seat| seat.id == picked.server);
            match seat.filter(|_| stale) {
                Some(at) => {
                    let (word, bit) = tried_bit(seats[at].index);
                    *self.round_robin.tried.add(word) &= !bit;
                    self.stale += 1;
                    choice.again(at);
                }
                None => {
                    // All ranks are behind the address that failed.
                    let index = seat.map(|at| seats[at].index);
                    let failed = seats.iter().filter(|seat| Some(seat.index) == index);
                    context.tried.push(picked.server);
                    context.tried.extend(failed.map(|seat| seat.id));
                }
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
