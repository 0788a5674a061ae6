//! The access phase handler: reads the body and has it tokenized, before an upstream is chosen.

use std::time::{Duration, Instant};

use nginx_sys::{
    NGX_AGAIN, NGX_DECLINED, NGX_DONE, NGX_HTTP_POST, NGX_HTTP_SATISFY_ANY,
    NGX_HTTP_SPECIAL_RESPONSE, ngx_event_t, ngx_http_block_reading, ngx_http_core_loc_conf_t,
    ngx_http_core_module, ngx_http_core_run_phases, ngx_http_finalize_request,
    ngx_http_read_client_request_body, ngx_http_request_empty_handler, ngx_http_request_t,
    ngx_http_run_posted_requests, ngx_http_test_reading, ngx_int_t, ngx_post_event,
    ngx_posted_events,
};

use super::body::Body;
use super::conf::{Route, location_conf};
use super::context::{Context, Stage};
use super::guard;
use super::jobs::{Job, Waiter};
use super::log::log;
use super::process::{self, Process};
use crate::prompt::{Endpoint, Outcome};
use crate::types::Skip;

const DECLINED: ngx_int_t = NGX_DECLINED as ngx_int_t;

pub unsafe extern "C" fn handler(r: *mut ngx_http_request_t) -> ngx_int_t {
    // Under `satisfy any` one who is refused by the others still gets here.
    // SAFETY: nginx gives a live request.
    let wait = unsafe { core_conf(r).satisfy } as u32 == NGX_HTTP_SATISFY_ANY;
    // SAFETY: as above.
    if wait { DECLINED } else { guard(DECLINED, || unsafe { enter(r) }) }
}

/// The same in the phase after access, for `satisfy any`: there the first that grants access keeps
/// the last handler from being asked.
pub unsafe extern "C" fn precontent(r: *mut ngx_http_request_t) -> ngx_int_t {
    // SAFETY: nginx gives a live request.
    guard(DECLINED, || unsafe { enter(r) })
}

unsafe fn core_conf<'a>(r: *mut ngx_http_request_t) -> &'a ngx_http_core_loc_conf_t {
    // SAFETY: each location has the core module's configuration.
    unsafe { &*(*(*r).loc_conf.add(ngx_http_core_module.ctx_index)).cast() }
}

unsafe fn enter(r: *mut ngx_http_request_t) -> ngx_int_t {
    // SAFETY: the request is live; no other reference to its state exists between callbacks.
    unsafe {
        let route = location_conf(r).route();
        if route == Route::Off || (*r).main != r || process::get().is_none() {
            return DECLINED;
        }
        let Some(context) = Context::attach(r) else { return DECLINED };
        context.shadow = route == Route::Shadow;
        match context.stage {
            Stage::New => {}
            // The phases rest while nginx reads. They run again where it could not read the body
            // and an error_page leads the request elsewhere.
            Stage::Reading => return skip(context, Skip::NoBody),
            Stage::Waiting(_) => return NGX_AGAIN as ngx_int_t,
            Stage::Done => return DECLINED,
        }
        if let Err(reason) = endpoint(r) {
            return skip(context, reason);
        }
        context.stage = Stage::Reading;
        let rc = ngx_http_read_client_request_body(r, Some(body_is_read));
        if rc >= NGX_HTTP_SPECIAL_RESPONSE as ngx_int_t {
            return rc;
        }
        // Gives back what the reading has counted; the request itself goes on counting one.
        ngx_http_finalize_request(r, NGX_DONE as ngx_int_t);
        NGX_DONE as ngx_int_t
    }
}

/// Leaves a request to the load alone.
fn skip(context: &mut Context, reason: Skip) -> ngx_int_t {
    context.prompt = Err(reason);
    context.stage = Stage::Done;
    DECLINED
}

/// The API that a request speaks, by method and path.
unsafe fn endpoint(r: *mut ngx_http_request_t) -> Result<Endpoint, Skip> {
    // SAFETY: the request is live.
    let (method, uri) = unsafe { ((*r).method as u32, (*r).uri.as_bytes()) };
    if method & NGX_HTTP_POST == 0 {
        return Err(Skip::Method);
    }
    std::str::from_utf8(uri).ok().and_then(Endpoint::from_path).ok_or(Skip::Path)
}

unsafe extern "C" fn body_is_read(r: *mut ngx_http_request_t) {
    // SAFETY: nginx has read the body of a live request.
    let waits = guard(Err(Skip::Failed), || unsafe { submit(r) });
    if let Err(skip) = waits {
        // SAFETY: as above.
        unsafe {
            settle(r, None, skip);
            go_on(r);
        }
    }
}

/// Hands the body to a job thread.
unsafe fn submit(r: *mut ngx_http_request_t) -> Result<(), Skip> {
    // SAFETY: the request is live and its body is read.
    unsafe {
        let process = process::get().ok_or(Skip::Failed)?;
        let context = Context::find(r).ok_or(Skip::Failed)?;
        let body = Body::collect(r).map_err(|_| Skip::Failed)?;
        if body.len() == 0 {
            return Err(Skip::NoBody);
        }
        let (conf, now) = (location_conf(r), Instant::now());
        context.started = Some(now);
        let job = Job {
            endpoint: endpoint(r)?,
            body,
            max_text: conf.max_text(),
            deadline: now.checked_add(Duration::from_millis(conf.deadline() as u64)),
            want_text: false,
            known: context.known.clone(),
        };
        let id =
            process.jobs.submit(job, Waiter { request: r, resume }).map_err(|_| Skip::QueueFull)?;
        context.stage = Stage::Waiting(id);
        // A timer that holds back the exit of a worker: the request must not be dropped by it.
        context.start_deadline(deadline, conf.deadline());
        (*r).write_event_handler = Some(ngx_http_request_empty_handler);
        if process.ignores_abort.is_some_and(|flag| flag.is_on(r)) {
            (*r).read_event_handler = Some(ngx_http_block_reading);
            return Ok(());
        }
        (*r).read_event_handler = Some(ngx_http_test_reading);
        // The client may have gone already, with the last bytes of its body: no event tells of it
        // again.
        let read = (*(*r).connection).read;
        if (*read).ready() == 1 {
            ngx_post_event(read, &raw mut ngx_posted_events);
        }
        Ok(())
    }
}

/// A job has come to its end. Called from the event loop.
unsafe fn resume(r: *mut ngx_http_request_t, outcome: Outcome) {
    // SAFETY: the job's number was still known, so the request is live.
    unsafe {
        let connection = (*r).connection;
        if let Some(context) = Context::find(r) {
            context.leave();
            context.spent += context.started.map(|at| at.elapsed()).unwrap_or_default();
            log_outcome(r, &outcome);
            context.model = outcome.model;
            context.prompt = outcome.result;
        }
        go_on(r);
        ngx_http_run_posted_requests(connection);
    }
}

unsafe fn log_outcome(r: *mut ngx_http_request_t, outcome: &Outcome) {
    // SAFETY: the request's connection is live.
    let target = unsafe { (*(*r).connection).log };
    match &outcome.result {
        Ok(tokens) => log!(DEBUG, target, "kvc_aware: {} prompt tokens", tokens.ids.len()),
        Err(skip) => log!(DEBUG, target, "kvc_aware: {skip}"),
    }
}

unsafe extern "C" fn deadline(event: *mut ngx_event_t) {
    // SAFETY: the timer is stopped before its request ends.
    guard((), || unsafe {
        let r = (*event).data.cast::<ngx_http_request_t>();
        let connection = (*r).connection;
        if let Some(context) = Context::find(r) {
            context.leave();
            let model = context.known.get();
            settle(r, model, Skip::Deadline);
        }
        go_on(r);
        ngx_http_run_posted_requests(connection);
    });
}

/// Ends the access phase without tokens. The model still is wanted: it may choose the upstream.
unsafe fn settle(r: *mut ngx_http_request_t, model: Option<usize>, skip: Skip) {
    // SAFETY: the request is live and its body is read.
    unsafe {
        let named = model.or_else(|| guard(None, || process::get().and_then(|p| named(p, r))));
        if let Some(context) = Context::find(r) {
            context.stage = Stage::Done;
            context.spent += context.started.map(|at| at.elapsed()).unwrap_or_default();
            context.model = named;
            context.prompt = Err(skip);
        }
    }
}

unsafe fn named(process: &Process, r: *mut ngx_http_request_t) -> Option<usize> {
    // SAFETY: the body is read.
    let body = unsafe { Body::collect(r) }.and_then(Body::read).ok()?;
    process.models.named_by(&body)
}

/// Lets the phases go on where they stopped.
unsafe fn go_on(r: *mut ngx_http_request_t) {
    // SAFETY: the request is live; nothing of it is borrowed here.
    unsafe {
        (*r).read_event_handler = Some(ngx_http_block_reading);
        (*r).write_event_handler = Some(ngx_http_core_run_phases);
        ngx_http_core_run_phases(r);
    }
}
