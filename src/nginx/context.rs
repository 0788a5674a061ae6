//! One request's state.
//!
//! nginx forgets module contexts at an internal redirect, but not the request's pool: the state
//! lives in a pool cleanup and is found again there. That cleanup is also what gives back, in
//! whatever way the request ends, all that the request holds: its job, its timers, its place in a
//! server's load.

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use nginx_sys::{
    ngx_add_timer, ngx_del_timer, ngx_event_t, ngx_http_request_t, ngx_msec_t, ngx_pool_cleanup_add,
};

use super::choice::Choice;
use super::module::ngx_http_kvc_aware_module;
use super::process;
use crate::load::{Reservation, learn_rate};
use crate::prompt::Tokens;
use crate::shared::{Mode, Ticket, UpstreamRow};
use crate::trust::Usage;
use crate::types::{ServerId, Skip};

/// How far the access phase has come.
pub enum Stage {
    /// The access phase has not seen the request.
    New,
    /// The client's body is being read.
    Reading,
    /// A job makes the token ids.
    Waiting(u64),
    Done,
}

/// The model as a job finds it, ahead of its result: one more than its number, 0 before.
#[derive(Clone, Default)]
pub struct KnownModel(Arc<AtomicUsize>);

impl KnownModel {
    pub fn set(&self, model: usize) {
        self.0.store(model + 1, Ordering::Relaxed);
    }

    pub fn get(&self) -> Option<usize> {
        self.0.load(Ordering::Relaxed).checked_sub(1)
    }
}

/// The server that a request went to, the last one if there were several.
#[derive(Clone, Debug)]
pub struct Picked {
    pub server: ServerId,
    pub name: String,
    /// Its data-parallel rank, where it has several.
    pub rank: Option<u32>,
    pub mode: Mode,
    pub matched_blocks: u32,
    pub matched_tokens: u32,
    pub prompt_blocks: u32,
}

/// A request counted in at a server.
pub struct Held {
    pub reservation: Reservation,
    pub upstream: Option<UpstreamRow<'static>>,
    pub since_ms: u64,
}

pub struct Context {
    request: *mut ngx_http_request_t,
    pub stage: Stage,
    pub deadline: ngx_event_t,
    /// When the prompt of an answer that does not stream is taken for prefilled.
    estimate: ngx_event_t,
    pub known: KnownModel,
    pub model: Option<usize>,
    /// `Err(Off)` until the access phase has been through.
    pub prompt: Result<Tokens, Skip>,
    pub counted: bool,
    /// Load alone decides: the last location with a route said `shadow`.
    pub shadow: bool,
    /// Only one server of the upstream could be chosen.
    pub single: bool,
    /// What the ranking chose first; in shadow mode what it would have chosen.
    pub choice: Option<Picked>,
    pub picked: Option<Picked>,
    /// Servers that failed this request.
    pub tried: Vec<ServerId>,
    pub held: Option<Held>,
    /// The choice that was made before nginx asked for a peer.
    pub early: Option<Box<Choice>>,
    /// Within a comment of an event stream, whose first token is still to come.
    pub in_comment: bool,
    /// The blocks that the prompt must leave are looked out for.
    pub expected: Option<Ticket>,
    /// What the engine says of the prompt.
    pub usage: Usage,
    /// Time spent in our part.
    pub spent: Duration,
    pub started: Option<Instant>,
}

impl Context {
    /// The state of a request that has been seen before.
    ///
    /// # Safety
    /// `r` is a live request, and no other reference to its state is in use.
    pub unsafe fn find<'a>(r: *mut ngx_http_request_t) -> Option<&'a mut Context> {
        // SAFETY: our slot of the request's contexts is null or what `attach` put there; the
        // cleanups of a live pool are a list, and the handler tells which data is ours. A
        // subrequest shares its parent's pool, so the request is compared too.
        unsafe {
            let slot = slot(r);
            if (*slot).is_null() {
                let mut cleanup = (*(*r).pool).cleanup;
                while let Some(entry) = cleanup.as_ref() {
                    let ours =
                        entry.handler.is_some_and(|h| ptr::fn_addr_eq(h, release as Handler));
                    if ours && (*entry.data.cast::<Context>()).request == r {
                        *slot = entry.data;
                        break;
                    }
                    cleanup = entry.next;
                }
            }
            (*slot).cast::<Context>().as_mut()
        }
    }

    /// The state of a request, made if there is none. `None` if there is no memory.
    ///
    /// # Safety
    /// As for [`Context::find`].
    pub unsafe fn attach<'a>(r: *mut ngx_http_request_t) -> Option<&'a mut Context> {
        // SAFETY: the pool is live; the cleanup owns the box from here on.
        unsafe {
            if let Some(found) = Context::find(r) {
                return Some(found);
            }
            let cleanup = ngx_pool_cleanup_add((*r).pool, 0).as_mut()?;
            let context = Box::into_raw(Box::new(Context::new(r)));
            cleanup.handler = Some(release);
            cleanup.data = context.cast();
            *slot(r) = context.cast();
            Some(&mut *context)
        }
    }

    fn new(request: *mut ngx_http_request_t) -> Context {
        // SAFETY: an event of zeros is one that is in no queue and no timer.
        let event = || unsafe { std::mem::zeroed::<ngx_event_t>() };
        Context {
            request,
            stage: Stage::New,
            deadline: event(),
            estimate: event(),
            known: KnownModel::default(),
            model: None,
            prompt: Err(Skip::Off),
            counted: false,
            shadow: false,
            single: false,
            choice: None,
            picked: None,
            tried: Vec::new(),
            held: None,
            early: None,
            in_comment: false,
            expected: None,
            usage: Usage::default(),
            spent: Duration::ZERO,
            started: None,
        }
    }

    /// Starts a timer on one of the state's own events.
    pub fn start_deadline(
        &mut self,
        handler: unsafe extern "C" fn(*mut ngx_event_t),
        ms: ngx_msec_t,
    ) {
        self.deadline.handler = Some(handler);
        self.deadline.data = self.request.cast();
        // SAFETY: the request's connection is live; the event is stopped in `stop_deadline`,
        // at the latest when the state is dropped.
        unsafe {
            self.deadline.log = (*(*self.request).connection).log;
            ngx_add_timer(&mut self.deadline, ms);
        }
    }

    pub fn stop_deadline(&mut self) {
        stop(&mut self.deadline);
    }

    /// Leaves the wait for a job, whether or not it is done.
    pub fn leave(&mut self) {
        self.stop_deadline();
        let stage = std::mem::replace(&mut self.stage, Stage::Done);
        if let (Stage::Waiting(job), Some(process)) = (stage, process::get()) {
            process.jobs.cancel(job);
        }
    }

    pub fn streams(&self) -> bool {
        self.prompt.as_ref().is_ok_and(|tokens| tokens.stream)
    }

    /// Counts the request in at a server. `prefill` is how long its prompt should take from now,
    /// for an answer that shows no first token.
    pub fn hold(&mut self, held: Held, prefill: Option<Duration>) {
        self.release();
        self.held = Some(held);
        let Some(prefill) = prefill.filter(|_| !self.streams()) else { return };
        self.estimate.handler = Some(estimated);
        self.estimate.data = self.request.cast();
        // A worker that shuts down need not wait for it.
        self.estimate.set_cancelable(1);
        // SAFETY: as in start_deadline; stopped in `release`.
        unsafe {
            self.estimate.log = (*(*self.request).connection).log;
            ngx_add_timer(&mut self.estimate, prefill.as_millis() as ngx_msec_t + 1);
        }
    }

    /// The first token came: the prompt is no longer queued.
    pub fn prefilled(&mut self, learn: bool) {
        stop(&mut self.estimate);
        let (Some(held), Some(process)) = (&mut self.held, process::get()) else { return };
        let now = process::now_ms();
        if let Some(upstream) = held.upstream.filter(|_| learn) {
            let head = process.loads.head_since(held.reservation.server);
            let elapsed = now.saturating_sub(held.since_ms.max(head));
            learn_rate(&upstream, held.reservation.queued(), elapsed);
        }
        process.loads.prefilled(&mut held.reservation, now);
    }

    /// The first token of an answer came, so the prompt has been computed.
    pub fn answered(&mut self) {
        if let (Some(ticket), Some(process)) = (self.expected.take(), process::get()) {
            process.zone.checks().answered(ticket);
        }
    }

    /// Looks out for the blocks of the prompt on another server, or nowhere any more.
    pub fn expect(&mut self, ticket: Option<Ticket>) {
        let before = std::mem::replace(&mut self.expected, ticket);
        if let (Some(ticket), Some(process)) = (before, process::get()) {
            process.zone.checks().give_up(ticket);
        }
    }

    /// The request left its server.
    pub fn release(&mut self) {
        stop(&mut self.estimate);
        if let (Some(held), Some(process)) = (self.held.take(), process::get()) {
            process.loads.finish(held.reservation, process::now_ms());
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        self.leave();
        self.release();
        self.expect(None);
    }
}

type Handler = unsafe extern "C" fn(*mut c_void);

unsafe extern "C" fn release(data: *mut c_void) {
    super::guard((), || {
        // SAFETY: nginx runs a cleanup once, with the data that attach gave it.
        drop(unsafe { Box::from_raw(data.cast::<Context>()) });
    });
}

unsafe extern "C" fn estimated(event: *mut ngx_event_t) {
    super::guard((), || {
        // SAFETY: the timer is stopped before its request ends.
        if let Some(context) = unsafe { Context::find((*event).data.cast()) } {
            context.prefilled(false);
        }
    });
}

fn stop(event: &mut ngx_event_t) {
    if event.timer_set() == 1 {
        // SAFETY: it is in the timer tree.
        unsafe { ngx_del_timer(event) };
    }
}

/// Our slot in a request's contexts.
unsafe fn slot(r: *mut ngx_http_request_t) -> *mut *mut c_void {
    // SAFETY: the caller's request is live; its contexts have a slot for each http module.
    unsafe { (*r).ctx.add(ngx_http_kvc_aware_module.ctx_index) }
}
