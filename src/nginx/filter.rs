//! What an answer tells: its first token, which is the first bytes of a stream that are no comment,
//! and the engine's usage report.

use std::cell::UnsafeCell;

use nginx_sys::{
    NGX_HTTP_OK, NGX_OK, ngx_chain_t, ngx_conf_t, ngx_http_output_body_filter_pt,
    ngx_http_request_t, ngx_http_top_body_filter, ngx_int_t,
};

use super::context::Context;
use super::guard;
use super::log::log;
use super::process;
use crate::trust::{self, Verdict};

struct Next(UnsafeCell<ngx_http_output_body_filter_pt>);

// SAFETY: written while the configuration is read, read by the same thread or, after the fork, by
// the one thread of a worker that handles requests.
unsafe impl Sync for Next {}

static NEXT: Next = Next(UnsafeCell::new(None));

pub unsafe extern "C" fn postconfiguration(_cf: *mut ngx_conf_t) -> ngx_int_t {
    // SAFETY: nginx builds the chain of filters while it reads the configuration.
    unsafe {
        *NEXT.0.get() = ngx_http_top_body_filter;
        ngx_http_top_body_filter = Some(body_filter);
    }
    NGX_OK as ngx_int_t
}

unsafe extern "C" fn body_filter(r: *mut ngx_http_request_t, chain: *mut ngx_chain_t) -> ngx_int_t {
    // SAFETY: nginx gives a live request and a chain of buffers; the next filter was set above.
    unsafe {
        guard((), || watch(r, chain));
        match *NEXT.0.get() {
            Some(next) => next(r, chain),
            None => NGX_OK as ngx_int_t,
        }
    }
}

unsafe fn watch(r: *mut ngx_http_request_t, chain: *mut ngx_chain_t) {
    // SAFETY: the caller's.
    unsafe {
        if (*r).upstream.is_null() || process::get().is_none() {
            return;
        }
        let Some(context) = Context::find(r) else { return };
        let answered = context.prompt.is_ok() && (*r).headers_out.status == NGX_HTTP_OK as usize;
        let queued = context.held.as_ref().is_some_and(|held| held.reservation.queued() > 0);
        let streams = is_stream(&*r);
        let mut waiting = streams && (queued || context.expected.is_some());
        let mut link = chain;
        while let Some(entry) = link.as_ref() {
            let buf = &*entry.buf;
            if !buf.pos.is_null() && buf.last > buf.pos {
                let len = buf.last.offset_from(buf.pos) as usize;
                let bytes = std::slice::from_raw_parts(buf.pos, len);
                if waiting && has_data(bytes, &mut context.in_comment) {
                    if queued {
                        context.prefilled(answered);
                    }
                    waiting = false;
                }
                if answered && !waiting {
                    context.answered();
                }
                if answered {
                    context.usage.feed(bytes);
                }
            }
            if answered && buf.last_buf() == 1 {
                reported(r, context);
            }
            link = entry.next;
        }
    }
}

/// Compares what the engine says of the prompt with what was made and foretold of it here.
unsafe fn reported(r: *mut ngx_http_request_t, context: &mut Context) {
    let usage = std::mem::take(&mut context.usage);
    let (Some(process), Ok(tokens), Some(picked)) =
        (process::get(), &context.prompt, &context.picked)
    else {
        return;
    };
    if tokens.exact.reason().is_some() {
        return;
    }
    let (row, made) = (process.zone.server(picked.server), tokens.ids.len() as u32);
    let (key, model) = (process.key(tokens.model), process.models.name(tokens.model));
    // SAFETY: the caller's request is live.
    let log = unsafe { (*(*r).connection).log };
    match trust::reported(&row, key, &usage, made, picked.matched_tokens) {
        Verdict::Unchanged => {}
        Verdict::Distrusted => log!(
            WARN,
            log,
            "kvc_aware: server {} counts {} prompt tokens where {made} were made for model \
             \"{model}\": its tokenizer or chat template is another, events are not used for it",
            picked.name,
            usage.prompt.unwrap_or_default()
        ),
        Verdict::Trusted => log!(
            NOTICE,
            log,
            "kvc_aware: server {} counts the prompt tokens that are made for model \"{model}\", \
             events are used",
            picked.name
        ),
    }
}

fn is_stream(r: &ngx_http_request_t) -> bool {
    r.headers_out.content_type.as_bytes().starts_with(b"text/event-stream")
}

/// Whether a stretch of an event stream holds more than comments, which servers send to keep a
/// connection open before there is a token. `in_comment` is kept from one stretch to the next.
fn has_data(bytes: &[u8], in_comment: &mut bool) -> bool {
    for byte in bytes {
        match byte {
            b'\n' | b'\r' => *in_comment = false,
            _ if *in_comment => {}
            b':' => *in_comment = true,
            _ => return true,
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_are_no_token() {
        let mut in_comment = false;
        assert!(!has_data(b": ping\n\n: pi", &mut in_comment));
        assert!(in_comment);
        assert!(!has_data(b"ng data: x", &mut in_comment));
        assert!(!has_data(b"\r\n\r\n", &mut in_comment));
        assert!(has_data(b"data: {}\n\n", &mut in_comment));
    }
}
