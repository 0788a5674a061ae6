//! nginx's own peers: iteration, locks, usability.

use std::collections::HashSet;

use nginx_sys::{
    ngx_http_upstream_rr_peer_t, ngx_http_upstream_rr_peers_t, ngx_http_upstream_srv_conf_t,
    ngx_rwlock_rlock, ngx_rwlock_unlock, ngx_rwlock_wlock, ngx_time,
};

pub type Peer = ngx_http_upstream_rr_peer_t;
pub type Peers = ngx_http_upstream_rr_peers_t;

/// Holds nginx's lock of an upstream that is in a shared zone, and nothing for one that is not.
pub struct Locked(*mut Peers);

impl Locked {
    /// # Safety
    /// `peers` is live. Held for microseconds only, as nginx does, and in no other way than nginx
    /// does: its master frees the zone's own lock of a dead worker, not this one.
    pub unsafe fn read(peers: *mut Peers) -> Locked {
        // SAFETY: the caller's.
        unsafe {
            if !(*peers).shpool.is_null() {
                ngx_rwlock_rlock(&raw mut (*peers).rwlock);
            }
        }
        Locked(peers)
    }

    /// # Safety
    /// As for [`Locked::read`].
    pub unsafe fn write(peers: *mut Peers) -> Locked {
        // SAFETY: the caller's.
        unsafe {
            if !(*peers).shpool.is_null() {
                ngx_rwlock_wlock(&raw mut (*peers).rwlock);
            }
        }
        Locked(peers)
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        // SAFETY: taken by the constructor on live peers.
        unsafe {
            if !(*self.0).shpool.is_null() {
                ngx_rwlock_unlock(&raw mut (*self.0).rwlock);
            }
        }
    }
}

/// The peers of one list, in order, each with its bit in nginx's map of tried ones.
///
/// # Safety
/// `peers` is live and locked while the iterator is used.
pub unsafe fn each(peers: *mut Peers) -> impl Iterator<Item = (usize, *mut Peer)> {
    // SAFETY: the caller's; peers are a list that ends with null.
    let mut next = unsafe { (*peers).peer };
    std::iter::from_fn(move || {
        let peer = next;
        // SAFETY: as above.
        next = unsafe { peer.as_ref()?.next };
        Some(peer)
    })
    .enumerate()
}

/// The list of an upstream's primary servers, where nginx keeps it now.
///
/// # Safety
/// `upstream` is the configuration of an upstream that the module balances, in a live cycle.
pub unsafe fn of(upstream: *mut ngx_http_upstream_srv_conf_t) -> *mut Peers {
    // SAFETY: round robin's init put the list there; `zone` replaced it by one in shared memory.
    unsafe { (*upstream).peer.data.cast() }
}

/// Names of an upstream's peers as they are now, backups too.
///
/// # Safety
/// As for [`of`], and no list of the upstream is locked by the caller.
pub unsafe fn names(upstream: *mut ngx_http_upstream_srv_conf_t) -> Vec<String> {
    let (mut names, mut seen) = (Vec::new(), HashSet::new());
    // SAFETY: the caller's; each list is locked while it is looked at.
    unsafe {
        let mut list = of(upstream);
        while !list.is_null() {
            let _lock = Locked::read(list);
            for (_, peer) in each(list) {
                let name = String::from_utf8_lossy((*peer).name.as_bytes()).into_owned();
                if seen.insert(name.clone()) {
                    names.push(name);
                }
            }
            list = (*list).next;
        }
    }
    names
}

/// Whether the upstream's peers are shared by all workers, and may change.
///
/// # Safety
/// As for [`of`].
pub unsafe fn are_shared(upstream: *mut ngx_http_upstream_srv_conf_t) -> bool {
    // SAFETY: the caller's.
    unsafe { of(upstream).as_ref() }.is_some_and(|peers| !peers.shpool.is_null())
}

/// Whether nginx would send a request to a peer now.
pub fn usable(peer: &Peer) -> bool {
    let failed = peer.max_fails > 0
        && peer.fails >= peer.max_fails
        && ngx_time() - peer.checked <= peer.fail_timeout;
    let full = peer.max_conns > 0 && peer.conns >= peer.max_conns;
    peer.down == 0 && !failed && !full
}
