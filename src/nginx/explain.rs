//! Explain: what the module would do with a request, without sending it anywhere.

use nginx_sys::{
    NGX_HTTP_BAD_REQUEST, NGX_HTTP_INTERNAL_SERVER_ERROR, NGX_HTTP_OK,
    NGX_HTTP_SERVICE_UNAVAILABLE, ngx_http_finalize_request, ngx_http_request_t, ngx_int_t,
};
use serde_json::{Map, Value, json};

use super::body::Body;
use super::conf::location_conf;
use super::context::{Context, Stage};
use super::index_page::{self, HYBRID, argument, send, send_error, upstreams};
use super::jobs::{Job, Waiter};
use super::plan::{self, Plan, Seat};
use super::process::{self, Process};
use super::{guard, peers};
use crate::blocks::hash_whole;
use crate::lookup::{self, Scratch};
use crate::prompt::{Endpoint, Outcome, Tokens};
use crate::select::Terms;
use crate::shared::{Difference, Mode};
use crate::types::{ServerId, Skip, Tier};

const FIRST_TOKENS: usize = 8;

/// Status and cause of an answer that explains nothing.
type Refused = (u32, &'static str);
type Answer = Result<Value, Refused>;

pub unsafe extern "C" fn body_is_read(r: *mut ngx_http_request_t) {
    const FAILED: Refused = (NGX_HTTP_INTERNAL_SERVER_ERROR, "internal error");
    // SAFETY: nginx has read the body of a live request.
    unsafe {
        let answered = match Endpoint::from_path(&path(r)) {
            Some(endpoint) => guard(Err(FAILED), || submit(r, endpoint)).err().map(Err),
            None => {
                let skipped = Outcome { model: None, result: Err(Skip::Path) };
                Some(guard(Err(FAILED), || answer(r, &skipped)))
            }
        };
        if let Some(answer) = answered {
            finish(r, answer);
        }
    }
}

unsafe fn submit(r: *mut ngx_http_request_t, endpoint: Endpoint) -> Result<(), Refused> {
    // SAFETY: the request is live and its body is read.
    unsafe {
        let process =
            process::get().ok_or((NGX_HTTP_SERVICE_UNAVAILABLE, "kvc_aware is not active"))?;
        let unreadable = (NGX_HTTP_BAD_REQUEST, "the body cannot be read");
        let body = Body::collect(r).map_err(|_| unreadable)?;
        let context = Context::attach(r).ok_or(unreadable)?;
        let job = Job {
            endpoint,
            body,
            max_text: location_conf(r).max_text(),
            deadline: None,
            want_text: true,
            known: context.known.clone(),
        };
        let waiter = Waiter { request: r, resume };
        let id = process
            .jobs
            .submit(job, waiter)
            .map_err(|_| (NGX_HTTP_SERVICE_UNAVAILABLE, "the tokenizer queue is full"))?;
        context.stage = Stage::Waiting(id);
    }
    Ok(())
}

unsafe fn path(r: *mut ngx_http_request_t) -> String {
    // SAFETY: the caller's request is live.
    unsafe { argument(r, "path") }.unwrap_or_else(|| "/v1/chat/completions".to_owned())
}

unsafe fn resume(r: *mut ngx_http_request_t, outcome: Outcome) {
    // SAFETY: the job's number was still known, so the request is live.
    unsafe {
        if let Some(context) = Context::find(r) {
            context.leave();
        }
        let answer =
            guard(Err((NGX_HTTP_INTERNAL_SERVER_ERROR, "internal error")), || answer(r, &outcome));
        let connection = (*r).connection;
        finish(r, answer);
        nginx_sys::ngx_http_run_posted_requests(connection);
    }
}

unsafe fn finish(r: *mut ngx_http_request_t, answer: Answer) {
    // SAFETY: the request is live and unanswered.
    unsafe {
        let rc: ngx_int_t = match answer {
            Ok(body) => send(r, NGX_HTTP_OK, &body),
            Err((status, cause)) => send_error(r, status, cause),
        };
        ngx_http_finalize_request(r, rc);
    }
}

unsafe fn answer(r: *mut ngx_http_request_t, outcome: &Outcome) -> Answer {
    let process =
        process::get().ok_or((NGX_HTTP_SERVICE_UNAVAILABLE, "kvc_aware is not active"))?;
    if outcome.result == Err(Skip::BadJson) {
        return Err((NGX_HTTP_BAD_REQUEST, "the body is no JSON object"));
    }
    // SAFETY: the request is live.
    let (conf, path, wanted, show_tokens) = unsafe {
        let wanted = argument(r, "upstream");
        let conf = upstreams(r).find(|conf| wanted.as_ref().is_none_or(|name| *name == conf.name));
        let conf = conf.ok_or((NGX_HTTP_BAD_REQUEST, "no such upstream"))?;
        let all = argument(r, "tokens").as_deref() == Some("all");
        let text = argument(r, "text").as_deref() == Some("1");
        (conf, path(r), (all, text), location_conf(r).index.unwrap_or_default().tokens)
    };
    let tokens = outcome.result.as_ref().ok();
    // SAFETY: the upstream is live and nothing holds its lock.
    let plan = unsafe { plan::make(process, conf, peers::of(conf.upstream), tokens, &[], false) };
    let mut shown = prompt(process, outcome, &path);
    if let Some(tokens) = tokens {
        let (all, text) = wanted;
        if show_tokens {
            shown["first_tokens"] = json!(tokens.ids.iter().take(FIRST_TOKENS).collect::<Vec<_>>());
        }
        if text {
            shown["text"] = json!(tokens.text.as_deref().unwrap_or_default());
        }
        if show_tokens && all {
            shown["tokens"] = json!(tokens.ids);
        }
    }
    let servers: Vec<Value> = plan.seats.iter().map(|seat| server(process, &plan, seat)).collect();
    let first = plan.ranked.first().map(|place| &plan.seats[place.candidate]);
    shown["servers"] = json!(servers);
    shown["choice"] = json!(first.map(|seat| address(process, seat)).unwrap_or_default());
    shown["status"] = json!(status(outcome, &plan, first));
    let differs = tokens.and_then(|tokens| differs(process, &plan, tokens));
    shown["why"] = json!(why(process, outcome, &plan, differs.as_ref()).unwrap_or_default());
    shown["differs"] =
        differs.map_or(Value::Null, |found| index_page::difference(process, &found, show_tokens));
    Ok(shown)
}

fn prompt(process: &Process, outcome: &Outcome, path: &str) -> Value {
    let tokens = outcome.result.as_ref();
    let reason = match &outcome.result {
        Ok(tokens) => tokens.exact.reason().unwrap_or_default().to_owned(),
        Err(skip) => skip.name().to_owned(),
    };
    json!({
        "model": outcome.model.map_or("", |model| process.models.name(model)),
        "path": path,
        "exact": reason.is_empty(),
        "reason": reason,
        "text_length": tokens.map_or(0, |tokens| tokens.text_len),
        "prompt_tokens": tokens.map_or(0, |tokens| tokens.ids.len()),
    })
}

fn address(process: &Process, seat: &Seat) -> String {
    process.zone.server(seat.id).address()
}

fn server(process: &Process, plan: &Plan, seat: &Seat) -> Value {
    let row = process.zone.server(seat.id);
    let tiers: Map<String, Value> = Tier::ALL
        .iter()
        .map(|tier| (tier.name().to_owned(), seat.found.overlap.tiers[*tier as usize]))
        .filter(|(_, blocks)| *blocks > 0)
        .map(|(name, blocks)| (name, blocks.into()))
        .collect();
    let place = plan.ranked.iter().find(|place| plan.seats[place.candidate].id == seat.id);
    let terms = place.map(|place| match place.terms {
        Terms::Cost { backlog, prefill, decode } => {
            json!({ "backlog": backlog, "prefill": prefill, "decode": decode })
        }
        Terms::Weighted { cache, tier, load } => {
            json!({ "cache": cache, "tier": tier, "load": load })
        }
    });
    json!({
        "server": row.address(),
        "rank": row.rank(),
        "mode": seat.found.mode.name(),
        "usable": seat.usable,
        "block_size": seat.found.block_size,
        "prompt_blocks": seat.found.prompt_blocks,
        "matched_blocks": seat.found.overlap.blocks,
        "matched_tokens": seat.found.matched_tokens(),
        "tiers": tiers,
        "in_flight": seat.load.in_flight,
        "queued_tokens": seat.load.queued_tokens,
        "score": place.map(|place| place.terms.score()),
        "terms": terms,
    })
}

fn status(outcome: &Outcome, plan: &Plan, first: Option<&Seat>) -> String {
    match &outcome.result {
        Err(skip) => skip.to_string(),
        Ok(_) if plan.busy => Skip::IndexBusy.to_string(),
        Ok(_) if plan.seats.len() == 1 => "single".to_owned(),
        Ok(_) if first.is_some_and(|seat| seat.found.overlap.blocks > 0) => "hit".to_owned(),
        Ok(_) => "miss".to_owned(),
    }
}

/// Why nobody holds anything of the prompt; `None` where somebody does.
fn why(
    process: &Process,
    outcome: &Outcome,
    plan: &Plan,
    differs: Option<&Difference>,
) -> Option<String> {
    let tokens = match &outcome.result {
        Ok(tokens) => tokens,
        Err(skip) => return Some(format!("not tokenized: {}", skip.name())),
    };
    if plan.busy {
        return Some("the index changed faster than it could be read".to_owned());
    }
    if plan.seats.iter().any(|seat| seat.found.overlap.blocks > 0) {
        return None;
    }
    if let Some(found) = differs {
        let server = process.zone.server(found.server).address();
        return Some(format!("block {} of this prompt has other tokens on {server}", found.block));
    }
    let heard = |seat: &&Seat| seat.found.mode != Mode::Approximate;
    let Some(seat) = plan.seats.iter().find(heard) else {
        return Some(no_events(process, plan).to_owned());
    };
    let size = seat.found.block_size;
    Some(if seat.found.hybrid {
        HYBRID.to_owned()
    } else if size == 0 {
        "no block has been stored yet, so the block size is not known".to_owned()
    } else if seat.found.prompt_blocks == 0 {
        format!("the prompt has {} tokens, no more than one block of {size}", tokens.ids.len())
    } else {
        first_block(process, plan, tokens).to_owned()
    })
}

/// The first block of this prompt that an engine was seen to make of other tokens.
fn differs(process: &Process, plan: &Plan, tokens: &Tokens) -> Option<Difference> {
    let model = process.key(tokens.model);
    let (key, lora, salt) =
        (process.zone.hash_key(), tokens.lora.as_deref(), tokens.salt.as_deref());
    let mut hashes = Vec::new();
    process.zone.differences().newest().find(|found| {
        let here = plan.seats.iter().any(|seat| seat.id == found.server);
        if found.model != model || !here {
            return false;
        }
        hash_whole(&key, found.block_size, lora, salt, &tokens.ids, &mut hashes);
        hashes.get(found.block as usize) == Some(&found.hash)
    })
}

fn no_events(process: &Process, plan: &Plan) -> &'static str {
    let wrong = |seat: &Seat| index_page::error(&process.zone.server(seat.id));
    let cause = plan.seats.iter().map(wrong).find(|cause| !cause.is_empty());
    cause.unwrap_or("no server sends events, and no prompt that begins like this was routed lately")
}

/// The first block is nowhere: is it there under another key?
fn first_block(process: &Process, plan: &Plan, tokens: &Tokens) -> &'static str {
    let ids: Vec<ServerId> = plan.seats.iter().map(|seat| seat.id).collect();
    let held = |tokens: &Tokens| {
        let prompt = Some((tokens, process.key(tokens.model)));
        lookup::overlap(process.zone, &process.index, prompt, &ids, &mut Scratch::default())
            .is_ok_and(|found| found.iter().any(|found| found.overlap.blocks > 0))
    };
    let without = |salt: bool, lora: bool| {
        let mut other = tokens.clone();
        other.salt = other.salt.filter(|_| !salt);
        other.lora = other.lora.filter(|_| !lora);
        held(&other)
    };
    let blocks: u64 = ids.iter().flat_map(|id| process.index.server_blocks(*id)).sum();
    if tokens.salt.is_some() && without(true, false) {
        "the same prompt is held without this cache_salt"
    } else if tokens.lora.is_some() && without(false, true) {
        "the same prompt is held for another adapter or the base model"
    } else if blocks == 0 {
        "no server holds any block"
    } else {
        "no server holds the prompt's first block"
    }
}
