//! One request's choice: the servers in order, the first of them reserved.
//!
//! It is made in peer.init, or before that, when a header wants to know the data-parallel rank: nginx
//! puts the headers of a request together before it asks for a peer.

use std::ptr;

use nginx_sys::{
    ngx_http_request_t, ngx_http_upstream_main_conf_t, ngx_http_upstream_module,
    ngx_http_upstream_srv_conf_t,
};

use super::conf::{UpstreamConf, upstream_conf};
use super::context::Context;
use super::peers::{self, Peer};
use super::plan::{self, Plan, Seat};
use super::process::{self, Process};
use crate::shared::UpstreamField;
use crate::types::Skip;

/// Orders made for one request while other workers choose.
const MAX_ORDERS: usize = 4;

pub struct Choice {
    pub request: *mut ngx_http_request_t,
    pub conf: &'static UpstreamConf,
    pub plan: Plan,
    /// Seats still to be tried, in order.
    order: Vec<usize>,
    next: usize,
    /// The rank that the request's headers name.
    pinned: Option<u32>,
}

impl Choice {
    /// Ranks the servers of an upstream and counts the request in at the first.
    ///
    /// # Safety
    /// The request and the upstream are live, its peers are not locked, and no other reference to
    /// the request's state is in use.
    pub unsafe fn make(
        r: *mut ngx_http_request_t,
        upstream: *mut ngx_http_upstream_srv_conf_t,
    ) -> Option<Choice> {
        let started = std::time::Instant::now();
        // SAFETY: the caller's; the configuration lives as long as the process's requests.
        let (process, conf) = unsafe { (process::get()?, upstream_conf(upstream)?) };
        conf.zone.as_ref()?;
        // SAFETY: as above.
        let context = unsafe { Context::attach(r)? };
        let tokens = context.prompt.as_ref().ok();
        // SAFETY: as above.
        let plan = unsafe {
            plan::make(process, conf, peers::of(upstream), tokens, &context.tried, context.shadow)
        };
        if plan.busy {
            context.prompt = Err(Skip::IndexBusy);
        }
        context.single = plan.seats.len() == 1;
        let mut choice =
            Choice { request: r, conf, plan, order: Vec::new(), next: 0, pinned: None };
        choice.settle(process, context);
        context.spent += started.elapsed();
        Some(choice)
    }

    /// Counts the request in at the first of the order. If another worker chose since the loads
    /// were read, its choice might have changed this one, and the order is made anew: of two that
    /// choose at the same time one sees the other.
    fn settle(&mut self, process: &Process, context: &mut Context) {
        for _ in 0..MAX_ORDERS {
            self.order = self.plan.ranked.iter().map(|place| place.candidate).collect();
            let (Some(&best), Some(upstream)) =
                (self.order.first(), process.upstream(&self.conf.name))
            else {
                return;
            };
            let seen = self.plan.choices;
            self.hold(process, context, best);
            if upstream.advance(UpstreamField::Choices, seen) {
                return;
            }
            context.release();
            self.plan.rank_again(process, self.conf);
        }
    }

    pub fn is_of(&self, upstream: *mut ngx_http_upstream_srv_conf_t) -> bool {
        // SAFETY: the caller's upstream is live.
        unsafe { upstream_conf(upstream) }.is_some_and(|conf| ptr::eq(conf, self.conf))
    }

    /// The rank that the headers name from here on; only servers of that rank are tried. `None`
    /// where the first server has no ranks.
    pub fn pin(&mut self) -> Option<u32> {
        let first = self.order.first().map(|at| &self.plan.seats[*at])?;
        self.pinned = Some(first.rank).filter(|_| first.ranks > 1);
        if let Some(rank) = self.pinned {
            let seats = &self.plan.seats;
            self.order.retain(|at| seats[*at].rank == rank);
        }
        self.pinned
    }

    /// The next seat to be tried.
    pub fn next(&mut self) -> Option<usize> {
        let at = self.order.get(self.next).copied()?;
        self.next += 1;
        Some(at)
    }

    /// Has a seat tried again after the others.
    pub fn again(&mut self, at: usize) {
        self.order.push(at);
    }

    /// The best seat of a peer that nginx chose itself.
    pub fn seat_of(&self, peer: *mut Peer) -> Option<usize> {
        let seats = &self.plan.seats;
        let ranked = self.plan.ranked.iter().map(|place| place.candidate);
        let fits = |at: &usize| {
            let seat = &seats[*at];
            ptr::eq(seat.peer, peer) && self.pinned.is_none_or(|rank| seat.rank == rank)
        };
        ranked.chain(0..seats.len()).find(fits)
    }

    /// Whether the request's headers leave it to the server which of its ranks it takes.
    pub fn is_loose(&self, seat: &Seat) -> bool {
        seat.ranks > 1 && self.pinned.is_none()
    }
}

/// The rank to be named in the headers of a request that goes to an upstream of the module.
///
/// # Safety
/// `r` is live, and no reference to its state is in use.
pub unsafe fn rank_for_headers(r: *mut ngx_http_request_t) -> Option<u32> {
    // SAFETY: the caller's; nginx sets an upstream up before it makes the request for it.
    unsafe {
        let upstream = (*r).upstream.as_ref()?;
        // The answer of a request that was never sent has a status and no peer.
        if upstream.peer.get.is_some() || (*r).headers_out.status != 0 {
            return None;
        }
        let chosen = upstream_of(r)?;
        let known = Context::find(r).and_then(|context| context.early.take());
        let mut choice = match known.filter(|choice| choice.is_of(chosen)) {
            Some(choice) => choice,
            None => Box::new(Choice::make(r, chosen)?),
        };
        let rank = choice.pin();
        Context::find(r)?.early = Some(choice);
        rank
    }
}

/// The upstream that nginx is about to ask for a peer.
unsafe fn upstream_of(r: *mut ngx_http_request_t) -> Option<*mut ngx_http_upstream_srv_conf_t> {
    // SAFETY: the caller's; it is found as nginx itself finds it.
    unsafe {
        let upstream = (*r).upstream.as_ref()?;
        let Some(resolved) = upstream.resolved.as_ref() else {
            let chosen = (*upstream.conf).upstream;
            return (!chosen.is_null()).then_some(chosen);
        };
        let slot = ngx_http_upstream_module.ctx_index;
        let main = (*(*r).main_conf.add(slot)).cast::<ngx_http_upstream_main_conf_t>();
        let list = &(*main).upstreams;
        let all = std::slice::from_raw_parts(
            list.elts.cast::<*mut ngx_http_upstream_srv_conf_t>(),
            list.nelts,
        );
        let fits = |one: &*mut ngx_http_upstream_srv_conf_t| {
            let (host, port) = ((**one).host.as_bytes(), (**one).port);
            (port == 0 && resolved.no_port != 0 || port == resolved.port)
                && host.eq_ignore_ascii_case(resolved.host.as_bytes())
        };
        all.iter().copied().find(fits)
    }
}
